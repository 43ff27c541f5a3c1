"""Units and slices.d as the policy of a Controller: limits are in force before the program that they are for."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import trio

from backend.core.records import MAX
from backend.process.identity import Slice
from backend.soft.config import SoftConfig
from backend.soft.gpu import SoftGpu
from ggroupfs.units.active import RECONNECT_S
from ggroupfs.units.manager import News
from ggroupfs.units.policy import SILENCE, WAIT_S
from tests.support.harness import MIB, Harness, Spawn, StubGpu, World, hang, settle, until, virtual
from tests.support.restarted import SurvivingLedger
from tests.support.units import FakeManager, books, manager, policy

__all__ = ["manager"]  # a fixture


def here(h: Harness, path: str) -> bool:
    return h.controller.population.slice_entry(Slice(path)) is not None


# When limits come into force


@virtual
async def test_a_unit_is_in_the_tree_with_its_limits_before_anybody_is_in_it(
    tmp_path: Path, manager: FakeManager
) -> None:
    """At the start of the daemon, or of the unit; they are gone with it."""
    manager.unit("/batch.slice", "GMemHigh=8M", "ComputeTimeSlice=1ms")
    manager.unit("/batch.slice/batch-a.slice", "GMemLow=25%", active=False)
    manager.unit("/plain.slice")
    async with policy(tmp_path, manager) as h:
        assert await h.listdir("slice") == ["batch.slice"], "what has no section is not touched"
        assert await h.read("slice/batch.slice/0/gmem.limit.high") == f"{8 * MIB}\n"
        assert await h.read("slice/batch.slice/0/compute.timeslice") == "1\n"
        assert await h.read("ggroup.backend") == "ledger soft\nunits systemd\nunits.configured 1\n"
        manager.start("batch-a.slice")
        await settle()
        assert books(h, "/batch.slice/batch-a.slice").low == 16 * MIB
        manager.stop("batch.slice")
        manager.stop("batch-a.slice")
        await settle()
        assert await h.listdir("slice") == []
        assert "units.configured 0" in await h.read("ggroup.backend")


@virtual
async def test_a_slice_stays_for_who_is_in_it(tmp_path: Path, manager: FakeManager, spawn: Spawn) -> None:
    manager.unit("/job.service", "GMemHigh=8M")
    process = spawn()
    async with policy(tmp_path, manager) as h:
        who = await h.arrive(process.pid, "/job.service")
        manager.stop("job.service")
        await settle()
        assert books(h, "/job.service").high == 8 * MIB
        process.kill()
        await h.gone(who)
        assert not here(h, "/job.service")


@virtual
async def test_a_program_waits_for_the_limits_of_every_level(
    tmp_path: Path, manager: FakeManager, spawn: Spawn
) -> None:
    """Three levels, the tight one in the middle; the software GPU keeps the program to it from the first byte on."""
    gpu = SoftGpu(0, SoftConfig(capacity=64 * MIB))
    async with policy(tmp_path, manager, gpu) as h:
        manager.unit("/a.slice", "GMemHigh=48M")
        manager.unit("/a.slice/a-b.slice", "GMemHigh=8M")
        manager.unit("/a.slice/a-b.slice/c.service", "GMemHigh=32M")
        released, process = manager.hold(), spawn()
        came = trio.Event()

        async def program() -> None:
            who = await h.arrive(process.pid, "/a.slice/a-b.slice/c.service/inner")
            assert [books(h, path).high // MIB for path in LEVELS] == [48, 8, 32]
            came.set()
            await gpu.open_context(who, 1, lambda finished: None)
            await gpu.allocate(who, 24 * MIB)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(program)
            await until(lambda: len([call for call in manager.calls if call[0] == "files"]) == 3, "it is asked at once")
            await settle()
            assert not came.is_set()
            released.set()
        assert books(h, "/a.slice/a-b.slice").peak <= 10 * MIB, "a page over it at most"
        assert books(h, "/a.slice/a-b.slice").current == 8 * MIB
        assert trio.current_time() < SILENCE * WAIT_S
        unit_files = Counter(call for call in manager.calls if call[0] == "files")
        assert set(unit_files.values()) == {1}, "files are read once"


LEVELS = ("/a.slice", "/a.slice/a-b.slice", "/a.slice/a-b.slice/c.service")


@pytest.mark.logs(r"^/a\.slice: not configured within 5 s: programs go on, limits come later$")
@virtual
async def test_a_manager_that_does_not_answer_holds_nobody_for_ever(
    tmp_path: Path, manager: FakeManager, spawn: Spawn, caplog: pytest.LogCaptureFixture
) -> None:
    async with policy(tmp_path, manager) as h:
        manager.unit("/a.slice", "GMemHigh=8M")
        released = manager.hold()
        began = trio.current_time()
        who = await h.arrive(spawn().pid, "/a.slice")
        assert trio.current_time() - began == pytest.approx(SILENCE * WAIT_S, abs=0.01)
        await h.controller.bookkeeper.charge(who, 0, 4 * MIB)
        await h.arrive(spawn().pid, "/a.slice")
        assert len(caplog.records) == 1
        assert books(h, "/a.slice").high == MAX
        released.set()
        await settle()
        assert books(h, "/a.slice").high == 8 * MIB


@virtual
async def test_a_manager_that_is_busy_is_waited_for(tmp_path: Path, manager: FakeManager, spawn: Spawn) -> None:
    """It is busy when many services start at once, since it answers one call after another."""
    async with policy(tmp_path, manager) as h:
        manager.seconds = 0.5
        for number in range(12):
            manager.unit(f"/{number}.service", f"GMemHigh={number + 1}M", active=False)
        began = trio.current_time()

        async def program(number: int) -> None:
            await h.arrive(spawn().pid, f"/{number}.service")
            assert books(h, f"/{number}.service").high == (number + 1) * MIB

        async with trio.open_nursery() as nursery:
            for number in range(12):
                nursery.start_soon(program, number)
        assert trio.current_time() - began == pytest.approx(12 * 0.5, abs=0.1)


@pytest.mark.logs(r"^/last\.service: not configured within 10 s: programs go on, limits come later$")
@virtual
async def test_a_manager_that_is_too_busy_is_not(tmp_path: Path, manager: FakeManager, spawn: Spawn) -> None:
    async with policy(tmp_path, manager) as h:
        manager.seconds = 1.5
        names = [*(f"{number}.service" for number in range(8)), "last.service"]
        for name in names:
            manager.unit(f"/{name}", "GMemHigh=1M", active=False)
        manager.start(*names[:-1])
        await until(lambda: len([call for call in manager.calls if call[0] == "files"]) == 8, "it is busy")
        began = trio.current_time()
        await h.arrive(spawn().pid, "/last.service")
        assert trio.current_time() - began == pytest.approx(WAIT_S, abs=0.01)
        assert books(h, "/last.service").high == MAX
        await trio.sleep(9 * 1.5)
        assert books(h, "/last.service").high == MIB


@virtual
async def test_who_dies_while_it_waits(tmp_path: Path, manager: FakeManager, spawn: Spawn) -> None:
    """Nothing of it is left, and the next process at that place gets its limits."""
    async with policy(tmp_path, manager) as h:
        before = h.leftovers()
        manager.unit("/x.service", "GMemHigh=8M", active=False)
        released, process = manager.hold(), spawn()
        ended: list[int] = []

        async def program() -> None:
            try:
                await h.arrive(process.pid, "/x.service")
            except ProcessLookupError:
                ended.append(process.pid)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(program)
            await until(lambda: ("files", "x.service") in manager.calls, "it is asked")
            process.kill()
            await until(lambda: not here(h, "/x.service"), "it is gone")
            released.set()
        assert ended == [process.pid]
        assert h.leftovers() == before
        await h.arrive(spawn().pid, "/x.service")
        assert books(h, "/x.service").high == 8 * MIB


@virtual
async def test_two_hundred_services_at_once(tmp_path: Path, manager: FakeManager, spawn: Spawn) -> None:
    """All of them are limited, and each is read once, as is the slice above all of them."""
    async with policy(tmp_path, manager, StubGpu()) as h:
        names = [f"job{number}.service" for number in range(200)]
        for number, name in enumerate(names):
            manager.unit(f"/jobs.slice/{name}", f"GMemHigh={number + 1}M", active=False)
        manager.unit("/jobs.slice", "GMemHigh=256M")
        pids = {name: spawn().pid for name in names[:20]}
        manager.calls.clear()

        async def program(name: str) -> None:
            await h.arrive(pids[name], f"/jobs.slice/{name}")
            assert books(h, f"/jobs.slice/{name}").high == (names.index(name) + 1) * MIB
            assert books(h, "/jobs.slice").high == 256 * MIB

        async with trio.open_nursery() as nursery:
            manager.start(*names)
            for name in pids:
                nursery.start_soon(program, name)

        def limits() -> list[int]:
            return [books(h, path).high // MIB for name in names if here(h, path := f"/jobs.slice/{name}")]

        await until(lambda: limits() == list(range(1, 201)), "every one is in the tree with its limit")
        asked = Counter(manager.calls)
        assert max(asked.values()) == 1
        assert len(asked) == 401, "files and a cgroup a service, and files of the slice"


@virtual
async def test_a_process_that_is_moved(tmp_path: Path, manager: FakeManager, spawn: Spawn) -> None:
    """The settings of its new place hold soon."""
    (tmp_path / "a.conf").write_text("[/there]\nGMemHigh=4M\n")
    async with policy(tmp_path, manager) as h:
        who = await h.arrive(spawn().pid, gmem=0)
        assert not here(h, "/there")
        h.world.cgroups[who.pid] = Slice("/there")
        await trio.sleep(1)
        assert books(h, "/there").high == 4 * MIB
        h.world.cgroups[who.pid] = Slice("/")
        await trio.sleep(1)
        assert not here(h, "/there"), "a file keeps no slice that nobody is in"


@virtual
async def test_a_frozen_unit_holds_who_comes(tmp_path: Path, manager: FakeManager, spawn: Spawn) -> None:
    gpu = StubGpu()
    async with policy(tmp_path, manager, gpu) as h:
        manager.unit("/cold.service", "ComputeFreeze=yes")
        first = await h.arrive(spawn().pid, "/cold.service")
        assert first in gpu.detached, "frozen before arrive() returns"
        manager.unit("/cold.service", "ComputeFreeze=no")
        manager.reload()
        await settle()
        assert not gpu.detached


# Contents of files


@virtual
async def test_units_win_over_slices_d_key_by_key(tmp_path: Path, manager: FakeManager, spawn: Spawn) -> None:
    (tmp_path / "a.conf").write_text("[/*]\nGMemHigh=8M\nGMemLow=1M\n[/x.slice/*]\nGMemLow=2M\n")
    manager.unit("/x.slice", "GMemHigh=16M")
    async with policy(tmp_path, manager) as h:
        await h.arrive(spawn().pid, "/x.slice/inner")
        assert (books(h, "/x.slice").high, books(h, "/x.slice").low) == (16 * MIB, MIB)
        assert (books(h, "/x.slice/inner").high, books(h, "/x.slice/inner").low) == (MAX, 2 * MIB)


@virtual
async def test_without_a_manager(tmp_path: Path, manager: FakeManager, spawn: Spawn) -> None:
    """Only slices.d counts, and no unit is looked up; also where the manager cannot be reached."""
    (tmp_path / "a.conf").write_text("[/x.slice]\nGMemHigh=8M\n")
    manager.refuses = True
    for there in (None, manager):
        async with policy(tmp_path, there) as h:
            await h.arrive(spawn().pid, "/x.slice")
            assert books(h, "/x.slice").high == 8 * MIB
            assert "units slices.d\nunits.configured 1\n" in await h.read("ggroup.backend")
    assert manager.calls == []


@virtual
async def test_gpus(tmp_path: Path, manager: FakeManager) -> None:
    manager.unit("/x.slice", "GPUs=1", "GMemHigh=50%")
    async with policy(tmp_path, manager, StubGpu(0), StubGpu(1, capacity=2 << 30)) as h:
        assert [books(h, "/x.slice", gpu).high for gpu in (0, 1)] == [MAX, 1 << 30]
        manager.unit("/x.slice", "GPUs=GPU-0", "GMemHigh=50%")
        manager.reload()
        await settle()
        assert [books(h, "/x.slice", gpu).high for gpu in (0, 1)] == [1 << 29, MAX]


@pytest.mark.logs(
    r"/x\.slice:2: GMemHi=: there is no such property$",
    r"/x\.slice:3: GMemLow=: not a size",
    r"/x\.slice:4: ComputeWeight=: GPU 0: Operation not supported$",
    r"/x\.slice:5: ComputeTimeSlice=: GPU 0: Numerical result out of range$",
    r"/x\.slice:7: GPUs=: there is no GPU 5$",
)
@virtual
async def test_mistakes_are_told_once_a_load(
    tmp_path: Path, manager: FakeManager, spawn: Spawn, caplog: pytest.LogCaptureFixture
) -> None:
    """They are reported with their place, and everything else applies."""
    gpu = StubGpu()
    gpu.unsupported = {"compute.weight"}
    lines = ("GMemHi=1M", "GMemLow=some", "ComputeWeight=5", "ComputeTimeSlice=2s", "GMemHigh=8M", "GPUs=0 5")
    manager.unit("/x.slice", *lines)
    async with policy(tmp_path, manager, gpu) as h:
        await h.arrive(spawn().pid, "/x.slice")
        assert len(caplog.records) == 5
        assert books(h, "/x.slice").high == 8 * MIB
        manager.reload()
        await settle()
        assert len(caplog.records) == 10


@pytest.mark.logs(r"/a\.conf:2: GMemHi=: there is no such property$")
@virtual
async def test_mistakes_in_slices_d_are_told_once_a_load(
    tmp_path: Path, manager: FakeManager, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.conf").write_text("[/x]\nGMemHi=1M\n")
    async with policy(tmp_path, manager):
        assert len(caplog.records) == 1
        manager.reload()
        await settle()
        assert len(caplog.records) == 2


@virtual
async def test_one_limit_is_not_in_the_way_of_another(tmp_path: Path, manager: FakeManager, spawn: Spawn) -> None:
    """Nor is a high that has no room until a swap.max is set as well."""
    manager.unit("/x.slice", "GMemSwapMax=0")
    async with policy(tmp_path, manager, StubGpu()) as h:
        await h.arrive(spawn().pid, "/x.slice", gmem=16 * MIB)
        manager.unit("/x.slice", "GMemHigh=8M", "GMemSwapMax=infinity")
        manager.reload()
        await until(lambda: books(h, "/x.slice").swap == 8 * MIB, "it is under the limit")


@pytest.mark.logs(
    r"/-\.slice:2: GMemHigh=: the root has no limits$",
    r"/x\.slice:2: GMemHigh=: /docker/x\.slice is not where units are$",
)
@virtual
async def test_the_root_has_no_limits(tmp_path: Path, manager: FakeManager) -> None:
    manager.unit("/-.slice", "GMemHigh=8M")
    manager.unit("/docker/x.slice", "GMemHigh=8M")
    manager.units["-.slice"].cgroup = "/"
    async with policy(tmp_path, manager) as h:
        assert await h.listdir("slice") == []


# Duration


@virtual
async def test_echo_lasts_until_the_next_reload(tmp_path: Path, manager: FakeManager, spawn: Spawn) -> None:
    """Named settings are written again, formerly named ones return to the default, others stay."""
    manager.unit("/x.slice", "GMemHigh=8M", "ComputeTimeSlice=1ms")
    async with policy(tmp_path, manager) as h:
        for name, value in (("gmem.limit.high", "4M"), ("gmem.limit.low", "1M")):
            await h.write(f"slice/x.slice/0/{name}", value)
        await h.arrive(spawn().pid, "/x.slice")
        manager.start("x.slice")
        await settle()
        assert books(h, "/x.slice").high == 4 * MIB
        manager.unit("/x.slice", "GMemHigh=8M")
        manager.reload()
        await settle()
        now = books(h, "/x.slice")
        assert (now.high, now.timeslice_us, now.low) == (8 * MIB, 0, MIB)


@virtual
async def test_a_section_that_goes_and_comes_with_a_reload(tmp_path: Path, manager: FakeManager, spawn: Spawn) -> None:
    manager.unit("/x.slice", "GMemHigh=8M")
    async with policy(tmp_path, manager) as h:
        who = await h.arrive(spawn().pid, "/x.slice")
        manager.unit("/x.slice")
        manager.reload()
        await settle()
        assert books(h, "/x.slice").high == MAX
        h.world.cgroups[who.pid] = Slice("/")
        await trio.sleep(1)
        assert not here(h, "/x.slice"), "it is no longer kept"
        manager.unit("/x.slice", "GMemHigh=4M")
        manager.reload()
        await settle()
        assert books(h, "/x.slice").high == 4 * MIB


@virtual
async def test_slices_d_is_read_with_a_reload(tmp_path: Path, manager: FakeManager, spawn: Spawn) -> None:
    async with policy(tmp_path, manager) as h:
        await h.arrive(spawn().pid, "/job")
        (tmp_path / "a.conf").write_text("[/job]\nGMemHigh=8M\n")
        manager.reload()
        await settle()
        assert books(h, "/job").high == 8 * MIB


@virtual
async def test_what_an_operator_made_stays_his(tmp_path: Path, manager: FakeManager, spawn: Spawn) -> None:
    """mkdir keeps a slice that slices.d configures; a slice without an owner goes with its last process."""
    (tmp_path / "a.conf").write_text("[/*]\nGMemHigh=8M\n")
    async with policy(tmp_path, manager) as h:
        await h.operations.mkdir(await h.inode("slice"), b"made", 0, h.ctx)
        processes = [spawn(), spawn()]
        for process, cgroup in zip(processes, ("/made", "/found"), strict=True):
            who = await h.arrive(process.pid, cgroup)
            assert books(h, cgroup).high == 8 * MIB
            process.kill()
            await h.gone(who)
        assert await h.listdir("slice") == ["made"]


@virtual
async def test_a_unit_that_is_loaded_again_is_read_again(tmp_path: Path, manager: FakeManager, spawn: Spawn) -> None:
    """Also where its slice was kept in the tree by mkdir meanwhile."""
    manager.unit("/x.service", "GMemHigh=8M")
    manager.unit("/y.service", "GMemHigh=8M")
    async with policy(tmp_path, manager) as h:
        await h.arrive(spawn().pid, "/y.service")
        for name in ("x.service", "y.service"):
            manager.stop(name)
            await settle()
            manager.unit(f"/{name}", "GMemHigh=4M")
            manager.tell(News(name, loaded=True))
            await settle()
            assert books(h, f"/{name}").high == 4 * MIB


@virtual
async def test_after_a_restart_as_after_a_reload(tmp_path: Path, manager: FakeManager, spawn: Spawn) -> None:
    """The books have old values."""
    gpu = StubGpu()
    ledger, world = SurvivingLedger(gpu), World()
    pid = spawn().pid
    manager.unit("/x.slice", "GMemHigh=8M")
    async with policy(tmp_path, manager, gpu, ledger=ledger, world=world) as h:
        await h.arrive(pid, "/x.slice", gmem=6 * MIB)
        await h.write("slice/x.slice/0/gmem.limit.high", "32M")
        await h.write("slice/x.slice/0/gmem.limit.low", "1M")
        h.kill()
    manager.unit("/x.slice", "GMemHigh=4M")
    async with policy(tmp_path, manager, gpu, ledger=ledger, world=world) as h:
        now = books(h, "/x.slice")
        assert (now.high, now.low, now.current) == (4 * MIB, MIB, 4 * MIB)


# A lost bus


@pytest.mark.logs("^systemd: connection lost$")
@virtual
async def test_a_lost_bus_changes_nothing_until_it_is_back(
    tmp_path: Path, manager: FakeManager, spawn: Spawn, caplog: pytest.LogCaptureFixture
) -> None:
    manager.unit("/x.slice", "GMemHigh=8M")
    async with policy(tmp_path, manager) as h:
        manager.refuses = True
        manager.lose()
        await trio.sleep(7 * RECONNECT_S)
        assert books(h, "/x.slice").high == 8 * MIB
        await h.arrive(spawn().pid, "/x.slice")
        assert trio.current_time() < 1, "what was read is known"
        del manager.units["x.slice"]
        manager.unit("/y.slice", "GMemHigh=4M")
        manager.refuses = False
        await trio.sleep(60)
        assert books(h, "/y.slice").high == 4 * MIB
        assert manager.connected == 2
        assert len(caplog.records) == 1


@pytest.mark.logs("^systemd: connection lost$")
@virtual
async def test_who_comes_while_the_bus_is_lost_is_limited_once_it_is_back(
    tmp_path: Path, manager: FakeManager, spawn: Spawn
) -> None:
    async with policy(tmp_path, manager) as h:
        manager.unit("/x.service", "GMemHigh=8M")
        manager.hold()

        async def program() -> None:
            await h.arrive(spawn().pid, "/x.service")
            assert books(h, "/x.service").high == 8 * MIB

        async with trio.open_nursery() as nursery:
            nursery.start_soon(program)
            await until(lambda: ("files", "x.service") in manager.calls, "it is asked")
            manager.answers = trio.Event()
            manager.answers.set()
            manager.lose()
        assert trio.current_time() < SILENCE * WAIT_S


@pytest.mark.logs(r"^/x\.service: not configured within 5 s")
@virtual
async def test_a_lever_that_hangs_does_not_hold_who_comes(tmp_path: Path, manager: FakeManager, spawn: Spawn) -> None:
    """The write of the limit is refused at its deadline; the program went on before that."""
    gpu = StubGpu()
    async with policy(tmp_path, manager, gpu) as h:
        stuck = await h.arrive(spawn().pid, "/x.service")
        gpu.script("detach", hang, pid=stuck.pid)
        manager.unit("/x.service", "ComputeFreeze=yes")
        manager.reload()
        await until(lambda: ("detach", stuck.pid, 0) in gpu.calls, "the lever")
        began = trio.current_time()
        await h.arrive(spawn().pid, "/x.service")
        assert trio.current_time() - began == pytest.approx(SILENCE * WAIT_S, abs=0.01)
        h.kill()
