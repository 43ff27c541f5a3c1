"""A state machine of turns: up to three programs on two software GPUs, with everything else that happens meanwhile.

Limits, protection, bounds of swap, reclaim, freezes, moves, a lost GPU, and the end of a program are interleaved. Pages
keep what was written to them, the books agree with the pages, nothing runs behind a closed gate, and every launch is
answered in the end. Rules are synchronous; the daemon runs in a thread and a rule sets its time, so that lasting work
goes on between rules exactly as far as a rule says.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import subprocess
from collections.abc import Awaitable, Callable, Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from backend.core.reasons import Engines
from backend.core.records import MAX, NOWHERE, Place
from backend.core.turns import AHEAD_US, TurnEnd
from backend.process.identity import ROOT, Slice, SliceOn
from backend.soft.bus import Way
from backend.soft.gpu import SoftGpu
from tests.support.harness import MIB, answers
from tests.support.stepped import CAPACITY, GPUS, LONG_S, Daemon, Program, Request

PROCESSES: list[subprocess.Popen[bytes]] = []
"""Idle processes that live as long as this module's tests run."""


@pytest.fixture(scope="module", autouse=True)
def processes() -> Iterator[None]:
    PROCESSES.extend(subprocess.Popen(["sleep", "3600"]) for _ in range(3))
    yield
    while PROCESSES:
        process = PROCESSES.pop()
        process.kill()
        process.wait()


