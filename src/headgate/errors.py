"""The errors of headgate. A denial is not one of them: it is a `Decision`."""


class HeadgateError(Exception):
    """The base of every error that headgate raises on purpose."""


class InvalidInput(HeadgateError, ValueError):
    """Something handed in can't be used. The text says where, what was expected and what came.

    Nothing has been counted by a call that raised it.
    """
