"""Why a write to a control file was refused, in words: what each errno of docs/semantics.md means. Pure."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping

MEANINGS: Mapping[int, str] = {
    errno.EOPNOTSUPP: "this machine cannot enforce it, or not on this program",
    errno.EBUSY: "gmem.swap.max, or memory that cannot be moved, keeps it from holding",
    errno.EAGAIN: "less was moved than asked for",
    errno.EINVAL: "no value of this file",
    errno.ERANGE: "a number that this file, or this GPU, does not take",
    errno.E2BIG: "too long for a value",
    errno.EACCES: "no right to write it",
    errno.EPERM: "no right to change it",
    errno.EROFS: "the tree is mounted read-only",
    errno.ENOENT: "no such process, slice or control file",
    errno.ENODEV: "the process, the slice or its GPU is gone",
    errno.ETIMEDOUT: "the GPU did not answer in time",
    errno.ENOTCONN: "the daemon of the tree is dead",
}
"""In the words of a writer."""

OF_MKDIR: Mapping[int, str] = {
    errno.EACCES: "no right to make it",
    errno.EAGAIN: "one slice too many of this user, or too deep",
    errno.EINVAL: "no name of a process or slice",
    errno.ENOENT: "no such process",
    errno.ENAMETOOLONG: "no name of a cgroup",
}
"""Meanings of what mkdir of a process or slice answers, where they are others."""

NAMES = {**errno.errorcode, errno.EOPNOTSUPP: "EOPNOTSUPP", errno.EAGAIN: "EAGAIN"}
"""Two numbers have two names: those are the documented ones."""


def meaning(error: OSError, others: Mapping[int, str] = MEANINGS) -> str:
    """An errno, what it is called, and what it means here: of a write, or of something else that has other meanings."""
    number = error.errno or 0
    name, text = NAMES.get(number, "?"), error.strerror or os.strerror(number)
    words = others.get(number) or MEANINGS.get(number)
    return f"{text} ({name})" + (f": {words}" if words else "")
