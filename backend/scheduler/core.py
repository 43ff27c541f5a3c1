"""Scheduler of one GPU: turns shares into places on hardware that has only timeslices and a runlist.

The runlist is a round: each channel group (TSG) that has work runs for at most its timeslice, then the next one does. A
switch costs 0.2 ms of the engine, however long the slices are (measured on an H200, docs/nvidia.md). So programs that
share the engine have long slices (``fair.py``). A filler, which gets the time that these leave, has the shortest slice
(``filler.py``): it is off the engine as soon as they want it, and back as soon as they do not.
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
"""Slice of a filler, microseconds."""
HELD_US = 2_000
"""Slice of a filler that is held in busy periods and launches brief work, microseconds. What it has on the GPU when it
is held, YIELD_AHEAD_US and one launch, is over in one slice or in a few. With FILLER_US the same work would be run in
the gaps between many requests, and each gap would pay two switches of 0.2 ms for it. A program that launches in spite
of the hold takes that much more of each gap. (1 ms does as well for kernels of 0.2 ms. Beside kernels of 1.5 ms on an
H200, p99 was 1.03 times that alone with 2 ms, and 1.09 and 1.13 times with 1 ms.)
"""
CONTEXT_US = 100
"""Slice per context of a filler with several contexts, microseconds: with switches, four contexts are in the way of
others for 1.2 ms.
"""

LEFT_US = 2_000_000
"""Time over which the share of the engine that the first layer leaves is averaged, microseconds."""
WORTH = (0.1, 0.2)
"""Fraction of the engine left to fillers below which no memory is moved for their turns, and the fraction above which
it is moved again.
"""


def filler_us(contexts: int, is_brief: bool = False) -> int:
    """Return the slice of a filler, microseconds. `is_brief` says that it is held and launches brief work. Several
    contexts of a program switch among themselves: with FILLER_US for all of them they would do nothing else.
    """
    if contexts > 1:
        return CONTEXT_US * contexts
    return HELD_US if is_brief else FILLER_US


class Core:
    """The scheduler of one GPU, without the clock and the hardware."""

    def __init__(self, default_us: int = 2048) -> None:
        """`default_us` is the timeslice that the driver gives a TSG, microseconds."""
        self._default_us = default_us
        self._use = Use()
        self._fair = Fair()
        self._filler = Filler()
        self._waiting = Waiting()
        self._others: Sequence[Layer] = ()  # layers of fillers, the best first
        self._left = 1.0  # recent average of the fraction of the engine that the first layer leaves
        self._is_worth = True  # whether that is enough to move memory for the turns of fillers

    def decide(
        self,
        window_us: int,
        contenders: Sequence[Contender],
        samples: Mapping[Process, Sample],
        waiting: Collection[Process] = (),
    ) -> Parts[Mapping[Process, Place]]:
        """Return the places of all contenders from now on. `samples` cover the `window_us` microseconds since the last
        call; the field `active` of a contender is not read. Contenders that are `waiting` for a turn of memory get no
        place, and no share is kept for them. Yields between parts of the work, since with a thousand contenders each
        part takes some milliseconds.
        """
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
        """Return whether a process has work, as far as was seen, and gets enough of the engine to be worth moving its
        memory for. A filler behind a program that is always busy gets a thousandth.
        """
        fills = any(process in layer for layer in self._others)
        return self._use.wants(process, HUNGRY_US) and (self._is_worth or not fills)

    def _observe_left(self, window_us: int, lead_us: int) -> None:
        if window_us:
            part = min(1.0, window_us / LEFT_US)
            self._left += part * (max(0.0, 1 - lead_us / window_us) - self._left)
        self._is_worth = self._left > (WORTH[0] if self._is_worth else WORTH[1])

    def order(self, contenders: Sequence[Contender]) -> Order:
        """Return the order in which these contenders are to run, as of the last decision."""
        return self._waiting.order(contenders)

    def _places(self, window_us: int, contenders: Sequence[Contender]) -> Parts[dict[Process, Place]]:
        use = self._use
        # The only contender with work loses nothing by short slices: it may as well go on as a filler.
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
