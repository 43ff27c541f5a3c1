"""The gates of turns of one CUDA program, one for each GPU: closed at the end of a turn, opened for the next.

The library in the program closes a gate on END_TURN, and answers whether what ran there has ended. Beginnings of turns
are told by the task that tells all news of a session (:mod:`backend.cuda.news`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import attrs
import trio

from backend.core.turns import TurnEnd
from backend.door.tenants import Line
from backend.door.wire import Message, Op

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

WAIT_US = 50_000
"""Microseconds that a program is asked to wait at a time for what it launched: its library does nothing else then, so
an allocation that is to be granted waits as long, and so does the beginning of a turn."""


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


class Gates:
    """See the module."""

    def __init__(
        self, line: Line, numbers: Iterator[int], is_busy: Callable[[], bool], wake: Callable[[], None]
    ) -> None:
        """`numbers` are those of messages that are answered. `is_busy` says whether the program may be busy with
        memory: its library answers nothing then. `wake` has :meth:`tell` called, soon."""
        self._line = line
        self._numbers = numbers
        self._is_busy = is_busy
        self._wake = wake
        self._gates: dict[int, Gate] = {}
        self._turning: dict[int, Turning] = {}
        self._begins: dict[int, int] = {}  # gpu -> run-ahead of a turn that has begun, not told yet

    async def end(self, gpu: int, bound_us: int, leaves: int = 0) -> TurnEnd:
        """Close the gate of one GPU, and wait until nothing of the program runs there; see
        :class:`backend.cuda.program.Mover`. A program that does not answer in time is taken to have no gate, and not
        asked for some time. What it answers later says nothing: its turn may have begun again.

        A program that is busy with memory answers once it is done with that, and is late until then: off the runlist
        with all engines it would not come to an end of it.
        """
        gate = self._gates.setdefault(gpu, Gate())
        if gate.late:
            return await self._drained(gpu, gate, bound_us, leaves)
        is_busy = self._is_busy()
        due = gate.asked is not None and not gate.asked.done.is_set()
        if (due and not is_busy) or trio.current_time() < gate.again:
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

    def begin(self, gpu: int, ahead_us: int) -> None:
        """Open the gate of one GPU, soon; see :class:`backend.cuda.program.Mover`. Nothing waits for a program that is
        slow to take that. A gate that is open is left alone, but for the end of a bound."""
        gate = self._gates.get(gpu)
        if gate is not None and (gate.closed or (gate.ahead_us and not ahead_us)):
            gate.closed = gate.late = gate.busy = False
            gate.ahead_us = ahead_us
            self._begins[gpu] = ahead_us
            self._wake()

    def answered(self, reply: Message) -> bool | None:
        """Take an answer, and return whether it makes sense: it is to what was asked, and says yes or no. None for one
        that is not about a gate."""
        turning = self._turning.pop(reply.seq, None)
        if turning is None:
            return None
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

    async def tell(self) -> None:
        """Send the beginnings of turns that are due. One at a time: a turn may end before its beginning is told."""
        while self._begins:
            gpu, ahead_us = self._begins.popitem()
            _, seq = self._turn(Op.BEGIN_TURN, gpu)
            await self._line.send(Message(Op.BEGIN_TURN, seq, gpu, (ahead_us,)))

    def depart(self, gpu: int) -> int | None:
        """Note that the program is about to be asked to stand by, which opens the gate; return the run-ahead of a turn
        that has begun and was not told, for :meth:`stay`."""
        if (gate := self._gates.get(gpu)) is not None:
            gate.late = gate.busy = False
        return self._begins.pop(gpu, None)

    def stay(self, gpu: int, ahead_us: int | None) -> None:
        """Note that the program was not asked after all: the turn is told."""
        if ahead_us is not None:
            self._begins.setdefault(gpu, ahead_us)
            self._wake()

    def close(self) -> None:
        """Let go of all that wait for an answer: the connection has ended."""
        for turning in self._turning.values():
            turning.done.set()
        self._turning.clear()
        self._is_busy = lambda: False  # no cycle by way of the session: the collector rarely runs

    def _distrust(self, gate: Gate) -> None:
        """Note that the program did not answer in time: it is not asked for some time."""
        gate.mute_s = min(MUTE_MOST_S, 2 * gate.mute_s) or MUTE_S
        gate.again = trio.current_time() + gate.mute_s

    async def _ask_end(self, gpu: int, gate: Gate, bound_us: int, leaves: int) -> None:
        """Ask for the end of a turn, and wait for the answer, or for the end of the connection."""
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
        """Wait for a program that launches nothing more, as it said. An answer that is late says nothing of its gate:
        memory may be coming back there. The program is not asked again meanwhile."""
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

    def _turn(self, op: Op, gpu: int) -> tuple[Turning, int]:
        """Return what waits for the answer to a message about a gate, and the message's number."""
        seq = next(self._numbers)
        self._gates[gpu].unanswered += 1
        turning = self._turning[seq] = Turning(op, gpu)
        return turning, seq


def _answer_s(leaves: int) -> float:
    """Return how long an answer to END_TURN may be on its way, seconds."""
    return ANSWER_S + MARK_S if leaves else ANSWER_S
