"""Faults seen through the files, in virtual time: a lost GPU, a driver that refuses calls, a lack of descriptors."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import trio

import backend.core.membership
import backend.process.exits
import backend.process.identity
from backend import choose
from backend.choose import Choice
from backend.common.errors import fail
from backend.nvidia import keeper, linux, opening, rm, tenant
from backend.nvidia.nvml import Nvml
from backend.nvidia.subdevice import TIMER_GET_TIME
from backend.soft.config import SoftConfig
from backend.soft.gpu import SoftGpu
from backend.soft.machine import Machine
from ggroupfs.fs.controls import CONTROLS
from tests.support.fake_nvidia import FakeNvml, FakeSystem
from tests.support.faults import Fault, FaultyNvml, FaultySystem, Plan, Rig, drive
from tests.support.harness import MIB, Harness, StubGpu, Waker, but_time, refuses, running, settle, virtual

Spawn = Callable[..., subprocess.Popen[bytes]]

LOST = [
    *(Fault("nvmlDeviceGetComputeRunningProcesses", gpu=0, status=status) for status in (15, 16, 9, 1)),
    Fault("nvmlDeviceGetHandleByUUID", gpu=0, status=6),
]
"""Faults that NVML reports: the GPU is lost, needs a reset, has no driver, is not initialized; or is no longer
found.
"""


READABLE = ("gmem.current", "gmem.limit.high", "gmem.stat", "compute.freeze", "compute.timeslice", "gcgroup.stat")
WRITES = {
    "gmem.limit.high": "32M",
    "gmem.limit.max": "64M",
    "gmem.limit.low": "1M",
    "gmem.peak": 0,
    "gmem.swap.peak": 0,
    "gmem.swap.max": "1M",
    "gmem.reclaim": "1M",
    "gmem.oom.group": 1,
    "compute.freeze": 1,
    "compute.timeslice": 5,
    "compute.priority": 3,
    "compute.weight": 50,
    "compute.max": "30000 50000",
    "compute.wait.max": 300,
    "compute.spatial": 1,
    "compute.sm.max": 64,
    "compute.migrate": 1,
}
"""A valid value for each writable file."""


def test_everything_that_can_be_written_is_written() -> None:
    assert WRITES.keys() == {control.name for control in CONTROLS if control.mode & 0o200}


async def refuses_all(h: Harness, *directories: str) -> None:
    """Check that every write to a directory on a lost GPU is refused."""
    for directory in directories:
        for name, value in WRITES.items():
            assert await h.refused(f"{directory}/{name}", value) == errno.ENODEV, (directory, name)


@pytest.mark.logs("GPU 0 is lost", "GPU 0 is back")
@pytest.mark.parametrize("fault", LOST, ids=lambda fault: f"{fault.call}-{fault.number}-{fault.status}")
def test_lost_and_back(spawn: Spawn, fault: Fault, caplog: pytest.LogCaptureFixture) -> None:
    """While the GPU is lost, writes fail with ENODEV, reads give the last figures, an event is counted, and the other
    GPU works. When it is back everything works again without a restart, with two lines in the log.
    """

    async def test(rig: Rig) -> None:
        h, pid = rig.h, rig.pid
        h.world.cgroups[pid] = backend.process.identity.Slice("/jobs")
        await h.operations.mkdir(await h.inode("slice"), b"jobs", 0o755, h.ctx)
        await trio.sleep(1)
        await h.write(f"{pid}/0/compute.freeze", 1)
        await h.write(f"{pid}/1/compute.timeslice", 5)
        assert rig.frozen() == [True, False]
        before = {name: await h.read(f"{pid}/0/{name}") for name in READABLE}
        waker = Waker()
        files = [await h.open(path) for path in (f"{pid}/0/compute.events", "gpus/0/gpu.events")]
        for file in files:
            await h.operations.read(file, 0, 4096)
            inode = await h.inode("gpus/0/gpu.events")
            await h.operations.poll(inode, file, waker, h.ctx)
        rig.plan.faults = [fault]
        await trio.sleep(1)
        assert waker.woken == 2
        assert await h.read("gpus/0/gpu.events") == "present 0\nlost 1\n"
        assert await h.read("gpus/1/gpu.events") == "present 1\nlost 0\n"
        assert "lost 1\n" in await h.read(f"{pid}/0/compute.events")
        await refuses_all(h, f"{pid}/0", "slice/jobs/0")
        for moved in (f"{pid}/1", "slice/jobs/1"):
            assert await h.refused(f"{moved}/compute.migrate", 0) == errno.ENODEV, "it cannot be gone to, either"
        for name in READABLE:
            if name != "gcgroup.stat":
                assert but_time(await h.read(f"{pid}/0/{name}")) == but_time(before[name])
        assert "tsgs 4" in await h.read(f"{pid}/0/gcgroup.stat")
        await h.write(f"{pid}/1/compute.freeze", 1)
        assert rig.frozen() == [True, True]
        await h.write(f"{pid}/1/compute.freeze", 0)
        await trio.sleep(7)
        for file in files:
            await h.operations.release(file)
        rig.plan.heal()
        await trio.sleep(6)
        assert await h.read("gpus/0/gpu.events") == "present 1\nlost 1\n"
        assert rig.frozen() == [True, False], "what was asked for holds again"
        assert {rig.program.objects[channel].disabled for channel in rig.program.channels()[:20]} == {1}
        await h.write(f"{pid}/0/compute.freeze", 0)
        assert rig.frozen() == [False, False]

    caplog.set_level("WARNING")
    drive(spawn, test)
    assert len(caplog.records) == 2


@pytest.mark.logs("GPU [01] is lost", "GPU [01] is back")
@pytest.mark.parametrize(("status", "trace"), [*((status, False) for status in sorted(rm.LOST)), (0x0F, True)])
def test_lost_by_what_the_driver_says(spawn: Spawn, status: int, trace: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The loss is noticed by the reader of the trace; without a trace, by the first lever. Both GPUs fall off, and each
    is reported once.
    """

    async def test(rig: Rig) -> None:
        h, pid = rig.h, rig.pid
        await h.write(f"{pid}/0/compute.freeze", 1)
        rig.plan.faults = [
            Fault("control", number, status=status)
            for number in (TIMER_GET_TIME, rm.SET_TIMESLICE, rm.FIFO_DISABLE_CHANNELS, rm.FIFO_GET_CHANNEL_STATE)
        ]
        if not trace:
            for gpu in (0, 1):
                assert await h.refused(f"{pid}/{gpu}/compute.timeslice", 5) == errno.ENODEV
        await trio.sleep(1)
        for gpu in (0, 1):
            assert await h.read(f"gpus/{gpu}/gpu.events") == "present 0\nlost 1\n"
            assert await h.refused(f"{pid}/{gpu}/compute.freeze", 1) == errno.ENODEV
        calls = len(rig.plan.calls)
        await trio.sleep(17)
        looks = [call for call in rig.plan.calls[calls:] if call == ("control", TIMER_GET_TIME)]
        assert 0 < len(looks) <= 6, "it is looked for rarely"
        rig.plan.heal()
        await trio.sleep(6)
        assert await h.read("gpus/0/gpu.events") == "present 1\nlost 1\n"
        assert rig.frozen() == [True, False]

    caplog.set_level("WARNING")
    drive(spawn, test, trace=trace)
    assert len(caplog.records) == 4


