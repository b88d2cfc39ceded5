"""A fixture for tests with a hub in their process, whose log level a request may change."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """Puts the level back."""
    logger = logging.getLogger("headgate")
    before = logger.level
    yield
    logger.setLevel(before)
