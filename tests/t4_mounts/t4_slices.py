"""Slices on a real mount: real cgroups, hierarchy, moves, and delegation of a subtree."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cgroups import cgroup, enter, slice_path
from tests.support.mounted import Mounted, Tenant, eventually

MIB = 1 << 20
NOBODY = 65534


@pytest.fixture
def batch() -> Iterator[Path]:
    """A cgroup like a systemd slice, with two below it."""
    with cgroup() as path:
        (path / "a.service").mkdir()
        (path / "b.service").mkdir()
        yield path


def slice_dir(mount: Mounted, path: Path, gpu: int = 0) -> Path:
    return mount / "slice" / slice_path(path) / str(gpu)


def put(mount: Mounted, tenant: Tenant, path: Path) -> None:
    """Move a tenant to a cgroup and wait for the tree to follow."""
    enter(tenant.pid, path)
    eventually(lambda: (slice_dir(mount, path) / "compute.events").exists(), "its slice appears")


def read(path: Path, name: str) -> str:
    return (path / name).read_text().strip()


def test_a_slice_appears_with_its_process_and_goes_with_it(mount: Mounted, batch: Path) -> None:
    here = slice_dir(mount, batch / "a.service")
    assert not here.exists()
    with Tenant(mount, "--gmem", "64M") as tenant:
        put(mount, tenant, batch / "a.service")
        assert read(here, "gmem.current") == str(64 * MIB)
        assert read(here.parent.parent / "0", "gmem.current") == str(64 * MIB)
        assert "populated 1" in read(here, "compute.events")
        with pytest.raises(OSError, match="busy"):
            os.rmdir(here.parent)
    eventually(lambda: not (mount / "slice" / slice_path(batch)).exists(), "the slice is gone", 0.2, mount.watch())


def test_a_limit_of_a_slice_binds_its_members_together(mount: Mounted, batch: Path) -> None:
    with Tenant(mount, "--gmem", "256M") as one, Tenant(mount, "--gmem", "128M") as other:
        put(mount, one, batch / "a.service")
        put(mount, other, batch / "b.service")
        both = slice_dir(mount, batch)
        assert read(both, "gmem.current") == str(384 * MIB)
        (both / "gmem.limit.high").write_text("192M")
        assert int(read(both, "gmem.current")) <= 192 * MIB
        assert one.number("gmem.current") == other.number("gmem.current") == 96 * MIB, "the larger gives first"
        assert int(read(both, "gmem.swap.current")) == 192 * MIB
        one.stop()
        other.stop()
    eventually(lambda: not one.group.exists() and not other.group.exists(), "both are gone")
    assert read(both, "gmem.limit.high") == str(192 * MIB), "a slice on which something was set stays"
    os.rmdir(both.parent)


def test_low_protects_a_member(mount: Mounted, batch: Path) -> None:
    with Tenant(mount, "--gmem", "128M") as one, Tenant(mount, "--gmem", "128M") as other:
        put(mount, one, batch / "a.service")
        put(mount, other, batch / "b.service")
        one.write("gmem.limit.low", "128M")
        both = slice_dir(mount, batch)
        (slice_dir(mount, batch / "a.service") / "gmem.limit.low").write_text("128M")
        (both / "gmem.limit.high").write_text("160M")
        assert one.number("gmem.current") == 128 * MIB
        assert other.number("gmem.current") == 32 * MIB
        (both / "gmem.limit.high").write_text("64M")
        assert one.number("gmem.current") == 64 * MIB, "when nobody else can give, it does"
        assert one.flat("gmem.events")["low"] >= 1
        one.stop()
        other.stop()
    for name in ("a.service", "b.service", ""):
        path = mount / "slice" / slice_path(batch) / name
        eventually(lambda p=path: _removed(p), f"{path} can be removed")


def _removed(path: Path) -> bool:
    if path.exists():
        os.rmdir(path)
    return not path.exists()


def test_charges_and_freezes_follow_a_process_that_moves(mount: Mounted, batch: Path) -> None:
    os.mkdir(mount / "slice" / slice_path(batch))
    for name in ("a.service", "b.service"):
        os.mkdir(mount / "slice" / slice_path(batch / name))
    a, b = (slice_dir(mount, batch / name) for name in ("a.service", "b.service"))
    (b / "compute.freeze").write_text("1")
    assert "frozen 1" in read(b, "compute.events"), "as an empty cgroup, it is frozen at once"
    with Tenant(mount, "--gmem", "64M", "--report", "0.05") as tenant:
        enter(tenant.pid, batch / "a.service")
        eventually(lambda: read(a, "gmem.current") == str(64 * MIB), "charged to where it is")
        enter(tenant.pid, batch / "b.service")
        eventually(lambda: tenant.flat("compute.events")["frozen"], "frozen by where it went")
        assert (read(a, "gmem.current"), read(b, "gmem.current")) == ("0", str(64 * MIB))
        assert tenant.number("compute.freeze") == 0, "it did not ask for it itself"
        stood = tenant.flat("gcgroup.stat")["finished"]
        tenant.write("compute.freeze", 1)
        (b / "compute.freeze").write_text("0")
        assert tenant.flat("compute.events")["frozen"] == 1, "freeze is the OR along the path"
        assert tenant.flat("gcgroup.stat")["finished"] == stood
        tenant.write("compute.freeze", 0)
        eventually(lambda: tenant.flat("gcgroup.stat")["finished"] > stood, "it runs again")
    for path in (a, b, a.parent):
        eventually(lambda p=path.parent: _removed(p), f"{path.parent} can be removed")


def test_a_process_that_starts_in_a_frozen_slice_never_runs(mount: Mounted, batch: Path) -> None:
    path = mount / "slice" / slice_path(batch)
    os.mkdir(path)
    (path / "0/compute.freeze").write_text("1")
    words = [sys.executable, "-m", "ggroupfs", "tenant", "--mount", str(mount.path), "--gmem", "0", "--report", "0.1"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: enter(os.getpid(), batch)
    ) as process:
        try:
            assert process.stdout is not None
            for _ in range(3):
                assert '"finished": 0' in process.stdout.readline()
            assert "attached 0" in read(mount.group(process.pid), "gcgroup.stat")
        finally:
            process.kill()
    eventually(lambda: _removed(path), "the slice can be removed")


def test_children_do_not_escape_by_fork(mount: Mounted, batch: Path) -> None:
    with subprocess.Popen(
        ["sh", "-c", f"{sys.executable} -m ggroupfs tenant --mount {mount.path} --gmem 32M & wait"],
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: enter(os.getpid(), batch),
    ) as shell:
        here = slice_dir(mount, batch)
        eventually(lambda: read(here, "gmem.current") == str(32 * MIB), "the child is charged to the slice")
        for member in mount.members():
            os.kill(member.pid, 9)
        shell.wait()


def as_nobody(script: str) -> int:
    """Run a shell without rights; return its exit code."""
    words = ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups", "sh", "-c", script]
    return subprocess.run(words, stderr=subprocess.DEVNULL, check=False).returncode


def test_a_chowned_slice_gives_what_is_below_and_not_its_own(mount: Mounted, batch: Path) -> None:
    path = mount / "slice" / slice_path(batch)
    os.mkdir(path)
    with Tenant(mount, "--gmem", "32M") as tenant:
        put(mount, tenant, batch / "a.service")
        below = slice_dir(mount, batch / "a.service")
        assert as_nobody(f"echo 1 > {below}/compute.freeze") != 0
        assert as_nobody(f"cat {below}/gmem.current >/dev/null") == 0, "everybody may look"
        os.chown(path, NOBODY, NOBODY)
        eventually(lambda: (below / "compute.freeze").stat().st_uid == NOBODY, "the kernel forgets who owned it")
        assert as_nobody(f"echo 1 > {below}/compute.freeze") == 0
        assert as_nobody(f"echo 0 > {below}/compute.freeze && echo 16M > {tenant.group}/gmem.limit.high") == 0
        assert tenant.number("gmem.current") == 16 * MIB
        assert as_nobody(f"echo 1 > {path}/0/compute.freeze") != 0, "nobody raises its own ceiling"
        assert as_nobody(f"mkdir {path}/c.scope") == 0
        assert as_nobody(f"mkdir {mount}/slice/other.slice") != 0
        assert as_nobody(f"rmdir {path}/c.scope") == 0
        enter(tenant.pid, batch.parent)
        eventually(lambda: (tenant.group / "compute.freeze").stat().st_uid == 0, "who leaves is no longer theirs")
    eventually(lambda: _removed(path / "a.service") and _removed(path), "the slices can be removed")


def test_cgroups_named_like_a_gpu_are_escaped(mount: Mounted, batch: Path) -> None:
    (batch / "0").mkdir()
    with Tenant(mount, "--gmem", "32M") as tenant:
        enter(tenant.pid, batch / "0")
        here = mount / "slice" / slice_path(batch) / "_0" / "0"
        eventually(lambda: read(here, "gmem.current") == str(32 * MIB), "shown with an underscore")
    with pytest.raises(OSError, match="Invalid argument"):
        os.mkdir(mount / "slice" / "7")
