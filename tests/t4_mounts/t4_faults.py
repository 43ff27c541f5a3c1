"""A GPU that falls off the bus, and a daemon without descriptors, on a real mount: what users see."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mounted import SECONDS, SLOW, Mounted, Tenant, eventually, mounted, mountpoint
from tests.support.tenant_socket import Raw

EXPECTED = ("GPU 0 is lost", "GPU 0 is back")


@pytest.fixture
def faults(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def mount(faults: Path) -> Iterator[Mounted]:
    with mountpoint() as path, mounted(path, "soft.gpus=2", f"soft.faults={faults}", expect_errors=EXPECTED) as mount:
        yield mount


def told(mount: Mounted, *words: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "ggroupfs", *words, "--mount", mount.path], check=True, text=True, capture_output=True
    ).stdout


def events(mount: Mounted, gpu: int = 0) -> str:
    return (mount / f"gpus/{gpu}/gpu.events").read_text()


def test_lost_and_back(mount: Mounted, faults: Path) -> None:
    with Tenant(mount, "--gpu", "0", "--gmem", "64M") as lost, Tenant(mount, "--gpu", "1", "--gmem", "64M") as other:
        lost.write("compute.weight", 200)
        with open(mount / "gpus/0/gpu.events") as file, open(lost.group / "compute.events") as own:
            poll = select.poll()
            for one in (file, own):
                one.read()
                poll.register(one, select.POLLPRI)
            (faults / "0").touch()
            woken = set()
            while len(woken) < 2:
                found = poll.poll(20_000)
                assert found, "nobody was told"
                for fd, _ in found:
                    woken.add(fd)
                    (file if fd == file.fileno() else own).seek(0)
                    (file if fd == file.fileno() else own).read()
        assert events(mount) == "present 0\nlost 1\n"
        assert events(mount, 1) == "present 1\nlost 0\n"
        # The program got ENODEV and ended, as CUDA programs do; readers of its files were not disturbed.
        eventually(lambda: not lost.group.exists(), "the program ends")
        words = [sys.executable, "-m", "ggroupfs", "tenant", "--mount", mount.path, "--gpu", "0"]
        refused = subprocess.run(words, check=False, text=True, capture_output=True)
        assert (refused.returncode, refused.stderr) == (1, "ggroupfs: No such device\n")
        there = mount.group(other.pid, 1)
        (there / "compute.weight").write_text("50\n")
        assert (there / "compute.weight").read_text() == "50\n"
        with pytest.raises(OSError, match="No such device"):
            (there / "compute.migrate").write_text("0\n")
        assert "GPU 0 ggroupfs software GPU (lost)" in told(mount, "show", "--tree")
        top = json.loads(told(mount, "top", "--json"))
        assert [gpu["present"] for gpu in top["gpus"]] == [False, True]
        metrics = told(mount, "metrics")
        assert 'ggroup_gpu_present{gpu="0"' in metrics
        (faults / "0").unlink()
        eventually(lambda: events(mount) == "present 1\nlost 1\n", "it is back")
        with Tenant(mount, "--gpu", "0", "--gmem", "64M") as again:
            again.write("compute.freeze", 1)
            assert again.flat("compute.events") == {"populated": 1, "frozen": 1, "migrated": 0, "undone": 0, "lost": 0}
            again.write("compute.freeze", 0)


FULL = "Too many open files"
BEAT_S = 1.5 * SLOW
"""Seconds between two feedings of the watchdog; the journal syncs more often."""


@contextlib.contextmanager
def no_descriptor(pid: int) -> Iterator[None]:
    """Leave a process no further descriptor."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    first = next(number for number in range(len(used) + 1) if number not in used)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (first, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def test_short_of_descriptors_at_a_real_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tree is served and the watchdog fed; what needed a descriptor is logged, and done once there is one."""
    slices_d = tmp_path / "slices.d"
    slices_d.mkdir()
    (slices_d / "a.conf").write_text("[/a]\nGMemHigh=64M\n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd, contextlib.ExitStack() as stack:
        systemd.bind(os.fspath(tmp_path / "notify"))
        systemd.settimeout(SECONDS * SLOW)
        monkeypatch.setenv("NOTIFY_SOCKET", systemd.getsockname())
        monkeypatch.setenv("WATCHDOG_USEC", f"{2 * BEAT_S * 1e6:.0f}")
        place = stack.enter_context(mountpoint())
        mount = stack.enter_context(mounted(place, f"slices.d={slices_d}", expect_errors=(FULL,)))
        high = mount / "slice/a/0/gmem.limit.high"

        def told(words: str) -> bool:
            return any(words in line and FULL in line for line in mount.errors)

        def fed(times: int) -> None:
            while times:
                times -= systemd.recv(4096) == b"WATCHDOG=1"

        with no_descriptor(mount.daemon.pid):
            (mount / "slice/a").mkdir()
            high.write_text("32M")
            (slices_d / "a.conf").write_text("[/a]\nGMemHigh=128M\n")
            early = Raw(mount)
            mount.daemon.send_signal(signal.SIGHUP)
            eventually(lambda: told("no room for another program"), "a program waits at the door")
            eventually(lambda: told(f"{slices_d}: "), "the files cannot be read again")
            systemd.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                fed(1 << 30)  # drop earlier messages
            systemd.settimeout(SECONDS * SLOW)
            fed(2)  # by then the journal has asked for a descriptor
            assert mount.daemon.poll() is None
            assert high.read_text() == f"{64 << 20}\n", "as it was read before"
        with early.hello(), Tenant(mount, "--gmem", "64M") as tenant:
            assert tenant.number("gmem.current") == 64 << 20
        mount.daemon.send_signal(signal.SIGHUP)
        eventually(lambda: high.read_text() == f"{128 << 20}\n", "the files are read again")
        assert mount.daemon.poll() is None
        mount.check()
