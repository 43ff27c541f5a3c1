"""Space within a slice: its programs run at the same time, and the slice is one contender, in virtual time."""

from __future__ import annotations

import contextlib
import errno
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
import trio

from backend.process.identity import Member, Process
from backend.soft.config import SoftConfig
from backend.soft.gpu import SoftGpu
from backend.soft.machine import Machine
from tests.support.contenders import Bench, Programs
from tests.support.harness import MIB, running, until, virtual

Spawn = Callable[..., subprocess.Popen[bytes]]


@contextlib.asynccontextmanager
async def programs(spawn: Spawn) -> AsyncIterator[Programs]:
    """Run a GPU with a scheduler, a spatial slice, and the programs on it."""
    gpu = Bench()
    async with running(gpu, scheduler=True) as h, trio.open_nursery() as nursery:
        for slice_ in ("jobs", "other"):
            await h.operations.mkdir(await h.inode("slice"), slice_.encode(), 0o755, h.ctx)
        await h.write("slice/jobs/0/compute.spatial", 1)
        yield Programs(h, gpu, spawn, nursery)
        nursery.cancel_scope.cancel()


def used(p: Programs, process: Process) -> int:
    """Return the engine time of a program, microseconds; in a space, its part of what that had."""
    activity = p.gpu.activity(process)
    found = activity.gpu_usec_estimate if activity.beside else activity.gpu_usec
    assert found is not None
    return found


async def shares(p: Programs, groups: Sequence[Sequence[Process]], seconds: float = 10.0) -> list[float]:
    """Return the part of the time that each group of programs has together."""
    await trio.sleep(3)
    before = [sum(used(p, one) for one in group) for group in groups]
    await trio.sleep(seconds)
    after = [sum(used(p, one) for one in group) for group in groups]
    return [(now - was) / seconds / 1e6 for now, was in zip(after, before, strict=True)]


def finished(p: Programs, process: Process) -> int:
    done = p.gpu.activity(process).finished
    assert done is not None
    return done


@virtual
async def test_a_space_is_one_contender_and_its_programs_run_at_the_same_time(spawn: Spawn) -> None:
    """Four in a space have half of the time beside one that is outside, and each of them does as much as that one."""
    async with programs(spawn) as p:
        inside = [await p.batch("/jobs") for _ in range(4)]
        outside = await p.batch("/other")
        before = [finished(p, one) for one in (*inside, outside)]
        assert await shares(p, [inside, [outside]]) == pytest.approx([0.5, 0.5], rel=0.05)
        done = [finished(p, one) - was for one, was in zip((*inside, outside), before, strict=True)]
        assert done == pytest.approx([done[-1]] * 5, rel=0.05)


@virtual
async def test_the_weight_of_the_slice_is_that_of_all_of_them(spawn: Spawn) -> None:
    async with programs(spawn) as p:
        inside = [await p.batch("/jobs"), await p.batch("/jobs")]
        outside = await p.batch("/other")
        await p.h.write("slice/jobs/0/compute.weight", 300)
        assert await shares(p, [inside, [outside]]) == pytest.approx([0.75, 0.25], rel=0.05)


@virtual
async def test_in_its_slice_a_space_counts_as_its_programs_together(spawn: Spawn) -> None:
    """Beside one that came before the slice was spatial: two to one."""
    async with programs(spawn) as p:
        await p.h.write("slice/jobs/0/compute.spatial", 0)
        before = await p.batch("/jobs")
        await p.h.write("slice/jobs/0/compute.spatial", 1)
        inside = [await p.batch("/jobs"), await p.batch("/jobs")]
        assert not p.gpu.activity(before).beside
        assert await shares(p, [inside, [before]]) == pytest.approx([2 / 3, 1 / 3], rel=0.05)


@virtual
async def test_behind_a_better_priority_all_of_them_wait_together(spawn: Spawn) -> None:
    async with programs(spawn) as p:
        inside = [await p.batch("/jobs"), await p.batch("/jobs")]
        outside = await p.batch("/other")
        await p.h.write("slice/other/0/compute.priority", 0)
        await trio.sleep(5)
        for _ in range(200):
            attached = {p.gpu.is_attached(one) for one in inside}
            assert len(attached) == 1 or any(p.gpu._tenants[one].gate.is_closed for one in inside)
            await trio.sleep(0.013)
        got = await shares(p, [inside, [outside]])
        assert got[1] > 0.9


@virtual
async def test_a_quota_of_the_slice_is_of_what_the_space_has(spawn: Spawn) -> None:
    async with programs(spawn) as p:
        inside = [await p.batch("/jobs") for _ in range(3)]
        await p.h.write("slice/jobs/0/compute.max", "30000 100000")
        got = await shares(p, [inside], seconds=20)
        assert 0.2 < got[0] < 0.32


