"""Clients of a hub's decision service for holds: reserve what a call may cost, and settle what it has cost.

The client makes the id of each hold, so that a request whose answer was lost can be repeated. `hold_flows` has what a
client does; the two clients here differ only in how they carry it out.
"""

import asyncio
import logging
import threading
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self, Unpack
from uuid import uuid4

from headgate._hold_async import to_its_end
from headgate.client.hold_flows import (
    ClientHoldFlows,
    Costs,
    HoldClientFlows,
    HoldClientOptions,
    Pause,
    SendRequest,
    Step,
)
from headgate.client.url import is_loopback
from headgate.errors import HeadgateError
from headgate.flow import Flow, adrive, drive
from headgate.gate.account_status import AccountStatus
from headgate.holds import PendingHold
from headgate.limits.clock import Clock
from headgate.limits.numbers import Number

try:
    import httpx
except ImportError as missing:
    raise HeadgateError(
        f"headgate.client.holds: expected the package httpx, got: {missing}; in a checkout: pip install '.[client]'"
    ) from missing

_HANGING_UP: Final = 500_000  # microseconds until a hub has surely seen it
_log: Final = logging.getLogger("headgate.client")

# For event loops ------------------------------------------------------------------------------------------------------


class ClientHold(ClientHoldFlows["HoldClient"]):
    """A hold of a hub. In `async with` its lease is renewed, and it is settled at the end.

    If the block raises, it ends as if its lease had: costs stay counted. If more than that was used, it is settled.
    """

    _renewer: asyncio.Task[None] | None = None

    async def settle(self, costs: Costs | None = None) -> None:
        """End it with these costs, or else with what `use` has added up; for other resources, what is reserved."""
        await self._client._drive(self._settle(costs))

    async def cancel(self) -> None:
        """End it, and give back all that it has reserved."""
        await self._client._drive(self._cancel())

    async def extend(self, costs: Costs | None = None, *, lease: Number | None = None) -> None:
        """Reserve so much more, or raise `HoldDenied`; and let the lease end `lease` seconds from now."""
        await self._client._drive(self._extend(costs, lease))

    async def __aenter__(self) -> Self:
        self._check_open()
        self._renewer = asyncio.get_running_loop().create_task(self._client._drive(self._renew_lease()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await to_its_end(self._end(error is not None))

    async def _end(self, failed: bool) -> None:
        if self._renewer is not None:
            self._renewer.cancel()
            with suppress(asyncio.CancelledError):
                await self._renewer
        if self.state in ("open", "expired"):
            await self._client._drive(self._end_block(failed))


class HoldClient(HoldClientFlows):
    """A program's connection to the decision service of a hub.

    `url` is the hub's address, `token` an agent's token, or an admin's: then `agent` is the one that holds. A request
    that gets no answer within `answer_within` seconds, or that the hub can't decide at the moment, is sent again for
    `retry_within` seconds. Denials are not repeated: `HoldDenied` says what bound, and how long to wait.

        async with HoldClient("http://localhost:8080", token) as client:
            async with client.hold({"tokens": 1200, "usd": "0.03"}, session="run-42") as hold:
                answer = await ask_the_model()
                hold.use({"tokens": answer.usage.total_tokens})
    """

    def __init__(
        self, url: str, token: str, *, http: httpx.AsyncClient | None = None, **options: Unpack[HoldClientOptions]
    ) -> None:
        super().__init__(url, token, options)
        self._http: Final = httpx.AsyncClient(trust_env=not is_loopback(url)) if http is None else http
        self._abandoned: Final[set[asyncio.Task[None]]] = set()

    def hold(
        self,
        costs: Costs,
        *,
        session: str | int | None = None,
        tool: str | None = None,
        lease: Number | None = None,
        timeout: Number = 0,
        hold_id: str | None = None,
        max_age: float | None = 3600,
    ) -> PendingHold[ClientHold]:
        """Reserve costs on the agent and all accounts above it, or raise `HoldDenied`. To be awaited or entered.

        `timeout`: seconds for which the hub lets it wait. `max_age`: a block renews its lease for so many seconds.
        """
        name = uuid4().hex if hold_id is None else hold_id

        async def make() -> ClientHold:
            flow = self._make(costs, session, tool, lease, timeout, name)
            task = asyncio.get_running_loop().create_task(self._drive(flow))
            try:
                answer = await asyncio.shield(task)
            except asyncio.CancelledError:
                self._abandon(task, name, waits=bool(timeout))
                raise
            return ClientHold(self, answer, lease, max_age)

        return PendingHold(make, "hold", "`SyncHoldClient` is the one")

    def _abandon(self, making: asyncio.Task[Any], hold_id: str, *, waits: bool) -> None:
        """Cancel a hold that nobody waits for any more: else it would keep its cost.

        One that waits in line at the hub hangs up, so that it keeps nobody waiting; the hub may grant it at the same
        moment. Others have their answer soon.
        """

        async def cancel() -> None:
            if waits:
                making.cancel()
            await asyncio.wait((making,))
            try:
                if making.cancelled():
                    await self._pause(_HANGING_UP)
                else:
                    making.result()
                await self._drive(self._change(hold_id, "cancel"))
            except HeadgateError as error:  # it was denied, or never made, as a rule
                _log.debug("hold %r was not cancelled: %s", hold_id, error)

        task = asyncio.get_running_loop().create_task(cancel())
        self._abandoned.add(task)
        task.add_done_callback(self._abandoned.discard)

    async def find_hold(self, hold_id: str) -> ClientHold:
        """A hold that was made before, perhaps by another process; raises `UnknownHold`."""
        answer = await self._drive(self._find(hold_id))
        return ClientHold(self, answer, 60.0, 3600)

    async def account(self, path: str) -> AccountStatus:
        """An account on the agent's path, with its limits and what is left of them."""
        found: AccountStatus = await self._drive(self._read_account(path))
        return found

    async def close(self) -> None:
        """Close the connections, after holds that nobody waits for any more are cancelled."""
        if self._abandoned:
            await asyncio.wait(self._abandoned)
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _drive(self, flow: Flow[Step, Any]) -> Any:
        return await adrive(flow, self._perform)

    async def _perform(self, step: Step) -> httpx.Response | str | None:
        if isinstance(step, Pause):
            await self._pause(step.microseconds)
            return None
        try:
            async with asyncio.timeout(step.seconds):  # httpx counts each read alone
                return await self._http.request(**self._request(step))
        except (httpx.TransportError, TimeoutError) as error:
            return str(error) or repr(error)

    async def _pause(self, pause: int) -> None:
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        seconds = self._clock.alarm(self._clock.now() + pause, lambda: _wake(loop, woken))
        if seconds is None:
            await woken.wait()
        else:
            await asyncio.sleep(seconds)


def _wake(loop: asyncio.AbstractEventLoop, woken: asyncio.Event) -> None:
    with suppress(RuntimeError):  # the loop is closed: nobody waits
        loop.call_soon_threadsafe(woken.set)


# For threads ----------------------------------------------------------------------------------------------------------


class SyncClientHold(ClientHoldFlows["SyncHoldClient"]):
    """`ClientHold`, for a `with` block. A thread renews its lease."""

    _stop: "_Stop | None" = None
    _renewer: threading.Thread | None = None

    def settle(self, costs: Costs | None = None) -> None:
        self._client._drive(self._settle(costs))

    def cancel(self) -> None:
        self._client._drive(self._cancel())

    def extend(self, costs: Costs | None = None, *, lease: Number | None = None) -> None:
        self._client._drive(self._extend(costs, lease))

    def __enter__(self) -> Self:
        self._check_open()
        self._stop = _Stop()
        self._renewer = threading.Thread(target=self._renew, args=(self._stop,), name="headgate hold", daemon=True)
        self._renewer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._stop is not None and self._renewer is not None:
            self._stop.stop()
            self._renewer.join()
        if self.state in ("open", "expired"):
            self._client._drive(self._end_block(error is not None))

    def _renew(self, stop: "_Stop") -> None:
        def perform(step: Step) -> object:
            done = self._client._perform(step, stop)
            if stop.stopped:
                raise GeneratorExit
            return done

        with suppress(GeneratorExit):
            drive(self._renew_lease(), perform)


class _Stop:
    """Ends the pauses of a thread."""

    def __init__(self) -> None:
        self._woken: Final = threading.Event()
        self.stopped = False

    def stop(self) -> None:
        self.stopped = True
        self._woken.set()

    def pause(self, clock: Clock, pause: int) -> None:
        seconds = clock.alarm(clock.now() + pause, self._woken.set)
        self._woken.wait(seconds)
        if not self.stopped:
            self._woken.clear()


class SyncHoldClient(HoldClientFlows):
    """`HoldClient`, for programs without an event loop. Everything is the same without `async` and `await`."""

    def __init__(
        self, url: str, token: str, *, http: httpx.Client | None = None, **options: Unpack[HoldClientOptions]
    ) -> None:
        super().__init__(url, token, options)
        self._http: Final = httpx.Client(trust_env=not is_loopback(url)) if http is None else http

    def hold(
        self,
        costs: Costs,
        *,
        session: str | int | None = None,
        tool: str | None = None,
        lease: Number | None = None,
        timeout: Number = 0,
        hold_id: str | None = None,
        max_age: float | None = 3600,
    ) -> SyncClientHold:
        """See `HoldClient.hold`."""
        name = uuid4().hex if hold_id is None else hold_id
        answer = self._drive(self._make(costs, session, tool, lease, timeout, name))
        return SyncClientHold(self, answer, lease, max_age)

    def find_hold(self, hold_id: str) -> SyncClientHold:
        return SyncClientHold(self, self._drive(self._find(hold_id)), 60.0, 3600)

    def account(self, path: str) -> AccountStatus:
        found: AccountStatus = self._drive(self._read_account(path))
        return found

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _drive(self, flow: Flow[Step, Any]) -> Any:
        return drive(flow, self._perform)

    def _perform(self, step: Step, stop: _Stop | None = None) -> httpx.Response | str | None:
        if isinstance(step, Pause):
            (_Stop() if stop is None else stop).pause(self._clock, step.microseconds)
            return None
        try:
            return self._send(step)
        except httpx.TransportError as error:
            return str(error) or repr(error)

    def _send(self, step: SendRequest) -> httpx.Response:
        """Send a request, and read the answer within its time: httpx counts each read alone, and so the headers'."""
        end = self._clock.now() + round(step.seconds * 1_000_000)
        with self._http.stream(**self._request(step)) as response:
            if response.is_stream_consumed:  # it came as a whole, from a transport of the program's own
                return response
            body = []
            for part in response.iter_raw():
                body.append(part)
                if self._clock.now() >= end:
                    raise httpx.ReadTimeout(f"no whole answer within {step.seconds:g} seconds")
            return httpx.Response(
                response.status_code, headers=response.headers, content=b"".join(body), request=response.request
            )
