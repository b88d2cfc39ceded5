"""Carries out requests: batched with those of other callers, after a look at the server, and again if it says so."""

import asyncio
from collections.abc import Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary

from redis.crc import key_slot

from headgate.errors import StoreAway, refuse
from headgate.flow import Flow, adrive, drive
from headgate.stores.base import Ask
from headgate.stores.redis.ask_again import AskAgain
from headgate.stores.redis.batching import LoopBatcher, ScriptRunner, ThreadBatcher
from headgate.stores.redis.clients import Clients, running_loop
from headgate.stores.redis.keys import Keys
from headgate.stores.redis.protocol import Answer, Request
from headgate.stores.redis.startup import Startup

_MAX_REPEATS: Final = 2000


class RequestExecutor:
    """Has requests carried out by the script in a server, for threads and for event loops."""

    def __init__(self, keys: Keys, clients: Clients, runner: ScriptRunner, timeout: float) -> None:
        self._keys: Final = keys
        self._clients: Final = clients
        self._runner: Final = runner
        self._loop_batchers: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, LoopBatcher]] = WeakKeyDictionary()
        self._parents: Final[list[object]] = []
        self.thread_batcher: Final = ThreadBatcher(runner, timeout)
        self.startup: Final = Startup(runner)

    def execute(self, request: Request[Answer]) -> Answer:
        """Have a request carried out; raises `StoreAway` or `ForeignData`."""
        if not self.startup.done:
            drive(self.startup.run(), lambda _: self.info())
        try:
            return self.thread_batcher.execute(request)
        except AskAgain as again:
            answer: Answer = drive(self._repeat(again), self.thread_batcher.execute)
            return answer

    def execute_all(self, requests: list[Request[Any]]) -> None:
        """Have many requests carried out in a few calls: each gets its answer, or an error as its answer."""
        if not self.startup.done:
            drive(self.startup.run(), lambda _: self.info())
        self.thread_batcher.execute_all(requests)

    async def aexecute(self, request: Request[Answer]) -> Answer:
        loop = running_loop()
        if not self.startup.done:
            await adrive(self.startup.run(), lambda _: self.ainfo())
        batcher = self._loop_batchers.get(loop)
        if batcher is None:
            for closed in [other for other in list(self._loop_batchers) if other.is_closed()]:
                self._loop_batchers.pop(closed, None)  # its tasks would keep it alive
            batcher = self._loop_batchers[loop] = LoopBatcher(self._runner)
        try:
            return await batcher.execute(request)
        except AskAgain as again:
            answer: Answer = await adrive(self._repeat(again), batcher.execute)
            return answer

    def _repeat(self, asked: AskAgain) -> Flow[Request[Any], Any]:
        """Ask again, until the server has done all that it has to before."""
        for _ in range(_MAX_REPEATS):
            if asked.outside:
                self._keys.note_server_time(asked.server_time)
            try:
                assert asked.request is not None
                return (yield asked.request.again())
            except AskAgain as again:
                asked = again
        raise StoreAway(str(asked))

    def check_several(self, asks: Sequence[Ask], keys: list[bytes]) -> None:
        """Refuse several asks that one call of the script can't decide."""
        if len(set(keys)) < len(keys):
            refuse("asks", "each key once", [ask.key for ask in asks])
        if self._clients.cluster and len({key_slot(key) for key in keys}) > 1:
            refuse("asks", "keys in one slot of the cluster: the same key in each", [ask.key for ask in asks])

    def info(self) -> Any:
        """The server's answer to INFO."""
        return self._clients.call(_info, timeouts=1)

    def ainfo(self) -> Any:
        return self._clients.acall(_info, timeouts=1)

    def after_fork(self) -> None:
        """In a forked process: replace what can't be shared with the parent."""
        self._parents.append(dict(self._loop_batchers))  # kept alive, like the parent's clients
        self._loop_batchers.clear()
        self.startup.after_fork()
        self.thread_batcher.after_fork()


def _info(client: Any) -> Any:
    return client.info()
