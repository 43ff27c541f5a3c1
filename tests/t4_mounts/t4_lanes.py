"""The policy `lanes` at work: real programs on a software GPU that report the end of iterations, and take turns."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ggroupfs.client.protocol import LINE_MOST, Announcement
from tests.support.command import complaint
from tests.support.mounted import SECONDS, SLOW, Mounted, eventually
from tests.support.policy_program import PolicyProgram

MIB = 1 << 20
GMEM = 16 * MIB


class JobProgram:
    """A running `lanes_job.py`."""

    def __init__(self, mount: Mounted, place: Path, name: str, iterations: int, kernel: int, *options: object) -> None:
        words = [mount.path, place, name, "--iterations", iterations, "--kernel", kernel, *options]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.lanes_job", *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._buffer = b""
        self.kernel = kernel
        """Microseconds of an iteration."""
        self.pid = self._process.pid
        self.name = f"{name}-{self.pid}"
        """Name that the policy gives it."""
        self.group = mount.group(self.pid)
        self.told: list[dict[str, Any]] = []
        """All messages so far."""

    def next(self, seconds: float = SECONDS) -> dict[str, Any] | None:
        """Return its next message; None once it has ended."""
        assert self._process.stdout is not None
        while b"\n" not in self._buffer:
            assert select.select([self._process.stdout], [], [], seconds * SLOW)[0], f"{self.name}: {self.told[-3:]}"
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        self.told.append(json.loads(line))
        return self.told[-1]

    def until(self, key: str) -> dict[str, Any]:
        """Return its next message of that kind."""
        while (one := self.next()) is not None:
            if key in one:
                return one
        raise AssertionError(f"{self.name} ended: {self.told}")

    def step(self) -> None:
        """Let a held iteration go on."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        """Kill it with SIGKILL, and reap it."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End it, whatever it does."""
        self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def read(self, name: str) -> int:
        """Return the number in a control file."""
        return int((self.group / name).read_text())

    @property
    def frozen(self) -> bool:
        return self.read("compute.freeze") == 1


class Place:
    """A tree with the policy `lanes` over it, and jobs."""

    def __init__(self, mount: Mounted, directory: Path) -> None:
        self.mount = mount
        self.socket = directory / "lanes.sock"
        self.config = directory / "lanes.toml"
        self._jobs: list[JobProgram] = []

    def policy(self, order: str = "fifo", *lines: str) -> PolicyProgram:
        """Return a policy, to be entered as a context, which returns once it is ready."""
        text = [f'socket = "{self.socket}"', f'order = "{order}"', "report = true", *lines]
        self.config.write_text("\n".join(text))
        return PolicyProgram(self.mount.path, "lanes", self.config)

    def job(self, name: str, iterations: int, kernel: int, *options: object) -> JobProgram:
        self._jobs.append(JobProgram(self.mount, self.socket, name, iterations, kernel, *options))
        return self._jobs[-1]

    def close(self) -> None:
        for job in self._jobs:
            job.close()


@pytest.fixture
def place(mount: Mounted, tmp_path: Path) -> Iterator[Place]:
    made = Place(mount, tmp_path)
    yield made
    made.close()


def arrived(policy: PolicyProgram, *jobs: JobProgram) -> None:
    """Wait until all of them have come, in any order."""
    for _ in jobs:
        policy.until("arrive")
    assert {job.name for job in jobs} <= {one["job"] for one in policy.events if one["event"] == "arrive"}


# Order of turns


def test_shortest_remaining_time_first(place: Place) -> None:
    """A held job begins; the others come meanwhile, and are frozen. Then shorter ones run before longer ones."""
    with place.policy("srtf") as policy:
        long = place.job("long", 40, 10_000, "--held", 1, "--duration", 1000)
        assert long.until("begin")["done"] == 0
        middle, short = place.job("middle", 20, 10_000), place.job("short", 5, 10_000)
        arrived(policy, long, middle, short)
        assert [job.frozen for job in (long, middle, short)] == [False, True, True]
        long.step()
        assert policy.until("switch")["from"] == long.name
        left = [job.until("left")["left"] for job in (short, middle, long)]
        assert left == sorted(left)
        finished = [policy.until("finish") for _ in range(3)]
        assert [one["job"] for one in finished] == [short.name, middle.name, long.name]
        assert [one["iterations"] for one in finished] == [5, 20, 40]
        # Iterations of a job are together, except for the held one.
        switches = [(one["from"], one["to"]) for one in policy.events if one["event"] == "switch"]
        assert switches == [(long.name, short.name), (short.name, middle.name), (middle.name, long.name)]
        for job in (short, middle, long):
            assert (job.frozen, job.read("gmem.current"), job.read("gmem.swap.current")) == (False, GMEM, 0)
        (told,) = policy.end()
        assert (told["event"], told["count"]) == ("switches", 3)
        assert 0 < told["mean_ms"] <= told["longest_ms"]


