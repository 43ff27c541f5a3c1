"""The door of NVIDIA GPUs: CUDA programs come in, by the library that `ggroupfs run` puts into them.

Requests of one connection overlap. What waits (CHARGE, MANAGE, TOTAL, SPACE) waits in a task of its own, so that the
answer to a RECLAIM, which it may wait for, and what other threads of the program ask are handled meanwhile.
"""

from __future__ import annotations

import errno
import itertools
import logging
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import attrs
import trio

from backend.common.errors import errno_of, fail
from backend.common.lasting import lasting
from backend.core.turns import TurnEnd
from backend.core.workingset import WorkingSet
from backend.cuda.burst import BurstPage
from backend.cuda.gates import Gates
from backend.cuda.grants import Grants, Pinned
from backend.cuda.holding import Holding
from backend.cuda.managed import Managed
from backend.cuda.moves import Moves
from backend.cuda.news import News
from backend.cuda.page import CounterPage
from backend.cuda.peers import Peers
from backend.cuda.placements import Placements
from backend.cuda.sms import Shape
from backend.door import tenants
from backend.door.asking import Asking
from backend.door.wire import STATUSES, VERSION, Feature, Message, Op, met
from backend.process.identity import Process

log = logging.getLogger(__name__)

WAITING = (Op.CHARGE, Op.MANAGE, Op.TOTAL, Op.SPACE)
"""Requests that may take their time."""

EVENTS = (Op.UNCHARGE, Op.REPORT, Op.HOST)
"""Requests that are not answered if they come with a seq of 0."""

NEEDS = {
    Op.MANAGE: Feature.MEMORY,
    Op.CHARGE: Feature.MEMORY,
    Op.UNCHARGE: Feature.MEMORY,
    Op.MOVE_IN: Feature.MEMORY,
    Op.LIMITS: Feature.MEMORY,
    Op.REPORT: Feature.REPORT,
    Op.WANT: Feature.FAMILY,
    Op.FAMILY: Feature.FAMILY,
    Op.TOTAL: Feature.TOTAL,
    Op.HOST: Feature.HOST,
    Op.SPACE: Feature.SPACE,
}
"""What both sides have to have said that they can. Otherwise it is as with what is unknown: ENOSYS."""

LEAVES = Feature.COUNTERS | Feature.DEPART
"""What a program needs to be moved to another GPU: that it stands by is on the page of counters."""

BURSTS = Feature.BURSTS | Feature.TURNS | Feature.COUNTERS
"""What a program needs to take part in busy periods: a gate, and counts of what is pending."""

WAITING_MOST = 1024
"""Requests that wait of one connection, at most; a program has one a thread."""

MOVED_IN_S = 0.5
"""Seconds after the last MOVE_IN that was granted in which memory may be coming back: one batch of it, with the wait
for what runs (0.3 s) and the copy (0.2 s, ``library/move/batch.c``)."""


async def serve(
    listener: tenants.Connection,
    gpus: Mapping[int, Managed],
    tree: int = 0,
    peers: Peers | None = None,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serves every program that connects, until cancelled. `tree` is the device number of the mount."""
    known = peers if peers is not None else Peers()
    grants = Grants()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lasting, "grants of host memory", grants.run)
        for gpu in gpus.values():
            gpu.open()
        task_status.started()
        await tenants.serve(listener, lambda process, line: Session(process, gpus, line, known, grants), tree)
        nursery.cancel_scope.cancel()


def words(name: str) -> tuple[int, int] | None:
    """A GPU's UUID as LOCATE has it; None for a name that is none."""
    try:
        raw = uuid.UUID(name.removeprefix("GPU-")).bytes
    except ValueError:
        return None
    return int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:], "little")


