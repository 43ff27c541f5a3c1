"""What systemd hears of a real daemon, from READY=1 to STOPPING=1; and that the tree feeds it, not a clock."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ggroupfs.mounts import mount_of
from ggroupfs.umount import unmount
from tests.mounted import LEDGER, SECONDS, SLOW, mountpoint

PERIOD_S = 3.0 * SLOW


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(os.fspath(tmp_path / "notify"))
        receiver.settimeout(SECONDS * SLOW)
        yield receiver


def test_from_ready_to_stopping(systemd: socket.socket) -> None:
    environment = os.environ | {"NOTIFY_SOCKET": systemd.getsockname(), "WATCHDOG_USEC": f"{PERIOD_S * 1e6:.0f}"}
    with mountpoint() as place:
        words = [sys.executable, "-m", "ggroupfs", "mount", "-f", "--gpu", "soft", *_ledger(), os.fspath(place)]
        daemon = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            # The first feeding may overtake.
            first = {_next(systemd) for _ in range(2)}
            ready = next(text for text in first if text.startswith("READY=1\n"))
            assert ready.startswith(f"READY=1\nSTATUS={place}: 1 soft GPU, ledger ")
            for _ in range(2):
                assert _next(systemd) == "WATCHDOG=1"
            daemon.terminate()
            said = [_next(systemd)]
            while said[-1] == "WATCHDOG=1":
                said.append(_next(systemd))
            assert said[-1] == "STOPPING=1\nSTATUS=Thawing and unmounting"
            output, errors = daemon.communicate(timeout=SECONDS * SLOW)
            assert (daemon.returncode, output, errors) == (0, "ready\n", "")
        finally:
            daemon.kill()
            daemon.communicate()
            if mount_of(os.fspath(place)) is not None:
                unmount(place)


def test_the_mount_is_what_feeds_it(systemd: socket.socket) -> None:
    """Unmounted lazily under the daemon, which runs on as a file of the tree is open: it is not fed any more."""
    environment = os.environ | {"NOTIFY_SOCKET": systemd.getsockname(), "WATCHDOG_USEC": f"{PERIOD_S * 1e6:.0f}"}
    with mountpoint() as place:
        words = [sys.executable, "-m", "ggroupfs", "mount", "-f", "--gpu", "soft", *_ledger(), os.fspath(place)]
        daemon = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            while _next(systemd) != "WATCHDOG=1":
                pass
            with open(place / "ggroup.backend") as kept:
                subprocess.run(["umount", "--lazy", place], check=True)
                while (said := _next(systemd)) == "WATCHDOG=1" or said.startswith("READY=1"):
                    pass
                assert said == f"STATUS={place}/ggroup.backend does not answer"
                assert daemon.poll() is None
                assert kept.read()
            daemon.send_signal(signal.SIGTERM)
            _, errors = daemon.communicate(timeout=SECONDS * SLOW)
            assert "the watchdog is not fed" in errors
        finally:
            daemon.kill()
            daemon.communicate()


def _ledger() -> list[str]:
    return ["--ledger", LEDGER] if LEDGER else []


def _next(systemd: socket.socket) -> str:
    return systemd.recv(4096).decode()
