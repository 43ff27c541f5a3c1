"""Read configuration only from regular files, which do not make a reader wait."""

from __future__ import annotations

import errno
import os
import stat


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a file. Raises OSError, with EINVAL unless it is a regular file: the open of a FIFO waits
    until another process writes to it, and a read of a terminal waits for its user.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", os.fspath(path))
        with open(fd, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(fd)
