"""The runlist of the software GPU: TSGs take turns, each for its timeslice. Pure, in integer nanoseconds.

One engine, as the GR engine of a real GPU: a TSG (time-slice group, all the channels of one context) runs alone until
its timeslice is over or it has nothing left to do; a kernel that is not finished goes on in its next turn, as with
compute preemption on real hardware. Changing from one TSG to another costs engine time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import attrs

US = 1000


def _changed(tsg: Tsg, attribute: attrs.Attribute[bool], attached: bool) -> bool:
    tsg.news()
    return attached


@attrs.define(eq=False)
class Tsg:
    """A channel group: one context of one process."""

    timeslice: int
    """Longest turn, nanoseconds."""
    channels: int = 1
    """Channels in it; only counted."""
    attached: bool = attrs.field(default=True, on_setattr=_changed)
    """Whether it is on the runlist."""
    queue: deque[int] = attrs.field(factory=deque)
    """What each kernel that is queued or running still needs, nanoseconds, oldest first."""
    submitted: int = 0
    """Kernels launched, ever."""
    finished: int = 0
    """Kernels completed, ever."""
    busy: int = 0
    """Time on the engine, nanoseconds."""
    news: Callable[[], Any] = attrs.field(default=lambda: None, repr=False)
    """Called when it may be runnable and was not: by who is asked again and again, with a thousand that are not."""

    @property
    def runnable(self) -> bool:
        """Whether the engine would run it."""
        return self.attached and bool(self.queue)

    def launch(self, count: int, duration: int) -> None:
        """Queues `count` kernels of `duration` nanoseconds each."""
        self.queue.extend([duration] * count)
        self.submitted += count
        self.news()


class Runlist:
    """The engine and the TSGs that share it, at a time of its own: nothing happens but by :meth:`advance`."""

    def __init__(self, switch: int = 0) -> None:
        self.switch = switch
        """Engine time lost when another TSG takes over, nanoseconds."""
        self.now = 0
        """Simulated time, nanoseconds."""
        self._ring: deque[Tsg] = deque()
        self._running: Tsg | None = None
        self._turn = 0  # what is left of the running TSG's timeslice
        self._switching = 0  # what is left of the switch to it
        self._idle = False  # nobody was runnable, and nobody has had any news since

    def add(self, tsg: Tsg) -> None:
        """Puts a TSG at the end of the round."""
        self._ring.append(tsg)
        tsg.news = self._wake
        self._wake()

    def remove(self, tsg: Tsg) -> None:
        """Takes a TSG, and whatever it had queued, away for good."""
        self._ring.remove(tsg)
        if self._running is tsg:
            self._running = None

    def advance(self, until: int) -> Collection[Tsg]:
        """Runs the engine up to time `until`, nanoseconds; returns whose kernels finished, each once."""
        finished: dict[Tsg, None] = {}
        while (tsg := self.advance_to_finish(until)) is not None:
            finished[tsg] = None
        return finished.keys()

    def advance_to_finish(self, until: int) -> Tsg | None:
        """Runs the engine to the end of the next kernel, and says whose it was, but no further than time `until`."""
        while self.now < until:
            tsg = self._elect(until)
            if tsg is None:
                self.now = until
                return None
            if self._switching:
                step = min(self._switching, until - self.now)
                self._switching -= step
                self.now += step
                continue
            step = min(tsg.queue[0], self._turn, until - self.now)
            self._turn -= step
            self.now += step
            tsg.busy += step
            tsg.queue[0] -= step
            if not tsg.queue[0]:
                tsg.queue.popleft()
                tsg.finished += 1
                return tsg
        return None

    def until_next_finish(self) -> int | None:
        """Nanoseconds of work to the end of the kernel whose turn it is or comes next; None when all is idle."""
        if self._idle:
            return None
        tsg = self._running if self._running is not None and self._running.runnable else None
        tsg = tsg or next((other for other in self._ring if other.runnable), None)
        return None if tsg is None else tsg.queue[0] + self._switching

    def _elect(self, until: int) -> Tsg | None:
        """The TSG that runs now, after a switch if its predecessor's turn is over."""
        running = self._running
        if running is not None and running.runnable and self._turn > 0:
            return running
        if self._idle:
            return None
        for _ in range(len(self._ring)):
            tsg = self._ring.popleft()
            self._ring.append(tsg)
            if tsg.runnable:
                if tsg is not running:
                    self._switching = self.switch
                self._running, self._turn = tsg, tsg.timeslice
                if tsg is running and not any(other.runnable for other in self._ring if other is not tsg):
                    # Turn after turn of one that is alone, in one go: no other begins before `until`.
                    ahead = min(tsg.queue[0], until - self.now)
                    self._turn *= max(1, -(-ahead // tsg.timeslice))
                return tsg
        self._running, self._idle = None, True
        return None

    def _wake(self) -> None:
        self._idle = False