@pytest.mark.logs("undid its freeze: set again")
def test_what_is_undone_is_counted(spawn: Spawn) -> None:
    """It is counted in the events of the program and of each slice above, whose pollers wake, on the GPU where it
    happened.
    """

    async def test(rig: Rig) -> None:
        h, pid = rig.h, rig.pid
        h.world.cgroups[pid] = backend.process.identity.Slice("/jobs")
        await trio.sleep(1)
        await h.write("slice/jobs/0/compute.freeze", 1)
        files = {f"{place}/0/compute.events": Waker() for place in (pid, "slice/jobs")}
        opened = []
        for path, waker in files.items():
            assert "undone 0\n" in await h.read(path)
            opened.append(await h.open(path))
            await h.operations.read(opened[-1], 0, 4096)
            await h.operations.poll(await h.inode(path), opened[-1], waker, h.ctx)
        for channel in rig.program.channels()[:20]:
            rig.program.objects[channel].disabled = 0
        await trio.sleep(1)
        assert rig.frozen() == [True, False]
        for path, waker in files.items():
            assert "undone 1\n" in await h.read(path)
            assert waker.woken == 1, path
        for file in opened:
            await h.operations.release(file)
        assert "undone 0\n" in await h.read(f"{pid}/1/compute.events")
        await trio.sleep(5)
        assert "undone 1\n" in await h.read(f"{pid}/0/compute.events"), "once"

    drive(spawn, test)


