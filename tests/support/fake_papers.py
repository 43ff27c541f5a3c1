"""The papers' programs on a GPU in virtual time, for the cells of tests/bench/papers."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from tests.bench.core.runner import Unavailable
from tests.bench.papers.requests import Answer, Request

FIRST_MS, GAP_MS = 40.0, 10.0
"""To the first token, and between two, of a server that is alone."""
STEPS = 5.0
"""Steps a second of another program that is alone."""
SPREAD = 0.02
"""Of the logarithm of each time."""
SERVER_MIB, LOOP_MIB, CARD_MIB = 20000, 30000, 140000


@attrs.define(eq=False)
class FakeProgram:
    """Any of them."""

    lab: FakePapersLab
    words: Sequence[str]
    pid: int
    mib: int = 0
    share: float = 1.0
    count: float = 0.0
    rounds: list[tuple[Request, ...]] = attrs.field(factory=list)

    @property
    def passes(self) -> int:
        return int(self.count)

    def finish(self) -> None:
        pass

    def serve(self, requests: Any, limit_s: float, seed: int = 0) -> Any:
        if isinstance(requests, dict):
            return self.lab.jobs(requests)
        self.rounds.append(tuple(requests))
        chance, found = random.Random(seed), []

        def took(ms: float) -> float:
            return ms / self.share * chance.lognormvariate(0, SPREAD)

        for _ in requests:
            found.append(Answer(took(FIRST_MS), [took(GAP_MS) for _ in range(10)]))
        self.lab.sleep(requests[-1].at)
        return found


class FakePapersLab:
    """The GPU, and a clock that goes as programs sleep or serve."""

    def __init__(self) -> None:
        self.time, self.pids = 0.0, 100
        self.running: list[FakeProgram] = []
        self.started: list[FakeProgram] = []
        self.shares = (1.0, 1.0)
        """Of a server and of another program, where both run."""
        self.held = 0
        """MiB of ballasts."""
        self.ballasts: list[int] = []
        self.orders: list[Mapping[str, Any]] = []

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        for one in self.running:
            one.count += STEPS * one.share * seconds

    @contextlib.contextmanager
    def run(self, words: Sequence[str], mib: int) -> Iterator[FakeProgram]:
        limit = next((int(word[2:-1]) for word in words if word.startswith("0=")), CARD_MIB)
        if min(limit, self.free_mib()) < mib:
            raise Unavailable("the program ended: out of memory")
        self.pids += 1
        made = FakeProgram(self, words, self.pids, mib)
        self.running.append(made)
        self.started.append(made)
        try:
            yield made
        finally:
            self.running.remove(made)

    def server(self, words: Sequence[str]) -> contextlib.AbstractContextManager[FakeProgram]:
        return self.run(words, SERVER_MIB)

    @contextlib.contextmanager
    def loops(self, commands: Sequence[tuple[Sequence[str], Sequence[str]]]) -> Iterator[list[FakeProgram]]:
        with contextlib.ExitStack() as stack:
            made = [stack.enter_context(self.run([*words, *command], LOOP_MIB)) for words, command in commands]
            for other in self.running:  # a server that is there already
                if other.mib == SERVER_MIB:
                    other.share, made[0].share = self.shares
            yield made

    @contextlib.contextmanager
    def both(
        self, high: Sequence[str], low: Sequence[str], command: Sequence[str]
    ) -> Iterator[tuple[FakeProgram, FakeProgram]]:
        with self.server(high) as server, self.loops([(low, command)]) as (loop,):
            yield server, loop

    def nursery(self, words: Sequence[str]) -> contextlib.AbstractContextManager[FakeProgram]:
        return self.run(words, 0)

    def jobs(self, order: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Jobs of 2 s each, and inferences of 5 ms."""
        self.orders.append(order)
        places, told = [0.0] * order["most"], []
        for one in sorted(order["jobs"], key=lambda one: one["at"]):
            began = max(one["at"], min(places))
            places[places.index(min(places))] = began + 2.0
            latencies = [0.005] * 10 if "rate" in one else []
            told.append({"at": one["at"], "began": began, "ended": began + 2.0, "latencies": latencies, "error": None})
        self.sleep(max(places))
        return told

    def calls(self, words: Sequence[str]) -> tuple[float, float, float, float]:
        return (5.8, 7.1, 2.8, 0.24) if not words else (6.0, 7.5, 3.0, 0.25)

    @contextlib.contextmanager
    def ballast(self, mib: int) -> Iterator[None]:
        self.ballasts.append(mib)
        self.held += mib
        try:
            yield
        finally:
            self.held -= mib

    def free_mib(self) -> int:
        return CARD_MIB - self.held - sum(one.mib for one in self.running)


@attrs.define(eq=False)
class FakeHold:
    """Both programs, by a way."""

    sharing: FakeSharing
    percent: int
    said: Sequence[str] = ()

    @contextlib.contextmanager
    def both(self, lab: FakePapersLab, command: Sequence[str]) -> Iterator[tuple[FakeProgram, FakeProgram]]:
        high, low = self.sharing.shares
        lab.shares = (high, low * self.percent / 100)
        with lab.both([self.sharing.name], [self.sharing.name], command) as programs:
            yield programs


@attrs.frozen
class FakeSharing:
    """A way to share the fake GPU."""

    name: str
    shares: tuple[float, float] = (0.5, 0.5)
    refuses: str = ""

    @contextlib.contextmanager
    def enter(self, percent: int) -> Iterator[FakeHold]:
        if self.refuses:
            raise Unavailable(self.refuses)
        yield FakeHold(self, percent)


