"""One engine with real costs of a switch, programs that serve requests, and one that fills, in virtual time.

The engine is round robin: a context runs until its timeslice is over or it has nothing to do; what comes next pays for a
switch, but the one that ran last. The programs go by the library's own rules (hold.h, pace.h), with the time that their
threads take to hear of things. All times are nanoseconds where nothing else is said.

It has what an H200 showed (`tests/t7_nvidia/t7_bursts.py`): with what a filler may run ahead drained in slices of 50 us, each
gap between two requests pays for two switches.
"""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Sequence

import attrs

from tests.support.bursts.rules import Allowance, Pace

US = 1_000
NEVER = 1 << 62

SWITCH = 197 * US
"""The engine's time that goes when another context gets it (docs/nvidia.md)."""
LEAD_SLICE = 60_000 * US
"""Timeslice of programs that go before others."""
LAUNCH = 8 * US
"""From the call that launches a request to the engine's having it."""
RETURN = 12 * US
"""From the end of a request on the engine to the call's return, and the word that says so."""
FILL = 4 * US
"""Between two launches of what fills."""
LOOK = 55 * US
"""Between two looks of what fills how far it is: LOOK_LEAST of turn.c, and what a timer is late by."""
WAKE = 10 * US
"""From the end of a hold to the next launch."""
SHAPE = 0.5
"""Of the gamma distribution of gaps between requests: a deviation of 1.4 times the mean."""


def arrivals(seed: str, load: float, bursts: bool, service: int, seconds: float) -> list[int]:
    """Return when requests come, as a gamma process, or for half of each second at twice the load."""
    source, now, found = random.Random(seed), 0.0, list[int]()
    rate = (2 * load if bursts else load) / service
    while True:
        now += source.gammavariate(SHAPE, 1 / rate / SHAPE)
        wall = now + 0.5e9 * int(now / 0.5e9) if bursts else now
        if wall > seconds * 1e9:
            return found
        found.append(round(wall))


def alone(requests: Sequence[int], service: int) -> list[int]:
    """Return the latencies of requests that are served one after the other, on a GPU of their own."""
    free, found = 0, list[int]()
    for arrival in requests:
        free = max(free, arrival) + LAUNCH + service + RETURN
        found.append(free - arrival)
    return found


@attrs.define(eq=False)
class Context:
    """One on the runlist."""

    timeslice: int
    """Longest run in a round."""
    queue: deque[int] = attrs.field(factory=deque)
    """What each kernel still needs, oldest first."""
    finished: int = 0
    """Kernels, ever."""
    busy: int = 0
    """Time on the engine, without switches."""
    stays: int = 0
    """How often it came onto the engine."""


@attrs.define
class Engine:
    """See the module."""

    contexts: list[Context]
    """In the order of the round."""
    now: int = 0
    """Virtual time."""
    idle: int = 0
    """In which nothing ran."""
    _on: Context | None = None
    _left: int = 0  # of its timeslice
    _switching: int = 0  # what is left of the switch to it

    def advance(self, until: int) -> Context | None:
        """Run to the end of the next kernel, and return whose it was, but no further than a time."""
        while self.now < until:
            on = self._on
            if not self._switching and (on is None or not on.queue or self._left <= 0) and not self._elect():
                self.idle += until - self.now
                self.now = until
                return None
            on = self._on
            assert on is not None
            if self._switching:
                step = min(self._switching, until - self.now)
                self._switching -= step
                self.now += step
                continue
            step = min(on.queue[0], self._left, until - self.now)
            on.queue[0] -= step
            on.busy += step
            self._left -= step
            self.now += step
            if not on.queue[0]:
                on.queue.popleft()
                on.finished += 1
                return on
        return None

    def _elect(self) -> bool:
        """Whose turn it is, if there is one that has work. The context that ran last is there as long as none does."""
        at = -1 if self._on is None else self.contexts.index(self._on)
        order = self.contexts[at + 1 :] + self.contexts[: at + 1]
        chosen = next((one for one in order if one.queue), None)
        if chosen is None:
            return False
        if chosen is not self._on:
            self._on, self._switching = chosen, SWITCH
            chosen.stays += 1
        self._left = chosen.timeslice
        return True


@attrs.define(eq=False)
class Leader:
    """A program that serves requests one after the other, and has others held."""

    requests: Sequence[int]
    """When they come."""
    service: int
    """The engine's time for each."""
    hold: int
    """For how long others are held after one, if no other comes; less than 0: they never are."""
    context: Context = attrs.field(factory=lambda: Context(LEAD_SLICE))
    latencies: list[int] = attrs.field(factory=list)
    busy: bool = False
    """Whether a request of it is on the GPU, by its word."""
    until: int = 0
    """What its word says while it is not busy."""
    next: int = NEVER
    """When its thread does something."""

    def __attrs_post_init__(self) -> None:
        self._begin(0)

    def _begin(self, now: int) -> None:
        count = len(self.latencies)
        self.next = max(now, self.requests[count]) + LAUNCH if count < len(self.requests) else NEVER

    def says(self, rules: ctypes.CDLL, now: int) -> int:
        """Return its word. While something is pending that is said anew all the time."""
        if self.hold < 0:
            return 0
        return int(rules.rules_word(now, True, 0)) if self.busy else self.until

    def act(self, now: int) -> bool:
        """Do what is due: launch a request, or hear that one is done; whether it was the latter."""
        if not self.busy:
            self.busy, self.next = True, NEVER
            self.context.queue.append(self.service)
            return False
        self.busy, self.until = False, now + self.hold
        self.latencies.append(now - self.requests[len(self.latencies)])
        self._begin(now)
        return True

    def done(self, now: int) -> None:
        """The engine is done with a request."""
        self.next = now + RETURN


