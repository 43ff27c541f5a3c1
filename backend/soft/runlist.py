"""The runlist of the software GPU: TSGs run in turn, each for its timeslice. Pure, in integer nanoseconds.

There is one engine, like the GR engine of a real GPU. A TSG (timeslice group, all the channels of one context) runs
alone until its timeslice is over or it has no more work; an unfinished kernel goes on in the TSG's next turn, as with
compute preemption on real hardware. A change from one TSG to another costs engine time. A kernel that reaches over
the bus has a fair share of it, beside the moves in that direction.

TSGs of one space have a turn together, and run at the same time in it: their kernels are taken to be so small that all
of them have room. Each is charged with an equal part of the time.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import partial
from typing import Any

import attrs

US = 1000


def _changed(tsg: Tsg, attribute: attrs.Attribute[bool], attached: bool) -> bool:
    tsg.turned(tsg, attached and bool(tsg.queue))
    return attached


@attrs.define(eq=False)
class Tsg:
    """A timeslice group: one context of one process."""

    timeslice: int
    """Longest turn, nanoseconds."""
    channels: int = 1
    """Number of channels in it; they are only counted."""
    attached: bool = attrs.field(default=True, on_setattr=_changed)
    """Whether it is on the runlist."""
    queue: deque[int] = attrs.field(factory=deque)
    """Remaining time of each kernel that is queued or running, nanoseconds, oldest first."""
    reach: deque[int] = attrs.field(factory=deque)
    """The part of that which each kernel first spends to reach over the bus, nanoseconds with the whole bandwidth."""
    pending: int = 0
    """Remaining time of all these kernels, nanoseconds; kept as a sum, as there may be very many."""
    submitted: int = 0
    """Number of kernels ever launched."""
    finished: int = 0
    """Number of kernels ever completed."""
    busy: int = 0
    """Time on the engine, nanoseconds."""
    stays: int = 0
    """Number of times that it took over the engine."""
    turned: Callable[[Tsg, bool], Any] = attrs.field(default=lambda tsg, runnable: None, repr=False)
    """Called when it may have become runnable, or stopped being so, as the runlist cannot ask a thousand TSGs."""
    place: int = attrs.field(default=0, repr=False)
    """Index in the round."""

    @property
    def runnable(self) -> bool:
        """Whether the engine would run it."""
        return self.attached and bool(self.queue)

    def launch(self, count: int, duration: int, reach: int = 0) -> None:
        """Queue `count` kernels of `duration` nanoseconds each, of which each reaches over the bus for `reach`."""
        self.queue.extend([duration] * count)
        self.reach.extend([reach] * count)
        self.pending += count * duration
        self.submitted += count
        self.turned(self, self.runnable)

    def drop(self) -> None:
        """Drop all queued kernels."""
        self.queue.clear()
        self.reach.clear()
        self.pending = 0
        self.turned(self, False)

    @property
    def at_work(self) -> Sequence[Tsg]:
        """The TSGs that run in its turn: itself."""
        return (self,)

    def begins(self) -> None:
        """Count that it takes over the engine."""
        self.stays += 1


@attrs.define(eq=False)
class Side:
    """The TSGs of one space, which have one turn in the round."""

    tsgs: list[Tsg] = attrs.field(factory=list)
    """All of them."""
    place: int = attrs.field(default=0, repr=False)
    """Index in the round."""

    @property
    def at_work(self) -> Sequence[Tsg]:
        """Those that the engine would run."""
        return [tsg for tsg in self.tsgs if tsg.runnable]

    @property
    def runnable(self) -> bool:
        """Whether the engine would run any of them."""
        return any(tsg.runnable for tsg in self.tsgs)

    @property
    def timeslice(self) -> int:
        """Longest turn of all of them together, nanoseconds."""
        return max(tsg.timeslice for tsg in self.tsgs)

    def begins(self) -> None:
        """Count that they take over the engine."""
        for tsg in self.at_work:
            tsg.stays += 1


Seat = Tsg | Side
"""What has a turn in the round."""


class Runlist:
    """The engine and the TSGs that share it, in a time of its own that only :meth:`advance` moves on."""

    def __init__(self, switch: int = 0) -> None:
        self.switch = switch
        """Engine time lost when another TSG takes over, nanoseconds."""
        self.now = 0
        """Simulated time, nanoseconds."""
        self._round: list[Seat] = []
        self._sides: dict[Hashable, Side] = {}
        self._next = 0  # the place in the round that has the next turn
        self._ready: list[int] = []  # places of the runnable TSGs, ascending
        self._running: Seat | None = None
        self._turn = 0  # nanoseconds left of what runs
        self._switching = 0  # nanoseconds left of the switch to it
        self._sharers = 1  # parts of the bus while a kernel reaches over it: the kernel's own, and those of moves
        self._carry = 0  # nanoseconds that a kernel reached over the bus, short of one whole one of its own
        self._reached = 0

    def add(self, tsg: Tsg, space: Hashable = None) -> None:
        """Put a TSG at the end of the round; one of a space has its turn together with the others there."""
        if space is None:
            self._sit(tsg)
            tsg.turned = self._turned
        else:
            side = self._sides.get(space)
            if side is None:
                side = self._sides[space] = Side()
                self._sit(side)
            side.tsgs.append(tsg)
            tsg.turned = partial(self._turned_in, side)
        self._number()

    def _sit(self, seat: Seat) -> None:
        self._round.insert(self._next, seat)
        self._next += 1

    def remove(self, tsg: Tsg) -> None:
        """Remove a TSG, with its queued kernels, for good."""
        tsg.turned = lambda tsg, runnable: None
        seat: Seat = tsg
        for space, side in self._sides.items():
            if tsg in side.tsgs:
                side.tsgs.remove(tsg)
                if side.tsgs:
                    self._number()
                    return
                seat = self._sides.pop(space)
                break
        self._round.remove(seat)
        self._next -= seat.place < self._next
        self._number()
        if self._running is seat:
            self._running = None

    def advance(self, until: int) -> Collection[Tsg]:
        """Run the engine up to time `until`, nanoseconds; return the TSGs that finished kernels, each once."""
        finished: dict[Tsg, None] = {}
        while (tsg := self.advance_to_finish(until)) is not None:
            finished[tsg] = None
        return finished.keys()

    def advance_to_finish(self, until: int) -> Tsg | None:
        """Run the engine to the end of the next kernel, but not beyond time `until`; return the TSG of that
        kernel, or None.
        """
        while self.now < until:
            seat = self._elect(until)
            if seat is None:
                self.now = until
                return None
            if self._switching:
                step = min(self._switching, until - self.now)
                self._switching -= step
                self.now += step
                continue
            at_work = seat.at_work
            if not any(tsg.queue[0] == 0 for tsg in at_work):  # several may end at the same time
                if len(at_work) == 1:
                    self._work(at_work[0], min(self._turn, until - self.now))
                else:
                    self._work_together(at_work, min(self._turn, until - self.now))
            for tsg in at_work:
                if not tsg.queue[0]:
                    tsg.queue.popleft()
                    tsg.reach.popleft()
                    tsg.finished += 1
                    if not tsg.queue:
                        tsg.turned(tsg, False)
                    return tsg
        return None

    def _work_together(self, tsgs: Sequence[Tsg], most: int) -> None:
        """Run the oldest kernels of some TSGs at the same time, for up to `most` nanoseconds, until one of them has
        done its reach over the bus, or the rest."""
        step = min(most, *(tsg.reach[0] * self._sharers or tsg.queue[0] for tsg in tsgs))
        each, more = divmod(step, len(tsgs))
        for number, tsg in enumerate(tsgs):
            done = step
            if tsg.reach[0]:
                done = min(tsg.reach[0], -(-step // self._sharers))
                tsg.reach[0] -= done
                self._reached += done
            tsg.busy += each + (number < more)
            tsg.queue[0] -= done
            tsg.pending -= done
        self._turn -= step
        self.now += step

    def _work(self, tsg: Tsg, most: int) -> None:
        """Run the oldest kernel of a TSG for up to `most` nanoseconds: first its reach over the bus, then the rest."""
        if reach := tsg.reach[0]:
            step = min(reach * self._sharers - self._carry, most)
            done, self._carry = divmod(step + self._carry, self._sharers)
            tsg.reach[0] -= done
            self._reached += done
        else:
            step = done = min(tsg.queue[0], most)
        self._turn -= step
        self.now += step
        tsg.busy += step
        tsg.queue[0] -= done
        tsg.pending -= done

    def share(self, moves: int) -> None:
        """Make kernels share the bus with this many moves from now on."""
        self._sharers, self._carry = 1 + moves, 0

    def take_reached(self) -> int:
        """Return the nanoseconds of the whole bus that kernels had since the last call."""
        reached, self._reached = self._reached, 0
        return reached

    def until_next_finish(self) -> int | None:
        """Return the nanoseconds of work until the current or next kernel ends; None when all is idle."""
        seat = self._running if self._running is not None and self._running.runnable else self._first()
        if seat is None:
            return None
        return min(tsg.queue[0] + tsg.reach[0] * (self._sharers - 1) for tsg in seat.at_work) + self._switching

    def _elect(self, until: int) -> Seat | None:
        """Return what runs now, and begin a switch if its predecessor's turn is over."""
        running = self._running
        if running is not None and running.runnable and self._turn > 0:
            return running
        seat = self._first()
        if seat is None:
            self._running = None
            return None
        self._next = seat.place + 1
        if seat is not running:
            self._switching = self.switch
            seat.begins()
        self._running, self._turn = seat, seat.timeslice
        if seat is running and len(self._ready) == 1:
            # Turn after turn of what is alone, in one go: no other begins before `until`.
            ahead = min(*(tsg.queue[0] for tsg in seat.at_work), until - self.now)
            self._turn *= max(1, -(-ahead // seat.timeslice))
        return seat

    def _first(self) -> Seat | None:
        """Return what has the next turn."""
        if not self._ready:
            return None
        at = bisect.bisect_left(self._ready, self._next)
        return self._round[self._ready[at % len(self._ready)]]

    def _turned(self, seat: Seat, runnable: bool) -> None:
        at = bisect.bisect_left(self._ready, seat.place)
        there = at < len(self._ready) and self._ready[at] == seat.place
        if runnable and not there:
            self._ready.insert(at, seat.place)
        elif there and not runnable:
            del self._ready[at]

    def _turned_in(self, side: Side, tsg: Tsg, runnable: bool) -> None:
        """Note that a TSG of a space may run from now on, or not: it still says what it was before."""
        self._turned(side, runnable or any(one.runnable for one in side.tsgs if one is not tsg))

    def _number(self) -> None:
        for place, seat in enumerate(self._round):
            seat.place = place
        self._ready = [seat.place for seat in self._round if seat.runnable]
