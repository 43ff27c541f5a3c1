"""compute.sm.max of CUDA programs, in virtual time: what the daemon tells them, and what it refuses."""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable

import pytest
import trio

from backend.cuda.caps import SPEAKS_S
from backend.cuda.placements import PLACE_S
from backend.door.wire import CUDA, Feature, Message, Op
from backend.process.identity import Slice
from tests.support.cuda_session import GIB, Drive, Program, Rig, drive, pieces, takes, until_then
from tests.support.harness import settle, until

__all__ = ["drive", "pieces"]  # fixtures

SHAPE = 16, 8, 132
"""Groups of an H200, SMs in each, and in all."""


class Placed(Program):
    """A program that notes on which groups its kernels run."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.told: list[int] = []
        """Masks of groups, as they came."""
        self.asked = 0
        """Questions for the split alone."""
        self.status = 0
        """What it answers to a mask that is not 0."""
        self.shape = SHAPE
        self.mute = False
        self.obey = self.take

    async def take(self, request: Message) -> Message | None:
        if request.op != Op.SMS:
            return await self.move(request)
        if self.mute:
            return None
        if request.args[1]:
            self.asked += 1
            return request.answer(*self.shape)
        if request.args[0] and self.status:
            return request.refuse(self.status)
        self.told.append(request.args[0])
        return request.answer(*self.shape)


class Older(Placed):
    """A program whose library knows nothing of SMs."""

    features = CUDA & ~Feature.SMS


async def begun(rig: Rig, kind: Callable[..., Program] = Placed, cgroup: str = "/") -> Placed:
    """Start a program, with its context known to the daemon."""
    program = rig.connect(rig.process(cgroup), kind)  # type: ignore[arg-type]
    assert isinstance(program, Placed)
    await program.manage()
    await program.alloc(GIB)
    return program


def test_a_write_holds_once_the_program_runs_there(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        one, two = await begun(rig), await begun(rig)
        assert (await rig.h.read("ggroup.capabilities")).splitlines()[-2:] == [
            "compute.sm.max advisory",
            "compute.migrate unsupported",
        ]
        await rig.h.write(one.file + "compute.sm.max", "50%")
        assert (one.asked, one.told) == (1, [0xFF])
        assert await rig.h.read(one.file + "compute.sm.max") == "64\n"
        await rig.h.write(two.file + "compute.sm.max", 35)
        assert (two.asked, two.told) == (1, [0xF00])
        assert await rig.h.read(two.file + "compute.sm.max") == "32\n"
        await rig.h.write(one.file + "compute.sm.max", 8)
        await rig.h.write(one.file + "compute.sm.max", "max")
        assert one.told == [0xFF, 0x1, 0]
        assert await rig.h.read(one.file + "compute.sm.max") == "max\n"

    drive(test)


def test_the_smallest_on_the_path_holds(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        program = await begun(rig, cgroup="/a/b")
        await rig.h.write("slice/a/0/compute.sm.max", 32)
        await rig.h.write(program.file + "compute.sm.max", 64)
        await rig.h.write("slice/a/b/0/compute.sm.max", 16)
        await rig.h.write("slice/a/0/compute.sm.max", "max")
        await rig.h.write("slice/a/b/0/compute.sm.max", "max")
        assert program.told == [0xF, 0x3, 0xFF]

    drive(test)


def test_a_newcomer_of_a_slice_is_told_as_it_comes(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        first = await begun(rig, cgroup="/a")
        await rig.h.write("slice/a/0/compute.sm.max", 64)
        second = await begun(rig, cgroup="/a")
        await until(lambda: second.told == [0xFF00], "its groups")
        assert first.told == [0xFF]

    drive(test)


def test_a_program_without_the_library_is_refused(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        plain = rig.process("/a")
        rig.driver_says(plain.pid, GIB)
        await until_then(lambda: bool(rig.gpu.tsgs(plain)))
        async with takes(SPEAKS_S, SPEAKS_S + 0.5):
            assert await rig.h.refused(f"{plain.pid}/0/compute.sm.max", 64) == errno.EOPNOTSUPP
        assert await rig.h.read(f"{plain.pid}/0/compute.sm.max") == "max\n"
        other = await begun(rig, cgroup="/a")
        assert await rig.h.refused("slice/a/0/compute.sm.max", 64) == errno.EOPNOTSUPP
        assert await rig.h.read("slice/a/0/compute.sm.max") == "max\n"
        await until(lambda: not other.told or other.told[-1] == 0, "the former one back")
        await settle()
        await rig.h.write(f"{plain.pid}/0/compute.sm.max", "max")

    drive(test)


def test_one_that_just_lost_its_daemon_is_waited_for(drive: Drive) -> None:
    """Its library tries once a second whether there is another one, which knows of its context at once."""

    async def test(rig: Rig) -> None:
        process = rig.process()
        rig.driver_says(process.pid, GIB)
        await until_then(lambda: bool(rig.gpu.tsgs(process)))
        program = rig.connect(process, Placed)
        assert isinstance(program, Placed)

        async def tries() -> None:
            await trio.sleep(1.1)
            await program.manage()

        rig.nursery.start_soon(tries)
        await rig.h.write(f"{process.pid}/0/compute.sm.max", 64)
        assert {*program.told} == {0xFF}

    drive(test)


@pytest.mark.parametrize("speaks", [True, pytest.param(False, marks=pytest.mark.logs("does not follow"))])
def test_one_is_waited_for_from_when_it_can_be_heard(
    drive: Drive, caplog: pytest.LogCaptureFixture, speaks: bool
) -> None:
    """A daemon that begins knows of programs before they can connect, and of limits of theirs. It waits for none then:
    nothing is served before it has met them."""

    async def test(rig: Rig) -> None:
        rig.gpu.managed._caps._opened = None
        await rig.h.operations.mkdir(await rig.h.inode("slice"), b"a", 0o755, rig.h.ctx)
        await rig.h.write("slice/a/0/compute.sm.max", 64)
        process = rig.process("/a")
        async with takes(0, 0.5):
            rig.driver_says(process.pid, GIB)
            await until_then(lambda: process in [one.process for one in rig.h.controller.population.residents()])
        await trio.sleep(SPEAKS_S + 1)
        assert "does not follow" not in caplog.text
        rig.gpu.managed.open()
        if speaks:
            program = rig.connect(process, Placed)
            assert isinstance(program, Placed)
            await trio.sleep(SPEAKS_S - 0.1)
            await program.manage()
            await until(lambda: program.told == [0xFF], "it runs there")
        await trio.sleep(SPEAKS_S + 1)
        assert ("does not follow" in caplog.text) is not speaks

    drive(test)


@pytest.mark.logs("its library is older than this daemon and lacks sms")
def test_an_older_library_is_refused(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        program = await begun(rig, Older)
        assert await rig.h.refused(program.file + "compute.sm.max", 64) == errno.EOPNOTSUPP
        assert "capped_launches" not in await rig.stat(program.file + "gcgroup.stat")
        assert not program.told

    drive(test)


def test_what_the_program_refuses_does_not_hold(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        program = await begun(rig)
        await trio.sleep(2)
        for status, code in ((errno.EOPNOTSUPP,) * 2, (errno.EBUSY,) * 2, (errno.ENOENT, errno.EIO)):
            program.status = status
            assert await rig.h.refused(program.file + "compute.sm.max", 64) == code
            assert await rig.h.read(program.file + "compute.sm.max") == "max\n"
            await trio.sleep(1)  # what follows a failure is over
            assert program.told[-1] == 0
        program.status, program.shape = 0, (0, 0, 0)
        rig.gpu.managed._caps._shapes.clear()
        assert await rig.h.refused(program.file + "compute.sm.max", 64) == errno.EOPNOTSUPP
        await trio.sleep(1)
        program.shape, program.mute = SHAPE, True
        async with takes(PLACE_S, PLACE_S + 0.5):
            assert await rig.h.refused(program.file + "compute.sm.max", 64) == errno.ETIMEDOUT

    drive(test)


def test_what_a_program_says_of_the_sms_is_for_itself_alone(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        liar, other = await begun(rig), await begun(rig)
        for shape in ((65, 2, 132), (1, 200, 132), (64, 0, 0)):
            liar.shape = shape
            assert await rig.h.refused(liar.file + "compute.sm.max", 64) == errno.EOPNOTSUPP
            await trio.sleep(1)
        liar.shape = 1, 132, 132
        await rig.h.write(liar.file + "compute.sm.max", 64)
        await rig.h.write(other.file + "compute.sm.max", 64)
        assert liar.told[-1] == 1
        assert other.told == [0x1FE]

    drive(test)


def test_a_program_that_connects_anew_is_told_only_what_it_does_not_have(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        program = await begun(rig)
        await rig.h.write(program.file + "compute.sm.max", 64)
        for groups, told in ((0xFF, []), (0, [0xFF]), (0xF000, [0xFF])):
            program.socket.close()
            await until(lambda: program.process not in rig.gpu.managed, "the end")  # noqa: B023
            program = rig.connect(program.process, Placed)  # type: ignore[assignment]
            await program.manage(GIB, 0, groups)
            await settle()
            assert program.told == told
        await rig.h.write(program.file + "compute.sm.max", "max")
        program.socket.close()
        await until(lambda: program.process not in rig.gpu.managed, "the end")
        program = rig.connect(program.process, Placed)  # type: ignore[assignment]
        await program.manage(GIB, 0, 0xFF)
        await settle()
        assert program.told == [0]

    drive(test)


def test_launches_are_counted_by_the_program(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        program = await begun(rig, cgroup="/a")
        await rig.h.write("slice/a/0/gmem.limit.low", "1M")  # it stays
        assert program.page is not None
        struct.pack_into("<QQ", program.page, 32, 40, 2)
        stat = await rig.stat(program.file + "gcgroup.stat")
        assert (stat["capped_launches"], stat["uncapped_launches"]) == (40, 2)
        struct.pack_into("<QQ", program.page, 32, (1 << 64) - 1, 3)  # a lie
        assert (await rig.stat(program.file + "gcgroup.stat"))["capped_launches"] == (1 << 63) - 1
        struct.pack_into("<QQ", program.page, 32, 41, 3)
        await trio.sleep(2)
        await rig.die(program)
        stat = await rig.stat("slice/a/0/gcgroup.stat")
        assert stat["uncapped_launches"] == 3

    drive(test)


def test_a_driver_before_green_contexts_has_no_such_control(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        rig.nvml.cuda = 12030
        from backend.nvidia.nvml import Nvml

        (info, *_) = await Nvml(rig.nvml).gpus()  # type: ignore[arg-type]
        assert (info.sms, rig.gpu.info.sms, rig.gpu.info.sm_step) == (0, 132, 8)

    drive(test)


@pytest.mark.logs("does not follow")
def test_a_program_without_the_library_is_frozen_all_the_same(drive: Drive) -> None:
    """It came into a slice with a limit, and has all SMs there; other levers do not wait for that."""

    async def test(rig: Rig) -> None:
        await begun(rig, cgroup="/a")
        await rig.h.write("slice/a/0/compute.sm.max", 64)
        process = rig.process("/a")
        rig.driver_says(process.pid, GIB)
        await until_then(lambda: bool(rig.gpu.tsgs(process)))
        await trio.sleep(8)
        channels = rig.fake.programs[process.pid]
        for place in ("slice/a", str(process.pid)):
            async with takes(0, 0.5):
                await rig.h.write(f"{place}/0/compute.freeze", 1)
            assert not any(channels.running())
            async with takes(0, 0.5):
                await rig.h.write(f"{place}/0/compute.freeze", 0)
            assert all(channels.running())
        await rig.h.write(f"{process.pid}/0/compute.timeslice", "4ms")
        assert await rig.h.refused("slice/a/0/compute.sm.max", 32) == errno.EOPNOTSUPP

    drive(test)


@pytest.mark.logs("does not follow")
def test_programs_without_the_library_hold_up_no_other(drive: Drive) -> None:
    """Each is waited for to speak once: what has no writer is done for one after the other."""

    async def test(rig: Rig) -> None:
        for name in (b"jobs", b"frozen", b"other"):
            await rig.h.operations.mkdir(await rig.h.inode("slice"), name, 0o755, rig.h.ctx)
        await rig.h.write("slice/jobs/0/compute.sm.max", 64)
        await rig.h.write("slice/frozen/0/compute.freeze", 1)
        for _ in range(20):
            rig.driver_says(rig.process("/jobs").pid, GIB)
        other = rig.process("/other")
        rig.driver_says(other.pid, GIB)
        await trio.sleep(12)
        channels = rig.fake.programs[other.pid]
        assert all(channels.running())
        rig.h.world.cgroups[other.pid] = Slice("/frozen")
        await trio.sleep(5)
        assert not any(channels.running())

    drive(test)


@pytest.mark.logs("does not follow")
def test_those_that_could_not_be_heard_are_waited_for_together(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        rig.gpu.managed._caps._opened = None
        for name in (b"jobs", b"frozen"):
            await rig.h.operations.mkdir(await rig.h.inode("slice"), name, 0o755, rig.h.ctx)
        await rig.h.write("slice/jobs/0/compute.sm.max", 64)
        await rig.h.write("slice/frozen/0/compute.freeze", 1)
        other = rig.process("/")
        for process in (other, *[rig.process("/jobs") for _ in range(15)]):
            rig.driver_says(process.pid, GIB)
        await until_then(lambda: len([*rig.h.controller.population.residents()]) == 16)
        rig.gpu.managed.open()
        rig.h.world.cgroups[other.pid] = Slice("/frozen")
        await trio.sleep(SPEAKS_S + 1)
        assert not any(rig.fake.programs[other.pid].running())

    drive(test)


@pytest.mark.parametrize("value", ["max", 32])
def test_one_that_ends_need_not_say_that_it_has_all(drive: Drive, value: str | int) -> None:
    """A write of part of the SMs is told that it does not hold."""

    async def test(rig: Rig) -> None:
        program = await begun(rig)
        await rig.h.write(program.file + "compute.sm.max", 64)

        async def ends(request: Message) -> Message | None:
            program.socket.close()
            return None

        program.obey = ends
        if value == "max":
            await rig.h.write(program.file + "compute.sm.max", value)
        else:
            assert await rig.h.refused(program.file + "compute.sm.max", value) == errno.EBUSY

    drive(test)


def test_one_that_ends_is_waited_for_no_longer(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        plain = rig.connect(rig.process("/a"))
        rig.driver_says(plain.process.pid, GIB)
        await until_then(lambda: bool(rig.gpu.tsgs(plain.process)))
        async with takes(0, SPEAKS_S - 0.5), trio.open_nursery() as nursery:
            nursery.start_soon(rig.h.write, plain.file + "compute.sm.max", 64)
            await trio.sleep(0.2)
            await rig.die(plain)
        assert not rig.gpu.managed._caps._silent

    drive(test)
