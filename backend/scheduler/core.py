"""How parts of a GPU are brought about on hardware that knows timeslices and a runlist only.

The runlist is a round: each channel group (TSG) that has work runs for its timeslice at most, then the next one, and
every switch costs 0.2 ms of the engine, however long the slices are (measured on an H200, docs/nvidia.md). So programs
that share have long slices (``fair.py``), and one that is to fill what they leave has the shortest (``filler.py``): it
is off the engine as soon as they want it, and back in the same instant that they do not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import attrs

from backend.core.nextuse import Order
from backend.core.records import NOWHERE, Place
from backend.process.identity import Process
from backend.scheduler.fair import Fair
from backend.scheduler.filler import Filler
from backend.scheduler.order import Waiting
from backend.scheduler.parts import Parts
from backend.scheduler.shares import Contender, Layer, strata
from backend.scheduler.use import ACTIVE_US, HUNGRY_US, LEAD_US, LIGHT_US, Sample, Use

FILLER_US = 50
"""Slice of a program that fills what is left, microseconds."""
HELD_US = 2_000
"""Slice of a program that fills and is held in busy periods, where what it launches is brief, microseconds: what it may
have on the GPU when it is held, YIELD_AHEAD_US and a launch, is over in one go, or in few. In slices of FILLER_US that
would be run in the gaps between many requests, each of which pays two switches of 0.2 ms for it. One that launches all
the same has so much more of each gap. (1 ms does as well for kernels of 0.2 ms; beside
such of 1.5 ms p99 was 1.03 times that alone with 2 ms on an H200, with 1 ms 1.09 and 1.13.)"""
CONTEXT_US = 100
"""Slice of each of its contexts, where it has several, microseconds: with switches, four of them are in the way for
1.2 ms."""

LEFT_US = 2_000_000
"""Microseconds over which is looked at what those that lead leave to others."""
WORTH = (0.1, 0.2)
"""Part of the engine below which memory is not moved for the turns of those that fill, and above which it is again."""


def filler_us(contexts: int, is_brief: bool = False) -> int:
    """Return the slice of a program that fills, microseconds; `is_brief`: it is held, and launches what is brief.
    Several contexts of one program switch among themselves: with 50 us for all of them they would do nothing else."""
    if contexts > 1:
        return CONTEXT_US * contexts
    return HELD_US if is_brief else FILLER_US


class Core:
    """The scheduler of one GPU, without a clock and without a GPU."""

    def __init__(self, default_us: int = 2048) -> None:
        """`default_us` is the timeslice that the driver gives a TSG."""
        self._default_us = default_us
        self._use = Use()
        self._fair = Fair()
        self._filler = Filler()
        self._waiting = Waiting()
        self._others: Sequence[Layer] = ()  # those that fill what is left, the best first
        self._left = 1.0  # part of the engine that those before them leave, of late
        self._is_worth = True  # whether that is enough to move memory for

    def decide(
        self,
        window_us: int,
        contenders: Sequence[Contender],
        samples: Mapping[Process, Sample],
        waiting: Collection[Process] = (),
    ) -> Parts[Mapping[Process, Place]]:
        """Places of all contenders from now on. `samples` are of the `window_us` microseconds since it was asked last;
        `active` of a contender is not looked at. Those that are `waiting` for a turn of memory have no place, and none
        of the others shares with them. In parts: of a thousand contenders each takes some milliseconds."""
        use = self._use
        use.observe(window_us, [one.process for one in contenders], samples)
        yield
        contenders = [one for one in contenders if one.process not in waiting]
        if len(contenders) > 1:
            places = yield from self._places(window_us, contenders)
        else:
            places = {}
            self._fair.pause()
        use.placed([*(process for process, place in places.items() if place.off), *waiting])
        self._waiting.observe(window_us, self._others, places)
        return {one.process: places.get(one.process, NOWHERE) for one in contenders}

    def wants(self, process: Process) -> bool:
        """Return whether a process has something to do, as far as it was seen, and is left enough of the engine for
        it that its memory is worth a turn: behind one that is always busy it has a thousandth."""
        fills = any(process in layer for layer in self._others)
        return self._use.wants(process, HUNGRY_US) and (self._is_worth or not fills)

    def _observe_left(self, window_us: int, lead_us: int) -> None:
        if window_us:
            part = min(1.0, window_us / LEFT_US)
            self._left += part * (max(0.0, 1 - lead_us / window_us) - self._left)
        self._is_worth = self._left > (WORTH[0] if self._is_worth else WORTH[1])

    def order(self, contenders: Sequence[Contender]) -> Order:
        """Return what comes for these contenders, as it was decided last."""
        return self._waiting.order(contenders)

    def _places(self, window_us: int, contenders: Sequence[Contender]) -> Parts[dict[Process, Place]]:
        use = self._use
        # One that alone has something to do loses nothing by short slices: it may as well go on as a filler.
        alone = sum(use.wants(one.process, HUNGRY_US) for one in contenders) < 2
        yield
        seen = [
            attrs.evolve(
                one,
                active=use.wants(one.process, LIGHT_US if self._fair.is_light(one.process) else ACTIVE_US),
                present=alone or use.wants(one.process, LEAD_US),
            )
            for one in contenders
        ]
        yield
        self._fair.keep({one.process for one in contenders})
        explicit = {one.process for one in contenders if one.explicit}
        first, *others = strata(seen)
        self._others = others
        yield
        members = [one for one in seen if one.process in first]
        if explicit & first.keys():
            slices = dict(self._fair.beside(window_us, members, use, self._default_us))
        else:
            slices = dict(self._fair.slices(window_us, first, members, use, leads=bool(others)))
        yield
        used = {one.process: use.used(one.process) or 0 for one in contenders}
        lead, spare = sum(used[process] for process in first), window_us - sum(used.values())
        self._observe_left(window_us, lead)
        off = self._filler.off(window_us, others, use, lead, spare)
        yield
        for layer in others:
            slices |= {process: filler_us(use.contexts(process), use.is_brief(process)) for process in layer}
        return {p: Place(0 if p in explicit else us, off=p in off) for p, us in slices.items()}
