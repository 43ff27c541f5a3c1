"""The server of the software GPU: real processes connect over a unix socket and get contexts, memory and an engine.

The kernel (SO_PEERCRED), not the program, says which process connects; a process can name only objects of its own.

A launch of a program whose turn is over waits, and so do later launches on that GPU, in their order. Other requests
of the program are answered meanwhile, so its other threads do not stand still.
"""

from __future__ import annotations

import contextlib
import errno
from collections import deque
from collections.abc import Mapping, Sequence

import attrs
import trio

from backend.common.errors import errno_of, fail
from backend.core import sight
from backend.core.records import Books
from backend.door import tenants
from backend.door.asking import ABOUT_FAMILIES, Asking
from backend.door.wire import ARGS, SOFT, VERSION, WORD, Feature, Message, Op, met
from backend.process.identity import Process
from backend.soft.gpu import SoftGpu
from backend.soft.hardware import PAGES_AT_ONCE

CONTEXTS = 64
"""Contexts that one connection may have open."""
CHANNELS = 128
"""Channels that one context may have."""
WAITING_MOST = 64
"""Launches of one connection that may wait on one GPU."""


NEEDS: Mapping[int, Feature] = {
    Op.WANT: Feature.FAMILY,
    Op.FAMILY: Feature.FAMILY,
    Op.TOTAL: Feature.TOTAL,
    Op.LIMITS: Feature.TOTAL,
}
"""Features that both sides must have announced for a request; Feature.ENGINE for all other requests."""


class NotItsTurn(Exception):
    """A launch some kernels of which have to wait, for the next turn of the program or until it is less far ahead."""

    def __init__(self, rest: Message) -> None:
        """`rest` is the part of the launch that was not done."""
        super().__init__(rest)
        self.rest = rest


async def serve(listener: tenants.Connection, gpus: Mapping[int, SoftGpu], tree: int = 0) -> None:
    """Serve every program that connects, until cancelled. `tree` is the device number of the mount."""
    await tenants.serve(listener, lambda process, line: Session(process, gpus, line), tree)