@attrs.define(eq=False)
class Filler:
    """A program that launches kernels as fast as it may, and goes behind others."""

    rules: ctypes.CDLL
    leaders: Sequence[Leader]
    kernel: int
    """The engine's time for each kernel."""
    ahead_us: int
    """Microseconds that it may have left as it launches more, at least; 0: as many as AHEAD_MOST kernels."""
    timeslice: int
    context: Context = attrs.field(init=False)
    next: int = 0
    """When its thread does something."""
    sleeps: bool = False
    """Whether it is held."""
    held: int = 0
    """For how long it was."""
    _since: int = 0  # when it was held
    _submitted: int = 0
    _heard: int = 0  # kernels that it knows to be done
    _falls_back: bool = False
    _fell_back: bool = False
    _bound_us: int = 0  # what it may have left now
    _pace: Pace = attrs.field(factory=Pace)
    _allowance: Allowance = attrs.field(factory=Allowance)

    AHEAD_MOST = 64

    def __attrs_post_init__(self) -> None:
        self.context = Context(self.timeslice)

    def act(self, now: int) -> None:
        """Launch one kernel, or wait."""
        if self._falls_back:
            self._look()
            if self._is_ahead(now, True):
                self.next = now + LOOK
                return
            self._falls_back, self._fell_back = False, True
        if left := self._held_for(now):
            self._since, self.sleeps = (self._since if self.sleeps else now), True
            self.next = now + left + WAKE
            return
        if self.sleeps:
            self.held += now - self._since
            self.sleeps = False
        if not self._fell_back and self._is_ahead(now, False):
            self._falls_back, self.next = True, now + FILL
            return
        self._fell_back = False
        self.context.queue.append(self.kernel)
        self._submitted += 1
        self.next = now + FILL

    def woken(self, now: int) -> None:
        """A word that it may sleep for was shortened."""
        if self.sleeps:
            self.next = min(self.next, now + WAKE)

    def _held_for(self, now: int) -> int:
        may = int(self.rules.rules_may(ctypes.byref(self._allowance), now, self.sleeps))
        left = max(int(self.rules.rules_left(one.says(self.rules, now), now)) for one in self.leaders)
        return min(may, left)

    def _look(self) -> None:
        """Hear what has finished: what a marker is behind."""
        every = max(1, int(self.rules.rules_mark_every(ctypes.byref(self._pace), self._bound_us)))
        finished = self.context.finished
        self._heard = finished if finished == self._submitted else max(self._heard, finished // every * every)

    def _is_ahead(self, now: int, watched: bool) -> bool:
        pending, pace = self._submitted - self._heard, self._pace
        if not self.ahead_us:
            self._look()
            return self._submitted - self._heard >= self.AHEAD_MOST
        held_until, now_us = max(one.says(self.rules, now) for one in self.leaders) // US, now // US
        if self._heard > pace.finished:
            disturbed = held_until > pace.since
            self.rules.rules_learn(ctypes.byref(pace), self._heard, pending > 0, watched, disturbed, now_us)
        if not pending:
            pace.since = now_us
        self._bound_us = self.rules.rules_ahead_us(self.ahead_us, held_until, now_us)
        return bool(self.rules.rules_has_more(ctypes.byref(pace), pending, self._bound_us, now_us))


@attrs.define
class Model:
    """Programs that serve requests, and one that fills what they leave, if there is one."""

    leaders: Sequence[Leader]
    filler: Filler | None = None
    engine: Engine = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        contexts = [one.context for one in self.leaders]
        self.engine = Engine(contexts if self.filler is None else [*contexts, self.filler.context])

    def run(self, until: int) -> None:
        """Go on to a time."""
        engine, filler = self.engine, self.filler
        while engine.now < until:
            due = min([one.next for one in self.leaders] + [until] + ([] if filler is None else [filler.next]))
            if due > engine.now and (context := engine.advance(due)) is not None:
                for leader in self.leaders:
                    if leader.context is context:
                        leader.done(engine.now)
                continue
            for leader in self.leaders:
                if leader.next <= engine.now and leader.act(engine.now) and filler is not None:
                    filler.woken(engine.now)
            if filler is not None and filler.next <= engine.now:
                filler.act(engine.now)

    def serve(self) -> None:
        """Go on until all requests are served."""
        while any(len(one.latencies) < len(one.requests) for one in self.leaders):
            self.run(self.engine.now + 10_000 * US)
