"""The scheduler over the software GPU: from a write to a file to the shares that programs get, in virtual time."""

from __future__ import annotations

import contextlib
import errno
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence

import attrs
import pytest
import trio
from trio.testing import MockClock

from backend.core.controller import DEADLINE_S
from backend.core.records import NOWHERE, Activity
from backend.core.turns import HOLD_US
from backend.process.identity import Member, Process
from backend.scheduler.failing import AGAIN_S
from backend.scheduler.fair import SWITCH_US
from tests.support.contenders import Bench, Programs
from tests.support.harness import StubGpu, hang, refuses, running, settle, virtual
from tests.support.restarted import Machine

Spawn = Callable[..., subprocess.Popen[bytes]]

DEFAULT_US = 2048
LONG_US = 20_000
"""Microseconds of a kernel in tests over minutes: short ones would make many events, as the end of each is one."""
TOLD = pytest.mark.logs("cannot be scheduled")


@contextlib.asynccontextmanager
async def programs(spawn: Spawn, *, scheduler: bool = True) -> AsyncIterator[Programs]:
    """Run a GPU, its daemon, and the programs on it."""
    gpu = Bench()
    async with running(gpu, scheduler=scheduler) as h, trio.open_nursery() as nursery:
        yield Programs(h, gpu, spawn, nursery)
        nursery.cancel_scope.cancel()


def of_all(shares: Sequence[float]) -> list[float]:
    return [share / sum(shares) for share in shares]


@virtual
async def test_the_gpu_hears_which_programs_go_behind_which(spawn: Spawn) -> None:
    """At writes of priorities, and when programs come, are frozen and go; but not while nothing changes."""
    gpu = Bench()
    async with running(gpu, scheduler=True) as h, trio.open_nursery() as nursery:
        p = Programs(h, gpu, spawn, nursery)
        first, second = await p.batch(), await p.batch("/jobs")
        await trio.sleep(1)
        assert not gpu.ranks, "equals hold none of each other"
        await h.write("slice/jobs/0/compute.priority", 9)
        await trio.sleep(1)
        assert gpu.ranks == [({second: (first,)}, HOLD_US)]
        third = await p.batch("/jobs")
        await h.write(f"{third.pid}/0/compute.priority", 3)
        await trio.sleep(2)
        assert gpu.ranks[-1] == ({third: (first,), second: (first, third)}, HOLD_US)
        await h.write(f"{first.pid}/0/compute.freeze", 1)
        await trio.sleep(1)
        assert gpu.ranks[-1] == ({second: (third,)}, HOLD_US)
        await h.write(f"{first.pid}/0/compute.freeze", 0)
        await h.write("slice/jobs/0/compute.priority", 0)
        await trio.sleep(1)
        told = len(gpu.ranks)
        assert gpu.ranks[-1] == ({second: (third,), first: (second, third)}, HOLD_US)
        await trio.sleep(10)
        assert len(gpu.ranks) == told
        nursery.cancel_scope.cancel()


@virtual
async def test_the_gpu_hears_of_no_ranks_on_a_mount_without(spawn: Spawn) -> None:
    """Without, with ``hold=no``; and with another hold, the GPU hears of that one."""
    for hold_us in (None, 50):
        gpu = Bench()
        async with running(gpu, scheduler=True, hold_us=hold_us) as h, trio.open_nursery() as nursery:
            p = Programs(h, gpu, spawn, nursery)
            first, second = await p.batch(), await p.batch()
            await h.write(f"{second.pid}/0/compute.priority", 9)
            await trio.sleep(1)
            assert gpu.ranks == ([] if hold_us is None else [({second: (first,)}, 50)])
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("contexts", [1, 4])
@virtual
async def test_weights(spawn: Spawn, contexts: int) -> None:
    async with programs(spawn) as p:
        three = [await p.batch(contexts=contexts), await p.batch(), await p.batch()]
        for process, weight in zip(three, (100, 200, 400), strict=True):
            await p.h.write(f"{process.pid}/0/compute.weight", weight)
        assert await p.h.read(f"{three[2].pid}/0/compute.weight") == "400\n"
        await trio.sleep(1)
        found = await p.shares(three, 10)
        assert of_all(found) == pytest.approx([1 / 7, 2 / 7, 4 / 7], rel=0.03 if contexts == 1 else 0.05)
        assert p.gpu.calls(since=0) >= len(three), "only timeslices are set here, of each at least once"
        assert p.gpu.calls(since=1) <= 5


