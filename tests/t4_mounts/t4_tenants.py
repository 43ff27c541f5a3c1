"""Two real tenants on a real mount: the effect of echo on them."""

from __future__ import annotations

import os
import select
import statistics
import struct
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.support.mounted import BUSY, SECONDS, SLOW, Mounted, Tenant, eventually

MIB = 1 << 20


@pytest.fixture
def pair(mount: Mounted) -> Iterator[tuple[Tenant, Tenant]]:
    """Two tenants, busy, with memory."""
    with Tenant(mount, "--gmem", "1G", *BUSY) as one, Tenant(mount, "--gmem", "512M", *BUSY) as other:
        yield one, other


TRIES = 6
"""Number of measurements of a rate on a busy machine, each over a longer time."""


def rates(tenants: tuple[Tenant, Tenant], seconds: float, name: str = "finished") -> list[float]:
    """Return the rates of both over the same time, per second, by that number in gcgroup.stat.

    The engine is exact, however late it is looked at. But two files are not read in one instant: where that takes more
    than a fiftieth of the time, the time was too short for this machine.
    """
    for _ in range(TRIES):
        begin, since, before = _look(tenants, name)
        time.sleep(seconds)
        now, end, after = _look(tenants, name)
        if max(since - begin, end - now) <= seconds / 50:
            break
        seconds *= 1.5
    return [(b - a) / (now - begin) for a, b in zip(before, after, strict=True)]


def _look(tenants: tuple[Tenant, Tenant], name: str) -> tuple[float, float, list[int]]:
    """Return when the look began and ended, and the numbers."""
    began = time.monotonic()
    found = [tenant.flat("gcgroup.stat")[name] for tenant in tenants]
    return began, time.monotonic(), found


def test_limit_moves_memory_out_and_only_its_own(pair: tuple[Tenant, Tenant]) -> None:
    one, other = pair
    assert one.number("gmem.current") == 1024 * MIB
    one.write("gmem.limit.high", "512M")
    assert one.number("gmem.current") <= 512 * MIB
    assert one.number("gmem.current") + one.number("gmem.swap.current") == 1024 * MIB
    assert other.number("gmem.current") == 512 * MIB
    assert other.number("gmem.swap.current") == 0
    assert other.flat("gmem.stat")["swapout_bytes"] == 0
    for tenant in pair:
        last = tenant.stop()
        assert last["checked"] >= last["pages"]


def test_memory_comes_back_when_touched(mount: Mounted) -> None:
    with Tenant(mount, "--gmem", "64M", "--touch", "32", "--report", "0.05") as tenant:
        tenant.write("gmem.limit.high", "16M")
        assert tenant.number("gmem.current") == 16 * MIB
        tenant.write("gmem.limit.high", "max")
        eventually(lambda: tenant.number("gmem.current") == 64 * MIB, "its pages come back")
        assert tenant.number("gmem.swap.current") == 0
        tenant.stop()


def test_timeslices_share_the_engine(pair: tuple[Tenant, Tenant]) -> None:
    one, other = pair
    one.write("compute.timeslice", 1)
    other.write("compute.timeslice", 4)
    slow, fast = rates(pair, 2.0)
    assert fast / slow == pytest.approx(4, rel=0.1), (slow, fast)


def test_freeze_stops_one_and_the_other_gains_all(mount: Mounted, pair: tuple[Tenant, Tenant]) -> None:
    one, other = pair
    both = sum(rates(pair, 1.0))
    took = []
    for _ in range(5):
        one.write("compute.freeze", 0)
        watch = mount.watch()
        one.write("compute.freeze", 1)
        took.append(watch.seconds)
    assert statistics.median(took) < 0.010, took
    stopped, gained = rates(pair, 1.0)
    assert stopped == 0
    assert gained >= 0.95 * both, (both, gained)
    assert one.flat("compute.events")["frozen"] == 1
    assert one.flat("gcgroup.stat")["attached"] == 0
    one.write("compute.freeze", 0)
    assert rates(pair, 0.5)[0] > 0
    one.stop()
    other.stop()


def test_more_contexts_buy_no_more_of_the_engine(mount: Mounted) -> None:
    with Tenant(mount, "--gmem", "0", *BUSY, "--contexts", "4") as many, Tenant(mount, "--gmem", "0", *BUSY) as single:
        many.write("compute.timeslice", 4)
        single.write("compute.timeslice", 4)
        assert many.flat("gcgroup.stat")["tsgs"] == 4
        a, b = rates((many, single), 1.5, "gpu_usec")
        assert a / b == pytest.approx(1, rel=0.1)