class Session:
    """One connection, and the objects that it opened."""

    def __init__(self, process: Process, gpus: Mapping[int, SoftGpu], line: tenants.Line) -> None:
        self.process = process
        """The process at the other end."""
        self._line = line
        self._gpus = gpus
        # GPUs are numbered as the program does it, which does not know that it was migrated.
        self._contexts: dict[int, int] = {}  # tsg -> gpu
        self._pages: dict[tuple[int, int], int] = {}  # (gpu, first page) -> pages, per allocation
        self._finished: dict[tuple[int, int], int] = {}  # (gpu, tsg) -> kernels, not yet reported
        self._news = trio.Event()
        self._waiting: dict[int, deque[Message]] = {}  # launches, by GPU, that wait for their turn there
        self._features: Feature | None = None  # what both sides can, once it has greeted
        self._asking = Asking(process, line.uid)

    async def run(self) -> None:
        """Answer requests and send progress until the other end is closed."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._report)
            await self._answer(nursery)
            nursery.cancel_scope.cancel()

    async def _answer(self, nursery: trio.Nursery) -> None:
        """Answer requests one after the other, except launches that wait."""
        while request := await self._line.receive():
            reply = None
            if request.op != Op.LAUNCH or request.gpu not in self._waiting:
                try:
                    reply = await self._reply(request)
                except NotItsTurn as waits:
                    request = waits.rest
            if reply is None:
                reply = self._put_off(request, nursery)
            if reply is not None:
                await self._line.send(reply)

    async def _reply(self, request: Message) -> Message:
        """Return the answer to a request that was done or failed. Raises NotItsTurn for one that has to wait."""
        try:
            return request.answer(*await self._do(request))
        except OSError as error:
            return request.refuse(errno_of(error))

    def _put_off(self, request: Message, nursery: trio.Nursery) -> Message | None:
        """Make a launch wait; return its refusal if too many wait already."""
        if request.gpu not in self._waiting:
            self._waiting[request.gpu] = deque()
            nursery.start_soon(self._launch, request.gpu)
        waiting = self._waiting[request.gpu]
        if len(waiting) == WAITING_MOST:  # a launch done in part is the first, so it is never refused
            return request.refuse(errno.EAGAIN)
        waiting.append(request)
        return None

    async def _launch(self, named: int) -> None:
        """Answer the launches that wait for their turn on a GPU, in their order, until none is left."""
        waiting = self._waiting[named]
        while waiting:
            reply = await self._reply_in_turn(waiting[0])
            waiting.popleft()
            if not waiting:
                del self._waiting[named]
            await self._line.send(reply)

    async def _reply_in_turn(self, request: Message) -> Message:
        while True:
            await self._meant(request.gpu).let_launch(self.process)
            try:
                return await self._reply(request)
            except NotItsTurn as waits:
                request = waits.rest

    async def _report(self) -> None:
        """Send progress. What the program is too slow to take is added up, not queued."""
        while True:
            await self._news.wait()
            self._news = trio.Event()
            news, self._finished = self._finished, {}
            for (gpu, tsg), finished in news.items():
                await self._line.send(Message(Op.PROGRESS, gpu=gpu, args=(tsg, finished)))

    def close(self) -> None:
        """Close its contexts and free its memory. A process that died has neither left."""
        for tsg, named in list(self._contexts.items()):
            with contextlib.suppress(OSError):
                self._meant(named).close_context(self.process, tsg)
        for (named, first), count in list(self._pages.items()):
            with contextlib.suppress(OSError):
                self._meant(named).free(self.process, range(first, first + count))

    def _meant(self, named: int) -> SoftGpu:
        """Return the GPU that the program means by an index. Raises OSError(ENODEV)."""
        if named not in self._gpus:
            raise fail(errno.ENODEV)
        return self._gpus[self._gpus[named].machine.meant(self.process, named)]

    async def _do(self, request: Message) -> tuple[int, ...]:
        tenants.check(request, self._features is not None)
        if request.op != Op.HELLO and NEEDS.get(request.op, Feature.ENGINE) not in (self._features or Feature(0)):
            raise fail(errno.ENOSYS)
        if request.op in ABOUT_FAMILIES:
            await self._asking.take(request, self._meant(request.gpu).booked)
            return ()
        async with self._meant(request.gpu).machine.gate(self.process).passed():
            return await self._call(request, request.gpu, self._meant(request.gpu))

    async def _call(self, request: Message, named: int, gpu: SoftGpu) -> tuple[int, ...]:
        op, args = request.op, request.args
        match op:
            case Op.HELLO:
                if args[0] != VERSION:
                    raise fail(errno.EPROTO)
                self._features = met(SOFT, args[1])
                return VERSION, gpu.config.page, gpu.config.timeslice_us, SOFT
            case Op.JOIN:
                return (await self._join(named, gpu, args[0]),)
            case Op.LEAVE:
                if self._contexts.get(args[0]) != named:
                    raise fail(errno.ENOENT)
                gpu.close_context(self.process, args[0])
                del self._contexts[args[0]]
            case Op.ALLOC:
                if named not in self._contexts.values():
                    raise fail(errno.EBADF)
                pages = await gpu.allocate(self.process, args[0])
                self._pages[named, pages.start] = len(pages)
                return pages.start, len(pages)
            case Op.FREE:
                if self._pages.get((named, args[0])) != args[1]:
                    raise fail(errno.EINVAL)  # like cuMemFree: a whole allocation
                del self._pages[named, args[0]]
                gpu.free(self.process, range(args[0], args[0] + args[1]))
            case Op.WRITE:
                for offset in range(self._bounded(named, args[0], args[1])):
                    if offset % PAGES_AT_ONCE == PAGES_AT_ONCE - 1:
                        await trio.lowlevel.checkpoint()
                    gpu.write(self.process, args[0] + offset, (args[2] + offset * args[3]) % WORD)
            case Op.READ:
                if args[1] > ARGS:
                    raise fail(errno.EINVAL)
                return tuple(gpu.read(self.process, args[0] + i) for i in range(args[1]))
            case Op.TOTAL:
                return (min(gpu.info.capacity, sight.total(await self._levels(gpu), gpu.info.capacity)),)
            case Op.LIMITS:
                levels = await self._levels(gpu)
                limit, free = sight.limits(levels, gpu.info.capacity)
                room = max(0, gpu.info.capacity - levels[-1].current)  # what a driver would say
                swap = levels[0].swap if gpu.booked.knows(self.process, gpu.info.index) else 0
                return limit, room if limit == sight.WHOLE else min(free, room), swap
            case Op.LAUNCH:
                if self._contexts.get(args[0]) != named:
                    raise fail(errno.ENOENT)
                touched = range(args[3], args[3] + (self._bounded(named, args[3], args[4]) if args[4] else 0))
                launched = await gpu.launch_some(self.process, args[0], args[1], args[2], touched)
                if launched != args[1]:
                    rest = (args[0], args[1] - launched, *args[2:])
                    raise NotItsTurn(attrs.evolve(request, args=rest))
            case _:
                raise fail(errno.ENOSYS)
        return ()

    async def _levels(self, gpu: SoftGpu) -> Sequence[Books]:
        """Return the books of the levels that the program is below, or would be; the GPU's root last."""
        return await gpu.booked.prospect(self.process, gpu.info.index)

    async def _join(self, named: int, gpu: SoftGpu, channels: int) -> int:
        if len(self._contexts) >= CONTEXTS or not 0 < channels <= CHANNELS:
            raise fail(errno.EINVAL)
        told: list[int] = []  # the TSG's number, known only once it is open

        def progress(finished: int) -> None:
            self._finished[named, told[0]] = finished
            self._news.set()

        gated = Feature.TURNS in (self._features or Feature(0))
        tsg = await gpu.open_context(self.process, channels, progress, gated=gated)
        told.append(tsg)
        self._contexts[tsg] = named
        return tsg

    def _bounded(self, named: int, first: int, count: int) -> int:
        """Return `count` if one allocation of this connection holds all those pages. Raises
        OSError(EFAULT) otherwise.
        """
        for (owner, start), length in self._pages.items():
            if owner == named and start <= first and first + count <= start + length:
                return count
        raise fail(errno.EFAULT)
