"""A Gpu whose levers go through the kernel module, which queues commands and knows what holds, whatever dies.

    Follower --pull--> ioctl --> the kernel's queue --> ProviderGpu reads the command --> the Gpu itself
       ^                                                                                    |
       +------------------- ioctl returns <-- the kernel <-- ProviderGpu writes the answer <---+

So a lever that another program pulls reaches the hardware the same way. What a killed daemon had applied, or had begun
to apply, the next one finds in the kernel, which commands it again before all else.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import trio

from backend.common.errors import errno_of, fail
from backend.common.lasting import lasting
from backend.core.deadlines import Deadlines
from backend.core.protocols import Bookkeeping, Gpu
from backend.core.reasons import Engines
from backend.core.records import Capability
from backend.core.settings import Lever, Setting
from backend.door.wire import SIZE, Message, Op
from backend.ledgers import abi
from backend.ledgers.forwarding import ForwardingGpu
from backend.process.identity import Group, Member, Process, is_borne

log = logging.getLogger(__name__)

COMMANDS_AT_ONCE = 64

ANSWERED_S = 600.0
"""Seconds that the kernel waits for the answer to a lever. The provider answers sooner, and the request has a deadline
of its own; if the provider dies, the kernel knows at once."""

LETS_RUN = (Op.ATTACH_TSG, *abi.LEVERS)
"""Commands after which a Gpu lets a process run that it was not told to freeze."""


class Kernel(Protocol):
    """The kernel's service to a Gpu (:class:`backend.ledgers.kernel.KernelLedger`)."""

    @property
    def lacks(self) -> Collection[Setting]:
        """Settings that it does not keep, whatever the Gpu can do."""

    def queue(self, index: int) -> int:
        """Return the descriptor of a GPU's commands, not blocking."""

    async def pull(self, lever: Op, group: Group, value: int, seconds: float) -> int:
        """Have the provider of a process's GPU move a lever of it. Return the bytes moved for RECLAIM."""


