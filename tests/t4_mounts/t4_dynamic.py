"""The policies dynamic and cooperative at work on a real mount, beside real programs that hold memory."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from backend.soft.client import Device
from tests.support.cgroups import cgroup, enter, slice_path
from tests.support.command import complaint
from tests.support.mounted import Mounted, Tenant, eventually
from tests.support.policy_program import PolicyProgram

MIB = 1 << 20
BUDGET, HEADROOM = 1024, 128
"""Budget and headroom of the policy, in MiB."""


def policy(mount: Mounted, tmp_path: Path, name: str, high: object, low: object, *more: str) -> PolicyProgram:
    """Run a policy with this configuration."""
    config = tmp_path / f"{name}.toml"
    lines = [f'high = "{high}"', f'low = "{low}"', f'budget = "{BUDGET}M"', f'headroom = "{HEADROOM}M"', *more]
    config.write_text("\n".join(lines) + "\n")
    return PolicyProgram(mount.path, name, config)


def limit(group: Path) -> int | None:
    text = (group / "gmem.limit.high").read_text().strip()
    return None if text == "max" else int(text)


def at_most(group: Path, mib: int) -> bool:
    high = limit(group)
    return high is not None and high <= mib * MIB


def at_least(group: Path, mib: int) -> bool:
    high = limit(group)
    return high is not None and high >= mib * MIB


FULL = BUDGET - HEADROOM - BUDGET // 64
"""MiB that the second program gets at least while the first one has nothing."""

ROUNDS = 10
"""Tries for a program to give memory by itself within 50 ms; on a busy machine it may get no processor in that time."""


@pytest.fixture
def first(mount: Mounted) -> Iterator[Device]:
    """This very process, as the first program."""
    with Device(mount.path) as device:
        device.join()
        yield device


@pytest.fixture
def second(mount: Mounted) -> Iterator[Tenant]:
    """The second program: 768 MiB, all of which is used all the time."""
    with Tenant(mount, "--gmem", "768M", "--touch", "384", "--kernel", "2ms", "--report", "0.1") as tenant:
        yield tenant


@pytest.mark.parametrize("name", ["dynamic", "cooperative"])
def test_memory_goes_where_it_is_used(mount: Mounted, tmp_path: Path, first: Device, second: Tenant, name: str) -> None:
    own = mount.group(os.getpid())
    with policy(mount, tmp_path, name, os.getpid(), second.pid) as running:
        eventually(lambda: at_least(second.group, FULL), "it has what is left")
        assert (own / "gmem.limit.low").read_text() == "max\n"
        held = [first.alloc(64 * MIB) for _ in range(8)]
        eventually(lambda: second.number("gmem.current") <= (BUDGET - 512) * MIB, "it gave")
        assert at_most(second.group, BUDGET - 512)
        for pages in held:
            first.free(pages)
        eventually(lambda: at_least(second.group, FULL), "it has it back")
        eventually(lambda: second.number("gmem.swap.current") == 0, "and uses it")
        running.end()
        said = [line for line in running.events if line["event"] == "limit"]
    assert (limit(second.group), (own / "gmem.limit.low").read_text()) == (None, "0\n")
    assert (own / "gmem.swap.current").read_text() == "0\n"
    assert all(line["limit"] + line["high"] <= BUDGET * MIB for line in said)
    assert sum(line["moved"] for line in said) >= 256 * MIB
    second.stop()


GIVES = """
import sys, threading
from backend.soft.client import Device
from ggroupfs.usermem import watch

mount, pieces, lock = sys.argv[1], [], threading.Lock()
with Device(mount) as device:
    device.join()
    pieces += [device.alloc(32 << 20) for _ in range(28)]

    def shrink(nbytes):
        with lock:
            while nbytes > 0 and pieces:
                device.free(pieces.pop())
                nbytes -= 32 << 20

    watch(shrink, mount=mount)
    print(flush=True)
    sys.stdin.read()
