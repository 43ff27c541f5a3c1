"""Programs that send arbitrary bytes to the daemon's socket: each session answers or ends, and the books stay right.

The bytes are a script: what is sent on which connection, what is in the files meanwhile, and how much time passes.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import attrs
import pytest
import trio
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

import backend.cuda.server
import backend.process.identity
import backend.soft.server
from backend.cuda.holding import OVERCOMMIT
from backend.door import tenants
from backend.door.wire import SIZE, VERSION, Message, Op
from backend.nvidia.gpu import NvidiaGpu
from backend.nvidia.nvml import Nvml
from backend.nvidia.opening import open_gpus
from backend.process.identity import Process
from backend.soft.config import SoftConfig
from backend.soft.gpu import SoftGpu
from backend.soft.machine import Machine
from tests.support.cuda_session import NvmlWithNames
from tests.support.fake_nvidia import FakeSystem, patient
from tests.support.fuzzed import CONNECTIONS, Target, expected, nothing_logged, sleepers
from tests.support.harness import Harness, World, answers, running

MIB = 1 << 20
OPS = sorted(Op)
EDGES = (
    *(256, 512, 1000, 65536, 65537, 1 << 20, (1 << 21) - 1, 1 << 21, 4 << 21, 16 << 21, 32 << 21, 1 << 30, 80 << 30),
    *((1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 2, (1 << 64) - 1, 60_000_000),
)
FILES = ("gmem.limit.high", "gmem.limit.low", "gmem.swap.max", "gmem.reclaim", "compute.freeze", "compute.migrate")
END_S = 20.0
"""Time until every request is answered, seconds."""


class Listener:
    """Source of connections; :func:`backend.door.tenants.serve` needs no more."""

    def __init__(self) -> None:
        self.come, self._coming = trio.open_memory_channel[socket.socket](64)

    async def accept(self) -> tuple[trio.socket.SocketType, str]:
        return trio.socket.from_stdlib_socket(await self._coming.receive()), ""


@attrs.define
class Connection:
    """The client end of a connection, with the invariants that hold on it."""

    socket: socket.socket
    unanswered: Counter[tuple[int, int]] = attrs.field(factory=Counter)
    """Number of unanswered requests, by op and seq."""
    asked: list[Message] = attrs.field(factory=list)
    """Requests of the daemon that were not answered."""
    learned: list[int] = attrs.field(factory=list)
    """Numbers that the daemon sent."""
    may_end: bool = False
    """Whether a message was sent after which the daemon may close the connection."""
    must_end: bool = False
    """Whether the daemon must close it."""
    ended: bool = False
    seq: int = 0

    def say(self, raw: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send one datagram, if there is room for it."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        try:
            self.socket.sendmsg([raw], rights, socket.MSG_DONTWAIT)
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            return
        if len(raw) != SIZE:
            self.must_end = True
            return
        message = Message.decode(raw)
        if not self.must_end:
            self.unanswered[message.op, message.seq] += 1

    def hear(self) -> None:
        """Take all that has come: one answer for each request, or the end."""
        while not self.ended:
            try:
                raw, ancillary, _, _ = self.socket.recvmsg(SIZE + 1, socket.CMSG_SPACE(4 * 4), socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionResetError:
                raw, ancillary = b"", []
            for _, _, data in ancillary:
                for descriptor in array.array("i", data):
                    os.close(descriptor)
            if not raw:
                assert self.may_end or self.must_end, "it was hung up on for nothing"
                self.ended = True
                return
            message = Message.decode(raw)
            assert message.flags == 0
            if message.reply:
                self.unanswered[message.op, message.seq] -= 1
                assert self.unanswered[message.op, message.seq] >= 0, f"an answer to nothing: {message}"
                assert not message.status or -message.status in errno.errorcode
                self.learned += message.args[:2]
            elif message.op == Op.RECLAIM:
                self.asked.append(message)
            else:
                assert message.op in (Op.PROGRESS, Op.ROOM)

    @property
    def waits(self) -> bool:
        """Whether the client is waiting for an answer."""
        return not self.ended and (self.must_end or any(self.unanswered.values()))


@attrs.define
class Stage:
    """A daemon, and programs that connect to it."""

    h: Harness
    listener: Listener
    nursery: trio.Nursery
    processes: Sequence[Process]
    is_cuda: bool
    driver: Callable[[int, int], None]
    """Sets the bytes that the driver reports for a process."""
    idle_s: float
    """Real seconds of silence after which every program must be waiting for something."""
    connections: list[Connection | None] = attrs.field(factory=lambda: [None] * CONNECTIONS)
    opening: list[Process] = attrs.field(factory=list)
    writes: int = 0
    """Number of files being written."""
    sessions: int = 0
    """Number of sessions that have not ended."""

    async def play(self, script: bytes) -> None:
        """Run the whole script."""
        rest = iter(script)
        for head in rest:
            await self.step(head, rest)
            await self.settle()
        for _ in range(40):
            if not self.writes and not any(one is not None and one.waits for one in self.connections):
                break
            await trio.sleep(END_S / 40)
            await self.settle()
        assert not self.writes
        for one in self.connections:
            assert one is None or not one.waits, f"never answered: {one}"

    async def settle(self) -> None:
        """Let all tasks do what they can do now; then check the invariants."""
        await wait_all_tasks_blocked(self.idle_s)
        for one in self.connections:
            if one is not None:
                one.hear()
        if not self.writes and not any(one is not None and one.waits for one in self.connections):
            self.h.check()

    async def connection(self, number: int) -> Connection:
        """Return a connection, opened if there is none."""
        one = self.connections[number]
        if one is None or one.ended:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            if one is not None:
                one.socket.close()
            one = self.connections[number] = Connection(ours)
            self.opening.append(self.processes[number // 2])
            await self.listener.come.send(theirs)
            await self.settle()
        return one

    async def step(self, head: int, rest: Iterator[int]) -> None:
        """Run one line of the script, with zeros beyond its end."""
        number, verb = head & 3, head >> 2 & 7
        one = await self.connection(number)
        match verb:
            case 0 | 1 | 2:
                self.message(one, rest)
            case 3:
                self.say(one, bytes(next(rest, 0) for _ in range(next(rest, 0))))
            case 4:
                self.say(one, bytes(next(rest, 0) for _ in range(SIZE)))
            case 5:
                ends = [end for _ in range(next(rest, 0) % 3 + 1) for end in os.pipe()]
                one.seq += 1
                one.say(Message(Op.HELLO, one.seq, 0, (VERSION,)).encode(), ends)
                for end in ends:
                    os.close(end)
            case 6:
                one.socket.close()
                self.connections[number] = None
            case 7:
                await self.other(one, number // 2, rest)

    def message(self, one: Connection, rest: Iterator[int]) -> None:
        """Send a message made from a few bytes."""
        op, options, count = next(rest, 0), next(rest, 0), next(rest, 0)
        args = tuple(self.word(one, next(rest, 0)) for _ in range(count % 6))
        one.seq += 1
        message = Message(
            OPS[op % len(OPS)] if op < 200 else op << 8 * (op % 3),
            0 if options & 0x70 == 0x70 else one.seq,
            (0, 0, 1, 7)[options & 3] if options & 0x80 else 0,
            args,
            -5 if options & 0x3C == 0x3C else 0,
            options & 0x1C == 0x1C,
            int(options & 0x1A == 0x1A),
        )
        self.say(one, message.encode())

    def say(self, one: Connection, raw: bytes) -> None:
        """Send a message. The daemon does not answer an event of a CUDA program, nor an answer, even to no request."""
        before = one.unanswered.copy()
        one.say(raw)
        if len(raw) != SIZE:
            return
        message = Message.decode(raw)
        one.may_end |= self.is_cuda and message.reply
        if self.is_cuda and (message.reply or (message.op in backend.cuda.server.EVENTS and not message.seq)):
            one.unanswered = before
        if self.is_cuda and message.op == Op.MANAGE:  # a program that connects again ends its former connection
            at = self.connections.index(one)
            for other in self.connections[at // 2 * 2 : at // 2 * 2 + 2]:
                if other is not None and other is not one:
                    other.may_end = True

    async def other(self, one: Connection, process: int, rest: Iterator[int]) -> None:
        """Do something other than sending a message."""
        what, value = next(rest, 0), self.word(one, next(rest, 0))
        match what % 4:
            case 0:
                await trio.sleep(min(value, 2_000) / 1000)
            case 1:
                path = f"{self.processes[process].pid}/0/{FILES[what // 4 % len(FILES)]}"
                self.nursery.start_soon(self.write, path, value)
            case 2:
                self.driver(self.processes[process].pid, min(value, 80 << 30))
            case 3 if one.asked:
                asked = one.asked.pop(0)
                self.say(one, asked.answer(min(value, asked.args[3] * 2), value).encode())

    async def write(self, path: str, value: int) -> None:
        self.writes += 1
        await answers(self.h.write(path, value))
        self.writes -= 1

    @staticmethod
    def word(one: Connection, code: int) -> int:
        """Return the number that a byte stands for."""
        if code < 128:
            return code
        if code < 192 or not one.learned:
            return EDGES[code % len(EDGES)]
        return one.learned[code % len(one.learned)]


class Counted:
    """A session that records whether it has ended."""

    def __init__(self, stage: Stage, session: tenants.Session) -> None:
        self.process = session.process
        self._stage, self._session = stage, session
        stage.sessions += 1

    async def run(self) -> None:
        await self._session.run()

    def close(self) -> None:
        self._session.close()
        self._stage.sessions -= 1


@contextlib.asynccontextmanager
async def staged(
    h: Harness, gpus: dict[int, SoftGpu] | NvidiaGpu, driver: Callable[[int, int], None]
) -> AsyncIterator[Stage]:
    """Run on a stage, and check that nothing is left on it at the end."""
    listener, processes = Listener(), [backend.process.identity.identify(pid) for pid in sleepers()]

    def open_session(_: Process, line: tenants.Line) -> tenants.Session:
        process = stage.opening.pop(0)
        if isinstance(gpus, NvidiaGpu):
            return Counted(stage, backend.cuda.server.Session(process, {0: gpus.managed}, line))
        return Counted(stage, backend.soft.server.Session(process, gpus, line))

    async with trio.open_nursery() as nursery:
        is_cuda = isinstance(gpus, NvidiaGpu)
        stage = Stage(h, listener, nursery, processes, is_cuda, driver, 0.002 if is_cuda else 0)
        nursery.start_soon(tenants.serve, listener, open_session)
        try:
            yield stage
        finally:
            for one in stage.connections:
                if one is not None:
                    one.socket.close()
        await wait_all_tasks_blocked(stage.idle_s)
        give_up = trio.current_time() + END_S
        while stage.sessions:  # work under way is left until it is done
            assert trio.current_time() < give_up, "a session that does not end"
            await trio.sleep(0.05)
        nursery.cancel_scope.cancel()


DROPPED = ("not a message", "an answer to nothing")


def check_soft(script: bytes) -> None:
    """Check a script at the software GPU's socket."""

    async def main() -> None:
        machine = Machine()
        config = SoftConfig(capacity=64 * MIB, queue=64)
        gpus = [SoftGpu(index, config, machine) for index in range(2)]
        async with running(*gpus) as h:
            async with staged(h, dict(enumerate(gpus)), lambda pid, nbytes: None) as stage:
                await stage.play(script)
                most = config.overcommit * config.capacity // config.page
                assert all(len(tenant.memory) <= most for gpu in gpus for tenant in gpu._tenants.values())
            for gpu in gpus:  # all are closed
                assert not any(tenant.tsgs or len(tenant.memory) for tenant in gpu._tenants.values())
                assert len(gpu._engine) == 0

    with expected(*DROPPED), nothing_logged():
        trio.run(main, clock=MockClock(autojump_threshold=0))


