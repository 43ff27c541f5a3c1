"""Programs that run beside each other in a space. For the shares of a GPU they are one contender: its turn lets all of
them on.

The contender goes by one of the programs, its *first*, whose place the others have, too. Its path ends below the slice
of the space, where it counts, beside whatever else is in that slice, as its programs together: with the best of their
priorities, and the sum of their weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import attrs

from backend.process.identity import Process, SliceOn
from backend.scheduler.shares import Contender, Level
from backend.scheduler.use import Sample
from backend.space.space import Space

T = TypeVar("T")


class Beside:
    """The spaces among the contenders of one GPU."""

    def __init__(self, gpu: int) -> None:
        self._gpu = gpu
        self._programs: dict[Process, list[Process]] = {}  # of each space, by the first of them

    def join(self, contenders: Sequence[Contender], space_of: Callable[[Process], Space | None]) -> list[Contender]:
        """Return the contenders, those of a space as one. The first of a space is the same as long as it is there."""
        spaces: dict[Space, list[Contender]] = {}
        alone: list[Contender] = []
        for one in contenders:
            space = space_of(one.process)
            (alone if space is None else spaces.setdefault(space, [])).append(one)
        before, self._programs = self._programs, {}
        for space, members in spaces.items():
            first = min(members, key=lambda one: (one.process not in before, one.process.start, one.process.pid))
            self._programs[first.process] = [one.process for one in members]
            alone.append(
                Contender(first.process, self._path(space, first, members), any(one.explicit for one in members))
            )
        return alone

    def _path(self, space: Space, first: Contender, members: Sequence[Contender]) -> tuple[Level, ...]:
        group, below = SliceOn(space.slice, self._gpu), dict[object, Level]()
        above: tuple[Level, ...] | None = None
        for one in members:
            at = next((at for at, level in enumerate(one.path) if level.group == group), None)
            if at is not None:
                above, level = one.path[: at + 1], one.path[at + 1]
                below[level.group] = level
        if above is None:  # all of them were moved elsewhere: their server did not go along
            return first.path
        priority = min(level.priority for level in below.values())
        return (*above, Level(space, priority, sum(level.weight for level in below.values())))

    def __contains__(self, process: Process) -> bool:
        """Return whether a contender stands for a space."""
        return process in self._programs

    def programs(self, process: Process) -> Sequence[Process]:
        """Return the programs that a contender stands for."""
        return self._programs.get(process, (process,))

    def everybody(self, contenders: Iterable[Contender]) -> Iterable[Process]:
        """Yield the programs of all contenders."""
        return (process for one in contenders for process in self.programs(one.process))

    def spread(self, found: Mapping[Process, T]) -> dict[Process, T]:
        """Give what was found for a contender to each of its programs."""
        return {process: value for first, value in found.items() for process in self.programs(first)}

    def ranked(self, behind: Mapping[Process, Sequence[Process]]) -> dict[Process, Sequence[Process]]:
        """Return which programs go behind which, from the same of contenders."""
        if not self._programs:
            return dict(behind)
        wide = {first: [one for each in ahead for one in self.programs(each)] for first, ahead in behind.items()}
        return self.spread(wide)

    def together(self, window_us: int, samples: Mapping[Process, Sample]) -> dict[Process, Sample]:
        """Return the samples of contenders, from those of programs."""
        found = dict(samples)
        for first, programs in self._programs.items():
            each = [samples[process] for process in programs if process in samples]
            for process in programs:
                found.pop(process, None)
            if each:
                found[first] = _sum(window_us, each)
        return found


def _sum(window_us: int, each: Sequence[Sample]) -> Sample:
    """Return the sample of a space. What its programs used at the same time is counted for each of them, so that the
    sum may be more than there was.
    """
    used = [one.used_us for one in each if one.used_us is not None]
    waiting = [one.waiting for one in each if one.waiting is not None]
    stays = [one.stays for one in each if one.stays is not None]
    return attrs.evolve(
        Sample(),
        used_us=min(window_us, sum(used)) if len(used) == len(each) or any(used) else None,
        waiting=any(waiting) if len(waiting) == len(each) or any(waiting) else None,
        stays=sum(stays) if len(stays) == len(each) else None,
        drains=any(one.drains for one in each),
        stands=all(one.stands for one in each),
        stood=any(one.stood for one in each),
    )
