"""compute.max where levers fail, hang, or are lost with their GPU, and where the limiter itself fails, in virtual
time.
"""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable

import attrs
import pytest
import trio
import trio.testing

from backend.core.reasons import Engines
from backend.core.records import Activity
from backend.core.turns import TurnEnd
from backend.process.identity import Member, Process, Slice
from backend.scheduler.bucket import Bucket
from backend.scheduler.holding import BURST, RATE
from backend.scheduler.limited import Act, Limited
from backend.scheduler.limiter import Limiter
from backend.space.space import Space
from tests.support.harness import Harness, StubGpu, hang, refuses, running, settle, virtual
from tests.support.quotas import Spawn, limited

BUSY = Activity(tsgs=1, attached=1, managed=True, contexts=1)


def limiter(h: Harness) -> Limiter:
    """Return the limiter of the only GPU."""
    return h.controller._schedulers._each[0]._limiter


@attrs.define
class Stub:
    """A process with a quota of 30 ms in 100 ms, on a GPU that the test controls."""

    h: Harness
    gpu: StubGpu
    who: Process

    async def works(self, us: int, seconds: float = 0.05) -> None:
        """Report `us` more microseconds of use, and let `seconds` pass."""
        self.gpu.works[self.who] = attrs.evolve(self.gpu.works[self.who], gpu_usec=us)
        await trio.sleep(seconds)

    @property
    def spent(self) -> Engines | None:
        """The engines that are off for its quota."""
        return self.h.controller._follower.spent(Member(self.who, 0))


async def stub(
    h: Harness, gpu: StubGpu, pid: int, *, gated: bool = False, contexts: int = 1, cgroup: str = "/"
) -> Stub:
    """Start a process on that GPU; with `gated`, it has a gate."""
    who = await h.arrive(pid, cgroup)
    gpu.works[who] = attrs.evolve(BUSY, gpu_usec=0, contexts=contexts, pending=1 if gated else None)
    if gated:
        gpu.ends[who] = TurnEnd.LATE, 0.0
    await h.write(f"{pid}/0/compute.max", "30000 100000")
    await trio.sleep(0.05)
    return Stub(h, gpu, who)


def refused_for(seconds: float, code: int) -> Callable[[], Awaitable[None]]:
    """Return a lever that answers late, with an errno."""

    async def behave() -> None:
        await trio.sleep(seconds)
        await refuses(code)()

    return behave


# A process that cannot be resumed