def check_cuda(script: bytes) -> None:
    """Check a script at the socket of CUDA programs, on a fake driver."""
    fake, nvml = FakeSystem(), NvmlWithNames(count=1)

    def driver_says(pid: int, nbytes: int) -> None:
        nvml.compute[0] = [*[(p, n) for p, n in nvml.compute.get(0, []) if p != pid], (pid, nbytes)]

    async def main() -> None:
        (gpu,) = await open_gpus(system=fake, nvml=Nvml(nvml), selftest=False)  # type: ignore[arg-type]
        async with running(gpu, world=World()) as h:
            for pid in sleepers():
                fake.program(pid, 0, start=backend.process.identity.identify(pid).start)
            async with staged(h, gpu, driver_says) as stage:
                await stage.play(script)
                for program in gpu.managed._programs.values():
                    holding = program.holding
                    assert 0 <= holding.promised <= holding.charged <= OVERCOMMIT * gpu.info.capacity
                    assert holding.swapped >= 0 <= holding.asked
            assert not gpu.managed._programs

    clock = MockClock(autojump_threshold=0.002)
    with expected(*DROPPED, "library is older than this daemon"), nothing_logged(), patient(clock, lambda: False):
        trio.run(main, clock=clock)


# Scripts


def op(one: Op) -> int:
    return OPS.index(one)


