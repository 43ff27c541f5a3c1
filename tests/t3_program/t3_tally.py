"""Counts of groups across a change of daemon or GPU: compute.events and `frozen_usec`.

With the daemon's books, and with those of a kernel module: its double (tests/support/module_double.py) counts none of
these.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import trio
from trio.testing import MockClock

from backend.common import clock
from backend.core.controller import DEADLINE_S
from backend.core.member import NOTE_USEC, SAID
from backend.core.records import Activity
from backend.ledgers import kernel
from backend.ledgers.journal.file import Journal
from backend.ledgers.journal.ledger import JournaledLedger
from backend.ledgers.journal.levers import JournaledGpu
from backend.ledgers.journal.totals import WrittenTotals
from backend.ledgers.kernel import KernelLedger
from backend.ledgers.provider import ProviderGpu
from backend.process.identity import ROOT, Member, Slice, SliceOn
from tests.support import harness
from tests.support.harness import MIB, Harness, Spawn, StubGpu, World, running, until
from tests.support.journaled import BOOT, MEMORY, let_go
from tests.support.module_double import Module

NAMES = {0: "GPU-0", 1: "GPU-1"}
MODULE = sum(kernel.WITHOUT)


class Machine:
    """Two GPUs, and what outlives their daemon: the journal, the module if there is one, and the processes."""

    def __init__(self, path: Path, module: Module | None) -> None:
        self.world = World()
        self.gpus = [StubGpu(index) for index in NAMES]
        self._path = path
        self._module = module

    @contextlib.asynccontextmanager
    async def daemon(self, ended: str) -> AsyncIterator[Harness]:
        """Run the next daemon, which is in the end `killed`, or `upgraded`."""
        journal = Journal(self._path, boot=BOOT)
        count = harness.descriptors
        try:
            if self._module is None:
                ledger: Any = JournaledLedger(journal, NAMES)
                gpus: list[Any] = [JournaledGpu(gpu, journal) for gpu in self.gpus]
            else:
                ledger = KernelLedger(NAMES)
                gpus = [ProviderGpu(gpu, ledger, DEADLINE_S) for gpu in self.gpus]

            def descriptors() -> int:
                """Return the number of the daemon's descriptors, without the double's."""
                return count() - (self._module.descriptors() if self._module is not None else 0)

            memory = WrittenTotals(journal, NAMES)
            with mock.patch.object(harness, "descriptors", descriptors):
                async with running(*gpus, ledger=ledger, world=self.world, memory=memory) as h:
                    yield h
                    if ended == "upgraded":
                        h.controller.hand_over()
                    else:
                        memory.keep = lambda figures: None  # type: ignore[method-assign]
                        h.kill()
            ledger.close(handed_over=ended == "upgraded")
            if self._module is not None:
                self._module.bereave()
        finally:
            let_go(journal)


@pytest.fixture(params=["soft", "kernel"])
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    """A machine with the books of the parameter."""
    with tempfile.TemporaryDirectory(prefix="ggroup-journal-", dir=MEMORY) as folder:
        path = Path(folder) / "one.journal"
        if request.param == "soft":
            yield Machine(path, None)
        else:
            with Module(MODULE).loaded() as module:
                yield Machine(path, module)


async def flat(h: Harness, file: str) -> dict[str, int]:
    """Return the content of a flat keyed file."""
    return {name: int(value) for name, value in (line.split() for line in (await h.read(file)).splitlines())}


async def counted(h: Harness, group: str) -> dict[str, int]:
    """Return all that is counted of a group on a GPU."""
    events = await flat(h, f"{group}/compute.events")
    return {name: events[name] for name in ("migrated", "undone", "lost")}


async def frozen_usec(h: Harness, group: str) -> int:
    return (await flat(h, f"{group}/gcgroup.stat"))["frozen_usec"]


def lose(h: Harness, gpu: StubGpu) -> None:
    """Lose a GPU, which reports that itself."""
    gpu.lost = True
    h.controller.bookkeeper.presence(gpu.info.index)


def bring_back(h: Harness, gpu: StubGpu) -> None:
    """Bring a GPU back."""
    gpu.lost = False
    h.controller.bookkeeper.presence(gpu.info.index)


@pytest.mark.parametrize("ended", ["upgraded", "killed"])
def test_what_was_counted_goes_on_with_the_next_daemon(machine: Machine, spawn: Spawn, ended: str) -> None:
    """Counts of a process, its slices and the GPUs go on, however the daemon ended; and a loss that the next daemon
    finds is counted as the same loss."""
    pid = spawn().pid
    gpu = machine.gpus[1]
    seen: dict[str, dict[str, int]] = {}

    async def look(h: Harness) -> dict[str, dict[str, int]]:
        groups = (f"{pid}/1", "slice/job/1", "slice/job/0")
        found = {group: await counted(h, group) for group in groups}
        return {**found, "gpu": {"lost": (await flat(h, "gpus/1/gpu.events"))["lost"]}}

    async def first() -> None:
        async with machine.daemon(ended) as h:
            who = await h.arrive(pid, cgroup="/job")
            h.controller.bookkeeper.undone(who, 0)
            await h.write(f"{pid}/0/compute.migrate", "1")
            h.controller.bookkeeper.undone(who, 1)
            lose(h, gpu)
            bring_back(h, gpu)
            lose(h, gpu)
            seen.update(await look(h))
            assert seen == {
                f"{pid}/1": {"migrated": 1, "undone": 2, "lost": 2},
                "slice/job/1": {"migrated": 1, "undone": 1, "lost": 2},
                "slice/job/0": {"migrated": 0, "undone": 1, "lost": 0},
                "gpu": {"lost": 2},
            }

    async def second() -> None:
        async with machine.daemon(ended) as h:
            assert await look(h) == seen
            h.controller.bookkeeper.presence(1)
            assert await look(h) == seen, "it was lost before, and is so still"
            bring_back(h, gpu)
            h.controller.population.join(h.controller.population.by_pid(pid), 1)  # type: ignore[arg-type]
            await h.write(f"{pid}/1/compute.migrate", "0")
            assert await counted(h, f"{pid}/0") == {"migrated": 2, "undone": 2, "lost": 2}
            lose(h, gpu)
            bring_back(h, gpu)
            assert (await flat(h, "gpus/1/gpu.events"))["lost"] == 3
            assert (await counted(h, "slice/job/1"))["lost"] == 3

    trio.run(first)
    trio.run(second)


def test_a_gpu_that_is_back_before_the_next_daemon_is_lost_anew(
    machine: Machine, spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Gpu that is there from the start does not report that: it is noticed within TAKE_S."""
    gpu = machine.gpus[0]

    async def first() -> None:
        async with machine.daemon("upgraded") as h:
            lose(h, gpu)
        gpu.lost = False

    async def second() -> None:
        async with machine.daemon("killed") as h:
            await until(lambda: not h.controller.population.record(SliceOn(ROOT, 0)).taken.absent, "it is seen")
            lose(h, gpu)
            bring_back(h, gpu)
            assert (await flat(h, "gpus/0/gpu.events"))["lost"] == 2

    monkeypatch.setattr("backend.core.totals.TAKE_S", 0.01)
    trio.run(first)
    trio.run(second)


