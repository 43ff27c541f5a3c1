"""The file ``ggroup.slices``: lists the slices that were made, with the state of their cgroups, and makes new ones."""

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
"""Seconds for which a writer waits until the kernel has heard of what has gone. That may take a directory which a
program keeps locked."""

NAME_MOST = 255
"""Longest name of a cgroup or directory, bytes (NAME_MAX in linux/limits.h)."""


_last: tuple[Sequence[Told], str] = (), ""
"""The last text shown, so that ten thousand lines are not formatted anew for every reader."""


def _show(controller: Controller, _: Group) -> str:
    """Return one line for each slice: state, seconds since it was made, seconds left or ``-``, and path.

    The path comes last because it may contain blanks.
    """
    global _last
    told = controller.lives.told()
    if told is not _last[0]:
        lines = (
            f"{one.state} {one.age_s} {'-' if one.left_s is None else one.left_s} {one.slice.path}\n" for one in told
        )
        _last = told, "".join(lines)
    return _last[1]


def _parse(word: str) -> tuple[Slice, int]:
    """Parse a time span and a path, which begins at the first slash. EINVAL; ENAMETOOLONG."""
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
    """Raise EINVAL for a path that is not UTF-8 and has no slash at its end.

    Its last byte may have been cut as a blank.
    """
    try:
        rest.encode("latin-1").decode()
    except UnicodeDecodeError:
        raise fail(errno.EINVAL) from None


async def _apply(controller: Controller, _: Group, value: tuple[Slice, int]) -> None:
    controller.lives.make_ahead(*value)
    with trio.move_on_after(HEARD_S):
        await controller.lives.heard()


SLICES = Control("ggroup.slices", 0o644, _show, _parse, _apply)