@virtual
async def test_a_freeze_of_one_leaves_the_others(spawn: Spawn) -> None:
    async with programs(spawn) as p:
        one, other = await p.batch("/jobs"), await p.batch("/jobs")
        await p.h.write(f"{one.pid}/0/compute.freeze", 1)
        before = finished(p, one), finished(p, other)
        await trio.sleep(1)
        assert finished(p, one) == before[0]
        assert finished(p, other) > before[1]
        await p.h.write("slice/jobs/0/compute.freeze", 1)
        before = finished(p, one), finished(p, other)
        await trio.sleep(1)
        assert (finished(p, one), finished(p, other)) == before


@virtual
async def test_what_is_not_of_one_alone_is_refused(spawn: Spawn) -> None:
    """Of what it is in, and of a slice within the space. The whole slice has a timeslice, undivided."""
    async with programs(spawn) as p:
        one = await p.batch("/jobs/below")
        await p.batch("/jobs")
        for place in (f"{one.pid}", "slice/jobs/below"):
            assert await p.h.refused(f"{place}/0/compute.timeslice", 4) == errno.EOPNOTSUPP
        await p.h.write("slice/jobs/0/compute.timeslice", 4)
        assert p.h.controller.wanted(Member(one, 0)).timeslice_us == 4000
        assert await p.h.refused(f"{one.pid}/0/compute.spatial", 1) == errno.EINVAL


@virtual
async def test_none_of_them_moves_to_another_gpu(spawn: Spawn) -> None:
    machine = Machine(2)
    gpus = [SoftGpu(index, SoftConfig(capacity=64 * MIB), machine) for index in range(2)]
    async with running(*gpus) as h:
        await h.operations.mkdir(await h.inode("slice"), b"jobs", 0o755, h.ctx)
        await h.write("slice/jobs/0/compute.spatial", 1)
        process = await h.arrive(spawn().pid, "/jobs")
        await gpus[0].open_context(process, 8, lambda finished: None)
        for place in (f"{process.pid}/0", "slice/jobs/0"):
            assert await h.refused(f"{place}/compute.migrate", 1) == errno.EOPNOTSUPP


@virtual
async def test_one_stays_in_its_space_until_it_ends(spawn: Spawn) -> None:
    """Whatever becomes of the setting; and nothing of the space is left then."""
    async with programs(spawn) as p:
        popen = spawn()
        process = await p.h.arrive(popen.pid, "/jobs")
        await p.gpu.open_context(process, 8, lambda finished: None)
        spaces = p.h.controller.spaces
        await p.h.write("slice/jobs/0/compute.spatial", 0)
        assert spaces.of(process) is not None
        assert p.gpu.activity(process).beside
        late = await p.batch("/jobs")
        assert spaces.of(late) is None
        popen.kill()
        await p.h.gone(process)
        await until(lambda: not spaces.any(), "its space has heard of it")
        assert not spaces._running


@virtual
async def test_nothing_is_left_of_spaces_whose_slice_is_gone(spawn: Spawn) -> None:
    """Their programs had ended before; else there would be none any more after some of them."""
    async with programs(spawn) as p:
        spaces = p.h.controller.spaces
        for name in ("a", "b", "c"):
            await p.h.operations.mkdir(await p.h.inode("slice"), name.encode(), 0o755, p.h.ctx)
            await p.h.write(f"slice/{name}/0/compute.spatial", 1)
            popen = spawn()
            process = await p.h.arrive(popen.pid, f"/{name}")
            await p.gpu.open_context(process, 8, lambda finished: None)
            popen.kill()
            await p.h.gone(process)
            await until(lambda: not spaces.any(), "its space has heard of it")
            await p.h.operations.rmdir(await p.h.inode("slice"), name.encode(), p.h.ctx)
        await p.batch("/jobs")
        assert len(spaces._running) == 1


@virtual
async def test_the_outermost_slice_counts(spawn: Spawn) -> None:
    """Whatever a slice within says, the space is that of the outer one; users have spaces of their own."""
    async with programs(spawn) as p:
        inner = await p.batch("/jobs/below")
        await p.h.write("slice/jobs/below/0/compute.spatial", 1)
        other = await p.batch("/jobs/below")
        spaces = p.h.controller.spaces
        assert spaces.of(inner) == spaces.of(other)
        space = spaces.of(other)
        assert space is not None
        assert space.slice.path == "/jobs"
        stranger = await p.h.arrive(spawn().pid, "/jobs")
        assert await spaces.enter(stranger, space.slice, space.uid + 1) not in (0, space.number)