@pytest.mark.logs("GPU 0 is lost")
def test_the_end_while_it_is_lost(spawn: Spawn) -> None:
    """Nothing is given back, and the log does not say that this failed."""

    async def test(rig: Rig) -> None:
        await rig.h.write(f"{rig.pid}/0/compute.freeze", 1)
        rig.plan.faults = [Fault("nvmlDeviceGetComputeRunningProcesses", gpu=0, status=15)]
        await trio.sleep(1)
        rig.plan.faults.append(Fault("control", rm.FIFO_DISABLE_CHANNELS, status=rm.Status.GPU_IS_LOST))

    drive(spawn, test)


@pytest.mark.logs("does not follow")
def test_what_was_asked_is_applied_once_the_fault_is_gone(spawn: Spawn) -> None:
    """A program that enters a frozen slice while the driver refuses calls runs, is reported once, and is frozen
    later.
    """

    async def test(rig: Rig) -> None:
        h, pid = rig.h, rig.pid
        inode = await h.inode("slice")
        await h.operations.mkdir(inode, b"jobs", 0o755, h.ctx)
        await h.write("slice/jobs/0/compute.freeze", 1)
        rig.plan.faults = [Fault("control", rm.FIFO_DISABLE_CHANNELS, status=rm.Status.TIMEOUT)]
        h.world.cgroups[pid] = backend.process.identity.Slice("/jobs")
        await trio.sleep(5)
        assert rig.frozen() == [False, False]
        rig.plan.heal()
        await trio.sleep(10)
        assert rig.frozen() == [True, False]

    drive(spawn, test)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