def test_a_killed_daemon_takes_a_second_along(machine: Machine, spawn: Spawn) -> None:
    """About a second of a running process's work is lost; the clock is virtual, and the process never idle."""
    pid, gpu = spawn().pid, machine.gpus[0]

    async def gpu_usec(h: Harness) -> int:
        return (await flat(h, "slice/job/0/gcgroup.stat"))["gpu_usec"]

    async def first() -> None:
        async with machine.daemon("killed") as h:
            who = await h.arrive(pid, cgroup="/job")
            for tenth in range(1, 96):
                gpu.works[who] = Activity(0, 0, 0, tenth * 100_000)
                await trio.sleep(0.1)
            assert await gpu_usec(h) == 9_500_000

    async def second() -> None:
        async with machine.daemon("killed") as h:
            assert 8_400_000 <= await gpu_usec(h) <= 9_500_000

    trio.run(first, clock=MockClock(autojump_threshold=0))
    gpu.works.clear()  # a GPU's work is counted by daemon
    trio.run(second)


@pytest.mark.parametrize("ended", ["upgraded", "killed"])
def test_the_time_that_a_group_was_to_be_frozen_goes_on(
    machine: Machine, spawn: Spawn, monkeypatch: pytest.MonkeyPatch, ended: str
) -> None:
    """A frozen process stays frozen while there is no daemon: that time counts, too."""
    pid, gap, boot_usec = spawn().pid, [0], clock.boot_usec
    groups = (f"{pid}/0", "slice/job/0", "slice/other/0")
    before: list[int] = []
    monkeypatch.setattr(clock, "boot_usec", lambda: boot_usec() + gap[0])

    async def first() -> None:
        async with machine.daemon(ended) as h:
            await h.arrive(pid, cgroup="/job")
            for name in ("slice/job/other", "slice/other"):
                h.controller.population.make(Slice(name.removeprefix("slice")))
            await h.write("slice/other/0/compute.freeze", "1")
            await trio.sleep(0.02)
            await h.write("slice/other/0/compute.freeze", "0")
            await h.write("slice/job/0/compute.freeze", "1")
            await trio.sleep(0.05)
            before.extend([await frozen_usec(h, group) for group in groups])
            assert min(before) >= 20_000

    async def second() -> None:
        async with machine.daemon(ended) as h:
            now = [await frozen_usec(h, group) for group in groups]
            assert now[2] == before[2], "it was thawed before"
            assert all(found >= known + 3_000_000 for found, known in zip(now[:2], before[:2], strict=True))
            await h.write("slice/job/0/compute.freeze", "0")
            now = [await frozen_usec(h, group) for group in groups]
            await trio.sleep(0.02)
            assert [await frozen_usec(h, group) for group in groups] == now

    trio.run(first)
    gap[0] = 3_000_000
    trio.run(second)