def test_usermemfd_wakes_a_poller_with_what_to_give_back(pair: tuple[Tenant, Tenant]) -> None:
    one, _ = pair
    with open(one.group / "usermemfd", "rb", buffering=0) as channel:
        poller = select.poll()
        poller.register(channel, select.POLLIN)
        assert poller.poll(0) == []
        with pytest.raises(BlockingIOError):
            os.read(channel.fileno(), 16)
        one.write("gmem.limit.high", "896M")
        assert poller.poll(SECONDS * SLOW * 1000) == [(channel.fileno(), select.POLLIN)]
        nbytes, sequence = struct.unpack("<QQ", os.read(channel.fileno(), 16))
        assert (nbytes, sequence) == (128 * MIB, 1)
        assert poller.poll(0) == []


def test_gmem_events_wake_a_poller(pair: tuple[Tenant, Tenant]) -> None:
    one, _ = pair
    with open(one.group / "gmem.events") as file:
        poller = select.poll()
        poller.register(file, select.POLLPRI)
        assert poller.poll(0), "a poll before the first read reports an event"
        assert "high 0\n" in file.read()
        assert poller.poll(0) == []
        one.write("gmem.limit.high", "512M")
        assert poller.poll(SECONDS * SLOW * 1000) == [(file.fileno(), select.POLLPRI | select.POLLERR)]
        file.seek(0)
        assert "high 1\n" in file.read()
        assert poller.poll(0) == []


def test_inotifywait_sees_events_and_the_end(pair: tuple[Tenant, Tenant]) -> None:
    one, _ = pair
    words = ["inotifywait", "-m", "-q", "--format", "%e", one.group / "gmem.events"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as watcher:
        try:
            assert watcher.stdout is not None
            eventually(lambda: _watches(watcher.pid), "inotifywait has its watch")
            one.write("gmem.limit.high", "512M")
            assert watcher.stdout.readline() == "MODIFY\n"
            one.kill()
            seen = [watcher.stdout.readline().strip()]
            while seen[-1] not in ("DELETE_SELF", ""):
                seen.append(watcher.stdout.readline().strip())
            assert seen[-1] == "DELETE_SELF", seen
        finally:
            watcher.kill()


def _watches(pid: int) -> bool:
    for fd in os.listdir(f"/proc/{pid}/fdinfo"):
        with open(f"/proc/{pid}/fdinfo/{fd}") as file:
            if "inotify wd:" in file.read():
                return True
    return False


def test_exit_takes_the_directory_away_and_open_files_say_so(mount: Mounted, pair: tuple[Tenant, Tenant]) -> None:
    one, other = pair
    with open(one.group / "gmem.current") as current, open(one.group / "gmem.events") as events:
        poller = select.poll()
        poller.register(events, select.POLLPRI)
        events.read()
        one.kill()
        eventually(lambda: not (mount / one.pid).exists(), "its directory is gone", 0.2, mount.watch())
        assert poller.poll(SECONDS * SLOW * 1000)
        with pytest.raises(OSError, match="No such device"):
            os.pread(current.fileno(), 100, 0)
    assert other.number("gmem.current") == 512 * MIB
    assert int((mount / "gpus/0/gmem.current").read_text()) == 512 * MIB


def test_death_while_frozen_leaves_no_frozen_neighbour(pair: tuple[Tenant, Tenant]) -> None:
    one, other = pair
    one.write("compute.freeze", 1)
    one.kill()
    before = other.report()["finished"]
    assert other.report()["finished"] > before


def test_swap_max_zero_is_out_of_memory_for_the_program(mount: Mounted) -> None:
    from backend.soft.client import Device

    with Device(mount.path) as device:
        device.join()
        group = mount.group(os.getpid())
        (group / "gmem.swap.max").write_text("0")
        (group / "gmem.limit.high").write_text("64M")
        pages = device.alloc(64 * MIB)
        with pytest.raises(OSError, match="Cannot allocate memory"):
            device.alloc(2 * MIB)
        events = dict(line.split() for line in (group / "gmem.events").read_text().splitlines())
        assert events["oom"] == "1"
        assert events["max"] == "0"
        assert events["fail"] == "0"
        device.free(pages)
        assert (group / "gmem.current").read_text() == "0\n"
        for name, value in (("gmem.swap.max", "max"), ("gmem.limit.high", "max")):
            (group / name).write_text(value)