@virtual
async def test_a_slice_has_its_weight_and_its_processes_share_it(spawn: Spawn) -> None:
    async with programs(spawn) as p:
        four = [*[await p.batch("/jobs") for _ in range(3)], await p.batch()]
        await p.h.write("slice/jobs/0/compute.weight", 300)
        await p.h.write(f"{four[0].pid}/0/compute.weight", 200)
        await trio.sleep(1)
        assert of_all(await p.shares(four, 10)) == pytest.approx([3 / 8, 3 / 16, 3 / 16, 1 / 4], rel=0.03)
        await p.h.write("slice/jobs/0/compute.weight", 100)
        await trio.sleep(1)
        assert (await p.shares(four, 10))[3] == pytest.approx(0.5, rel=0.03)


@virtual
async def test_what_a_child_leaves_is_its_siblings(spawn: Spawn) -> None:
    """A slice with three services and a batch program, beside a batch program, gets its half."""
    async with programs(spawn) as p:
        batch, other = await p.batch("/jobs"), await p.batch()
        services = [(await p.service("/jobs", load=0.01))[0] for _ in range(3)]
        await trio.sleep(10)
        found = of_all(await p.shares([other, batch, *services], 20))
        assert found[0] == pytest.approx(0.5, rel=0.05)


class Slow(Bench):
    """A software GPU for which a look at one program takes the daemon so much CPU time."""

    TAKES_S = 0.001

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Process] = []
        self.meanwhile: Callable[[Process], None] = lambda process: None

    def activity(self, process: Process) -> Activity:
        clock = trio.lowlevel.current_clock()
        assert isinstance(clock, MockClock)
        clock.jump(self.TAKES_S)
        self.asked.append(process)
        self.meanwhile(process)
        return super().activity(process)


