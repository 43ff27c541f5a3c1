"""Spatial slices on a real GPU: members run at the same time, are one to others, and a fault stays in its slice."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from ggroupfs.client import Member
from tests.support.cgroups import cgroup2
from tests.support.mounted import Mounted, mounted
from tests.t7_nvidia.conftest import Worker, built, rates, wait_for
from tests.t7_nvidia.placing import ERROR, FAULT, together
from tests.t7_nvidia.programs import GIB, MIB, STOP, Program, current, group_of, member, program, run_in, write
from tests.t7_nvidia.spaces import (
    BESIDE,
    SAID,
    client_bytes,
    go_on,
    is_beside,
    logs,
    placed_in,
    record_of,
    servers,
    several,
    spatial,
    stand,
)

Start = Callable[..., Worker]

COUNT = 4
"""Number of programs with small kernels in a slice: together they have work for 32 SMs."""
WINDOW_S, SETTLED_S = 1.5, 0.5
"""Seconds over which progress is measured, and those before that in which a change acts."""
HALF = 0.1
"""Part by which the share of a program outside may be off; tests/experiments/space_gpu.py measures it better."""
BACK_S = 2.0
"""Seconds until a slice has a server again, at most."""
FROZEN_S, TIMES = 0.5, 5
"""Seconds that a slice is frozen, and how often."""
STEADY_S = 1.0
"""Seconds for which a member goes on without its server before it is taken to."""
ILLEGAL, OUT_OF_MEMORY = 700, 2
"""cudaErrorIllegalAddress and cudaErrorMemoryAllocation."""
LOST = range(805, 812)
"""cudaErrorMpsConnectionFailed to cudaErrorMpsClientTerminated: what a call says that needs the server."""


@pytest.fixture(scope="session")
def placed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return built(tmp_path_factory, "placed")


@pytest.fixture(scope="module")
def gpu_mount(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    """A mounted tree whose daemon may say that a server ended."""
    with mounted(tmp_path_factory.mktemp("ggroup"), gpu="nvidia", expect_errors=SAID) as mount:
        yield mount


def refused(group: Member, name: str, value: object) -> int | None:
    """Return the errno of a write; None where it holds."""
    try:
        write(group, name, value)
    except OSError as error:
        return error.errno
    return None


@contextlib.contextmanager
def timed(mount: Mounted, binary: str, within: str) -> Iterator[tuple[Program, float]]:
    """Run a member, and yield it with the seconds from its start to its first kernels."""
    began = time.monotonic()
    with placed_in(mount, binary, within) as run:
        yield run, time.monotonic() - began


@pytest.mark.timeout(120)
def test_members_run_at_the_same_time(gpu_mount: Mounted, placed: str) -> None:
    """Each does about as much as alone, and the tree shows each with its memory and its kernels."""
    assert "compute.spatial enforced\n" in (gpu_mount / "ggroup.capabilities").read_text()
    with spatial(gpu_mount, "beside") as (name, slice_), placed_in(gpu_mount, placed, name) as first:
        time.sleep(SETTLED_S)
        (alone,) = together([first], WINDOW_S)
        with several(gpu_mount, placed, name, COUNT - 1) as others:
            runs = [first, *others]
            groups = [Member(run.pid, 0, gpu_mount.group(run.pid)) for run in runs]
            time.sleep(SETTLED_S)
            before = [group.flat("gcgroup.stat") for group in groups]
            each = together(runs, WINDOW_S)
            after = [group.flat("gcgroup.stat") for group in groups]
            print(f"alone {alone:.0f}/s, beside each other {' '.join(f'{one:.0f}' for one in each)}")
            assert len(servers(record_of(gpu_mount, name))) == 1
            assert all(map(is_beside, groups))
            finished, usec = (
                [then[key] - was[key] for was, then in zip(before, after, strict=True)]
                for key in ("finished", "gpu_usec_estimate")
            )
            print(f"of the engine, each of {WINDOW_S} s: {' '.join(f'{one / 1e6:.2f}' for one in usec)}")
            assert 0 < sum(usec) <= 1.5e6 * WINDOW_S
            for group, grew in zip(groups, finished, strict=True):
                assert "gpu_usec" not in group.flat("gcgroup.stat")
                assert grew > 0.5 * BESIDE * alone * WINDOW_S
                assert 0 < client_bytes(group.pid) <= current(group) + 64 * MIB
            assert current(slice_) >= sum(current(group) for group in groups)
            assert min(each) >= BESIDE * alone
            for run in others:
                run.finish()
        first.finish()


@pytest.mark.timeout(120)
def test_a_space_is_one_contender(gpu_mount: Mounted, placed: str, worker: Start) -> None:
    """A program outside, of equal weight, has half of the time, however many there are in the space."""
    outside = worker()
    group_of(gpu_mount, outside)
    time.sleep(SETTLED_S)
    (full,) = rates(outside)
    with spatial(gpu_mount, "one") as (name, _), several(gpu_mount, placed, name, COUNT) as runs:
        time.sleep(3)  # as long as shares take
        (share,) = (one / full for one in rates(outside, seconds=3))
        each = together(runs, WINDOW_S)
        print(f"outside: {share:.3f} of the time; members {' '.join(f'{one:.0f}' for one in each)}")
        assert share == pytest.approx(0.5, abs=HALF)
        assert min(each) > 0
        for run in runs:
            run.finish()


@pytest.mark.timeout(180)
def test_a_freeze_of_the_slice_is_of_all(gpu_mount: Mounted, placed: str, worker: Start) -> None:
    """No member finishes a kernel, one outside goes on, and after the thaw all do: no kernel is lost."""
    outside = worker()
    group_of(gpu_mount, outside)
    with spatial(gpu_mount, "frozen") as (name, slice_), several(gpu_mount, placed, name, COUNT) as runs:
        for number in range(TIMES):
            start = time.monotonic()
            write(slice_, "compute.freeze", 1)
            took = time.monotonic() - start
            count = outside.finished
            made = stand(runs, 0.05, FROZEN_S)
            assert made == [0] * COUNT, (number, made)
            assert outside.finished > count
            assert slice_.flat("compute.events")["frozen"] == 1
            write(slice_, "compute.freeze", 0)
            back = go_on(runs, 2)
            print(f"{number}: written in {1e3 * took:.1f} ms, all go on {1e3 * back:.1f} ms after the thaw")
        for run in runs:
            run.finish()
    outside.drained()


@pytest.mark.timeout(120)
def test_a_freeze_of_one_is_by_its_gate(gpu_mount: Mounted, placed: str) -> None:
    """The others keep their speed, and that one stands until it is thawed."""
    with spatial(gpu_mount, "gate") as (name, _), several(gpu_mount, placed, name, COUNT) as runs:
        time.sleep(SETTLED_S)
        before = together(runs, WINDOW_S)
        first, others = Member(runs[0].pid, 0, gpu_mount.group(runs[0].pid)), runs[1:]
        write(first, "compute.freeze", 1)
        assert first.flat("compute.events")["frozen"] == 1
        assert stand(runs[:1], 0.05, FROZEN_S) == [0]
        beside = together(others, WINDOW_S)
        assert min(now / was for now, was in zip(beside, before[1:], strict=True)) >= BESIDE
        write(first, "compute.freeze", 0)
        go_on(runs, 2)
        for run in runs:
            run.finish()


@pytest.mark.timeout(120)
def test_what_cannot_be_of_one_is_refused(gpu_mount: Mounted, placed: str) -> None:
    with spatial(gpu_mount, "refused") as (name, slice_), placed_in(gpu_mount, placed, name) as run:
        group = Member(run.pid, 0, gpu_mount.group(run.pid))
        assert refused(group, "compute.timeslice", 4) == errno.EOPNOTSUPP
        assert refused(group, "compute.migrate", 1) == errno.EOPNOTSUPP
        assert refused(group, "compute.spatial", 1) == errno.EINVAL
        assert refused(slice_, "compute.timeslice", 4) is None
        go_on([run], 2)
        run.finish()


@pytest.mark.timeout(180)
def test_memory_limits_are_as_outside(gpu_mount: Mounted, placed: str, elastic: str) -> None:
    """A limit of one moves its memory and no other's, its words stay right, and beyond both limits there is no more."""
    with spatial(gpu_mount, "memory") as (name, slice_), placed_in(gpu_mount, placed, name) as other:
        words = run_in(gpu_mount, within=name)
        with program(*words, elastic, "PAGE", "4096") as run:
            group = member(gpu_mount, run)
            assert is_beside(group)
            assert client_bytes(run.pid) >= 4 * GIB
            for level, limit in ((group, 2 * GIB), (slice_, 3 * GIB)):
                write(level, "gmem.limit.high", limit)
                wait_for(
                    lambda limit=limit: client_bytes(run.pid) <= limit + 64 * MIB,  # type: ignore[misc]
                    "NVML agrees",
                    seconds=5,
                )
                assert current(level) <= limit
                go_on([run, other], 60)
                write(level, "gmem.limit.high", "max")
                wait_for(lambda: client_bytes(run.pid) >= 4 * GIB, "all is back")
            run.finish()
        limits = ("gmem.limit.high=2G", "gmem.swap.max=0")
        with program(*run_in(gpu_mount, *limits, within=name), elastic, "PAGE", "4096") as run:
            assert run.process.wait(60) == 1
            assert run.u32(ERROR) == OUT_OF_MEMORY
        with program(*run_in(gpu_mount, *limits, within=name), elastic, "PAGE", "1024") as run:
            member(gpu_mount, run)
            assert run.u64(32) == 2 * GIB, "it sees its limit"
            run.finish()
        other.finish()


