"""compute.max beside everything else: nested, with priorities and weights, frozen, moved, with killed daemons."""

from __future__ import annotations

import errno
import signal

import attrs
import pytest
import trio

from backend.core.member import COMES_S
from backend.core.oom import NOTICE_S
from backend.core.reasons import ON, Engines
from backend.core.records import Activity
from backend.core.silence import RETURN_S
from backend.core.turns import TurnEnd
from backend.process.identity import Member, Process, Slice, SliceOn
from backend.scheduler.limiter import MOVING_US
from backend.soft.config import SoftConfig
from backend.soft.gpu import SoftGpu
from backend.soft.machine import Machine as SoftMachine
from tests.support.harness import MIB, StubGpu, refuses, running, settle, until, virtual
from tests.support.quotas import Limited, Spawn, limited
from tests.support.restarted import Machine

BUSY = Activity(tsgs=1, attached=1, managed=True, contexts=1)


async def stat(p: Limited, path: str, key: str) -> int:
    text = await p.h.read(f"{path}/0/gcgroup.stat")
    return int(dict(line.split() for line in text.splitlines())[key])


@virtual
async def test_the_least_on_the_path_holds(spawn: Spawn) -> None:
    """The process, its slice and the slice above have an account each."""
    async with limited(spawn) as p:
        one, two, three = await p.program("/jobs/a"), await p.program("/jobs/a"), await p.program("/jobs/b")
        await p.h.write(f"{one.pid}/0/compute.max", "5000 100000")
        await p.h.write("slice/jobs/a/0/compute.max", "20000 100000")
        await p.h.write("slice/jobs/0/compute.max", "60000 100000")
        await trio.sleep(3)
        found = await p.shares([one, two, three], 10)
        assert found[0] == pytest.approx(0.05, rel=0.05)
        assert found[0] + found[1] == pytest.approx(0.2, rel=0.03)
        assert sum(found) == pytest.approx(0.6, rel=0.05)


@virtual
async def test_a_quota_goes_with_its_next_value(spawn: Spawn) -> None:
    async with limited(spawn) as p:
        one = await p.program()
        for text, share in (("30000 100000", 0.3), ("600000 1000000", 0.6), ("max", 1.0), ("10000 50000", 0.2)):
            await p.h.write(f"{one.pid}/0/compute.max", text)
            await trio.sleep(2)
            (found,) = await p.shares([one], 10)
            assert found == pytest.approx(share, rel=0.03)
        assert await p.h.read(f"{one.pid}/0/compute.max") == "10000 50000\n"
        await p.h.write(f"{one.pid}/0/compute.max", "max")
        assert await p.h.read(f"{one.pid}/0/compute.max") == "max 50000\n"


@virtual
async def test_what_the_files_tell(spawn: Spawn) -> None:
    async with limited(spawn) as p:
        one, idle = await p.program("/jobs"), await p.program("/jobs", work_s=0.001, rest_s=100)
        assert await stat(p, "slice/jobs", "nr_periods") == 0
        await p.h.write("slice/jobs/0/compute.max", "30000 100000")
        await p.h.write(f"{idle.pid}/0/compute.max", "30000 100000")
        await trio.sleep(1)
        before = [await stat(p, f"{one.pid}", key) for key in ("nr_throttled", "throttled_usec")]
        periods = await stat(p, "slice/jobs", "nr_periods")
        await trio.sleep(10)
        assert await stat(p, "slice/jobs", "nr_periods") - periods == 100
        assert await stat(p, f"{idle.pid}", "nr_periods") <= 1, "an idle one has none, as in cpu.stat"
        assert await stat(p, f"{one.pid}", "nr_periods") == 0, "they are those of its own quota"
        times, usec = [await stat(p, f"{one.pid}", key) for key in ("nr_throttled", "throttled_usec")]
        assert times - before[0] == pytest.approx(100, abs=20)
        assert usec - before[1] == pytest.approx(7.5e6, rel=0.1)
        seen = set()
        for _ in range(40):
            await trio.sleep(0.0225)
            seen.add((await stat(p, f"{one.pid}", "off_quota"), await stat(p, f"{one.pid}", "off_gr")))
        assert seen == {(0, 0), (1, 0)}, "it stands at its gate, and not off the runlist"


