"""``ggroup.slices``: the slices that were made, what becomes of their cgroups, and how one is made for a while."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

import trio

from backend.common.errors import fail
from backend.core.controller import Controller
from backend.core.lives import Told
from backend.process.identity import ROOT, Group, Slice, slice_at
from ggroupfs.fs.controls import Control
from ggroupfs.text import spans

HEARD_S = 1.0
"""Seconds that a writer waits for the kernel to hear of what has gone, for which it may need a directory that a program
keeps locked."""

NAME_MOST = 255
"""Bytes of the name of a cgroup, or of a directory (NAME_MAX of linux/limits.h)."""


_last: tuple[Sequence[Told], str] = (), ""
"""What was shown last: ten thousand lines are not made anew for each program that looks."""


def _show(controller: Controller, _: Group) -> str:
    """A line for each: state, seconds since it was made, seconds that are left or ``-``, and the path, which is last as
    blanks may be in it."""
    global _last
    told = controller.lives.told()
    if told is not _last[0]:
        lines = (
            f"{one.state} {one.age_s} {'-' if one.left_s is None else one.left_s} {one.slice.path}\n" for one in told
        )
        _last = told, "".join(lines)
    return _last[1]


def _parse(word: str) -> tuple[Slice, int]:
    """A span and a path, which begins with its first slash. EINVAL; ENAMETOOLONG."""
    span, slash, rest = word.partition("/")
    if not rest.endswith("/"):
        _require_whole(rest)
    slice_ = slice_at(os.fsdecode(f"{slash}{rest}".encode("latin-1")))
    if slice_ is None or slice_ == ROOT or "\n" in rest:
        raise fail(errno.EINVAL)
    if any(len(os.fsencode(part)) > NAME_MOST for part in slice_.path.split("/")):
        raise fail(errno.ENAMETOOLONG)
    try:
        return slice_, spans.milliseconds(span)
    except ValueError:
        raise fail(errno.EINVAL) from None


def _require_whole(rest: str) -> None:
    """EINVAL for a path that is no UTF-8, unless a slash ends it: a last byte may have been taken for a blank."""
    try:
        rest.encode("latin-1").decode()
    except UnicodeDecodeError:
        raise fail(errno.EINVAL) from None


async def _apply(controller: Controller, _: Group, value: tuple[Slice, int]) -> None:
    controller.lives.make_ahead(*value)
    with trio.move_on_after(HEARD_S):
        await controller.lives.heard()


SLICES = Control("ggroup.slices", 0o644, _show, _parse, _apply)
