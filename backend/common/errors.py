"""Errors that carry the errno for the caller of a system call."""

import errno
import os

SHORT = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM))
"""Errnos that say that this process, or this machine, lacks a resource. That may pass in a moment, and says nothing
about the request.
"""

ERRNOS = range(1, 512)
"""Errnos that a system call may fail with. The kernel's own numbers begin above them (include/linux/errno.h): it
accepts no answer with such a number from a filesystem, and the caller would wait for ever.
"""


def fail(code: int) -> OSError:
    """Return the OSError of an errno, or the subclass that Python has for it, with the usual text."""
    return OSError(code, os.strerror(code))


def errno_of(error: BaseException) -> int:
    """Return the errno that the caller is told of an error: EIO for any error, from whatever source, whose number a
    system call cannot fail with.
    """
    number = error.errno if isinstance(error, OSError) else None
    return number if number is not None and number in ERRNOS else errno.EIO
