"""Errors with the number that the caller of a system call is to see."""

import errno
import os

SHORT = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM))
"""What is said where this process, or this machine, has no room for another one: it may be over in a moment, and says
nothing about what was asked for."""


def fail(code: int) -> OSError:
    """The OSError (or the subclass of it that Python has for this number) of an errno, with its usual text."""
    return OSError(code, os.strerror(code))
