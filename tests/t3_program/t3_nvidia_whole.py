"""Programs without the library that move to the host as a whole when frozen, and back at the thaw, by control files."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import attrs
import pytest
import trio
from trio.testing import MockClock

import backend.process.identity
from backend.core.oom import NOTICE_S
from backend.core.silence import RETURN_S
from backend.nvidia import checkpoint
from backend.nvidia.checkpoint.records import Action, Outcome, Progress, Request, State, Step
from backend.nvidia.gpu import NvidiaGpu
from backend.nvidia.nvml import Nvml
from backend.nvidia.opening import open_gpus
from backend.nvidia.swapped import SILENT_S
from backend.process.identity import Process
from tests.support.fake_nvidia import FakeNvml, FakeSystem, patient
from tests.support.harness import MIB, Harness, StubGpu, settle
from tests.support.restarted import Machine

Spawn = Callable[..., subprocess.Popen[bytes]]

HELD = 64 * MIB
LARGE = 4 << 30
"""Bytes of a program that may take three times as long as a lever."""


@attrs.define
class Driver:
    """The effect of agents on programs: NVML lists those that are on the GPU."""

    nvml: FakeNvml
    system: FakeSystem
    keeps_file: bool = False
    """Whether a program in the host keeps a file of the driver open, without a client."""
    ctl: int = 9
    """Number of its file when it is back."""
    done: list[tuple[str, int]] = attrs.field(factory=list)
    rooms: list[int] = attrs.field(factory=list)
    """Bytes that agents were told a program needs."""
    failed: Sequence[Progress] = ()
    """Progress that a failing agent has reported."""
    fails: list[int] = attrs.field(factory=list)
    """Errnos of the next calls; 0 for none."""
    seconds: float = 0.0
    ends: float = 0.7
    """Seconds that an agent still works after NVML shows the result: a few looks."""
    ready: bool = True
    """Whether agents get as far as their question."""
    frozen: Callable[[Process], bool] = lambda _: False
    """Return whether the work of a program is off the GPU."""
    left: list[checkpoint.Left] = attrs.field(factory=list)
    """Programs that are in the host."""

    async def suspend(
        self, process: Process, source: str, room: int, lock_s: float, ready: checkpoint.Ready
    ) -> checkpoint.Done:
        self.rooms.append(room)
        await trio.sleep(self.seconds)
        assert self.frozen(process)
        if self.ready:
            await ready()
            assert not self.frozen(process)
        self._act("suspend", process)
        self.left.append(checkpoint.Left(Request(Action.SUSPEND, process, source, "", room), Step.LOCK, "", busy=False))
        self.nvml.compute[0] = [(pid, held) for pid, held in self.nvml.compute[0] if pid != process.pid]
        self.system.programs[process.pid].checkpointed(keeps_file=self.keeps_file)
        await trio.sleep(self.ends)
        return checkpoint.Done(State.CHECKPOINTED, "", {}, None)

    async def resume(self, process: Process, source: str, room: int, target: str = "") -> checkpoint.Done:
        self.rooms.append(room)
        await trio.sleep(self.seconds)
        self._act("resume", process)
        self.left.clear()
        self.system.programs[process.pid].restored(0, self.ctl)
        others = list(self.nvml.compute[0])
        for held in (room // 2, room):
            self.nvml.compute[0] = [*others, (process.pid, held)]
            await trio.sleep(self.ends)
        return checkpoint.Done(State.RUNNING, source, {}, None)

    async def recover(self, process: Process) -> checkpoint.Done:
        if not self.ready:
            raise checkpoint.CheckpointError(Outcome(State.CHECKPOINTED, "", errno.ENOSPC, Step.RETURN, "no room"), ())
        return await self.resume(process, "GPU-0", HELD)

    def _act(self, what: str, process: Process) -> None:
        self.done.append((what, process.pid))
        if self.fails and (code := self.fails.pop(0)):
            raise checkpoint.CheckpointError(
                Outcome(State.RUNNING, "GPU-0", code, Step.LOCK, "lock: it failed"), self.failed
            )


@attrs.define
class Rig:
    h: Harness
    gpu: NvidiaGpu
    driver: Driver
    fake: FakeSystem
    pids: list[int]

    async def seen(self) -> None:
        """Wait for a look at NVML's list, and for its consequences."""
        await trio.sleep(1)
        await settle()

    async def refused_reclaim(self, pid: int, code: int) -> None:
        assert await self.h.refused(f"{pid}/0/gmem.reclaim", MIB) == code

    async def number(self, pid: int, name: str) -> int:
        return int(await self.h.read(f"{pid}/0/{name}"))

    async def booked(self, pid: int) -> tuple[int, int]:
        """Return the bytes on the GPU and in the host, as the files say."""
        return await self.number(pid, "gmem.current"), await self.number(pid, "gmem.swap.current")