@pytest.mark.parametrize("ended", ["upgraded", "killed"])
def test_the_memory_that_was_held_goes_on(
    machine: Machine, spawn: Spawn, monkeypatch: pytest.MonkeyPatch, ended: str
) -> None:
    """Memory stays held while there is no daemon: that time counts, too. The start of the count is kept."""
    pid, gap, boot_usec = spawn().pid, [0], clock.boot_usec
    group, above, idle = f"{pid}/0", "slice/job/0", "slice/idle/0"
    monkeypatch.setattr(clock, "boot_usec", lambda: boot_usec() + gap[0])
    monkeypatch.setattr("backend.core.totals.TAKE_S", 0.01)
    monkeypatch.setattr("time.time", lambda: 1000.0 + gap[0])

    async def held(h: Harness, group: str) -> int:
        return (await flat(h, f"{group}/gmem.stat"))["byte_seconds"]

    async def since(h: Harness, group: str) -> int:
        return (await flat(h, f"{group}/gcgroup.stat"))["since"]

    async def first() -> None:
        async with machine.daemon(ended) as h:
            who = await h.arrive(pid, cgroup="/job")
            h.controller.population.make(Slice("/idle"))
            assert await held(h, above) == 0
            await h.controller.bookkeeper.charge(who, 0, 100 * MIB)
            record = h.controller.population.record
            kept = [Member(who, 0), SliceOn(Slice("/job"), 0)]
            await until(lambda: all(record(one).taken.held.nbytes for one in kept), "it is taken down")
            await until(lambda: not record(SliceOn(Slice("/idle"), 0)).taken.stale, "that is, too")
            gap[0] += 10_000_000
            for one in (group, above):
                assert 1000 * MIB <= await held(h, one) <= 1200 * MIB

    async def second() -> None:
        async with machine.daemon(ended) as h:
            for one in (group, above):
                assert 2000 * MIB <= await held(h, one) <= 2400 * MIB
            assert await held(h, idle) == 0
            assert [await since(h, one) for one in (group, above, idle)] == [1000] * 3
            resident = h.controller.population.by_pid(pid)
            assert resident is not None
            h.controller.bookkeeper.observe(resident.process, 0, 50 * MIB)  # the GPU reports it again
            before = await held(h, above)
            gap[0] += 10_000_000
            assert 500 * MIB <= await held(h, above) - before <= 600 * MIB
            h.controller.population.make(Slice("/new"))
            assert await since(h, "slice/new/0") == 1000 + gap[0]

    trio.run(first)
    gap[0] += 10_000_000
    trio.run(second)


