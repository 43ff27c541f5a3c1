"""A Gpu behind the kernel's queue of commands: every command acts on it, and none holds up another.

The queue is a socket here: the test, or a lever, sends what the kernel would hand out.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from backend.core.controller import DEADLINE_S
from backend.core.deadlines import WHOLE_BYTES
from backend.core.protocols import Bookkeeping, Gpu
from backend.core.records import Books, Footprint
from backend.core.settings import TIMESLICE, WEIGHT, Setting
from backend.door.wire import SIZE, Message, Op
from backend.ledgers.provider import ProviderGpu
from backend.ledgers.soft import SoftLedger
from backend.process.identity import Group, Member, Process, identify
from backend.soft.config import SoftConfig
from backend.soft.gpu import SoftGpu
from tests.support.harness import MIB, Spawn, StubGpu, hang, raises, refuses, running, settle, virtual

WHO = Process(1_000_000_000, 7)


class Queue:
    """The kernel's side: sends commands and returns their answers, without a record of what holds."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._ours, self._theirs):
            end.setblocking(False)
        self.asked: list[tuple[Op, Group, int]] = []
        """Every lever that was moved through it."""
        self.lacks: set[Setting] = set()
        """Settings that it does not keep."""
        self._next = 0
        self._answers: dict[int, Message] = {}

    def __enter__(self) -> Queue:
        return self

    def __exit__(self, *_: object) -> None:
        self._ours.close()
        self._theirs.close()

    def queue(self, index: int) -> int:
        return self._theirs.fileno()

    async def pull(self, lever: Op, group: Group, value: int, seconds: float) -> int:
        self.asked.append((lever, group, value))
        assert isinstance(group.node, Process)
        return (await self.command(lever, group.node, value)).check().args[0]

    def send(self, op: int, process: Process = WHO, value: int = 0) -> int:
        """Queue a command; return its number."""
        self._next += 1
        self._ours.send(Message(op, self._next, args=(1, process.pid, process.start, value)).encode())
        return self._next

    async def command(self, op: int, process: Process = WHO, value: int = 0) -> Message:
        """Queue a command and wait for the answer."""
        return await self.answer(self.send(op, process, value))

    async def answer(self, number: int) -> Message:
        while number not in self._answers:
            with contextlib.suppress(BlockingIOError):
                message = Message.decode(self._ours.recv(SIZE + 1))
                assert message.reply
                assert not message.flags
                self._answers[message.seq] = message
                continue
            await trio.sleep(0.001)
        return self._answers.pop(number)


class Nobody:
    """A host that accepts everything."""

    def __init__(self) -> None:
        self.arrived: list[Process] = []

    async def arrive(self, process: Process, gpu: int) -> None:
        self.arrived.append(process)
        if process.pid == 1:
            raise ProcessLookupError(errno.ESRCH, "gone")

    def knows(self, process: Process, gpu: int) -> bool:
        return True

    def levels(self, process: Process, gpu: int) -> list[Books]:
        return []

    def moved_out(self, process: Process, gpu: int, nbytes: int, usec: int) -> None:
        pass


@contextlib.asynccontextmanager
async def serving(
    gpu: Gpu, bookkeeper: Any = None, queue: Queue | None = None
) -> AsyncIterator[tuple[ProviderGpu, Queue]]:
    """Serve a Gpu."""
    with queue or Queue() as queue:
        provided = ProviderGpu(gpu, queue, DEADLINE_S)
        async with trio.open_nursery() as nursery:
            await nursery.start(provided.run, bookkeeper or Nobody())
            yield provided, queue
            nursery.cancel_scope.cancel()


@virtual
async def test_every_command_reaches_its_lever() -> None:
    gpu = StubGpu()
    async with serving(gpu) as (_, queue):
        assert (await queue.command(Op.SET_TIMESLICE, WHO, 4000)).check().args[0] == 0
        assert (await queue.command(Op.DETACH_TSG)).check().op == Op.DETACH_TSG
        assert (gpu.timeslices, gpu.detached) == ({WHO: 4000}, {WHO})
        (await queue.command(Op.ATTACH_TSG)).check()
        assert gpu.detached == set()
        assert (await queue.command(Op.RECLAIM, WHO, 5 * MIB)).check().args[0] == 5 * MIB