@pytest.mark.parametrize("call", ["start_time", "watch", "cgroup"])
@pytest.mark.logs("is not in the tree yet")
def test_short_of_descriptors(spawn: Spawn, call: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that comes meanwhile is reported once, and appears in the tree afterwards. No other program is
    disturbed.
    """

    async def test(rig: Rig) -> None:
        h = rig.h
        process = backend.process.identity.identify(spawn().pid)
        rig.fake.program(process.pid, 0, start=process.start)

        def refuse(*_: object) -> int:
            raise fail(code)

        with monkeypatch.context() as patch:
            if call == "start_time":
                rig.plan.faults = [Fault("start_time", errno=code)]
            elif call == "watch":
                patch.setattr(os, "pidfd_open", refuse)
            else:
                patch.setattr(backend.core.membership, "cgroup_of", refuse)
            rig.nvml.compute[0].append((process.pid, MIB))
            await trio.sleep(5)
            assert str(process.pid) not in await h.listdir("/")
            assert await h.read(f"{rig.pid}/0/gmem.current") == f"{MIB}\n"
        rig.plan.heal()
        await trio.sleep(2)
        assert await h.read(f"{process.pid}/0/gmem.current") == f"{MIB}\n"

    drive(spawn, test)


@pytest.mark.logs("pid [0-9]+ on GPU [01]: its TSGs are unknown", "GPU 0 does not follow", "GPU 1 does not follow")
@pytest.mark.parametrize("code", [errno.EPERM, errno.EMFILE])
def test_a_program_whose_files_cannot_be_had(spawn: Spawn, code: int) -> None:
    """The program is in the tree and counted, and its levers fail with that errno, with one line in the log for each of
    its GPUs. The levers of others work, and its own do as soon as the files can be opened.
    """

    async def test(rig: Rig) -> None:
        h = rig.h
        process = backend.process.identity.identify(spawn().pid)
        program = rig.fake.program(process.pid, 0, 1, start=process.start)
        await h.write(f"{rig.pid}/0/compute.freeze", 1)
        rig.plan.faults = [Fault("pidfd_getfd", errno=code)]
        for gpu in (0, 1):
            rig.nvml.compute[gpu].append((process.pid, MIB))
        await trio.sleep(5)
        for gpu in (0, 1):
            assert await h.read(f"{process.pid}/{gpu}/gmem.current") == f"{MIB}\n"
            for name, value in (("compute.freeze", 1), ("compute.timeslice", 5)):
                assert await h.refused(f"{process.pid}/{gpu}/{name}", value) == code
        await trio.sleep(0.5)  # the lever that was begun is undone, which fails as well
        assert all(program.running())
        assert rig.frozen() == [True, False]
        rig.plan.heal()
        await h.write(f"{process.pid}/0/compute.freeze", 1)
        assert not any(program.running()[:20])
        await h.write(f"{rig.pid}/0/compute.freeze", 0)
        await h.write(f"{process.pid}/0/compute.freeze", 0)

    drive(spawn, test)


# When the daemon starts


OPENS = {
    "EACCES": "refused",
    "EMFILE": "refused",
    "EPERM": "refused",
    "EIO": "refused",
    "ENXIO": "refused",
    "ENOMEM": "refused",
    "ENOENT": "none",
    "ENODEV": "none",
}
"""Errors of open(2) for ``/dev/nvidiactl``, and whether each means that there is no driver."""


@pytest.mark.parametrize("name", OPENS)
@pytest.mark.parametrize("gpu", ["auto", "nvidia", "soft"])
def test_the_driver_cannot_be_opened(gpu: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If there is a driver, no other GPU is served in its place unless that was requested."""
    code = getattr(errno, name)
    plan = Plan([Fault("open_control", errno=code)])
    monkeypatch.setattr(linux, "LinuxSystem", lambda: FaultySystem(FakeSystem(), plan))
    monkeypatch.setattr(opening, "Nvml", lambda: Nvml(FakeNvml()))  # type: ignore[arg-type]

    async def main() -> None:
        choice = Choice(gpu=gpu, soft_gpus=2, selftest=False)
        if gpu == "soft" or (gpu == "auto" and OPENS[name] == "none"):
            assert [type(one) for one in await choose.gpus(choice)] == [SoftGpu, SoftGpu]
            return
        with pytest.raises(OSError, match=r".") as caught:
            await choose.gpus(choice)
        assert caught.value.errno == (errno.ENODEV if OPENS[name] == "none" else code)

    trio.run(main)
    assert len(plan.calls) == (gpu != "soft")


@pytest.mark.parametrize("status", [9, 12])
@pytest.mark.parametrize("gpu", ["auto", "nvidia"])
def test_no_driver_by_what_nvml_says(gpu: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is present without the driver (9), or neither is (12)."""
    monkeypatch.setattr(opening, "Nvml", lambda: Nvml(FakeNvml(error=status)))  # type: ignore[arg-type]

    async def main() -> None:
        if gpu == "auto":
            assert [type(one) for one in await choose.gpus(Choice())] == [SoftGpu]
        else:
            with pytest.raises(OSError, match="NVML") as caught:
                await choose.gpus(Choice(gpu="nvidia"))
            assert caught.value.errno == errno.ENODEV

    trio.run(main)


@pytest.mark.parametrize(
    "fault",
    [
        Fault("nvmlDeviceGetHandleByIndex", gpu=0, status=15),
        Fault("nvmlDeviceGetMemoryInfo", gpu=0, status=16),
        Fault("alloc", 0x2080, status=0x0F, times=1),
    ],
    ids=lambda fault: f"{fault.call}-{fault.status}",
)
@pytest.mark.logs("GPU 0 is left out")
def test_lost_when_the_daemon_starts(spawn: Spawn, fault: Fault) -> None:
    """The lost GPU has no directory, the other one is served, and a program on both appears on that one."""

    async def test(rig: Rig) -> None:
        h, pid = rig.h, rig.pid
        assert sorted(await h.listdir("gpus")) == ["1", "GPU-1"]
        assert await h.listdir(str(pid)) == ["1"]
        await h.write(f"{pid}/1/compute.freeze", 1)
        assert rig.frozen() == [False, True]
        await h.write(f"{pid}/1/compute.freeze", 0)

    drive(spawn, test, Plan([fault]))


@pytest.mark.logs("GPU 0 is left out", "GPU 1 is left out")
@pytest.mark.parametrize("gpu", ["auto", "nvidia"])
@pytest.mark.parametrize(
    "fault", [Fault("nvmlDeviceGetHandleByIndex", status=15), Fault("alloc", 0x2080, status=0x0F)], ids=["nvml", "rm"]
)
def test_all_lost_when_the_daemon_starts(gpu: str, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPUs exist nevertheless: no other GPU is served in their place."""
    plan, fake = Plan([fault]), FakeSystem()
    monkeypatch.setattr(linux, "LinuxSystem", lambda: FaultySystem(fake, plan))
    monkeypatch.setattr(opening, "Nvml", lambda: Nvml(FaultyNvml(FakeNvml(), plan)))  # type: ignore[arg-type]

    async def main() -> None:
        with pytest.raises(OSError, match=r"LOST|NVML") as caught:
            await choose.gpus(Choice(gpu=gpu, selftest=False))
        assert caught.value.errno == errno.EIO

    trio.run(main)
    assert not fake.open


def test_a_driver_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeSystem()
    monkeypatch.setattr(linux, "LinuxSystem", lambda: fake)
    monkeypatch.setattr(opening, "Nvml", lambda: Nvml(FakeNvml(count=0)))  # type: ignore[arg-type]

    async def main() -> None:
        assert [type(one) for one in await choose.gpus(Choice())] == [SoftGpu]
        with pytest.raises(OSError, match="no GPU") as caught:
            await choose.gpus(Choice(gpu="nvidia"))
        assert caught.value.errno == errno.ENODEV

    trio.run(main)
    assert not fake.open


# The software GPU


@pytest.mark.logs("GPU 0 is lost", "GPU 0 is back")
@virtual
async def test_soft(spawn: Spawn, caplog: pytest.LogCaptureFixture) -> None:
    """As above. What a program had there is lost; it can free it, and start again."""
    machine = Machine(2)
    gpus = [SoftGpu(index, SoftConfig(capacity=64 * MIB), machine) for index in (0, 1)]
    async with running(*gpus, scheduler=True) as h:
        process = backend.process.identity.identify(spawn().pid)
        h.world.cgroups[process.pid] = backend.process.identity.Slice("/jobs")
        tsg = await gpus[0].open_context(process, 8, lambda _: None)
        other = await gpus[1].open_context(process, 8, lambda _: None)
        pages = await gpus[0].allocate(process, 4 * MIB)
        await gpus[0].launch(process, tsg, 10, 1000, pages)
        await h.write(f"{process.pid}/0/compute.weight", 200)
        gpus[0].lose()
        assert await h.read("gpus/0/gpu.events") == "present 0\nlost 1\n"
        assert "lost 1\n" in await h.read(f"{process.pid}/0/compute.events")
        assert await h.read(f"{process.pid}/0/compute.weight") == "200\n"
        assert await h.read(f"{process.pid}/0/gmem.current") == f"{4 * MIB}\n"
        await refuses_all(h, f"{process.pid}/0", "slice/jobs/0")
        assert await h.refused(f"{process.pid}/1/compute.migrate", 0) == errno.ENODEV
        await gpus[1].launch(process, other, 1, 1000, range(0))
        await h.write(f"{process.pid}/1/compute.freeze", 1)
        await h.write(f"{process.pid}/1/compute.freeze", 0)
        await trio.sleep(5)
        assert gpus[0].activity(process).pending == 0
        gpus[0].restore()
        await settle()
        with pytest.raises(OSError, match="No such device"):
            await gpus[0].launch(process, tsg, 1, 1000, range(0))
        gpus[0].close_context(process, tsg)
        gpus[0].free(process, pages)
        tsg = await gpus[0].open_context(process, 8, lambda _: None)
        await gpus[0].launch(process, tsg, 1, 1000, range(0))
        await h.write(f"{process.pid}/0/compute.freeze", 1)
        assert "frozen 1\n" in await h.read(f"{process.pid}/0/compute.events")
        assert await h.read("gpus/0/gpu.events") == "present 1\nlost 1\n"


@pytest.mark.logs("is lost", "is back")
@pytest.mark.parametrize("lost", [0, 1])
@virtual
async def test_lost_in_the_middle_of_a_move(spawn: Spawn, lost: int) -> None:
    """The mover is told, nothing remains on the other GPU, and a program that was to be left on it works on."""
    machine = Machine(2)
    gpus = [
        SoftGpu(index, SoftConfig(64 * MIB, out_bytes_per_s=16 * MIB, in_bytes_per_s=16 * MIB), machine)
        for index in (0, 1)
    ]
    async with running(*gpus) as h:
        process = backend.process.identity.identify(spawn().pid)
        tsg = await gpus[0].open_context(process, 8, lambda _: None)
        pages = await gpus[0].allocate(process, 16 * MIB)
        await gpus[0].launch(process, tsg, 5000, 1000, range(0))
        errors: list[int] = []

        async def move() -> None:
            errors.append(await h.refused(f"{process.pid}/0/compute.migrate", 1))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(move)
            await trio.sleep(1)  # one of two
            assert not errors
            gpus[lost].lose()
        assert errors == [errno.ENODEV]
        assert await h.listdir(str(process.pid)) == ["0"]
        assert await h.read("gpus/1/gmem.current") == "0\n"
        assert await h.read(f"{process.pid}/0/gmem.current") == f"{16 * MIB}\n"
        before = gpus[0].activity(process).finished
        await trio.sleep(1)
        assert gpus[0].activity(process).finished - before == (0 if lost == 0 else pytest.approx(1000, rel=0.01))
        gpus[lost].restore()
        await settle()
        if lost == 1:
            await h.write(f"{process.pid}/0/compute.migrate", 1)
            assert await h.listdir(str(process.pid)) == ["1"]
            gpus[1].free(process, pages)


@pytest.mark.logs("does not follow")
@virtual
async def test_what_failed_in_the_background_is_done_later(spawn: Spawn) -> None:
    gpu = StubGpu()
    async with running(gpu) as h:
        await h.operations.mkdir(await h.inode("slice"), b"jobs", 0o755, h.ctx)
        await h.write("slice/jobs/0/compute.freeze", 1)
        gpu.script("detach", *[refuses(errno.EIO)] * 3)
        who = await h.arrive(spawn().pid, "/jobs")
        assert who not in gpu.detached
        await trio.sleep(10)
        assert who in gpu.detached
        await h.write("slice/jobs/0/compute.freeze", 0)


# Time


@pytest.mark.parametrize("readback", [True, False])
@pytest.mark.parametrize("resets", ["all", "nothing", "some"])
@pytest.mark.parametrize("when", ["between", "in a question"])
def test_what_a_suspend_resets_nobody_has_undone(
    spawn: Spawn, when: str, resets: str, readback: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is set again within a second, once, and no program is blamed. A program that undoes it afterwards is."""
    hours, real = [0.0], keeper.asleep
    monkeypatch.setattr(keeper, "asleep", lambda: real() + hours[0])
    blamed: list[str] = []
    monkeypatch.setattr(tenant.log, "warning", lambda text, *words: blamed.append(text % words))

    async def test(rig: Rig) -> None:
        h, pid, fake = rig.h, rig.pid, rig.fake
        channels = rig.program.channels()[:20]
        slices = [one for one in rig.program.objects.values() if one.class_ == rm.CLASS_TSG and one.timeslice == 2048]
        await h.write(f"{pid}/0/compute.freeze", 1)
        await h.write(f"{pid}/1/compute.timeslice", 5)
        await trio.sleep(3)
        assert {one.timeslice for one in slices} == {2048, 5000}

        def suspend(cmd: int = 0) -> None:
            if cmd not in (0, rm.FIFO_GET_CHANNEL_STATE if readback else rm.GET_TIMESLICE):
                return
            fake.before = lambda cmd: None
            hours[0] += 3600
            for channel in {"all": channels, "nothing": [], "some": channels[:7]}[resets]:
                rig.program.objects[channel].disabled = 0
            if resets == "all":
                for one in slices:
                    one.timeslice = 2048

        def holds() -> bool:
            off = {rig.program.objects[channel].disabled for channel in channels}
            return off == {1} and {one.timeslice for one in slices} == {2048, 5000}

        if when == "between":
            suspend()
        else:
            fake.before = suspend
        await trio.sleep(1)
        assert hours[0]
        assert holds()
        await trio.sleep(5)
        assert holds()
        assert not blamed
        for gpu in (0, 1):
            assert "undone 0\n" in await h.read(f"{pid}/{gpu}/compute.events")
        for one in slices:
            one.timeslice = 100_000
        await trio.sleep(2)
        assert "undone 1\n" in await h.read(f"{pid}/1/compute.events")
        assert blamed == [f"pid {pid} undid its timeslice: set again"]
        await h.write(f"{pid}/0/compute.freeze", 0)
        assert rig.frozen() == [False, False], "it was not disabled twice"

    drive(spawn, test, readback=readback)


def test_how_long_the_machine_slept(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds also if the daemon waits for a processor between the readings of the two clocks."""
    clocks = {time.CLOCK_BOOTTIME: 1000.0, time.CLOCK_MONOTONIC: 900.0}
    waits = [0.0, 0.2, 0.0, 0.0, 0.3, 0.0]

    def gettime(clock: int) -> float:
        for each in clocks:
            clocks[each] += waits[0]
        waits.append(waits.pop(0))
        return clocks[clock]

    monkeypatch.setattr(keeper, "time", SimpleNamespace(**{**vars(time), "clock_gettime": gettime}))
    assert [round(keeper.asleep(), 6) for _ in range(4)] == [100] * 4


@pytest.mark.parametrize("years", [-50, 50])
@virtual
async def test_the_clock_of_the_day_is_nobodys(spawn: Spawn, years: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is changed by years while everything is at work: writes are answered, and engine time is unaffected."""
    gpu = SoftGpu(0, SoftConfig(capacity=64 * MIB))
    real, real_ns, shift = time.time, time.time_ns, [0]
    monkeypatch.setattr(time, "time", lambda: real() + shift[0])
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + shift[0] * 10**9)
    async with running(gpu, scheduler=True) as h:
        process = backend.process.identity.identify(spawn().pid)
        tsg = await gpu.open_context(process, 8, lambda _: None)
        await gpu.launch(process, tsg, 1000, 10_000, range(0))
        await trio.sleep(1)
        shift[0] = years * 365 * 86400
        await trio.sleep(1)
        await h.write(f"{process.pid}/0/compute.freeze", 1)
        busy = gpu.activity(process).gpu_usec
        assert busy is not None
        assert 1_900_000 <= busy <= 2_000_000
        await trio.sleep(1)
        assert gpu.activity(process).gpu_usec == busy
