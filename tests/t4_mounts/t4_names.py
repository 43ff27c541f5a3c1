"""Names that users choose, on a real mount: names of cgroups and mountpoints may be any bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from backend.door.client import facts_of
from ggroupfs.mounts import mount_of, trees
from tests.support.cgroups import answer, cgroup, enter, slice_path
from tests.support.mounted import Mounted, Tenant, eventually, mounted, mountpoint

MIB = 1 << 20
ODD = os.fsdecode(b"a\x0bb\x0c\r\x1c\x1d\x1e \\040\xc2\x85\xe2\x80\xa8\xc2\xa0\xe3\x83\x86\x1b[31m\xff")
"""Name with line ends and blanks for Python's text but not for mountinfo, escapes, other scripts, and invalid bytes."""
NAMES = (ODD, "x (deleted)", f"\v{ODD}")


def command(*words: str | os.PathLike[str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-m", "ggroupfs", *words], capture_output=True)


def test_a_cgroup_is_called_as_somebody_likes(mount: Mounted) -> None:
    """A process in it is not taken to be in another cgroup whose name is a part of its name."""
    with cgroup() as path, Tenant(mount, "--gmem", "64M") as tenant:
        above = mount / "slice" / slice_path(path)
        for count, name in enumerate(NAMES, 1):
            (path / name).mkdir()
            enter(tenant.pid, path / name)
            here = above / name / "0"
            eventually((here / "gmem.current").exists, f"it is in {name!r}")
            held = 64 - 16 * count
            assert sorted(entry for entry in os.listdir(above) if not entry.isdigit()) == sorted(NAMES[:count])
            (here / "gmem.limit.high").write_text(f"{held}M")
            assert tenant.number("gmem.current") == held * MIB, "its limit is that of the slice"
            (here / "gmem.limit.high").write_text("max")
        for words in (["show", "--tree"], ["show", "--json"]):
            done = command(*words, "--mount", mount.path)
            assert (done.returncode, done.stderr) == (0, b"")
            assert b"\x1b" not in done.stdout, "no terminal obeys a name"
            assert str(tenant.pid).encode() in done.stdout
        tenant.stop()
    for name in NAMES:  # the slice goes with its cgroup, which may be sooner
        eventually(lambda name=name: answer(lambda: os.rmdir(above / name)) in (None, "ENOENT"), "it is left by then")


@pytest.fixture
def odd_place() -> Iterator[Path]:
    with mountpoint() as above:
        path = above / ODD
        path.mkdir()
        yield path
        path.rmdir()


def test_a_mountpoint_is_called_as_somebody_likes(odd_place: Path) -> None:
    with mounted(odd_place, expect_errors=["unmounting what is left"]) as mount:
        place = os.fspath(odd_place)
        assert trees().count(place) == 1
        found = mount_of(place)
        assert found is not None
        facts = facts_of(place)
        assert Path(facts["socket"]).is_socket()
        done = command("mount", "--gpu", "soft", odd_place)
        assert (done.returncode, b"is mounted already" in done.stderr) == (1, True)
        with Tenant(mount, "--gmem", "64M") as tenant:
            assert str(tenant.pid).encode() in command("show", "--mount", odd_place).stdout
        done = command("upgrade", odd_place)
        assert done.returncode == 0, done
        assert facts_of(place)["pid"] == facts["pid"]
        done = command("umount", odd_place)
        assert done.returncode == 0, done
        assert mount_of(place) is None
