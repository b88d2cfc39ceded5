"""The sockets of live dashboards: who may watch, and what is sent to all of them, once a second.

Nothing is computed while nobody watches.
"""

import asyncio
from collections import Counter, OrderedDict
from time import perf_counter
from typing import Final

import msgspec
import structlog
from msgspec import Struct

from headgate.errors import StoreAway
from headgate.gate.lookup import counted_as
from headgate.http import wait_ms
from headgate.hub.agents.authentication import Authentication
from headgate.hub.agents.operators import Holder, Operators
from headgate.hub.background import BackgroundTasks
from headgate.hub.dashboard.accounts import AccountReader
from headgate.hub.dashboard.cards import sees_accounts, view_of
from headgate.hub.dashboard.updates import SentState
from headgate.hub.errors import RequestError, as_request_error
from headgate.hub.settings import HubSettings
from headgate.hub.sockets.frames import MALFORMED, Problem, Token, encode, explain
from headgate.hub.sockets.socket import POLICY_VIOLATION, TRY_LATER, Socket
from headgate.limits.clock import Clock
from headgate.limits.decision import Decision

MAX_QUEUED: Final = 32
"""Frames queued for a dashboard that reads slowly; then it is closed, and connects again."""
MAX_QUEUED_BYTES: Final = 4 * 1024 * 1024
"""Characters of these frames. All dashboards share them: each is made once."""
MAX_STRANGERS: Final = 10
"""Dashboards that one address may be opening at a time: those that have not shown a token yet."""
MAX_PUBLIC: Final = 10
"""Dashboards without a token that one address may have open."""
_INTERVAL: Final = 1.0  # seconds between two updates
_MIN_INTERVAL: Final = 0.05  # seconds, however much changes
_MAX_PAUSE: Final = 3.0  # seconds: a dashboard takes a longer silence for a lost connection
_MAX_FRAME: Final = 4096  # bytes of the one frame that a dashboard sends

_log = structlog.get_logger("headgate.hub")

_PUBLIC: Final = Holder()  # a dashboard without a token


class WatchRequest(Struct, tag_field="type", tag="watch", forbid_unknown_fields=True):
    """The first and only frame that a dashboard sends. A public dashboard needs no token."""

    token: Token = ""


