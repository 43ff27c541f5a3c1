"""The scheduler over the runlist of the software GPU: shares, strictness and what switches cost, in simulated time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import attrs
import pytest

from backend.identity import Process
from backend.scheduler.core import Core, Place
from backend.scheduler.shares import Contender, Level
from backend.soft.runlist import US, Runlist, Tsg

SWITCH = 197 * US
TICK = 100_000 * US
DEFAULT = 2048


@attrs.define(eq=False)
class Program:
    """Who uses the GPU: batch, or requests that come when they come."""

    pid: int
    priority: int = 8
    weight: int = 100
    contexts: int = 1
    kernel_us: int = 500
    request_us: int = 0
    """Of requests that come by themselves; 0 for a batch program."""
    load: float = 0.0
    """Of those."""
    slice: str = ""
    tsgs: list[Tsg] = attrs.field(factory=list)
    arrivals: list[int] = attrs.field(factory=list)
    latencies: list[int] = attrs.field(factory=list)
    waiting: list[int] = attrs.field(factory=list)
    before: int = 0
    place: Place = Place(0)

    @property
    def process(self) -> Process:
        return Process(self.pid, 1)

    @property
    def contender(self) -> Contender:
        levels = [Level(self.slice, 8, 100)] if self.slice else []
        return Contender(self.process, (*levels, Level(self.pid, self.priority, self.weight)))

    @property
    def used(self) -> int:
        return sum(tsg.busy for tsg in self.tsgs)


class Machine:
    """One engine, its programs, and the scheduler's tick."""

    def __init__(self, *programs: Program, schedule: bool = True) -> None:
        self.runlist = Runlist(SWITCH)
        self.programs = programs
        self.core = Core() if schedule else None
        self.calls = 0
        self._next = TICK
        chance = random.Random(1)
        for program in programs:
            program.tsgs = [Tsg(timeslice=DEFAULT * US) for _ in range(program.contexts)]
            for tsg in program.tsgs:
                self.runlist.add(tsg)
            at = 0.0
            while program.request_us and at < 40e9:
                at += chance.expovariate(program.load / (program.request_us * US))
                program.arrivals.append(int(at))
            program.arrivals.reverse()

    def run(self, seconds: float) -> None:
        end = self.runlist.now + int(seconds * 1e9)
        while self.runlist.now < end:
            self._feed()
            arrivals = [p.arrivals[-1] for p in self.programs if p.arrivals]
            finish = self.runlist.until_next_finish()
            step = min([end, self._next, *arrivals, self.runlist.now + finish if finish is not None else end])
            self.runlist.advance(max(min(step, self.runlist.now + 100 * US), self.runlist.now + 1))
            self._note()
            if self.runlist.now >= self._next:
                self._next += TICK
                self._tick()

    def _feed(self) -> None:
        for program in self.programs:
            while program.arrivals and program.arrivals[-1] <= self.runlist.now:
                count = program.request_us // program.kernel_us
                program.tsgs[0].launch(count, program.kernel_us * US)
                program.waiting.append(program.arrivals.pop())
            if not program.request_us:
                for tsg in program.tsgs:
                    if len(tsg.queue) < 4:
                        tsg.launch(8, program.kernel_us * US)

    def _note(self) -> None:
        for program in self.programs:
            if program.request_us:
                count = program.request_us // program.kernel_us
                while len(program.latencies) < program.tsgs[0].finished // count:
                    program.latencies.append(self.runlist.now - program.waiting.pop(0))

    def _tick(self) -> None:
        if self.core is None:
            return
        used = {p.process: (p.used - p.before) // US for p in self.programs}
        for program in self.programs:
            program.before = program.used
        places = self.core.decide(self.runlist.now // US, TICK // US, [p.contender for p in self.programs], used)
        for program in self.programs:
            place = places[program.process]
            if place.off != program.place.off:
                self.calls += 1
            was, now = program.place.timeslice_us, place.timeslice_us
            if abs(was - now) > 0.03 * now:
                self.calls += 1
            else:
                place = attrs.evolve(place, timeslice_us=was)
            program.place = place
            for tsg in program.tsgs:
                tsg.attached = not place.off
                tsg.timeslice = max(1, (place.timeslice_us or DEFAULT) // len(program.tsgs)) * US


def shares(machine: Machine, seconds: float, settle: float = 5.0) -> list[float]:
    """What each did, of what all did."""
    machine.run(settle)
    before = [program.used for program in machine.programs]
    machine.run(seconds)
    done = [program.used - b for program, b in zip(machine.programs, before, strict=True)]
    return [one / sum(done) for one in done]


def p99(program: Program) -> float:
    return sorted(program.latencies)[int(0.99 * len(program.latencies))] / 1e6


@pytest.mark.parametrize("contexts", [1, 4])
def test_weights(contexts: int) -> None:
    machine = Machine(Program(1, weight=100, contexts=contexts), Program(2, weight=200), Program(3, weight=400))
    got = shares(machine, 10)
    print(got, machine.calls / 15)
    assert got == pytest.approx([1 / 7, 2 / 7, 4 / 7], rel=0.03 if contexts == 1 else 0.05)
    assert machine.calls <= 50 * 15


def test_less_is_lost_to_switches() -> None:
    def total(schedule: bool) -> int:
        machine = Machine(Program(1), Program(2), schedule=schedule)
        machine.run(5)
        return sum(program.used for program in machine.programs)

    gain = total(True) / total(False)
    print(gain)
    assert gain >= 1.04


def critical(*batch: Program) -> tuple[float, float]:
    """p99 of a critical program beside others, by what it is alone; and their work, by what one does alone."""
    alone = Program(1, priority=0, request_us=8600, kernel_us=100, load=0.35)
    Machine(alone).run(30)
    one = Program(1, priority=0, request_us=8600, kernel_us=100, load=0.35)
    machine = Machine(one, *batch)
    machine.run(30)
    print(p99(alone), p99(one), [b.used / 30e9 for b in batch], machine.calls / 30)
    assert machine.calls <= 50 * 30
    return p99(one) / p99(alone), sum(b.used for b in batch) / 30e9


@pytest.mark.parametrize("kernel_us", [500, 20_000])
def test_a_critical_program_beside_a_batch_program(kernel_us: int) -> None:
    slower, filled = critical(Program(2, kernel_us=kernel_us))
    assert slower <= 1.05
    assert filled >= 0.6


def test_a_critical_program_beside_three_batch_programs() -> None:
    batch = [Program(n, kernel_us=500) for n in (2, 3, 4)]
    slower, filled = critical(*batch)
    assert slower <= 1.05
    assert filled >= 0.6
    assert [b.used for b in batch] == pytest.approx([sum(b.used for b in batch) / 3] * 3, rel=0.1)
