"""Turns of up to three programs on a software GPU, with all else that they and an operator do meanwhile.

Pages hold what was written to them, the books are those of the pages, nothing runs behind a closed gate, and every
launch is answered in the end. Rules are synchronous; the daemon runs in a thread and its time is set by hand, so that
what takes time goes on between rules as far as a rule says, and no further.
"""

from __future__ import annotations

import contextlib
import errno
import subprocess
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import attrs
import pytest
import trio
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from trio.testing import MockClock, wait_all_tasks_blocked

from backend.core.reasons import Engines
from backend.core.records import NOWHERE, Place
from backend.core.turns import TurnEnd
from backend.process.identity import Member, Process
from backend.soft.bus import Way
from backend.soft.config import SoftConfig
from backend.soft.gpu import SoftGpu
from tests.support.harness import MIB, answers, looks_at_once, running

T = TypeVar("T")

CAPACITY = 32
"""Pages of 1 MiB that the GPU has."""
LONG_S = 600.0
"""Virtual seconds after which something hangs: more than everything together that can be queued."""

PROCESSES: list[subprocess.Popen[bytes]] = []
"""Idle processes, as long as this module's tests run."""


@pytest.fixture(scope="module", autouse=True)
def processes() -> Iterator[None]:
    PROCESSES.extend(subprocess.Popen(["sleep", "3600"]) for _ in range(3))
    yield
    while PROCESSES:
        process = PROCESSES.pop()
        process.kill()
        process.wait()


class Daemon:
    """A daemon in virtual time, which stands still between calls."""

    def __init__(self) -> None:
        self.gpu = SoftGpu(0, SoftConfig(CAPACITY * MIB, MIB, 1 << 30, 1 << 30, batch=4 * MIB, switch_us=20))
        self._clock = MockClock()
        self._started, self._failure = threading.Event(), list[BaseException]()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._started.wait(600)
        self._check()

    def _run(self) -> None:
        try:
            with looks_at_once():
                trio.run(self._main, clock=self._clock)
        except BaseException as error:
            self._failure.append(error)
        finally:
            self._started.set()

    async def _main(self) -> None:
        self._over = trio.Event()
        async with running(self.gpu) as self.h, trio.open_nursery() as self.nursery:
            self._token = trio.lowlevel.current_trio_token()
            self._started.set()
            await self._over.wait()
            self.nursery.cancel_scope.cancel()

    def _check(self) -> None:
        if self._failure:
            raise self._failure[0]

    def end(self) -> None:
        """Ends it, with the checks that it makes then."""
        if self._thread.is_alive():
            self._token.run_sync_soon(lambda: self._over.set())
        self._thread.join(600)
        assert not self._thread.is_alive()
        self._check()

    def do(self, function: Callable[..., Awaitable[T]], *args: object) -> T:
        """Calls something in the daemon that takes no virtual time, and lets what can run do so."""

        async def call() -> T:
            result = await function(*args)
            await wait_all_tasks_blocked()
            return result

        return trio.from_thread.run(call, trio_token=self._token)

    def finish(self, function: Callable[..., Awaitable[T]], *args: object) -> T:
        """Calls something in the daemon that takes as long as it does."""
        results: list[T] = []

        async def call() -> None:
            results.append(await function(*args))

        async def start() -> None:
            self.nursery.start_soon(call)
            await self._pass(LONG_S, lambda: bool(results))

        self.do(start)
        self._check()
        assert results, "it hangs"
        return results[0]

    def sleep(self, seconds: float) -> None:
        """Time passes."""
        self.do(self._pass, seconds, lambda: False)

    async def _pass(self, seconds: float, enough: Callable[[], bool]) -> None:
        end = trio.current_time() + seconds
        while True:
            await wait_all_tasks_blocked()
            left = end - trio.current_time()
            if enough() or left <= 0:
                return
            until_next = trio.lowlevel.current_statistics().seconds_to_next_deadline
            self._clock.jump(min(max(until_next, 1e-7), left))


