"""Turning: the levers that end and begin the turns of programs, and the state in between.

A program whose turn is over may stay on the runlist for some time with its gate closed: it *drains*. It launches
nothing more, and what it launched runs, so that its memory can move while it waits. Then it goes off the runlist.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping

import attrs
import trio

from backend.common.errors import fail
from backend.core.member import Compute
from backend.core.population import Population
from backend.core.protocols import Gpu
from backend.core.reasons import Engines
from backend.core.records import Place
from backend.core.turns import TurnEnd
from backend.process.identity import Member


class Turning:
    """The ends and beginnings of turns on all GPUs; a part of the Follower, which pulls the levers."""

    def __init__(
        self, gpus: Mapping[int, Gpu], population: Population, schedule: Callable[[Member, Place], None]
    ) -> None:
        """`schedule` sets the place that is wanted for a process."""
        self._gpus = gpus
        self._population = population
        self._schedule = schedule

    def _of(self, group: Member) -> Compute:
        return self._population.record(group).compute

    async def end(self, group: Member, place: Place, bound_us: int, *, stays: bool = False) -> TurnEnd:
        """End the turn of a process, for a place off the runlist. It launches nothing more, and what it launched has
        `bound_us` microseconds to finish (:meth:`backend.core.protocols.Gpu.end_turn`). The place is wanted from then
        on, with the engines off that the end of the turn allows: GR if nothing more is launched, otherwise all. With
        `stays`, a late process is wanted on the runlist, to drain there (:meth:`drain`).

        If this fails or is cancelled, :meth:`backend.core.follower.Follower.fall_back` lets the turn go on.
        """
        compute = self._of(group)
        # otherwise a lever that is pulled meanwhile would find a turn that has not ended, and begin it
        async with compute.lever():
            if self._of(group) is not compute:
                raise fail(errno.ESRCH)
            compute.turn_end = TurnEnd.UNGATED
            end = compute.turn_end = await self._gpus[group.gpu].end_turn(group.process, bound_us, place.leaves)
            if self._of(group) is not compute:
                raise fail(errno.ESRCH)
            drain_us = 0 if stays and end is TurnEnd.LATE else None
            self._schedule(group, attrs.evolve(place, engines=_taken(end), drain_us=drain_us))
        return end

    async def drain(self, group: Member, bound_us: int) -> TurnEnd | None:
        """Wait up to `bound_us` microseconds for a process that drains; then its place off the runlist is wanted. No
        lever is held meanwhile, so the process may be frozen or moved. None if it drains no more, because its turn has
        begun or it is gone. Errors as of :meth:`backend.core.protocols.Gpu.end_turn`.
        """
        if not self._population.holds(group) or not self._of(group).place.drains:
            return None
        compute = self._of(group)
        scope = compute.draining = trio.CancelScope()
        end = None
        try:
            with scope:
                leaves = compute.place.leaves
                end = await self._gpus[group.gpu].end_turn(group.process, bound_us, leaves)
            if end is None or not self._population.holds(group):
                return None
            async with compute.lever():
                if self._of(group) is not compute or compute.draining is not scope or not compute.place.drains:
                    return None
                compute.turn_end = end
                self._schedule(group, attrs.evolve(compute.place, engines=_taken(end), drain_us=None))
            return end
        finally:
            if compute.draining is scope:
                compute.draining = None

    async def spend(self, group: Member, *, pulls: bool = True) -> None:
        """Stop a process whose quota is used up: at its gate, which is closed at once without a wait, or without its GR
        engine if nothing holds its launches and levers are to be pulled. A process that waits for its turn is stopped
        already.
        """
        compute = self._of(group)
        async with compute.lever():
            if self._of(group) is not compute:
                raise fail(errno.ESRCH)
            if compute.turn_end in (None, TurnEnd.UNGATED):
                compute.turn_end = TurnEnd.UNGATED
                compute.turn_end = await self._gpus[group.gpu].end_turn(group.process, 0)
                if self._of(group) is not compute:
                    raise fail(errno.ESRCH)
            compute.spent = Engines.GR if pulls and compute.turn_end is TurnEnd.UNGATED else Engines.NONE

    def is_waited_for(self, group: Member) -> bool:
        """Return whether :meth:`drain` is waiting for a process."""
        return self._of(group).draining is not None

    async def begin(self, group: Member, compute: Compute) -> None:
        """Let a process launch again that is on the runlist, or off it for another reason than its turn."""
        if compute.turn_end is None:
            return
        if compute.draining is not None:  # otherwise the wait in drain() would close the gate again
            compute.draining.cancel()
            compute.draining = None
        await self._gpus[group.gpu].begin_turn(group.process)
        compute.turn_end = None


def _taken(end: TurnEnd) -> Engines:
    """Return the engines that go off the runlist at the end of a turn."""
    return Engines.ALL if end is TurnEnd.UNGATED else Engines.GR