def test_fair(place: Place) -> None:
    """The turn goes to the job that has had the lane for the shortest time; two never have it at once."""
    with place.policy("fair") as policy:
        jobs = [place.job("a", 10**6, 20_000, "--held", 1)]
        jobs[0].until("begin")
        jobs += [place.job("b", 10**6, 30_000), place.job("c", 10**6, 50_000)]
        arrived(policy, *jobs)
        jobs[0].step()
        ran = {job.name: 0.0 for job in jobs}
        turns = dict.fromkeys(ran, 0)
        while min(turns.values()) < 5:
            one = policy.until("switch")
            ran[one["from"]] = one["ran_s"]
            assert ran[one["to"]] == min(ran.values()), (one, ran)
            turns[one["to"]] += 1
        spans = []
        for job in jobs:
            job.kill()
            while job.next() is not None:
                pass
            begins = [one["begin"] for one in job.told if "begin" in one]
            spans += zip(begins, [one["end"] for one in job.told if "end" in one], strict=False)
        assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(sorted(spans))), "two at a time"


def test_one_after_the_other_without_an_order(place: Place) -> None:
    with place.policy() as policy:
        first = place.job("first", 10, 5_000, "--held", 1)
        first.until("begin")
        second = place.job("second", 2, 1_000)
        arrived(policy, first, second)
        first.step()
        assert first.until("left")["left"] < second.until("begin")["begin"]


def test_two_lanes(place: Place) -> None:
    """Two jobs run at the same time, and the third waits."""
    with place.policy("pack", "lanes = 2") as policy:
        jobs = [place.job(name, 3, 2_000, "--held", 1) for name in "abc"]
        arrived(policy, *jobs)
        eventually(lambda: sum(not job.frozen for job in jobs) == 2, "two run")
        running = [job for job in jobs if not job.frozen]
        (waiting,) = [job for job in jobs if job.frozen]
        for job in running:
            job.until("begin")
        running[0].step()
        running[0].until("left")
        waiting.until("begin")
        assert not running[1].frozen
        running[1].step()
        waiting.step()
        assert waiting.until("left")["left"] > 0


def test_memory_goes_to_the_host_for_a_shorter_one(place: Place) -> None:
    """And comes back; a job that fits nowhere is told so."""
    with place.policy("srtf", f"capacity = {GMEM + GMEM // 2}") as policy:
        long = place.job("long", 40, 5_000, "--held", 2, "--duration", 1000)
        long.until("begin")
        long.step()
        long.until("begin")
        short = place.job("short", 2, 5_000, "--held", 1)
        arrived(policy, long, short)
        large = place.job("large", 2, 5_000, "--gmem", 2 * GMEM)
        assert large.until("refused")["refused"] == f"it does not fit into {GMEM + GMEM // 2} bytes, not even alone"
        assert policy.until("refuse")["job"] == large.name
        assert not large.frozen
        long.step()
        assert policy.until("withdraw")["job"] == long.name
        short.until("begin")
        assert (long.frozen, long.read("gmem.swap.current"), long.read("gmem.current")) == (True, GMEM, 0)
        short.step()
        short.until("left")
        long.until("left")
        assert (long.frozen, long.read("gmem.swap.current")) == (False, 0)


# Ends of jobs and policies


@pytest.mark.parametrize("which", ["running", "waiting"])
def test_a_job_that_is_killed(place: Place, which: str) -> None:
    """In the middle of its iteration, or while it is frozen. A child with its socket does not count as the job."""
    with place.policy("srtf") as policy:
        first = place.job("first", 5, 5_000, "--held", 1, "--fork")
        first.until("begin")
        second = place.job("second", 50, 5_000, "--held", 50, "--fork")
        arrived(policy, first, second)
        if which == "running":
            first.kill()
            assert policy.until("switch")["to"] == second.name
            second.until("begin")
            assert not second.frozen
        else:
            second.kill()
            assert policy.until("finish") == {"event": "finish", "job": second.name, "iterations": 0, "ran_s": 0.0}
            first.step()
            first.until("left")
            policy.until("finish", job=first.name)  # it has left, although its child has not


