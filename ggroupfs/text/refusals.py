"""Explanations of refused writes to control files: the meaning of each errno in docs/semantics.md, in words. Pure."""

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
"""Meanings for a write."""

OF_MKDIR: Mapping[int, str] = {
    errno.EACCES: "no right to make it",
    errno.EAGAIN: "one slice too many of this user, or too deep",
    errno.EINVAL: "no name of a process or slice",
    errno.ENOENT: "no such process",
    errno.ENAMETOOLONG: "no name of a cgroup",
}
"""Meanings for mkdir of a process or slice, where they differ."""

NAMES = {**errno.errorcode, errno.EOPNOTSUPP: "EOPNOTSUPP", errno.EAGAIN: "EAGAIN"}
"""Names of errnos. Two numbers have two names each; these are the documented ones."""


def meaning(error: OSError, others: Mapping[int, str] = MEANINGS) -> str:
    """Return an errno's text, name and meaning, for a write or for another call with its own table of meanings."""
    number = error.errno or 0
    name, text = NAMES.get(number, "?"), error.strerror or os.strerror(number)
    words = others.get(number) or MEANINGS.get(number)
    return f"{text} ({name})" + (f": {words}" if words else "")