@virtual
async def test_one_without_the_library_is_off_the_runlist(spawn: Spawn) -> None:
    async with limited(spawn) as p:
        one = await p.program(library=False)
        await p.h.write(f"{one.pid}/0/compute.max", "30000 100000")
        seen = set()
        for _ in range(60):
            await trio.sleep(0.0225)
            seen.add((await stat(p, f"{one.pid}", "off_quota"), await stat(p, f"{one.pid}", "off_gr")))
        assert seen == {(0, 0), (1, 1)}


@virtual
async def test_long_kernels_are_stopped(spawn: Spawn) -> None:
    """The gate cannot hold a running kernel: one of 400 ms goes off the runlist, and on again in the next periods."""
    async with limited(spawn) as p:
        one = await p.program(kernel_us=400_000)
        await p.h.write(f"{one.pid}/0/compute.max", "10000 100000")
        await trio.sleep(2)
        (found,) = await p.shares([one], 20)
        assert found == pytest.approx(0.1, rel=0.05)


@virtual
async def test_others_have_what_it_may_not_use(spawn: Spawn) -> None:
    """Of two that fill in turns, one has a quota: while that one is stopped, the turn is the other's."""
    async with limited(spawn) as p:
        lead = await p.program(work_s=0.02, rest_s=0.08)
        one, other = await p.program(), await p.program()
        for process in (one, other):
            await p.h.write(f"{process.pid}/0/compute.priority", 12)
        await trio.sleep(5)
        before = sum(await p.shares([lead, one, other], 10))  # the rest is spent on switches to the leader and back
        await p.h.write(f"{one.pid}/0/compute.max", "10000 100000")
        await trio.sleep(5)
        found = await p.shares([lead, one, other], 10)
        assert found[1] <= 0.103
        assert sum(found) >= before - 0.03


@virtual
async def test_a_leader_with_a_quota_leaves_the_rest(spawn: Spawn) -> None:
    async with limited(spawn) as p:
        lead, other = await p.program(), await p.program()
        await p.h.write(f"{lead.pid}/0/compute.priority", 0)
        await p.h.write(f"{lead.pid}/0/compute.max", "50000 100000")
        await trio.sleep(5)
        found = await p.shares([lead, other], 10)
        assert found[0] == pytest.approx(0.5, rel=0.03)
        assert found[1] >= 0.46


@virtual
async def test_weights_hold_below_a_quota(spawn: Spawn) -> None:
    async with limited(spawn) as p:
        one, two = await p.program("/jobs"), await p.program("/jobs")
        await p.h.write(f"{one.pid}/0/compute.weight", 300)
        await p.h.write("slice/jobs/0/compute.max", "400000 1000000")
        await trio.sleep(10)
        found = await p.shares([one, two], 20)
        assert sum(found) == pytest.approx(0.4, rel=0.05)
        assert found[0] / found[1] == pytest.approx(3, rel=0.15)


@pytest.mark.parametrize("library", [True, False], ids=["library", "levers"])
@virtual
async def test_frozen_meanwhile(spawn: Spawn, library: bool) -> None:
    async with limited(spawn) as p:
        one = await p.program(library=library)
        await p.h.write(f"{one.pid}/0/compute.max", "30000 100000")
        await trio.sleep(2.06)
        for _ in range(5):
            await p.h.write(f"{one.pid}/0/compute.freeze", 1)
            assert await p.shares([one], 0.53) == [0]
            await p.h.write(f"{one.pid}/0/compute.freeze", 0)
            await trio.sleep(0.37)
        await trio.sleep(2)
        (found,) = await p.shares([one], 10)
        assert found == pytest.approx(0.3, rel=0.03)