class DashboardFeed:
    """Serves the dashboards of one hub."""

    def __init__(
        self,
        state: SentState,
        accounts: AccountReader,
        operators: Operators,
        authentication: Authentication,
        clock: Clock,
        settings: HubSettings,
    ) -> None:
        self._operators, self._authentication, self._clock, self._settings = operators, authentication, clock, settings
        self._state: Final = state
        self._accounts: Final = accounts
        self._unidentified: Final[OrderedDict[Socket, None]] = OrderedDict()
        self._strangers: Final[Counter[str]] = Counter()  # unidentified sockets, by address
        self._identified: Final[dict[Socket, Holder]] = {}  # oldest first
        self._drops = 0  # beside revoked tokens, roles and blocks that changed: the registry counts only the former
        self._viewers: Final[set[Socket]] = set()  # those that get updates
        self._updating: Final = asyncio.Lock()
        self._wake: Final = asyncio.Event()
        self._background: Final = BackgroundTasks()
        self._running = False

    @property
    def sockets(self) -> list[Socket]:
        """The sockets of all open dashboards."""
        return [*self._identified, *self._unidentified]

    def refresh(self) -> None:
        """Send the next update at once: something has changed."""
        self._wake.set()

    def recheck(self) -> None:
        """Close the dashboards of operators that have another role now or are blocked, and send the next update."""
        self._drops += 1
        for socket, holder in list(self._identified.items()):
            if holder.role and not self._operators.may_watch(holder):
                self._forget(socket)
                socket.close_soon(POLICY_VIOLATION, "the role of this operator has changed")
        self.refresh()

    def drop(self, agent: str) -> None:
        """Close the dashboards of an agent whose token is no longer valid."""
        self._drops += 1
        for socket, holder in list(self._identified.items()):
            if holder.agent == agent:
                self._forget(socket)
                socket.close_revoked()

    async def close(self) -> None:
        """Send no more updates."""
        await self._background.cancel()

    # One dashboard ---------------------------------------------------------------------------------------------------

    def admit(self, socket: Socket) -> None:
        """Count a dashboard that has shown no token yet, or refuse it where its address is opening too many."""
        address = counted_as(socket.address)
        if self._strangers[address] >= MAX_STRANGERS:
            detail = f"expected at most {MAX_STRANGERS} dashboards that {address} is opening; wait for one of them"
            raise RequestError(429, "too_many_connections", detail)
        self._strangers[address] += 1

    async def serve(self, socket: Socket) -> None:
        """Serve a dashboard that was admitted, until it is closed."""
        address, most = counted_as(socket.address), self._settings.max_dashboards
        self._unidentified[socket] = None
        if len(self._unidentified) > most:
            oldest, _ = self._unidentified.popitem(last=False)
            oldest.close_soon(TRY_LATER, "too many dashboards are being opened")
        try:
            holder = await self._authenticate(socket) if await socket.accept() else None
        finally:
            self._unidentified.pop(socket, None)
            self._strangers[address] -= 1
            if not self._strangers[address]:
                del self._strangers[address]
        if holder is None:
            return
        if full := self._full(address, holder):
            await _refuse(socket, "too_many_connections", full, TRY_LATER)
            return
        self._identified[socket] = holder
        try:
            await self._join(socket, holder)
            if await socket.read() is not None:
                await _refuse(socket, "invalid", "expected no more frames from a dashboard")
        finally:
            self._forget(socket)

    def _full(self, address: str, holder: Holder) -> str:
        """Why there is no room for one more dashboard; "" if there is, or if a public one has made room."""
        most = self._settings.max_dashboards
        public = [socket for socket, other in self._identified.items() if other is _PUBLIC]
        if holder is _PUBLIC and sum(counted_as(socket.address) == address for socket in public) >= MAX_PUBLIC:
            return f"{address} has {MAX_PUBLIC} dashboards without a token, and may have no more"
        if len(self._identified) < most:
            return ""
        if holder is _PUBLIC or not public:
            return f"too many dashboards are open: the hub takes {most}"
        self._drop(public[0], "too many dashboards are open")
        return ""

    def _drop(self, socket: Socket, reason: str) -> None:
        self._forget(socket)
        socket.close_soon(TRY_LATER, reason)

    def _forget(self, socket: Socket) -> None:
        self._viewers.discard(socket)
        self._identified.pop(socket, None)

    async def _authenticate(self, socket: Socket) -> Holder | None:
        """Whose token the first frame has; None if the dashboard may not watch."""
        deadline = socket.expect_identification(self._clock, self._settings.identify_within)
        try:
            text = await socket.read()
        finally:
            deadline.cancel()
        if text is None:
            await self._authentication.charge(socket.address)  # otherwise sockets that show no token cost nothing
            return None
        try:
            if len(text) > _MAX_FRAME:
                raise msgspec.ValidationError(f"expected at most {_MAX_FRAME} bytes")
            token = msgspec.json.decode(text, type=WatchRequest).token
        except MALFORMED as error:
            await _refuse(socket, "invalid", explain(error))
            return None
        if not token and self._settings.public_dashboard:
            return _PUBLIC
        try:
            found = await self._attempt(socket.address, token)
        except StoreAway as away:
            await socket.close(TRY_LATER, as_request_error(away).detail)
            return None
        if isinstance(found, Holder):
            return found
        if found:
            await _refuse(socket, "unauthorized", "this needs the token of a viewer or the admin")
        else:
            problem = Problem(error="rate_limited", detail="too many wrong tokens", retry_after_ms=wait_ms(found))
            await socket.send(encode(problem))
            await socket.close(POLICY_VIOLATION, "too many wrong tokens")
        return None

    async def _attempt(self, address: str, token: str) -> Holder | Decision:
        """The operator that a token belongs to now; otherwise the address's decision."""

        async def look_up() -> Holder | None:
            found = await self._operators.holder(token)
            return found if found is not None and found.role and self._operators.may_watch(found) else None

        return await self._authentication.attempt_socket(address, token, look_up, lambda: self._drops)

    async def _join(self, socket: Socket, holder: Holder) -> None:
        async with self._updating:
            if not self._running:
                await self._state.next_update()
            frames = await self._state.snapshot(view_of(holder.role), admin=holder.admin, name=holder.name)
            if socket not in self._identified:  # another has taken its place meanwhile
                return
            socket.hold()  # updates are queued until the snapshot is sent
            self._viewers.add(socket)
            if not self._running:  # only now: it ends when nobody watches
                self._running = True
                self._background.spawn(self._run())
            self._background.spawn(self._accounts.run(self._accounts_wanted, self.refresh))
        for frame in frames:
            await socket.send(frame)
        socket.release()

    # All of them -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        pause = _MIN_INTERVAL
        try:
            while self._viewers:
                await asyncio.sleep(pause)
                try:
                    async with asyncio.timeout(max(_INTERVAL - pause, 0)):
                        await self._wake.wait()
                except TimeoutError:
                    pass
                self._wake.clear()
                began = perf_counter()
                await self._send_update()
                # However much there is to show, the hub has twice as much time for everything else.
                pause = min(max(2 * (perf_counter() - began), _MIN_INTERVAL), _MAX_PAUSE)
        finally:
            self._running = False

    async def _send_update(self) -> None:
        async with self._updating:
            try:
                update = await self._state.next_update()
                views = {view_of(holder.role) for holder in self._identified.values()}
                frames = {view: self._state.frames(update, view) for view in views}
            except Exception:  # noqa: BLE001 - the next one may succeed
                _log.exception("the dashboard's update failed")
                return
            for socket in list(self._viewers):
                sent = frames[view_of(self._identified[socket].role)]
                if not all([socket.push(frame) for frame in sent]):
                    self._drop(socket, "it reads too slowly")

    def _accounts_wanted(self) -> bool:
        return any(sees_accounts(self._identified[socket].role) for socket in self._viewers)


async def _refuse(socket: Socket, error: str, detail: str, code: int = POLICY_VIOLATION) -> None:
    await socket.send(encode(Problem(error=error, detail=detail)))
    await socket.close(code, detail)
