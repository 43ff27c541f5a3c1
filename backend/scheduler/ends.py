"""How the turns of the programs of one GPU end: gate first, then a wait for what runs, and off the runlist after that.

The program launches nothing more, and what it launched has DRAIN_US to end, before its GR engine goes off. One that
needs longer goes on beside the program whose turn has begun: it *drains*, and its memory moves meanwhile as that of one
that runs. Beside others that are always busy it comes to run once in a round of 60 ms: in slices of 50 us 20 ms of work
would take 24 s. So it has DRAIN_SLICE_US, and takes 0.6 s.

What that costs a program of better priority: in a round with such a slice it waits for that, no longer than for any
neighbour where there is no scheduler. It does so for ten rounds of a turn, since what was launched is no more than the
run-ahead and a kernel. In slices of 50 us the same work would cost four times as much of the engine in switches alone.

One that does not end by then, with kernels of seconds or one that never ends, goes off as it is, and is late: nothing
of its memory moves until its turn. Its next turns end without a wait, for ever longer.

One whose memory is moving as its turn ends cannot say that it is drained before that is over, and with its engines off
that would not come to be over: it drains until then, also where it is not waited for otherwise.

What drains is charged to the program that drains. It runs in the time of another, whose slice is the shortest: a kernel
of 0.3 s has nearly all of the engine until it ends. So what a program uses from the end of its turn on counts as if its
turn had gone on for as long, and the turn of the other as if it had stood still meanwhile (``filler.py``): that ends as
much later, and no part of it counts as offered to the other. The program that drained waits the longer for its next
turn. So neither has more of the engine than the other, however long the kernels are. Where nothing tells what a program
uses it cannot be charged: it has DRAIN_UNTOLD_US by the clock. Once it needs longer it is not waited for in its next
turns, so that it has little that the other has not.
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
"""Microseconds that a program has to drain at the end of its turn, in the slice that it has. The next look comes after
the end of all that end in one: of a turn of 0.5 s it is a tenth, in which the engine is used."""
DRAIN_MOST_US = 2_000_000
"""Microseconds that it has after that, on the runlist: in rounds of 60 ms, behind others that always have work, 33
slices of 2 ms. It has 20 ms of work: what it may be ahead (AHEAD_US of ``core/turns.py``) and one kernel."""
DRAIN_UNTOLD_US = 100_000
"""Microseconds that one has instead of that where nothing tells exactly what it uses: beside one that fills, in whose
slices of 50 us it has nearly all of the engine, 20 ms of work take a fifth of it."""
DRAIN_SLICE_US = 2_000
"""Slice of a program that drains, microseconds: about what the driver gives (2.048 ms)."""
DRAIN_WORK_US = 400_000
"""Microseconds on the engine after which a program that drains is given up: it has a long kernel. Beside one that fills
it has most of the engine. The trace is 0.25 s late at most, so that much of its turn may be among them."""
DRAIN_BUS_US = 2_000_000
"""The same of a program that has memory in the host: its kernels have the engine for as long as they read that over the
bus, which takes some forty times as long, and as much longer as others read there, too. Turns of memory begin so."""
HEARD_S = 0.3
"""Seconds after the end of a drain in which what it used is heard of."""
UNDRAINED_S, UNDRAINED_MOST_S = 4.0, 60.0
"""Seconds in which a program that was not drained in time is not waited for at the end of its turns; each time twice as
long, up to the second. The first time may be for all that it had launched before its run-ahead was bounded."""


@attrs.define
class Drain:
    """A wait for a program that drains."""

    is_told: bool
    """Whether the machine told exactly what the program uses, as it began."""
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    """What gives it up."""
    used_us: int = 0
    """What the program used of the engine, as far as was heard, microseconds."""
    over: float | None = None
    """When it was over, by trio's clock; None before."""


class Ends:
    """See the module."""

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
        """`slot` is what is kept of a process; `is_exact` says whether the machine tells exactly what it uses,
        `is_moving` whether memory of it may be moving, and `is_away` whether it has some in the host. `over` calls the
        function that has a process off once it was drained, and that returns whether it was to be, and takes note of
        what comes of it. `lever_s` is what the levers of one process may take, seconds."""
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
        """What drains are waited for in, while the scheduler runs."""

    async def end(self, process: Process, place: Place) -> None:
        """Ends the turn of a process, for a place off the runlist. One that was not drained the last time is told to
        launch nothing more, and not waited for, but for its memory that moves."""
        group, waits = self._member(process), self._is_waited_for(process)
        end = await self._follower.turning.end(group, place, DRAIN_US if waits else 0, stays=waits)
        if end is TurnEnd.DRAINED:
            self._slot(process).undrained = None
        elif end is TurnEnd.LATE and self._is_moving(process):  # perhaps only since it was asked
            self._follower.schedule(group, attrs.evolve(self._follower.place(group), drain_us=0))

    def _is_waited_for(self, process: Process) -> bool:
        """Whether the kernels of a process are waited for at the end of its turn."""
        last = self._slot(process).undrained
        return last is None or trio.current_time() >= last.again

    def lengthen(self, process: Process) -> None:
        """Has a process that drains want the slice for that."""
        group = self._member(process)
        place = self._follower.place(group)
        if place.drains:
            self._follower.schedule(group, attrs.evolve(place, drain_us=DRAIN_SLICE_US))

    def wait(self, process: Process) -> None:
        """Has a process that drains go off the runlist once it is drained, or does not come to be."""
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
        elif end is TurnEnd.LATE and was_waited_for:
            wait = UNDRAINED_S if slot.undrained is None else min(UNDRAINED_MOST_S, 2 * slot.undrained.wait)
            slot.undrained = Undrained(trio.current_time() + wait, wait)
        try:
            with deadline(self._lever_s):
                await self._follower.apply(group)
        except trio.Cancelled:  # the scheduler begins anew, and would take it to be off
            self._follower.background.later(group)
            raise
        return True

    async def _wait(self, process: Process, is_told: bool) -> TurnEnd | None:
        """Waits for a process that drains for as long as it may, and has it wanted off the runlist then. One that is
        not waited for, or whose use is not told, may for DRAIN_UNTOLD_US, and as long as its memory moves."""
        group, drain, left_us = self._member(process), self._follower.turning.drain, DRAIN_MOST_US
        if is_told and self._is_waited_for(process):
            return await drain(group, left_us)
        until = trio.current_time() + left_us / 1e6
        while left_us > 0:
            with trio.move_on_after(DRAIN_UNTOLD_US / 1e6):
                return await drain(group, left_us)
            is_moving = self._is_moving(process)
            left_us = round((until - trio.current_time()) * 1e6) if is_moving else 0
        return await drain(group, 0)

    def observe(self, samples: Mapping[Process, Sample]) -> Mapping[Process, Sample]:
        """Note what processes used since the last look, and return it with those marked that drained. One that drains
        and used more than what it can have been ahead is given up, and so is one of which nothing tells that any more.
        Of one that is frozen, or without another on its GPU, there is no sample: it goes on to drain."""
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
