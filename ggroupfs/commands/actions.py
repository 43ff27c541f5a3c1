"""What can be done to a process or slice from the keyboard; each says in words what came of it. No screen.

Whatever is refused is a RuntimeError or a UsageError with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from ggroupfs.commands.set import Write, apply, understood
from ggroupfs.text.refusals import meaning
from ggroupfs.view.columns import HIGH, TIMESLICE, Column
from ggroupfs.view.figures import figures_of

Action = Callable[[Path, str, str], str]
"""(mount, directory of the group seen from there, what was typed) -> what is so now."""

AS_IT_IS = ("max", "default")
"""What control files say where systemd's properties have another word."""


def _put(mount: Path, directory: str, column: Column, control: str, key: str, value: str) -> str:
    """Writes a value that may be spelt as the control file has it, or as the property; reads what came of it."""
    group = mount / directory
    try:
        apply(mount, understood(mount, group, control if value in AS_IT_IS else key, value))
        now = getattr(figures_of(group, (control,)), column.name)
    except OSError as error:
        raise RuntimeError(f"{_name(directory)}: {meaning(error)}") from None
    return f"{_name(directory)}: {control} is {column.text(now)}"


def _name(directory: str) -> str:
    """The process or slice whose directory that is."""
    return directory.rpartition("/")[0].removeprefix("slice")


def limit(mount: Path, directory: str, value: str) -> str:
    """``8G``, ``50%`` of the GPU's memory, ``max``."""
    return _put(mount, directory, HIGH, "gmem.limit.high", "GMemHigh", value)


def timeslice(mount: Path, directory: str, value: str) -> str:
    """``2``, ``2ms``, ``500us``, ``default``."""
    return _put(mount, directory, TIMESLICE, "compute.timeslice", "ComputeTimeSlice", value)


def freeze(mount: Path, directory: str, _: str = "") -> str:
    """Freezes what is not frozen by itself, else lets it go on."""
    group = mount / directory
    try:
        frozen = figures_of(group, ("compute.freeze",)).freeze
        apply(mount, Write(group, "compute.freeze", str(int(not frozen))))
        still = figures_of(group, ("compute.events",)).frozen
    except OSError as error:
        raise RuntimeError(f"{_name(directory)}: {meaning(error)}") from None
    if frozen and still:
        return f"{_name(directory)} is thawed, but a slice above it is frozen"
    return f"{_name(directory)} is {'thawed' if frozen else 'frozen'}"


ASKED: Mapping[str, tuple[str, Action]] = {
    "limit": ("gmem.limit.high: 8G, 50%, max", limit),
    "timeslice": ("compute.timeslice: 2ms, 500us, default", timeslice),
}
"""Of each action that needs a value: what is asked for, and what is done then."""
