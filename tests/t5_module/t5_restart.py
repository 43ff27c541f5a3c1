"""A daemon with its books in the kernel is killed and restarted: settings, counts and freezes are there."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.cgroups import cgroup, enter, slice_path
from tests.support.mounted import SECONDS, Mounted, Tenant, contents, eventually, mounted, reborn
from tests.t5_module.harness import Remote, there_join

Spawn = Callable[..., subprocess.Popen[bytes]]

OPTIONS = ("ledger=kmod", "soft.gpus=2")

PROGRAM = """
import sys
from backend.soft.client import Device

for line in sys.stdin:
    if line == "join\\n":
        device = Device(sys.argv[1])
        tsg = device.join()
        device.alloc(32 << 20)
        print("joined", flush=True)
    elif line == "leave\\n":
        device.close()
        print("left", flush=True)
    else:
        device.launch(tsg, 1, 1000)
        device.take_progress(float(line))
        print(device.finished[tsg], flush=True)
"""


class Program:
    """A program of the software GPU that follows commands, and outlives its GPU."""

    def __init__(self, path: Path) -> None:
        words = [sys.executable, "-c", PROGRAM, os.fspath(path)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def ask(self, word: str) -> str:
        """Send a command; return the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(word, file=self._process.stdin, flush=True)
        return self._process.stdout.readline().strip()


@contextlib.contextmanager
def killed(path: Path) -> Iterator[Mounted]:
    """A mount whose daemon is killed at the end of the block."""
    with mounted(path, *OPTIONS, expect_errors=["(killed)"]) as mount:
        yield mount
        mount.daemon.kill()
        mount.daemon.wait()
        subprocess.run(["fusermount3", "-u", "-z", path], check=True)


@contextlib.contextmanager
def again(path: Path) -> Iterator[Mounted]:
    """The next mount at the same place."""
    with mounted(path, *OPTIONS) as mount:
        yield mount
        mount.check()


def backend(mount: Mounted) -> dict[str, str]:
    return dict(line.split(" ", 1) for line in (mount / "ggroup.backend").read_text().splitlines())


def events(path: Path) -> dict[str, int]:
    return {key: int(value) for key, value in map(str.split, path.read_text().splitlines())}


def test_the_tree_says_who_keeps_the_books(tmp_path: Path) -> None:
    """A GPU keeps its name over a restart, by which its books are found."""
    names = []
    with killed(tmp_path) as mount:
        assert backend(mount)["ledger"] == "kernel"
        names.append((mount / "gpus/0/uuid").read_text())
    with again(tmp_path) as mount:
        names.append((mount / "gpus/0/uuid").read_text())
        names.append((mount / "gpus/1/uuid").read_text())
    assert names[0] == names[1] != names[2]


@pytest.mark.parametrize(("asked", "found"), [("auto", "kernel"), ("kmod", "kernel"), ("soft", "soft")])
def test_the_choice(tmp_path: Path, asked: str, found: str) -> None:
    with mounted(tmp_path, f"ledger={asked}") as mount:
        assert backend(mount)["ledger"] == found


def test_limits_of_a_process(tmp_path: Path, spawn: Spawn) -> None:
    """Every setting of a process that had no context yet, on each of its GPUs."""
    pid = spawn().pid
    with killed(tmp_path) as mount:
        (mount / pid).mkdir()
        for name, value in (
            ("gmem.limit.high", "1G"),
            ("gmem.limit.low", "1M"),
            ("gmem.swap.max", "2G"),
            ("compute.timeslice", "4"),
            ("compute.freeze", "1"),
        ):
            (mount.group(pid, 1) / name).write_text(value)
        before = [contents(mount.group(pid, gpu)) for gpu in (0, 1)]
        assert "frozen 1" in before[1]["compute.events"]
    with again(tmp_path) as mount:
        eventually(lambda: [contents(mount.group(pid, gpu)) for gpu in (0, 1)] == before, "all is as it was")
        (mount.group(pid, 1) / "compute.freeze").write_text("0")
        assert "frozen 0" in (mount.group(pid, 1) / "compute.events").read_text()
        (mount / pid).rmdir()


