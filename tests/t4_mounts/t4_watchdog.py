"""Messages of a real daemon to systemd, from READY=1 to STOPPING=1; the watchdog is fed by the tree, not by a clock."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from ggroupfs.commands.umount import unmount
from ggroupfs.mounts import mount_of
from tests.support.mounted import LEDGER, SECONDS, SLOW, mountpoint

PERIOD_S = 3.0 * SLOW


@attrs.define
class Fed:
    """A daemon in the foreground, run by a service with a watchdog."""

    place: Path
    """Mountpoint."""
    process: subprocess.Popen[str]
    """Process of the daemon."""
    systemd: socket.socket
    """Socket that receives its messages."""

    def says(self) -> str:
        """Return its next message."""
        return self.systemd.recv(4096).decode()


@pytest.fixture
def fed(tmp_path: Path) -> Iterator[Fed]:
    """A daemon; nothing is mounted in the end, whatever becomes of it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd, mountpoint() as place:
        systemd.bind(os.fspath(tmp_path / "notify"))
        systemd.settimeout(SECONDS * SLOW)
        environment = {"NOTIFY_SOCKET": systemd.getsockname(), "WATCHDOG_USEC": f"{PERIOD_S * 1e6:.0f}"}
        words = [sys.executable, "-m", "ggroupfs", "mount", "-f", "--gpu", "soft"]
        words += ["--ledger", LEDGER] if LEDGER else []
        process = subprocess.Popen(
            [*words, os.fspath(place)],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield Fed(place, process, systemd)
        finally:
            process.kill()
            process.communicate()
            if mount_of(os.fspath(place)) is not None:
                unmount(place)


def test_from_ready_to_stopping(fed: Fed) -> None:
    # The first feeding may overtake.
    first = {fed.says() for _ in range(2)}
    ready = next(text for text in first if text.startswith("READY=1\n"))
    assert ready.startswith(f"READY=1\nSTATUS={fed.place}: 1 soft GPU, ledger ")
    for _ in range(2):
        assert fed.says() == "WATCHDOG=1"
    fed.process.terminate()
    while (said := fed.says()) == "WATCHDOG=1":
        pass
    assert said == "STOPPING=1\nSTATUS=Thawing and unmounting"
    output, errors = fed.process.communicate(timeout=SECONDS * SLOW)
    assert (fed.process.returncode, output, errors) == (0, "ready\n", "")


def test_the_mount_is_what_feeds_it(fed: Fed) -> None:
    """The tree is unmounted lazily under the daemon, which runs on because a file is open: it is not fed any more."""
    while fed.says() != "WATCHDOG=1":
        pass
    with open(fed.place / "ggroup.backend") as kept:
        subprocess.run(["umount", "--lazy", fed.place], check=True)
        while (said := fed.says()) == "WATCHDOG=1" or said.startswith("READY=1"):
            pass
        assert said == f"STATUS={fed.place}/ggroup.backend does not answer"
        assert fed.process.poll() is None
        assert kept.read()
    fed.process.send_signal(signal.SIGTERM)
    _, errors = fed.process.communicate(timeout=SECONDS * SLOW)
    assert "the watchdog is not fed" in errors
