"""The protocol between jobs and the policy `lanes`, without files and in virtual time."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

import ggroupfs.client.job
from ggroupfs.client.job import Job
from ggroupfs.client.protocol import LINE_MOST, NUMBER_MOST, Announcement, Lines
from ggroupfs.policies import face
from ggroupfs.policies.face import Admit, Decision, Pause, Progress, Run
from ggroupfs.policies.lanes import program
from ggroupfs.policies.lanes.door import Speaker
from ggroupfs.policies.lanes.program import ANNOUNCE_S, Hall
from tests.support.harness import until, virtual
from tests.support.lanes import NoLevers

NUMBERS = st.integers(0, NUMBER_MOST)
HELLO = Announcement("x", 1, 2, 3)


# Lines


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=64), NUMBERS, NUMBERS, NUMBERS)
def test_what_is_announced_is_understood(name: str, persistent: int, ephemeral: int, duration: int) -> None:
    said = Announcement(name, persistent, ephemeral, duration)
    (line,) = Lines().feed(said.line())
    assert Announcement.parse(line) == said


@pytest.mark.parametrize(
    "change",
    [
        {"name": "x" * 65},
        {"name": "a\nb"},
        {"name": "ä"},
        {"name": 5},
        {"persistent": -1},
        {"persistent": True},
        {"ephemeral": 1.5},
        {"ephemeral": NUMBER_MOST + 1},
        {"duration": "1"},
        {"duration": None},
        {"more": 1},
    ],
    ids=str,
)
def test_what_is_no_announcement(change: dict[str, Any]) -> None:
    line = "job " + json.dumps(HELLO._asdict())
    assert Announcement.parse(line) == HELLO
    with pytest.raises(ValueError, match=r".+"):
        Announcement.parse("job " + json.dumps(HELLO._asdict() | change))


@pytest.mark.parametrize("line", ["", "job", "job ", "job 1", "job {}", "job []", "go", "end", "job " + "[" * 1000])
def test_what_is_nothing(line: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Announcement.parse(line)


@given(st.lists(st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=50)), st.data())
def test_lines_in_pieces(lines: Sequence[str], data: st.DataObject) -> None:
    whole, found, maker = "".join(f"{line}\n" for line in lines).encode(), [], Lines()
    while whole:
        size = data.draw(st.integers(1, len(whole)))
        found += maker.feed(whole[:size])
        whole = whole[size:]
    assert found == list(lines)


def test_lines_that_are_too_long() -> None:
    assert Lines().feed(b"x" * (LINE_MOST - 1) + b"\n") == ["x" * (LINE_MOST - 1)]
    for data in (b"x" * LINE_MOST, b"x" * LINE_MOST + b"\n", b"y\n" + b"x" * LINE_MOST):
        with pytest.raises(ValueError, match="a line of more than"):
            Lines().feed(data)
    with pytest.raises(ValueError, match="ascii"):
        Lines().feed(b"\xff\n")


# The policy's end


@pytest.fixture
def sleeper() -> Iterator[int]:
    """Yield the pid of a child."""
    process = subprocess.Popen(["sleep", "600"])
    yield process.pid
    process.kill()
    process.wait()


def ends() -> tuple[socket.socket, socket.socket]:
    """Return the policy's end of a connection, and a job's."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.settimeout(10)
    return ours, theirs


class Turns:
    """A policy that gives each job an iteration in turn."""

    def __init__(self) -> None:
        self._jobs: list[str] = []  # the first job runs

    def job_arrive(self, job: face.Job) -> Sequence[Decision]:
        self._jobs.append(job.name)
        return [Admit(job.name, 1), *([Run(job.name)] if len(self._jobs) == 1 else [])]

    def iteration_end(self, name: str, progress: Progress) -> Sequence[Decision]:
        self._jobs.append(self._jobs.pop(0))
        return [Pause(name), Run(self._jobs[0])] if len(self._jobs) > 1 else []

    def job_finish(self, name: str) -> Sequence[Decision]:
        ran = self._jobs[0] == name
        self._jobs.remove(name)
        return [Run(self._jobs[0])] if ran and self._jobs else []


def hall(levers: NoLevers) -> Hall:
    return Hall(levers, Turns(), report=True)  # type: ignore[arg-type]