class Turns(trio.abc.Instrument):
    """Measures the longest run of tasks that were ready at once, in seconds: how long a newly ready task may wait."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._began_s: float | None = None

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if self._began_s is None:  # the clock has jumped to the start of this run
            self._began_s = trio.current_time()

    def before_io_wait(self, timeout: float) -> None:
        if self._began_s is not None:
            self.longest_s = max(self.longest_s, trio.current_time() - self._began_s)
        self._began_s = None


@virtual
async def test_nobody_waits_for_a_look_at_many(spawn: Spawn) -> None:
    """It takes 50 ms of CPU time in parts: after each part others run, and they have nine tenths of the CPU."""
    gpu, many, seconds = Slow(), 50, 20
    async with running(gpu, scheduler=True) as h, trio.open_nursery() as nursery:
        p = Programs(h, gpu, spawn, nursery)
        processes = [await p.batch(idle=True) for _ in range(many)]
        gpu.asked.clear()
        turns = Turns()
        trio.lowlevel.add_instrument(turns)
        await trio.sleep(seconds)
        trio.lowlevel.remove_instrument(turns)
        assert set(gpu.asked) == set(processes)
        # A part of the scheduler's look, at two processes, and a part of the saving of totals, for one.
        assert 0 < turns.longest_s <= 3 * gpu.TAKES_S + 1e-9
        assert len(gpu.asked) * gpu.TAKES_S <= 0.11 * seconds
        nursery.cancel_scope.cancel()


@virtual
async def test_one_that_goes_in_the_middle_of_a_look_is_not_asked(spawn: Spawn) -> None:
    gpu = Slow()
    async with running(gpu, scheduler=True) as h:
        children = [spawn() for _ in range(5)]
        processes = [await h.arrive(child.pid) for child in children]
        for process in processes:
            await gpu.open_context(process, 8, lambda finished: None)
        await trio.sleep(1)
        first = trio.Event()
        gpu.meanwhile = lambda process: first.set() if process == processes[0] else None
        await first.wait()
        children[-1].kill()
        await h.gone(processes[-1])
        gpu.asked.clear()
        await trio.sleep(2)
        assert set(gpu.asked) == set(processes[:-1])


@virtual
async def test_less_is_lost_to_switches(spawn: Spawn) -> None:
    total = []
    for scheduler in (True, False):
        async with programs(spawn, scheduler=scheduler) as p:
            total.append(sum(await p.shares([await p.batch(), await p.batch()], 5)))
    assert total[0] >= 1.04 * total[1]


@pytest.mark.parametrize("kernels_us", [(500,), (20_000,), (500, 500, 500)], ids=["one", "kernels of 20 ms", "three"])
@virtual
async def test_a_critical_program(spawn: Spawn, kernels_us: tuple[int, ...]) -> None:
    """Beside batch programs its p99 is the same as alone, from the first request on; and they use the rest."""
    late = []
    for others in ((), kernels_us):
        async with programs(spawn) as p:
            batch = [await p.batch(kernel_us=us) for us in others]
            critical, latencies = await p.service()
            await p.h.write(f"{critical.pid}/0/compute.priority", 0)
            filled = sum(await p.shares(batch, 30))
            late.append(sorted(latencies)[int(0.99 * len(latencies))])
            assert p.gpu.calls(since=1) <= 5 * 30
    assert late[1] <= 1.05 * late[0]
    assert filled >= 0.6


@virtual
async def test_of_three_that_fill_each_has_a_third_and_none_is_frozen(spawn: Spawn) -> None:
    """A process off the runlist is shown as throttled; compute.freeze and compute.events are about freezes only."""
    async with programs(spawn) as p:
        critical, _ = await p.service()
        await p.h.write(f"{critical.pid}/0/compute.priority", 0)
        three = [await p.batch("/jobs") for _ in range(3)]
        found = await p.shares(three, 30)
        assert found == pytest.approx([sum(found) / 3] * 3, rel=0.1)
        assert [p.gpu.is_attached(process) for process in three].count(True) == 1
        for place in ("slice/jobs/0", *[f"{process.pid}/0" for process in three]):
            assert await p.h.read(f"{place}/compute.freeze") == "0\n"
            assert await p.h.read(f"{place}/compute.events") == "populated 1\nfrozen 0\nmigrated 0\nundone 0\nlost 0\n"
        stat = dict(line.split() for line in (await p.h.read("slice/jobs/0/gcgroup.stat")).splitlines())
        assert int(stat["throttled_usec"]) == pytest.approx(2 * 30e6, rel=0.02)
        # Two at once, then four turns of 0.5 s each, and turns of 2 s, as all three use theirs up.
        assert 18 <= int(stat["nr_throttled"]) <= 2 + 12 + 12
        assert "nr_throttled 0\n" in await p.h.read(f"{critical.pid}/0/gcgroup.stat")


@virtual
async def test_what_one_filler_leaves_another_has(spawn: Spawn) -> None:
    """A program with requests of 8.6 ms at load 0.3 takes no more of a batch program's turns than it can use."""
    use = []
    for scheduler in (True, False):
        async with programs(spawn, scheduler=scheduler) as p:
            critical, _ = await p.service(load=0.1)
            if scheduler:
                await p.h.write(f"{critical.pid}/0/compute.priority", 0)
            three = [critical, await p.batch(), (await p.service(load=0.3))[0]]
            use.append(sum(await p.shares(three, 20)))
            assert p.gpu.calls(since=1) <= 6 * 20
    assert use[0] >= 0.95 * use[1]


@virtual
async def test_a_priority_is_of_a_slice_as_well(spawn: Spawn) -> None:
    async with programs(spawn) as p:
        jobs, other = [await p.batch("/jobs") for _ in range(2)], await p.batch()
        await p.h.write("slice/jobs/0/compute.priority", 9)
        await trio.sleep(0.5)
        assert (await p.shares([other], 5))[0] > 0.98
        await p.h.write("slice/jobs/0/compute.priority", 7)
        await trio.sleep(0.5)
        assert await p.shares(jobs, 5) == pytest.approx([0.495, 0.495], rel=0.02)


@virtual
async def test_an_explicit_timeslice_holds(spawn: Spawn) -> None:
    """It holds beside the driver's timeslice of the other program; with `default`, shares are computed again."""
    async with programs(spawn) as p:
        one, other = await p.batch(), await p.batch()
        await trio.sleep(1)
        assert p.gpu.timeslices(one) == p.gpu.timeslices(other) == 29_830
        assert "timeslice_usec 29830\n" in await p.h.read(f"{one.pid}/0/gcgroup.stat")
        assert await p.h.read(f"{one.pid}/0/compute.timeslice") == "2.048\n", "nobody asked for anything"
        await p.h.write(f"{one.pid}/0/compute.timeslice", "1.024")
        await trio.sleep(0.1)
        assert (p.gpu.timeslices(one), p.gpu.timeslices(other)) == (1024, DEFAULT_US)
        await p.h.write(f"{other.pid}/0/compute.weight", 50)
        await trio.sleep(0.1)
        assert p.gpu.timeslices(one) == 1024
        await p.h.write(f"{one.pid}/0/compute.timeslice", "default")
        await trio.sleep(0.1)
        assert (p.gpu.timeslices(one), p.gpu.timeslices(other)) == (39_830, 19_830)