def test_memory_of_what_ended_without_a_daemon(machine: Machine, spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slice is not billed for the whole time until the next daemon."""
    process, gap, boot_usec = spawn(), [0], clock.boot_usec
    monkeypatch.setattr(clock, "boot_usec", lambda: boot_usec() + gap[0])
    monkeypatch.setattr("backend.core.totals.TAKE_S", 0.01)

    async def first() -> None:
        async with machine.daemon("killed") as h:
            who = await h.arrive(process.pid, cgroup="/job")
            h.controller.population.keep(Slice("/job"))
            await h.controller.bookkeeper.charge(who, 0, MIB)
            job = SliceOn(Slice("/job"), 0)
            await until(lambda: h.controller.population.record(job).taken.held.nbytes, "it is taken down")

    async def second() -> None:
        async with machine.daemon("killed") as h:
            held = (await flat(h, "slice/job/0/gmem.stat"))["byte_seconds"]
            assert NOTE_USEC / 1e6 * MIB <= held <= (NOTE_USEC / 1e6 + 60) * MIB

    trio.run(first)
    process.kill()
    process.wait()
    gap[0] += 100 * NOTE_USEC
    trio.run(second)


def test_a_journal_from_before_and_one_of_later(machine: Machine, spawn: Spawn) -> None:
    """A daemon without these counts left figures of work alone; a later one leaves more figures, which are kept."""
    pid = spawn().pid

    async def first() -> None:
        async with machine.daemon("killed") as h:
            who = await h.arrive(pid, cgroup="/job")
            memory = h.controller._totals._memory
            memory.keep({SliceOn(Slice("/job"), 0): {"gpu_usec": 7}, Member(who, 0): {"gpu_usec": 7, "spilt": 5}})

    async def second() -> None:
        async with machine.daemon("killed") as h:
            assert await counted(h, f"{pid}/0") == {"migrated": 0, "undone": 0, "lost": 0}
            assert await frozen_usec(h, "slice/job/0") == 0
            [who] = [one.process for one in h.controller.population.residents()]
            h.controller.bookkeeper.undone(who, 0)
            kept = h.controller._totals._memory.kept()
            own = {name: value for name, value in kept[0, who].items() if not name.startswith(SAID)}
            assert own == {"gpu_usec": 7, "spilt": 5, "undone": 1}
            assert kept[0, Slice("/job")] == {"gpu_usec": 7, "undone": 1}

    trio.run(first)
    trio.run(second)


@harness.virtual
async def test_the_time_goes_with_a_process_to_another_gpu(spawn: Spawn) -> None:
    """The time is the process's own, and counts once where both GPUs have a directory; it was not of the slice."""
    async with running(StubGpu(0), StubGpu(1)) as h:
        one, both = [await h.arrive(spawn().pid, cgroup="/job") for _ in range(2)]
        h.controller._membership.admit(both, {1})
        await h.write(f"{both.pid}/1/compute.freeze", "1")
        await trio.sleep(1)
        for who, known in ((one, 0), (both, 6_000_000)):
            await h.write(f"{who.pid}/0/compute.freeze", "1")
            await trio.sleep(2)
            assert await frozen_usec(h, f"{who.pid}/0") == 2_000_000
            await h.write(f"{who.pid}/0/compute.migrate", "1")
            assert await frozen_usec(h, f"{who.pid}/1") == max(2_000_000, known)
            await trio.sleep(1)
            assert await frozen_usec(h, f"{who.pid}/1") == max(2_000_000, known) + 1_000_000, "it stands there"
        assert await frozen_usec(h, "slice/job/1") == 0