class ProviderGpu(ForwardingGpu):
    """A :class:`backend.core.protocols.Gpu` that forwards to another through the kernel. See the module."""

    def __init__(self, inner: Gpu, kernel: Kernel, seconds: float) -> None:
        """`seconds`: the longest time for a lever that moves no memory."""
        super().__init__(inner)
        self._kernel = kernel
        self._deadlines = Deadlines(seconds, self._whole)
        self._table: tuple[Mapping[str, Capability], Mapping[str, Capability]] = {}, {}  # the Gpu's, and this one's
        self._serving = False
        self._behind: set[int] = set()  # earlier commands that are not answered yet
        self._caught_up = trio.Event()

    def capabilities(self) -> Mapping[str, Capability]:
        table = self._inner.capabilities()
        if not self._kernel.lacks:
            return table
        if self._table[0] is not table:
            refused = {setting.control for setting in self._kernel.lacks}
            self._table = table, {name: what for name, what in table.items() if name not in refused}
        return self._table[1]

    # Moves between GPUs bypass the kernel's queue: it repeats commands that are to hold, and a move is done once.

    async def run(
        self, bookkeeper: Bookkeeping, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        self._serving = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lasting, "deadlines", self._deadlines.run)
            nursery.start_soon(self._serve, bookkeeper)  # at once: the Gpu's first look asks for levers already
            await nursery.start(self._inner.run, bookkeeper)
            with trio.move_on_after(self._deadlines.seconds):
                await self._caught_up.wait()  # no program comes before earlier settings hold again
            task_status.started()

    # The levers, as they are asked for

    async def set_lever(self, lever: Lever, process: Process, value: int) -> None:
        if lever not in self._kernel.lacks:
            await self._pull(abi.OPS[lever], process, value)
        elif value:
            raise fail(errno.EOPNOTSUPP)

    async def detach(self, process: Process, engines: Engines = Engines.ALL) -> None:
        await self._pull(Op.DETACH_TSG, process, abi.ENGINES_GR if engines is Engines.GR else abi.ENGINES_ALL)

    async def attach(self, process: Process) -> None:
        await self._pull(Op.ATTACH_TSG, process)

    async def reclaim(self, process: Process, nbytes: int) -> int:
        return await self._pull(Op.RECLAIM, process, nbytes)

    async def _pull(self, lever: Op, process: Process, value: int = 0) -> int:
        if not self._serving:  # the mount ends: no provider would answer, and nothing is to be kept
            return await self._move(lever, process, value)
        try:
            return await self._kernel.pull(lever, Member(process, self.info.index), value, ANSWERED_S)
        except OSError as error:
            if error.errno == errno.ENODEV and not is_borne(process.pid):
                raise fail(errno.ESRCH) from None
            raise

    def _whole(self, group: Group) -> int:
        return self._inner.footprint(group.process).whole if isinstance(group, Member) else 0

    # The levers, as they are served

    async def _serve(self, bookkeeper: Bookkeeping) -> None:
        """Do what the kernel commands, each in a task of its own, so that a slow command delays no other."""
        queue = self._kernel.queue(self.info.index)
        try:
            async with trio.open_nursery() as nursery:
                await trio.lowlevel.checkpoint()  # now the Gpu's run() has had its first step, and takes levers
                commands = self._read(queue)
                self._behind.update(command.seq for command in commands)
                self._catch_up()
                while True:
                    for command in commands:
                        nursery.start_soon(self._obey, bookkeeper, queue, command)
                    await trio.lowlevel.wait_readable(queue)
                    commands = self._read(queue)
        finally:
            self._serving = False

    def _read(self, queue: int) -> Sequence[Message]:
        """Read the commands that are there now."""
        commands: list[Message] = []
        with contextlib.suppress(BlockingIOError):
            while raw := os.read(queue, COMMANDS_AT_ONCE * SIZE):
                commands += [Message.decode(raw[start : start + SIZE]) for start in range(0, len(raw), SIZE)]
        return commands

    async def _obey(self, bookkeeper: Bookkeeping, queue: int, command: Message) -> None:
        try:
            # A lever that hangs must not keep the next command to it waiting for ever.
            with self._deadlines.deadline(Member(Process(command.args[1], command.args[2]), self.info.index)):
                answer = command.answer(await self._do(bookkeeper, command))
        except OSError as error:
            answer = command.refuse(errno_of(error))
        except Exception:
            log.exception("GPU %d: command %d failed", self.info.index, command.op)
            answer = command.refuse(errno.EIO)
        with contextlib.suppress(OSError):  # no caller waits any more: the process is gone
            os.write(queue, answer.encode())
        self._behind.discard(command.seq)
        self._catch_up()

    def _catch_up(self) -> None:
        if not self._behind:
            self._caught_up.set()

    async def _do(self, bookkeeper: Bookkeeping, command: Message) -> int:
        process = Process(command.args[1], command.args[2])
        if command.op == Op.ARRIVE:
            await bookkeeper.arrive(process, self.info.index)
            return 0
        if command.seq in self._behind and command.op in LETS_RUN and self._is_frozen(bookkeeper, process):
            # The process was being frozen when the former daemon died, and the Follower detaches it first. Repeating
            # the earlier command before that would let it run for a moment.
            raise fail(errno.EAGAIN)
        return await self._move(command.op, process, command.args[3])

    def _is_frozen(self, bookkeeper: Bookkeeping, process: Process) -> bool:
        """Return whether the books have a process, or a slice above it, frozen. One without books is not."""
        with contextlib.suppress(OSError):
            return any(books.frozen for books in bookkeeper.levels(process, self.info.index))
        return False

    async def _move(self, lever: int, process: Process, value: int) -> int:
        match lever:
            case op if op in abi.LEVERS:
                await self._inner.set_lever(abi.LEVERS[Op(op)], process, value)
            case Op.ATTACH_TSG:
                await self._inner.attach(process)
            case Op.DETACH_TSG:
                await self._inner.detach(process, Engines.GR if value == abi.ENGINES_GR else Engines.ALL)
            case Op.RECLAIM:
                return await self._inner.reclaim(process, value)
            case _:
                raise fail(errno.EOPNOTSUPP)
        return 0
