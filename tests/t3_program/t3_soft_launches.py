"""Launches at the socket of the software GPU, in virtual time: they wait for their turn and hold up nothing else."""

from __future__ import annotations

import errno
import socket
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import trio

from backend.core.turns import TurnEnd
from backend.door.tenants import Line
from backend.door.wire import SIZE, SOFT, VERSION, Feature, Message, Op
from backend.process.identity import Process
from backend.soft.config import SoftConfig
from backend.soft.gpu import SoftGpu
from backend.soft.machine import Machine
from backend.soft.server import WAITING_MOST, Session
from tests.support.harness import MIB, running, settle, virtual

Spawn = Callable[..., subprocess.Popen[bytes]]


class Client:
    """A program's end of a connection, which does not wait for answers."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._end.setblocking(False)
        self._seq = 0
        self.answers: dict[int, Message] = {}
        """Answers by request, in the order of their arrival."""
        self.finished: Counter[int] = Counter()
        """Finished kernels by TSG."""

    def say(self, op: Op, *args: int, gpu: int = 0) -> int:
        """Send a request; return its number."""
        self._seq += 1
        self._end.send(Message(op, self._seq, gpu, args).encode())
        return self._seq

    async def hear(self) -> dict[int, Message]:
        """Let the daemon do all that it can, and read its messages."""
        await settle()
        while self._take():
            await settle()
        return self.answers

    def _take(self) -> int:
        """Read messages; return how many there were."""
        taken = 0
        while True:
            try:
                raw = self._end.recv(SIZE)
            except BlockingIOError:
                return taken
            if not raw:
                return taken
            taken += 1
            message = Message.decode(raw)
            if message.reply:
                assert message.seq not in self.answers
                self.answers[message.seq] = message
            else:
                self.finished[message.args[0]] = message.args[1]

    async def ask(self, op: Op, *args: int, gpu: int = 0) -> tuple[int, ...]:
        """Send a request and return its answer."""
        seq = self.say(op, *args, gpu=gpu)
        return (await self.hear())[seq].check().args


@asynccontextmanager
async def connected(process: Process, *gpus: SoftGpu, features: int = SOFT) -> AsyncIterator[tuple[Client, int]]:
    """Connect a process, with the greeting done; return the connection and its TSG."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, trio.socket.from_stdlib_socket(theirs) as end:
        session = Session(process, {gpu.info.index: gpu for gpu in gpus}, Line(end, process))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(session.run)
            client = Client(ours)
            await client.ask(Op.HELLO, VERSION, features)
            tsg = (await client.ask(Op.JOIN, 1))[0]
            yield client, tsg
            ours.close()
        session.close()


def soft(index: int = 0, machine: Machine | None = None) -> SoftGpu:
    return SoftGpu(index, SoftConfig(64 * MIB, MIB, switch_us=0), machine)


@virtual
async def test_a_launch_waits_and_what_is_asked_meanwhile_does_not(spawn: Spawn) -> None:
    gpu = soft()
    async with running(gpu) as h:
        process = await h.arrive(spawn().pid)
        async with connected(process, gpu) as (client, tsg):
            first, count = (await client.ask(Op.ALLOC, 4 * MIB))[:2]
            await client.ask(Op.LAUNCH, tsg, 2, 1000)
            assert await gpu.end_turn(process, 100_000) is TurnEnd.DRAINED
            launch = client.say(Op.LAUNCH, tsg, 3, 1000, first, count)
            await client.ask(Op.WRITE, first, count, 70, 1)
            assert (await client.ask(Op.READ, first, count))[:4] == (70, 71, 72, 73)
            more = await client.ask(Op.ALLOC, 2 * MIB)
            await client.ask(Op.FREE, *more[:2])
            other = (await client.ask(Op.JOIN, 1))[0]
            await client.ask(Op.LEAVE, other)
            await trio.sleep(10)
            assert launch not in await client.hear()
            assert client.finished[tsg] == 2
            await gpu.begin_turn(process)
            await trio.sleep(0.1)
            assert (await client.hear())[launch].status == 0
            assert client.finished[tsg] == 5


@virtual
async def test_launches_stay_in_their_order(spawn: Spawn) -> None:
    """The order covers all contexts of a program: a later launch waits behind the one that waits already."""
    gpu = soft()
    async with running(gpu) as h:
        process = await h.arrive(spawn().pid)
        async with connected(process, gpu) as (client, tsg):
            other = (await client.ask(Op.JOIN, 1))[0]
            assert await gpu.end_turn(process, 0) is TurnEnd.DRAINED
            launches = [client.say(Op.LAUNCH, one, 1, 1000) for one in (tsg, other, tsg, tsg, other)]
            await client.hear()
            before = len(client.answers)
            await gpu.begin_turn(process)
            launches.append(client.say(Op.LAUNCH, tsg, 1, 1000))
            await client.hear()
            assert list(client.answers)[before:] == launches


