"""Fake GPU, programs and systems in virtual time, for the scenarios of tests/bench/gpu.

A program that computes alone has all of the GPU. The system divides the GPU among several.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from tests.bench.core.runner import Unavailable
from tests.bench.gpu.faces import Carried, Job, Part, Running, Served, Shared

SERVICE_S = 0.002
"""Duration of a request alone, seconds."""
PRODUCTS, PASSES = 1000.0, 400.0
"""Products and passes a second of a program alone."""


@attrs.define(eq=False)
class FakeProgram:
    """Any of the programs. `words` tell which system it was started by."""

    lab: FakeLab
    words: Sequence[str]
    pid: int
    critical: bool = False
    per_second: float = 0.0
    """Rate of its work alone, a second."""
    share: float = 1.0
    """Fraction of the GPU that it has while it works."""
    limit: str = "max"
    working: bool = False
    count: float = 0.0
    created: float = 0.0
    wrong: bool = False
    """Whether its results are wrong."""
    options: Sequence[str] = ()
    bursts: list[tuple[float, ...]] = attrs.field(factory=list)

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        if self.working:
            self.count += self.per_second * self.share * seconds

    # As products.cu and elastic.cu do

    @property
    def done(self) -> int:
        return int(self.count)

    @property
    def passes(self) -> int:
        if self.limit == "deadly":
            raise Unavailable("the program ended: out of memory")
        return int(self.count)

    @property
    def pass_seconds(self) -> tuple[float, float]:
        return 1 / (self.per_second * self.share), 3 / (self.per_second * self.share)

    @property
    def prefetched(self) -> tuple[float, float]:
        return 4.0, 50.0

    def moved(self) -> tuple[float, float]:
        if self.limit != "max" or not self.lab.writes:
            raise ValueError("nothing has moved both ways")
        return 40.0, 48.0

    def work(self, on: bool) -> None:
        self.working = on
        self.lab.divide()

    # As decode.cu and the others do

    def carried(self) -> Carried:
        return Carried(int(self.count * 100), int(self.count * 97), self.count / 400, int(self.count * 100), 0.25)

    def finish(self) -> None:
        if self.wrong:
            raise RuntimeError("what it computed is wrong: so it said")
        self.working = False

    # As critical.cu does

    def serve(self, arrivals: Sequence[float], limit: float, watch: Callable[[float], None] | None = None) -> Served:
        start, at, latencies, given_up = self.lab.now(), 0.0, [], 0
        self.bursts.append(tuple(arrivals))
        for due in arrivals:
            at = max(at, due)
            if at < limit:
                at += SERVICE_S / self.share
            else:
                given_up += 1
            latencies.append(at - due)
            if watch is not None:
                watch(latencies[-1])
        self.lab.sleep(start + at - self.lab.now())
        return Served(latencies, given_up)


Divide = Callable[[Sequence[FakeProgram]], None]
"""Sets the share of each program that works."""


def equally(programs: Sequence[FakeProgram]) -> None:
    """Share equally, as time slicing does."""
    for one in programs:
        one.share = 1 / len(programs)


@attrs.define(eq=False)
class FakeStage:
    """Stage that records what the system was told."""

    system: FakeSystem
    lab: FakeLab
    shared: list[list[int]] = attrs.field(factory=list)
    reports: list[float] = attrs.field(factory=list)

    def words(self, part: Part) -> list[str]:
        return [self.system.name, "critical" if part.critical else "batch", str(part.weight), part.limit]

    def share(self, programs: Sequence[tuple[Part, Running]]) -> None:
        self.shared.append([program.pid for _, program in programs])
        assert all(program in self.lab.programs for _, program in programs), "it has ended"

    def present(self, program: Any) -> None:
        looks = self.lab.looks
        seen = (program.created // looks + 1) * looks if looks else program.created + self.lab.appears
        self.lab.sleep(max(0.0, seen - self.lab.now()))

    def write(self, program: Any, name: str, value: str) -> None:
        assert program in self.lab.programs, "it has ended"
        self.lab.writes.append((self.system.name, name, value))
        if name == "gmem.limit.high":
            program.limit = value
        self.lab.sleep(self.lab.costs.get(name, 0.0))

    def report(self, latency: float) -> None:
        self.reports.append(latency)


@attrs.define(eq=False)
class FakeSystem:
    """A way to share the fake GPU."""

    lab: FakeLab
    name: str
    divide: Divide = equally
    refuses: str = ""
    """Reason for which it is unavailable; empty if it is available."""
    stages: list[FakeStage] = attrs.field(factory=list)

    @contextlib.contextmanager
    def enter(self) -> Iterator[FakeStage]:
        if self.refuses:
            raise Unavailable(self.refuses)
        assert not self.lab.programs, "programs of another system still run"
        self.lab.by = self.divide
        self.stages.append(FakeStage(self, self.lab))
        try:
            yield self.stages[-1]
        finally:
            assert not self.lab.programs, "programs outlive their system"
            self.lab.by = equally


@attrs.define(eq=False)
class FakeRoom:
    """A slice whose programs keep the fraction `keep` of their speed while it has room for less than they hold."""

    lab: FakeLab
    keep: float
    told: Mapping[str, int] = attrs.field(factory=dict)
    held_bytes: int = 40 << 30
    limits: list[int | None] = attrs.field(factory=list)
    waits: list[float] = attrs.field(factory=list)

    def words(self, *properties: str) -> list[str]:
        return [*properties]

    def held(self) -> int:
        return self.held_bytes

    def limit(self, nbytes: int | None) -> None:
        self.limits.append(nbytes)
        for one in self.lab.programs:
            one.share = (1.0 if nbytes is None else self.keep) / len(self.lab.programs)

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)

    def figures(self) -> Mapping[str, int]:
        return {"memory_turns": int(2 * self.lab.time), **self.told}


@attrs.define(eq=False)
class FakeRooms:
    """A way to share memory."""

    lab: FakeLab
    name: str
    keep: float = 1.0
    told: Mapping[str, int] = attrs.field(factory=dict)
    rooms: list[FakeRoom] = attrs.field(factory=list)
    """All rooms that were made."""

    @contextlib.contextmanager
    def enter(self) -> Iterator[FakeRoom]:
        self.rooms.append(FakeRoom(self.lab, self.keep, self.told))
        yield self.rooms[-1]
        assert not self.lab.programs, "programs outlive their slice"


@attrs.frozen
class FakeStrangers:
    """Strangers, with the times at which they were present."""

    visits: Sequence[tuple[float, float]]

    def during(self, begin: float, end: float) -> Sequence[object]:
        return [one for one in self.visits if one[0] < end and one[1] > begin]


class FakeLab:
    """The fake GPU, with a clock that advances while programs sleep or serve."""

    def __init__(self) -> None:
        self.time = 0.0
        self.programs: list[FakeProgram] = []
        """Running programs."""
        self.started: list[FakeProgram] = []
        """All programs that were ever started."""
        self.writes: list[tuple[str, str, str]] = []
        self.costs: dict[str, float] = {}
        """Time that a write of a file takes, seconds."""
        self.appears = 0.05
        """Time from a program's context until it is in the tree, seconds."""
        self.looks = 0.0
        """Time between two looks for programs, at one of which it appears, seconds; 0 for none."""
        self.prepares = 0.02
        """Time from there until it is idle, seconds."""
        self.by: Divide = equally
        self.visits: list[tuple[float, float]] = []
        """Times of strangers."""
        self.cells: dict[str, object] = {}
        """Values that cases are restricted to."""
        self.wrong = ""
        """Kind of the job whose results are wrong."""
        self.most_mib = 1 << 30
        """Greatest memory of a program, MiB."""

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.time += seconds
        for one in self.programs:
            one.advance(seconds)

    def divide(self) -> None:
        """Divide the GPU again, whenever a program begins or ends."""
        working = [one for one in self.programs if one.working or one.critical]
        if working:
            self.by(working)

    @contextlib.contextmanager
    def run(self, program: FakeProgram) -> Iterator[FakeProgram]:
        self.started.append(program)
        self.programs.append(program)
        self.divide()
        try:
            yield program
        finally:
            self.programs.remove(program)
            self.divide()

    def program(self, words: Sequence[str], **what: Any) -> FakeProgram:
        return FakeProgram(self, list(words), 1000 + len(self.started), created=self.time, **what)

    def critical(self, words: Sequence[str], kind: str) -> contextlib.AbstractContextManager[FakeProgram]:
        assert kind in ("decode", "convolution")
        return self.run(self.program(words, critical=True))

    def products(self, words: Sequence[str]) -> contextlib.AbstractContextManager[FakeProgram]:
        program = self.program(words, per_second=PRODUCTS)
        self.sleep(self.prepares)
        return self.run(program)

    def begun(self, words: Sequence[str]) -> contextlib.AbstractContextManager[FakeProgram]:
        return self.run(self.program(words, per_second=PRODUCTS))

    def elastic(
        self, words: Sequence[str], mib: int, parts: int, *options: str
    ) -> contextlib.AbstractContextManager[FakeProgram]:
        if mib > self.most_mib:
            raise Unavailable("the program ended: out of memory")
        return self.run(self.program(words, per_second=PASSES, working=True, options=[str(mib), *options], count=1.0))

    @contextlib.contextmanager
    def jobs(self, words: Sequence[str], jobs: Sequence[Job]) -> Iterator[list[FakeProgram]]:
        with contextlib.ExitStack() as stack:
            made = [
                self.program(words, per_second=PASSES, working=True, options=[job.kind], wrong=job.kind == self.wrong)
                for job in jobs
            ]
            for one in made:
                stack.enter_context(self.run(one))
            yield made

    def wants(self, case: Mapping[str, str | float]) -> bool:
        return all(case.get(key, value) == value for key, value in self.cells.items())

    @contextlib.contextmanager
    def copied(self) -> Iterator[Callable[[], tuple[float, float]]]:
        yield lambda: (55.0, 56.0)

    def both_ways(self) -> tuple[float, float]:
        return 46.0, 46.0

    def shared(self, how: str, seed: int) -> Shared:
        return Shared([0.01, 0.02, 0.03], {"static": 10.0, "dynamic": 20.0, "cooperative": 30.0}[how])

    @contextlib.contextmanager
    def strangers(self) -> Iterator[FakeStrangers]:
        yield FakeStrangers(self.visits)

    def context_mib(self) -> int:
        return 512
