"""A daemon with fake GPUs, and programs with the CUDA library, whose side of the socket the test plays."""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import mmap
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Protocol

import attrs
import pytest
import trio
from trio.testing import MockClock

import backend.process.identity
import backend.process.running
from backend.cuda import managed
from backend.cuda.page import SEALS
from backend.cuda.peers import Peers
from backend.cuda.server import Session
from backend.door import tenants
from backend.door.wire import CUDA, SIZE, VERSION, Message, Op
from backend.nvidia.gpu import NvidiaGpu
from backend.nvidia.nvml import Nvml
from backend.nvidia.opening import open_gpus
from backend.process.identity import Process, Slice
from ggroupfs.client import flat
from tests.support.fake_nvidia import FakeNvml, FakeSystem, patient
from tests.support.harness import Harness, Spawn, World, running

GIB, MIB = 1 << 30, 1 << 20


@pytest.fixture(autouse=True)
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make pieces small, so that a move has several."""
    monkeypatch.setattr(managed, "PIECE", GIB)


U64 = (1 << 64) - 1
CONTEXT = 500 * MIB
"""Memory that the driver counts for a context, bytes."""

LOOKS = 0.7
"""Seconds after which the books agree with the driver again if nothing else happens."""


class NvmlWithNames(FakeNvml):
    """An NVML whose UUIDs have the form of real ones."""

    def nvmlDeviceGetUUID(self, device: int) -> str:
        return f"GPU-50f79900-0000-4000-8000-{device:012x}"


class Program:
    """A CUDA program with the library in it; it follows requests unless the test overrides that."""

    features = CUDA
    """Bits of the features that it offers; 0 for those of the first version."""

    def __init__(self, rig: Rig, process: Process, connection: trio.SocketStream | Any) -> None:
        self.process = process
        self.socket = connection
        self.rig = rig
        self.resident = self.swapped = 0
        self.context = CONTEXT
        self.lag: int | None = None
        """Memory that the driver counts, if that differs from what the program has."""
        self.reclaims: list[int] = []
        """Bytes of every RECLAIM."""
        self.rooms: list[int] = []
        self.ranks: list[Message] = []
        """Every LEAD and FOLLOW."""
        self.obey: Callable[[Message], Awaitable[Message | None]] = self.move
        self.gpu = 0
        """Index of its GPU."""
        self.page: mmap.mmap | None = None
        self.ended = trio.Event()
        self._sending = trio.Lock()
        self._seq = 0
        self._answers: dict[int, Message] = {}
        self._news = trio.Event()

    @property
    def file(self) -> str:
        return f"{self.process.pid}/{self.gpu}/"

    # Calls, as the library would handle them

    async def manage(self, resident: int = 0, swapped: int = 0, groups: int = 0) -> Program:
        assert (await self.ask(Op.HELLO, VERSION, self.features)).args[:3] == (VERSION, 2 * MIB, 2048)
        (await self.ask(Op.MANAGE, resident, swapped, groups)).check()
        self.resident, self.swapped = resident, swapped
        self.show()
        return self

    async def alloc(self, nbytes: int) -> int:
        """Allocate memory; return the errno, 0 for success."""
        answer = await self.ask(Op.CHARGE, nbytes)
        if not answer.status:
            self.resident += nbytes
            self.show()
        return -answer.status

    async def free(self, resident: int, swapped: int = 0) -> int:
        self.resident -= resident
        self.swapped -= swapped
        self.show()
        return -(await self.ask(Op.UNCHARGE, resident, swapped)).status

    async def move(self, request: Message) -> Message:
        """Move all that is requested, as the mover does, in chunks of 2 MiB at 32 GiB/s. The gate for turns stays
        open.
        """
        if request.op == Op.END_TURN:
            return request.refuse(errno.EBUSY)
        if request.op == Op.BEGIN_TURN:
            return request.answer()
        if request.op == Op.SMS:
            return request.answer(16, 8, 132)
        nbytes = min(self.resident, -(-request.args[3] // (2 * MIB)) * 2 * MIB)
        usec = nbytes * 1_000_000 // (32 * GIB)
        await trio.sleep(usec / 1e6)
        self.resident -= nbytes
        self.swapped += nbytes
        self.show()
        return request.answer(nbytes, usec)

    def show(self) -> None:
        """Make the driver count what the program has now."""
        nbytes = self.lag if self.lag is not None else self.resident + self.context
        self.rig.driver_says(self.process.pid, nbytes, self.gpu)

    # The wire

    async def send(self, message: Message) -> None:
        async with self._sending:
            await self.socket.send(message.encode())

    async def ask(self, op: int, *args: int, gpu: int | None = None) -> Message:
        self._seq += 1
        seq = self._seq
        await self.send(Message(op, seq, self.gpu if gpu is None else gpu, args))
        while seq not in self._answers:
            if self.ended.is_set():
                raise ConnectionResetError
            await self._news.wait()
        return self._answers.pop(seq)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            with contextlib.suppress(ConnectionResetError, BrokenPipeError, trio.ClosedResourceError):
                while True:
                    raw, rights, _, _ = await self.socket.recvmsg(SIZE + 1, socket.CMSG_SPACE(4))
                    if not raw:
                        break
                    self._take_rights(rights)
                    message = Message.decode(raw)
                    if message.reply:
                        self._answers[message.seq] = message
                    elif message.op == Op.ROOM:
                        self.rooms.append(message.args[0])
                    elif message.op in (Op.LEAD, Op.FOLLOW):
                        self.ranks.append(message)
                    else:
                        if message.op == Op.RECLAIM:
                            assert message.args[3] <= managed.PIECE
                            self.reclaims.append(message.args[3])
                        else:
                            assert message.op in (Op.DEPART, Op.END_TURN, Op.BEGIN_TURN, Op.PREPARE, Op.SMS)
                        nursery.start_soon(self._obey, message)
                    self._wake()
            self.ended.set()
            self._wake()
            nursery.cancel_scope.cancel()

    async def _obey(self, message: Message) -> None:
        reply = await self.obey(message)
        if reply is not None:
            with contextlib.suppress(OSError):
                await self.send(reply)

    def _take_rights(self, rights: Sequence[tuple[int, int, bytes]]) -> None:
        for level, kind, data in rights:
            assert (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
            for fd in array.array("i", data):
                assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) == SEALS
                assert os.fstat(fd).st_size == 4096
                if self.page is None:
                    self.page = mmap.mmap(fd, 4096)
                os.close(fd)

    def _wake(self) -> None:
        self._news.set()
        self._news = trio.Event()

    def close(self) -> None:
        self.socket.close()
        if self.page is not None:
            self.page.close()


async def until_then(condition: Callable[[], bool]) -> None:
    """Let virtual time pass until a condition holds."""
    while not condition():  # noqa: ASYNC110 - it is found by polling
        await trio.sleep(0.05)


class Drive(Protocol):
    def __call__(self, test: Callable[[Rig], Awaitable[None]], count: int = 1, *, scheduler: bool = False) -> None: ...


@attrs.define
class Rig:
    h: Harness
    gpu: NvidiaGpu
    fake: FakeSystem
    nvml: FakeNvml
    nursery: trio.Nursery
    spawn: Spawn
    others: Sequence[NvidiaGpu] = ()
    """Further GPUs."""
    programs: list[Program] = attrs.field(factory=list)
    peers: Peers = attrs.field(factory=Peers)
    """Features that the daemon offers to programs, and those that programs lack."""

    def driver_says(self, pid: int, nbytes: int, gpu: int = 0) -> None:
        for index in range(1 + len(self.others)):
            self.nvml.compute[index] = [(p, n) for p, n in self.nvml.compute.get(index, []) if p != pid]
        self.nvml.compute[gpu].append((pid, nbytes))

    def process(self, cgroup: str = "/", *words: str) -> Process:
        """Start a CUDA program without the library, with the given command."""
        process = backend.process.identity.identify(self.spawn(*words).pid)
        if cgroup != "/":
            self.h.world.cgroups[process.pid] = Slice(cgroup)
        self.fake.program(process.pid, 0, start=process.start)
        return process

    def connect(self, process: Process, kind: type[Program] | None = None) -> Program:
        """Connect a process to a session as the server makes one; `kind` is the class of its program."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = (kind or Program)(self, process, trio.socket.from_stdlib_socket(ours))
        line = tenants.Line(trio.socket.from_stdlib_socket(theirs), process)
        session = Session(process, {gpu.info.index: gpu.managed for gpu in (self.gpu, *self.others)}, line, self.peers)

        async def serve() -> None:
            try:
                await session.run()
            finally:
                session.close()
                theirs.close()

        self.nursery.start_soon(serve)
        self.nursery.start_soon(program.run)
        self.programs.append(program)
        return program

    async def program(self, resident: int = 0, cgroup: str = "/", context: int = CONTEXT) -> Program:
        """Start a program with the library that has `resident` bytes."""
        program = self.connect(self.process(cgroup))
        program.context = context
        await program.manage()
        if resident:
            assert await program.alloc(resident) == 0
        return program

    async def number(self, path: str) -> int:
        return int(await self.h.read(path))

    async def stat(self, path: str) -> dict[str, int]:
        return flat(await self.h.read(path))

    async def die(self, program: Program) -> None:
        os.kill(program.process.pid, signal.SIGKILL)
        self.fake.kill(program.process.pid)
        self.nvml.compute[0] = [(p, n) for p, n in self.nvml.compute[0] if p != program.process.pid]
        await self.h.gone(program.process)

    async def lose(self) -> None:
        """Make NVML report that the GPU is lost."""
        self.nvml.error = self.nvml.NVML_ERROR_GPU_IS_LOST
        await until_then(lambda: self.gpu.lost)

    async def restore(self) -> None:
        """Make the GPU answer again."""
        self.nvml.error = 0
        await until_then(lambda: not self.gpu.lost)


