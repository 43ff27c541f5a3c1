"""Level 2: the control daemon of a space, as a double of NVIDIA's."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import trio

from backend.process import procfs
from backend.process.identity import Process, Slice
from backend.space import control
from backend.space.control import PROGRAM, Control, find
from backend.space.space import Record, Space, directory_for, read_records
from tests.support.mps import MpsDouble

ROOT = Path(__file__).resolve().parents[2]
SPACE = Space(Slice("/gpu.slice"), os.geteuid(), 0xABCDE)


async def until(condition: Callable[[], object], what: str) -> None:
    """Wait for something that other processes do."""
    give_up = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up, f"never: {what}"
        await trio.sleep(0.01)


@pytest.fixture
def place(public: Path) -> Iterator[Path]:
    """The directory of the spaces. No control daemon is left at the end."""
    directory = public / "ggroup.mps"
    directory.mkdir()
    yield directory
    while control._LEFT:
        child = control._LEFT.pop()
        child.kill()
        child.wait()


def drive(test: Callable[[Control], Awaitable[None]], double: MpsDouble, place: Path) -> None:
    """Run a test with a control daemon that is not started yet, and end it in the end."""

    async def main() -> None:
        one = Control(double.program, place, SPACE)
        try:
            await test(one)
        finally:
            pids = one.servers()
            one.kill()
            await one.ended()
            one.close()
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

    trio.run(main)


def test_it_is_started_in_directories_of_its_own_and_quits(tmp_path: Path, place: Path) -> None:
    double = MpsDouble(tmp_path / "bin")

    async def test(one: Control) -> None:
        assert one.has_ended()
        await one.start()
        assert one.process is not None
        assert (place / "000abcde" / "pipe").stat().st_mode & 0o777 == 0o700
        environ = procfs.of_process(one.process.pid, "environ").split(b"\0")
        names = {line.partition(b"=")[0] for line in environ}
        assert b"CUDA_MPS_PIPE_DIRECTORY" in names
        assert b"HOME" not in names, "nothing of ours"
        assert await one.ask("start_server -uid 0")
        await until(lambda: len(one.servers()) == 1, "a server")
        pid = one.servers()[0]
        assert one.is_server(pid)
        assert not one.is_server(os.getpid())
        os.kill(pid, signal.SIGKILL)
        assert await one.ask("quit")
        await one.ended()
        assert one.has_ended()
        one.close()
        one.remove()
        assert not (place / "000abcde").exists()

    drive(test, double, place)
    assert double.commands == ["start_server -uid 0", "quit"]


def test_quit_waits_for_the_last_client(tmp_path: Path, place: Path) -> None:
    double = MpsDouble(tmp_path / "bin")
    double.hold()

    async def test(one: Control) -> None:
        await one.start()
        assert await one.ask("quit")
        with trio.move_on_after(0.3):
            await one.ended()
        assert not one.has_ended()
        double.release()
        await one.ended()

    drive(test, double, place)


@pytest.mark.parametrize(
    ("first", "words"),
    [("echo no GPU is there >&2; exit 1", "it ended: no GPU is there"), ("exit 0", "it ended: without a word")],
)
def test_one_that_refuses_says_why(tmp_path: Path, place: Path, first: str, words: str) -> None:
    async def test(one: Control) -> None:
        with pytest.raises(OSError, match=words) as raised:
            await one.start()
        assert raised.value.errno == errno.ECHILD

    drive(test, MpsDouble(tmp_path / "bin", first=first), place)


def test_one_that_does_not_listen_is_ended(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "START_S", 0.3)

    async def test(one: Control) -> None:
        with pytest.raises(OSError, match="does not listen") as raised:
            await one.start()
        assert raised.value.errno == errno.ETIMEDOUT
        await one.ended()

    drive(test, MpsDouble(tmp_path / "bin", first="exec sleep 600"), place)


def test_it_outlives_the_daemon_that_hears_its_words(tmp_path: Path, place: Path) -> None:
    """What it says later goes nowhere: a pipe without a reader would end it."""
    double = MpsDouble(tmp_path / "bin", quit='/bin/echo a word && touch "$here/said"')

    async def test(one: Control) -> None:
        await one.start()
        assert one.process is not None
        process = one.process
        one.close()
        other = Control(double.program, place, SPACE)
        assert await other.adopt(process)
        assert await other.ask("quit")
        await other.ended()
        other.close()

    drive(test, double, place)
    assert (double.directory / "said").exists()


def test_directories_of_any_depth_are_removed(tmp_path: Path, place: Path) -> None:
    one = Control(MpsDouble(tmp_path / "bin").program, place, SPACE)
    one.pipe.mkdir(parents=True)
    above = os.open(one.pipe, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=above)
        below = os.open("d", os.O_RDONLY, dir_fd=above)
        os.close(above)
        above = below
    os.close(above)
    try:
        one.remove()
        assert not one.path.exists()
    finally:
        subprocess.run(["rm", "-rf", one.path], check=True)  # pytest does not get down there either


def test_what_the_user_puts_there_is_not_looked_at(tmp_path: Path, place: Path) -> None:
    """A link in place of its socket could lead anywhere, to what does not answer, too."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.symlink_to(elsewhere)
    double = MpsDouble(tmp_path / "bin", first=f'ln -s "{elsewhere}" "$pipe/control"; exec sleep 600')

    async def test(one: Control) -> None:
        await one.start()
        assert one.process is not None
        pid = one.process.pid
        await until(lambda: procfs.command(pid) == "sleep", "it goes on")

    drive(test, double, place)