@attrs.define(eq=False)
class FakeLone:
    """A program that is alone with a part of its memory, and has that part of its speed."""

    said: Sequence[str] = ()

    @contextlib.contextmanager
    def one(self, lab: FakePapersLab, command: Sequence[str], percent: int) -> Iterator[FakeProgram]:
        with lab.loops([([], command)]) as (loop,):
            loop.share = percent / 100
            yield loop


class FakeAlone:
    """Such a way."""

    @contextlib.contextmanager
    def enter(self) -> Iterator[FakeLone]:
        yield FakeLone()


@attrs.define(eq=False)
class FakeApps:
    """Applications in virtual time: with the policy none is late, and without those are that have much to do."""

    lab: FakePapersLab
    services: Sequence[float]
    managed: bool
    gpus: int
    rates: list[list[int]] = attrs.field(factory=list)
    """Requests of each application, by phase."""
    told: list[tuple[float, Mapping[str, Any]]] = attrs.field(factory=list)
    said: Sequence[str] = ()

    def now(self) -> float:
        return self.lab.time

    def events(self) -> Sequence[tuple[float, Mapping[str, Any]]]:
        return self.told

    def filled(self) -> int:
        return int(100 * self.lab.time)

    def serve(self, arrivals: Sequence[Sequence[float]], seconds: float) -> list[list[float]]:
        load = sum(len(one) for one in arrivals) * self.services[0] / seconds
        self.rates.append([len(one) for one in arrivals])
        if self.managed:
            share = round(load / len(arrivals), 4)
            was = 0.08 if len(self.rates) > 1 else 0.0
            self.told.append((self.now(), {"event": "share", "group": "app-0", "gpu": 0, "share": share, "was": was}))
        self.lab.sleep(seconds)
        slow = 1.5 if self.managed or load < 0.3 else 10.0
        return [[slow * self.services[number]] * len(one) for number, one in enumerate(arrivals)]


@attrs.frozen
class FakeStage:
    """A way to run applications."""

    lab: FakePapersLab
    name: str
    managed: bool
    made: list[FakeApps] = attrs.field(factory=list)

    @contextlib.contextmanager
    def enter(self, count: int, gpus: int) -> Iterator[FakeApps]:
        self.made.append(FakeApps(self.lab, [0.006] * count, self.managed, gpus))
        yield self.made[-1]


@attrs.define(eq=False)
class FakeBand:
    """Gangs in virtual time: a step takes 100 ms alone, and as much longer as the way has it."""

    lab: FakePapersLab
    slower: float
    gangs: int = 0
    pressed: int = 100
    begun: float = 0.0
    said: Sequence[str] = ()

    def gang(self) -> FakeBand:
        self.gangs += 1
        return self

    def fill(self) -> Callable[[], int]:
        return lambda: int(50 * self.lab.time)

    def press(self, percent: int) -> None:
        self.pressed = percent

    @property
    def steps(self) -> int:
        return int(self.lab.time * 10 / self.slower / max(1, self.gangs))

    def longest_ms(self) -> float:
        return 100 * self.slower

    def finish(self) -> None:
        pass


@attrs.frozen
class FakeBandWay:
    """A way to share the GPUs of a host."""

    lab: FakePapersLab
    name: str
    slower: float = 1.0
    bands: list[FakeBand] = attrs.field(factory=list)

    @contextlib.contextmanager
    def enter(self, gpus: int) -> Iterator[FakeBand]:
        self.bands.append(FakeBand(self.lab, self.slower))
        yield self.bands[-1]


@attrs.define(eq=False)
class FakeTree:
    """A tree whose daemon takes more of a CPU with more in it."""

    site: FakeSite
    members: list[FakeProgram] = attrs.field(factory=list)
    made: int = 0
    gpus: list[int] = attrs.field(factory=list)
    balancing: float | None = None
    said: Sequence[str] = ()

    def programs(self, count: int, gpus: Sequence[int] | None = None) -> list[Any]:
        every = [0] if gpus is None else list(gpus)
        self.gpus += [every[number % len(every)] for number in range(count)]
        found = [FakeWork(self, len(self.gpus) - count + number) for number in range(count)]
        self.site.trees.append(self)
        return found

    def slices(self, count: int) -> None:
        self.made += count

    def cpu_s(self) -> float:
        return self.site.time * (0.001 + 0.0001 * (len(self.gpus) + self.made))

    def write_us(self, count: int) -> list[float]:
        return [50.0] * (count - 20) + [400.0] * 20

    @contextlib.contextmanager
    def balance(self) -> Iterator[Callable[[], list[float]]]:
        self.balancing = self.site.time
        yield lambda: [600.0, 700.0, 800.0]

    def places(self) -> list[int]:
        if self.balancing is not None and self.site.time >= self.balancing + self.site.balances_s:
            self.gpus = [number % self.site.gpus for number in range(len(self.gpus))]
        return self.gpus


@attrs.define(eq=False)
class FakeWork:
    """A program of a tree: its GPU is shared equally."""

    tree: FakeTree
    number: int

    @property
    def done(self) -> int:
        gpu = self.tree.gpus[self.number]
        return int(100 * self.tree.site.time / self.tree.gpus.count(gpu))


@attrs.define(eq=False)
class FakeSite:
    """Where fake trees are mounted."""

    gpus: int = 4
    balances_s: float = 7.0
    time: float = 0.0
    trees: list[FakeTree] = attrs.field(factory=list)

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds

    @contextlib.contextmanager
    def tree(self) -> Iterator[FakeTree]:
        yield FakeTree(self)
