"""A change log in Redis, for many nodes: each is notified of the others' changes.

The rows are those of `headgate.stores.change_rows`, as JSON, in a list without expiry under a prefix of its own. A
position is the number of rows that were ever written. After a compaction the list begins with a row of the kind
"snapshot": its `position` is the number of edits that the snapshot replaces, its `rows` the number of rows that it
has, this one included. To versions that know no snapshots this row has no effect.
"""

import json
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from headgate.errors import StoreAway
from headgate.lifecycle import after_fork
from headgate.stores.base import Change, Edit, LogPage
from headgate.stores.change_rows import to_changes, to_edit, to_rows
from headgate.stores.redis.clients import Clients
from headgate.stores.redis.generation import CHANGE_LOG, RedisGeneration
from headgate.stores.redis.server_errors import ERRORS, FAULTS, describe_error

_POLL: Final = 0.1  # seconds that one wait for a message takes at most; closing waits for it
_RETRY: Final = 0.25  # seconds until a lost connection is tried again
_PATIENCE: Final = 10  # timeouts that a call may take: the log may be long

_log = logging.getLogger("headgate")


class RedisChangeLog:
    """Records changes in a list that has no expiry, under a prefix of its own.

    Followers are notified by pub/sub. After a lost connection they read everything: the server may have lost changes.
    """

    def __init__(
        self,
        clients: Clients,
        generation: RedisGeneration,
        start_later: Callable[[Callable[[], None]], None],
    ) -> None:
        self._clients: Final = clients
        self._generation: Final = generation
        self._key: Final = generation.keys_of_changes[0]
        self._start_later: Final = start_later
        self._follower: _Follower | None = None

    def read(self, after: int = 0) -> LogPage:
        generation = self._generation.expected
        position, known, texts = self._run("the changes can't be read", "read", after)
        self._generation.see(generation, position=position)
        snapshot, rows = _split([_row(text) for text in texts])
        return LogPage(None if known else tuple(map(to_edit, snapshot[1:])), to_changes(rows), position)

    def write(self, change: Change) -> int:
        generation, rows = self._generation.expected, [_text(row) for row in to_rows(change)]
        position: int = self._run("the change was not made, since it can't be recorded", "write", *rows)
        self._generation.see(generation, position=position)
        return position

    def compact(self, keep: int, condense: Callable[[Sequence[Edit]], Sequence[Edit]]) -> int:
        failure = "the change log can't be compacted"
        position, _, texts = self._run(failure, "read", 0)
        snapshot, rows = _split([_row(text) for text in texts])
        changes = to_changes(rows)
        if len(changes) <= keep:
            return len(changes)
        dropped = sum(len(change.edits) for change in changes[:-keep])
        edits = condense([to_edit(row) for row in [*snapshot[1:], *rows[:dropped]]])
        first = {"kind": "snapshot", "position": position - len(rows) + dropped, "rows": len(edits) + 1}
        new = [_text(row) for row in [first, *to_rows(Change(tuple(edits), at=0.0))]]
        self._run(failure, "compact", texts[0], len(snapshot) + dropped, *reversed(new))
        return keep

    def _run(self, failure: str, verb: str, *arguments: str | bytes | int) -> Any:
        generation = self._generation
        generation.require()
        keys, expected = generation.keys_of_changes, generation.expected
        words = (*keys, verb, expected, generation.seen.position, *arguments)
        try:
            answer = self._clients.call(lambda client: client.eval(CHANGE_LOG, len(keys), *words), _PATIENCE)
        except (*ERRORS, StoreAway, TypeError) as error:  # of redis-py, if its client is closed meanwhile
            raise StoreAway(f"{failure}: {describe_error(error)}") from error
        if answer is None:
            raise generation.lost()
        return answer

    def follow(self, on_change: Callable[[bool], None]) -> None:
        """See `SharedChangeLog.follow`. A forked process follows with a thread of its own."""
        self._follower = _Follower(self._clients, self._key, on_change)
        self._start()
        after_fork(self)  # after the listener: in a forked process the thread calls it at once

    def _start(self) -> None:
        """Start the thread, unless it was started before; if it can't be started, later."""
        follower = self._follower
        if follower is not None and follower.ident is None:
            try:
                follower.start()
            except RuntimeError as error:
                _log.error("changes made elsewhere can't be followed yet: %s", error)
                self._start_later(self._start)

    def _after_fork(self) -> None:
        if self._follower is not None:
            self._follower = self._follower.anew()
            self._start()

    def close(self) -> None:
        follower, self._follower = self._follower, None
        if follower is not None:
            follower.stop()


class _Follower(threading.Thread):
    def __init__(self, clients: Clients, channel: str, on_change: Callable[[bool], None]) -> None:
        super().__init__(name="headgate-changes", daemon=True)
        self._clients = clients
        self._channel = channel
        self._on_change = on_change
        self._stopped = threading.Event()

    def anew(self) -> "_Follower":
        """Another thread that does the same."""
        return _Follower(self._clients, self._channel, self._on_change)

    def stop(self) -> None:
        self._stopped.set()
        if self.is_alive() and threading.current_thread() is not self:
            self.join()

    def run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._listen()
            except (*ERRORS, StoreAway) as error:
                _log.debug("can't listen for changes made elsewhere: %s", describe_error(error))
                self._stopped.wait(_RETRY)
            except Exception:  # noqa: BLE001 - no error ends the thread
                _log.exception("a change made elsewhere could not be applied")
                self._stopped.wait(_RETRY)

    def _listen(self) -> None:
        with self._clients.client().pubsub(ignore_subscribe_messages=True) as pubsub:  # type: ignore[no-untyped-call]
            _ask(pubsub.subscribe, self._channel)
            _next_message(pubsub)
            self._on_change(True)
            while not self._stopped.is_set():
                if _next_message(pubsub) is not None:
                    self._on_change(False)


def _next_message(pubsub: Any) -> object:
    """The next message, or None after a while."""
    return _ask(partial(pubsub.get_message, timeout=_POLL))


def _ask(method: Callable[..., object], *arguments: object) -> object:
    try:
        return method(*arguments)
    except FAULTS as error:  # redis-py raises anything if its client is closed meanwhile
        raise StoreAway(describe_error(error)) from error


def _split(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows of the snapshot, if there is one, and the rows after it."""
    first = rows[0] if rows else {}
    known = first.get("kind") == "snapshot" and all(type(first.get(name)) is int for name in ("position", "rows"))
    size = first["rows"] if known else 0
    return rows[:size], rows[size:]


def _row(text: str | bytes) -> dict[str, Any]:
    """A row; an empty one if it can't be read."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


def _text(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False)