@contextlib.contextmanager
def untouched(mount: Mounted, placed: str, worker: Start) -> Iterator[None]:
    """Run two programs of another spatial slice and one outside, which are to keep on and to lose no kernel."""
    outside = worker()
    group_of(mount, outside)
    with spatial(mount, "other") as (name, slice_), several(mount, placed, name, 2) as others:
        yield
        print(f"the others go on after {go_on(others, 1):.3f} s,", end=" ")
        count = outside.finished
        print(f"the one outside after {wait_for(lambda: outside.finished > count, 'it goes on', seconds=1):.3f}")
        assert slice_.flat("compute.events").get("server_lost", 0) == 0
        for run in others:
            run.finish()
        outside.drained()


def ended(runs: Sequence[Program], seconds: float) -> bool:
    """Return whether all of them end by themselves within some seconds."""
    until = time.monotonic() + seconds
    while any(run.process.poll() is None for run in runs):
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True


def fate(run: Program, seconds: float) -> str:
    """Return what becomes of a member without its server: within some seconds it ends, goes on, or does neither. It
    goes on if it does so for STEADY_S: kernels that were under way run, and its next call fails."""
    until = time.monotonic() + seconds
    while run.process.poll() is None and time.monotonic() < until:
        (done,) = stand([run], STEADY_S, STEADY_S)
        if done and run.process.poll() is None:
            return f"goes on with {done} kernels in {STEADY_S} s"
    return "hangs" if run.process.poll() is None else f"ends with error {run.u32(ERROR)}"