@virtual
async def test_who_says_nothing() -> None:
    """A job that does not announce itself is dropped in the end, with or without half a line."""
    for said in (b"", b"job {"):
        ours, theirs = ends()
        with theirs:
            theirs.send(said)
            began = trio.current_time()
            await hall(NoLevers()).serve(ours)
            assert trio.current_time() - began == ANNOUNCE_S
            assert theirs.recv(10) == b""


def test_two_in_turn(monkeypatch: pytest.MonkeyPatch, sleeper: int, capsys: pytest.CaptureFixture[str]) -> None:
    """At a switch, the job whose iteration ended is frozen and the next is thawed and told. A dead job leaves, even if
    its socket is still open."""
    pids = iter([os.getpid(), sleeper])
    monkeypatch.setattr(Speaker, "pid", property(lambda _: next(pids)))
    mine, other, began = f"x-{os.getpid()}", f"x-{sleeper}", time.monotonic()

    async def check() -> None:
        levers = NoLevers()
        room = hall(levers)
        (one, first), (two, second) = ends(), ends()
        with first, second:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(room.serve, one)
                first.send(HELLO.line())
                assert await said(first) == b"go\n"
                nursery.start_soon(room.serve, two)
                second.send(HELLO.line())
                await until(lambda: ("add", other) in levers.pulled, "it has come")
                first.send(b"end\n")
                assert await said(second) == b"go\n"
                assert ("thaw", other) in levers.pulled, "who is told has been thawed"
                await until(lambda: ("freeze", mine) in levers.pulled, "the other one is frozen")
                there = set(levers.pulled[3:])
                second.send(b"end\n")
                assert await said(first) == b"go\n"
                await until(lambda: ("freeze", other) in levers.pulled, "the other one is frozen")
                back = set(levers.pulled[5:])
                os.kill(sleeper, 9)
                assert await said(second) == b""
                await until(lambda: ("discard", other) in levers.pulled, "it has gone")
                first.close()
        assert levers.pulled[:3] == [("add", mine), ("thaw", mine), ("add", other)]
        assert there == {("freeze", mine), ("thaw", other)}
        assert back == {("freeze", other), ("thaw", mine)}
        assert levers.pulled[7:] == [("discard", other), ("discard", mine)]

    trio.run(check)
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    there, back = (one for one in told if one["event"] == "switch")
    assert [(one["from"], one["to"]) for one in (there, back)] == [(mine, other), (other, mine)]
    assert began <= there["monotonic_s"] - there["ms"] / 1e3 < back["monotonic_s"] <= time.monotonic()
    assert [one["iterations"] for one in told if one["event"] == "finish"] == [1, 1]


async def said(connection: socket.socket) -> bytes:
    """Return the next bytes, while the policy's end runs in the same loop."""
    await trio.lowlevel.wait_readable(connection)
    return connection.recv(100)


@virtual
async def test_the_end_of_the_policy() -> None:
    """Jobs are thawed and then told; a connection that is no job yet is dropped."""
    levers, (ours, theirs), (late, nobody) = NoLevers(), ends(), ends()
    room = hall(levers)
    with theirs, nobody:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(room.serve, ours)
            nursery.start_soon(room.serve, late)
            theirs.send(HELLO.line())
            assert await until(lambda: levers.pulled[-1:] == [("thaw", f"x-{os.getpid()}")], "it runs")
            assert await said(theirs) == b"go\n"
            nursery.cancel_scope.cancel()
        assert nobody.recv(10) == b""
        await room.close()
        assert levers.pulled[-1] == ("discard", f"x-{os.getpid()}")
        assert theirs.recv(10) == b"bye\n"
        assert theirs.recv(10) == b""


@virtual
async def test_one_that_ends_what_it_may_not_have_begun(monkeypatch: pytest.MonkeyPatch, sleeper: int) -> None:
    """A job that waits for its turn is dropped for it, and the job that has the turn keeps it."""
    pids = iter([os.getpid(), sleeper])
    monkeypatch.setattr(Speaker, "pid", property(lambda _: next(pids)))
    levers, (ours, theirs), (late, hasty) = NoLevers(), ends(), ends()
    room = hall(levers)
    with theirs, hasty:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(room.serve, ours)
            theirs.send(HELLO.line())
            assert await said(theirs) == b"go\n"
            hasty.send(HELLO.line() + b"end\n")
            await room.serve(late)
            assert hasty.recv(10) == b""
            assert ("freeze", f"x-{os.getpid()}") not in levers.pulled
            theirs.shutdown(socket.SHUT_RDWR)