class Turns(RuleBasedStateMachine):
    """The state machine; see the module."""

    def __init__(self) -> None:
        super().__init__()
        self.daemon = Daemon()
        self.h = self.daemon.h
        self.programs: list[Program] = []
        self.stamp = 0

    def teardown(self) -> None:
        """Let everything go on, and check that it is done in the end."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.daemon.end)
            for one in self.programs:
                self.daemon.finish(self._thaw, one)
                self.daemon.finish(self._begin, one)
            self.daemon.sleep(LONG_S)
            for one in self.programs:
                assert not one.waits, "every launch is answered in the end"
                submitted, finished = self.work(one)
                assert submitted is not None
                assert submitted - one.dropped == finished, "every kernel runs in the end"
            self.what_holds()

    # Acts of programs

    def pick(self, number: int) -> Program:
        return self.programs[number % len(self.programs)]

    def on(self, one: Program) -> SoftGpu:
        """Return the GPU of a program."""
        return self.daemon.gpus[one.gpu]

    @precondition(lambda self: len(self.programs) < 3)
    @rule()
    def come(self) -> None:
        (pid, *_) = {process.pid for process in PROCESSES} - {one.process.pid for one in self.programs}
        self.programs.append(self.daemon.do(self._come, pid))

    async def _come(self, pid: int) -> Program:
        process = await self.h.arrive(pid, "/jobs")
        return Program(process, await self.daemon.gpus[0].open_context(process, 1, lambda finished: None, gated=True))

    @precondition(lambda self: self.programs)
    @rule(who=st.integers(0, 2), pages=st.integers(1, 16))
    def allocate(self, who: int, pages: int) -> None:
        one = self.pick(who)
        if sum(map(len, one.pages)) + pages <= 2 * CAPACITY:
            found = self.daemon.finish(self._allocate, one, pages * MIB)
            if found is not None:
                one.pages[found] = [0] * pages
            else:
                below = [other for other in self.programs if other.gpu == one.gpu]
                assert not all(map(self.gives, below)), "it is refused only where something keeps what is there"

    async def _allocate(self, one: Program, nbytes: int) -> range | None:
        """Allocate pages for a program; None where its limits refuse them."""
        try:
            return await self.on(one).allocate(one.process, nbytes)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            return None

    @precondition(lambda self: any(one.pages for one in self.programs))
    @rule(number=st.integers(0, 20), action=st.sampled_from(["free", "write", "write"]))
    def use(self, number: int, action: str) -> None:
        each = [(one, pages) for one in self.programs for pages in one.pages]
        one, pages = each[number % len(each)]

        async def act() -> None:
            if action == "free":
                one.excuse(errno.EFAULT, pages)
                self.on(one).free(one.process, pages)
                del one.pages[pages]
                return
            for i, page in enumerate(pages):
                self.stamp += 1
                self.on(one).write(one.process, page, self.stamp)
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
        gpu = self.on(one)
        request = Request(pages, us + len(pages) * gpu.bus.usec(Way.IN, MIB))
        self.ask(one, request, gpu.launch, one.process, one.tsg, kernels, us, pages)

    @precondition(lambda self: self.programs)
    @rule(who=st.integers(0, 2), mib=st.integers(1, 100), way=st.sampled_from(Way))
    def copy(self, who: int, mib: int, way: Way) -> None:
        one = self.pick(who)
        self.ask(one, Request(), self.on(one).copy, one.process, mib * MIB, way)

    def ask(self, one: Program, request: Request, function: Callable[..., Awaitable[None]], *args: object) -> None:
        """Send a request of a program, whose answer waits for its turn."""

        async def call() -> None:
            try:
                await function(*args)
            except OSError as error:
                request.error = error
            request.is_answered = True

        async def start() -> None:
            self.daemon.nursery.start_soon(call)

        one.requests.append(request)
        self.daemon.do(start)

    # Acts of a scheduler

    @precondition(lambda self: any(not one.is_off for one in self.programs))
    @rule(who=st.integers(0, 2), bound_us=st.sampled_from([0, 500, 20_000, 1_000_000]))
    def end_turn(self, who: int, bound_us: int) -> None:
        runs = [one for one in self.programs if not one.is_off]
        one = runs[who % len(runs)]
        one.ended = self.daemon.finish(self._end, one, bound_us)
        one.is_off, one.work = True, self.work(one)
        assert one.ended is not TurnEnd.UNGATED

    async def _end(self, one: Program, bound_us: int) -> TurnEnd:
        ended = await self.on(one).end_turn(one.process, bound_us)
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
        await self.on(one).begin_turn(one.process)
        one.pending_us = self.pending_us(one)  # before the turn's first launch

    async def _off(self, one: Program, place: Place) -> None:
        follower = self.h.controller._follower
        follower.schedule(one.member, place)
        await follower.apply(one.member)

    # Acts of an operator

    def group(self, who: int) -> tuple[str, list[Program]]:
        """Return a program, or the slice of all on one program's GPU: the directory, and the programs in it."""
        one = self.pick(who % 3)
        if who < 3:
            return one.path, [one]
        return f"slice/jobs/{one.gpu}", [other for other in self.programs if other.gpu == one.gpu]

    @precondition(lambda self: self.programs)
    @rule(who=st.integers(0, 5), mib=st.one_of(st.just(CAPACITY), st.integers(0, CAPACITY)))
    def limit(self, who: int, mib: int) -> None:
        """Write a limit; it holds at once unless a program is late or may not swap."""
        path, below = self.group(who)
        refused = self.daemon.finish(answers, self.h.write(f"{path}/gmem.limit.high", mib * MIB))
        assert not refused or not all(map(self.gives, below)), refused
        assert refused in (0, errno.EBUSY, errno.EAGAIN)
        if not refused:
            assert int(self.daemon.do(self.h.read, f"{path}/gmem.current")) <= mib * MIB

    @precondition(lambda self: self.programs)
    @rule(who=st.integers(0, 5), file=st.sampled_from(["limit.low", "swap.max"]), mib=st.integers(0, CAPACITY))
    def bound(self, who: int, file: str, mib: int) -> None:
        """Write a protection, or a bound of swap; the largest value stands for none."""
        path, _ = self.group(who)
        none = "max" if file == "swap.max" else 0
        self.daemon.finish(self.h.write, f"{path}/gmem.{file}", mib * MIB if mib < CAPACITY else none)

    @precondition(lambda self: self.programs)
    @rule(who=st.integers(0, 5), mib=st.integers(1, CAPACITY))
    def reclaim(self, who: int, mib: int) -> None:
        """Reclaim: so much leaves the GPU, if it is there and nothing keeps it."""
        path, below = self.group(who)
        before = int(self.daemon.do(self.h.read, f"{path}/gmem.current"))
        refused = self.daemon.finish(answers, self.h.write(f"{path}/gmem.reclaim", mib * MIB))
        assert refused in (0, errno.EAGAIN)
        assert not refused or before < mib * MIB or not all(map(self.gives, below))
        if not refused:
            assert int(self.daemon.do(self.h.read, f"{path}/gmem.current")) <= before - mib * MIB

    @precondition(lambda self: not all(one.waits for one in self.programs))
    @rule(who=st.integers(0, 2))
    def migrate(self, who: int) -> None:
        """Move a program to the other GPU, with all that it has, and out of its turn. Launches that wait at its gate
        would be refused here, since no client sends them again."""
        idle = [one for one in self.programs if not one.waits]
        one = idle[who % len(idle)]
        target = (one.gpu + 1) % GPUS
        has_room = self.has_room(one, target)
        refused = self.daemon.finish(answers, self.h.write(f"{one.path}/compute.migrate", target))
        assert refused == (0 if has_room else errno.ENOSPC)
        if refused:
            return
        one.gpu, one.is_off, one.ended = target, False, None

        async def look() -> None:
            gate = self.on(one)._tenants[one.process].gate
            assert not gate.is_closed, "its turn has not ended"
            assert gate.ahead_us == math.inf, "it takes no turns there yet"

        self.daemon.do(look)

    def has_room(self, one: Program, target: int) -> bool:
        """Return whether the slices above a program have room on another GPU for all its memory, there and in the
        host."""
        books = self.h.ledger.books
        held, above = books(one.member), [books(SliceOn(level, target)) for level in (ROOT, Slice("/jobs"))]
        return all(
            level.current + held.current <= level.high and level.swap + held.swap <= level.swap_max for level in above
        )

    @precondition(lambda self: self.programs)
    @rule(who=st.integers(0, 2))
    def kill(self, who: int) -> None:
        """Kill a program: its memory is free, and what waited for it goes on."""
        one = self.pick(who)
        one.excuse(errno.ESRCH)
        (process,) = [process for process in PROCESSES if process.pid == one.process.pid]
        process.kill()
        process.wait()
        PROCESSES.remove(process)
        PROCESSES.append(subprocess.Popen(["sleep", "3600"]))
        self.daemon.do(self.h.gone, one.process)
        self.programs.remove(one)
        self.daemon.sleep(1)
        assert not one.waits, "nothing waits for a program that is gone"
        assert all(request.is_excused for request in one.requests)

    @precondition(lambda self: self.programs)
    @rule(who=st.integers(0, 2))
    def lose(self, who: int) -> None:
        """Lose a GPU and bring it back: each program hears of it, with or without a turn, gives back what is lost, and
        begins anew."""
        gpu = self.on(self.pick(who))
        those = [one for one in self.programs if self.on(one) is gpu]

        async def lose() -> None:
            for one in those:
                one.excuse(errno.ENODEV)
            gpu.lose()

        async def restore() -> None:
            gpu.restore()

        self.daemon.do(lose)
        self.daemon.sleep(1)
        waits = [one for one in those if one.waits]
        said = [self.daemon.finish(answers, self.h.write(f"{one.path}/gmem.limit.high", 0)) for one in those]
        self.daemon.do(restore)
        assert not waits, "nothing waits at the gate of a GPU that is lost, or for a thaw"
        assert said == [errno.ENODEV] * len(those)
        for one in those:
            self.daemon.do(self._begin_anew, one)
            self.daemon.finish(self._begin, one)

    async def _begin_anew(self, one: Program) -> None:
        gpu = self.on(one)
        for pages in one.pages:
            gpu.free(one.process, pages)
        one.pages.clear()
        gpu.close_context(one.process, one.tsg)
        one.tsg = await gpu.open_context(one.process, 1, lambda finished: None, gated=True)
        activity = gpu.activity(one.process)
        assert activity.submitted is not None
        assert activity.finished is not None
        one.dropped = activity.submitted - activity.finished

    @precondition(lambda self: self.programs)
    @rule(who=st.integers(0, 2))
    def freeze(self, who: int) -> None:
        one = self.pick(who)
        self.daemon.finish(self._freeze, one)

    async def _freeze(self, one: Program) -> None:
        await self.h.write(f"{one.path}/compute.freeze", 1)
        one.frozen = True

    @precondition(lambda self: any(one.frozen for one in self.programs))
    @rule(who=st.integers(0, 2))
    def thaw(self, who: int) -> None:
        frozen = [one for one in self.programs if one.frozen]
        self.daemon.finish(self._thaw, frozen[who % len(frozen)])

    async def _thaw(self, one: Program) -> None:
        await self.h.write(f"{one.path}/compute.freeze", 0)
        one.frozen = False

    @rule(ms=st.sampled_from([1, 10, 100, 3000]))
    def wait(self, ms: int) -> None:
        self.daemon.sleep(ms / 1000)

    # Invariants

    def work(self, one: Program) -> tuple[int | None, int | None]:
        async def look() -> tuple[int | None, int | None]:
            activity = self.on(one).activity(one.process)
            return activity.submitted, activity.finished

        return self.daemon.do(look)

    def gives(self, one: Program) -> bool:
        """Return whether all memory of a program moves."""

        async def look() -> bool:
            return all(
                self.h.ledger.books(level).swap_max == MAX for level in self.h.controller.population.path(one.member)
            )

        return not self.is_late(one) and self.daemon.do(look)

    def pending_us(self, one: Program) -> float:
        """Return the queued work of a program, in microseconds by itself."""
        self.on(one).activity(one.process)  # advances the engine to the present
        return self.on(one)._tenants[one.process].pending / 1000

    def is_late(self, one: Program) -> bool:
        async def look() -> bool:
            return self.on(one).footprint(one.process).movable == 0

        return self.daemon.do(look)

    @invariant()
    def what_holds(self) -> None:
        async def look() -> None:
            self.h.check()
            for one in self.programs:
                for pages, stamps in one.pages.items():
                    assert [self.on(one).read(one.process, page) for page in pages] == stamps
                tenant = self.on(one)._tenants[one.process]
                expected = Engines.ALL if one.frozen else Engines.GR if one.is_off else Engines.NONE
                assert tenant.engines is expected
                found = self.on(one).working_set(one.process)
                assert 0 <= found.resident <= found.used <= len(tenant.memory) * MIB
                self.is_near(one)

        self.daemon.do(look)
        for one in self.programs:
            assert all(request.is_excused for request in one.requests)
            if one.is_off:
                assert self.work(one) == one.work, "nothing runs behind a closed gate"
                if one.ended is TurnEnd.DRAINED:
                    submitted, finished = one.work
                    assert submitted is not None
                    assert submitted - one.dropped == finished
                    assert not self.is_late(one), "its memory moves while it waits"

    def is_near(self, one: Program) -> None:
        """Check that a program that takes turns has no more queued than its run-ahead and one kernel of the requests
        since the last look, or than what was queued then."""
        asked = one.requests[one.looked :]
        longest_us = max((request.kernel_us for request in asked), default=0.0)
        before_us, one.pending_us = one.pending_us, self.pending_us(one)
        if self.on(one)._tenants[one.process].gate.ahead_us < math.inf:
            assert one.pending_us <= max(before_us, AHEAD_US + longest_us)
        one.looked += next((n for n, request in enumerate(asked) if not request.is_answered), len(asked))


