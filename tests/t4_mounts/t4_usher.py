"""The option `usher` of a mount, with real cgroups: a program that starts in a frozen slice waits as it opens a file.

An ordinary file stands in for CUDA's library.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from backend.door.client import facts_of
from ggroupfs.text.names import slice_directory
from tests.support.cgroups import cgroup, frozen, slice_path
from tests.support.command import complaint, ok
from tests.support.mounted import SECONDS, SLOW, Mounted, alive, daemons, eventually, kill, mounted, mountpoint
from tests.support.proc import children_of

SOON_S = 0.3
"""Seconds within which a waiting program is seen to wait."""


@pytest.fixture
def library(tmp_path: Path) -> Path:
    file = tmp_path / "libcuda.so.1"
    file.write_bytes(b"library")
    return file


@pytest.fixture
def place() -> Iterator[Path]:
    """A cgroup."""
    with cgroup() as path:
        yield path


@contextlib.contextmanager
def starting(cgroup: Path, library: Path, *before: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program that enters a cgroup, then opens the library, and says so."""
    program = f'echo $$ > {cgroup}/cgroup.procs; echo there; exec 3< "$1"; echo opened; exec sleep 600'
    words = [*before, "sh", "-c", program, "sh", os.fspath(library)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, bufsize=0) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"there\n"
            os.set_blocking(process.stdout.fileno(), False)
            yield process
        finally:
            process.kill()


def has_opened(process: subprocess.Popen[bytes]) -> bool:
    assert process.stdout is not None
    return process.stdout.read() == b"opened\n"  # None: nothing is there yet


def freeze(mount: Mounted, place: Path, value: int) -> None:
    file = mount / slice_directory(slice_path(place)) / "0" / "compute.freeze"
    file.parent.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{value}")


def waiting(mount: Mounted) -> int:
    return int(facts_of(mount.path)["usher.waiting"])


def ushers(mount: Mounted) -> list[int]:
    """Return the ushers among a daemon's processes."""
    return children_of(int(facts_of(mount.path)["pid"]), b"backend.process.ushering")


def test_it_waits_from_the_freeze_to_the_thaw(tmp_path: Path, library: Path, place: Path) -> None:
    """It waits from the moment that the write returns."""
    with mountpoint() as path, mounted(path, f"usher={library}") as mount:
        for _ in range(20):
            freeze(mount, place, 1)
            with starting(place, library) as one, starting(place.parent, library) as other:
                eventually(lambda: has_opened(other), "the one beside it is not kept")
                eventually(lambda: waiting(mount) == 1, "the one in the slice waits")
                assert not has_opened(one)
                freeze(mount, place, 0)
                eventually(lambda: has_opened(one), "it goes on")


def test_one_below_and_one_that_is_moved_out(library: Path, place: Path) -> None:
    with mountpoint() as path, mounted(path, f"usher={library}") as mount:
        below = place / "below"
        below.mkdir()
        freeze(mount, place, 1)
        with starting(below, library) as process:
            eventually(lambda: waiting(mount) == 1, "it waits")
            (place.parent / "cgroup.procs").write_text(str(process.pid))
            eventually(lambda: has_opened(process), "it is elsewhere now")


def test_one_that_has_a_mount_namespace(library: Path, place: Path, tmp_path: Path) -> None:
    """As in a container, the library has another name there."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"")
    binds = ("unshare", "-m", "sh", "-c", f'mount --bind {library} {elsewhere} && exec "$@"', "sh")
    with mountpoint() as path, mounted(path, f"usher={library}") as mount:
        freeze(mount, place, 1)
        with starting(place, elsewhere, *binds) as process:
            eventually(lambda: waiting(mount) == 1, "it waits")
            time.sleep(SOON_S)
            assert not has_opened(process)
            freeze(mount, place, 0)
            eventually(lambda: has_opened(process), "it goes on")


def test_only_where_it_is_frozen_on_every_gpu(library: Path, place: Path) -> None:
    with mountpoint() as path, mounted(path, "soft.gpus=2", f"usher={library}") as mount:
        freeze(mount, place, 1)
        with starting(place, library) as process:
            eventually(lambda: has_opened(process), "it may use the other one")


def test_a_container_can_be_stopped_meanwhile(library: Path, place: Path) -> None:
    """By the cgroup's own freezer, and it can be killed while stopped."""
    with mountpoint() as path, mounted(path, f"usher={library}") as mount:
        freeze(mount, place, 1)
        with starting(place, library) as process:
            eventually(lambda: waiting(mount) == 1, "it waits")
            (place / "cgroup.kill").write_text("1")
            assert process.wait(SECONDS * SLOW) == -signal.SIGKILL
            eventually(lambda: waiting(mount) == 0, "it is gone")


