"""Programs with the library in a spatial slice of an NVIDIA GPU: they ask for a space, and the driver confirms it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import trio

from backend.core.reasons import Engines
from backend.core.records import Capability
from backend.door.wire import CUDA, VERSION, Feature, Message, Op
from backend.nvidia.trace import LAG_NS
from backend.process.identity import Process, Slice, SliceOn
from backend.space import control
from ggroupfs.client import flat
from tests.support.cuda_session import GIB, Drive, Program, Rig, drive, pieces
from tests.support.fake_nvidia import FakeSystem, FakeTrace
from tests.support.mps import MpsDouble
from tests.support.nvidia_rig import MS, Clock

__all__ = ["drive", "pieces"]  # fixtures


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program of the control daemon is there, and the levers are not tested."""
    monkeypatch.setattr(control.find, "__defaults__", ([str(MpsDouble(tmp_path / "bin").directory)],))


async def spatial(rig: Rig) -> None:
    await rig.h.operations.mkdir(await rig.h.inode("slice"), b"jobs", 0o755, rig.h.ctx)
    await rig.h.write("slice/jobs/0/compute.spatial", 1)


async def space_of(program: Program, given: int = 0) -> int:
    return (await program.ask(Op.SPACE, given)).check().args[0]


async def greeted(rig: Rig, cgroup: str, features: Feature = CUDA) -> Program:
    program = rig.connect(rig.process(cgroup))
    (await program.ask(Op.HELLO, VERSION, features)).check()
    return program


async def client(rig: Rig, cgroup: str = "/jobs") -> Program:
    """A program of the space, as the driver says, too, with memory that can be moved."""
    asks = await greeted(rig, cgroup)
    assert await space_of(asks)
    rig.nvml.clients.setdefault(0, []).append(asks.process.pid)
    program = rig.connect(asks.process)
    await program.manage()
    rig.driver_says(asks.process.pid, GIB)
    await trio.sleep(1)
    assert rig.gpu.activity(asks.process).beside
    return program