@virtual
async def test_an_explicit_timeslice_of_a_slice(spawn: Spawn) -> None:
    """It is split among the processes in the slice; other programs share as if these were not there."""
    async with programs(spawn) as p:
        jobs = [await p.batch("/jobs") for _ in range(2)]
        others = [await p.batch(contexts=4), await p.batch()]
        await p.h.write("slice/jobs/0/compute.timeslice", "1.024")
        await trio.sleep(5)
        assert [p.gpu.timeslices(process) for process in jobs] == [512, 512]
        assert p.gpu.timeslices(others[1]) == DEFAULT_US
        found = await p.shares([*jobs, *others], 10)
        assert found[2] == pytest.approx(found[3], rel=0.05)
        assert found[:2] == pytest.approx([found[3] / 4] * 2, rel=0.05)
        await p.h.write("slice/jobs/0/compute.timeslice", "default")
        await trio.sleep(5)
        found = await p.shares([*jobs, *others], 10)
        assert of_all(found) == pytest.approx([1 / 6, 1 / 6, 1 / 3, 1 / 3], rel=0.05)


@virtual
async def test_a_freeze_wins(spawn: Spawn) -> None:
    """It overrides the turn of a filler; one that is thawed in another's turn stays off, and is not frozen."""
    async with programs(spawn) as p:
        critical, _ = await p.service()
        await p.h.write(f"{critical.pid}/0/compute.priority", 0)
        pair = [await p.batch(), await p.batch()]
        await trio.sleep(1)
        for process in pair:
            await p.h.write(f"{process.pid}/0/compute.freeze", 1)
            assert not p.gpu.is_attached(process)
            assert "frozen 1\n" in await p.h.read(f"{process.pid}/0/compute.events")
        assert await p.shares(pair, 3) == [0, 0]
        for process in pair:
            await p.h.write(f"{process.pid}/0/compute.freeze", 0)
            assert "frozen 0\n" in await p.h.read(f"{process.pid}/0/compute.events")
        await trio.sleep(0.1)
        assert sorted(map(p.gpu.is_attached, pair)) == [False, True]
        assert sum(await p.shares(pair, 3)) > 0.5


@virtual
async def test_who_comes_later_shares_from_then_on(spawn: Spawn) -> None:
    """Rounds stay long: an unknown past use does not make a newcomer count as intermittent."""
    async with programs(spawn) as p:
        pair = [await p.batch(), await p.batch()]
        await trio.sleep(5)
        three = [*pair, await p.batch()]
        await trio.sleep(0.1)
        assert [p.gpu.timeslices(process) for process in three] == [19_830] * 3
        assert await p.shares(three, 3) == pytest.approx([1 / 3] * 3, rel=0.03)
        assert p.gpu.calls(since=5.5) == 0


@virtual
async def test_who_is_left_alone_has_what_the_driver_gives(spawn: Spawn) -> None:
    """A program alone gets no calls; one whose neighbours left, or stopped working, has its default back."""
    async with programs(spawn) as p:
        one = await p.batch(kernel_us=LONG_US)
        await p.h.write(f"{one.pid}/0/compute.priority", 3)
        await trio.sleep(60)
        assert p.gpu.moved == []
        idle = await p.batch(idle=True)
        await p.h.write(f"{idle.pid}/0/compute.priority", 3)
        await trio.sleep(5)
        assert p.gpu.timeslices(one) == p.gpu.timeslices(idle) == DEFAULT_US
        process = p.spawn()
        other = await p.h.arrive(process.pid)
        await p.h.write(f"{other.pid}/0/compute.priority", 0)
        await trio.sleep(0.5)
        assert p.gpu.timeslices(one) != DEFAULT_US
        process.kill()
        await p.h.gone(other)
        await trio.sleep(5)
        assert p.gpu.timeslices(one) == DEFAULT_US


