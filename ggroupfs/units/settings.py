"""The settings of a cgroup: assignments checked, merged, and chosen by GPU. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import attrs

from backend.core.records import MAX, GpuInfo
from ggroupfs.text import spans
from ggroupfs.text.properties import BY_NAME, PROPERTIES, text_of
from ggroupfs.units.unitfile import Assignment, Place

GPUS = "GPUs"
"""Key that restricts the other keys to some GPUs."""

TIMEOUT = "TimeoutStartSec"
"""Key, as in services, for the time that a slice made ahead waits for its cgroup."""

ALL = "all"
GPU = re.compile(r"\d+|GPU-[0-9A-Za-z-]+", re.ASCII)


@attrs.frozen
class Mistake:
    """An entry of a file that has no effect, and the reason."""

    place: Place
    """Place of the entry; line 0 for the whole file."""
    key: str
    """Key of the assignment; empty if there is none."""
    reason: str
    """Reason, in words."""

    def __str__(self) -> str:
        where = self.place if self.place.line else self.place.file
        return f"{where}: {self.key}=: {self.reason}" if self.key else f"{where}: {self.reason}"


@attrs.frozen
class Setting:
    """The setting of one property."""

    name: str
    """Name of the property."""
    value: str
    """Value as written in the file; empty for the default."""
    place: Place
    """Place in the file."""

    def mistake(self, reason: str) -> Mistake:
        """Return a mistake that says why this setting has no effect."""
        return Mistake(self.place, self.name, reason)


@attrs.frozen
class Settings:
    """The combined settings from all files of one cgroup."""

    values: Mapping[str, Setting] = attrs.field(factory=dict)
    """Settings by property, in the order in which they are applied."""
    gpus: frozenset[str] = frozenset()
    """Indices and UUIDs of the GPUs to which they apply; empty for all GPUs."""
    chosen: Setting | None = None
    """Setting that names those GPUs."""
    timeout_ms: int | None = None
    """Time that a slice made ahead waits for its cgroup, milliseconds; None if not given."""

    def __bool__(self) -> bool:
        return bool(self.values)

    def on(self, gpu: GpuInfo) -> Mapping[str, Setting]:
        """Return the settings for a GPU."""
        return self.values if not self.gpus or self.gpus & {str(gpu.index), gpu.uuid} else {}

    def unknown(self, gpus: Iterable[GpuInfo]) -> Sequence[Mistake]:
        """Report the named GPUs that are not among these."""
        there = {name for gpu in gpus for name in (str(gpu.index), gpu.uuid)}
        if self.chosen is None:
            return []
        return [self.chosen.mistake(f"there is no GPU {name}") for name in sorted(self.gpus - there)]


def merge(assignments: Iterable[Assignment], *, of_unit: bool = False) -> tuple[Settings, Sequence[Mistake]]:
    """Merge the assignments of one or more sections; the last valid one of each key counts.

    As in systemd, an invalid assignment is treated as absent, and reported. `of_unit` rejects TIMEOUT, which the slice
    of a unit does not need.
    """
    found: dict[str, Setting] = {}
    mistakes: list[Mistake] = []
    gpus: frozenset[str] = frozenset()
    chosen: Setting | None = None
    timeout: int | None = None
    for one in assignments:
        setting = Setting(one.key, one.value or "", one.place)
        try:
            if one.value is None:
                raise ValueError("not KEY=VALUE")
            if one.key == GPUS:
                gpus, chosen = _gpus(one.value), setting
            elif one.key == TIMEOUT:
                if of_unit:
                    raise ValueError("for slices.d alone: the slice of a unit is there as long as the unit is active")
                timeout = spans.milliseconds(one.value) if one.value else None
            elif one.key in BY_NAME:
                text_of(one.key, one.value, MAX)
                found[one.key] = setting
            else:
                raise ValueError("there is no such property")
        except ValueError as error:
            mistakes.append(setting.mistake(str(error)))
    values = {each.name: found[each.name] for each in PROPERTIES if each.name in found}
    return Settings(values, gpus, chosen, timeout), mistakes


def _gpus(value: str) -> frozenset[str]:
    words = value.replace(",", " ").split()
    if ALL in words or not words:
        if len(words) > 1:
            raise ValueError(f"{ALL}, or some GPUs, not both")
        return frozenset()
    for word in words:
        if not GPU.fullmatch(word):
            raise ValueError(f"{word}: not the index or UUID of a GPU")
    return frozenset(str(int(word)) if word.isdigit() else word for word in words)