@pytest.mark.logs("does not go on, though its quota has it")
@pytest.mark.parametrize("code", [errno.EIO, errno.ETIMEDOUT])
@virtual
async def test_one_that_cannot_be_put_back_is_tried_until_it_can(
    spawn: Spawn, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = StubGpu()
    async with running(gpu, scheduler=True) as h:
        one = await stub(h, gpu, spawn().pid)
        gpu.script("attach", *[refused_for(0.1, code)] * 40)
        await one.works(40_000)
        assert gpu.without_gr == {one.who}
        await trio.sleep(30)
        assert gpu.without_gr == {one.who}
        assert len([line for line in caplog.messages if "does not go on" in line]) == 1, "it is said, and once"
        gpu.script("attach")
        await trio.sleep(60)
        assert not gpu.without_gr


@pytest.mark.logs("does not go on, though its quota has it")
@virtual
async def test_one_whose_gate_does_not_open_is_tried_until_it_does(
    spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = StubGpu()
    async with running(gpu, scheduler=True) as h:
        one = await stub(h, gpu, spawn().pid, gated=True)
        begin, failures = gpu.begin_turn, [OSError(errno.EIO, "its socket")] * 5

        async def begin_turn(process: Process) -> None:
            if failures:
                raise failures.pop()
            await begin(process)

        monkeypatch.setattr(gpu, "begin_turn", begin_turn)
        gpu.works[one.who] = attrs.evolve(gpu.works[one.who], pending=0)
        await one.works(40_000)
        assert one.spent is Engines.NONE
        await trio.sleep(2)
        assert not failures
        assert gpu.turns[-1][0] == "begin"


@pytest.mark.logs("does not go on, though its quota has it")
@virtual
async def test_one_without_a_quota_any_more_is_put_back_as_well(spawn: Spawn) -> None:
    """Without a quota the limiter no longer looks at the process."""
    gpu = StubGpu()
    async with running(gpu, scheduler=True) as h:
        one = await stub(h, gpu, spawn().pid)
        await one.works(1_000_000)
        assert gpu.without_gr == {one.who}
        gpu.script("attach", *[refuses(errno.EIO)] * 5)
        await h.write(f"{one.who.pid}/0/compute.max", "max")
        await trio.sleep(3)
        assert not gpu.without_gr
        assert not limiter(h)._leaving


@pytest.mark.logs("does not go on")
@pytest.mark.parametrize("how", ["refused", "hangs"])
@virtual
async def test_one_that_cannot_be_put_back_keeps_no_other_from_its_period(
    spawn: Spawn, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four processes have the periods of their quotas in turn; one cannot be resumed."""
    async with limited(spawn, traced=True) as p:
        four = [await p.program("/jobs", library=False) for _ in range(4)]
        await p.h.write("slice/jobs/0/compute.max", "30000 100000")
        await trio.sleep(20)
        stuck = next(one for one in four if not p.gpu.is_attached(one))
        attach = p.gpu.attach

        async def fails(process: Process) -> None:
            if process == stuck:
                await (hang() if how == "hangs" else refuses(errno.EIO)())
            await attach(process)

        monkeypatch.setattr(p.gpu, "attach", fails)
        await trio.sleep(10)
        found = await p.shares(four, 20)
        assert found[four.index(stuck)] == 0
        assert sum(found) == pytest.approx(0.3, rel=0.1)
        monkeypatch.setattr(p.gpu, "attach", attach)
        await trio.sleep(60)
        found = await p.shares(four, 20)
        assert found[four.index(stuck)] > 0.03


# A process that cannot be stopped


@pytest.mark.logs("cannot be held to its quota")
@virtual
async def test_one_that_could_not_be_stopped_is_so_in_the_same_period(spawn: Spawn) -> None:
    gpu = StubGpu()
    async with running(gpu, scheduler=True) as h:
        one = await stub(h, gpu, spawn().pid)
        gpu.script("detach", *[refuses(errno.EIO)] * 2)
        await one.works(200_000, 0.04)
        assert gpu.without_gr == {one.who}


@pytest.mark.logs("cannot be held to its quota")
@virtual
async def test_one_whose_gate_could_not_be_closed_stands_in_the_same_period(
    spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = StubGpu()
    async with running(gpu, scheduler=True) as h:
        one = await stub(h, gpu, spawn().pid, gated=True)
        end, failures = gpu.end_turn, [OSError(errno.EIO, "its socket")] * 2

        async def end_turn(process: Process, bound_us: int, leaves: int = 0) -> TurnEnd:
            if failures:
                raise failures.pop()
            return await end(process, bound_us)

        monkeypatch.setattr(gpu, "end_turn", end_turn)
        gpu.works[one.who] = attrs.evolve(gpu.works[one.who], pending=0)
        await one.works(200_000, 0.04)
        assert one.spent is Engines.NONE


@pytest.mark.logs("cannot be held to its quota")
@virtual
async def test_one_that_its_gate_does_not_hold_is_stopped_in_the_same_period(
    spawn: Spawn, caplog: pytest.LogCaptureFixture
) -> None:
    """It works on behind its gate, and its GR engine cannot be taken off at first."""
    gpu = StubGpu()
    async with running(gpu, scheduler=True) as h:
        one = await stub(h, gpu, spawn().pid, gated=True)
        gpu.script("detach", *[refuses(errno.EIO)] * 3)
        await one.works(200_000, 0.04)
        assert one.spent is Engines.NONE
        await one.works(400_000, 0.04)
        assert gpu.without_gr == {one.who}
        assert one.spent is Engines.GR
        assert len([line for line in caplog.messages if "cannot be held" in line]) == 1


# Calls of the driver


@virtual
async def test_calls_that_were_not_made_are_given_back(spawn: Spawn) -> None:
    """The process is stopped for another reason when its quota is used up, and still is when the quota lets it go
    on.
    """
    gpu = StubGpu()
    async with running(gpu, scheduler=True) as h:
        one = await stub(h, gpu, spawn().pid)
        await one.works(1_000_000)
        await trio.sleep(10)
        await h.write(f"{one.who.pid}/0/compute.freeze", 1)
        holding = limiter(h)._holding
        # without what is given back the budget stays empty
        holding._own, holding._calls = Bucket(0, BURST), Bucket(0, BURST)
        for n in range(2, 12):
            await one.works(n * 1_000_000, 0.5)
            assert one.spent is Engines.GR
            await trio.sleep(6)
            assert one.spent is None
        assert holding._own.has(trio.current_time(), BURST)
        assert holding._calls.has(trio.current_time(), BURST)


@virtual
async def test_calls_that_the_scheduler_does_not_have_are_not_taken_from_those_of_quotas(spawn: Spawn) -> None:
    gpu = StubGpu()
    async with running(gpu, scheduler=True) as h:
        one = await stub(h, gpu, spawn().pid)
        holding = limiter(h)._holding
        holding._calls.owe(trio.current_time(), 100)
        await one.works(200_000, 1)
        assert not gpu.without_gr, "there are none"
        assert holding._own.has(trio.current_time(), BURST)
        await trio.sleep(5)
        assert gpu.without_gr == {one.who} or one.spent is None


@pytest.mark.parametrize("contexts", [1, 20])
@virtual
async def test_no_lever_is_pulled_without_calls_for_it(spawn: Spawn, contexts: int) -> None:
    """The cases are: programs without the library that start together, that use up their quotas at once, and whose
    quotas are removed while they are stopped; and a program with more contexts than there are calls at once.
    """
    gpu = StubGpu()
    began: list[float] = []
    async with running(gpu, scheduler=True) as h:
        each = [await h.arrive(spawn().pid, "/jobs") for _ in range(30 // contexts + 3)]
        for who in each:
            gpu.works[who] = attrs.evolve(BUSY, gpu_usec=0, contexts=contexts)
        await h.write("slice/jobs/0/compute.max", "30000 100000")
        await trio.sleep(0.05)
        for lever in ("detach", "attach"):

            async def note() -> None:
                began.append(trio.current_time())

            gpu.script(lever, *[note] * 1000)
        for who in each:
            gpu.works[who] = attrs.evolve(BUSY, gpu_usec=10_000_000, contexts=contexts)
        start = trio.current_time()
        await trio.sleep(20)
        assert gpu.without_gr == set(each)
        await h.write("slice/jobs/0/compute.max", "max")
        await trio.sleep(60)
        assert not gpu.without_gr
        for at in (start + 0.5 * n for n in range(160)):
            made = contexts * sum(start <= when < at for when in began)
            assert made <= BURST + contexts + RATE * (at - start)
            assert contexts * sum(at <= when < at + 1 for when in began) <= BURST + contexts + RATE


@virtual
async def test_many_without_the_library_make_no_other_s_periods_longer(spawn: Spawn) -> None:
    """Calls are shared among the quotas at the top, and processes that need few go first: a tenant that starts many
    programs delays no other tenant's periods.
    """
    async with limited(spawn) as p:
        one = await p.program("/one", library=False)
        many = [await p.program("/many", library=False) for _ in range(20)]
        await p.h.write("slice/one/0/compute.max", "30000 100000")
        await p.h.write("slice/many/0/compute.max", "30000 100000")
        await trio.sleep(10)
        for _ in range(10):
            (found,) = await p.shares([one], 2)
            assert found == pytest.approx(0.3, rel=0.45), "a cycle has 0.7 s"
        await trio.sleep(30)
        found = await p.shares([one, *many], 60)
        assert found[0] == pytest.approx(0.3, rel=0.05)
        assert sum(found[1:]) == pytest.approx(0.3, rel=0.4)


@virtual
async def test_those_that_need_few_calls_take_none_from_one_that_waits_for_more(spawn: Spawn) -> None:
    """Otherwise that process would wait for ever, while the others take each call as it comes back."""
    gpu = StubGpu()
    async with running(gpu, scheduler=True) as h:
        one, other = await h.arrive(spawn().pid), await h.arrive(spawn().pid)
        holding = limiter(h)._holding
        holding._own = Bucket(0, BURST)
        assert holding._own.take(trio.current_time(), BURST - 1)
        large, small = Limited((), contexts=2, levers=True), Limited((), levers=True)
        holding.begin()
        assert holding.start(one, large, Act.SPEND) is not None
        assert holding.start(other, small, Act.SPEND) is not None
        assert not large.busy
        assert not small.busy
        holding.begin()
        assert holding.start(other, small, Act.SPEND) is None
        assert small.busy
        await settle()


@virtual
async def test_calls_for_one_that_ends_are_given_back(spawn: Spawn) -> None:
    """The process is gone before its lever is pulled."""
    gpu = StubGpu()
    async with running(gpu, scheduler=True) as h:
        body = spawn()
        one = await stub(h, gpu, body.pid)
        holding = limiter(h)._holding
        holding._own, holding._calls = Bucket(0, BURST), Bucket(0, BURST)
        ended = trio.Event()

        async def end_turn(process: Process, bound_us: int, leaves: int = 0) -> TurnEnd:
            await ended.wait()
            return TurnEnd.UNGATED

        gpu.end_turn = end_turn  # type: ignore[method-assign]
        await one.works(200_000, 0.1)
        assert not holding._own.has(trio.current_time(), BURST)
        body.kill()
        body.wait()
        await h.gone(one.who)
        ended.set()
        await settle()
        assert holding._own.has(trio.current_time(), BURST)


@virtual
async def test_looks_that_take_long_are_rare(spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at a thousand programs takes 30 ms of a CPU; looks may take a quarter of it."""
    async with limited(spawn) as p:
        one = await p.program()
        await p.h.write(f"{one.pid}/0/compute.max", "500000 1000000")
        await trio.sleep(2)
        look, looks, clock = Limiter._look, list[float](), trio.lowlevel.current_clock()
        assert isinstance(clock, trio.testing.MockClock)

        def slow(self: Limiter) -> int:
            looks.append(trio.current_time())
            clock.jump(0.03)
            return min(look(self), self._now_us() + 1_000)

        monkeypatch.setattr(Limiter, "_look", slow)
        start = trio.current_time()
        (found,) = await p.shares([one], 12)
        assert 0.03 * len(looks) <= 0.26 * (trio.current_time() - start)
        assert found == pytest.approx(0.5, rel=0.1), "what is over is paid for"


# Of one program of a space


@pytest.mark.parametrize("gated", [False, True])
@virtual
async def test_no_lever_is_pulled_for_the_quota_of_one_of_a_space(spawn: Spawn, gated: bool) -> None:
    """It would stop all of them, and what stops them all would not let the others go on. For the quota of all of them
    it is pulled.
    """
    gpu = StubGpu()
    async with running(gpu, scheduler=True) as h:
        space = Space(Slice("/jobs"), 0, 7)
        limiter(h)._space_of = lambda member: space
        await h.operations.mkdir(await h.inode("slice"), b"jobs", 0o755, h.ctx)
        one = await stub(h, gpu, spawn().pid, gated=gated, cgroup="/jobs")
        us, spent = 0, set[Engines | None]()
        for _ in range(100):
            await one.works(us := us + 10_000, 0.01)
            assert not gpu.without_gr
            spent.add(one.spent)
        assert spent == {None, Engines.NONE}
        await h.write(f"{one.who.pid}/0/compute.max", "max")
        limiter(h)._space_of = lambda member: Space(Slice("/elsewhere"), 0, 7)  # from where it was moved
        await h.write("slice/jobs/0/compute.max", "30000 100000")
        for _ in range(100):
            await one.works(us := us + 10_000, 0.01)
            assert not gpu.without_gr
        limiter(h)._space_of = lambda member: space
        await h.write("slice/jobs/0/compute.max", "30001 100000")
        without = []
        for _ in range(100):
            await one.works(us := us + 10_000, 0.01)
            without.append(one.who in gpu.without_gr)
        assert any(without)


# Fresh starts


@pytest.mark.logs("the quotas of GPU 0 failed")
@virtual
async def test_quotas_hold_after_the_limiter_failed(spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of the process starts again, and charges of the failed limiter are forgotten."""
    async with limited(spawn) as p:
        one = await p.program()
        await p.h.write(f"{one.pid}/0/compute.max", "30000 100000")
        await trio.sleep(60)
        look, errors = Limiter._look, [RuntimeError("a bug")]

        def fails(self: Limiter) -> int:
            if errors:
                raise errors.pop()
            return look(self)

        monkeypatch.setattr(Limiter, "_look", fails)
        await trio.sleep(5)
        assert not errors
        (found,) = await p.shares([one], 10)
        assert found == pytest.approx(0.3, rel=0.03)


@pytest.mark.logs("the quotas of GPU 0 failed")
@virtual
async def test_what_stood_as_the_limiter_failed_goes_on(spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds also if its quota was removed meanwhile."""
    gpu = StubGpu()
    async with running(gpu, scheduler=True) as h:
        one = await stub(h, gpu, spawn().pid)
        await one.works(1_000_000)
        assert gpu.without_gr == {one.who}
        look, errors = Limiter._look, [RuntimeError("a bug")]

        def fails(self: Limiter) -> int:
            if errors:
                raise errors.pop()
            return look(self)

        monkeypatch.setattr(Limiter, "_look", fails)
        await trio.sleep(0.2)
        await h.write(f"{one.who.pid}/0/compute.max", "max")
        await trio.sleep(3)
        assert not errors
        assert not gpu.without_gr


@virtual
async def test_a_lost_gpu_charges_nothing(spawn: Spawn) -> None:
    """A process that could run is charged where its use is not reported, except on a lost GPU; and a process that was
    stopped there at the loss is no longer stopped.
    """
    gpu = StubGpu()
    gpu.late_us = 200_000
    async with running(gpu, scheduler=True) as h:
        one = await stub(h, gpu, spawn().pid)
        await one.works(40_000)
        assert gpu.without_gr == {one.who}
        gpu.lost = True
        h.controller.bookkeeper.presence(0)
        gpu.works[one.who] = attrs.evolve(BUSY, gpu_usec=None)
        await trio.sleep(0.1)

        async def throttled() -> str:
            text = await h.read(f"{one.who.pid}/0/gcgroup.stat")
            return text.split("throttled_usec ")[1].split()[0]

        before = await throttled()
        await trio.sleep(60)
        assert await throttled() == before
        gpu.without_gr.clear()
        gpu.lost = False
        gpu.works[one.who] = attrs.evolve(BUSY, gpu_usec=0)
        h.controller.bookkeeper.presence(0)
        await trio.sleep(0.01)
        assert one.spent is None
        for account in limiter(h)._accounts.values():
            assert 0 < account.left_us <= 30_000


@virtual
async def test_a_quota_that_is_given_anew_begins_anew(spawn: Spawn) -> None:
    """No debt of the former quota is left, and the time in between is not charged."""
    async with limited(spawn, traced=True) as p:
        one = await p.program()
        await p.h.write(f"{one.pid}/0/compute.max", "1000 1000000")
        await trio.sleep(5)
        await p.h.write(f"{one.pid}/0/compute.max", "max")
        await trio.sleep(5)
        await p.h.write(f"{one.pid}/0/compute.max", "300000 1000000")
        (found,) = await p.shares([one], 0.25)
        assert found == pytest.approx(1, rel=0.01)
        await trio.sleep(5)
        (found,) = await p.shares([one], 10)
        assert found == pytest.approx(0.3, rel=0.05)