@attrs.define
class Program:
    """What is known of one program."""

    process: Process
    tsg: int
    pages: dict[range, list[int]] = attrs.field(factory=dict)
    """Its allocations, and what stands in their pages."""
    asked: int = 0
    """Launches and copies."""
    answered: int = 0
    refused: list[OSError] = attrs.field(factory=list)
    """What they were answered that were refused."""
    is_off: bool = False
    """Whether it has no turn."""
    ended: TurnEnd | None = None
    """How its last turn ended, while it has no other."""
    work: tuple[int | None, int | None] = (0, 0)
    """Kernels that it had launched and finished then."""
    frozen: bool = False


class Turns(RuleBasedStateMachine):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.daemon = Daemon()
        self.gpu, self.h = self.daemon.gpu, self.daemon.h
        self.programs: list[Program] = []
        self.stamp = 0

    def teardown(self) -> None:
        """Everything is let go on, and is done in the end."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.daemon.end)
            for one in self.programs:
                self.daemon.finish(self._thaw, one)
                self.daemon.finish(self._begin, one)
            self.daemon.sleep(LONG_S)
            for one in self.programs:
                assert one.answered == one.asked, "every launch is answered in the end"
                submitted, finished = self.work(one)
                assert submitted == finished, "every kernel runs in the end"
            self.what_holds()

    # What programs do

    def pick(self, number: int) -> Program:
        return self.programs[number % len(self.programs)]

    @precondition(lambda self: len(self.programs) < 3)
    @rule()
    def come(self) -> None:
        self.programs.append(self.daemon.do(self._come, PROCESSES[len(self.programs)].pid))

    async def _come(self, pid: int) -> Program:
        process = await self.h.arrive(pid, "/jobs")
        return Program(process, await self.gpu.open_context(process, 1, lambda finished: None, gated=True))

    @precondition(lambda self: self.programs)
    @rule(who=st.integers(0, 2), pages=st.integers(1, 16))
    def allocate(self, who: int, pages: int) -> None:
        one = self.pick(who)
        if sum(map(len, one.pages)) + pages <= 2 * CAPACITY:
            one.pages[self.daemon.finish(self.gpu.allocate, one.process, pages * MIB)] = [0] * pages

    @precondition(lambda self: any(one.pages for one in self.programs))
    @rule(number=st.integers(0, 20), action=st.sampled_from(["free", "write", "write"]))
    def use(self, number: int, action: str) -> None:
        each = [(one, pages) for one in self.programs for pages in one.pages]
        one, pages = each[number % len(each)]

        async def act() -> None:
            if action == "free":
                self.gpu.free(one.process, pages)
                del one.pages[pages]
                return
            for i, page in enumerate(pages):
                self.stamp += 1
                self.gpu.write(one.process, page, self.stamp)
                one.pages[pages][i] = self.stamp

        self.daemon.do(act)

    @precondition(lambda self: self.programs)
    @rule(
        who=st.integers(0, 2),
        kernels=st.integers(1, 4),
        us=st.sampled_from([10, 1000, 30_000, 200_000]),
        number=st.integers(0, 5),
    )
    def launch(self, who: int, kernels: int, us: int, number: int) -> None:
        one = self.pick(who)
        pages = list(one.pages)[number % len(one.pages)] if number and one.pages else range(0)
        self.ask(one, self.gpu.launch, one.process, one.tsg, kernels, us, pages)

    @precondition(lambda self: self.programs)
    @rule(who=st.integers(0, 2), mib=st.integers(1, 100), way=st.sampled_from(Way))
    def copy(self, who: int, mib: int, way: Way) -> None:
        one = self.pick(who)
        self.ask(one, self.gpu.copy, one.process, mib * MIB, way)

    def ask(self, one: Program, function: Callable[..., Awaitable[None]], *args: object) -> None:
        """What is answered in the turn of a program."""

        async def call() -> None:
            try:
                await function(*args)
            except OSError as error:
                one.refused.append(error)
            one.answered += 1

        async def start() -> None:
            self.daemon.nursery.start_soon(call)

        one.asked += 1
        self.daemon.do(start)

    # What a scheduler does

    @precondition(lambda self: any(not one.is_off for one in self.programs))
    @rule(who=st.integers(0, 2), bound_us=st.sampled_from([0, 500, 20_000, 1_000_000]))
    def end_turn(self, who: int, bound_us: int) -> None:
        runs = [one for one in self.programs if not one.is_off]
        one = runs[who % len(runs)]
        one.ended = self.daemon.finish(self._end, one, bound_us)
        one.is_off, one.work = True, self.work(one)
        assert one.ended is not TurnEnd.UNGATED

    async def _end(self, one: Program, bound_us: int) -> TurnEnd:
        ended = await self.gpu.end_turn(one.process, bound_us)
        await self._off(one, Place(off=True, engines=Engines.GR))
        return ended

    @precondition(lambda self: any(one.is_off for one in self.programs))
    @rule(who=st.integers(0, 2))
    def begin_turn(self, who: int) -> None:
        waits = [one for one in self.programs if one.is_off]
        self.daemon.finish(self._begin, waits[who % len(waits)])

    async def _begin(self, one: Program) -> None:
        await self._off(one, NOWHERE)
        one.is_off, one.ended = False, None
        await self.gpu.begin_turn(one.process)

    async def _off(self, one: Program, place: Place) -> None:
        follower = self.h.controller._follower
        follower.schedule(Member(one.process, 0), place)
        await follower.apply(Member(one.process, 0))

    # What an operator does

    @precondition(lambda self: self.programs)
    @rule(who=st.integers(0, 3), mib=st.one_of(st.just(CAPACITY), st.integers(0, CAPACITY)))
    def limit(self, who: int, mib: int) -> None:
        """Of a program, or of the slice of all. Only one that is late keeps it from being held at once."""
        path = f"{self.pick(who).process.pid}/0" if who < 3 else "slice/jobs/0"
        below = [self.pick(who)] if who < 3 else self.programs
        refused = self.daemon.finish(answers, self.h.write(f"{path}/gmem.limit.high", mib * MIB))
        assert not refused or any(self.is_late(one) for one in below), refused

    @precondition(lambda self: self.programs)
    @rule(who=st.integers(0, 2))
    def freeze(self, who: int) -> None:
        one = self.pick(who)
        self.daemon.finish(self._freeze, one)

    async def _freeze(self, one: Program) -> None:
        await self.h.write(f"{one.process.pid}/0/compute.freeze", 1)
        one.frozen = True

    @precondition(lambda self: any(one.frozen for one in self.programs))
    @rule(who=st.integers(0, 2))
    def thaw(self, who: int) -> None:
        frozen = [one for one in self.programs if one.frozen]
        self.daemon.finish(self._thaw, frozen[who % len(frozen)])

    async def _thaw(self, one: Program) -> None:
        await self.h.write(f"{one.process.pid}/0/compute.freeze", 0)
        one.frozen = False

    @rule(ms=st.sampled_from([1, 10, 100, 3000]))
    def wait(self, ms: int) -> None:
        self.daemon.sleep(ms / 1000)

    # What holds

    def work(self, one: Program) -> tuple[int | None, int | None]:
        async def look() -> tuple[int | None, int | None]:
            activity = self.gpu.activity(one.process)
            return activity.submitted, activity.finished

        return self.daemon.do(look)

    def is_late(self, one: Program) -> bool:
        async def look() -> bool:
            return self.gpu.footprint(one.process).movable == 0

        return self.daemon.do(look)

    @invariant()
    def what_holds(self) -> None:
        async def look() -> None:
            self.h.check()
            for one in self.programs:
                for pages, stamps in one.pages.items():
                    assert [self.gpu.read(one.process, page) for page in pages] == stamps
                tenant = self.gpu._tenants[one.process]
                expected = Engines.ALL if one.frozen else Engines.GR if one.is_off else Engines.NONE
                assert tenant.engines is expected
                found = self.gpu.working_set(one.process)
                assert 0 <= found.resident <= found.used <= len(tenant.memory) * MIB

        self.daemon.do(look)
        for one in self.programs:
            assert {error.errno for error in one.refused} <= {errno.EFAULT}, "of what was freed while they waited alone"
            if one.is_off:
                assert self.work(one) == one.work, "nothing runs behind a closed gate"
                if one.ended is TurnEnd.DRAINED:
                    assert one.work[0] == one.work[1]
                    assert not self.is_late(one), "its memory moves while it waits"


Turns.TestCase.settings = settings(max_examples=12, stateful_step_count=30)
TestTurns = Turns.TestCase