@virtual
async def test_moved_into_a_slice_and_out(spawn: Spawn) -> None:
    async with limited(spawn) as p:
        one, other = await p.program("/jobs"), await p.program()
        await p.h.write("slice/jobs/0/compute.max", "10000 100000")
        await trio.sleep(2)
        p.h.world.cgroups[other.pid] = Slice("/jobs")
        p.h.world.cgroups[one.pid] = Slice("/")
        await trio.sleep(2)
        found = await p.shares([one, other], 10)
        assert found[1] == pytest.approx(0.1, rel=0.03)
        assert found[0] >= 0.85
        p.h.world.cgroups[other.pid] = Slice("/")
        await trio.sleep(2)
        assert (await p.shares([other], 10))[0] == pytest.approx(0.5, rel=0.1), "it has no quota any more"


@virtual
async def test_a_killed_daemon_leaves_none_without_its_engine(spawn: Spawn) -> None:
    """The quotas hold again and each process goes on: the reason why it was off the runlist died with the daemon."""
    gpu = StubGpu()
    machine = Machine(gpu)
    pid = spawn().pid
    async with machine.daemon(scheduler=True) as h:
        who = await h.arrive(pid)
        gpu.works[who] = attrs.evolve(BUSY, gpu_usec=0)
        await h.write(f"{pid}/0/compute.max", "30000 100000")
        await trio.sleep(0.1)
        gpu.works[who] = attrs.evolve(BUSY, gpu_usec=500_000)
        await trio.sleep(0.1)
        assert gpu.without_gr == {who}
        h.kill()
    gpu.works[who] = attrs.evolve(BUSY, gpu_usec=500_000)
    async with machine.daemon(scheduler=True) as h:
        await settle()
        await trio.sleep(0.1)
        assert not gpu.without_gr
        assert machine.ledger.books(Member(who, 0)).off_gr == 0
        assert await h.read(f"{pid}/0/compute.max") == "30000 100000\n"


@virtual
async def test_the_end_of_a_daemon_lets_all_go_on(spawn: Spawn) -> None:
    gpu = StubGpu()
    pid = spawn().pid
    async with Machine(gpu).daemon(scheduler=True) as h:
        who = await h.arrive(pid)
        gpu.works[who] = attrs.evolve(BUSY, gpu_usec=0)
        gpu.ends[who] = TurnEnd.DRAINED, 0.0
        await h.write(f"{pid}/0/compute.max", "30000 100000")
        await trio.sleep(0.1)
        gpu.works[who] = attrs.evolve(BUSY, gpu_usec=500_000, pending=0)
        await trio.sleep(0.1)
        assert gpu.turns[-1][0] == "end"
        assert h.controller._follower.spent(Member(who, 0)) is Engines.NONE
        assert h.controller._follower.applied(Member(who, 0)).off == ON
    assert gpu.turns[-1][0] == "begin"


@pytest.mark.logs("cannot be held to its quota")
@virtual
async def test_levers_that_fail(spawn: Spawn) -> None:
    """The failure is reported and retried; no other request fails because of it."""
    async with limited(spawn) as p:
        one = await p.program(library=False)
        p.gpu.broken.add(one)
        await p.h.write(f"{one.pid}/0/compute.max", "30000 100000")
        await trio.sleep(3)
        p.gpu.broken.clear()
        await trio.sleep(6)
        (found,) = await p.shares([one], 10)
        assert found == pytest.approx(0.3, rel=0.1) or found < 0.3, "it has a debt"


