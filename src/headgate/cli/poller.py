"""Asks a hub again and again, in a thread."""

import threading
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from headgate.cli.hub_api import HubError

T = TypeVar("T")


class Poller(threading.Thread, Generic[T]):
    """Calls `post` with each answer of `read`, or with the reason why there is none."""

    def __init__(
        self, url: str, interval: float, read: Callable[[], T], post: Callable[[T | HubError], object]
    ) -> None:
        super().__init__(daemon=True)  # quitting doesn't wait for a hub that is away
        self._url: Final = url
        self._interval: Final = interval
        self._read: Final = read
        self._post: Final = post
        self._now: Final = threading.Event()
        self._ended = False

    def run(self) -> None:
        while not self._ended:
            self._now.clear()
            result: T | HubError
            try:
                result = self._read()
            except HubError as error:
                result = error
            except Exception as error:  # noqa: BLE001 - no error ends the thread
                result = HubError(0, f"{self._url}: {error!r}")
            self._post(result)
            self._now.wait(self._interval)

    def poll_now(self) -> None:
        self._now.set()

    def stop(self) -> None:
        self._ended = True
        self._now.set()
