"""Descriptors of programs that are not what their names say: they hide nothing, and no caller waits for them."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from backend.nvidia import device, lender, linux, rm
from backend.process.identity import identify
from tests.support.mounted import SECONDS, eventually

NULL = "/dev/null"
"""Stand-in for the device."""
TENANT = Path(__file__).parents[1] / "support" / "fuse_tenant.py"
NOBODY = (
    "setpriv",
    "--reuid=65534",
    "--regid=65534",
    "--clear-groups",
    "unshare",
    "--user",
    "--map-root-user",
    "--mount",
)


@attrs.define
class Tenant:
    """A program that has the device open, and a file of its own under that name."""

    process: subprocess.Popen[str]
    """Process that serves its own file."""
    pid: int
    real: int
    """Descriptor of the device."""
    own: int
    """Descriptor of the file that it serves itself."""
    path: int
    """Descriptor of the device that was opened with O_PATH."""

    def asked(self) -> str:
        """Return the kernel's next request to it."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@pytest.fixture
def fuse() -> Iterator[str]:
    """A file of FUSE's device that every user may open, as udev makes it: not all machines have udev."""
    made, status = "/dev/fuse", os.stat("/dev/fuse")
    if status.st_mode & 0o006 == 0o006:
        yield made
        return
    made = f"/dev/ggroup-fuse-{os.getpid()}"  # not in a temporary directory, which may be mounted nodev
    os.mknod(made, stat.S_IFCHR, status.st_rdev)
    try:
        os.chmod(made, 0o666)
        yield made
    finally:
        os.unlink(made)


@pytest.fixture
def tenant(monkeypatch: pytest.MonkeyPatch, fuse: str) -> Iterator[Tenant]:
    monkeypatch.setattr(device, "CONTROL_DEVICE", NULL)
    monkeypatch.setattr(device, "CONTROL_NUMBER", os.stat(NULL).st_rdev)
    words = [*NOBODY, "/usr/bin/python3", os.fspath(TENANT), "device", NULL]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "FUSE": fuse}) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("ready"):
                    break
            yield Tenant(process, *map(int, line.split()[1:]))
        finally:
            process.kill()


@pytest.fixture
def system() -> Iterator[linux.LinuxSystem]:
    made = linux.LinuxSystem()
    yield made
    made.end()


def ours() -> list[str]:
    """Return the descriptors that this process has open."""
    return sorted(os.listdir("/proc/self/fd"))


def swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each file be the right one until it is duplicated, when the program gives the number to another file."""
    real = device.number_of
    monkeypatch.setattr(
        device, "number_of", lambda place: device.CONTROL_NUMBER if isinstance(place, str) else real(place)
    )


def test_a_file_of_its_own_is_not_the_device_whatever_it_is_called(tenant: Tenant, system: linux.LinuxSystem) -> None:
    """It is not even asked; its descriptors of the device are found and lent all the same."""
    pid = tenant.pid
    assert {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in (tenant.real, tenant.own, tenant.path)} == {NULL}
    assert tenant.real in system.control_fds(pid)
    assert not {tenant.own, tenant.path} & set(system.control_fds(pid))
    before = ours()
    for _ in range(3):
        with rm.borrowed(system, identify(pid), [tenant.real, tenant.own, tenant.path]) as controls:
            assert list(controls) == [tenant.real]
    assert len(ours()) == len(before) + 1, "the way to who duplicates them"
    tenant.process.kill()
    assert tenant.asked() == "", "it was never asked for anything"


def test_a_program_that_changes_its_files_while_they_are_duplicated_keeps_no_other(
    tenant: Tenant, system: linux.LinuxSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the process that duplicates waits, for a while, for its answer to the close; others are lent theirs."""
    swapped(monkeypatch)
    process = identify(tenant.pid)
    with rm.borrowed(system, process, [tenant.real, tenant.own]) as controls:
        assert list(controls) == [tenant.real]
    assert tenant.asked() == "FLUSH"
    before = ours()
    for _ in range(lender.STUCK - 1):
        with rm.borrowed(system, process, [tenant.real, tenant.own]) as controls:
            assert list(controls) == [tenant.real]
        assert tenant.asked() == "FLUSH"
    with pytest.raises(PermissionError), rm.borrowed(system, process, [tenant.real]):
        raise AssertionError("lent")
    with open(NULL, "rb") as file, rm.borrowed(system, identify(os.getpid()), [file.fileno()]) as controls:
        assert list(controls) == [file.fileno()], "others are not those of its user"
    assert ours() == before