"""


def test_who_gives_by_itself_has_nothing_moved(mount: Mounted, tmp_path: Path, first: Device) -> None:
    words = [sys.executable, "-c", GIVES, os.fspath(mount.path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as giver:
        assert giver.stdout is not None
        assert giver.stdout.readline() == "\n"
        group = mount.group(giver.pid)
        with policy(mount, tmp_path, "cooperative", os.getpid(), giver.pid) as running:
            moved, before = -1, 0
            for _ in range(ROUNDS):
                eventually(lambda: at_least(group, FULL), "it has what is left")
                held = []
                for mib in range(64, 576, 64):  # it grows as fast as room appears
                    held.append(first.alloc(64 * MIB))
                    least = BUDGET - mib - HEADROOM // 2
                    eventually(lambda least=least: int((group / "gmem.current").read_text()) <= least * MIB, "it gave")
                stat = dict(line.split() for line in (group / "gmem.stat").read_text().splitlines())
                moved, before = int(stat["swapout_bytes"]) - before, int(stat["swapout_bytes"])
                for pages in held:
                    first.free(pages)
                if not moved:
                    break
            running.end()
    assert int(stat["resident"]) <= (BUDGET - 512) * MIB
    assert moved == 0, "in time once at least"


def test_all_at_once_is_what_the_slice_above_is_for(mount: Mounted, tmp_path: Path, first: Device) -> None:
    """No policy is as fast: the file system itself takes the memory that is not protected, and the policy follows."""
    with cgroup(f"ggroup-dynamic-{os.getpid()}") as place:
        above = mount / "slice" / slice_path(place) / "0"
        with Tenant(mount, "--gmem", "768M", "--touch", "384", "--kernel", "2ms", "--report", "0.1") as second:
            home = place.parent
            enter(second.pid, place)
            enter(os.getpid(), place)
            try:
                eventually(lambda: int((above / "gmem.current").read_text()) == 768 * MIB, "both are in it")
                (above / "gmem.limit.high").write_text(f"{BUDGET}M")
                # Such a long interval proves that the policy acts because of events.
                more = (f'within = "/{slice_path(place)}"', 'interval = "1000s"')
                with policy(mount, tmp_path, "dynamic", os.getpid(), second.pid, *more) as running:
                    running.until("limit")
                    pages = first.alloc(768 * MIB)
                    assert second.number("gmem.current") <= 256 * MIB
                    eventually(lambda: at_most(second.group, 256), "it follows")
                    assert (mount.group(os.getpid()) / "gmem.swap.current").read_text() == "0\n"
                    first.free(pages)
                    running.end()
            finally:
                enter(os.getpid(), home)
            second.stop()
    eventually(lambda: not above.exists() or not list(above.parent.glob("*/gmem.pid")), "it is left")
    with contextlib.suppress(OSError):
        above.parent.rmdir()


def test_groups_that_come_and_go(mount: Mounted, tmp_path: Path) -> None:
    """Services: neither exists at first, then both, then others with the same names."""
    options = ("--kernel", "2ms", "--report", "0.1", "--gmem")
    with cgroup(f"ggroup-high-{os.getpid()}") as high, cgroup(f"ggroup-low-{os.getpid()}") as low:
        groups = [mount / "slice" / slice_path(place) / "0" for place in (high, low)]
        with policy(mount, tmp_path, "dynamic", f"/{slice_path(high)}", f"/{slice_path(low)}") as running:
            for _ in range(2):
                with Tenant(mount, *options, "896M") as second:
                    enter(second.pid, low)
                    eventually(lambda: at_least(groups[1], FULL), "there is nobody else")
                    with Tenant(mount, *options, "512M") as one:
                        enter(one.pid, high)
                        eventually(lambda: at_most(groups[1], BUDGET - 512), "the first one has come")
                        eventually(lambda: (groups[0] / "gmem.limit.low").read_text() == "max\n", "it is protected")
                        one.kill()
                    eventually(lambda: at_least(groups[1], FULL), "the first one has gone")
                    second.kill()
            running.end()
        assert limit(groups[1]) is None
        for group in groups:
            eventually(lambda group=group: group.parent.rmdir() or True, "it is empty")


def test_a_limit_that_cannot_be_is_tried_again(mount: Mounted, tmp_path: Path, first: Device, second: Tenant) -> None:
    second.write("gmem.swap.max", 0)
    pages = first.alloc(512 * MIB)
    with policy(mount, tmp_path, "dynamic", os.getpid(), second.pid) as running:
        assert running.until("refused")["error"] == os.strerror(16)
        assert limit(second.group) is None
        second.write("gmem.swap.max", "max")
        assert running.until("limit")["limit"] <= (BUDGET - 512) * MIB
        running.end()
    first.free(pages)
    second.stop()


def test_a_limit_that_somebody_else_writes_is_what_is_left_in_the_end(
    mount: Mounted, tmp_path: Path, first: Device, second: Tenant
) -> None:
    with policy(mount, tmp_path, "dynamic", os.getpid(), second.pid) as running:
        running.until("limit")
        second.write("gmem.limit.high", "960M")
        running.until("limit")
        running.end()
    assert limit(second.group) == 960 * MIB
    second.stop()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('high = "batch.slice"', "high: neither a pid nor the path of a slice"),
        ('high = "/b"', "low: is the same as high"),
        ('high = "/a"\nstep = "1M"', "step: is less than"),
        ('high = "/a"\nheadrom = "1G"', "headrom: there is no such key"),
    ],
)
def test_a_mistake_in_the_file_is_told(mount: Mounted, tmp_path: Path, line: str, why: str) -> None:
    config = tmp_path / "c.toml"
    config.write_text(f'{line}\nlow = "/b"\n')
    told = complaint("policy", "dynamic", "--config", config, "--mount", mount.path, code=2)
    assert told.startswith(f"policy: {config}: {why}")
