"""Open alerts in Redis, for several hubs: each is opened, renewed and ended by one of them."""

from typing import Any, Final

from headgate.errors import StoreAway
from headgate.stores.base import MAX_ALERTS, AlertOutcome
from headgate.stores.redis.clients import ERRORS, Clients, explained, text_of
from headgate.stores.redis.protocol import FORMAT
from headgate.stores.redis.script import part

_CHANGE: Final = part("alerts.lua")
_KEPT: Final = 86_400_000  # milliseconds: what no hub has changed for a day is forgotten


class RedisAlerts:
    """The texts of open alerts in a server, by agent. Whoever changes one says what it knows to stand there.

    While the server is away every call raises `StoreAway`; the change may have been made all the same.
    """

    def __init__(self, clients: Clients, prefix: str) -> None:
        self._clients: Final = clients
        self._start: Final = f"{prefix}{{alerts}}a{FORMAT}:"  # the braces keep all in one slot of a cluster

    async def read(self) -> dict[str, str]:
        """All that are open."""
        try:
            found: Any = await (await self._clients.aclient()).hgetall(f"{self._start}open")
        except ERRORS as error:
            raise StoreAway(f"the open alerts can't be read: {explained(error)}") from error
        return {text_of(agent): text_of(text) for agent, text in found.items()}

    async def put(self, agent: str, alert_id: str, known: str, text: str) -> tuple[AlertOutcome, str]:
        """Put a text in the place of what is known to stand there ("" for nothing).

        It is "done", or nothing was: something "other" stands there, this alert has been "ended" before (both with the
        text), or there are too many ("full").
        """
        return await self._change("put", agent, alert_id, known, text)

    async def end(self, agent: str, alert_id: str, known: str, text: str) -> tuple[AlertOutcome, str]:
        """End an alert, and keep the text for those who ask for it later: "done", or "other" as with `put`."""
        return await self._change("end", agent, alert_id, known, text)

    async def _change(self, verb: str, agent: str, alert_id: str, known: str, text: str) -> tuple[AlertOutcome, str]:
        keys = [f"{self._start}open", f"{self._start}ended:{alert_id}"]
        try:
            client = await self._clients.aclient()
            work: Any = client.eval(_CHANGE, len(keys), *keys, verb, agent, known, text, str(MAX_ALERTS), str(_KEPT))
            outcome, found = await work
        except ERRORS as error:
            raise StoreAway(f"an alert can't be changed: {explained(error)}") from error
        return text_of(outcome), text_of(found)  # type: ignore[return-value]