def test_slices(tmp_path: Path, spawn: Spawn) -> None:
    """A slice that was made, its limits, its owner and what is below it; not the empty one that came by itself."""
    with cgroup("ggroup-restart") as outer:
        made, passing = outer / "made", outer / "passing"
        made.mkdir()
        passing.mkdir()
        inside, victim = spawn(), spawn()
        enter(inside.pid, made)
        enter(victim.pid, passing)
        with killed(tmp_path) as mount:
            top = mount / "slice"
            for part in Path(slice_path(made)).parts:
                top = top / part
                top.mkdir(exist_ok=True)
            (top / "0/gmem.limit.high").write_text("1G")
            os.chown(top, 1000, 100)
            (top / "back").mkdir()
            os.chown(top / "back", 0, 0)
            for process in (inside, victim):
                (mount / process.pid).mkdir()
            assert (mount / "slice" / slice_path(passing)).exists()
        victim.kill()
        victim.wait()
        with again(tmp_path) as mount:
            assert (top / "0/gmem.limit.high").read_text() == f"{1 << 30}\n"
            assert (top.stat().st_uid, top.stat().st_gid) == (1000, 100)
            assert (top / "back").stat().st_uid == 0
            (top / "back").rmdir()
            assert (top / "0/gmem.limit.high").stat().st_uid == 0
            assert (mount.group(inside.pid) / "compute.freeze").stat().st_uid == 1000
            assert not (mount / "slice" / slice_path(passing)).exists()
            assert not (mount / victim.pid).exists()


def test_a_process_that_moved_meanwhile(tmp_path: Path, spawn: Spawn) -> None:
    """It is where its cgroup is, and a freeze there holds for it."""
    pid = spawn().pid
    with cgroup("ggroup-restart") as outer:
        (outer / "a").mkdir()
        (outer / "b").mkdir()
        enter(pid, outer / "a")
        with killed(tmp_path) as mount:
            (mount / pid).mkdir()
            frozen = mount / "slice" / slice_path(outer / "a") / "0/compute.freeze"
            frozen.write_text("1")
            assert "frozen 1" in (mount.group(pid) / "compute.events").read_text()
        enter(pid, outer / "b")
        with again(tmp_path) as mount:
            eventually(lambda: "frozen 0" in (mount.group(pid) / "compute.events").read_text(), "it is thawed")
            assert (mount / "slice" / slice_path(outer / "b") / "0").is_dir()
            assert frozen.read_text() == "1\n"
            frozen.write_text("0")


def test_a_program_that_comes_back(tmp_path: Path) -> None:
    """Its counts go on, its limit holds for allocations, and it is frozen before it runs anything."""
    with Program(tmp_path) as program:
        with killed(tmp_path) as mount:
            group = mount.group(program.pid)
            assert program.ask("join") == "joined"
            assert program.ask("1") == "1"
            (group / "gmem.limit.high").write_text("16M")
            (group / "compute.freeze").write_text("1")
            before = events(group / "gmem.events")
            assert before["reclaim"] > 0
            moved = events(group / "gmem.stat")["swapout_bytes"]
        assert program.ask("leave") == "left"
        with again(tmp_path):
            assert events(group / "gmem.events") == before
            assert events(group / "gmem.stat")["swapout_bytes"] == moved
            assert (group / "gmem.current").read_text() == "0\n", "its memory went with the GPU"
            assert program.ask("join") == "joined"
            assert int((group / "gmem.current").read_text()) <= 16 << 20
            assert "frozen 1" in (group / "compute.events").read_text()
            assert program.ask("0.3") == "0"
            (group / "compute.freeze").write_text("0")
            assert int(program.ask("1")) > 0


