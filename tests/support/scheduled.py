"""A GPU that the scheduler shares among programs, in simulated time.

Engine and scheduler are the real ones: the runlist of the software GPU, and the daemon's scheduler core. Programs have
work at all times, or requests that arrive at random.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

import attrs

from backend.core.records import Place
from backend.process.identity import Process
from backend.scheduler.core import Core
from backend.scheduler.parts import Done, Parts
from backend.scheduler.shares import Contender, Level
from backend.scheduler.use import Sample
from backend.soft.runlist import US, Runlist, Tsg

SWITCH = 197 * US
TICK = 100_000 * US
DEFAULT = 2048
STRIDE, LOOK = 5_000 * US, 500 * US
"""Longest step of the simulation, and time by which the end of a request may be noticed late if its program did not run
at the start of the step. In nanoseconds."""

T = TypeVar("T")


def in_one_go(parts: Parts[T]) -> T:
    """Run the parts of a piece of work without a break, as where no other task waits; return its result."""
    done = Done(parts)
    for _ in done:
        pass
    return done.result


@attrs.define(eq=False)
class Program:
    """A program on the GPU: batch, or a service with requests that arrive at random."""

    pid: int
    priority: int = 8
    weight: int = 100
    contexts: int = 1
    starts_us: int = 0
    """Start of a batch program's work, in microseconds; it ends at `ends_us`."""
    ends_us: int = 1 << 50
    explicit_us: int = 0
    """compute.timeslice in microseconds; 0 for none."""
    kernel_us: int = 0
    """Length of a kernel in microseconds; by default 500 for requests. The engine preempts, so a batch program's kernel
    may be as long as is convenient: one step of the simulation."""
    request_us: int = 0
    """Length of a request in microseconds; 0 for a batch program."""
    load: float = 0.0
    """Load of the requests, as a fraction of the GPU."""
    slice: str = ""
    tsgs: list[Tsg] = attrs.field(factory=list)
    arrivals: list[int] = attrs.field(factory=list)
    latencies: list[int] = attrs.field(factory=list)
    waiting: list[int] = attrs.field(factory=list)
    before: int = 0
    stayed: int = 0
    place: Place = attrs.field(factory=Place)

    def __attrs_post_init__(self) -> None:
        self.kernel_us = self.kernel_us or (500 if self.request_us else STRIDE // US)

    @property
    def process(self) -> Process:
        return Process(self.pid, 1)

    @property
    def contender(self) -> Contender:
        levels = [Level(self.slice, 8, 100)] if self.slice else []
        path = (*levels, Level(self.pid, self.priority, self.weight))
        return Contender(self.process, path, explicit=bool(self.explicit_us))

    @property
    def used(self) -> int:
        return sum(tsg.busy for tsg in self.tsgs)

    @property
    def stays(self) -> int:
        return sum(tsg.stays for tsg in self.tsgs)


class Machine:
    """One engine, its programs, and the scheduler's tick."""

    stride = STRIDE
    """Longest step of the simulation, in nanoseconds."""

    def __init__(self, *programs: Program, schedule: bool = True, late: int = 0) -> None:
        """`late` is the age in ticks of the usage that the scheduler sees; a real GPU's trace is 0.2 s late."""
        self._late = [dict[Process, Sample]() for _ in range(late)]
        self.runlist = Runlist(SWITCH)
        self.programs = programs
        self.core = Core(DEFAULT) if schedule else None
        self.calls: list[int] = []
        """Times of lever calls, in nanoseconds."""
        self._next = 0
        self._sampled = 0
        self._come(programs)

    def replace(self, *programs: Program) -> None:
        """Remove all programs and add others."""
        for program in self.programs:
            for tsg in program.tsgs:
                self.runlist.remove(tsg)
        self.programs = programs
        self._come(programs)

    def _come(self, programs: Sequence[Program]) -> None:
        chance = random.Random(1)
        for program in programs:
            program.tsgs = [Tsg(timeslice=DEFAULT * US) for _ in range(program.contexts)]
            for tsg in program.tsgs:
                self.runlist.add(tsg)
            at = float(self.runlist.now + program.starts_us * US)
            while program.request_us and at < 200e9:
                at += chance.expovariate(program.load / (program.request_us * US))
                program.arrivals.append(int(at))
            program.arrivals.reverse()

    def run(self, seconds: float) -> None:
        end = self.runlist.now + int(seconds * 1e9)
        while self.runlist.now < end:
            if self.runlist.now >= self._next:
                self._next += TICK
                self._tick()
            self._go_on(end)

    def _go_on(self, end: int) -> None:
        """Let programs act and the engine run until their next act, or until `end` in nanoseconds."""
        self._feed()
        arrivals = [p.arrivals[-1] for p in self.programs if p.arrivals]
        answers = [self._answer(p) for p in self.programs if p.waiting]
        step = min([end, self._next, self.runlist.now + self.stride, *arrivals, *answers])
        self.runlist.advance(max(step, self.runlist.now + 1))
        self._note()

    def _answer(self, program: Program) -> int:
        """Return when to look whether a program's oldest request is done, in nanoseconds: no sooner than the engine can
        have done the rest of it. That is its exact end if it runs now; otherwise it may be noticed LOOK late."""
        tsg, runlist = program.tsgs[0], self.runlist
        kernels = program.request_us // program.kernel_us
        left = tsg.queue[0] + (kernels - 1 - tsg.finished % kernels) * program.kernel_us * US
        runs = runlist._running is tsg and tsg.attached
        return runlist.now + (left + runlist._switching if runs else max(left, LOOK))

    def _feed(self) -> None:
        for program in self.programs:
            while program.arrivals and program.arrivals[-1] <= self.runlist.now:
                count = program.request_us // program.kernel_us
                program.tsgs[0].launch(count, program.kernel_us * US)
                program.waiting.append(program.arrivals.pop())
            working = program.starts_us * US <= self.runlist.now < program.ends_us * US
            if not program.request_us and working:
                for tsg in program.tsgs:
                    ahead = -(-2 * STRIDE // (program.kernel_us * US))
                    if len(tsg.queue) <= ahead:  # the first kernel may be nearly done
                        tsg.launch(ahead, program.kernel_us * US)

    def _note(self) -> None:
        for program in self.programs:
            if program.request_us:
                count = program.request_us // program.kernel_us
                while len(program.latencies) < program.tsgs[0].finished // count:
                    program.latencies.append(self.runlist.now - program.waiting.pop(0))

    def _tick(self) -> None:
        if self.core is None:
            return
        samples = {
            p.process: Sample((p.used - p.before) // US, None, p.contexts, p.stays - p.stayed) for p in self.programs
        }
        for program in self.programs:
            program.before, program.stayed = program.used, program.stays
        self._late.append(samples)
        samples = {
            p.process: attrs.evolve(self._late[0].get(p.process, Sample(0, stays=0)), contexts=p.contexts)
            for p in self.programs
        }
        del self._late[0]
        window, self._sampled = (self.runlist.now - self._sampled) // US, self.runlist.now
        places = in_one_go(self.core.decide(window, [p.contender for p in self.programs], samples))
        for program in self.programs:
            was, place = program.place, places[program.process]
            self.calls += [self.runlist.now] * ((place.off != was.off) + (place.timeslice_us != was.timeslice_us))
            program.place = place
            us = program.explicit_us or place.timeslice_us
            for tsg in program.tsgs:
                tsg.attached = not place.off
                tsg.timeslice = (max(1, us // len(program.tsgs)) if us else DEFAULT) * US

    def rate(self, since_s: float) -> float:
        """Return the lever calls per second since then."""
        return sum(at >= since_s * 1e9 for at in self.calls) / (self.runlist.now / 1e9 - since_s)


def used_in(machine: Machine, seconds: float) -> list[int]:
    """Return the engine time of each program in the next seconds, in microseconds."""
    before = [program.used for program in machine.programs]
    machine.run(seconds)
    return [(program.used - b) // US for program, b in zip(machine.programs, before, strict=True)]


def shares(machine: Machine, seconds: float, settle: float = 5.0) -> list[float]:
    """Return each program's fraction of the engine time that all of them use."""
    machine.run(settle)
    done = used_in(machine, seconds)
    return [one / sum(done) for one in done]


def p99(program: Program) -> float:
    return sorted(program.latencies)[int(0.99 * len(program.latencies))] / 1e6
