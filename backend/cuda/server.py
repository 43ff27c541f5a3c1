"""The door of NVIDIA GPUs: CUDA programs come in, by the library that `ggroupfs run` puts into them.

Requests of one connection overlap. What waits (CHARGE, MANAGE, TOTAL, SPACE) waits in a task of its own, so that the
answer to a RECLAIM, which it may wait for, and what other threads of the program ask are handled meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import attrs
import trio

from backend.common.errors import errno_of, fail
from backend.common.lasting import lasting
from backend.common.tracing import TRACE
from backend.core.turns import TurnEnd
from backend.core.workingset import WorkingSet
from backend.cuda.burst import BurstPage
from backend.cuda.grants import Grants, Pinned
from backend.cuda.holding import Holding
from backend.cuda.managed import Managed
from backend.cuda.page import CounterPage
from backend.cuda.peers import Peers
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

ANSWER_S = 0.02
"""Seconds that an answer to END_TURN may be on its way, beyond the time that was given to drain: 0.1 ms are usual. The
scheduler waits for it, with whatever else it has to do."""

MARK_S = 0.02
"""Seconds that it may take besides where memory is about to go: the program finds out what of that need not be
written."""

MUTE_S, MUTE_MOST_S = 5.0, 60.0
"""Seconds in which a program that did not answer an END_TURN in time is asked for no other, unless it has answered by
then; each time twice as long, up to the second, and from the second time on whatever it answers."""

UNANSWERED_MOST = 32
"""Messages about its gate that a program which is busy with memory may leave unanswered and gets another END_TURN: two
a turn, of which five may begin at once and 2.5 in a second (``scheduler/filler.py``), in the 3 s of a RECLAIM."""

MOVED_IN_S = 0.5
"""Seconds after the last MOVE_IN that was granted in which memory may be coming back: one batch of it, with the wait
for what runs (0.3 s) and the copy (0.2 s, ``library/move/batch.c``)."""

STAYS = (errno.EBUSY, errno.EOPNOTSUPP, errno.EMFILE, errno.ENOMEM)
"""What a program may say to a DEPART that it does not follow (departure.c)."""


PLACE_S = 3.5
"""Seconds for a program to say that its kernels run where they were told to: it may be busy with memory for three of
them (RECLAIM_S of ``managed.py``); else it takes milliseconds."""

UNPLACED = (errno.EOPNOTSUPP, errno.EINVAL, errno.EBUSY, errno.ENODEV)
"""What a program may say to an SMS that it does not follow."""

GROUPS_MOST = 64
"""Groups of SMs that a message can name."""

LAST_S = 0.2
"""Seconds for which an answer to the last PREPARE is waited for by the next: it was given up as its phase was over, and
what comes by it is as good."""

WAIT_US = 50_000
"""Microseconds that a program is asked to wait at a time for what it launched: its library does nothing else then, so
an allocation that is to be granted waits as long, and so does the beginning of a turn."""


@attrs.define(eq=False)
class Asked:
    """A RECLAIM that was sent and not answered."""

    holding: Holding
    nbytes: int
    until: float
    """When it is overdue, by trio's clock."""
    answered: bool = False
    """Whether it was, by something that makes sense."""
    done: trio.Event = attrs.field(factory=trio.Event)
    """It was, or will not be."""
    late: bool = False
    """Whether no caller waits any more."""


@attrs.define(eq=False)
class Departing:
    """A DEPART that was sent."""

    status: int | None = None
    """What was answered: 0 or a negated errno."""
    done: trio.Event = attrs.field(factory=trio.Event)
    """It was, or will not be."""


@attrs.define(eq=False)
class Preparing:
    """A PREPARE that was sent and not answered."""

    gpu: int
    nbytes: int
    moved: int = 0
    """Bytes that came, as was answered."""
    done: trio.Event = attrs.field(factory=trio.Event)
    """It was, or will not be."""