def test_what_is_not_proven_is_advisory(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        assert rig.h.controller.capabilities()["compute.spatial"] is Capability.ADVISORY

    drive(test)


def test_without_the_program_it_is_refused(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control.find, "__defaults__", ([],))

    async def test(rig: Rig) -> None:
        await rig.h.operations.mkdir(await rig.h.inode("slice"), b"jobs", 0o755, rig.h.ctx)
        assert await rig.h.refused("slice/jobs/0/compute.spatial", 1) == errno.EOPNOTSUPP

    drive(test)


def test_without_the_program_a_setting_of_before_puts_nobody_into_a_space(
    drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the journal has it of a daemon that had the program."""
    monkeypatch.setattr(control.find, "__defaults__", ([],))

    async def test(rig: Rig) -> None:
        await rig.h.operations.mkdir(await rig.h.inode("slice"), b"jobs", 0o755, rig.h.ctx)
        rig.h.controller.ledger.configure(SliceOn(Slice("/jobs"), 0), spatial=True)
        assert await space_of(await greeted(rig, "/jobs")) == 0

    drive(test)


@pytest.mark.logs("lacks space")
def test_a_program_is_told_its_space(drive: Drive) -> None:
    """Before it uses a GPU, and without coming into the tree by that; elsewhere there is none."""

    async def test(rig: Rig) -> None:
        await spatial(rig)
        one, other = await greeted(rig, "/jobs"), await greeted(rig, "/jobs/part")
        number = await space_of(one)
        assert number == await space_of(other) != 0
        assert await space_of(await greeted(rig, "/elsewhere")) == 0
        assert str(one.process.pid) not in await rig.h.listdir("/")
        assert await space_of(await greeted(rig, "/elsewhere"), number) == number, "it says where it is"
        older = await greeted(rig, "/jobs", CUDA & ~Feature.SPACE)
        assert (await older.ask(Op.SPACE)).status == -errno.ENOSYS

    drive(test)


def test_a_server_has_no_directory(drive: Drive) -> None:
    """The members of the space have theirs, with their memory."""

    async def test(rig: Rig) -> None:
        await spatial(rig)
        server = rig.process("/")
        rig.h.controller.spaces.is_server = lambda pid, nbytes: pid == server.pid  # type: ignore[method-assign]
        rig.driver_says(server.pid, 300 << 20)
        program = await client(rig)
        assert str(server.pid) not in await rig.h.listdir("/")
        assert int(await rig.h.read(f"{program.process.pid}/0/gmem.current")) == GIB

    drive(test)


def test_a_freeze_of_one_is_refused_where_its_library_does_not_speak(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        await spatial(rig)
        program = await client(rig)
        await client(rig)
        rig.gpu.managed.forget(program.process)
        place = f"{program.process.pid}/0/compute.freeze"
        assert await rig.h.refused(place, 1) == errno.EOPNOTSUPP
        assert await rig.h.read(place) == "0\n"

    drive(test)


def test_a_freeze_of_the_slice_is_of_all(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        await spatial(rig)
        programs = [await client(rig), await client(rig)]
        channels = [rig.fake.programs[program.process.pid] for program in programs]
        await rig.h.write("slice/jobs/0/compute.freeze", 1)
        assert not any(any(one.running()) for one in channels)
        await rig.h.write("slice/jobs/0/compute.freeze", 0)
        assert all(all(one.running()) for one in channels)

    drive(test)


def test_what_was_applied_before_it_was_known_as_a_client_is_the_spaces(drive: Drive) -> None:
    """As after an upgrade: a program is frozen by itself, by the levers of one, and its gate is to stop it alone."""

    async def test(rig: Rig) -> None:
        await spatial(rig)
        other = await client(rig)
        program = rig.connect(rig.process("/jobs"))
        (await program.ask(Op.HELLO, VERSION, CUDA)).check()
        number = await space_of(program)
        program = rig.connect(program.process)

        async def stop(request: Message) -> Message | None:
            """What the library does, with nothing to wait for."""
            return request.answer(1) if request.op == Op.END_TURN else await program.move(request)

        program.obey = stop
        await program.manage()
        rig.driver_says(program.process.pid, GIB)
        await trio.sleep(1)
        await rig.h.write(f"{program.process.pid}/0/compute.freeze", 1)
        channels = [rig.fake.programs[one.process.pid] for one in (program, other)]
        assert number
        assert not any(channels[0].running())
        rig.nvml.clients[0].append(program.process.pid)
        await trio.sleep(1)
        assert rig.gpu.activity(program.process).beside
        assert all(channels[0].running()), "its channels would stop the other, too"
        assert all(channels[1].running())
        assert rig.gpu._spaces.is_held(program.process)

    drive(test)


def test_a_list_that_fails_takes_nobody_out_of_its_space(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        await spatial(rig)
        program = await client(rig)

        async def clients(index: int) -> frozenset[int]:
            raise OSError(errno.EAGAIN, "no thread")

        rig.gpu._nvml.clients = clients  # type: ignore[method-assign]
        await trio.sleep(1)
        assert rig.gpu.activity(program.process).beside

    drive(test)


def test_members_have_parts_of_what_the_trace_has_of_the_space(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the time of all of them under one name, here that of the server: they are told an estimate each, and the
    slice the sum. After its end one has no exact figure, either.
    """
    clock = Clock()
    trace = FakeTrace(clock)
    monkeypatch.setattr("backend.nvidia.trace.time.monotonic_ns", clock)
    monkeypatch.setattr("tests.support.cuda_session.FakeSystem", lambda: FakeSystem(trace=trace))

    async def test(rig: Rig) -> None:
        await spatial(rig)
        server = rig.process("/")
        rig.h.controller.spaces.is_server = lambda pid, nbytes: pid == server.pid  # type: ignore[method-assign]
        rig.h.controller.spaces.servers = lambda: dict.fromkeys(  # type: ignore[method-assign]
            rig.h.controller.spaces._running, (server.pid,)
        )
        programs = [await client(rig) for _ in range(2)]
        trace.stay(server.pid, clock.ns, clock.ns + 30 * MS)
        clock.ns += 30 * MS + LAG_NS
        await trio.sleep(0.5)
        places = (*(program.process.pid for program in programs), "slice/jobs")
        stats = [flat(await rig.h.read(f"{place}/0/gcgroup.stat")) for place in places]
        assert [stat.get("gpu_usec_estimate") for stat in stats] == [15_000, 15_000, 30_000]
        assert not any("gpu_usec" in stat for stat in stats)
        trace.stay(server.pid, clock.ns, clock.ns + 10 * MS)
        await rig.die(programs[0])
        clock.ns += 10 * MS + LAG_NS
        await trio.sleep(2)
        assert "gpu_usec" not in flat(await rig.h.read("slice/jobs/0/gcgroup.stat"))

    drive(test)


def gated(program: Program) -> list[Op]:
    """Have a program end each turn with nothing to wait for; return what it is asked."""
    asked = list[Op]()

    async def obey(request: Message) -> Message | None:
        asked.append(Op(request.op))
        return request.answer(1) if request.op == Op.END_TURN else await program.move(request)

    program.obey = obey
    return asked


def test_the_gate_of_a_frozen_one_that_connects_anew_is_closed_again(drive: Drive) -> None:
    """With its last connection the library opened it, and the runlist stops no program among others that run."""

    async def test(rig: Rig) -> None:
        await spatial(rig)
        program, _ = await client(rig), await client(rig)
        asked = gated(program)
        place = f"{program.process.pid}/0/compute"
        await rig.h.write(f"{place}.freeze", 1)
        assert asked == [Op.END_TURN]
        program.socket.close()
        await trio.sleep(1)
        anew = rig.connect(program.process)
        asked = gated(anew)
        await anew.manage()
        await trio.sleep(1)
        assert Op.END_TURN in asked
        assert "frozen 1" in await rig.h.read(f"{place}.events")

    drive(test)


@pytest.mark.parametrize("frozen", [True, False])
def test_one_that_ends_as_the_slice_is_frozen_or_thawed_holds_up_no_other(drive: Drive, frozen: bool) -> None:
    """It was not told yet, as it has not answered to another write."""

    async def test(rig: Rig) -> None:
        await spatial(rig)
        ends, stays = await client(rig), await client(rig)
        channels = rig.fake.programs[stays.process.pid]
        await rig.h.write("slice/jobs/0/compute.freeze", int(not frozen))
        assert any(channels.running()) == frozen

        async def mute(request: Message) -> Message | None:
            return None

        ends.obey = mute
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.h.refused, f"{ends.process.pid}/0/compute.sm.max", 64)
            await trio.sleep(0.1)
            nursery.start_soon(rig.h.write, "slice/jobs/0/compute.freeze", int(frozen))
            await trio.sleep(0.3)
            await rig.die(ends)
        await trio.sleep(1)
        assert set(channels.running()) == {not frozen}

    drive(test)


@pytest.mark.parametrize("first", ["driver", "library"])
@pytest.mark.parametrize("scheduler", [False, True])
def test_one_that_joins_beside_one_that_is_frozen_runs(drive: Drive, first: str, scheduler: bool) -> None:
    """Alone in the space, the frozen one was stopped by the runlist; now its gate is to hold it."""

    async def test(rig: Rig) -> None:
        await spatial(rig)
        one = await client(rig)
        asked = gated(one)
        await rig.h.write(f"{one.process.pid}/0/compute.freeze", 1)
        channels = rig.fake.programs[one.process.pid]
        assert not any(channels.running())
        asks = await greeted(rig, "/jobs")
        assert await space_of(asks)
        rig.nvml.clients[0].append(asks.process.pid)
        new = rig.connect(asks.process)
        gated(new)
        if first == "driver":
            rig.driver_says(asks.process.pid, GIB)
            await trio.sleep(0.25)
        await new.manage()
        rig.driver_says(asks.process.pid, GIB)
        await trio.sleep(2)
        assert all(channels.running()), "its channels would stop the newcomer, too"
        assert Op.END_TURN in asked

    drive(test, scheduler=scheduler)


def test_a_freeze_of_the_slice_succeeds_where_one_is_about_to_end(
    drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its levers find it no more, and it is still in the books."""

    async def test(rig: Rig) -> None:
        await spatial(rig)
        ends, stays = await client(rig), await client(rig)
        take = rig.gpu._spaces._take

        async def gone(process: Process, engines: Engines) -> None:
            if process == ends.process:
                raise ProcessLookupError
            await take(process, engines)

        monkeypatch.setattr(rig.gpu._spaces, "_take", gone)
        await rig.h.write("slice/jobs/0/compute.freeze", 1)
        await rig.die(ends)
        await trio.sleep(1)
        assert not any(rig.fake.programs[stays.process.pid].running())
        assert "frozen 1" in await rig.h.read("slice/jobs/0/compute.events")

    drive(test)