def test_a_program_that_joins_by_itself(tmp_path: Path) -> None:
    """The daemon hears of it, even if its directory was made before."""
    program = Remote()
    with mounted(tmp_path, *OPTIONS) as mount:
        (mount / program.pid).mkdir()
        path = mount.group(program.pid) / "compute.events"
        assert "populated 0" in path.read_text()
        program.do(there_join, (mount / "gpus/0/uuid").read_text().strip())
        assert "populated 1" in path.read_text()
    program.end()


def test_who_joined_by_itself_is_not_asked_again(tmp_path: Path, spawn: Spawn) -> None:
    """It said once that it uses the GPU; the next daemon knows that, and knows of no others."""
    program, other = Remote(), spawn()
    with killed(tmp_path) as mount:
        program.do(there_join, (mount / "gpus/0/uuid").read_text().strip())
        (mount / other.pid).mkdir()
    with again(tmp_path) as mount:
        assert "populated 1" in (mount.group(program.pid) / "compute.events").read_text()
        assert "populated 0" in (mount.group(other.pid) / "compute.events").read_text()
        program.end()
        eventually(lambda: not (mount / program.pid).exists(), "it is gone")


def test_the_dead_and_the_reborn(tmp_path: Path, spawn: Spawn) -> None:
    """A process that died while no daemon ran is gone, and a new one with its pid inherits nothing."""
    victim, first = spawn(), spawn()
    with killed(tmp_path) as mount:
        for process in (victim, first):
            (mount / process.pid).mkdir()
            (mount.group(process.pid) / "gmem.limit.high").write_text("1G")
    for process in (victim, first):
        process.kill()
        process.wait()
    with reborn(first.pid) as second, again(tmp_path) as mount:
        assert not (mount / victim.pid).exists()
        assert not (mount / second).exists()
        (mount / second).mkdir()
        assert (mount.group(second) / "gmem.limit.high").read_text() == "max\n"


def test_a_clean_end_is_an_end(tmp_path: Path, spawn: Spawn) -> None:
    """The software GPU goes with its mount, and nothing of it is left in the kernel."""
    pid = spawn().pid
    with mounted(tmp_path, *OPTIONS) as mount:
        (mount / "slice/job").mkdir()
        (mount / pid).mkdir()
        (mount.group(pid) / "compute.freeze").write_text("1")
        mount.daemon.terminate()
        assert mount.daemon.wait(SECONDS) == 0
    with again(tmp_path) as mount:
        assert os.listdir(mount / "slice") == []
        assert not (mount / pid).exists()


def test_killed_twice(tmp_path: Path, spawn: Spawn) -> None:
    """The state that one daemon found, and settings of the next, are all there for the third."""
    one, other = spawn().pid, spawn().pid
    with killed(tmp_path) as mount:
        (mount / one).mkdir()
        (mount.group(one) / "compute.freeze").write_text("1")
    with killed(tmp_path) as mount:
        (mount / other).mkdir()
        (mount.group(other) / "compute.freeze").write_text("1")
    with again(tmp_path) as mount:
        for pid in (one, other):
            events_file = mount.group(pid) / "compute.events"
            eventually(lambda path=events_file: "frozen 1" in path.read_text(), "it is frozen")


def test_two_mounts_are_two_sets_of_gpus(tmp_path: Path) -> None:
    """Each has books of its own."""
    places = [tmp_path / name for name in ("one", "other")]
    for place in places:
        place.mkdir()
    with mounted(places[0], *OPTIONS) as one, mounted(places[1], *OPTIONS) as other, Tenant(one, "--gmem", "64M"):
        assert (one / "gpus/0/uuid").read_text() != (other / "gpus/0/uuid").read_text()
        assert (one / "gpus/0/gmem.current").read_text() == f"{64 << 20}\n"
        assert (other / "gpus/0/gmem.current").read_text() == "0\n"