def test_one_that_cannot_be_noted_is_ended(tmp_path: Path, place: Path) -> None:
    """No later daemon would know of it."""

    async def test(one: Control) -> None:
        def started(process: Process) -> None:
            raise OSError(errno.ENOSPC, "no room")

        with pytest.raises(OSError, match="no room"):
            await one.start(started)
        with trio.fail_after(10):
            await one.ended()

    drive(test, MpsDouble(tmp_path / "bin"), place)


def test_one_that_no_descriptor_is_left_for_is_ended(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start would have two of them."""

    def full(pid: int) -> int:
        raise OSError(errno.EMFILE, "too many files")

    async def test(one: Control) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pidfd_open", full)
            with pytest.raises(OSError, match="too many files"):
                await one.start()
        assert one.has_ended()
        assert one._child is not None
        assert one._child.returncode == -signal.SIGKILL
        await one.start()

    drive(test, MpsDouble(tmp_path / "bin"), place)


def test_one_process_is_the_server(tmp_path: Path, place: Path) -> None:
    """The control daemon is its user's, which could have it start any number of them."""

    async def test(one: Control) -> None:
        await one.start()
        for count in (1, 2):
            assert await one.ask("start_server -uid 0")
            await until(lambda count=count: len(one.servers()) == count, "servers")  # type: ignore[misc]
        first, second = one.servers()
        assert (one.is_server(first), one.is_server(second)) == (True, False)
        os.kill(first, signal.SIGKILL)
        await until(lambda: one.is_server(second), "it is the server")
        os.kill(second, signal.SIGKILL)
        one.kill()
        gone = [Path(procfs.PROC, str(pid)) for pid in (first, second)]
        await until(lambda: not any(path.exists() for path in gone), "they are gone")

    drive(test, MpsDouble(tmp_path / "bin"), place)


def test_a_command_that_hangs_is_given_up(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "ASK_S", 0.3)

    async def test(one: Control) -> None:
        await one.start()
        assert not await one.ask("get_server_list")
        assert not one.has_ended()

    drive(test, MpsDouble(tmp_path / "bin", client="exec sleep 600"), place)


def test_the_next_daemon_finds_it(tmp_path: Path, place: Path) -> None:
    """By its record, which has the start of the process: a pid that another one bears by now is left alone."""
    double = MpsDouble(tmp_path / "bin")

    async def test(one: Control) -> None:
        await one.start()
        Record(SPACE, one.process).write(place)
        (record,) = read_records(place)
        assert record == Record(SPACE, one.process)
        assert record.control is not None
        other = Control(double.program, place, SPACE)
        assert not await other.adopt(Process(record.control.pid, record.control.start + 1))
        assert not await other.adopt(Process(os.getpid(), record.control.start)), "it is another program"
        assert await other.adopt(record.control)
        assert await other.ask("quit")
        await other.ended()
        assert not await other.adopt(record.control)
        other.close()

    drive(test, double, place)


def test_what_is_no_record(tmp_path: Path) -> None:
    """It is left out, and does not keep others from being read."""
    for name, text in (("00000001", "{}"), ("00000002", "nonsense"), ("x", "{}"), (".00000003", "{}")):
        (tmp_path / f"{name}.record").write_text(text)
    Record(SPACE, None).write(tmp_path)
    assert read_records(tmp_path) == [Record(SPACE, None)]
    assert read_records(tmp_path / "none") == []


def test_the_program_is_roots(tmp_path: Path) -> None:
    """What others could replace is not started as another user."""
    path = tmp_path / PROGRAM
    assert find([str(tmp_path)]) is None
    path.write_text("#!/bin/sh\n")
    assert find([str(tmp_path)]) is None, "it is no program"
    path.chmod(0o755)
    assert find([str(tmp_path)]) == path
    path.chmod(0o775)
    assert find([str(tmp_path)]) is None


@pytest.mark.parametrize(
    ("socket", "directory"), [("/run/a/ggroup.sock", "/run/a/ggroup.mps"), ("/run/a/here", "/run/a/here.mps")]
)
def test_the_directory_is_beside_the_socket(socket: str, directory: str) -> None:
    assert directory_for(Path(socket)) == Path(directory)


def test_another_user_takes_root(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon without rights refuses, and starts nothing as itself."""
    double = MpsDouble(tmp_path / "bin")
    monkeypatch.setattr(control.os, "geteuid", lambda: 1234)
    one = Control(double.program, place, Space(Slice("/a"), 4321, 7))
    with pytest.raises(PermissionError):
        trio.run(one.start)
    assert double.starts == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts programs of others")
def test_it_runs_as_the_user(public: Path, place: Path) -> None:
    double = MpsDouble(public / "bin", first="id -u > $pipe/id; id -G >> $pipe/id")

    async def main() -> None:
        one = Control(double.program, place, Space(Slice("/a"), 65533, 7))
        await trio.to_thread.run_sync(partial((double.directory / "starts").touch, 0o666))
        (double.directory / "starts").chmod(0o666)
        await one.start()
        assert (one.pipe / "id").read_text().split() == ["65533", str(control.NO_GROUP)]
        assert one.pipe.stat().st_uid == 65533
        one.kill()
        await one.ended()
        one.close()

    trio.run(main)


START = """
import sys, trio
from pathlib import Path
from backend.process.identity import Slice
from backend.space.control import Control
from backend.space.space import Space

async def main():
    one = Control(Path(sys.argv[1]), Path(sys.argv[2]), Space(Slice("/a"), 65533, 7))
    await one.start()
    assert await one.ask("quit")
    await one.ended()
    one.close()
    one.remove()

trio.run(main)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts programs of others")
def test_the_capabilities_of_the_service_are_enough(public: Path, place: Path) -> None:
    """The packaged unit's, and not only root's full set, to start one as another user and to remove what it left."""
    double = MpsDouble(public / "bin")
    for name in ("starts", "commands"):
        (double.directory / name).touch()
        (double.directory / name).chmod(0o666)
    lines = (ROOT / "systemd" / "ggroupfs.service").read_text(encoding="utf-8").splitlines()
    sets = [line.partition("=")[2].split() for line in lines if line.startswith("CapabilityBoundingSet=")]
    granted = [f"+{word.removeprefix('CAP_').lower()}" for words in sets for word in words]
    words = ["setpriv", "--bounding-set", ",".join(["-all", *granted]), sys.executable, "-c", START]
    done = subprocess.run(
        [*words, double.program, place], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert double.commands == ["quit"]
    assert not list(place.iterdir())