STORIES = int(os.environ.get("GGROUP_TURN_STORIES", "12"))
"""Number of random stories."""

Turns.TestCase.settings = settings(max_examples=STORIES, stateful_step_count=30)
LOST = pytest.mark.logs("GPU [01] is lost", "GPU [01] is back")
"""Log lines about a GPU that is lost, and comes back."""

TestTurns = LOST(Turns.TestCase)


@pytest.mark.parametrize("end", [pytest.param("lose", marks=LOST), "kill"])
def test_what_a_frozen_program_copies_ends_with_its_gpu_or_with_it(end: str) -> None:
    """A copy that waits for the thaw, in the program's turn."""
    machine = Turns()
    try:
        machine.come()
        machine.freeze(who=0)
        machine.copy(who=0, mib=8, way=Way.OUT)
        getattr(machine, end)(who=0)
    finally:
        machine.teardown()


def test_a_program_that_waits_leaves_its_turn_as_it_moves() -> None:
    """The turns of the GPU that it left do not bound it on the other."""
    machine = Turns()
    try:
        machine.come()
        machine.end_turn(who=0, bound_us=0)
        machine.begin_turn(who=0)
        machine.migrate(who=0)
        machine.end_turn(who=0, bound_us=0)
        machine.migrate(who=0)
    finally:
        machine.teardown()


