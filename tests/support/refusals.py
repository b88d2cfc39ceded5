"""What is said to bad input."""

from collections.abc import Callable
from typing import Any

import pytest

from headgate import InvalidInput


def refusal(call: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """The text with which a call is refused."""
    with pytest.raises(InvalidInput) as caught:
        call(*arguments, **options)
    return str(caught.value)
