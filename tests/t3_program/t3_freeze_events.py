"""Events of a freeze with processes: whenever compute.events changes, its pollers are woken."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable

import pytest
import trio

from backend.core.records import Channel
from backend.process.identity import Group, Member, Slice, SliceOn, group_on
from ggroupfs.fs.inodes import ROOT_INODE
from tests.support.harness import Harness, StubGpu, running, settle, until, virtual

Spawn = Callable[..., subprocess.Popen[bytes]]

SLICES = ("/job", "/job/a", "/job/a/b", "/job/c")


async def frozen(h: Harness, path: str) -> bool:
    return "frozen 1" in await h.read(f"{path}/0/compute.events")


async def mkdir(h: Harness, path: str) -> None:
    above, _, name = path.rpartition("/")
    await h.operations.mkdir(await h.inode(above) if above else ROOT_INODE, name.encode(), 0o755, h.ctx)


def place(slice_: str) -> str:
    return f"slice{slice_}"


@virtual
async def test_a_slice_whose_members_alone_are_frozen_is_not(spawn: Spawn) -> None:
    """As in cgroup.events: `frozen` is of a cgroup that was frozen itself, or through one above it."""
    async with running() as h:
        who = await h.arrive(spawn().pid, cgroup="/job")
        await h.write(f"{who.pid}/0/compute.freeze", 1)
        assert await frozen(h, str(who.pid))
        assert not await frozen(h, "slice/job")
        await h.write("slice/job/0/compute.freeze", 1)
        assert await frozen(h, "slice/job")
        await h.write(f"{who.pid}/0/compute.freeze", 0)
        assert await frozen(h, str(who.pid)), "the slice holds it"
        assert await frozen(h, "slice/job")


@virtual
async def test_a_freeze_wakes_everybody_below(spawn: Spawn) -> None:
    """An empty slice, a process, and a slice that was made below a frozen one."""
    async with running() as h:
        who = await h.arrive(spawn().pid, cgroup="/job/a")
        await mkdir(h, "slice/job/empty")
        groups = [Member(who, 0), *(SliceOn(Slice(path), 0) for path in ("/job", "/job/a", "/job/empty"))]
        for value in (1, 0, 1):
            before = {group: h.events.count(group, Channel.COMPUTE) for group in groups}
            await h.write("slice/job/0/compute.freeze", value)
            after = {group: h.events.count(group, Channel.COMPUTE) for group in groups}
            assert {group: after[group] - before[group] for group in groups} == dict.fromkeys(groups, 1)
        await mkdir(h, "slice/job/late")
        late = SliceOn(Slice("/job/late"), 0)
        assert await frozen(h, "slice/job/late"), "it is so from the start"
        assert not h.events.count(late, Channel.COMPUTE)
        await h.write("slice/job/0/compute.freeze", 0)
        assert h.events.count(late, Channel.COMPUTE) == 1


@virtual
async def test_a_process_that_is_made_in_a_frozen_slice_is_frozen(spawn: Spawn) -> None:
    """It is made by mkdir, before it has a context. Until it is frozen, the slice is not; both changes are events."""
    async with running() as h:
        await mkdir(h, "slice/job")
        await h.write("slice/job/0/compute.freeze", 1)
        before = h.events.count(SliceOn(Slice("/job"), 0), Channel.COMPUTE)
        pid = spawn().pid
        h.world.cgroups[pid] = Slice("/job")
        await mkdir(h, str(pid))
        assert not await frozen(h, "slice/job")
        assert h.events.count(SliceOn(Slice("/job"), 0), Channel.COMPUTE) == before + 1
        await until(lambda: h.controller.is_frozen(SliceOn(Slice("/job"), 0)), "it is frozen")
        assert h.events.count(SliceOn(Slice("/job"), 0), Channel.COMPUTE) == before + 2


@pytest.mark.parametrize("seed", range(4))
@virtual
async def test_nothing_changes_without_an_event(spawn: Spawn, seed: int) -> None:
    """After any history, compute.events of a group says what it said at the group's last event."""
    draw = random.Random(seed)
    async with running(StubGpu()) as h:
        for path in SLICES:
            await mkdir(h, place(path))
        processes = [await h.arrive(spawn().pid, cgroup=draw.choice(SLICES)) for _ in range(4)]
        groups = [group_on(one, 0) for one in (*map(Slice, SLICES), *processes)]
        said: dict[Group, tuple[int, bool]] = {}
        for _ in range(60):
            for group in groups:
                count, now = h.events.count(group, Channel.COMPUTE), h.controller.is_frozen(group)
                if group in said and said[group][0] == count:
                    assert said[group][1] == now, group
                said[group] = count, now
            if draw.random() < 0.3:
                who = draw.choice(processes)
                there = h.world.cgroups[who.pid] = Slice(draw.choice(SLICES))
                if (resident := h.controller.population.resident(who)) and resident.slice != there:
                    h.controller._membership._relocate(resident, there)
                if draw.random() < 0.5:
                    await settle()
            else:
                name = draw.choice([*map(place, SLICES), *(str(process.pid) for process in processes)])
                await h.write(f"{name}/0/compute.freeze", draw.choice((0, 1)))
        await settle()  # until a moved process is in the state that its new place asks for


@virtual
async def test_the_time_that_a_group_was_to_be_frozen(spawn: Spawn) -> None:
    """frozen_usec in gcgroup.stat is as in cgroup.stat.local: frozen itself or from above, counted once if both."""
    async with running() as h:
        who = await h.arrive(spawn().pid, cgroup="/job/a")
        await mkdir(h, "slice/job/b")

        async def usec(path: str) -> int:
            stat = dict(line.split() for line in (await h.read(f"{path}/0/gcgroup.stat")).splitlines())
            return int(stat["frozen_usec"])

        await h.write(f"{who.pid}/0/compute.freeze", 1)
        await trio.sleep(1)
        await h.write("slice/job/0/compute.freeze", 1)
        await trio.sleep(2)
        await mkdir(h, "slice/job/c")
        await h.write(f"{who.pid}/0/compute.freeze", 0)
        await trio.sleep(4)
        found = {path: await usec(path) for path in (str(who.pid), "slice/job", "slice/job/a", "slice/job/b")}
        assert found == {str(who.pid): 7_000_000, **dict.fromkeys(found.keys() - {str(who.pid)}, 6_000_000)}
        await h.write("slice/job/0/compute.freeze", 0)
        await trio.sleep(8)
        assert {path: await usec(path) for path in found} == found, "it is not frozen any more"
        assert await usec("slice/job/c") == 4_000_000
