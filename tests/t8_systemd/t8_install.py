"""make install and make uninstall, run on the host with a DESTDIR."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]


def make(target: str, destination: Path, prefix: str) -> str:
    """Run a target of the Makefile, and return what it printed on standard error."""
    words = ["make", "-s", "-C", os.fspath(TOP), target, f"DESTDIR={destination}", f"PREFIX={prefix}"]
    # Without the variables of the make that runs this test, which carry its options.
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS")}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done
    return done.stderr


def tree(top: Path) -> set[str]:
    """All paths below a directory, including directories."""
    return {os.fspath(path.relative_to(top)) for path in top.rglob("*")}


@pytest.mark.parametrize("prefix", ["/usr/local", "/usr"])
def test_uninstall_takes_away_exactly_what_install_made(tmp_path: Path, prefix: str) -> None:
    """Directories that existed before stay, even empty ones, and so do files that others have added since."""
    (tmp_path / "usr/local/include").mkdir(parents=True)
    (tmp_path / "usr/local/bin").mkdir()
    (tmp_path / "usr/local/bin/other").touch()
    before = tree(tmp_path)
    make("install", tmp_path, prefix)
    installed = tree(tmp_path)
    own = prefix.strip("/")
    for name in (
        *("bin/ggroupfs", "lib/ggroupfs/ggroupfs/cli.py", "lib/ggroupfs/backend/cuda/libggroup-cuda.so"),
        *("lib/systemd/system/ggroupfs.service", "lib/systemd/system/ggroupfs-metrics.service"),
        *("lib/systemd/system/ggroupfs-policy@.service", "lib/systemd/system-generators/ggroupfs"),
        *("lib/systemd/system/run-ggroup.mount", "lib/sysusers.d/ggroupfs.conf", "lib/tmpfiles.d/ggroupfs.conf"),
        *("include/ggroup_usermem.h", "share/man/man8/ggroupfs.8.gz"),
    ):
        assert f"{own}/{name}" in installed
    assert {
        "usr/sbin/mount.fuse.ggroupfs",
        "etc/ggroupfs/slices.d",
        "etc/ggroupfs/policies",
        "etc/default/ggroupfs",
    } <= installed
    assert (tmp_path / "usr/sbin/mount.fuse.ggroupfs").resolve() == tmp_path / own / "bin/ggroupfs"
    assert (
        f"ExecStart={prefix}/bin/ggroupfs mount" in (tmp_path / own / "lib/systemd/system/ggroupfs.service").read_text()
    )
    make("install", tmp_path, prefix)
    assert tree(tmp_path) == installed
    (tmp_path / "etc/ggroupfs/slices.d/mine.conf").touch()
    make("uninstall", tmp_path, prefix)
    kept = {"etc", "etc/ggroupfs", "etc/ggroupfs/slices.d", "etc/ggroupfs/slices.d/mine.conf"}
    assert tree(tmp_path) == before | kept
    assert "nothing is installed" in make("uninstall", tmp_path, prefix)


def test_the_installed_command_finds_its_own_modules_and_no_others(tmp_path: Path) -> None:
    """The caller's PYTHONPATH is not searched, and running the command leaves no new files."""
    make("install", tmp_path, "/usr/local")
    lib = tmp_path / "usr/local/lib/ggroupfs"
    command = tmp_path / "usr/local/bin/ggroupfs"
    command.write_text(command.read_text().replace('"/usr/local/lib/ggroupfs"', f'"{lib}"'))
    (tmp_path / "trio.py").write_text("raise SystemExit('the wrong one')\n")
    environment = os.environ | {"PYTHONPATH": os.fspath(tmp_path)}
    before = tree(tmp_path)
    done = subprocess.run(
        [command, "doctor", "--json"], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert tree(tmp_path) == before