class Session:
    """One connection; see :class:`backend.door.tenants.Session` and :class:`backend.cuda.program.Mover`."""

    def __init__(
        self,
        process: Process,
        gpus: Mapping[int, Managed],
        line: tenants.Line,
        peers: Peers | None = None,
        grants: Grants | None = None,
    ) -> None:
        self.process = process
        """The process at the other end."""
        self._line = line
        self._gpus = gpus
        self._page = CounterPage()
        self._holdings: dict[int, Holding] = {}
        self._moved_in = -math.inf  # when MOVE_IN was last granted
        numbers = itertools.count(1)  # of messages that are answered
        self._news = News(line)
        self._gates = Gates(line, numbers, self._is_busy, self._news.wake)
        self._moves = Moves(process, line, numbers, gpus, self._gates)
        self._placements = Placements(line, numbers, self._news.wake)
        self._waiting = 0
        self._peers = peers if peers is not None else Peers()
        self._grants = grants if grants is not None else Grants()
        self._features: Feature | None = None  # what both sides can, once it has greeted
        self._asking = Asking(process, line.uid)
        self._scope: trio.CancelScope | None = None

    async def run(self) -> None:
        """Serves it until the other end is closed, or breaks the rules."""
        async with trio.open_nursery() as nursery:
            self._scope = nursery.cancel_scope
            nursery.start_soon(self._news.run, self._gates.tell, self._placements.tell)
            while message := await self._line.receive():
                if message.reply:
                    if not self._answered(message):
                        log.warning("process %d: an answer to nothing: dropped", self.process.pid)
                        break
                elif message.op in WAITING:
                    if self._waiting >= WAITING_MOST:
                        await self._line.send(message.refuse(errno.EBUSY))
                        continue
                    self._waiting += 1
                    nursery.start_soon(self._answer_later, message)
                else:
                    await self._answer(message)
            nursery.cancel_scope.cancel()

    def close(self) -> None:
        """End: no connection speaks for the program any more. What it holds is as the driver says, or gone with it."""
        self._moves.close()
        self._gates.close()
        self._placements.close()
        for gpu, holding in self._holdings.items():
            self._grants.end((self, gpu))
            self._gpus[gpu].end(holding)
        self._holdings.clear()
        self._page.close()
        self._news.close()
        if self._features is not None:
            self._peers.go(self._peers.offers & ~self._features)

    # What the program asks

    async def _answer_later(self, request: Message) -> None:
        try:
            await self._answer(request)
        finally:
            self._waiting -= 1

    async def _answer(self, request: Message) -> None:
        descriptors: list[int] = []
        try:
            reply = request.answer(*await self._do(request, descriptors))
        except ProcessLookupError:
            reply = request.refuse(errno.ESRCH)
        except OSError as error:
            reply = request.refuse(errno_of(error))
        if request.op == Op.CHARGE and any(gpu.departs(self.process) for gpu in self._gpus.values()):
            return  # the end of the connection grants it: nothing is to be allocated while it stands by
        if request.seq or request.op not in EVENTS:
            await self._line.send(reply, descriptors)
        if request.op == Op.MANAGE and not reply.status and (holding := self._holdings.get(request.gpu)):
            self._gpus[request.gpu].met_by(holding, request.args[2] if self.places else 0)
        if request.op == Op.CHARGE and not reply.status and (holding := self._holdings.get(request.gpu)):
            # What is allocated now, and was too much even after all else had left, can leave itself.
            self._gpus[request.gpu].answered(holding)

    async def _do(self, request: Message, descriptors: list[int]) -> Sequence[int]:
        op, args = request.op, request.args
        tenants.check(request, self._features is not None)
        if op in NEEDS and not self._can(NEEDS[Op(op)]):
            raise fail(errno.ENOSYS)
        match op:
            case Op.HELLO:
                if args[0] != VERSION:
                    raise fail(errno.EPROTO)
                if not self._gpus:
                    raise fail(errno.ENODEV)
                if self._features is None:  # the first greeting counts
                    self._features = met(self._peers.offers, args[1])
                    self._peers.come(self.process.pid, self._peers.offers & ~self._features)
                info = next(iter(self._gpus.values())).info
                return VERSION, info.granule, info.timeslice_default_us, self._peers.offers
            case Op.LOCATE:
                for index, gpu in self._gpus.items():
                    if words(gpu.info.uuid) == args[:2]:
                        return (index,)
                raise fail(errno.ENODEV)
            case Op.MANAGE:
                await self._manage(request.gpu, *args[:2])
                if self._can(Feature.COUNTERS):
                    descriptors.append(self._page.descriptor)
            case Op.CHARGE:
                await self._holding(request.gpu).charge(args[0])
            case Op.UNCHARGE:
                self._holding(request.gpu).uncharge(args[0], args[1])
            case Op.MOVE_IN:
                holding = self._holding(request.gpu)
                if self._gpus[request.gpu].stays(self.process):
                    raise fail(errno.EAGAIN)  # what is in the host is safe there, and its place is no other's meanwhile
                holding.move_in(args[0], args[1])
                self._moved_in = trio.current_time()
                self._moves.granted(request.gpu, args[0])
            case Op.LIMITS:
                self._holding(request.gpu)
                return self._gpus[request.gpu].limits(self.process)
            case Op.TOTAL:
                if request.gpu not in self._gpus:
                    raise fail(errno.ENODEV)
                view = await self._gpus[request.gpu].view(self.process)
                return view if self._can(Feature.VIEW) else view[:1]
            case Op.REPORT:
                self._holding(request.gpu).report(*args[:5])
            case Op.HOST:
                self._holding(request.gpu).copies(args[3])
                if self._can(Feature.MANAGED):
                    self._holding(request.gpu).uncounts(args[4])
                swapped = self._holding(request.gpu).swapped
                pinned = Pinned(self.process, partial(self._news.grant, request.gpu))
                self._grants.say((self, request.gpu), pinned, (args[0], args[1], args[2]), swapped)
            case Op.SPACE:
                booked = next(iter(self._gpus.values())).booked
                return (await booked.enter(self.process, self._line.uid, args[0]),)
            case Op.WANT | Op.FAMILY:
                await self._asking.take(request, next(iter(self._gpus.values())).booked)
            case _:
                raise fail(errno.ENOSYS)
        return ()

    def _can(self, features: Feature) -> bool:
        """Whether both sides can all that."""
        return features in (self._features or Feature(0))

    def _holding(self, gpu: int) -> Holding:
        """What the program holds on a GPU. ENODEV where it did not say so, or is told to be no more."""
        holding = self._holdings.get(gpu)
        if holding is None or holding.closed or not self._gpus[gpu].booked.knows(self.process, gpu):
            raise fail(errno.ENODEV)
        return holding

    async def _manage(self, index: int, resident: int, swapped: int) -> None:
        gpu = self._gpus.get(index)
        if gpu is None:
            raise fail(errno.ENODEV)
        if index in self._holdings:
            raise fail(errno.EBUSY)
        await gpu.moved(self.process)
        await gpu.booked.arrive(self.process, index)
        # One that has spoken before went on meanwhile, and what it freed the driver may still count.
        counted = 0 if resident or swapped else await gpu.counted(self.process)
        self._holdings[index] = gpu.begin(self.process, self, resident, swapped, counted)
        gpu.booked.reclaim_soon(self.process, index)

    # What the program is asked

    async def move_out(self, holding: Holding, nbytes: int, seconds: float) -> bool:
        """See :class:`backend.cuda.program.Mover`."""
        return await self._moves.out(holding, nbytes, seconds)

    def _answered(self, reply: Message) -> bool:
        """Take an answer; False where the program was not asked, or where its status is no errno."""
        if reply.status not in STATUSES:
            return False
        for one in self._gates, self._placements:
            if (is_right := one.answered(reply)) is not None:
                return is_right
        return self._moves.answered(reply)

    @property
    def page(self) -> int:
        """See :class:`backend.cuda.program.Mover`."""
        return self._page.descriptor

    async def depart(self, gpu: int, near: bool, seconds: float) -> None:
        """See :class:`backend.cuda.program.Mover`."""
        if not self._can(LEAVES):
            raise OSError(errno.EOPNOTSUPP, "the library of the program is older, and cannot stand by: start it anew")
        await self._moves.depart(gpu, near, seconds)

    async def end_turn(self, gpu: int, bound_us: int, leaves: int = 0) -> TurnEnd:
        """See :class:`backend.cuda.program.Mover`."""
        return await self._gates.end(gpu, bound_us, leaves) if self._can(Feature.TURNS) else TurnEnd.UNGATED

    def begin_turn(self, gpu: int, ahead_us: int) -> None:
        """See :class:`backend.cuda.program.Mover`."""
        self._gates.begin(gpu, ahead_us)

    def _is_busy(self) -> bool:
        """Whether the program may be busy with memory, as it was asked or let: its library answers nothing then."""
        moves_in = trio.current_time() < self._moved_in + MOVED_IN_S
        return self._moves.are_waited_for or moves_in or any(one.away for one in self._holdings.values())

    @property
    def bursts(self) -> bool:
        """See :class:`backend.cuda.program.Mover`."""
        return self._can(BURSTS)

    def lead(self, gpu: int, hold_us: int | None) -> BurstPage | None:
        """See :class:`backend.cuda.program.Mover`."""
        return self._news.lead(gpu, hold_us)

    def follow(self, gpu: int, slot: int, page: BurstPage | None, ahead_us: int) -> None:
        """See :class:`backend.cuda.program.Mover`."""
        self._news.follow(gpu, slot, page, ahead_us)

    @property
    def places(self) -> bool:
        """See :class:`backend.cuda.program.Mover`."""
        return self._can(Feature.SMS)

    async def place(self, gpu: int, groups: int, *, ask: bool = False) -> Shape:
        """See :class:`backend.cuda.program.Mover`."""
        if not self.places:
            raise OSError(errno.EOPNOTSUPP, "the library of the program is older: start it anew")
        return await self._placements.place(gpu, groups, ask=ask)

    def place_soon(self, gpu: int, groups: int) -> None:
        """See :class:`backend.cuda.program.Mover`."""
        if self.places:
            self._placements.place_soon(gpu, groups)

    def shape_soon(self, gpu: int, told: Callable[[Shape], None]) -> None:
        """See :class:`backend.cuda.program.Mover`."""
        if self.places:
            self._placements.shape_soon(gpu, told)

    def placed(self, gpu: int) -> tuple[int, int] | None:
        """See :class:`backend.cuda.program.Mover`."""
        return self._page.placed(gpu) if self.places else None

    def working_set(self, gpu: int) -> WorkingSet | None:
        """See :class:`backend.cuda.program.Mover`."""
        found = self._page.working_set(gpu) if self._can(Feature.SETS) else None
        if found is None:
            return None
        return attrs.evolve(found, resident=found.resident + min(found.missing, self._moves.coming(gpu)))

    def is_alone(self, gpu: int) -> bool:
        """See :class:`backend.cuda.program.Mover`."""
        return self._can(Feature.SETS) and self._page.is_alone(gpu)

    async def prepare(self, gpu: int, nbytes: int) -> int:
        """See :class:`backend.cuda.program.Mover`."""
        return await self._moves.prepare(gpu, nbytes) if self._can(Feature.SETS) else 0

    def room(self, gpu: int, nbytes: int) -> None:
        """See :class:`backend.cuda.program.Mover`."""
        self._news.room(gpu, nbytes)

    def counts(self, gpu: int) -> tuple[int, int] | None:
        """See :class:`backend.cuda.program.Mover`."""
        return self._page.counts(gpu) if self._can(Feature.COUNTERS) else None

    def launches(self, gpu: int) -> int | None:
        """See :class:`backend.cuda.program.Mover`."""
        return self._page.launches(gpu) if self._can(Feature.COUNTERS) else None

    def pending_us(self, gpu: int) -> int | None:
        """See :class:`backend.cuda.program.Mover`."""
        return self._page.worked_us(gpu, time.monotonic_ns() // 1000) if self._can(Feature.COUNTERS) else None

    def end(self) -> None:
        """See :class:`backend.cuda.program.Mover`."""
        if self._scope is not None:
            self._scope.cancel()