@virtual
async def test_a_machine_that_cannot(spawn: Spawn) -> None:
    gpu = StubGpu()
    gpu.unsupported.add("compute.freeze")
    pid = spawn().pid
    async with Machine(gpu).daemon(scheduler=True) as h:
        await h.arrive(pid)
        assert await h.refused(f"{pid}/0/compute.max", "30000 100000") == errno.EOPNOTSUPP
        assert await h.refused(f"{pid}/0/compute.max", "30 percent") == errno.EINVAL
        assert await h.read(f"{pid}/0/compute.max") == "max 100000\n"
    async with Machine(StubGpu()).daemon() as h:
        await h.arrive(pid)
        assert await h.refused(f"{pid}/0/compute.max", "30000 100000") == errno.EOPNOTSUPP, "there is no scheduler"


@virtual
async def test_moved_to_another_gpu_while_it_stands(spawn: Spawn) -> None:
    """The quota goes along, and holds there; nothing of it is left on the old GPU."""
    machine = SoftMachine(2)
    gpus = [SoftGpu(index, SoftConfig(capacity=64 * MIB), machine) for index in range(2)]
    async with running(*gpus, scheduler=True) as h, trio.open_nursery() as nursery:
        process = await h.arrive(spawn().pid)
        number = await gpus[0].open_context(process, 8, lambda finished: None, gated=True)

        async def feed() -> None:
            while True:
                there = next(gpu for gpu in gpus if process in gpu._tenants)
                try:
                    await there.launch(process, number, 10, 1000, range(0))
                except OSError:
                    await trio.sleep(0.001)

        def used() -> int:
            return sum(gpu.activity(process).gpu_usec or 0 for gpu in gpus)

        nursery.start_soon(feed)
        await h.write(f"{process.pid}/0/compute.max", "30000 100000")
        await trio.sleep(3)
        for here, there in ((0, 1), (1, 0), (0, 1)):
            for _ in range(1000):
                if h.controller._follower.spent(Member(process, here)) is not None:
                    break
                await trio.sleep(0.001)
            else:
                pytest.fail("it never stands")
            await h.write(f"{process.pid}/{here}/compute.migrate", there)
            assert await h.read(f"{process.pid}/{there}/compute.max") == "30000 100000\n"
            await trio.sleep(2)
            before = used()
            await trio.sleep(10)
            assert (used() - before) / 1e7 == pytest.approx(0.3, rel=0.03)
        nursery.cancel_scope.cancel()


@virtual
async def test_a_new_context_that_has_no_gate(spawn: Spawn) -> None:
    """A program that stands at its gate opens a context without one: it is held to its quota all the same."""
    async with limited(spawn) as p:
        one = await p.program()
        await p.h.write(f"{one.pid}/0/compute.max", "20000 100000")
        await trio.sleep(2.05)
        number = await p.gpu.open_context(one, 8, lambda finished: None)
        p.nursery.start_soon(p._feed, one, number, 1000)
        await trio.sleep(2)
        (found,) = await p.shares([one], 20)
        assert found == pytest.approx(0.2, rel=0.03)


@virtual
async def test_idle_programs_cost_no_calls(spawn: Spawn) -> None:
    async with limited(spawn) as p:
        for _ in range(20):
            await p.program("/jobs", work_s=0.001, rest_s=1000, library=False)
        await p.h.write("slice/jobs/0/compute.max", "30000 100000")
        await trio.sleep(20)  # until timeslices are set
        calls = p.gpu.calls(since=0)
        await trio.sleep(20)
        assert p.gpu.calls(since=0) == calls


