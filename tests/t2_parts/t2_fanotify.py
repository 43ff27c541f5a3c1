"""The kernel's fanotify as far as docs/nvidia.md relies on it: where it differs from fanotify(7), and how we know."""

from __future__ import annotations

import ctypes
import os
import stat
import subprocess
from pathlib import Path

import pytest

from backend.common import syscalls
from backend.process import fanotify
from tests.support.mounted import SECONDS

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="fanotify(7) needs root")

FAN_REPORT_FID, FAN_OPEN = 0x200, 0x20
"""Constants of linux/fanotify.h: events without a descriptor, and the event of an opening, which does not wait."""


def test_a_kernel_without_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    fanotify.check()
    before = len(os.listdir("/proc/self/fd"))

    def refused(name: str, *arguments: object) -> int:
        if name == "fanotify_mark":
            raise OSError(22, "Invalid argument")
        return os.open("/dev/null", os.O_RDONLY)

    monkeypatch.setattr(syscalls, "named", refused)
    with pytest.raises(OSError, match="CONFIG_FANOTIFY_ACCESS_PERMISSIONS"):
        fanotify.check()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("kind", [stat.S_IFCHR, stat.S_IFIFO])
def test_no_permission_is_asked_for_a_device_node(tmp_path: Path, kind: int) -> None:
    """The kernel does not do this, as nvidia.md says: if this fails, openings of the nodes themselves could wait."""
    node = tmp_path / "node"
    os.mknod(node, 0o600 | kind, os.makedev(1, 3))
    openings = fanotify.Openings()
    try:
        openings.mark(node)
        subprocess.run(["sh", "-c", 'exec 3<>"$1"', "sh", node], timeout=SECONDS, check=True)
        assert not list(openings.asked())
    finally:
        openings.close()


@pytest.mark.parametrize("class_", [0, fanotify.FAN_CLASS_CONTENT])
def test_an_opening_of_a_device_node_is_told_and_does_not_wait(tmp_path: Path, class_: int) -> None:
    """The event names the process that opens the node; events and permissions cannot be combined."""
    node = tmp_path / "node"
    os.mknod(node, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    flags = FAN_REPORT_FID | class_ | fanotify.FAN_CLOEXEC | fanotify.FAN_NONBLOCK
    if class_:
        with pytest.raises(OSError, match="Invalid argument"):
            syscalls.named("fanotify_init", flags, os.O_RDONLY)
        return
    fd = syscalls.named("fanotify_init", flags, os.O_RDONLY)
    try:
        name = os.fsencode(node)
        mask = ctypes.c_uint64(FAN_OPEN)
        syscalls.named("fanotify_mark", fd, fanotify.FAN_MARK_ADD, mask, fanotify.AT_FDCWD, name)
        with subprocess.Popen(["head", "-c1", node], stdout=subprocess.DEVNULL) as opened:
            opened.wait(SECONDS)
        _, _, _, _, what, file, pid = fanotify.EVENT.unpack_from(os.read(fd, 4096))
        assert (what, file, pid) == (FAN_OPEN, -1, opened.pid)
    finally:
        os.close(fd)


def test_a_mark_in_proc_is_refused() -> None:
    openings = fanotify.Openings()
    try:
        with pytest.raises(OSError, match="Invalid argument"):
            openings.mark("/proc/version")
    finally:
        openings.close()