def drive(
    monkeypatch: pytest.MonkeyPatch, spawn: Spawn, *tests: Callable[[Rig], object], programs: int = 1, room: int = HELD
) -> None:
    """Run tests with a daemon each, on the same machine; the books outlive a daemon, as the kernel's do."""
    fake, nvml = FakeSystem(trace=None), FakeNvml(count=1)
    driver = Driver(nvml, fake)
    monkeypatch.setattr(checkpoint, "suspend", driver.suspend)
    monkeypatch.setattr(checkpoint, "resume", driver.resume)
    monkeypatch.setattr(checkpoint, "recover", driver.recover)
    monkeypatch.setattr(checkpoint, "left", lambda: tuple(driver.left))
    machine = Machine(StubGpu(0))
    pids = []
    for _ in range(programs):
        process = backend.process.identity.identify(spawn().pid)
        fake.program(process.pid, 0, start=process.start)
        pids.append(process.pid)
    nvml.compute[0] = [(pid, HELD) for pid in pids]

    @asynccontextmanager
    async def rig() -> AsyncIterator[Rig]:
        (gpu,) = await open_gpus(system=fake, nvml=Nvml(nvml), selftest=False)  # type: ignore[arg-type]
        gpu.swapped._room = lambda _: room
        driver.frozen = gpu._is_frozen
        async with machine.daemon(gpu) as h:
            yield Rig(h, gpu, driver, fake, pids)

    async def main() -> None:
        for test in tests:
            async with rig() as found:
                await found.seen()
                await test(found)  # type: ignore[misc]

    clock = MockClock(autojump_threshold=0.005)
    with patient(clock, lambda: False):
        trio.run(main, clock=clock)


def has_been_killed(pid: int) -> bool:
    """Return whether a child was killed and not reaped yet."""
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return found is not None and found.si_status == signal.SIGKILL


def test_out_and_back(monkeypatch: pytest.MonkeyPatch, spawn: Spawn) -> None:
    """gmem.reclaim moves it out; at the thaw it is on the GPU again before any of it runs."""

    async def test(rig: Rig) -> None:
        (pid,) = rig.pids
        assert await rig.h.refused(f"{pid}/0/gmem.reclaim", MIB) == errno.EOPNOTSUPP
        await rig.h.write(f"{pid}/0/compute.freeze", 1)
        await rig.h.write(f"{pid}/0/gmem.reclaim", MIB)
        await rig.seen()
        assert await rig.booked(pid) == (0, HELD)
        assert "frozen 1\n" in await rig.h.read(f"{pid}/0/compute.events")
        await rig.h.write(f"{pid}/0/compute.freeze", 0)
        await rig.seen()
        assert await rig.booked(pid) == (HELD, 0)
        assert await rig.number(pid, "gmem.swap.peak") == await rig.number(pid, "gmem.peak") == HELD
        assert rig.driver.done == [("suspend", pid), ("resume", pid)]
        assert rig.driver.rooms == [HELD, HELD]
        assert "frozen 0\n" in await rig.h.read(f"{pid}/0/compute.events")

    drive(monkeypatch, spawn, test)


