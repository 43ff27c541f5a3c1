"""What waits in the kernel for the daemon of a real mount."""

from __future__ import annotations

import os
import signal

from ggroupfs.fs import connection
from tests.mounted import Mounted

FILES = 800


def told(device: int, name: str) -> int:
    """A number of the kernel's about the connection. Asks nothing of the mount, which may be stopped."""
    with connection.control() as directory:
        fd = os.open(f"{os.minor(device)}/{name}", os.O_RDONLY, dir_fd=directory)
        with os.fdopen(fd) as file:
            return int(file.read())


def test_closes_do_not_lag_behind(mount: Mounted) -> None:
    """Who asks after many have closed is answered after they have: else more are open with each that comes."""
    (mount / "ggroup.backend").read_text()  # the first close of all waits to hear that there is no FLUSH
    device = mount.path.stat().st_dev
    assert told(device, "max_background") == connection.BACKGROUND
    files = [os.open(mount / "ggroup.backend", os.O_RDONLY) for _ in range(FILES)]
    os.kill(mount.daemon.pid, signal.SIGSTOP)
    try:
        for fd in files:
            os.close(fd)
        assert told(device, "waiting") >= FILES
    finally:
        os.kill(mount.daemon.pid, signal.SIGCONT)
    (mount / "ggroup.backend").read_text()
    assert told(device, "waiting") < FILES // 4
