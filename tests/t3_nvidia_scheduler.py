"""The scheduler over the NVIDIA code and a driver in memory: how often the driver is called, whoever does it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest
import trio
from trio.testing import MockClock

import backend.identity
from backend.nvidia import rm
from backend.nvidia.nvml import Nvml
from backend.nvidia.opening import open_gpus
from tests.fake_nvidia import FakeNvml, FakeSystem, patient
from tests.harness import running
from tests.t2_nvidia_gpu import ON_THE_GPU

Spawn = Callable[..., subprocess.Popen[bytes]]


@pytest.mark.parametrize(("programs", "contexts"), [(20, 1), (6, 4)])
def test_no_more_than_fifty_calls_in_any_second(spawn: Spawn, programs: int, contexts: int) -> None:
    """Priorities change all the time, so that slices do and who fills, and each of them is to be kept as well."""
    fake, nvml = FakeSystem(trace=None), FakeNvml(count=1)
    when: list[tuple[float, int]] = []

    async def main() -> None:
        clock = trio.lowlevel.current_clock()
        (gpu,) = await open_gpus(system=fake, nvml=Nvml(nvml), selftest=False)  # type: ignore[arg-type]
        pids = []
        for _ in range(programs):
            process = backend.identity.identify(spawn().pid)
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
    # In the first second each TSG is asked once for what it has, and at the end all of them are given that back.
    calls = [(at, cmd) for at, cmd in when if cmd in ON_THE_GPU and 1 <= at < 9.9]
    assert {cmd for _, cmd in calls} == ON_THE_GPU, "it does all that it can"
    assert max(sum(at <= other < at + 1 for other, _ in calls) for at, _ in calls) <= 50
    assert len(calls) > 100
    # The driver answers what a timeslice is from its own memory: 4 us, and 200 programs a second at most.
    asked = [at for at, cmd in when if cmd == rm.GET_TIMESLICE and 1 <= at < 9.9]
    assert 0 < max(sum(at <= other < at + 1 for other in asked) for at in asked) <= 200 * contexts
