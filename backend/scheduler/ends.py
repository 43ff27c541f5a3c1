"""End the turns of the programs of one GPU: close the gate, wait for running kernels, leave the runlist.

At the end of its turn a program launches nothing more, and what it has launched gets DRAIN_US to finish before its GR
engine goes off. A program that needs longer *drains*: it stays on the runlist beside the program whose turn has
begun, and its memory can be moved meanwhile like that of a running program. Beside programs that are always busy it
runs once in a round of 60 ms. With slices of 50 us, 20 ms of work would take 24 s; with DRAIN_SLICE_US, 0.6 s.

The cost to a program of better priority: in each round with such a slice it waits for that slice, which is no longer
than it would wait for any neighbour without a scheduler. That happens in ten rounds of a turn, since the launched
work is no more than the run-ahead and one kernel. In slices of 50 us the switches for the same work would take four
times as much of the engine.

A program that has not drained by then, because its kernels take seconds or never end, goes off the runlist in the
middle of its work. It is *late*: none of its memory moves until its next turn. Its next turns end without a wait, for
a longer time after each failure.

A program whose memory is moving at the end of its turn cannot report that it has drained before the move is over, and
with its engines off the move would never be over. So it drains until then, even where it would not be waited for.

Drained work is charged to the program that drains, although it runs in the turn of another. The other's slice is the
shortest, so a kernel of 0.3 s has nearly all of the engine until it ends. So use after the end of a turn counts as if
that turn had gone on for as long, and as if the other's turn had stood still (``filler.py``): the other's turn ends
later by that time, and the time does not count as offered to it. The program that drained waits longer for its next
turn. So neither gets more of the engine than the other, however long the kernels are. Where the use of a program is
not told exactly, it cannot be charged: it has DRAIN_UNTOLD_US by the clock, and after a drain that took longer its
next turns end without a wait, so that it gains little over the other.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import attrs
import trio

from backend.core.deadlines import deadline
from backend.core.follower import Follower
from backend.core.member import Scheduled, Undrained
from backend.core.records import Place
from backend.core.turns import TurnEnd
from backend.process.identity import Member, Process
from backend.scheduler.use import Sample

DRAIN_US = 5_000
"""Time that a program has to drain at the end of its turn, in its own slice, microseconds. The next look waits for all
turns that end in one look; this is a hundredth of a turn of 0.5 s, and the engine is busy meanwhile.
"""
DRAIN_MOST_US = 2_000_000
"""Time that it has after that, on the runlist, microseconds: 33 slices of 2 ms, in rounds of 60 ms behind programs
that always have work. It has 20 ms of work at most: its run-ahead (AHEAD_US of ``core/turns.py``) and one kernel.
"""
DRAIN_UNTOLD_US = 100_000
"""The same where use is not told exactly, microseconds. Next to a filler, whose slices are 50 us, a draining
program has nearly all of the engine, so 20 ms of work take a fifth of this.
"""
DRAIN_SLICE_US = 2_000
"""Slice of a program that drains, microseconds: about the driver's default (2.048 ms)."""
DRAIN_WORK_US = 400_000
"""Engine time after which a drain is given up, microseconds: the program has a long kernel. Next to a filler it
has most of the engine. The trace is up to 0.25 s late, so up to that much of its own turn may be counted in.
"""
DRAIN_BUS_US = 2_000_000
"""The same for a program that has memory in the host, microseconds. Its kernels have the engine for as long as they
read that memory over the bus, some forty times as long, and longer while others read there, too. Turns of memory begin
so.
"""
DRAIN_AWAY_US = 6_000_000
"""Time that such a program has by the clock when it waits for a memory turn, microseconds. All of them may drain at
once. Off the runlist in the middle of its work it would keep its memory, and begin its next turn without the rest.
"""
HEARD_S = 0.3
"""Time after the end of a drain during which its use is still reported, seconds."""
UNDRAINED_S, UNDRAINED_MOST_S = 4.0, 60.0
"""Time during which a program that did not drain in time is not waited for at the end of its turns, seconds: the
first, which doubles with each failure, and the longest. The first failure may be due to work that it had launched
before its run-ahead was bounded.
"""


@attrs.define
class Drain:
    """A wait for one program that drains."""

    is_told: bool
    """Whether the machine told exactly what the program uses when the drain began."""
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    """The scope of the wait; cancelled to give the drain up."""
    used_us: int = 0
    """Engine time that the program used while it drained, as far as reported, microseconds."""
    over: float | None = None
    """When the drain was over, by trio's clock; None before."""


