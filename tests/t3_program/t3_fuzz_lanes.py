"""Jobs that send arbitrary bytes to the policy lanes: a job that breaks the protocol is dropped, and harms no other."""

from __future__ import annotations

import contextlib
import io
import socket
from pathlib import Path
from unittest import mock

import attrs
import pytest
import trio
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from ggroupfs.client.protocol import BYE, GO, REFUSED, Announcement
from ggroupfs.policies.lanes import Lanes, Order
from ggroupfs.policies.lanes.door import Speaker
from ggroupfs.policies.lanes.program import ANNOUNCE_S, Hall
from tests.support.fuzzed import Target, nothing_logged, sleepers
from tests.support.harness import until
from tests.support.lanes import NoLevers

CONNECTIONS = 4
CAPACITY = NoLevers.capacity
LANES = 2
IDLE_S = 0.002
"""Real seconds of silence after which all tasks are taken to be waiting."""


@attrs.define
class Job:
    """A connection of a program, and what it was told."""

    socket: socket.socket
    heard: bytes = b""
    said: bytes = b""
    ended: bool = False

    def say(self, data: bytes) -> None:
        """Send some bytes; hang up if there are none."""
        if data:
            self.socket.send(data)
            self.said += data
        else:
            self.socket.shutdown(socket.SHUT_WR)

    def hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while not self.ended:
                try:
                    data = self.socket.recv(4096)
                except ConnectionResetError:
                    data = b""
                self.heard += data
                self.ended = not data

    def check(self) -> None:
        """Check that it got whole lines that are valid, and at most one `go` at first and one after each end."""
        lines = self.heard.decode().split("\n")
        assert lines.pop() == ""
        assert all(line in (GO, BYE) or line.startswith(REFUSED) for line in lines)
        assert lines.count(GO) <= 1 + self.said.count(b"end\n")


async def play(script: bytes) -> None:
    """Run a script. Each step names a connection (a new one if it is over), a number of bytes and the bytes; none hangs
    up. A step may also let a second pass."""
    levers, owners = NoLevers(), dict[socket.socket, int]()
    policy = Lanes(CAPACITY, list(Order)[len(script) % len(Order)], LANES)
    hall = Hall(levers, policy, report=False)  # type: ignore[arg-type]
    jobs: list[Job | None] = [None] * CONNECTIONS
    everybody: list[Job] = []
    rest = iter(script)

    async def settle() -> None:
        await wait_all_tasks_blocked(IDLE_S)
        assert sum(guest.runs for guest in hall._guests.values()) <= LANES
        for job in everybody:
            job.hear()
            job.check()

    with mock.patch.object(Speaker, "pid", property(lambda speaker: owners[speaker.connection])):
        async with trio.open_nursery() as nursery:
            for head in rest:
                number = head % CONNECTIONS
                job = jobs[number]
                if job is None or job.ended:
                    ours, theirs = socket.socketpair()
                    ours.setblocking(False)
                    theirs.setblocking(False)
                    owners[ours] = sleepers()[number // 2]  # two connections for each of two processes
                    job = jobs[number] = Job(theirs)
                    everybody.append(job)
                    nursery.start_soon(hall.serve, ours)
                data = bytes(next(rest, 0) for _ in range(next(rest, 0)))
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    job.say(data)
                if head & 0x40:
                    await trio.sleep(1)
                await settle()
            await trio.sleep(ANNOUNCE_S + 1)
            await settle()
            for job in everybody:
                job.socket.close()
        assert hall.connected == 0
        assert not hall._guests
        added, discarded = ({name for what, name in levers.pulled if what == one} for one in ("add", "discard"))
        assert added == discarded
        assert not policy.lanes
        assert not policy.pending


def check(script: bytes) -> None:
    with nothing_logged(), contextlib.redirect_stdout(io.StringIO()):
        trio.run(play, script, clock=MockClock(autojump_threshold=IDLE_S))


who = st.integers(0, CONNECTIONS - 1) | st.integers(0, 255)
announced = st.builds(
    lambda name, persistent, ephemeral, duration: Announcement(name, persistent, ephemeral, duration).line(),
    st.sampled_from(["", "a", "b"]),
    *[st.one_of(st.integers(0, CAPACITY + 1), st.just(2**63 - 1))] * 3,
)
said = st.one_of(announced, announced, *[st.just(b"end\n")] * 3, st.just(b""), st.binary(max_size=6), st.just(b"go\n"))
cut = st.tuples(said, st.integers(0, 90)).map(lambda pair: pair[0][: pair[1]])
steps = st.builds(lambda number, data: bytes([number, len(data)]) + data, who, st.one_of(said, said, said, cut))
LANES_SAID = Target("lanes", check, st.lists(steps, max_size=14).map(b"".join), examples=40)


@pytest.mark.parametrize("file", LANES_SAID.kept())
def test_kept(file: Path) -> None:
    LANES_SAID.replay(file)


def test_fresh() -> None:
    LANES_SAID.fuzz()


def test_one_alone_goes_on() -> None:
    """The property is not empty: a job that keeps to the protocol gets its turns."""

    async def main() -> None:
        hall = Hall(NoLevers(), Lanes(CAPACITY, Order.FIFO, LANES), report=False)  # type: ignore[arg-type]
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        with theirs:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(hall.serve, ours)
                job = Job(theirs)
                for data in (Announcement("x", 1, 2, 3).line(), b"end\n", b"end\n"):
                    before = len(job.heard)
                    job.say(data)
                    await until(
                        lambda before=before: job.hear() or len(job.heard) > before,  # type: ignore[misc]
                        "an answer",
                    )
                job.check()
                assert job.heard == b"go\n" * 3
                theirs.shutdown(socket.SHUT_WR)

    with contextlib.redirect_stdout(io.StringIO()):
        trio.run(main, clock=MockClock(autojump_threshold=IDLE_S))