@virtual
async def test_levers_go_through_the_kernel_and_back() -> None:
    """A call of the Controller becomes a command, and returns what the Gpu itself answers."""
    gpu = StubGpu(3)
    async with serving(gpu) as (provided, queue):
        await provided.set_lever(TIMESLICE, WHO, 4000)
        await provided.detach(WHO)
        await provided.attach(WHO)
        assert await provided.reclaim(WHO, 7) == 7
        group = Member(WHO, 3)
        assert queue.asked == [
            (Op.SET_TIMESLICE, group, 4000),
            (Op.DETACH_TSG, group, 0),
            (Op.ATTACH_TSG, group, 0),
            (Op.RECLAIM, group, 7),
        ]
        levers = [(lever, value) for lever, _, value in gpu.calls]
        assert levers == [("set_timeslice", 4000), ("detach", 0), ("attach", 0), ("reclaim", 7)]


@virtual
async def test_what_the_module_does_not_keep_is_not_asked_of_it() -> None:
    """Such a setting is unsupported, whatever the Gpu can do; a lever at its default holds."""
    gpu = StubGpu(3)
    async with serving(gpu) as (provided, queue):
        assert provided.capabilities().keys() == gpu.capabilities().keys()
        queue.lacks = {TIMESLICE, WEIGHT}
        table = gpu.capabilities()
        gpu.capabilities = lambda: table  # type: ignore[method-assign]
        assert table.keys() - provided.capabilities().keys() == {"compute.timeslice", "compute.weight"}
        assert provided.capabilities() is provided.capabilities(), "as long as nothing changed"
        await provided.set_lever(TIMESLICE, WHO, 0)
        with pytest.raises(OSError, match="Operation not supported"):
            await provided.set_lever(TIMESLICE, WHO, 4000)
        assert queue.asked == []


@virtual
async def test_the_rest_is_the_gpus_own() -> None:
    gpu = StubGpu()
    async with serving(gpu) as (provided, _):
        assert provided.info is gpu.info
        assert provided.capabilities() == gpu.capabilities()
        assert provided.activity(WHO) == gpu.activity(WHO)
        assert provided.manages(WHO)
        provided.forget(WHO)
        assert gpu.forgotten == [WHO]


@pytest.mark.parametrize("code", [errno.EIO, errno.EOPNOTSUPP, errno.ETIMEDOUT, errno.EPERM, errno.ESRCH])
@virtual
async def test_an_errno_is_passed_on(code: int) -> None:
    gpu = StubGpu()
    async with serving(gpu) as (provided, queue):
        gpu.script("detach", refuses(code), refuses(code))
        assert (await queue.command(Op.DETACH_TSG)).status == -code
        with pytest.raises(OSError) as caught:  # noqa: PT011 - compared below
            await provided.detach(WHO)
        assert caught.value.errno == code
        (await queue.command(Op.DETACH_TSG)).check()


@pytest.mark.logs("command 19 failed")
@virtual
async def test_a_bug_is_eio_and_ends_nothing() -> None:
    gpu = StubGpu()
    async with serving(gpu) as (_, queue):
        gpu.script("detach", raises(RuntimeError("the bug")))
        assert (await queue.command(Op.DETACH_TSG)).status == -errno.EIO
        (await queue.command(Op.DETACH_TSG)).check()


@virtual
async def test_an_unknown_command_is_refused() -> None:
    async with serving(StubGpu()) as (_, queue):
        assert (await queue.command(Op.HELLO)).status == -errno.EOPNOTSUPP


@virtual
async def test_a_slow_lever_holds_up_nobody_and_has_a_deadline() -> None:
    gpu = StubGpu()
    async with serving(gpu) as (_, queue):
        gpu.script("detach", hang, pid=WHO.pid)
        began = trio.current_time()
        slow = queue.send(Op.DETACH_TSG)
        other = Process(WHO.pid + 1, 1)
        (await queue.command(Op.DETACH_TSG, other)).check()
        (await queue.command(Op.SET_TIMESLICE, WHO, 9)).check()
        assert trio.current_time() - began < 1
        assert (await queue.answer(slow)).status == -errno.ETIMEDOUT
        assert trio.current_time() - began == pytest.approx(DEADLINE_S, abs=0.1)
        assert gpu.detached == {other}