@pytest.mark.timeout(180)
def test_a_fault_stays_in_its_slice(gpu_mount: Mounted, placed: str, worker: Start) -> None:
    """A member writes to an illegal address: all of its space get an error, and one that comes then is served within
    2 s more than usual, by the same server if the driver keeps it (580 does) or by another one, which is counted."""
    with (
        untouched(gpu_mount, placed, worker),
        spatial(gpu_mount, "fault") as (name, slice_),
        timed(gpu_mount, placed, name) as (first, usual),
        placed_in(gpu_mount, placed, name) as second,
    ):
        before = servers(record_of(gpu_mount, name))
        lost = slice_.flat("compute.events")["server_lost"]
        first.set(FAULT, 1)
        assert ended([first, second], 10), "both have an error"
        print(f"errors {first.u32(ERROR)} and {second.u32(ERROR)}")
        print(logs(gpu_mount, name), flush=True)
        assert first.u32(ERROR) >= ILLEGAL  # or another one that says that the context is lost
        assert second.u32(ERROR) != 0
        with timed(gpu_mount, placed, name) as (third, took):
            after = servers(record_of(gpu_mount, name))
            print(f"served {took:.2f} s after its start, {usual:.2f} before; servers {before} and {after}")
            assert took <= usual + BACK_S
            assert is_beside(Member(third.pid, 0, gpu_mount.group(third.pid)))
            assert slice_.flat("compute.events")["server_lost"] == lost + (after != before)
            third.finish()