who = st.integers(0, CONNECTIONS - 1)
code = st.one_of(st.integers(0, 5), st.integers(0, 255), st.integers(128, 255))


def said(ops: Sequence[Op]) -> st.SearchStrategy[bytes]:
    """Return messages, most of them valid."""
    options = st.one_of(*[st.just(0)] * 8, st.just(0x80), st.just(0x81), st.integers(0, 255))
    kinds = st.one_of(*[st.sampled_from([op(one) for one in ops])] * 9, st.integers(0, 255))
    return st.builds(
        lambda number, kind, option, args: bytes([number, kind, option, len(args), *args]),
        who,
        kinds,
        options,
        st.lists(code, max_size=5),
    )


besides = st.builds(lambda number, what, value: bytes([number | 7 << 2, what, value]), who, st.integers(0, 255), code)
rude = st.one_of(
    st.builds(lambda number, raw: bytes([number | 3 << 2, len(raw)]) + raw, who, st.binary(max_size=70)),
    st.builds(lambda number, raw: bytes([number | 4 << 2]) + raw, who, st.binary(min_size=SIZE, max_size=SIZE)),
    st.builds(lambda number, count: bytes([number | 5 << 2, count]), who, st.integers(0, 255)),
    who.map(lambda number: bytes([number | 6 << 2])),
)