def test_the_books_say_where_it_was_until_it_has_moved(monkeypatch: pytest.MonkeyPatch, spawn: Spawn) -> None:
    """The driver reports it earlier, and then in parts."""

    async def test(rig: Rig) -> None:
        (pid,) = rig.pids
        said: list[tuple[int, int]] = []

        async def look() -> None:
            while True:
                both = await rig.booked(pid)
                if not said or said[-1] != both:
                    said.append(both)
                await trio.sleep(0.1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(look)
            await rig.h.write(f"{pid}/0/compute.freeze", 1)
            await rig.h.write(f"{pid}/0/gmem.reclaim", MIB)
            await rig.seen()
            await rig.h.write(f"{pid}/0/compute.freeze", 0)
            await rig.seen()
            nursery.cancel_scope.cancel()
        assert said == [(HELD, 0), (0, HELD), (HELD, 0)]

    drive(monkeypatch, spawn, test)


@pytest.mark.parametrize("keeps_file", [False, True])
@pytest.mark.parametrize("ctl", [9, 11])
def test_what_comes_back_has_other_channels(
    monkeypatch: pytest.MonkeyPatch, spawn: Spawn, keeps_file: bool, ctl: int
) -> None:
    """All levers reach it, whatever was seen meanwhile; and settings made while it was away hold, too."""

    async def test(rig: Rig) -> None:
        (pid,) = rig.pids
        rig.driver.keeps_file, rig.driver.ctl = keeps_file, ctl
        program = rig.fake.programs[pid]
        for us in (3000, 5000):
            await rig.h.write(f"{pid}/0/compute.freeze", 1)
            assert not any(program.running())
            await rig.h.write(f"{pid}/0/gmem.reclaim", MIB)
            await trio.sleep(15)  # no look at it finds anything
            await rig.h.write(f"{pid}/0/compute.timeslice", us / 1000)
            await rig.h.write(f"{pid}/0/compute.freeze", 0)
            assert all(program.running())
            assert {one.timeslice for one in program.objects.values() if one.class_ == 0xA06C} == {us, 1024}

    drive(monkeypatch, spawn, test)


def test_one_that_uses_another_gpu_stays(monkeypatch: pytest.MonkeyPatch, spawn: Spawn) -> None:
    """It would stand still on that GPU, too."""

    async def test(rig: Rig) -> None:
        (pid,) = rig.pids
        await rig.h.write(f"{pid}/0/compute.freeze", 1)
        rig.fake.programs[pid].context(1)
        await rig.seen()
        assert await rig.h.refused(f"{pid}/0/gmem.reclaim", MIB) in (errno.EOPNOTSUPP, errno.EAGAIN)
        assert rig.driver.done == []

    drive(monkeypatch, spawn, test)


def test_what_it_has_allocated_since_the_last_look_counts(monkeypatch: pytest.MonkeyPatch, spawn: Spawn) -> None:
    """Without room for that memory, it could not be restored."""

    async def test(rig: Rig) -> None:
        (pid,) = rig.pids
        await rig.h.write(f"{pid}/0/compute.freeze", 1)
        rig.driver.nvml.compute[0] = [(pid, 2 * HELD)]
        await rig.h.write(f"{pid}/0/gmem.reclaim", MIB)
        assert await rig.booked(pid) == (0, 2 * HELD)
        await rig.h.write(f"{pid}/0/compute.freeze", 0)
        assert rig.driver.rooms == [2 * HELD, 2 * HELD]

    drive(monkeypatch, spawn, test, room=2 * HELD)


def test_one_that_allocates_while_its_agent_starts_stays(monkeypatch: pytest.MonkeyPatch, spawn: Spawn) -> None:
    async def test(rig: Rig) -> None:
        (pid,) = rig.pids
        await rig.h.write(f"{pid}/0/compute.freeze", 1)
        rig.driver.seconds = 2.0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.refused_reclaim, pid, errno.EAGAIN)
            await trio.sleep(1)
            rig.driver.nvml.compute[0] = [(pid, 2 * HELD)]
        assert rig.driver.done == []
        await rig.seen()
        assert await rig.booked(pid) == (2 * HELD, 0)
        assert rig.gpu._is_frozen(backend.process.identity.identify(pid))
        await rig.h.write(f"{pid}/0/compute.freeze", 0)

    drive(monkeypatch, spawn, test, room=2 * HELD)