@pytest.mark.timeout(180)
def test_one_is_killed(gpu_mount: Mounted, placed: str, worker: Start) -> None:
    """Whether the other members go on or have an error, its memory is free, and one that comes then is served."""
    with (
        untouched(gpu_mount, placed, worker),
        spatial(gpu_mount, "killed") as (name, slice_),
        timed(gpu_mount, placed, name) as (first, usual),
        placed_in(gpu_mount, placed, name) as second,
    ):
        own = current(Member(first.pid, 0, gpu_mount.group(first.pid)))
        held = current(slice_)
        count = second.passes
        first.process.kill()
        first.process.wait()
        wait_for(lambda: second.passes > count or second.process.poll() is not None, "it goes on, or has an error")
        wait_for(lambda: current(slice_) <= held - own, "its memory is free")
        time.sleep(SETTLED_S)
        print(f"the other {'goes on' if second.process.poll() is None else f'has error {second.u32(ERROR)}'}")
        with timed(gpu_mount, placed, name) as (third, took):
            print(f"served {took:.2f} s after its start, {usual:.2f} before")
            assert took <= usual + BACK_S
            third.finish()
        if second.process.poll() is None:
            second.finish()


@pytest.mark.timeout(180)
def test_its_server_is_killed(gpu_mount: Mounted, placed: str, worker: Start) -> None:
    """As its user could: the members end, or go on by themselves, the slice has another one, and nothing else does."""
    with (
        untouched(gpu_mount, placed, worker),
        spatial(gpu_mount, "server") as (name, slice_),
        timed(gpu_mount, placed, name) as (first, usual),
    ):
        (server,) = servers(record_of(gpu_mount, name))
        os.kill(server, signal.SIGKILL)
        back = wait_for(
            lambda: servers(record_of(gpu_mount, name)) not in ([], [server]), "another one", seconds=BACK_S
        )
        became = fate(first, 10)
        print(f"another server after {back:.2f} s; the member {became}")
        print(logs(gpu_mount, name), flush=True)
        with timed(gpu_mount, placed, name) as (third, took):
            print(f"served {took:.2f} s after its start, {usual:.2f} before")
            assert took <= usual + BACK_S
            assert slice_.flat("compute.events")["server_lost"] == 1
            go_on([third], 2)
            third.finish()
        assert became != "hangs"
        if first.process.poll() is None:  # what goes on does so without a server until it asks something of that
            first.set(STOP, 1)
            assert first.process.wait(120) == 0 or first.u32(ERROR) in LOST, first.u32(ERROR)
            assert first.u64(16) == 0


def test_one_without_the_library_is_by_itself(gpu_mount: Mounted, placed: str, worker: Start) -> None:
    """It runs in the slice, by turns with the space."""
    with spatial(gpu_mount, "bare") as (name, slice_), placed_in(gpu_mount, placed, name) as run:
        enter = ("sh", "-c", 'echo $$ >"$0/cgroup.procs"; exec "$@"', os.fspath(cgroup2() / name))
        bare: Worker = worker(before=enter)
        group = Member(bare.pid, 0, group_of(gpu_mount, bare))
        time.sleep(SETTLED_S)
        assert not is_beside(group)
        assert refused(group, "compute.timeslice", 4) is None
        assert min(*rates(bare), *together([run], WINDOW_S)) > 0
        bare.drained()
        bare.process.kill()
        bare.process.wait()
        assert slice_.flat("compute.events")["populated"] == 1
        run.finish()