def test_a_program_is_looked_at_once_however_many_descriptors_are_lent(
    tenant: Tenant, system: linux.LinuxSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look has two threads wake each other, each of which a freeze through the cgroup file would wait for."""
    looks: list[int] = []

    def look_here(pid: int, function: Callable[[], Any]) -> Any:
        looks.append(pid)
        return function()

    process = identify(tenant.pid)
    monkeypatch.setattr(linux, "look_here", look_here)
    with rm.borrowed(system, process, [tenant.real, tenant.own, tenant.path]) as controls:
        assert list(controls) == [tenant.real]
    assert looks == [tenant.pid]


def test_one_of_them_that_is_closed_at_once_counts_for_nothing(
    system: linux.LinuxSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "CONTROL_NUMBER", os.stat(NULL).st_rdev)
    swapped(monkeypatch)
    with open("/dev/zero", "rb") as wrong, open(NULL, "rb") as right:
        for _ in range(4 * lender.STUCK):
            with rm.borrowed(system, identify(os.getpid()), [wrong.fileno(), right.fileno()]) as controls:
                assert list(controls) == [right.fileno()]


DAEMON = """
import os, sys
from backend.process.identity import identify
from backend.nvidia import device, linux, rm
device.CONTROL_NUMBER = os.stat("/dev/null").st_rdev
real = device.number_of
device.number_of = lambda place: device.CONTROL_NUMBER if isinstance(place, str) else real(place)
pid, *fds = map(int, sys.argv[1:])
with rm.borrowed(linux.LinuxSystem(), identify(pid), fds) as controls:
    print(*controls, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["ends", "is killed"])
def test_a_daemon_that_looked_at_it_ends(tenant: Tenant, how: str) -> None:
    words = [sys.executable, "-c", DAEMON, *map(str, (tenant.pid, tenant.real, tenant.own))]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == f"{tenant.real}\n"
        assert tenant.asked() == "FLUSH"
        if how == "is killed":
            daemon.kill()
        out, _ = daemon.communicate(timeout=SECONDS)
        assert out == ""


def test_a_lender_that_was_killed_is_replaced(system: linux.LinuxSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "CONTROL_NUMBER", os.stat(NULL).st_rdev)
    process = identify(os.getpid())
    with open(NULL, "rb") as file:
        for _ in range(3):
            with rm.borrowed(system, process, [file.fileno()]) as controls:
                assert list(controls) == [file.fileno()]
            assert system._lender._socket is not None
            system._lender._socket.shutdown(2)


def test_it_ends_with_who_asks_it(system: linux.LinuxSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "CONTROL_NUMBER", os.stat(NULL).st_rdev)

    def lenders() -> set[int]:
        found = set()
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                if b"backend.nvidia.lender" in Path("/proc", pid, "cmdline").read_bytes():
                    found.add(int(pid))
            except OSError:
                continue
        return found

    before = lenders()
    with open(NULL, "rb") as file, rm.borrowed(system, identify(os.getpid()), [file.fileno()]):
        mine = lenders() - before
        assert mine
    system.end()
    eventually(lambda: not mine & lenders(), "it has ended")


def test_what_a_file_is(tmp_path: Path) -> None:
    plain = tmp_path / "file"
    plain.touch()
    null = os.stat(NULL).st_rdev
    link = tmp_path / "link"
    link.symlink_to(NULL)
    assert device.number_of(os.fspath(plain)) is device.number_of(os.fspath(tmp_path / "none")) is None
    assert device.number_of(NULL) == device.number_of(os.fspath(link)) == null
    assert device.number_of(-1) is None
    for flags, usable in ((os.O_RDWR, True), (os.O_PATH, False)):
        fd = os.open(NULL, flags)
        try:
            assert device.number_of(fd) == null
            assert device.is_usable(fd, null) is usable
            assert device.is_open_at(os.getpid(), str(fd), null) is usable
        finally:
            os.close(fd)
    assert not device.is_open_at(os.getpid(), str(fd), null), "closed"
