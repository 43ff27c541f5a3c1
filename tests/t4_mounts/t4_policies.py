"""Policies over a real mount: the very objects that the simulator runs, with real tenants as jobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ggroupfs.policies.face import Job, Platform, Progress, Run, carry_out
from ggroupfs.policies.lanes import Lanes, Order
from ggroupfs.policies.mounted import MountedPlatform
from tests.support.mounted import BUSY, Mounted, Tenant, eventually

MIB = 1 << 20
SECOND = 1_000_000_000


@pytest.fixture
def pair(mount: Mounted) -> Iterator[tuple[Tenant, Tenant]]:
    """Two tenants, busy, with memory."""
    options = ("--gmem", "64M", *BUSY)
    with Tenant(mount, *options) as one, Tenant(mount, *options) as other:
        yield one, other
        for tenant in (one, other):
            tenant.write("compute.freeze", 0)
            tenant.stop()


def jobs(mount: Mounted, pair: tuple[Tenant, Tenant]) -> MountedPlatform:
    """The tenants as jobs a and b."""
    platform = MountedPlatform(mount.path)
    for name, tenant in zip("ab", pair, strict=True):
        platform.add(name, mount.group(tenant.pid))
    return platform


def frozen(pair: tuple[Tenant, Tenant]) -> list[int]:
    return [tenant.number("compute.freeze") for tenant in pair]


def progress(platform: Platform, job: str) -> Progress:
    service = platform.figures(job).service
    return Progress(service, service)


def test_one_of_a_lane_runs_and_then_the_other(mount: Mounted, pair: tuple[Tenant, Tenant]) -> None:
    platform = jobs(mount, pair)
    policy = Lanes(platform.capacity, Order.FAIR)
    assert frozen(pair) == [1, 1]
    before = platform.figures("a").service
    for name in "ab":
        carry_out(policy.job_arrive(Job(name, 64 * MIB, 0, 10 * SECOND)), platform)
    assert frozen(pair) == [0, 1]
    stands = platform.figures("b").service
    eventually(lambda: platform.figures("a").service > before, "a computes")
    assert platform.figures("b").service == stands
    carry_out(policy.iteration_end("a", progress(platform, "a")), platform)
    assert frozen(pair) == [1, 0]
    eventually(lambda: platform.figures("b").service > stands, "b computes")
    carry_out(policy.job_finish("b"), platform)
    assert frozen(pair)[0] == 0


def test_memory_goes_to_the_host_for_a_shorter_one(mount: Mounted, pair: tuple[Tenant, Tenant]) -> None:
    """The GPU is taken to be as large as one job, so one job makes room for the other."""
    platform = jobs(mount, pair)
    policy = Lanes(64 * MIB, Order.SRTF)
    carry_out(policy.job_arrive(Job("a", 64 * MIB, 0, 100 * SECOND)), platform)
    carry_out(policy.job_arrive(Job("b", 64 * MIB, 0, 1 * SECOND)), platform)
    assert (frozen(pair), platform.figures("a").resident) == ([0, 1], 64 * MIB)
    carry_out(policy.iteration_end("a", Progress(SECOND, SECOND)), platform)
    assert frozen(pair) == [1, 0]
    figures = platform.figures("a")
    assert (figures.resident, figures.swapped, figures.frozen) == (0, 64 * MIB, True)


def test_what_is_not_there(mount: Mounted, pair: tuple[Tenant, Tenant], tmp_path: Path) -> None:
    platform = jobs(mount, pair)
    with pytest.raises(FileNotFoundError):
        MountedPlatform(tmp_path)
    with pytest.raises(FileNotFoundError):
        MountedPlatform(mount.path, gpu=7)
    with pytest.raises(FileNotFoundError):
        carry_out([Run("c")], platform)
    platform.discard("a")
    with pytest.raises(FileNotFoundError):
        platform.figures("a")