@virtual
async def test_a_turn_on_one_gpu_holds_nothing_on_another(spawn: Spawn) -> None:
    machine = Machine(2)
    gpus = soft(0, machine), soft(1, machine)
    async with running(*gpus) as h:
        process = await h.arrive(spawn().pid)
        async with connected(process, *gpus) as (client, tsg):
            there = (await client.ask(Op.JOIN, 1, gpu=1))[0]
            assert await gpus[0].end_turn(process, 0) is TurnEnd.DRAINED
            here = client.say(Op.LAUNCH, tsg, 1, 10)
            await client.ask(Op.LAUNCH, there, 1, 10, gpu=1)
            assert await gpus[1].end_turn(process, 100) is TurnEnd.DRAINED
            later = client.say(Op.LAUNCH, there, 1, 10, gpu=1)
            await gpus[0].begin_turn(process)
            assert here in await client.hear()
            assert later not in client.answers
            await gpus[1].begin_turn(process)
            assert (await client.hear())[later].status == 0


@virtual
async def test_a_launch_waits_until_its_program_is_less_far_ahead_and_holds_up_nothing_else(spawn: Spawn) -> None:
    """The answer comes once its last kernel is queued; a turn that ends meanwhile is drained all the same."""
    gpu = soft()
    async with running(gpu) as h:
        process = await h.arrive(spawn().pid)
        async with connected(process, gpu) as (client, tsg):
            assert await gpu.end_turn(process, 0) is TurnEnd.DRAINED
            await gpu.begin_turn(process)
            launch, behind = client.say(Op.LAUNCH, tsg, 40, 5000), client.say(Op.LAUNCH, tsg, 1, 5000)
            await client.hear()
            assert gpu.activity(process).submitted == 3
            first, count = (await client.ask(Op.ALLOC, 4 * MIB))[:2]
            await client.ask(Op.FREE, first, count)
            await trio.sleep(0.1)
            assert await gpu.end_turn(process, 15_000) is TurnEnd.DRAINED
            await trio.sleep(1)
            assert launch not in await client.hear()
            await gpu.begin_turn(process)
            await trio.sleep(0.3)
            answers = await client.hear()
            assert (answers[launch].status, answers[behind].status) == (0, 0)
            assert list(answers).index(launch) < list(answers).index(behind)
            assert client.finished[tsg] == 41


@virtual
async def test_launches_that_wait_for_a_turn_are_bounded(spawn: Spawn) -> None:
    """Launches beyond the bound are refused as for a full queue, and the others are answered all the same."""
    gpu = soft()
    async with running(gpu) as h:
        process = await h.arrive(spawn().pid)
        async with connected(process, gpu) as (client, tsg):
            assert await gpu.end_turn(process, 0) is TurnEnd.DRAINED
            launches = []
            for _ in range(WAITING_MOST + 2):
                launches.append(client.say(Op.LAUNCH, tsg, 1, 10))
                await client.hear()
            refused = [seq for seq in launches if seq in client.answers]
            assert refused == launches[WAITING_MOST:]
            assert {client.answers[seq].status for seq in refused} == {-errno.EAGAIN}
            await gpu.begin_turn(process)
            await client.hear()
            assert {client.answers[seq].status for seq in launches[:WAITING_MOST]} == {0}


@virtual
async def test_a_launch_of_which_some_was_done_is_not_refused(spawn: Spawn) -> None:
    """Many others wait on another GPU: the bound is of each GPU."""
    machine = Machine(2)
    gpus = soft(0, machine), soft(1, machine)
    async with running(*gpus) as h:
        process = await h.arrive(spawn().pid)
        async with connected(process, *gpus) as (client, tsg):
            there = (await client.ask(Op.JOIN, 1, gpu=1))[0]
            for gpu in gpus:
                assert await gpu.end_turn(process, 0) is TurnEnd.DRAINED
            await gpus[0].begin_turn(process)
            others = []
            for _ in range(WAITING_MOST + 1):
                others.append(client.say(Op.LAUNCH, there, 1, 10, gpu=1))
                await client.hear()
            launch, behind = client.say(Op.LAUNCH, tsg, 40, 5000), client.say(Op.LAUNCH, tsg, 1, 5000)
            assert [seq for seq in (*others, launch, behind) if seq in await client.hear()] == others[WAITING_MOST:]
            assert gpus[0].activity(process).submitted == 3
            await trio.sleep(0.3)
            answers = await client.hear()
            assert (answers[launch].status, answers[behind].status) == (0, 0)
            assert client.finished[tsg] == 41
            await gpus[1].begin_turn(process)
            await client.hear()
            assert {client.answers[seq].status for seq in others[:WAITING_MOST]} == {0}


