"""Errors with the number that the caller of a system call is to see."""

import os


def fail(code: int) -> OSError:
    """The OSError (or the subclass of it that Python has for this number) of an errno, with its usual text."""
    return OSError(code, os.strerror(code))
