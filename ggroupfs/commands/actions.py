"""The actions on a process or slice that ``ggroupfs top`` offers. Each returns its result in words. No screen.

A refusal raises RuntimeError or UsageError with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from ggroupfs.commands.set import Write, apply, understood
from ggroupfs.text.refusals import meaning
from ggroupfs.view.columns import HIGH, TIMESLICE, Column
from ggroupfs.view.figures import figures_of

Action = Callable[[Path, str, str], str]
"""(mount, directory of the group relative to it, typed value) -> result in words."""

AS_IT_IS = ("max", "default")
"""Values that only control files accept; systemd's properties have other words for them."""


def _put(mount: Path, directory: str, column: Column, control: str, key: str, value: str) -> str:
    """Write a value in the spelling of the control file or of the property, and report the value read back."""
    group = mount / directory
    try:
        apply(mount, understood(mount, group, control if value in AS_IT_IS else key, value))
        now = getattr(figures_of(group, (control,)), column.name)
    except OSError as error:
        raise RuntimeError(f"{_name(directory)}: {meaning(error)}") from None
    return f"{_name(directory)}: {control} is {column.text(now)}"


def _name(directory: str) -> str:
    """Return the process or slice to which a directory belongs."""
    return directory.rpartition("/")[0].removeprefix("slice")


def limit(mount: Path, directory: str, value: str) -> str:
    """Set the memory limit: ``8G``, ``50%`` of the GPU's memory, ``max``."""
    return _put(mount, directory, HIGH, "gmem.limit.high", "GMemHigh", value)


def timeslice(mount: Path, directory: str, value: str) -> str:
    """Set the timeslice: ``2``, ``2ms``, ``500us``, ``default``."""
    return _put(mount, directory, TIMESLICE, "compute.timeslice", "ComputeTimeSlice", value)


def freeze(mount: Path, directory: str, _: str = "") -> str:
    """Freeze a group that is not frozen itself; thaw one that is."""
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
"""The question and the action, by the name of each action that needs a value."""
