"""Versions meet at the socket: the library of 0.1 and this daemon, this library and the daemon of 0.1, and bits that
one side does not know. What 0.1 says is recorded (tests/versions); the real one is for `make test-versions`."""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
import struct
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import attrs
import pytest
import trio
import trio.testing

from backend.core.turns import TurnEnd
from backend.cuda.page import CounterPage
from backend.cuda.peers import Peers
from backend.door.wire import CUDA, CUDA_ALL, FIRST, SIZE, VERSION, Feature, Message, Op, met, names
from backend.process.identity import Process, identify
from tests.t6_cuda.daemon import GIB, MIB, Daemon, serving
from tests.versions.ends import End, compile_library, library
from tests.versions.recorded import session

ROOT = Path(__file__).parents[2]
UNKNOWN = 1 << 63
"""A bit that nothing has given a meaning yet."""


def real(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        with trio.fail_after(60):
            await test()

    trio.run(main)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "daemon.sock"


class Raw:
    """A program that says just what it is told to."""

    def __init__(self, connection: trio.socket.SocketType) -> None:
        self.connection = connection
        self.descriptors = 0
        """That came with the message before."""
        self._seq = 0

    async def receive(self) -> bytes:
        raw, control, _, _ = await self.connection.recvmsg(SIZE + 1, socket.CMSG_SPACE(4))
        fds = array.array("i", [fd for _, _, data in control for fd in struct.unpack("i", data)])
        self.descriptors = len(fds)
        for fd in fds:
            os.close(fd)
        return raw

    async def ask(self, op: Op, *args: int) -> Message:
        self._seq += 1
        await self.connection.send(Message(op, self._seq, 0, args).encode())
        return Message.decode(await self.receive())


@contextlib.asynccontextmanager
async def connected(path: Path) -> AsyncIterator[Raw]:
    with trio.socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        await connection.connect(os.fspath(path))
        yield Raw(connection)


# The library of 0.1, and this daemon


@pytest.mark.logs("its library is older than this daemon and lacks turns,total,bursts,host,view,managed,space,sms")
def test_the_library_of_0_1_is_served_in_full(path: Path) -> None:
    """Each message as it said it; each answer as it got it, but for the bits, at which it does not look."""
    replies: dict[int, bytes] = {}

    async def test() -> None:
        process = identify(os.getpid())
        facts: dict[str, str] = {}
        async with serving(path, Peers(facts)) as daemon, connected(path) as program, trio.open_nursery() as nursery:
            for line in session():
                if line.by == ">":
                    await program.connection.send(line.raw)
                elif line.done.startswith("write"):
                    _, file, text = line.done.split()
                    nursery.start_soon(daemon.h.write, f"{process.pid}/0/{file}", text)
                elif line.by == "<":
                    raw = await program.receive()
                    if line.message.op == Op.HELLO:
                        assert Message.decode(raw).args[3] == CUDA
                        raw = Message.decode(raw).answer(*Message.decode(raw).args[:3]).encode()
                    assert raw == line.raw, line.message
                    assert program.descriptors == line.descriptor
                    replies[line.message.op] = raw
            assert daemon.gpu.managed.counts(process) == (0, 0), "its kernels are counted"
            assert facts == {
                "programs.older": "1",
                "programs.lack": "turns,total,bursts,host,view,managed,space,sms",
            }, "it lacks what came later, and no more"
            assert int(await daemon.h.read(f"{process.pid}/0/gmem.current")) == 1000 * MIB

    real(test)
    assert {Op.HELLO, Op.LOCATE, Op.MANAGE, Op.CHARGE, Op.LIMITS, Op.MOVE_IN, Op.RECLAIM, Op.ROOM} == set(replies)


def test_what_0_1_could_is_what_it_is_taken_to_be_able_to() -> None:
    """For good: its bits are 0."""
    assert FIRST == 0b11111
    assert met(CUDA, 0) == CUDA & FIRST
    assert met(CUDA, UNKNOWN | Feature.MEMORY) == Feature.MEMORY
    assert met(CUDA, UNKNOWN) == Feature(0)
    assert names(CUDA) == "memory,counters,report,depart,family,turns,total,bursts,host,view,managed,space,sms"


# What a program's library lacks


@pytest.mark.parametrize("lacks", [one for one in CUDA_ALL if one != Feature.FAMILY])
@pytest.mark.logs("its library is older than this daemon and lacks")
def test_what_an_older_library_lacks_is_not_asked_of_it_and_said(path: Path, lacks: Feature, caplog: object) -> None:
    async def test() -> None:
        process, facts = identify(os.getpid()), dict[str, str]()
        async with serving(path, Peers(facts, CUDA_ALL)) as daemon, connected(path) as program:
            hello = await program.ask(Op.HELLO, VERSION, (CUDA_ALL & ~lacks) | UNKNOWN)
            assert (hello.status, hello.args[3]) == (0, CUDA_ALL), "of itself each says all"
            managed = await program.ask(Op.MANAGE, GIB, 0)
            assert managed.status == (-errno.ENOSYS if lacks == Feature.MEMORY else 0)
            assert program.descriptors == (0 if lacks in (Feature.MEMORY, Feature.COUNTERS) else 1)
            assert (await program.ask(Op.REPORT, 0, 0, 0)).status == (
                -errno.ENOSYS if lacks == Feature.REPORT else -errno.ENODEV if lacks == Feature.MEMORY else 0
            )
            assert facts == {"programs.older": "1", "programs.lack": names(lacks)}
            host = await program.ask(Op.HOST, 0, 0, GIB)
            assert host.status == (
                -errno.ENOSYS if lacks == Feature.HOST else -errno.ENODEV if lacks == Feature.MEMORY else 0
            )
            if not host.status:
                assert Message.decode(await program.receive()).op == Op.GRANT
            space = await program.ask(Op.SPACE)
            assert (space.status, space.args[0]) == (-errno.ENOSYS if lacks == Feature.SPACE else 0, 0)
            total = await program.ask(Op.TOTAL)
            assert total.status == (-errno.ENOSYS if lacks == Feature.TOTAL else 0)
            if lacks != Feature.MEMORY:
                await leaves(daemon, process, lacks)
                stat = await daemon.h.read(f"{process.pid}/0/gcgroup.stat")
                assert ("submitted" in stat) == (lacks != Feature.COUNTERS), "what is not known is left out"
                assert "managed 1\n" in stat
            async with connected(path) as another:
                await another.ask(Op.HELLO, VERSION, CUDA_ALL & ~lacks)
                assert facts["programs.older"] == "2"
        assert facts == {"programs.older": "0", "programs.lack": "none"}

    async def leaves(daemon: Daemon, process: Process, lacks: Feature) -> None:
        if lacks in (Feature.REPORT, Feature.TOTAL, Feature.HOST, Feature.VIEW, Feature.MANAGED, Feature.SPACE):
            return
        if lacks == Feature.BURSTS:
            daemon.gpu.managed.rank({process: [process]}, 200)
            await trio.testing.wait_all_tasks_blocked()
            return
        if lacks == Feature.TURNS:
            assert await daemon.gpu.managed.end_turn(process, 1000) is TurnEnd.UNGATED
            return
        if lacks == Feature.SETS:
            assert daemon.gpu.managed.working_set(process) is None
            assert daemon.gpu.managed.shares(process) is None
            return
        if lacks == Feature.SMS:
            assert daemon.gpu.managed.placed_launches(process) is None
            with pytest.raises(OSError, match="older"):
                await daemon.gpu.managed.limit_sms(process, 64, here=True)
            return
        with pytest.raises(OSError, match="older") as caught:
            await daemon.gpu.managed._migrations._depart(process, near=False)
        assert caught.value.errno == errno.EOPNOTSUPP
        assert not daemon.gpu.managed.departs(process)

    real(test)
    assert isinstance(caplog, pytest.LogCaptureFixture)
    assert len(caplog.records) == 1, "it is told once"


# This library, and the daemon of 0.1


@attrs.define
class Double:
    """A daemon that answers as 0.1 did, byte for byte, or as a test says; one connection."""

    features: int = 0
    """In the answer to HELLO."""
    heard: list[Message] = attrs.field(factory=list)
    connection: socket.socket | None = None
    _answers: dict[int, Message] = attrs.field(factory=dict)
    _news: threading.Condition = attrs.field(factory=threading.Condition)

    def serve(self, listener: socket.socket) -> None:
        self._answers = {line.message.op: line.message for line in session() if line.by == "<" and line.message.reply}
        page = CounterPage()
        with contextlib.suppress(OSError):
            self.connection, _ = listener.accept()
            while raw := self.connection.recv(SIZE + 1):
                message = Message.decode(raw)
                with self._news:
                    self.heard.append(message)
                    self._news.notify_all()
                if message.reply or message.op in (Op.UNCHARGE, Op.REPORT, Op.HOST):
                    continue
                recorded = self._answers[message.op]
                answer = message.answer(*recorded.args)
                if message.flags or message.status:
                    answer = message.refuse(errno.EPROTO)
                elif message.op == Op.HELLO:
                    assert message.args[0] == 1
                    answer = message.answer(*recorded.args[:3], self.features)
                fds = [page.descriptor] if message.op == Op.MANAGE else []
                socket.send_fds(self.connection, [answer.encode()], fds)
        page.close()

    def say(self, message: Message) -> None:
        assert self.connection is not None
        self.connection.send(message.encode())

    def wait(self, found: Callable[[Message], bool]) -> Message:
        """Until something is heard, by now or later."""
        with self._news:
            assert self._news.wait_for(lambda: any(map(found, self.heard)), 60), self.heard
            return next(filter(found, self.heard))

    def ops(self) -> set[int]:
        return {message.op for message in self.heard}


@pytest.fixture(scope="module")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_library(ROOT, tmp_path_factory.mktemp("library") / "library")


Served = Callable[[int], "contextlib.AbstractContextManager[tuple[Double, End]]"]


@pytest.fixture
def served(binary: Path, path: Path) -> Served:
    """This library, at a double of a daemon that says these features."""

    @contextlib.contextmanager
    def serve(features: int) -> Iterator[tuple[Double, End]]:
        double = Double(features)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(os.fspath(path))
            listener.listen()
            thread = threading.Thread(target=double.serve, args=(listener,))
            thread.start()
            with library(binary, path) as program:
                yield double, program
            thread.join()
        if double.connection is not None:
            double.connection.close()

    return serve


def test_this_library_speaks_to_a_daemon_of_0_1(served: Served) -> None:
    """It says what that one's own library says, but for bits in a word at which 0.1 does not look."""
    with served(0) as (double, program):
        assert program.ask("use 0") == "0"
        assert program.ask("charge 1024") == "0"
        assert program.ask("limits") == "0 0 0"
        program.ask("report 100 30 64")
        double.wait(lambda message: message.op == Op.REPORT)
        double.say(Message(Op.RECLAIM, 1, 0, (0, 0, 0, 512 * MIB)))
        double.wait(lambda message: message.reply and message.op == Op.RECLAIM)
        double.say(Message(Op.ROOM, args=(512 * MIB,)))
        while program.ask("status").split()[1] != "0":
            pass
        program.ask("free 24")
        assert program.ask("limits") == "0 0 0"
    said = [line.message for line in session() if line.by == ">"]
    hello = double.heard[0]
    assert hello.args[:2] == (VERSION, CUDA_ALL)
    assert attrs.evolve(hello, args=(VERSION, 0, 0, 0, 0)) == said[0]
    first = [message for message in double.heard if message.op not in (Op.MOVE_IN, Op.LIMITS)]
    assert first[1:] == [message for message in said[1:] if message.op not in (Op.MOVE_IN, Op.LIMITS)]
    moved = sum(message.args[0] for message in double.heard if message.op == Op.MOVE_IN)
    assert moved == 512 * MIB


@pytest.mark.parametrize("features", [CUDA, CUDA | UNKNOWN, CUDA & ~Feature.REPORT, UNKNOWN])
def test_this_library_uses_what_both_can(served: Served, features: int) -> None:
    """A daemon of later that can none of what the library can is as none: all is granted, and nothing told."""
    with served(features) as (double, program):
        assert program.ask("use 0") == ("0" if features & Feature.MEMORY else "-1")
        assert program.ask("charge 64") == "0"
        program.ask("report 100 30 64")
        program.ask("limits")
        assert (Op.CHARGE in double.ops()) == bool(features & Feature.MEMORY)
        assert (Op.REPORT in double.ops()) == bool(features & Feature.REPORT)


@pytest.mark.parametrize("features", [0, CUDA & ~Feature.TOTAL, UNKNOWN])
def test_this_library_does_not_ask_for_the_size_where_that_is_not_known(served: Served, features: int) -> None:
    """It goes by the limit of the moment then, as 0.1 did."""
    with served(features) as (double, program):
        assert program.ask("sight 0") == "0 0"
        assert double.ops() == {Op.HELLO}
        assert program.ask("sight 0") == "0 0", "it does not ask again"


@pytest.mark.parametrize("features", [0, CUDA & ~Feature.HOST, CUDA])
def test_this_library_asks_for_memory_of_the_host_where_it_is_granted(served: Served, features: int) -> None:
    """With another daemon it goes by its own rule, and is told so when it met one before that granted some."""
    with served(features) as (double, program):
        assert program.ask("use 0") == "0"
        program.ask("host 64 0 1024")
        program.ask("charge 64")
        said = [message.args[:3] for message in double.heard if message.op == Op.HOST]
        if features != CUDA:
            assert not said
            while program.ask("granted") == "0 0":
                pass
            assert program.ask("granted") == "1 0"
            return
        assert said[-1] == (64 * MIB, 0, 1024 * MIB)
        double.say(Message(Op.GRANT, args=(512 * MIB,)))
        while program.ask("granted") != "1 512":
            pass
        program.ask("host 60 0 1024")  # by less than has to be known
        program.ask("host 512 512 1024")
        program.ask("charge 64")
        said = [message.args[:3] for message in double.heard if message.op == Op.HOST]
        assert said == [(64 * MIB, 0, 1024 * MIB), (512 * MIB, 512 * MIB, 1024 * MIB)]


def test_turns_are_for_a_gpu_that_is_managed(served: Served) -> None:
    """Both are obeyed as soon as they come; the end of the connection opens what is closed."""
    with served(CUDA) as (double, program):
        assert program.ask("use 0") == "0"

        def turn(op: Op, gpu: int, *args: int) -> tuple[int, int]:
            double.heard.clear()
            double.say(Message(op, 5, gpu, args))
            answer = double.wait(lambda message: message.reply)
            assert (answer.op, answer.seq, answer.gpu) == (op, 5, gpu)
            return answer.status, answer.args[0]

        assert turn(Op.END_TURN, 0, 20000) == (0, 1)
        assert program.ask("turn") == "1 20000"
        assert turn(Op.END_TURN, 0, 0) == (0, 0)
        assert turn(Op.END_TURN, 0, 77) == (-errno.EBUSY, 0)
        assert program.ask("marked") == "0", "an older daemon asks for none"
        assert turn(Op.END_TURN, 0, 20000, 64 * MIB) == (0, 1)
        assert program.ask("marked") == "64"
        assert turn(Op.END_TURN, 0, 0, 64 * MIB) == (0, 0)
        assert turn(Op.END_TURN, 0, 77, 64 * MIB) == (-errno.EBUSY, 0)
        assert program.ask("marked") == "64", "nothing runs while that is done"
        assert turn(Op.END_TURN, 1, 20000) == (-errno.ENODEV, 0)
        assert program.ask("turn") == "1 77"
        assert turn(Op.BEGIN_TURN, 0, 5000) == (0, 0)
        assert program.ask("turn") == "2 5000"
        assert turn(Op.BEGIN_TURN, 3, 1) == (-errno.ENODEV, 0)
        assert double.connection is not None
        double.connection.shutdown(socket.SHUT_RDWR)
        while program.ask("turn") != "-1 5000":
            pass


def test_what_the_library_does_not_know_is_no_end(served: Served) -> None:
    """An event is not looked at, and a request is refused: the connection goes on."""
    with served(CUDA | UNKNOWN) as (double, program):
        assert program.ask("use 0") == "0"
        double.say(Message(op=99, gpu=0, args=(1,)))  # type: ignore[arg-type]
        double.say(Message(op=30, seq=7, gpu=0, args=(1,)))
        refused = double.wait(lambda message: message.reply)
        assert (refused.op, refused.seq, refused.status) == (30, 7, -errno.ENOSYS)
        assert program.ask("charge 64") == "0"
        assert double.heard[-1].op == Op.CHARGE
        assert len([message for message in double.heard if message.reply]) == 1
