"""The error of a request that has to be asked again. It isn't compiled: its fields have to pickle."""

from typing import Any

from headgate.errors import StoreAway


class AskAgain(StoreAway):
    """The script has done nothing, or not all that is due: `again()` of the request is to be asked."""

    def __init__(self, text: str, request: Any = None, server_time: int = 0, *, outside: bool = False) -> None:
        super().__init__(text)
        self.request = request
        self.server_time = server_time
        self.outside = outside
        """Whether its time is in none of the periods that were sent."""
