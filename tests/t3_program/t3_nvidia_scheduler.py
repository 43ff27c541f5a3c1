"""The scheduler over the NVIDIA code and a driver in memory: how often the driver is called, by any part."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable

import pytest
import trio
from trio.testing import MockClock

import backend.process.identity
from backend.nvidia import rm
from backend.nvidia.nvml import Nvml
from backend.nvidia.opening import open_gpus
from tests.support.fake_nvidia import FakeNvml, FakeSystem, Object, Program, patient
from tests.support.harness import running
from tests.support.nvidia_rig import ON_THE_GPU

Spawn = Callable[..., subprocess.Popen[bytes]]


@pytest.mark.parametrize(("programs", "contexts"), [(20, 1), (6, 4)])
def test_no_more_than_fifty_calls_in_any_second(spawn: Spawn, programs: int, contexts: int) -> None:
    """Priorities change all the time, and so do timeslices and the set of fillers; and each timeslice is to be kept."""
    fake, nvml = FakeSystem(trace=None), FakeNvml(count=1)
    when: list[tuple[float, int]] = []

    async def main() -> None:
        clock = trio.lowlevel.current_clock()
        (gpu,) = await open_gpus(system=fake, nvml=Nvml(nvml), selftest=False)  # type: ignore[arg-type]
        pids = []
        for _ in range(programs):
            process = backend.process.identity.identify(spawn().pid)
            fake.program(process.pid, *[0] * contexts, start=process.start)
            pids.append(process.pid)
        nvml.compute[0] = [(pid, 1 << 20) for pid in pids]
        fake.before = lambda cmd: when.append((clock.current_time(), cmd))
        async with running(gpu, scheduler=True) as h:
            for n in range(100):
                await h.write(f"{pids[n % programs]}/0/compute.priority", n % 3)
                await trio.sleep(0.1)

    clock = MockClock(autojump_threshold=0.005)
    with patient(clock, lambda: False):
        trio.run(main, clock=clock)
    # In the first second each TSG's timeslice is read once, and at the end all of them are restored.
    calls = [(at, cmd) for at, cmd in when if cmd in ON_THE_GPU and 1 <= at < 9.9]
    assert {cmd for _, cmd in calls} == ON_THE_GPU, "it does all that it can"
    assert max(sum(at <= other < at + 1 for other, _ in calls) for at, _ in calls) <= 50
    assert len(calls) > 100
    # The driver reads a timeslice from its own memory: 4 us, and 200 programs a second at most.
    asked = [at for at, cmd in when if cmd == rm.GET_TIMESLICE and 1 <= at < 9.9]
    assert 0 < max(sum(at <= other < at + 1 for other in asked) for at in asked) <= 200 * contexts


@pytest.mark.parametrize("seed", range(5))
def test_who_begins_on_a_busy_gpu_has_its_own_timeslice_beside_an_explicit_one(spawn: Spawn, seed: int) -> None:
    """The CUDA library sets it seconds after the TSG was found, while the scheduler gives the program other
    timeslices."""
    fake, nvml = FakeSystem(trace=None), FakeNvml(count=1)
    chance = random.Random(seed)

    async def main() -> None:
        (gpu,) = await open_gpus(system=fake, nvml=Nvml(nvml), selftest=False)  # type: ignore[arg-type]
        late: list[Object] = []

        async def begin(pids: list[int]) -> None:
            await trio.sleep(chance.uniform(0, 3))
            process = backend.process.identity.identify(spawn().pid)
            program = fake.program(process.pid, 0, start=process.start)
            (tsg,) = [one for one in program.objects.values() if one.timeslice == 2048]
            tsg.timeslice = 1024
            nvml.compute.setdefault(0, []).append((process.pid, 1 << 20))
            pids.append(process.pid)
            await trio.sleep(chance.uniform(0, 3))
            tsg.timeslice = 2048
            late.append(tsg)

        async with running(gpu, scheduler=True) as h:
            pids: list[int] = []
            async with trio.open_nursery() as nursery:
                for _ in range(7):
                    nursery.start_soon(begin, pids)
            await trio.sleep(2)
            assert len({tsg.timeslice for tsg in late} - {1024, 2048}) > 0, "the scheduler is at it"
            await h.write(f"{pids[0]}/0/compute.timeslice", "4")
            await trio.sleep(2)
            assert sorted(tsg.timeslice for tsg in late) == [2048] * 6 + [4000]
            for pid in pids:
                assert "undone 0\n" in await h.read(f"{pid}/0/compute.events")

    clock = MockClock(autojump_threshold=0.005)
    with patient(clock, lambda: False):
        trio.run(main, clock=clock)


def test_one_that_has_destroyed_its_contexts_is_not_worth_a_word(spawn: Spawn) -> None:
    """A program does so some time before it ends. A context that it makes later gets its part of the slice's time."""
    fake, nvml = FakeSystem(trace=None), FakeNvml(count=1)

    async def main() -> None:
        (gpu,) = await open_gpus(system=fake, nvml=Nvml(nvml), selftest=False)  # type: ignore[arg-type]
        async with running(gpu) as h:

            async def begin() -> Program:
                process = backend.process.identity.identify(spawn().pid)
                h.world.cgroups[process.pid] = backend.process.identity.Slice("/jobs")
                nvml.compute.setdefault(0, []).append((process.pid, 1 << 20))
                return fake.program(process.pid, 0, start=process.start)

            def timeslice(program: Program) -> int:
                return max(one.timeslice for one in program.objects.values())

            stays, destroys = await begin(), await begin()
            await trio.sleep(3)
            await h.write("slice/jobs/0/compute.timeslice", "6")
            destroys.destroy()
            nvml.compute[0] = [entry for entry in nvml.compute[0] if entry[0] != destroys.pid]
            await trio.sleep(3)
            late = await begin()
            await trio.sleep(3)
            assert timeslice(stays) == timeslice(late) == 2000
            destroys.context()
            await trio.sleep(3)
            assert timeslice(destroys) == 2000

    clock = MockClock(autojump_threshold=0.005)
    with patient(clock, lambda: False):
        trio.run(main, clock=clock)