@pytest.mark.parametrize("features", [0, SOFT & ~Feature.TURNS])
@virtual
async def test_an_older_client_is_not_held(spawn: Spawn, features: int) -> None:
    gpu = soft()
    async with running(gpu) as h:
        process = await h.arrive(spawn().pid)
        async with connected(process, gpu, features=features) as (client, tsg):
            assert await gpu.end_turn(process, 0) is TurnEnd.UNGATED
            await client.ask(Op.LAUNCH, tsg, 2, 1000)
            await trio.sleep(0.1)
            await client.hear()
            assert client.finished[tsg] == 2


@virtual
async def test_a_second_connection_without_a_gate_opens_it(spawn: Spawn) -> None:
    gpu = soft()
    async with running(gpu) as h:
        process = await h.arrive(spawn().pid)
        async with connected(process, gpu) as (client, tsg):
            assert await gpu.end_turn(process, 0) is TurnEnd.DRAINED
            launch = client.say(Op.LAUNCH, tsg, 2, 1000)
            assert launch not in await client.hear()
            async with connected(process, gpu, features=0):
                assert (await client.hear())[launch].status == 0
                assert await gpu.end_turn(process, 0) is TurnEnd.UNGATED
            await trio.sleep(0.1)
            assert await gpu.end_turn(process, 0) is TurnEnd.DRAINED


@virtual
async def test_what_a_launch_names_may_be_gone_when_its_turn_comes(spawn: Spawn) -> None:
    gpu = soft()
    async with running(gpu) as h:
        process = await h.arrive(spawn().pid)
        async with connected(process, gpu) as (client, tsg):
            other = (await client.ask(Op.JOIN, 1))[0]
            first, count = (await client.ask(Op.ALLOC, 4 * MIB))[:2]
            assert await gpu.end_turn(process, 0) is TurnEnd.DRAINED
            on_other = client.say(Op.LAUNCH, other, 1, 10)
            on_pages = client.say(Op.LAUNCH, tsg, 1, 10, first, count)
            on_none = client.say(Op.LAUNCH, tsg, 1, 10, gpu=7)
            last = client.say(Op.LAUNCH, tsg, 1, 10)
            await client.ask(Op.LEAVE, other)
            await client.ask(Op.FREE, first, count)
            await gpu.begin_turn(process)
            answers = await client.hear()
            refused = [answers[seq].status for seq in (on_other, on_pages, on_none)]
            assert refused == [-errno.ENOENT, -errno.EFAULT, -errno.ENODEV]
            assert answers[last].status == 0


@virtual
async def test_a_launch_that_waits_goes_along_to_another_gpu(spawn: Spawn) -> None:
    machine = Machine(2)
    gpus = soft(0, machine), soft(1, machine)
    async with running(*gpus) as h:
        process = await h.arrive(spawn().pid)
        async with connected(process, *gpus) as (client, tsg):
            first, count = (await client.ask(Op.ALLOC, 4 * MIB))[:2]
            assert await gpus[0].end_turn(process, 0) is TurnEnd.DRAINED
            launch = client.say(Op.LAUNCH, tsg, 2, 1000, first, count)
            assert launch not in await client.hear()
            await h.write(f"{process.pid}/0/compute.migrate", 1)
            await trio.sleep(0.1)
            assert (await client.hear())[launch].status == 0
            assert client.finished[tsg] == 2
            assert gpus[1].activity(process).finished == 2


@virtual
async def test_a_connection_that_ends_while_a_launch_waits(spawn: Spawn) -> None:
    gpu = soft()
    async with running(gpu) as h:
        process = await h.arrive(spawn().pid)
        async with connected(process, gpu) as (client, tsg):
            await client.ask(Op.ALLOC, 4 * MIB)
            assert await gpu.end_turn(process, 0) is TurnEnd.DRAINED
            client.say(Op.LAUNCH, tsg, 2, 1000)
            await client.hear()
        assert gpu.activity(process).submitted == 0
        assert await h.read(f"{process.pid}/0/gmem.current") == "0\n"
        async with connected(process, gpu) as (client, tsg):
            await client.ask(Op.LAUNCH, tsg, 2, 1000)  # a newcomer is not held back


@pytest.mark.logs("is lost", "is back")
@virtual
async def test_a_launch_that_waits_on_a_gpu_that_is_lost(spawn: Spawn) -> None:
    gpu = soft()
    async with running(gpu) as h:
        process = await h.arrive(spawn().pid)
        async with connected(process, gpu) as (client, tsg):
            assert await gpu.end_turn(process, 0) is TurnEnd.DRAINED
            launch = client.say(Op.LAUNCH, tsg, 2, 1000)
            await client.hear()
            gpu.lose()
            assert (await client.hear())[launch].status == -errno.ENODEV
            gpu.restore()
            assert await gpu.end_turn(process, 0) is TurnEnd.UNGATED
            launch = client.say(Op.LAUNCH, tsg, 2, 1000)
            assert (await client.hear())[launch].status == -errno.ENODEV