@pytest.mark.parametrize("how", ["leaves", "comes"])
@virtual
async def test_one_whose_memory_moves_stays_on_the_runlist(spawn: Spawn, how: str) -> None:
    """Its library waits for the program's own work; but not for ever, since it may lie."""
    gpu = StubGpu()
    async with Machine(gpu).daemon(scheduler=True) as h:
        who = await h.arrive(spawn().pid)
        memory = h.controller.population.record(Member(who, 0)).memory
        gpu.ends[who] = TurnEnd.LATE, 0.0
        gpu.works[who] = attrs.evolve(BUSY, gpu_usec=0, pending=1)
        await h.write(f"{who.pid}/0/compute.max", "30000 100000")
        await trio.sleep(0.05)

        async def work(us: int) -> None:
            gpu.works[who] = attrs.evolve(BUSY, gpu_usec=us, pending=1)
            await trio.sleep(0.05)

        if how == "leaves":
            gpu.leaving = {who}
        else:
            memory.came_at = trio.current_time()
        for us in (100_000, 200_000, 300_000):
            await work(us)
            assert h.controller._follower.spent(Member(who, 0)) is Engines.NONE
        if how == "leaves":
            await work(100_000 + MOVING_US + 1_000)
            assert gpu.without_gr == {who}
        else:
            await trio.sleep(COMES_S)
            assert gpu.without_gr == {who}, "it is not moving any more"


@virtual
async def test_periods_in_turns_end_where_another_comes(spawn: Spawn) -> None:
    """While no other program is there, four without the library have the periods of their quota in turns. With another
    one, all four work at the beginning of longer periods, so that weights decide what each gets of the engine."""
    async with limited(spawn, traced=True) as p:
        four = [await p.program("/jobs", library=False) for _ in range(4)]
        await p.h.write("slice/jobs/0/compute.max", "30000 100000")
        await trio.sleep(10)

        async def at_once(seconds: float) -> int:
            """Return the largest number of them on the runlist at once."""
            most = 0
            for _ in range(round(seconds / 0.01)):
                await trio.sleep(0.01)
                most = max(most, sum(p.gpu.is_attached(process) for process in four))
            return most

        assert await at_once(5) == 1
        other = await p.program()
        await trio.sleep(3)
        assert await at_once(5) == 4
        await p.end(other)
        await trio.sleep(3)
        assert await at_once(5) == 1
        await p.h.write(f"{four[0].pid}/0/compute.weight", 200)
        await trio.sleep(3)
        assert await at_once(5) == 4, "they are no equals"
        await p.h.write("slice/jobs/0/compute.max", "max")
        await trio.sleep(2)
        assert await at_once(0.1) == 4


@virtual
async def test_one_that_idles_takes_no_period(spawn: Spawn) -> None:
    async with limited(spawn, traced=True) as p:
        one = await p.program("/jobs", library=False)
        for _ in range(3):
            await p.program("/jobs", library=False, work_s=0.001, rest_s=1000)
        await p.h.write("slice/jobs/0/compute.max", "30000 100000")
        await trio.sleep(10)
        (found,) = await p.shares([one], 26)
        assert found == pytest.approx(0.3, rel=0.1)


@virtual
async def test_a_frozen_one_keeps_no_other_from_its_period(spawn: Spawn) -> None:
    async with limited(spawn, traced=True) as p:
        three = [await p.program("/jobs", library=False) for _ in range(3)]
        await p.h.write("slice/jobs/0/compute.max", "30000 100000")
        await trio.sleep(12)
        for one in three:
            await p.h.write(f"{one.pid}/0/compute.freeze", 1)
            await trio.sleep(8)
            found = await p.shares(three, 13)
            assert found[three.index(one)] == 0
            assert sum(found) == pytest.approx(0.3, rel=0.15)
            await p.h.write(f"{one.pid}/0/compute.freeze", 0)
            await trio.sleep(8)
            assert sum(await p.shares(three, 10)) == pytest.approx(0.3, rel=0.05)