def test_its_cgroup_can_be_frozen_meanwhile(library: Path, place: Path) -> None:
    """The kernel completes that freeze once no thread of it waits. The program runs no further meanwhile."""
    with mountpoint() as path, mounted(path, f"usher={library}") as mount:
        freeze(mount, place, 1)
        with starting(place, library) as process:
            eventually(lambda: waiting(mount) == 1, "it waits")
            with frozen(place):
                eventually(lambda: waiting(mount) == 0, "it is answered")
                assert not has_opened(process)
            eventually(lambda: has_opened(process), "it goes on with its cgroup")


def test_a_file_of_a_tree_is_not_marked(place: Path) -> None:
    """Nor is a file of any other filesystem that a program serves (FUSE), which may itself wait."""
    with (
        mountpoint() as path,
        mountpoint() as other,
        mounted(other) as tree,
        mounted(path, f"usher={tree / 'ggroup.backend'}", expect_errors=("may not answer by itself",)) as mount,
    ):
        freeze(mount, place, 1)
        with starting(place, tree / "ggroup.backend") as process:
            eventually(lambda: has_opened(process), "it goes on")
            assert waiting(mount) == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_without_its_daemon_or_its_usher_all_go_on(library: Path, place: Path, number: signal.Signals) -> None:
    with mountpoint() as path, daemons(path, f"usher={library}") as start:
        mount = start()
        (usher,) = ushers(mount)
        freeze(mount, place, 1)
        with starting(place, library) as process:
            eventually(lambda: waiting(mount) == 1, "it waits")
            mount.daemon.send_signal(number)
            try:
                eventually(lambda: has_opened(process), "nothing waits for a daemon that is not there")
            finally:
                kill(mount)
        eventually(lambda: not alive(usher), "it ends with the daemon")
        mount = start()  # and the next one goes on from the journal
        with starting(place, library) as process:
            eventually(lambda: waiting(mount) == 1, "it waits")


def test_after_an_upgrade(library: Path, place: Path) -> None:
    with mountpoint() as path, mounted(path, f"usher={library}") as mount:
        freeze(mount, place, 1)
        (former,) = ushers(mount)
        ok("upgrade", mount.path)
        eventually(lambda: len(ushers(mount)) == 1 and ushers(mount) != [former], "the next daemon has one")
        with starting(place, library) as process:
            eventually(lambda: waiting(mount) == 1, "it waits")
            freeze(mount, place, 0)
            eventually(lambda: has_opened(process), "it goes on")


def test_what_doctor_says(library: Path, place: Path) -> None:
    with mountpoint() as path, mounted(path, f"usher={library}") as mount:
        freeze(mount, place, 1)
        with starting(place, library):
            eventually(lambda: waiting(mount) == 1, "it waits")
            found = {one["subject"]: one for one in json.loads(ok("doctor", "--json"))}
            assert "; programs of frozen slices that wait to use a GPU: 1" in found[os.fspath(mount.path)]["why"]
            assert found["usher"]["verdict"] == "ok"


def test_one_that_does_not_answer_twice_is_off_until_the_next_daemon(library: Path) -> None:
    words = ("usher: no answer in time",)
    with mountpoint() as path, mounted(path, f"usher={library}", expect_errors=words) as mount:
        for _ in range(2):
            eventually(lambda: facts_of(mount.path)["usher"] == "yes", "it is there")
            os.kill(ushers(mount)[0], signal.SIGSTOP)
            eventually(lambda: facts_of(mount.path)["usher"] != "yes", "it did not answer")
        assert facts_of(mount.path)["usher"] == "off"
        found = {one["subject"]: one for one in json.loads(ok("doctor", "--json"))}[os.fspath(mount.path)]
        assert found["verdict"] == "advisory"
        assert "its usher is off" in found["why"]
        ok("upgrade", mount.path)
        eventually(lambda: facts_of(mount.path)["usher"] == "yes", "the next daemon has one")


@pytest.mark.parametrize("value", ["", "nothing", "cuda:", ":cuda", "a/b"])
def test_what_makes_no_sense(tmp_path: Path, value: str) -> None:
    complaint("mount", "--gpu", "soft", "-o", f"usher={value}", tmp_path, code=2)


def test_by_default_there_is_none(mount: Mounted) -> None:
    assert not ushers(mount)
    assert "usher" not in facts_of(mount.path)
