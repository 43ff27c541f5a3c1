"""Findings of `ggroupfs doctor` on mounted trees."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

from backend.door.client import facts_of
from ggroupfs.commands.mounted import STRAY
from ggroupfs.text.names import slice_directory
from tests.support.cgroups import cgroup, slice_path
from tests.support.command import ok
from tests.support.mounted import Mounted, eventually, mounted


def of(place: Path) -> dict[str, tuple[str, str]]:
    """Return verdict and words on a tree and on what is in it, by subject."""
    found = json.loads(ok("doctor", "--json"))
    start = os.fspath(place)
    return {one["subject"]: (one["verdict"], one["why"]) for one in found if one["subject"].startswith(start)}


def test_where_it_is_and_what_serves_it(mount: Mounted) -> None:
    facts = facts_of(mount.path)
    verdict, why = of(mount.path)[os.fspath(mount.path)]
    assert verdict == "ok"
    assert why.startswith(f"soft GPUs, books of {facts['ledger']}, served by process {facts['pid']}")
    assert why.endswith(f"at socket {facts['socket']}")


def test_where_it_is_besides(mount: Mounted, tmp_path: Path) -> None:
    subprocess.run(["mount", "--bind", mount.path, tmp_path], check=True)
    try:
        assert of(mount.path)[os.fspath(mount.path)][1].endswith(f", also at {tmp_path}")
        assert of(tmp_path) == {}
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_stray_slices(mount: Mounted) -> None:
    """A slice made ahead is one until its cgroup exists; once the cgroup exists, the slice goes with it."""
    path = mount / "slice" / "ahead.slice"
    path.mkdir()
    assert of(path) == {os.fspath(path): ("advisory", STRAY)}
    path.rmdir()
    with cgroup() as place:
        path = mount / slice_directory(slice_path(place))
        path.mkdir()
        assert of(path) == {}
    eventually(lambda: not path.exists(), "it goes with its cgroup")
    assert of(path) == {}


def test_a_daemon_that_is_dead_and_one_that_hangs(tmp_path: Path) -> None:
    with mounted(tmp_path, expect_errors=["there is no such line"]) as mount:
        mount.daemon.send_signal(signal.SIGSTOP)
        try:
            verdict, why = of(tmp_path)[os.fspath(tmp_path)]
        finally:
            mount.daemon.send_signal(signal.SIGCONT)
        assert verdict == "advisory"
        assert why.startswith("does not answer within 2 s")
        mount.daemon.kill()
        mount.daemon.wait()
        verdict, why = of(tmp_path)[os.fspath(tmp_path)]
        assert verdict == "advisory"
        assert why.startswith("its daemon is dead")
        subprocess.run(["umount", "-l", tmp_path], check=True)