def test_jobs_outlive_the_policy(place: Place) -> None:
    """At its end the policy thaws all of them, and they go on alone. The next one takes them in again."""
    with place.policy("fair") as policy:
        one, other = (place.job(name, 1000, 2_000, "--held", 1000) for name in "ab")
        arrived(policy, one, other)
        eventually(lambda: one.frozen != other.frozen, "one of them runs")
        policy.end()
        assert not place.socket.exists()
        assert (one.frozen, other.frozen) == (False, False)
        for job in (one, other):
            assert job.until("begin")["done"] == 0
    with place.policy("fair") as policy:
        for job in (one, other):
            job.step()
        arrived(policy, one, other)
        eventually(lambda: one.frozen != other.frozen, "they take turns again")


def test_jobs_outlive_a_policy_that_is_killed(place: Place) -> None:
    """It leaves a job frozen, and its socket. The job waits for the next policy, whatever it would do meanwhile."""
    with place.policy("fair") as policy:
        one, other = (place.job(name, 1000, 2_000, "--held", 1000) for name in "ab")
        arrived(policy, one, other)
        eventually(lambda: one.frozen != other.frozen, "one of them runs")
        policy.kill()
    running, waiting = (other, one) if one.frozen else (one, other)
    running.until("begin")
    assert waiting.frozen
    with place.policy("fair") as policy:
        arrived(policy, waiting)
        waiting.until("begin")
        assert not waiting.frozen
        running.step()
        arrived(policy, running)


# Jobs that break the rules


def test_strangers(place: Place) -> None:
    """A job with an invalid message is dropped, and a running job does not notice."""
    hello = Announcement("x", 1, 1, 1).line()
    with place.policy("fair") as policy:
        job = place.job("job", 3, 2_000, "--held", 3)
        job.until("begin")
        for said in (
            *(
                b"\n",
                b"end\n",
                b"job\n",
                b"job 5\n",
                b"job {}\n",
                b"\xff\n",
                hello.replace(b"1", b"-1"),
                b"job [" * 150 + b"\n",
            ),
            *(b"x" * LINE_MOST, b"job " + b"[" * (LINE_MOST - 6) + b"\n", hello + b"job again\n", hello + b"end\n"),
        ):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.settimeout(SECONDS * SLOW)
                stranger.connect(os.fspath(place.socket))
                with contextlib.suppress(BrokenPipeError):
                    stranger.sendall(said)
                with contextlib.suppress(ConnectionResetError):  # dropped before all of it was read
                    assert stranger.recv(100) == b"", said
        job.step()
        assert job.until("end")["done"] == 1
        with socket.socket(socket.AF_UNIX) as one, socket.socket(socket.AF_UNIX) as other:
            for two in (one, other):
                two.settimeout(SECONDS * SLOW)
                two.connect(os.fspath(place.socket))
            one.sendall(hello)
            policy.until("arrive", job=f"x-{os.getpid()}")
            other.sendall(hello)
            assert other.recv(100) == f"refused process {os.getpid()} is a job already\n".encode()


def test_one_that_never_listens(place: Place) -> None:
    """It reports one end of an iteration after another and reads nothing, so it is dropped, and another job runs."""
    with place.policy("fair") as policy, socket.socket(socket.AF_UNIX) as deaf:
        deaf.connect(os.fspath(place.socket))
        deaf.sendall(Announcement("deaf", 1, 1, 10**12).line())
        policy.until("arrive")
        job = place.job("job", 2, 2_000)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while True:
                deaf.sendall(b"end\n" * 100)
        job.until("left")


def test_a_directory_that_policies_share(place: Place) -> None:
    """Two policies never share one socket; a file that is no socket is left alone."""
    with place.policy():
        told = complaint("policy", "lanes", "--config", place.config, "--mount", place.mount.path, code=1)
        assert told == f"{place.socket}: another program listens there already"
    place.socket.write_text("something")
    told = complaint("policy", "lanes", "--config", place.config, "--mount", place.mount.path, code=1)
    assert told == f"{place.socket}: there is something already that is no socket"
    assert place.socket.read_text() == "something"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('order = "lifo"', "order: not one of fifo, srtf, pack, fair"),
        ("lanes = 0", "lanes: less than 1"),
        ("capacity = 1.5", "capacity: not a size: bytes, or a string with K, M, G or T"),
        ('lane = "1"', "lane: there is no such key"),
    ],
)
def test_mistakes(mount: Mounted, tmp_path: Path, line: str, why: str) -> None:
    config = tmp_path / "lanes.toml"
    config.write_text(line)
    told = complaint("policy", "lanes", "--config", config, "--mount", mount.path, code=2)
    assert told == f"policy: {config}: {why}"


def test_no_such_gpu(mount: Mounted, tmp_path: Path) -> None:
    config = tmp_path / "lanes.toml"
    config.write_text("gpu = 7")
    told = complaint("policy", "lanes", "--config", config, "--mount", mount.path, code=1)
    assert told == f"{mount.path}/gpus/7/gmem.capacity: No such file or directory"
