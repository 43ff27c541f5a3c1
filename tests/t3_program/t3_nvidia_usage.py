"""GPU time in the files, over the NVIDIA code and a driver in memory: exact with a trace, an estimate without."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock

import backend.process.identity
from backend.nvidia.nvml import Nvml
from backend.nvidia.opening import open_gpus
from backend.nvidia.sampling import CLOSELY_S, SAMPLE_S
from backend.nvidia.trace import LAG_NS
from backend.process.identity import Slice
from ggroupfs.client import flat
from tests.support.fake_nvidia import FakeNvml, FakeNvmlError, FakeSystem, patient
from tests.support.harness import MIB, World, running
from tests.support.nvidia_rig import MS, Clock

Spawn = Callable[..., subprocess.Popen[bytes]]


def stats(spawn: Spawn, fake: FakeSystem, act: Callable[[FakeNvml, int, int], None]) -> list[dict[str, int]]:
    """Return gcgroup.stat of two programs and of their slice, after three seconds with `act` in each."""
    nvml, world = FakeNvml(count=1), World()

    async def main() -> list[dict[str, int]]:
        (gpu,) = await open_gpus(system=fake, nvml=Nvml(nvml), selftest=False)  # type: ignore[arg-type]
        pids = []
        for _ in range(2):
            process = backend.process.identity.identify(spawn().pid)
            fake.program(process.pid, 0, start=process.start)
            world.cgroups[process.pid] = Slice("/jobs")
            pids.append(process.pid)
        nvml.compute[0] = [(pid, MIB) for pid in pids]
        async with running(gpu, world=world) as h:
            await trio.sleep(SAMPLE_S / 2)  # halfway between two looks
            for _ in range(3):
                act(nvml, *pids)
                await trio.sleep(SAMPLE_S)
            return [flat(await h.read(f"{group}/0/gcgroup.stat")) for group in (*pids, "slice/jobs")]

    clock = MockClock(autojump_threshold=0.005)
    with patient(clock, lambda: False):
        return trio.run(main, clock=clock)


def figures(found: list[dict[str, int]]) -> list[tuple[int | None, int | None]]:
    """Return the exact and the estimated times."""
    return [(one.get("gpu_usec"), one.get("gpu_usec_estimate")) for one in found]


def test_without_a_trace_it_is_an_estimate(spawn: Spawn) -> None:
    """The estimate is made of samples: a quarter of the time, and half of it."""
    seconds = iter(range(1, 4))

    def sample(nvml: FakeNvml, one: int, other: int) -> None:
        at = 1000 * next(seconds)
        nvml.samples = [(one, at, 25), (other, at, 50)]

    (exact, first), (other_exact, second), (of_slice, both) = figures(stats(spawn, FakeSystem(trace=None), sample))
    assert (exact, other_exact, of_slice) == (None, None, None)
    assert first == pytest.approx(750_000, rel=0.01)
    assert second == pytest.approx(1_500_000, rel=0.01)
    assert first is not None
    assert second is not None
    assert both == first + second


def test_with_neither_nothing_is_told(spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU time is left out; the rest of the file is there."""

    def refuse(nvml: FakeNvml, device: int, since: int) -> None:
        raise FakeNvmlError(FakeNvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(FakeNvml, "nvmlDeviceGetProcessUtilization", refuse)
    found = stats(spawn, FakeSystem(trace=None), lambda nvml, one, other: None)
    assert figures(found) == [(None, None)] * 3
    assert found[2]["tsgs"] == found[0]["tsgs"] + found[1]["tsgs"] > 0


def test_with_a_trace_it_is_exact(spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever samples say: 30 ms and 50 ms a second; the most recent time is added later."""
    fake, clock = FakeSystem(), Clock()
    assert fake.trace is not None
    fake.trace.clock = clock
    monkeypatch.setattr("backend.nvidia.trace.time.monotonic_ns", clock)

    def work(nvml: FakeNvml, one: int, other: int) -> None:
        assert fake.trace is not None
        nvml.samples = [(one, clock.ns, 100), (other, clock.ns, 100)]
        fake.trace.stay(one, clock.ns, clock.ns + 30 * MS)
        fake.trace.stay(other, clock.ns + 40 * MS, clock.ns + 90 * MS)
        clock.ns += 90 * MS + LAG_NS

    assert figures(stats(spawn, fake, work)) == [(90_000, None), (150_000, None), (240_000, None)]


def test_busy_time_is_of_samples_without_the_library(spawn: Spawn) -> None:
    """A quarter and a half of the time; that all of it comes from samples is said, too."""
    seconds = iter(range(1, 4))

    def sample(nvml: FakeNvml, one: int, other: int) -> None:
        at = 1000 * next(seconds)
        nvml.samples = [(one, at, 25), (other, at, 50)]

    for stat in stats(spawn, FakeSystem(trace=None), sample):
        assert stat["busy_usec"] == stat["busy_sampled_usec"] == stat["gpu_usec_estimate"]


def test_busy_time_is_left_out_where_nothing_tells(spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the library nor samples tell of kernels."""

    def refuse(nvml: FakeNvml, device: int, since: int) -> None:
        raise FakeNvmlError(FakeNvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(FakeNvml, "nvmlDeviceGetProcessUtilization", refuse)
    found = stats(spawn, FakeSystem(trace=None), lambda nvml, one, other: None)
    assert not [stat for stat in found if "busy_usec" in stat or "busy_sampled_usec" in stat]


def test_a_slice_keeps_what_a_killed_program_did(spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes what the trace reported after its end, and the work of a program that now has its place."""
    fake, clock = FakeSystem(), Clock()
    assert fake.trace is not None
    fake.trace.clock = clock
    monkeypatch.setattr("backend.nvidia.trace.time.monotonic_ns", clock)
    nvml, world = FakeNvml(count=1), World()

    async def main() -> list[int]:
        (gpu,) = await open_gpus(system=fake, nvml=Nvml(nvml), selftest=False)  # type: ignore[arg-type]
        child = spawn()
        process = backend.process.identity.identify(child.pid)
        fake.program(process.pid, 0, start=process.start)
        world.cgroups[process.pid] = Slice("/jobs")
        nvml.compute[0] = [(process.pid, MIB)]
        trace = fake.trace
        assert trace is not None
        async with running(gpu, world=world) as h:
            h.controller.population.keep(Slice("/jobs"))
            await trio.sleep(0.5)
            trace.stay(process.pid, clock.ns, clock.ns + 30 * MS)
            clock.ns += 30 * MS + LAG_NS
            await trio.sleep(0.3)
            known = flat(await h.read("slice/jobs/0/gcgroup.stat"))["gpu_usec"]
            trace.stay(process.pid, clock.ns, clock.ns + 40 * MS)
            clock.ns += 40 * MS
            child.kill()
            child.wait()
            nvml.compute[0] = []
            await h.gone(process)
            at_once = flat(await h.read("slice/jobs/0/gcgroup.stat"))["gpu_usec"]
            clock.ns += LAG_NS
            await trio.sleep(1.0)
            return [known, at_once, flat(await h.read("slice/jobs/0/gcgroup.stat"))["gpu_usec"]]

    mock = MockClock(autojump_threshold=0.005)
    with patient(mock, lambda: False):
        assert trio.run(main, clock=mock) == [30_000, 30_000, 70_000]


def test_all_samples_are_asked_for_while_a_program_comes_and_goes(
    spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program without the library, if looked at once a second, might be seen at work each time, or never."""
    fake, clock, nvml, asked = FakeSystem(), Clock(), FakeNvml(count=1), list[float]()
    assert fake.trace is not None
    fake.trace.clock = clock
    monkeypatch.setattr("backend.nvidia.trace.time.monotonic_ns", clock)
    inner = FakeNvml.nvmlDeviceGetProcessUtilization

    def counted(nvml: FakeNvml, device: int, since: int) -> list[Any]:
        asked.append(since)
        return inner(nvml, device, since)

    monkeypatch.setattr(FakeNvml, "nvmlDeviceGetProcessUtilization", counted)

    async def main() -> list[int]:
        (gpu,) = await open_gpus(system=fake, nvml=Nvml(nvml), selftest=False)  # type: ignore[arg-type]
        process = backend.process.identity.identify(spawn().pid)
        fake.program(process.pid, 0, start=process.start)
        nvml.compute[0] = [(process.pid, MIB)]
        counts = []
        async with running(gpu) as h:
            await trio.sleep(SAMPLE_S)
            for times in (0, 10, 0):
                await trio.sleep(CLOSELY_S)
                asked.clear()
                for frozen in [1, 0] * times:
                    await h.write(f"{process.pid}/0/compute.freeze", frozen)
                    await trio.sleep(0.15)
                await trio.sleep(0 if times else 3)
                counts.append(len(asked))
        return counts

    virtual = MockClock(autojump_threshold=0.005)
    with patient(virtual, lambda: False):
        before, standing, after = trio.run(main, clock=virtual)
    assert 2 <= before <= 4
    assert standing >= 20
    assert after <= 4
