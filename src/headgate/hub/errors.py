"""What the hub says when it can't do what was asked."""

from typing import Final

import structlog

from headgate.errors import HeadgateError, InvalidInput, StoreAway
from headgate.gate.policy import PolicyError
from headgate.hub.storage.database import DatabaseError

_log = structlog.get_logger("headgate.hub")


class RequestError(HeadgateError):
    """A request that can't be carried out.

    `error` is one word for programs, `detail` a sentence for people. Over HTTP it is answered with `status`, over a
    WebSocket with an error frame.
    """

    def __init__(self, status: int, error: str, detail: str) -> None:
        self.status: Final = status
        self.error: Final = error
        self.detail: Final = detail
        super().__init__(detail)


def as_request_error(error: Exception) -> RequestError:
    """What the caller is told of an error, whichever it is; of what is the hub's own, the log has the rest."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, (InvalidInput, PolicyError)):
        return RequestError(400, "invalid", str(error))
    if isinstance(error, (StoreAway, DatabaseError)):
        _log.error("a request could not be carried out", reason=str(error))
        return RequestError(503, "unavailable", "the hub can't do this at the moment; try again")
    _log.error("a request was not carried out", exc_info=error)
    return RequestError(500, "internal", "the hub made a mistake; its log says which")