def test_a_program_that_has_no_room_elsewhere_keeps_its_turn() -> None:
    """It would put a level there over its limit, or brings more in the host than is allowed there."""
    machine = Turns()
    try:
        machine.come()
        machine.allocate(who=0, pages=16)
        machine.daemon.finish(machine.h.write, "slice/jobs/1/gmem.limit.high", 8 * MIB)
        machine.end_turn(who=0, bound_us=0)
        machine.migrate(who=0)
        machine.limit(who=0, mib=8)
        machine.daemon.finish(machine.h.write, "slice/jobs/1/gmem.swap.max", 4 * MIB)
        machine.migrate(who=0)
        machine.what_holds()
        (one,) = machine.programs
        assert (one.gpu, one.is_off, one.ended) == (0, True, TurnEnd.DRAINED)
        machine.daemon.finish(machine.h.write, "slice/jobs/1/gmem.swap.max", "max")
        machine.migrate(who=0)
        assert one.gpu == 1
    finally:
        machine.teardown()


@pytest.mark.parametrize(("mib", "us"), [(CAPACITY, 200_000), (0, 10)], ids=["long", "over the bus"])
def test_a_launch_in_a_turn_is_queued_as_far_as_its_program_may_be_ahead(mib: int, us: int) -> None:
    """A launch of pages that were freed meanwhile is refused for that reason alone."""
    machine = Turns()
    try:
        machine.come()
        machine.allocate(who=0, pages=16)
        machine.end_turn(who=0, bound_us=0)
        machine.limit(who=0, mib=mib)
        machine.begin_turn(who=0)
        machine.launch(who=0, kernels=4, us=us, number=1)
        machine.what_holds()
        (request,) = machine.programs[0].waits
        machine.use(number=0, action="free")
        machine.wait(ms=3000)
        assert request.error is not None
        assert request.error.errno == errno.EFAULT
        machine.what_holds()
        request.excuses.clear()
        with pytest.raises(AssertionError):
            machine.what_holds()
        machine.programs[0].requests.clear()
    finally:
        machine.teardown()