@virtual
async def test_a_move_that_fails_counts_nothing_for_what_ran_meanwhile(spawn: Spawn) -> None:
    """A stopped program runs while it is moved: from then on it is not throttled, whether or not the move succeeds."""

    async def fails_late() -> None:
        await trio.sleep(2)
        await refuses(errno.EIO)()

    here, there = StubGpu(0), StubGpu(1)
    async with running(here, there, scheduler=True) as h:
        who = await h.arrive(spawn().pid)
        here.works[who] = attrs.evolve(BUSY, gpu_usec=0)
        await h.write(f"{who.pid}/0/compute.max", "30000 100000")
        await trio.sleep(0.05)
        here.works[who] = attrs.evolve(BUSY, gpu_usec=40_000)
        await trio.sleep(0.05)
        assert here.without_gr == {who}
        here.script("migrate", fails_late)
        assert await h.refused(f"{who.pid}/0/compute.migrate", 1) == errno.EIO
        assert not here.without_gr
        await trio.sleep(10)
        text = await h.read(f"{who.pid}/0/gcgroup.stat")
        assert int(text.split("throttled_usec ")[1].split()[0]) < 200_000


@pytest.mark.logs(r"over its gmem\.limit\.max", "killed")
@virtual
async def test_a_hard_limit_and_a_quota_of_one_slice(spawn: Spawn) -> None:
    """Each holds, whatever the other does: a program over the limit is killed although it is stopped, its last work is
    charged, and nothing of it is left throttled; the others have the quota."""
    gpu, limit = StubGpu(), 64 * MIB
    async with running(gpu, scheduler=True) as h:
        body = spawn()
        small, gated = [await h.arrive(spawn().pid, "/jobs") for _ in range(2)]
        large = await h.arrive(body.pid, "/jobs")
        gpu.unmanaged |= {small, large}
        gpu.ends[gated] = TurnEnd.DRAINED, 0.0

        def work(us: int) -> None:
            """Set the total work of each, in microseconds."""
            for who in (small, gated, large):
                gpu.works[who] = attrs.evolve(BUSY, gpu_usec=us, pending=0 if who == gated else None)

        async def figures() -> dict[str, int]:
            text = await h.read("slice/jobs/0/gcgroup.stat")
            each = dict(line.split() for line in text.splitlines())
            return {key: int(value) for key, value in each.items() if key.startswith(("off_", "nr_", "throttled"))}

        async def current() -> int:
            return int(await h.read("slice/jobs/0/gmem.current"))

        def standing() -> set[Process]:
            follower = h.controller._follower
            held = {who for who in (small, gated, large) if h.controller.population.holds(Member(who, 0))}
            return {who for who in held if follower.spent(Member(who, 0)) is not None}

        work(0)
        h.controller.bookkeeper.observe(small, 0, 16 * MIB)
        h.controller.bookkeeper.observe(large, 0, 32 * MIB)
        await h.write("slice/jobs/0/compute.max", "30000 100000")
        await h.write("slice/jobs/0/gmem.limit.max", limit)
        await trio.sleep(2 * RETURN_S)
        work(2_000_000)  # 6 s of debt: they are stopped for 20 s
        await trio.sleep(5)
        assert standing() == {small, gated, large}
        h.controller.bookkeeper.observe(large, 0, 60 * MIB)
        await trio.sleep(3 * NOTICE_S)
        assert await until(body.poll, "it is killed") == -signal.SIGKILL
        assert standing() >= {small, gated}, "the limit is no way out of the quota"
        await h.gone(large)
        await trio.sleep(1)
        assert await current() == 16 * MIB <= limit
        assert standing() == {small, gated}
        assert (await figures())["off_quota"] == 2
        await trio.sleep(30)
        assert not standing()
        assert not gpu.without_gr - {large}
        assert [turn for turn in gpu.turns if turn[1] == gated.pid][-1][0] == "begin"
        before = await figures()
        assert before["off_quota"] == before["off_gr"] == 0
        await trio.sleep(30)
        assert await figures() == before, "nothing is throttled, and no period counts"
        work(2_500_000)
        await trio.sleep(0.5)
        assert standing() == {small, gated}, "the quota holds as before"
        assert h.ledger.books(SliceOn(Slice("/jobs"), 0)).current <= limit
