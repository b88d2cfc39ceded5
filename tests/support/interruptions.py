"""Exceptions of signal handlers, or of gevent, at any point of other code."""

import gc
import sys
import weakref
from collections.abc import Callable
from types import FrameType

WEAK_SET_CALLBACK = weakref.WeakSet()._remove.__code__  # type: ignore[attr-defined]


class Interrupted(BaseException):
    """As `gevent.Timeout` is, and `KeyboardInterrupt`."""


def interrupt(step: int, work: Callable[[], object], error: type[BaseException]) -> bool:
    """Interrupt work at one of the points at which Python runs signal handlers; whether there were that many.

    Callbacks of weak references are left out: Python reports what they raise, and goes on. So are finalizers, by
    disabling the garbage collector.
    """
    passed = 0

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal passed
        if event in ("call", "c_return") and frame.f_code is not WEAK_SET_CALLBACK:
            passed += 1
            if passed == step:
                sys.setprofile(None)
                raise error

    collects = gc.isenabled()
    gc.disable()
    try:
        sys.setprofile(profile)
        work()
    except error:
        return True
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()
    return passed >= step