@pytest.fixture
def drive(spawn: Spawn) -> Drive:
    """Runs a test on fake GPUs of 80 GiB, a single one by default, and with a scheduler on request. At the end the
    books are checked, and no descriptor may be left open.
    """

    def run(test: Callable[[Rig], Awaitable[None]], count: int = 1, *, scheduler: bool = False) -> None:
        fake, nvml = FakeSystem(), NvmlWithNames(count=count)

        async def main() -> None:
            gpu, *others = await open_gpus(system=fake, nvml=Nvml(nvml), selftest=False)  # type: ignore[arg-type]
            async with running(gpu, *others, world=World(), scheduler=scheduler) as h:
                programs: list[Program] = []
                try:
                    async with trio.open_nursery() as nursery:
                        for one in (gpu, *others):
                            one.managed.open()
                        await test(Rig(h, gpu, fake, nvml, nursery, spawn, others, programs))
                        h.check()
                        nursery.cancel_scope.cancel()
                finally:
                    for program in programs:
                        program.close()

        clock = MockClock(autojump_threshold=0.005)
        with patient(clock, lambda: False):
            trio.run(main, clock=clock)

    return run


@contextlib.asynccontextmanager
async def takes(low: float, high: float) -> AsyncIterator[None]:
    began = trio.current_time()
    yield
    assert low <= trio.current_time() - began <= high