def test_a_slice_over_its_limit_takes_the_frozen_one(monkeypatch: pytest.MonkeyPatch, spawn: Spawn) -> None:
    """The other program runs and cannot be moved; without the frozen one the limit would be refused."""

    async def test(rig: Rig) -> None:
        frozen, other = rig.pids
        for pid in rig.pids:
            rig.h.world.cgroups[pid] = backend.process.identity.Slice("/jobs")
        await rig.seen()
        assert await rig.h.refused("slice/jobs/0/gmem.limit.high", HELD) == errno.EBUSY
        await rig.h.write(f"{frozen}/0/compute.freeze", 1)
        await rig.h.write("slice/jobs/0/gmem.limit.high", HELD)
        assert rig.driver.done == [("suspend", frozen)]
        assert await rig.number(other, "gmem.current") == HELD
        assert await rig.h.refused(f"{frozen}/0/compute.freeze", 0) == errno.ENOSPC
        assert rig.driver.done == [("suspend", frozen)]
        await rig.h.write("slice/jobs/0/gmem.limit.high", "max")
        await rig.h.write(f"{frozen}/0/compute.freeze", 0)
        assert rig.driver.done == [("suspend", frozen), ("resume", frozen)]

    drive(monkeypatch, spawn, test, programs=2)


def test_one_whose_library_does_not_speak_gives_nothing_and_others_do(
    monkeypatch: pytest.MonkeyPatch, spawn: Spawn
) -> None:
    """Memory that its library keeps in the host would not be restored. A limit of its own is refused, as it is for a
    connected library, also while the program is not looked at again."""
    looked: list[int] = []

    async def has_library(pid: int) -> bool:
        looked.append(pid)
        return pid == silent

    async def test(rig: Rig) -> None:
        nonlocal silent
        silent, other = rig.pids
        for pid in rig.pids:
            rig.h.world.cgroups[pid] = backend.process.identity.Slice("/jobs")
        rig.driver.nvml.compute[0] = [(silent, 2 * HELD), (other, HELD)]  # the silent one is asked first
        await rig.seen()
        await rig.h.write("slice/jobs/0/compute.freeze", 1)
        await rig.h.write("slice/jobs/0/gmem.limit.high", 2 * HELD)
        assert (await rig.booked(silent), await rig.booked(other)) == ((2 * HELD, 0), (0, HELD))
        for _ in range(2):
            for path in (f"{silent}/0", "slice/jobs/0"):
                assert await rig.h.refused(f"{path}/gmem.limit.high", HELD) == errno.EBUSY
            await rig.refused_reclaim(silent, errno.EAGAIN)
            assert looked.count(silent) == 1
        await trio.sleep(SILENT_S)
        assert await rig.h.refused(f"{silent}/0/gmem.limit.high", HELD) == errno.EBUSY
        assert looked.count(silent) == 2
        await rig.h.write(f"{silent}/0/gmem.limit.high", 2 * HELD)
        assert rig.driver.done == [("suspend", other)]
        await rig.h.write("slice/jobs/0/gmem.limit.high", "max")
        await rig.h.write("slice/jobs/0/compute.freeze", 0)

    silent = 0
    monkeypatch.setattr("backend.nvidia.swapped.has_library", has_library)
    drive(monkeypatch, spawn, test, programs=2, room=2 * HELD)