@virtual
async def test_more_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Further connections are dropped at once; the existing ones stay."""
    monkeypatch.setattr(program, "MOST", 1)
    room, (ours, theirs), (late, nobody) = hall(NoLevers()), ends(), ends()
    with theirs, nobody:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(room.serve, ours)
            await until(lambda: room.connected == 1, "one is there")
            await room.serve(late)
            assert nobody.recv(10) == b""
            theirs.send(HELLO.line())
            assert await said(theirs) == b"go\n"
            theirs.shutdown(socket.SHUT_RDWR)


@virtual
async def test_one_that_cannot_be_thawed() -> None:
    """It is dropped, and the others go on without it."""
    levers = NoLevers()
    levers.stuck = {f"x-{os.getpid()}"}
    ours, theirs = ends()
    with theirs:
        theirs.send(HELLO.line())
        await hall(levers).serve(ours)
        assert theirs.recv(10) == b""
    assert levers.pulled[-1] == ("discard", f"x-{os.getpid()}")


# The job's end


class Policy(threading.Thread):
    """A policy that follows a script, one connection after another: lines to send, and None to wait for a line."""

    def __init__(self, place: Path, *connections: Sequence[bytes | None]) -> None:
        super().__init__()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(os.fspath(place))
        self._listener.listen()
        self._connections = connections
        self.heard: list[bytes] = []
        """All lines, without their ends."""

    def __enter__(self) -> Policy:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.join()

    def run(self) -> None:
        with self._listener:
            for number, steps in enumerate(self._connections, 1):
                connection, _ = self._listener.accept()
                if number == len(self._connections):
                    self._listener.close()  # a policy does so before it ends
                with connection, connection.makefile("rb") as lines:
                    for step in steps:
                        if step is None:
                            self.heard.append(lines.readline().rstrip(b"\n"))
                        else:
                            connection.sendall(step)


def job(place: Path, **more: Any) -> Job:
    return Job(persistent=1, ephemeral=2, duration=3, name="x", socket=place, **more)


def test_a_job_waits_for_its_turn(tmp_path: Path) -> None:
    """It reports the end of an iteration only after the iteration's work on the GPU is done."""
    place, order = tmp_path / "s", []
    with (
        Policy(place, [None, b"go\n", None, b"go\n", None, None]) as policy,
        job(place, settle=lambda: order.append("settled")) as work,
    ):
        for number in range(2):
            with work.iteration():
                order.append(number)
    assert order == [0, "settled", 1, "settled"]
    assert policy.heard == [Announcement("x", 1, 2, 3 * 10**9).line().rstrip(b"\n"), b"end", b"end", b""]


def test_an_iteration_that_fails_ends_too(tmp_path: Path) -> None:
    place = tmp_path / "s"
    with (
        Policy(place, [None, b"go\n", None, None]) as policy,
        job(place) as work,
        pytest.raises(ZeroDivisionError),
        work.iteration(),
    ):
        1 / 0  # noqa: B018
    assert policy.heard[1:] == [b"end", b""]


def test_a_job_that_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "s"
    with Policy(place, [None, b"refused it is too large\n"]), pytest.raises(OSError, match="it is too large"):
        job(place).__enter__()


def test_a_job_without_a_policy(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        job(tmp_path / "s").__enter__()
    for wrong in ({"persistent": -1}, {"name": "ä"}, {"duration": -1.0}, {"ephemeral": 1.5}):
        with pytest.raises(ValueError, match=r".+"):
            Job(**{"persistent": 1, "ephemeral": 2, "duration": 3.0, "socket": tmp_path} | wrong)


def test_a_job_whose_policy_breaks_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job announces itself again, with its remaining work; a policy that says `bye` is not waited for."""
    place = tmp_path / "s"
    monkeypatch.setattr(ggroupfs.client.job, "PATIENCE_S", 1000)
    with Policy(place, [None, b"go\n", None], [None, b"go\n", None, b"bye\n"]) as policy, job(place) as work:
        for _ in range(2):
            with work.iteration():
                pass
        place.unlink()
        for _ in range(2):
            with work.iteration():
                pass
    first, again = (Announcement.parse(line.decode()) for line in policy.heard if line.startswith(b"job"))
    assert first.duration - again.duration > 0
    assert again == first._replace(duration=again.duration)


def test_a_job_needs_nothing_but_python() -> None:
    code = "import sys; from ggroupfs.client import Job; print(sorted({'trio', 'attr', 'attrs'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
