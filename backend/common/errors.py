"""Errors with the number that the caller of a system call is to see."""

import errno
import os

SHORT = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM))
"""What is said where this process, or this machine, has no room for another one: it may be over in a moment, and says
nothing about what was asked for."""

ERRNOS = range(1, 512)
"""What a system call may fail with. The kernel's own numbers begin behind it (include/linux/errno.h): it takes no
answer with one from a filesystem, and whoever waits for that answer waits for ever."""


def fail(code: int) -> OSError:
    """The OSError (or the subclass of it that Python has for this number) of an errno, with its usual text."""
    return OSError(code, os.strerror(code))


def errno_of(error: BaseException) -> int:
    """The number that whoever asked is told of an error: EIO for one that has none which a system call may fail with,
    wherever it comes from."""
    number = error.errno if isinstance(error, OSError) else None
    return number if number is not None and number in ERRNOS else errno.EIO