@pytest.mark.logs(r"over its gmem\.limit\.max: ", "cannot be moved: killed")
def test_one_whose_library_does_not_speak_has_the_time_to_before_it_ends(
    monkeypatch: pytest.MonkeyPatch, spawn: Spawn
) -> None:
    """It is frozen, and could go as a whole but for its silent library: so it is not killed at once."""

    async def has_library(pid: int) -> bool:
        return True

    async def test(rig: Rig) -> None:
        (pid,) = rig.pids
        rig.h.world.cgroups[pid] = backend.process.identity.Slice("/jobs")
        await rig.seen()
        await rig.h.write(f"{pid}/0/compute.freeze", 1)
        await rig.h.write("slice/jobs/0/gmem.limit.max", LARGE)
        await trio.sleep(RETURN_S)  # until the daemon is no longer new
        rig.driver.nvml.compute[0] = [(pid, LARGE + HELD)]
        await trio.sleep(RETURN_S - 1)
        assert "over 1\n" in await rig.h.read("slice/jobs/0/gmem.events")
        assert not has_been_killed(pid)
        await trio.sleep(4 + 2 * NOTICE_S)
        assert has_been_killed(pid)
        assert rig.driver.done == []

    monkeypatch.setattr("backend.nvidia.swapped.has_library", has_library)
    monkeypatch.setattr("backend.core.silence.has_library", has_library)
    drive(monkeypatch, spawn, test, room=2 * LARGE)


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("code", [errno.ETIMEDOUT, errno.EOPNOTSUPP, errno.EIO])
def test_one_that_cannot_go_stays_and_is_frozen(
    monkeypatch: pytest.MonkeyPatch, spawn: Spawn, code: int, ready: bool
) -> None:
    async def test(rig: Rig) -> None:
        (pid,) = rig.pids
        rig.driver.fails, rig.driver.ready = [code], ready
        await rig.h.write(f"{pid}/0/compute.freeze", 1)
        assert await rig.h.refused(f"{pid}/0/gmem.reclaim", MIB) == code
        await rig.seen()
        assert await rig.booked(pid) == (HELD, 0)
        assert rig.gpu._is_frozen(backend.process.identity.identify(pid))
        await rig.h.write(f"{pid}/0/compute.freeze", 0)

    drive(monkeypatch, spawn, test)


def test_one_that_was_never_away_keeps_what_its_tsgs_had(monkeypatch: pytest.MonkeyPatch, spawn: Spawn) -> None:
    """The driver refused the checkpoint: the timeslices that its TSGs have now are not their own."""

    async def test(rig: Rig) -> None:
        (pid,) = rig.pids
        program = rig.fake.programs[pid]
        rig.driver.fails = [errno.EOPNOTSUPP]
        rig.driver.failed = [Progress(Step.CHECKPOINT, 0.0), Progress(Step.CHECKPOINT, 1.0, 1e3, errno.EOPNOTSUPP)]
        await rig.h.write(f"{pid}/0/compute.timeslice", 5)
        await rig.h.write(f"{pid}/0/compute.freeze", 1)
        assert await rig.h.refused(f"{pid}/0/gmem.reclaim", MIB) == errno.EOPNOTSUPP
        await rig.h.write(f"{pid}/0/compute.freeze", 0)
        await rig.h.write(f"{pid}/0/compute.timeslice", "default")
        assert {one.timeslice for one in program.objects.values() if one.class_ == 0xA06C} == {2048, 1024}

    drive(monkeypatch, spawn, test)


def test_the_host_has_no_room(monkeypatch: pytest.MonkeyPatch, spawn: Spawn) -> None:
    async def test(rig: Rig) -> None:
        (pid,) = rig.pids
        await rig.h.write(f"{pid}/0/compute.freeze", 1)
        assert await rig.h.refused(f"{pid}/0/gmem.reclaim", MIB) == errno.EOPNOTSUPP
        assert rig.driver.done == []

    drive(monkeypatch, spawn, test, room=HELD - 1)


def test_a_large_one_may_take_longer_than_a_lever(monkeypatch: pytest.MonkeyPatch, spawn: Spawn) -> None:
    """To go, to come, and for a thaw that waits for both. Its size may be seen only while a caller waits."""

    async def test(rig: Rig) -> None:
        (pid,) = rig.pids
        rig.driver.nvml.compute[0] = [(pid, LARGE)]
        rig.driver.seconds = 6.0
        await rig.h.write(f"{pid}/0/compute.freeze", 1)
        await rig.h.write(f"{pid}/0/gmem.reclaim", MIB)
        assert await rig.booked(pid) == (0, LARGE)
        await rig.h.write(f"{pid}/0/compute.freeze", 0)
        await rig.h.write(f"{pid}/0/compute.freeze", 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.h.write, f"{pid}/0/gmem.limit.high", 0)
            await trio.sleep(2)
            assert await rig.h.refused(f"{pid}/0/compute.freeze", 0) == errno.ENOSPC
        await rig.h.write(f"{pid}/0/gmem.limit.high", "max")
        async with trio.open_nursery() as nursery:
            await rig.h.write(f"{pid}/0/compute.freeze", 0)
            await rig.h.write(f"{pid}/0/compute.freeze", 1)
            nursery.start_soon(rig.h.write, f"{pid}/0/gmem.reclaim", MIB)
            await trio.sleep(2)
            await rig.h.write(f"{pid}/0/compute.freeze", 0)
        assert rig.driver.done == 3 * [("suspend", pid), ("resume", pid)]
        assert all(rig.fake.programs[pid].running())

    drive(monkeypatch, spawn, test, room=LARGE)


