"""What the hub says when it can't do what was asked."""

from typing import Final

from headgate.errors import HeadgateError


class Refused(HeadgateError):
    """A request that can't be carried out.

    `error` is one word for programs, `detail` a sentence for people. Over HTTP it is answered with `status`, over a
    WebSocket with an error frame.
    """

    def __init__(self, status: int, error: str, detail: str) -> None:
        self.status: Final = status
        self.error: Final = error
        self.detail: Final = detail
        super().__init__(detail)