@virtual
async def test_the_end_gives_everything_back(spawn: Spawn) -> None:
    async with programs(spawn) as p:
        processes = [await p.batch() for _ in range(4)]
        await p.h.write(f"{processes[0].pid}/0/compute.priority", 0)
        await trio.sleep(1)
        assert [p.gpu.is_attached(process) for process in processes].count(False) == 2
    assert [p.gpu._tenants[process].attached for process in processes] == [True] * 4
    assert [p.gpu._tenants[process].timeslice_us for process in processes] == [0] * 4
    assert p.h.controller.released


@virtual
async def test_the_next_daemon_gives_back_what_a_killed_one_took(spawn: Spawn) -> None:
    """What the killed daemon's scheduler took was never a freeze."""
    gpu = StubGpu()
    machine = Machine(gpu)
    async with machine.daemon(scheduler=True) as h:
        three = [await h.arrive(spawn().pid) for _ in range(3)]
        await h.write(f"{three[0].pid}/0/compute.priority", 0)
        await trio.sleep(1)
        (off,) = gpu.detached
        assert off in three[1:]
        assert gpu.timeslices.keys() == set(three)
        h.kill()
    assert gpu.detached == {off}
    async with machine.daemon() as h:
        assert "frozen 0\n" in await h.read(f"{off.pid}/0/compute.events")
        await settle()
        assert gpu.detached == set()
        assert gpu.timeslices == {}


@TOLD
@virtual
async def test_a_lever_that_fails_is_told_once(spawn: Spawn, caplog: pytest.LogCaptureFixture) -> None:
    """A filler that cannot be detached runs on, accepts writes, and is retried ever more rarely."""
    async with programs(spawn) as p:
        three = [await p.batch(kernel_us=LONG_US) for _ in range(3)]
        p.gpu.broken = {three[2], three[1]}
        await p.h.write(f"{three[0].pid}/0/compute.priority", 0)
        await trio.sleep(60)
        assert all(map(p.gpu.is_attached, three))
        assert p.gpu.used(three[0]) > 0.9 * 60e6 * 0.5
        assert len([record for record in caplog.records if "cannot be scheduled" in record.message]) <= 2
        await p.h.write(f"{three[2].pid}/0/compute.timeslice", 1)
        p.gpu.broken = set()
        await trio.sleep(60)
        assert [p.gpu.is_attached(process) for process in three].count(False) == 1