def test_a_thaw_waits_for_one_on_its_way_out(monkeypatch: pytest.MonkeyPatch, spawn: Spawn) -> None:
    """Its caller may be gone by then: the agent goes on, and the thaw undoes it."""

    async def test(rig: Rig) -> None:
        (pid,) = rig.pids
        rig.driver.seconds = 3.0
        await rig.h.write(f"{pid}/0/compute.freeze", 1)
        with trio.move_on_after(1):
            await rig.h.write(f"{pid}/0/gmem.reclaim", MIB)
        assert rig.driver.done == []
        assert await rig.h.refused(f"{pid}/0/compute.freeze", 0) == errno.ETIMEDOUT
        await trio.sleep(10)
        # It is back, although the caller of the thaw was told that it is frozen.
        assert await rig.booked(pid) == (HELD, 0)
        assert await rig.h.read(f"{pid}/0/compute.freeze") == "1\n"
        assert rig.gpu._is_frozen(backend.process.identity.identify(pid))
        assert not any(rig.fake.programs[pid].running())
        rig.driver.seconds = 0.0
        await rig.h.write(f"{pid}/0/compute.freeze", 0)
        await rig.seen()
        assert rig.driver.done[:2] == [("suspend", pid), ("resume", pid)]
        assert await rig.booked(pid) == (HELD, 0)

    drive(monkeypatch, spawn, test)


def test_a_daemon_that_ends_brings_it_back(monkeypatch: pytest.MonkeyPatch, spawn: Spawn) -> None:
    """Just as the daemon thaws what it froze."""
    ended: list[Driver] = []

    async def test(rig: Rig) -> None:
        (pid,) = rig.pids
        await rig.h.write(f"{pid}/0/compute.freeze", 1)
        await rig.h.write(f"{pid}/0/gmem.reclaim", MIB)
        assert rig.driver.done == [("suspend", pid)]
        ended.append(rig.driver)

    drive(monkeypatch, spawn, test)
    assert [what for what, _ in ended[0].done] == ["suspend", "resume"]


@pytest.mark.logs("is in the middle of a move: .*no room", "was in the middle of a move, and runs again")
def test_the_daemon_after_one_that_was_killed_brings_it_back(monkeypatch: pytest.MonkeyPatch, spawn: Spawn) -> None:
    """Books that outlive a daemon say that it is in the host, and follow. Its settings hold: it is frozen, and no
    caller is told that it is thawed before it can be."""

    async def killed(rig: Rig) -> None:
        (pid,) = rig.pids
        await rig.h.write(f"{pid}/0/compute.freeze", 1)
        await rig.h.write(f"{pid}/0/gmem.reclaim", MIB)
        rig.h.controller.hand_over()
        rig.h.kill()
        rig.driver.ready = False  # no room for it

    async def after(rig: Rig) -> None:
        (pid,) = rig.pids
        assert await rig.h.refused(f"{pid}/0/compute.freeze", 0) == errno.EAGAIN
        assert await rig.h.read(f"{pid}/0/compute.freeze") == "1\n"
        rig.driver.ready = True
        await trio.sleep(8)
        assert rig.driver.done == [("suspend", pid), ("resume", pid)]
        assert await rig.booked(pid) == (HELD, 0)
        assert await rig.h.read(f"{pid}/0/compute.freeze") == "1\n"
        assert not any(rig.fake.programs[pid].running())
        for _ in range(2):
            await rig.h.write(f"{pid}/0/gmem.reclaim", MIB)
            await rig.seen()
            assert await rig.booked(pid) == (0, HELD)
            await rig.h.write(f"{pid}/0/compute.freeze", 0)
            await rig.h.write(f"{pid}/0/compute.freeze", 1)
        await rig.h.write(f"{pid}/0/compute.freeze", 0)

    drive(monkeypatch, spawn, killed, after)