@attrs.define(eq=False)
class Turning:
    """An END_TURN or a BEGIN_TURN that was sent and not answered."""

    op: Op
    gpu: int
    end: TurnEnd | None = None
    """What was answered to END_TURN."""
    done: trio.Event = attrs.field(factory=trio.Event)
    """It was, or will not be."""


@attrs.define(eq=False)
class Placing:
    """An SMS that was sent and not answered."""

    gpu: int
    status: int | None = None
    """What was answered: 0 or a negated errno."""
    words: tuple[int, ...] = ()
    """What came with it: the number of groups, SMs in each, and of the GPU."""
    told: Callable[[Shape], None] | None = None
    """What is called with them."""
    done: trio.Event = attrs.field(factory=trio.Event)
    """It was, or will not be."""


@attrs.define(eq=False)
class Gate:
    """What the daemon knows of the gate of turns of a program on one GPU."""

    closed: bool = False
    """Whether it may be: an END_TURN was sent, and no BEGIN_TURN since then."""
    late: bool = False
    """Whether it is, and something of the program ran as it said so last; or, `busy`, whether it soon is."""
    busy: bool = False
    """Whether the last END_TURN is not answered yet, of a program that was busy with memory when that was sent."""
    asked: Turning | None = None
    """The last END_TURN that was sent."""
    ahead_us: int = 0
    """The run-ahead that the program was told last, microseconds; 0 for no bound."""
    unanswered: int = 0
    """Messages about it that were sent and not answered: a program that answers none gets no further END_TURN, or no
    more than UNANSWERED_MOST while it is busy with memory."""
    again: float = 0.0
    """When the program may be asked for another END_TURN, by trio's clock."""
    mute_s: float = 0.0
    """Seconds for which it was not asked the last time that it did not answer; 0 where it did."""


async def serve(
    listener: tenants.Connection, gpus: Mapping[int, Managed], tree: int = 0, peers: Peers | None = None
) -> None:
    """Serves every program that connects, until cancelled. `tree` is the device number of the mount."""
    known = peers if peers is not None else Peers()
    grants = Grants()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lasting, "grants of host memory", grants.run)
        await tenants.serve(listener, lambda process, line: Session(process, gpus, line, known, grants), tree)
        nursery.cancel_scope.cancel()


def _answer_s(leaves: int) -> float:
    """Return how long an answer to END_TURN may be on its way, seconds."""
    return ANSWER_S + MARK_S if leaves else ANSWER_S


def _shape(words: Sequence[int]) -> Shape | None:
    """Return the split of a GPU's SMs, as a program says it; None where it says what no GPU has."""
    count, each, sms = words
    return Shape(count, each, sms) if 0 < count <= GROUPS_MOST and 0 < each <= sms else None


def words(name: str) -> tuple[int, int] | None:
    """A GPU's UUID as LOCATE has it; None for a name that is none."""
    try:
        raw = uuid.UUID(name.removeprefix("GPU-")).bytes
    except ValueError:
        return None
    return int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:], "little")