@pytest.mark.parametrize("code", [errno.ESRCH, errno.ENOENT, errno.ENODEV])
@virtual
async def test_one_that_has_just_gone_is_not_worth_a_word(
    spawn: Spawn, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Its levers are gone and its end is not known yet: it is left alone, and the others get its part.

    ESRCH says by itself that it is gone; other errors come where its pid is free, or a zombie's.
    """

    class Ending(StubGpu):
        async def _act(self, lever: str, process: Process, value: int = 0) -> None:
            if process in ending:
                self.calls.append((lever, process.pid, value))
                raise OSError(code, "it is ending")
            await super()._act(lever, process, value)

    gpu, ending, free = Ending(), set[Process](), set[int]()
    monkeypatch.setattr("backend.scheduler.scheduler.is_borne", lambda pid: pid not in free)
    async with running(gpu, scheduler=True) as h:
        three = [await h.arrive(spawn().pid) for _ in range(3)]
        await trio.sleep(1)
        assert [gpu.timeslices[process] for process in three] == [gpu.timeslices[three[0]]] * 3
        calls = len(gpu.calls)
        ending.add(three[2])
        if code != errno.ESRCH:
            free.add(three[2].pid)
        await h.write(f"{three[0].pid}/0/compute.weight", 300)
        await trio.sleep(300)
        assert len([pid for _, pid, _ in gpu.calls[calls:] if pid == three[2].pid]) == 1
        rounds = [gpu.timeslices[process] + SWITCH_US for process in three[:2]]
        assert rounds[0] == 3 * rounds[1]
        assert sum(rounds) in (60_000, 8_000)
        ending.clear()


@virtual
async def test_one_without_channel_groups_is_not_worth_a_word(spawn: Spawn) -> None:
    """It has destroyed its contexts and lives on: it is tried again, for it may make others."""

    class Emptied(StubGpu):
        def activity(self, process: Process) -> Activity:
            return attrs.evolve(super().activity(process), tsgs=int(process not in emptied))

        async def _act(self, lever: str, process: Process, value: int = 0) -> None:
            if process in emptied:
                raise OSError(errno.EOPNOTSUPP, "no channel group of this program can be found")
            await super()._act(lever, process, value)

    gpu, emptied = Emptied(), set[Process]()
    async with running(gpu, scheduler=True) as h:
        one, other = [await h.arrive(spawn().pid) for _ in range(2)]
        await trio.sleep(1)
        emptied.add(other)
        before = dict(gpu.timeslices)
        await h.write(f"{one.pid}/0/compute.weight", 300)
        await trio.sleep(2)
        assert gpu.timeslices[other] == before[other]
        emptied.clear()
        await trio.sleep(2 * AGAIN_S)
        assert gpu.timeslices[one] + SWITCH_US == 3 * (gpu.timeslices[other] + SWITCH_US)


@pytest.mark.parametrize(
    ("behaviour", "answer_s"),
    [pytest.param(hang, 1, id="hangs"), pytest.param(refuses(errno.EOPNOTSUPP), 0, id="EOPNOTSUPP", marks=TOLD)],
)
@virtual
async def test_a_write_does_not_fail_for_the_scheduler(
    spawn: Spawn, behaviour: Callable[[], None], answer_s: int
) -> None:
    """A scheduler's timeslice that the driver refuses is not retried because of a freeze of the process."""
    gpu = StubGpu()
    async with running(gpu, scheduler=True) as h:
        gpu.script("set_timeslice", behaviour)  # type: ignore[arg-type]
        one, other = await h.arrive(spawn().pid), await h.arrive(spawn().pid)
        await trio.sleep(answer_s + 1)
        stuck = next(process for process in (one, other) if process not in gpu.timeslices)
        calls = len(gpu.calls)
        await h.write(f"{stuck.pid}/0/compute.freeze", 1)
        assert gpu.calls[calls:] == [("detach", stuck.pid, 0)]
        await h.write(f"{stuck.pid}/0/compute.freeze", 0)
        await trio.sleep(AGAIN_S + 1)
        assert gpu.timeslices.keys() == {one, other}


@virtual
async def test_one_that_takes_its_time_to_run_again_is_left_alone_for_so_long(spawn: Spawn) -> None:
    """For example while its memory comes back from the host. Soon after, it has what it is to have."""
    gpu = StubGpu()

    async def slow() -> None:
        await trio.sleep(DEADLINE_S - 1)

    async with running(gpu, scheduler=True) as h, trio.open_nursery() as nursery:
        one, *others = [await h.arrive(spawn().pid) for _ in range(3)]
        await trio.sleep(1)
        await h.write(f"{one.pid}/0/compute.freeze", 1)
        await trio.sleep(1)
        assert gpu.timeslices.keys() == set(others)
        gpu.script("attach", slow, pid=one.pid)
        nursery.start_soon(h.write, f"{one.pid}/0/compute.freeze", 0)
        for weight in range(101, 105):
            await h.write(f"{others[0].pid}/0/compute.weight", weight)
            await trio.sleep(0.9)
        assert one not in gpu.timeslices
        await trio.sleep(1)
        assert gpu.timeslices.keys() == {one, *others}


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=TOLD)])
@virtual
async def test_a_driver_that_is_late_once_is_not_worth_a_word(
    spawn: Spawn, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The lever is moved again later; a second delay is logged."""
    gpu = StubGpu()
    async with running(gpu, scheduler=True) as h:
        one, other = spawn().pid, spawn().pid
        gpu.script("set_timeslice", *[hang] * times, pid=other)  # type: ignore[list-item]
        processes = {await h.arrive(pid) for pid in (one, other)}
        await trio.sleep(AGAIN_S / 2)
        assert len(gpu.timeslices) == 1
        assert not caplog.records
        await trio.sleep(4 * AGAIN_S)
        assert gpu.timeslices.keys() == processes
        assert len(caplog.records) == times - 1


@virtual
async def test_no_more_than_fifty_levers_in_any_second(spawn: Spawn) -> None:
    """A hundred programs change their priority all the time."""
    gpu = StubGpu()
    async with running(gpu, scheduler=True) as h:
        many = [await h.arrive(spawn().pid, "/jobs") for _ in range(100)]
        when: list[float] = []
        act = gpu._act

        async def counted(lever: str, process: Process, value: int = 0) -> None:
            when.append(trio.current_time())
            await act(lever, process, value)

        gpu._act = counted  # type: ignore[method-assign]
        for n in range(100):
            await h.write(f"{many[n].pid}/0/compute.priority", n % 16)
            await trio.sleep(0.1)
        assert len(when) > 100, "it does what it may"
        assert max(sum(start <= at < start + 1 for at in when) for start in when) <= 50


@virtual
async def test_on_a_slow_machine_it_looks_more_rarely(spawn: Spawn) -> None:
    """Even if a look takes long, the rest of the daemon gets nine tenths of the time."""
    took = 0.05

    class Slow(StubGpu):
        looks = 0

        def activity(self, process: Process) -> Activity:
            clock = trio.lowlevel.current_clock()
            assert isinstance(clock, MockClock)
            self.looks += 1
            clock.jump(took)
            return super().activity(process)

    gpu = Slow()
    async with running(gpu, scheduler=True) as h:
        _, other = await h.arrive(spawn().pid), await h.arrive(spawn().pid)
        await trio.sleep(2)
        looks, began = gpu.looks, trio.current_time()
        await trio.sleep(60)
        assert 0.07 <= took * (gpu.looks - looks) / (trio.current_time() - began) <= 0.1
        await h.write(f"{other.pid}/0/compute.priority", 0)
        await trio.sleep(2)
        assert len({*gpu.timeslices.values()}) == 2, "it acts all the same"


@virtual
async def test_where_use_is_unknown_parts_are_slices(spawn: Spawn) -> None:
    """On a GPU that reports neither use nor an estimate, every process is taken to have work."""
    gpu = StubGpu()
    async with running(gpu, scheduler=True) as h:
        one, other = await h.arrive(spawn().pid), await h.arrive(spawn().pid)
        await h.write(f"{one.pid}/0/compute.weight", 300)
        await trio.sleep(20)
        assert gpu.timeslices[one] + SWITCH_US == pytest.approx(3 * (gpu.timeslices[other] + SWITCH_US), rel=0.01)
        assert len(gpu.calls) <= 8


@virtual
async def test_an_estimate_will_do(spawn: Spawn) -> None:
    """A figure that grows once a second shows which process is idle, but not whether one is idle in between."""

    class Estimating(Bench):
        def activity(self, process: Process) -> Activity:
            exact = super().activity(process)
            if trio.current_time() >= self.sampled + 1:
                self.sampled = trio.current_time()
                self.known = {one: super(Estimating, self).activity(one).gpu_usec or 0 for one in self._tenants}
            return attrs.evolve(exact, gpu_usec=None, pending=None, gpu_usec_estimate=self.known.get(process, 0))

        sampled = 0.0
        known: dict[Process, int] = {}  # noqa: RUF012

        def used(self, process: Process) -> int:
            return super().activity(process).gpu_usec or 0

    gpu = Estimating()
    async with running(gpu, scheduler=True) as h, trio.open_nursery() as nursery:
        p = Programs(h, gpu, spawn, nursery)
        three = [await p.batch() for _ in range(3)]
        for process, weight in zip(three, (100, 200, 400), strict=True):
            await h.write(f"{process.pid}/0/compute.weight", weight)
        await trio.sleep(1)
        assert of_all(await p.shares(three, 10)) == pytest.approx([1 / 7, 2 / 7, 4 / 7], rel=0.05)
        nursery.cancel_scope.cancel()


@virtual
async def test_switched_off_nothing_is_done(spawn: Spawn) -> None:
    async with programs(spawn, scheduler=False) as p:
        one, _ = await p.batch(), await p.batch()
        assert "compute.priority unsupported\ncompute.weight unsupported\n" in await p.h.read("ggroup.capabilities")
        for name in ("compute.priority", "compute.weight"):
            assert await p.h.refused(f"{one.pid}/0/{name}", 1) == errno.EOPNOTSUPP
        await trio.sleep(5)
        assert p.gpu.moved == []
        assert p.h.controller._follower.place(Member(one, 0)) == NOWHERE


@pytest.mark.parametrize("lever", ["compute.timeslice", "compute.freeze"])
@virtual
async def test_where_a_lever_is_missing_nothing_is_done(spawn: Spawn, lever: str) -> None:
    gpu = StubGpu()
    gpu.unsupported = {lever}
    async with running(gpu, scheduler=True) as h:
        one, _ = await h.arrive(spawn().pid), await h.arrive(spawn().pid)
        assert await h.refused(f"{one.pid}/0/compute.weight", 1) == errno.EOPNOTSUPP
        await trio.sleep(5)
        assert gpu.calls == []
