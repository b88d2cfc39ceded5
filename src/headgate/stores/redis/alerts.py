"""Open alerts in Redis, shared by several hubs: each is opened, renewed and ended by one of them."""

from typing import Any, Final

from headgate.stores.base import MAX_ALERTS, AlertOutcome
from headgate.stores.redis.clients import Clients
from headgate.stores.redis.keys import FORMAT
from headgate.stores.redis.resp import text_of
from headgate.stores.redis.script import part
from headgate.stores.redis.server_errors import server_errors

_CHANGE: Final = part("alerts.lua")
_KEPT_FOR: Final = 86_400_000  # milliseconds without a change, after which an alert is forgotten


class RedisAlerts:
    """See `SharedAlerts`."""

    def __init__(self, clients: Clients, prefix: str) -> None:
        self._clients: Final = clients
        self._start: Final = f"{prefix}{{alerts}}a{FORMAT}:"  # the braces keep all in one slot of a cluster

    async def read(self) -> dict[str, str]:
        with server_errors("the open alerts can't be read"):
            found: Any = await self._clients.acall(lambda client: client.hgetall(f"{self._start}open"))
        return {text_of(agent): text_of(text) for agent, text in found.items()}

    async def put(self, agent: str, alert_id: str, known: str, text: str) -> tuple[AlertOutcome, str]:
        return await self._change("put", agent, alert_id, known, text)

    async def end(self, agent: str, alert_id: str, known: str, text: str) -> tuple[AlertOutcome, str]:
        return await self._change("end", agent, alert_id, known, text)

    async def _change(self, verb: str, agent: str, alert_id: str, known: str, text: str) -> tuple[AlertOutcome, str]:
        keys = [f"{self._start}open", f"{self._start}ended:{alert_id}"]
        words = (verb, agent, known, text, str(MAX_ALERTS), str(_KEPT_FOR))
        with server_errors("an alert can't be changed"):
            outcome, found = await self._clients.acall(lambda client: client.eval(_CHANGE, len(keys), *keys, *words))
        return text_of(outcome), text_of(found)  # type: ignore[return-value]