def scripts(begin: st.SearchStrategy[bytes], ops: Sequence[Op]) -> st.SearchStrategy[bytes]:
    lines = st.one_of(*[said(ops)] * 5, besides, besides, rude)
    return st.tuples(st.lists(begin, max_size=3), st.lists(lines, max_size=14)).map(
        lambda parts: b"".join([*parts[0], *parts[1]])
    )


def begun(*messages: tuple[Op, *tuple[int, ...]]) -> st.SearchStrategy[bytes]:
    """Return some valid messages on one connection."""
    return who.map(lambda n: b"".join(bytes([n, op(one), 0, len(args), *args]) for one, *args in messages))


joined = begun((Op.HELLO, VERSION), (Op.JOIN, 2), (Op.ALLOC, 139))
managed = begun((Op.HELLO, VERSION), (Op.MANAGE, 0, 0), (Op.CHARGE, 145))
SOFT_OPS = (Op.JOIN, Op.LEAVE, Op.ALLOC, Op.FREE, Op.WRITE, Op.READ, Op.LAUNCH, Op.TOTAL, Op.LIMITS)
SOFT = Target(
    "soft",
    check_soft,
    scripts(
        st.one_of(begun((Op.HELLO, VERSION)), joined, joined),
        SOFT_OPS,
    ),
    examples=60,
)
CUDA = Target(
    "cuda",
    check_cuda,
    scripts(
        st.one_of(begun((Op.HELLO, VERSION)), managed, managed),
        (Op.LOCATE, Op.MANAGE, Op.CHARGE, Op.UNCHARGE, Op.MOVE_IN, Op.LIMITS, Op.REPORT, Op.TOTAL, Op.HOST),
    ),
    examples=30,
)


@pytest.mark.parametrize("file", SOFT.kept())
def test_kept_soft(file: Path) -> None:
    SOFT.replay(file)


@pytest.mark.parametrize("file", CUDA.kept())
def test_kept_cuda(file: Path) -> None:
    CUDA.replay(file)


def test_fresh_soft() -> None:
    SOFT.fuzz()


def test_fresh_cuda() -> None:
    CUDA.fuzz()
