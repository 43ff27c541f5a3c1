"""Real programs that move between two software GPUs, back and forth, through a real mount."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import pytest

from tests.support.mounted import Mounted, Tenant, eventually, mounted

MIB = 1 << 20
TIMES = 20


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    """A mounted tree with two software GPUs."""
    with mounted(tmp_path_factory.mktemp("ggroup"), "soft.gpus=2", "soft.gmem=1G") as mount:
        yield mount


def move(mount: Mounted, tenant: Tenant, where: int) -> None:
    (tenant.group / "compute.migrate").write_text(f"{where}\n")
    tenant.group = mount.group(tenant.pid, where)


def test_back_and_forth(two: Mounted) -> None:
    """Twenty moves, with a part of the memory in the host: every page is right, and all work is done in the end."""
    with Tenant(two, "--gmem", "256M", "--touch", "64", "--kernel", "1ms", "--report", "0.05") as tenant:
        tenant.write("gmem.limit.high", "192M")
        tenant.write("compute.timeslice", 4)
        for number in range(TIMES):
            before = tenant.report()
            move(two, tenant, 1 - number % 2)
            assert os.listdir(two / tenant.pid) == [str(1 - number % 2)]
            assert tenant.number("gmem.limit.high") == 192 * MIB
            assert tenant.flat("gcgroup.stat")["timeslice_usec"] == 4000
            after = tenant.report()
            assert after["finished"] >= before["finished"]
        assert tenant.flat("compute.events")["migrated"] == TIMES
        held = tenant.number("gmem.current") + tenant.number("gmem.swap.current")
        assert held == 256 * MIB
        last = tenant.stop()
        assert last["checked"] >= last["pages"]
    for gpu in (0, 1):
        eventually(lambda gpu=gpu: (two / "gpus" / str(gpu) / "gmem.current").read_text() == "0\n", "nothing is left")


def test_neighbours_do_not_notice(two: Mounted) -> None:
    """There is one neighbour on each GPU, and a program that moves between them."""
    options = ("--gmem", "128M", "--kernel", "1ms", "--report", "0.05")
    with Tenant(two, *options) as zero, Tenant(two, "--gpu", "1", *options) as one, Tenant(two, *options) as mover:
        one.group = two.group(one.pid, 1)
        for number in range(6):
            before = [tenant.flat("gcgroup.stat")["finished"] for tenant in (zero, one)]
            move(two, mover, 1 - number % 2)
            eventually(
                lambda before=before: all(
                    tenant.flat("gcgroup.stat")["finished"] > count
                    for tenant, count in zip((zero, one), before, strict=True)
                ),
                "they go on",
            )
        for tenant in (zero, one, mover):
            tenant.stop()


def test_a_frozen_one_moves_and_stays_frozen(two: Mounted) -> None:
    with Tenant(two, "--gmem", "64M", "--kernel", "1ms", "--report", "0.05") as tenant:
        tenant.write("compute.freeze", 1)
        move(two, tenant, 1)
        assert tenant.flat("compute.events") == {"populated": 1, "frozen": 1, "migrated": 1, "undone": 0, "lost": 0}
        before = tenant.flat("gcgroup.stat")
        assert before["attached"] == 0
        tenant.write("compute.freeze", 0)
        eventually(lambda: tenant.flat("gcgroup.stat")["finished"] > before["finished"], "it goes on")
        tenant.stop()


def test_no_room_is_refused_and_it_goes_on(two: Mounted) -> None:
    with Tenant(two, "--gmem", "512M") as there, Tenant(two, "--gpu", "1", "--gmem", "768M") as full:
        full.group = two.group(full.pid, 1)
        for _ in range(3):
            with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
                (there.group / "compute.migrate").write_text("1\n")
        assert os.listdir(two / there.pid) == ["0"]
        assert full.number("gmem.current") == 768 * MIB
        there.stop()
        full.stop()