class Ends:
    """The ends of the turns of one GPU."""

    def __init__(
        self,
        follower: Follower,
        member: Callable[[Process], Member],
        slot: Callable[[Process], Scheduled],
        over: Callable[[Process, Callable[[], Awaitable[bool]]], Awaitable[None]],
        is_exact: Callable[[Process], bool],
        is_moving: Callable[[Process], bool],
        is_away: Callable[[Process], bool],
        lever_s: float,
    ) -> None:
        """`member` and `slot` return the member of a process and its scheduler's record. `is_exact` returns whether
        the machine tells exactly what a process uses, `is_moving` whether memory of the process may be moving, and
        `is_away` whether some of it is in the host. `over` awaits a function that waits for the drain of a process and
        then takes it off the runlist, and records the outcome; the function returns whether the process was to go off.
        `lever_s` is the time that the levers of one process may take, in seconds.
        """
        self._follower = follower
        self._member = member
        self._slot = slot
        self._over = over
        self._is_exact = is_exact
        self._is_moving = is_moving
        self._is_away = is_away
        self._lever_s = lever_s
        self._drains: dict[Process, Drain] = {}
        self.nursery: trio.Nursery | None = None
        """The nursery that waits for drains while the scheduler runs."""

    async def end(self, process: Process, place: Place) -> None:
        """End the turn of a process whose new `place` is off the runlist. A process that did not drain in time
        before is told to launch nothing more and is not waited for, unless its memory is moving.
        """
        group, waits = self._member(process), self._is_waited_for(process)
        end = await self._follower.turning.end(group, place, DRAIN_US if waits else 0, stays=waits)
        if end is TurnEnd.DRAINED:
            self._slot(process).undrained = None
        elif end is TurnEnd.LATE and self._is_moving(process):  # a move may have begun just now
            self._follower.schedule(group, attrs.evolve(self._follower.place(group), drain_us=0))

    def _is_waited_for(self, process: Process) -> bool:
        """Return whether the end of a process's turn waits for its kernels."""
        last = self._slot(process).undrained
        return last is None or trio.current_time() >= last.again or self._reads_over_bus(process)

    def _reads_over_bus(self, process: Process) -> bool:
        """Return whether a process waits for a memory turn and has memory in the host: then that is why it is late, and
        not its kernels, and the next time it has that memory if it drains now.
        """
        return self._slot(process).rests and self._is_away(process)

    def lengthen(self, process: Process) -> None:
        """Request DRAIN_SLICE_US for a process if it drains."""
        group = self._member(process)
        place = self._follower.place(group)
        if place.drains:
            self._follower.schedule(group, attrs.evolve(place, drain_us=DRAIN_SLICE_US))

    def wait(self, process: Process) -> None:
        """Start to wait for a process that drains: it goes off the runlist once drained, or once its time is over."""
        group = self._member(process)
        is_new = self._follower.place(group).drains and not self._follower.turning.is_waited_for(group)
        if self.nursery is not None and is_new:
            self.nursery.start_soon(self._over, process, lambda: self._drained(process))

    async def _drained(self, process: Process) -> bool:
        group, drain = self._member(process), Drain(self._is_exact(process))
        self._drains[process] = drain
        was_waited_for, end = self._is_waited_for(process), None
        try:
            with drain.scope:
                end = await self._wait(process, drain.is_told)
            if drain.scope.cancelled_caught:
                end = await self._follower.turning.drain(group, 0)
        finally:
            drain.over = trio.current_time()
        if end is None:
            return False
        slot = self._slot(process)
        if end is TurnEnd.DRAINED:
            slot.undrained = None
        elif end is TurnEnd.LATE and was_waited_for and not self._reads_over_bus(process):
            wait = UNDRAINED_S if slot.undrained is None else min(UNDRAINED_MOST_S, 2 * slot.undrained.wait)
            slot.undrained = Undrained(trio.current_time() + wait, wait)
        try:
            with deadline(self._lever_s):
                await self._follower.apply(group)
        except trio.Cancelled:  # the scheduler starts over, and would believe it off
            self._follower.background.later(group)
            raise
        return True

    async def _wait(self, process: Process, is_told: bool) -> TurnEnd | None:
        """Wait for a draining process within its bounds, and then want it off the runlist; return how its turn
        ended, None if it drains no more. A process that is not waited for, or whose use is not told, has
        DRAIN_UNTOLD_US, and longer only while its memory moves or is read over the bus.
        """
        group, drain = self._member(process), self._follower.turning.drain
        left_us = DRAIN_AWAY_US if self._reads_over_bus(process) else DRAIN_MOST_US
        if is_told and self._is_waited_for(process):
            return await drain(group, left_us)
        until = trio.current_time() + left_us / 1e6
        while left_us > 0:
            with trio.move_on_after(DRAIN_UNTOLD_US / 1e6):
                return await drain(group, left_us)
            goes_on = self._is_moving(process) or self._reads_over_bus(process)
            left_us = round((until - trio.current_time()) * 1e6) if goes_on else 0
        return await drain(group, 0)

    def observe(self, samples: Mapping[Process, Sample]) -> Mapping[Process, Sample]:
        """Record what processes used since the last look; return the samples, with those of drained processes marked.

        A drain is given up when the process has used more than it can have been ahead, or when its use is no longer
        told exactly. A process that is frozen, or alone on its GPU, has no sample: its drain goes on.
        """
        found, now = dict(samples), trio.current_time()
        for process, drain in list(self._drains.items()):
            if drain.over is not None and now >= drain.over + HEARD_S:
                del self._drains[process]
            elif (sample := samples.get(process)) is not None:
                drain.used_us += sample.used_us or 0
                most_us = DRAIN_BUS_US if self._is_away(process) else DRAIN_WORK_US
                if drain.used_us > most_us or (drain.is_told and not self._is_exact(process)):
                    drain.scope.cancel()
                found[process] = attrs.evolve(sample, drains=True)
        return found