class Session:
    """One connection; see :class:`backend.door.tenants.Session` and :class:`backend.cuda.managed.Mover`."""

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
        self._asked: dict[int, Asked] = {}
        self._departing: dict[int, Departing] = {}
        self._preparing: dict[int, Preparing] = {}
        self._turning: dict[int, Turning] = {}
        self._gates: dict[int, Gate] = {}
        self._placing: dict[int, Placing] = {}
        self._limits: dict[int, int] = {}  # gpu -> groups of SMs, not told yet
        self._shapes: dict[int, Callable[[Shape], None]] = {}  # gpu -> what is called with its split, not asked yet
        self._seq = 0
        self._moved_in = -math.inf  # when MOVE_IN was last granted
        self._rooms: dict[int, int] = {}  # gpu -> bytes, not told yet
        self._begins: dict[int, int] = {}  # gpu -> run-ahead of a turn that has begun, not told yet
        self._pages: dict[int, BurstPage] = {}  # gpu -> the page on which it says until when others are held
        self._leads: dict[int, int | None] = {}  # gpu -> microseconds, or None for no more; not told yet
        self._follows: dict[tuple[int, int], tuple[BurstPage | None, int]] = {}  # (gpu, slot) -> page, run-ahead; ...
        self._news = trio.Event()
        self._waiting = 0
        self._peers = peers if peers is not None else Peers()
        self._grants = grants if grants is not None else Grants()
        self._granted: dict[int, int] = {}  # gpu -> bytes of the host, not told yet
        self._features: Feature | None = None  # what both sides can, once it has greeted
        self._asking = Asking(process, line.uid)
        self._scope: trio.CancelScope | None = None

    async def run(self) -> None:
        """Serves it until the other end is closed, or breaks the rules."""
        async with trio.open_nursery() as nursery:
            self._scope = nursery.cancel_scope
            nursery.start_soon(self._tell_news)
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
        waiting: list[Asked | Departing | Preparing | Turning | Placing] = [
            *self._asked.values(),
            *self._departing.values(),
            *self._preparing.values(),
            *self._turning.values(),
            *self._placing.values(),
        ]
        for one in waiting:
            one.done.set()
        self._asked.clear()
        self._departing.clear()
        self._preparing.clear()
        self._turning.clear()
        self._placing.clear()
        for gpu, holding in self._holdings.items():
            self._grants.end((self, gpu))
            self._gpus[gpu].end(holding)
        self._holdings.clear()
        self._page.close()
        for page in self._pages.values():
            page.close()
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
                pinned = Pinned(self.process, partial(self._grant, request.gpu))
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
        """See :class:`backend.cuda.managed.Mover`."""
        self._seq += 1
        seq, asked = self._seq, Asked(holding, nbytes, trio.current_time() + seconds)
        holding.ask(nbytes)
        self._asked[seq] = asked
        sent = False
        try:
            with contextlib.suppress(OSError), trio.move_on_after(seconds):  # ENOBUFS: it is not asked
                sent = await self._line.send(Message(Op.RECLAIM, seq, holding.gpu, (0, 0, 0, nbytes)))
                if sent:
                    await asked.done.wait()
        finally:
            asked.late = True
            if not sent and seq in self._asked:
                del self._asked[seq]
                holding.ask(-nbytes)
        return asked.answered

    def _answered(self, reply: Message) -> bool:
        """Books what a program says that it moved; False where it was not asked, or cannot have, or where its status is
        no errno."""
        if reply.status not in STATUSES:
            return False
        if reply.op == Op.DEPART and (departing := self._departing.pop(reply.seq, None)):
            departing.status = reply.status
            departing.done.set()
            return True
        if (turning := self._turning.pop(reply.seq, None)) is not None:
            return self._turned(turning, reply)
        if (placing := self._placing.pop(reply.seq, None)) is not None:
            placing.status, placing.words = reply.status, reply.args[:3]
            placing.done.set()
            if placing.told is not None and not reply.status and (shape := _shape(placing.words)) is not None:
                placing.told(shape)
            return (reply.op, reply.gpu) == (Op.SMS, placing.gpu)
        if (preparing := self._preparing.pop(reply.seq, None)) is not None:
            preparing.done.set()
            moved = 0 if reply.status else reply.args[0]
            self._trace("prepared", reply)
            if (reply.op, reply.gpu) != (Op.PREPARE, preparing.gpu) or moved > preparing.nbytes:
                return False
            preparing.moved = moved
            return True
        asked = self._asked.pop(reply.seq, None)
        if asked is None or reply.op != Op.RECLAIM or reply.gpu != asked.holding.gpu:
            return False
        self._trace("reclaimed", reply)
        holding, nbytes = asked.holding, 0 if reply.status else reply.args[0]
        holding.ask(-asked.nbytes)
        try:
            if not holding.closed and self._gpus[holding.gpu].booked.knows(self.process, holding.gpu):
                holding.moved_out(nbytes, reply.args[1])
        except OSError as error:
            log.debug("process %d: moved %d: %s", self.process.pid, nbytes, error.strerror)
            asked.done.set()
            return False
        asked.answered = True
        asked.done.set()
        if asked.late:
            self._gpus[holding.gpu].answered(holding)
        return True

    def _trace(self, what: str, reply: Message) -> None:
        """Where the time of a move went, by the program's word: moving, waiting for what ran, with its gate closed,
        and making memory of the host."""
        us, waited, closed, made = reply.args[1:5]
        TRACE.add(f"{what} {self.process.pid}", us=us, waited=waited, closed=closed, made=made)

    @property
    def page(self) -> int:
        """See :class:`backend.cuda.managed.Mover`."""
        return self._page.descriptor

    async def depart(self, gpu: int, near: bool, seconds: float) -> None:
        """See :class:`backend.cuda.managed.Mover`."""
        if not self._can(LEAVES):
            raise OSError(errno.EOPNOTSUPP, "the library of the program is older, and cannot stand by: start it anew")
        ahead_us = self._begins.pop(gpu, None)  # DEPART opens the gate
        if (gate := self._gates.get(gpu)) is not None:
            gate.late = gate.busy = False
        self._seq += 1
        seq, departing = self._seq, Departing()
        self._departing[seq] = departing
        sent = False
        try:
            with trio.move_on_after(seconds):
                sent = await self._line.send(Message(Op.DEPART, seq, gpu, (int(near),)))
                if not sent:
                    departing.done.set()
                await departing.done.wait()
        finally:
            self._departing.pop(seq, None)
            if not sent and ahead_us is not None:
                self._begins.setdefault(gpu, ahead_us)
                self._news.set()
        if departing.status is None and departing.done.is_set():
            raise OSError(errno.EBUSY, "the program speaks no more")
        if departing.status is None:
            raise OSError(errno.ETIMEDOUT, "the program does not come to a rest")
        if departing.status:
            # A writer is told what a program may say, and no number of its choice: ENODEV or ESRCH, say, would
            # be taken for the GPU's loss, or its own end.
            code = -departing.status if -departing.status in STAYS else errno.EIO
            raise OSError(code, f"the program cannot stand by: {os.strerror(-departing.status)}")

    async def end_turn(self, gpu: int, bound_us: int, leaves: int = 0) -> TurnEnd:
        """See :class:`backend.cuda.managed.Mover`. A program that does not answer in time is taken to have no gate, and
        not asked for some time. What it answers later says nothing: its turn may have begun again.

        One that is busy with memory answers once it is done with that, and is late until then: off the runlist with all
        engines it would not come to an end of it.
        """
        gate = self._gates.setdefault(gpu, Gate())
        if gate.late:
            return await self._drained(gpu, gate, bound_us, leaves)
        is_busy = self._is_busy()
        due = gate.asked is not None and not gate.asked.done.is_set()
        if not self._can(Feature.TURNS) or (due and not is_busy) or trio.current_time() < gate.again:
            return TurnEnd.UNGATED
        if gate.unanswered > (UNANSWERED_MOST if is_busy else 0):  # those before it may wait for the same
            return TurnEnd.UNGATED
        self._begins.pop(gpu, None)  # that turn is over before the program heard of it
        gate.closed = True
        with trio.move_on_after(bound_us / 1e6 + _answer_s(leaves)):
            await self._ask_end(gpu, gate, bound_us, leaves)
        end = None if gate.asked is None else gate.asked.end
        if end is not None:
            gate.mute_s, gate.late = 0.0, gate.closed and end is TurnEnd.LATE
            return end
        if gate.asked is not None and not gate.asked.done.is_set() and (is_busy or self._is_busy()):
            gate.late = gate.busy = gate.closed
            return TurnEnd.LATE if gate.closed else TurnEnd.UNGATED
        self._distrust(gate)
        return TurnEnd.UNGATED

    def _is_busy(self) -> bool:
        """Whether the program may be busy with memory, as it was asked or let: its library answers nothing then."""
        now = trio.current_time()
        asked = any(now < one.until for one in self._asked.values())
        return asked or now < self._moved_in + MOVED_IN_S or any(one.away for one in self._holdings.values())

    def _distrust(self, gate: Gate) -> None:
        """It did not answer in time, and is not asked for some time."""
        gate.mute_s = min(MUTE_MOST_S, 2 * gate.mute_s) or MUTE_S
        gate.again = trio.current_time() + gate.mute_s

    async def _ask_end(self, gpu: int, gate: Gate, bound_us: int, leaves: int) -> None:
        """Asks for the end of a turn, and waits for the answer, or for the end of the connection."""
        turning, seq = self._turn(Op.END_TURN, gpu)
        gate.asked, sent = turning, False
        try:
            with contextlib.suppress(OSError):
                sent = await self._line.send(Message(Op.END_TURN, seq, gpu, (bound_us, leaves)))
                if sent:
                    await turning.done.wait()
        finally:
            if not sent and seq in self._turning:
                del self._turning[seq]
                gate.unanswered -= 1
                turning.done.set()

    async def _drained(self, gpu: int, gate: Gate, bound_us: int, leaves: int) -> TurnEnd:
        """Waits for a program that launches nothing more, as it said. An answer that is late says nothing of its gate:
        memory may be coming back there. It is not asked again meanwhile."""
        until = trio.current_time() + bound_us / 1e6
        asked = False
        with trio.move_on_at(until + WAIT_US / 1e6 + _answer_s(leaves)):
            while gate.late:
                left_us = max(0, round((until - trio.current_time()) * 1e6))
                if gate.asked is not None and not gate.asked.done.is_set():
                    await gate.asked.done.wait()  # of a caller that was cancelled
                elif left_us or not asked:
                    asked, slice_us = True, min(left_us, WAIT_US)
                    began = trio.current_time()
                    await self._ask_end(gpu, gate, slice_us, leaves)
                    if gate.asked is not None and gate.asked.end is TurnEnd.LATE:  # at once, in a hostile program
                        await trio.sleep_until(began + slice_us / 1e6)
                else:
                    break
                if gate.asked is None or gate.asked.end is not TurnEnd.LATE:
                    gate.late = False
        if gate.late and gate.busy:
            gate.late = gate.busy = False
            self._distrust(gate)
            return TurnEnd.UNGATED
        if gate.late:
            return TurnEnd.LATE
        end = None if gate.asked is None else gate.asked.end
        return TurnEnd.DRAINED if gate.closed and end is TurnEnd.DRAINED else TurnEnd.UNGATED

    def begin_turn(self, gpu: int, ahead_us: int) -> None:
        """See :class:`backend.cuda.managed.Mover`. It is sent by the task that tells of room, and nothing waits for a
        program that is slow to take it. A gate that is open is left alone, but for the end of a bound."""
        gate = self._gates.get(gpu)
        if gate is not None and (gate.closed or (gate.ahead_us and not ahead_us)):
            gate.closed = gate.late = gate.busy = False
            gate.ahead_us = ahead_us
            self._begins[gpu] = ahead_us
            self._news.set()

    def _turn(self, op: Op, gpu: int) -> tuple[Turning, int]:
        """What waits for the answer to a message about a gate, and its number."""
        self._seq += 1
        self._gates[gpu].unanswered += 1
        turning = self._turning[self._seq] = Turning(op, gpu)
        return turning, self._seq

    def _turned(self, turning: Turning, reply: Message) -> bool:
        """Whether an answer about a gate makes sense: it is to what was asked, and says yes or no."""
        turning.done.set()
        if (reply.op, reply.gpu) != (turning.op, turning.gpu) or (not reply.status and reply.args[0] > 1):
            return False
        gate = self._gates[turning.gpu]
        gate.unanswered -= 1
        if turning is gate.asked:
            gate.busy = False
            if gate.mute_s <= MUTE_S:
                gate.again = 0.0
        if reply.status:  # EBUSY: the gate is open; any other error is none that a program has for this
            turning.end = TurnEnd.UNGATED
        else:
            turning.end = TurnEnd.DRAINED if reply.args[0] else TurnEnd.LATE
        return True

    @property
    def bursts(self) -> bool:
        """See :class:`backend.cuda.managed.Mover`."""
        return self._can(BURSTS)

    def lead(self, gpu: int, hold_us: int | None) -> BurstPage | None:
        """See :class:`backend.cuda.managed.Mover`."""
        self._leads[gpu] = hold_us
        self._news.set()
        if hold_us is None:
            if (page := self._pages.pop(gpu, None)) is not None:
                page.close()
            return None
        if gpu not in self._pages:
            self._pages[gpu] = BurstPage()
        return self._pages[gpu]

    def follow(self, gpu: int, slot: int, page: BurstPage | None, ahead_us: int) -> None:
        """See :class:`backend.cuda.managed.Mover`."""
        self._follows[gpu, slot] = page, ahead_us
        self._news.set()

    @property
    def places(self) -> bool:
        """See :class:`backend.cuda.managed.Mover`."""
        return self._can(Feature.SMS)

    async def place(self, gpu: int, groups: int, *, ask: bool = False) -> Shape:
        """See :class:`backend.cuda.managed.Mover`."""
        if not self._can(Feature.SMS):
            raise OSError(errno.EOPNOTSUPP, "the library of the program is older: start it anew")
        if not ask:
            self._limits.pop(gpu, None)
        self._seq += 1
        seq, placing = self._seq, Placing(gpu)
        self._placing[seq] = placing
        sent = False
        try:
            with trio.move_on_after(PLACE_S):
                sent = await self._line.send(Message(Op.SMS, seq, gpu, (groups, int(ask))))
                if sent:
                    await placing.done.wait()
        finally:
            if not sent:
                self._placing.pop(seq, None)
                placing.done.set()
        if placing.status is None and placing.done.is_set():
            raise OSError(errno.EBUSY, "the program speaks no more")
        if placing.status is None:  # what it answers later is an answer all the same, and says nothing
            raise OSError(errno.ETIMEDOUT, "the program does not say that its kernels run there")
        if placing.status:
            code = -placing.status if -placing.status in UNPLACED else errno.EIO
            raise OSError(code, f"the kernels of the program cannot be placed: {os.strerror(-placing.status)}")
        shape = _shape(placing.words)
        if shape is None and (groups or ask):
            raise OSError(errno.EOPNOTSUPP, "its driver has no green contexts")
        return shape or Shape(0, 0, 0)

    def place_soon(self, gpu: int, groups: int) -> None:
        """See :class:`backend.cuda.managed.Mover`."""
        if self._can(Feature.SMS):
            self._limits[gpu] = groups
            self._news.set()

    def shape_soon(self, gpu: int, told: Callable[[Shape], None]) -> None:
        """See :class:`backend.cuda.managed.Mover`."""
        if self._can(Feature.SMS):
            self._shapes[gpu] = told
            self._news.set()

    def placed(self, gpu: int) -> tuple[int, int] | None:
        """See :class:`backend.cuda.managed.Mover`."""
        return self._page.placed(gpu) if self._can(Feature.SMS) else None

    def working_set(self, gpu: int) -> WorkingSet | None:
        """See :class:`backend.cuda.managed.Mover`."""
        return self._page.working_set(gpu) if self._can(Feature.SETS) else None

    def is_alone(self, gpu: int) -> bool:
        """See :class:`backend.cuda.managed.Mover`."""
        return self._can(Feature.SETS) and self._page.is_alone(gpu)

    async def prepare(self, gpu: int, nbytes: int) -> int:
        """See :class:`backend.cuda.managed.Mover`. One that has not answered the last time is not asked again: what it
        was asked for then is waited for, for LAST_S."""
        if not self._can(Feature.SETS):
            return 0
        for last in list(self._preparing.values()):
            with trio.move_on_after(LAST_S):
                await last.done.wait()
            return last.moved if last.gpu == gpu else 0
        self._seq += 1
        seq, preparing = self._seq, Preparing(gpu, nbytes)
        self._preparing[seq] = preparing
        sent = False
        try:
            with contextlib.suppress(OSError):  # its end is near
                sent = await self._line.send(Message(Op.PREPARE, seq, gpu, (nbytes,)))
        finally:
            if not sent:
                self._preparing.pop(seq, None)
        if sent:
            await preparing.done.wait()
        return preparing.moved

    def room(self, gpu: int, nbytes: int) -> None:
        """See :class:`backend.cuda.managed.Mover`. What it is too slow to take is replaced, not queued."""
        self._rooms[gpu] = nbytes
        self._news.set()

    def _grant(self, gpu: int, nbytes: int) -> None:
        """Tells the program what it may have of the host. What it is too slow to take is replaced, not queued."""
        self._granted[gpu] = nbytes
        self._news.set()

    def counts(self, gpu: int) -> tuple[int, int] | None:
        """See :class:`backend.cuda.managed.Mover`."""
        return self._page.counts(gpu) if self._can(Feature.COUNTERS) else None

    def launches(self, gpu: int) -> int | None:
        """See :class:`backend.cuda.managed.Mover`."""
        return self._page.launches(gpu) if self._can(Feature.COUNTERS) else None

    def pending_us(self, gpu: int) -> int | None:
        """See :class:`backend.cuda.managed.Mover`."""
        return self._page.worked_us(gpu, time.monotonic_ns() // 1000) if self._can(Feature.COUNTERS) else None

    def end(self) -> None:
        """See :class:`backend.cuda.managed.Mover`."""
        if self._scope is not None:
            self._scope.cancel()

    async def _hand(self, message: Message, descriptor: int | None) -> None:
        """Sends a message with a duplicate of a descriptor, if there is one: while it waits for room the page may be
        given up, and the number be that of another file."""
        own = []
        with contextlib.suppress(OSError):  # none is to be had: as without a page
            own = [] if descriptor is None else [os.dup(descriptor)]
        try:
            await self._line.send(message, own)
        finally:
            for one in own:
                os.close(one)

    async def _tell_news(self) -> None:
        while True:
            await self._news.wait()
            self._news = trio.Event()
            while self._begins:  # one at a time: a turn may end before its beginning is told
                gpu, ahead_us = self._begins.popitem()
                _, seq = self._turn(Op.BEGIN_TURN, gpu)
                await self._line.send(Message(Op.BEGIN_TURN, seq, gpu, (ahead_us,)))
            while self._leads:
                gpu, hold_us = self._leads.popitem()
                page = self._pages.get(gpu)
                await self._hand(
                    Message(Op.LEAD, gpu=gpu, args=(hold_us or 0,)), None if page is None else page.writable
                )
            while self._follows:
                (gpu, slot), (read, ahead_us) = self._follows.popitem()
                message = Message(Op.FOLLOW, gpu=gpu, args=(slot, ahead_us))
                await self._hand(message, None if read is None else read.readable)
            while self._shapes:
                gpu, told = self._shapes.popitem()
                self._seq += 1
                self._placing[self._seq] = Placing(gpu, told=told)
                await self._line.send(Message(Op.SMS, self._seq, gpu, (0, 1)))
            while self._limits:
                gpu, groups = self._limits.popitem()
                self._seq += 1
                self._placing[self._seq] = Placing(gpu)
                await self._line.send(Message(Op.SMS, self._seq, gpu, (groups, 0)))
            rooms, self._rooms = self._rooms, {}
            for gpu, nbytes in rooms.items():
                await self._line.send(Message(Op.ROOM, gpu=gpu, args=(nbytes,)))
            granted, self._granted = self._granted, {}
            for gpu, nbytes in granted.items():
                await self._line.send(Message(Op.GRANT, gpu=gpu, args=(nbytes,)))