@virtual
async def test_many_commands_at_once() -> None:
    """More than fit into one read."""
    gpu = StubGpu()
    everybody = [Process(WHO.pid + i, 1) for i in range(100)]
    async with serving(gpu) as (_, queue):
        for number in [queue.send(Op.DETACH_TSG, process) for process in everybody]:
            (await queue.answer(number)).check()
        assert gpu.detached == set(everybody)


@virtual
async def test_arrivals() -> None:
    """A process that joins through the kernel is announced to the host, whose refusal is passed on."""
    bookkeeper = Nobody()
    async with serving(StubGpu(), bookkeeper) as (_, queue):
        (await queue.command(Op.ARRIVE)).check()
        assert bookkeeper.arrived == [WHO]
        assert (await queue.command(Op.ARRIVE, Process(1, 1))).status == -errno.ESRCH


@virtual
async def test_what_was_held_before_is_held_before_anybody_can_come() -> None:
    """Commands that the kernel has from before are done by the time that the Gpu reports its start."""
    gpu = StubGpu()
    with Queue() as queue:
        for op, value in ((Op.DETACH_TSG, 0), (Op.SET_TIMESLICE, 4000)):
            queue.send(op, WHO, value)
        async with serving(gpu, queue=queue):
            assert (gpu.detached, gpu.timeslices) == ({WHO}, {WHO: 4000})


@virtual
async def test_a_lever_that_hangs_at_the_start_does_not_keep_it_from_starting() -> None:
    gpu = StubGpu()
    gpu.script("detach", hang)
    with Queue() as queue:
        queue.send(Op.DETACH_TSG)
        began = trio.current_time()
        async with serving(gpu, queue=queue) as (_, queue):
            assert trio.current_time() - began <= DEADLINE_S
            assert (await queue.command(Op.ATTACH_TSG)).status == 0


class Eager(StubGpu):
    """A Gpu that finds processes in its first look, as the NVIDIA one does, and reports its start after that."""

    def __init__(self, process: Process) -> None:
        super().__init__()
        self._process = process

    async def run(
        self, bookkeeper: Bookkeeping, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        self.bookkeeper = bookkeeper
        await bookkeeper.arrive(self._process, self.info.index)
        task_status.started()
        await trio.sleep_forever()


@virtual
async def test_levers_are_served_while_the_gpu_has_its_first_look(spawn: Spawn) -> None:
    """Otherwise a process that is found then, in a frozen slice, would wait for a lever that is never moved."""
    who = identify(spawn().pid)
    inner = Eager(who)
    ledger = SoftLedger()
    with Queue() as queue:
        provided = ProviderGpu(inner, queue, DEADLINE_S)
        add = ledger.add

        def add_frozen(group: Group, parent: Group) -> None:
            add(group, parent)
            ledger.configure(group, frozen=True)

        ledger.add = add_frozen  # type: ignore[method-assign]
        began = trio.current_time()
        async with running(provided, ledger=ledger) as h:
            assert trio.current_time() - began < 1
            assert inner.detached == {who}
            assert queue.asked == [(Op.DETACH_TSG, Member(who, 0), 0)]
            assert "frozen 1" in await h.read(f"{who.pid}/0/compute.events")


@virtual
async def test_who_was_being_frozen_is_not_let_run_by_what_held_before() -> None:
    """The daemon died in the middle of a freeze, and the kernel repeats what was acknowledged before. In the books the
    process is frozen, so its levers are left to the Follower; those of other processes are moved."""
    other = Process(WHO.pid, 8)

    class Frozen(Nobody):
        def levels(self, process: Process, gpu: int) -> list[Books]:
            return [Books(), Books(frozen=process == WHO)]

    gpu = StubGpu()
    with Queue() as queue:
        before = [
            queue.send(op, who, 4000) for who in (WHO, other) for op in (Op.SET_TIMESLICE, Op.ATTACH_TSG, Op.DETACH_TSG)
        ]
        async with serving(gpu, Frozen(), queue):
            codes = [-(await queue.answer(number)).status for number in before]
            assert codes == [errno.EAGAIN, errno.EAGAIN, 0, 0, 0, 0]
            assert sorted(lever for lever, *_ in gpu.calls) == ["attach", "detach", "detach", "set_timeslice"]
            assert (await queue.command(Op.ATTACH_TSG)).status == 0, "of one who asks now it is done"


@virtual
async def test_a_whole_mount_behind_it(spawn: Spawn) -> None:
    """Writes to files go through the kernel while the mount is there; the thaw at its end does not."""
    inner = StubGpu()
    with Queue() as queue:
        async with running(ProviderGpu(inner, queue, DEADLINE_S)) as h:
            who = await h.arrive(spawn().pid, gmem=8 * MIB)
            await h.write(f"{who.pid}/0/compute.timeslice", "4")
            await h.write(f"{who.pid}/0/compute.freeze", 1)
            await h.write(f"{who.pid}/0/gmem.limit.high", "4M")
            assert (inner.detached, inner.timeslices) == ({who}, {who: 4000})
            assert await h.read(f"{who.pid}/0/gmem.current") == f"{4 * MIB}\n"
            inner.script("attach", refuses(errno.EIO))
            assert await h.refused(f"{who.pid}/0/compute.freeze", 0) == errno.EIO
            await settle()
            asked = len(queue.asked)
        assert (inner.detached, inner.timeslices) == (set(), {}), "given back"
        assert len(queue.asked) == asked, "nobody was left to serve it"
        assert h.controller.released


@virtual
async def test_a_program_that_moves_as_a_whole_has_longer() -> None:
    gpu = StubGpu()
    async with serving(gpu) as (provided, _):
        gpu.script("reclaim", hang, hang)
        for longer in (0, 3):
            gpu.footprints[WHO] = Footprint(whole=longer * WHOLE_BYTES)
            began = trio.current_time()
            with pytest.raises(TimeoutError):
                await provided.reclaim(WHO, 7)
            assert trio.current_time() - began == pytest.approx((1 + longer) * DEADLINE_S, abs=0.1)


@virtual
async def test_a_lever_that_hangs_in_a_mount_is_free_again_after_the_deadline(spawn: Spawn) -> None:
    gpu = StubGpu()
    with Queue() as queue:
        async with running(ProviderGpu(gpu, queue, DEADLINE_S)) as h:
            who = await h.arrive(spawn().pid)
            gpu.script("detach", hang)
            assert await h.refused(f"{who.pid}/0/compute.freeze", 1) == errno.ETIMEDOUT
            await trio.sleep(1)
            await h.write(f"{who.pid}/0/compute.freeze", 1)
            assert gpu.detached == {who}


@virtual
async def test_a_lever_of_a_dead_process_is_esrch(spawn: Spawn) -> None:
    """The kernel says ENODEV, for a group that is gone; the rest of the program speaks of the process."""

    class Gone(Queue):
        async def pull(self, lever: Op, group: Group, value: int, seconds: float) -> int:
            raise OSError(errno.ENODEV, "gone")

    async with serving(StubGpu(), queue=Gone()) as (provided, _):
        with pytest.raises(ProcessLookupError):
            await provided.detach(WHO)
        with pytest.raises(OSError, match="gone"):
            await provided.detach(identify(spawn().pid))


@virtual
async def test_the_software_gpu_behind_it(spawn: Spawn) -> None:
    """It takes levers from its first step on, and keeps them for a program that comes later."""
    inner = SoftGpu(0, SoftConfig(capacity=64 * MIB))
    with Queue() as queue:
        provided = ProviderGpu(inner, queue, DEADLINE_S)
        async with running(provided) as h:
            who = await h.arrive(spawn().pid)
            await h.write(f"{who.pid}/0/compute.freeze", 1)
            await inner.open_context(who, 1, lambda finished: None)
            await inner.allocate(who, 32 * MIB)
            assert provided.activity(who).attached == 0
            await h.write(f"{who.pid}/0/gmem.reclaim", "8M")
            assert await h.read(f"{who.pid}/0/gmem.swap.current") == f"{8 * MIB}\n"
