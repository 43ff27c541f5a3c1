"""The end of a turn and the beginning of the next, held at each of their steps while a test does something.

Programs of one slice change places: `a` has its turn and `b` waits, whose memory is protected; then `b` has it, and `a`
again. There may be a third, `c`, that waits too, and gives memory where `a` cannot. What is done at one step is begun
in order, and is still going on when the next step comes where it takes longer than that. What is asked of a daemon that
ends meanwhile is asked no more; the next daemon goes on with the rest.

What each action may answer follows from those that were begun before it was answered, in the life of that daemon, and
from what was found of its program as it began.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any
from unittest import mock

import attrs
import trio

from backend.core.protocols import Gpu
from backend.core.records import Place
from backend.core.turns import TurnEnd
from backend.cuda.managed import Standby
from backend.cuda.page import CounterPage
from backend.cuda.server import Session
from backend.door import tenants
from backend.door.wire import CUDA, Feature, Message
from backend.ledgers.forwarding import ForwardingGpu
from backend.nvidia.discover import TICK
from backend.nvidia.gpu import NvidiaGpu
from backend.process.identity import Group, Member, Slice, SliceOn
from backend.scheduler.ends import DRAIN_MOST_US, DRAIN_SLICE_US, DRAIN_US
from tests.support.cuda_session import GIB
from tests.support.harness import Harness, answers
from tests.support.killed import Killed, Life, Machine
from tests.support.killed_life import live, timeslices
from tests.support.turns import Gated, follower, proven, without

STEPS = ("runs", "asked", "drains", "ended", "off", "next", "begins")
"""Steps of a change: `a` runs; it was asked to close its gate; that is closed and kernels of it run; its turn has ended
and all its engines are on; GR is off; the gate of `b` is about to open; that of `a` is about to open again."""

WAITED_FOR = ("asked", "drains")
"""Those of them at which a program is waited for that has not answered yet; for long only where its time is long."""

DRAINING = ("runs", "ended", "next", "waits", "drained", "off", "begins")
"""Those of a program that drains on the runlist: it runs; its turn has ended; the gate of `b` is about to open; it was
asked once more; it is drained, or given up, and all its engines are on; GR is off; its gate is about to open."""

ONE = ("own_limit", "low", "swap_max", "reclaim", "freeze", "thaw", "migrate", "kill")
"""What may be done to a program: to `a`, or to the one whose name comes after it ("freeze b")."""

ACTIONS = ("limit", *ONE[:-1], "upgrade", "kill_daemon", "kill")
"""What may be done: to `a`, to its slice, or to the daemon."""

HELD_BYTES = 4 * GIB
"""What each program has on the GPU at first."""

GIVEN_BYTES = 2 * GIB
"""What a limit takes: that of the slice from what `a` has, or `c`, and nothing of `b`; that of `a` from it alone."""

BOUND_US, SHORT_US = 10_000_000, 50_000
"""Microseconds that a program has to drain; and one whose kernel does not end."""

OWN_SLICE_US = 2048
"""Slice that the driver gives a program, microseconds."""

SOON_S, SPIN_S = 0.15, 3600.0
"""Seconds of what one runs that drains, and of a kernel that does not end."""

RECONNECT_S = 0.3
"""Seconds after which a program connects again: the library tries once a second."""

MOMENT_S = 0.03
"""Seconds of virtual time from one action to the next."""

SETTLED_S = 3.0
"""Seconds in which what was begun comes to its end."""


@attrs.frozen
class Kind:
    """What `a` may be."""

    end: TurnEnd
    """How its turn ends at first."""
    bound_us: int = BOUND_US
    """Microseconds that it has for that."""
    drain_s: float = 0.0
    """Seconds of what it runs then."""
    drained: TurnEnd | None = None
    """How its drain ends, of one that stays on the runlist."""
    stays: bool = False
    """Whether it does."""
    returns: bool = False
    """Whether its next turn begins while it drains."""
    gives: bool = False
    """Whether its memory moves whenever nothing else keeps it."""


KINDS = {
    "gated": Kind(TurnEnd.DRAINED, gives=True),
    "late": Kind(TurnEnd.LATE, SHORT_US, SPIN_S),
    "ungated": Kind(TurnEnd.UNGATED),
    "drains": Kind(TurnEnd.LATE, DRAIN_US, SOON_S, TurnEnd.DRAINED, stays=True, gives=True),
    "stuck": Kind(TurnEnd.LATE, DRAIN_US, SPIN_S, TurnEnd.LATE, stays=True),
    "returns": Kind(TurnEnd.LATE, DRAIN_US, SPIN_S, None, stays=True, returns=True),
}
"""By names of them. Those that stay are waited for as the scheduler does."""


class Moves(enum.Enum):
    """How memory of a program moves in its turn, or while it waits for that."""

    AT_ONCE = enum.auto()
    """Nothing keeps it; of what drains, not for long."""
    IN_VAIN = enum.auto()
    """It would once kernels have ended that are on the runlist and do not end."""
    NOT = enum.auto()
    """What moves it is off the runlist, or what it waits for."""


@attrs.frozen
class Found:
    """A program as a write of its limit begins, or is answered."""

    is_over: bool
    """Whether it has more on the GPU than that limit leaves it."""
    moves: Moves
    is_away: bool
    """Whether a write that moves it is under way."""


HOLDS = {"freeze", "migrate", "swap_max", "kill"}
"""After these memory of `a` may have to stay where it is."""

GONE = {errno.ENOENT, errno.ESRCH, errno.ENODEV}
"""What is said of a program that died meanwhile."""


class Held(Gated):
    """A program with a gate that may be held before it does as it is asked."""

    arrive: Callable[[str], Awaitable[None]]
    """What it tells the steps of its gate."""
    steps: Sequence[str] = ()
    """Names of them: before its gate closes, once it is closed, as it is asked again, before it opens."""

    async def begin_turn(self, message: Message) -> Message:
        """The gate opens."""
        if message.args[0] and self.is_closed:
            await self.arrive(self.steps[3])
        return await super().begin_turn(message)

    async def end_turn(self, message: Message) -> Message:
        """The gate closes."""
        if self.is_closed:
            await self.arrive(self.steps[2])
        else:
            await self.arrive(self.steps[0])
            self.is_closed, self.pending, self.closed_at = True, True, trio.current_time()
            await self.arrive(self.steps[1])
        return await super().end_turn(message)


class Ungated(Held):
    """A program without a gate."""

    features = CUDA & ~Feature.TURNS


def acted_on(action: str) -> str:
    """The program that an action is done to."""
    return action.partition(" ")[2] or "a"


@attrs.define
class Case:
    """One order: actions at one step."""

    step: str
    actions: list[str]
    """Those that are left to do."""
    all: tuple[str, ...] = attrs.Factory(lambda self: tuple(self.actions), takes_self=True)
    names: tuple[str, ...] = ("a", "b")
    """The programs."""


@attrs.define
class Stage:
    """A machine whose daemons come and go, and the orders that are left."""

    machine: Machine
    kind: Kind
    cases: list[Case]
    pages: list[CounterPage] = attrs.field(factory=list)
    """Those of killed daemons, which look at them no more once their lives have ended."""
    programs: dict[str, Held] = attrs.field(factory=dict)
    life: Life = attrs.field(factory=Life)
    at: int | None = None
    """The point of the next daemon's life at which it is killed."""

    def walk(self) -> None:
        """All orders, over as many daemons as they take."""
        while self.cases:
            self.next_daemon()
        self.next_daemon()  # the last one may have been killed, or replaced
        for program in self.machine.programs.values():
            assert without(program) == (False, False)

    def next_daemon(self) -> int:
        """Has one more daemon live, to its end; returns the points of its life."""
        self.life, self.at = Life(self.at), None
        # A program that started in the same tick as the daemon is none that a daemon before it has known.
        newest = max((program.identity.start for program in self.machine.programs.values()), default=0)
        while time.clock_gettime(time.CLOCK_BOOTTIME) * TICK < newest + 1:
            time.sleep(0.001)

        async def story(machine: Machine, h: Harness) -> None:
            await Walk(self, h).run()

        places = ("backend.nvidia.memory.has_library", "backend.nvidia.swapped.has_library")
        with mock.patch(places[0], has_the_library), mock.patch(places[1], has_the_library):
            live(self.machine, self.life, story, rest_s=0.0)
        while self.pages:
            self.pages.pop().close()  # as the kernel does
        for program in self.programs.values():
            program.ended.set()
        return self.life.points


async def has_the_library(pid: int) -> bool:
    """Every program has it, whether or not it speaks."""
    await trio.lowlevel.checkpoint()
    return True


@attrs.define
class Walk:
    """The orders as one daemon has them."""

    stage: Stage
    h: Harness
    case: Case = attrs.field(factory=lambda: Case("", []))
    arrived: trio.Event = attrs.field(factory=trio.Event)
    go: trio.Event = attrs.field(factory=trio.Event)
    may_run: set[str] = attrs.field(factory=set)
    """Programs of which was said in this order that they are to run, or to be moved."""
    begun: list[str] = attrs.field(factory=list)
    """Actions of this order that were begun, in the life of this daemon."""
    moves: set[str] = attrs.field(factory=set)
    """Programs whose move was begun in this order."""
    away: set[str] = attrs.field(factory=set)
    """Programs whose move is asked for, and not answered."""

    @property
    def gpu(self) -> NvidiaGpu:
        """The first one, behind all that stands before it."""
        found: Gpu = self.h.controller.gpus[0]
        while isinstance(found, ForwardingGpu):
            found = found._inner
        assert isinstance(found, NvidiaGpu)
        return found

    def program(self, name: str) -> Held:
        """A program that speaks to this daemon."""
        return self.stage.programs[name]

    def member(self, name: str) -> Member:
        """The group of a program."""
        return Member(self.program(name).process, 0)

    def lives(self, name: str) -> bool:
        """Whether a program lives, as this daemon knows."""
        known = self.h.controller.population
        return name in self.stage.machine.programs and known.holds(self.member(name))

    # The programs

    async def run(self) -> None:
        """Goes through the orders, until none is left or one of them ends this daemon."""
        proven(self.gpu)
        self.gpu.mover.move = self.move  # type: ignore[method-assign]
        try:
            async with trio.open_nursery() as nursery:
                while self.stage.cases and await self.one(nursery, self.stage.cases[0]):
                    self.stage.cases.pop(0)
                nursery.cancel_scope.cancel()
        except* Killed:
            pass
        if self.stage.life.dead:
            raise Killed

    async def connected(self, nursery: trio.Nursery) -> None:
        """Returns once all programs of the order speak. Those that are new, and all with a new daemon, do so now."""
        for name in self.case.names:
            found: Any = self.stage.programs.get(name)
            if found is None or name not in self.stage.machine.programs or found.rig is not self:
                await self.connect(nursery, name)
        with trio.fail_after(60):
            while any(self.program(name).ended.is_set() for name in self.case.names):  # noqa: ASYNC110
                await trio.sleep(MOMENT_S)

    async def connect(self, nursery: trio.Nursery, name: str) -> None:
        """A program that lives speaks to this daemon, and has what it had; a new one has some memory."""
        machine, before = self.stage.machine, self.stage.programs.get(name)
        if name not in machine.programs:
            machine.start(name, "/job")
        process = machine.programs[name].identity
        resident, swapped = HELD_BYTES, 0
        if before is not None and before.process == process:
            resident, swapped = before.resident, before.swapped
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        kind, is_a = self.stage.kind, name == "a"
        made = Ungated if is_a and kind.end is TurnEnd.UNGATED else Held
        program = made(self, process, trio.socket.from_stdlib_socket(ours))  # type: ignore[arg-type]
        session = Session(process, {0: self.gpu.managed}, tenants.Line(trio.socket.from_stdlib_socket(theirs), process))

        async def serve() -> None:
            try:
                await session.run()
            finally:
                if self.stage.life.dead:
                    self.stage.pages.append(session._page)
                else:
                    session.close()
                theirs.close()
                program.close()

        nursery.start_soon(serve)
        nursery.start_soon(program.run)
        program.context, program.arrive = 0, self.arrive
        program.steps = ("asked", "drains", "waits", "begins") if is_a else ("", "", "", "next" if name == "b" else "")
        program.drain_s = kind.drain_s if is_a else 0.0
        await program.manage(resident, swapped)
        self.stage.programs[name] = program
        nursery.start_soon(self.connect_again, nursery, name, program)

    async def connect_again(self, nursery: trio.Nursery, name: str, program: Held) -> None:
        """As the library does, once its connection has ended: after a move."""
        await program.ended.wait()
        await trio.sleep(RECONNECT_S)
        found = self.stage.machine.programs.get(name)
        if found is not None and found.identity == program.process and self.stage.programs[name] is program:
            await self.connect(nursery, name)

    @property
    def fake(self) -> Any:
        """The driver, as a program knows it."""
        return self.stage.machine.fake

    def driver_says(self, pid: int, nbytes: int, gpu: int = 0) -> None:
        """NVML counts so much for a process."""
        nvml = self.stage.machine.nvml
        if pid in self.fake.programs:
            nvml.compute[gpu] = [*[entry for entry in nvml.compute.get(gpu, []) if entry[0] != pid], (pid, nbytes)]

    async def move(self, *words: Any) -> None:
        """The agent of checkpoints, as the daemon sees it: it finds a program that runs and launches."""
        process, standby = words[0], words[-1]
        assert isinstance(standby, Standby)
        (name,) = [name for name in self.case.names if self.program(name).process == process]
        program = self.program(name)
        self.moves.add(name)
        if self.lives(name):
            assert without(self.stage.machine.programs[name]) == (False, False)
            with trio.move_on_after(1):  # its library may be busy, or held
                while program.is_closed:  # noqa: ASYNC110
                    await trio.sleep(MOMENT_S / 3)
            assert not program.is_closed, "it was not told that it is to leave its turn"
        await standby.begin()
        assert not program.is_closed
        standby.over.set()
        raise OSError(errno.EBUSY, "it does not come to a rest")

    # One order

    async def one(self, nursery: trio.Nursery, case: Case) -> bool:
        """Does one order, from a start that is the same for all. Whether the daemon is still there."""
        self.case, self.may_run, self.moves, self.begun = case, set(), set(), []
        self.arrived, self.go = trio.Event(), trio.Event()
        await self.begin_anew(nursery)
        async with trio.open_nursery() as acting:
            acting.start_soon(self.change)
            with trio.fail_after(60):
                await self.arrived.wait()
            if await self.act(acting):
                acting.cancel_scope.cancel()
                nursery.cancel_scope.cancel()
                return False
            self.holds()
            self.go.set()
        await self.end(nursery)
        return True

    async def begin_anew(self, nursery: trio.Nursery) -> None:
        """What the order before has left is set back; all but `a` wait for their turn, and `b` is protected."""
        step, self.case.step = self.case.step, ""
        await self.connected(nursery)
        await self.settled()
        for name in self.case.names:
            await self.thaw(name)
        await self.settled()
        while self.h.controller._migrator._moves.left():  # noqa: ASYNC110 - it is not sure yet where it is
            await trio.sleep(MOMENT_S)
        for path in ("slice/job/0/", *(self.program(name).file for name in self.case.names)):
            for file, value in (("gmem.limit.high", "max"), ("gmem.limit.low", 0), ("gmem.swap.max", "max")):
                assert await answers(self.h.write(path + file, value)) == 0
        for name in self.case.names:
            found = self.program(name)
            await found.free(found.resident, found.swapped)
            assert await found.alloc(HELD_BYTES) == 0
            found.reclaims.clear()
        for name in self.case.names:
            with trio.fail_after(SETTLED_S):  # what gave less than it was asked for is not asked again for a while
                while self.gpu.footprint(self.program(name).process).movable < HELD_BYTES:  # noqa: ASYNC110
                    await trio.sleep(MOMENT_S)
        await self.settled()
        assert {(found.resident, found.swapped) for found in map(self.program, self.case.names)} == {(HELD_BYTES, 0)}
        await self.write("b", "gmem.limit.low", "max")
        for name in self.case.names[1:]:
            assert await self.finish(name, BOUND_US) is TurnEnd.DRAINED
            await self.apply(name)
        self.case.step, self.begun = step, []

    async def act(self, acting: trio.Nursery) -> bool:
        """Begins the actions in their order. Whether one of them ends the daemon."""
        while self.case.actions:
            action = self.case.actions.pop(0)
            if action in ("upgrade", "kill_daemon"):
                self.stage.life.dead = action == "kill_daemon"
                if action == "upgrade":
                    self.h.controller.hand_over()
                if not self.case.actions:
                    self.stage.cases.pop(0)
                return True
            if self.lives(acted_on(action)):
                self.begun.append(action)
                acting.start_soon(self.do, action)
            await trio.sleep(MOMENT_S)
        return False

    async def do(self, action: str) -> None:
        """One action, and what it may say."""
        before, verb, name = self.begun[:-1], action.split()[0], acted_on(action)
        found = self.found(name)
        code = await getattr(self, verb)(name)
        allowed = self.allowed(verb, name, before, found)
        assert code in allowed, (action, errno.errorcode.get(code), self.begun)

    def done_to(self, name: str, begun: Sequence[str] | None = None) -> list[str]:
        """What was begun with a program, or its slice."""
        return [one.split()[0] for one in (self.begun if begun is None else begun) if acted_on(one) == name]

    def gives(self, name: str) -> bool:
        """Whether memory of a program moves, as far as what was begun in this order goes."""
        return HOLDS.isdisjoint(self.done_to(name)) and self.can_give(name)

    def can_give(self, name: str) -> bool:
        """Whether memory of a program moves wherever nothing is done to it."""
        return self.stage.kind.gives if name == "a" else not self.is_ungated(name)

    def found(self, name: str) -> Found:
        """A program as it is now."""
        is_over = self.program(name).resident > HELD_BYTES - GIVEN_BYTES
        return Found(is_over, self.moves_of(name), name in self.away)

    def moves_of(self, name: str) -> Moves:
        """How memory of a program moves, as far as its turn goes."""
        if not self.lives(name):
            return Moves.NOT
        end = self.h.controller.population.record(self.member(name)).compute.turn_end
        ends_soon = end is TurnEnd.LATE and (name != "a" or self.stage.kind.gives)
        if end in (None, TurnEnd.DRAINED) or ends_soon:
            return Moves.AT_ONCE
        if without(self.stage.machine.programs[name])[0]:
            return Moves.NOT
        return Moves.IN_VAIN if end is TurnEnd.LATE else Moves.AT_ONCE

    def allowed(self, verb: str, name: str, before: Sequence[str], found: Found) -> set[int]:
        """What an action on a program may say by now that was begun after those `before` it, as it was found then."""
        gone = GONE if "kill" in self.done_to(name) else set()
        match verb:
            case "limit":  # of the slice: another program gives where one cannot
                return {0} if any(map(self.gives, self.case.names)) else {0, errno.EBUSY, errno.EAGAIN}
            case "own_limit":
                return self.own_limit_says(name, self.done_to(name, before), found) | gone
            case "reclaim":
                return {0, *(() if self.gives(name) else (errno.EAGAIN,)), *gone}
            case "migrate":
                return {errno.EBUSY, *gone}
        return {0, *gone}

    def own_limit_says(self, name: str, before: Sequence[str], found: Found) -> set[int]:
        """What is said of a limit of one program: 0 wherever it waits, unless something else keeps its memory. Writes
        of one program go one after the other, so what is done to it afterwards changes nothing of that."""
        if not found.is_over:
            return {0}
        now = self.found(name)
        taken = set() if now.is_over else {0}  # by the limit of its slice, meanwhile
        if "swap_max" in before:
            return {errno.EBUSY} | taken
        levers = [one for one in before if one in ("freeze", "thaw", "migrate")]
        if [one for one in levers if one != "migrate"][-1:] == ["freeze"]:
            # After a move it is frozen anew, soon: before the write of a limit that has waited for that, or after it.
            soon = {errno.EAGAIN} if levers[-1] == "migrate" and found.is_away else set()
            return {errno.EBUSY} | soon | taken
        match found.moves:
            case Moves.NOT:
                return {errno.EBUSY} | taken
            case Moves.IN_VAIN:
                return {errno.EAGAIN} | taken
        if now.moves is Moves.AT_ONCE:
            return {0}
        # Its turn has ended meanwhile; in that of a program that was to move its library did not speak.
        return {errno.EAGAIN} | (taken if "migrate" in levers else {0})

    async def write(self, name: str, file: str, value: object) -> int:
        """The errno of a write to a file of a program."""
        return await answers(self.h.write(f"{self.program(name).process.pid}/0/{file}", value))

    async def limit(self, _: str) -> int:
        limit = len(self.case.names) * HELD_BYTES - GIVEN_BYTES
        return await answers(self.h.write("slice/job/0/gmem.limit.high", limit))

    async def own_limit(self, name: str) -> int:
        """Of one program: no other gives in its stead."""
        code = await self.write(name, "gmem.limit.high", HELD_BYTES - GIVEN_BYTES)
        assert code or not self.lives(name) or self.program(name).resident <= HELD_BYTES - GIVEN_BYTES
        return code

    async def low(self, name: str) -> int:
        return await self.write(name, "gmem.limit.low", "max")

    async def swap_max(self, name: str) -> int:
        return await self.write(name, "gmem.swap.max", GIB)

    async def reclaim(self, name: str) -> int:
        return await self.write(name, "gmem.reclaim", GIB)

    async def freeze(self, name: str) -> int:
        """From the answer on it does not run, not for a moment."""
        code = await self.write(name, "compute.freeze", 1)
        if not code and self.is_last("freeze", name):
            assert without(self.stage.machine.programs[name]) == (True, True)
        self.stand_still()
        return code

    def stand_still(self) -> None:
        """What is frozen, and is not asked to run, does not."""
        still = filter(self.lives, set(self.case.names) - self.may_run)
        self.stage.machine.fake.still = frozenset(
            self.program(name).process.pid for name in still if self.h.ledger.books(self.member(name)).frozen
        )

    def let_run(self, name: str) -> None:
        """A program may run from now on."""
        self.stage.machine.fake.still -= {self.program(name).process.pid}

    async def thaw(self, name: str) -> int:
        """It runs again, in its turn: what a gate holds back moves its memory, at least."""
        self.may_run.add(name)
        self.let_run(name)
        code = await self.write(name, "compute.freeze", 0)
        if not code and self.is_last("thaw", name) and not self.is_ungated(name):
            assert not without(self.stage.machine.programs[name])[1]
        return code

    def is_ungated(self, name: str) -> bool:
        """Whether a program waits for its turn without its copy engines: `a` has no gate, or that of another was held
        as it was to open, and its turn has ended since."""
        if name == "a":
            return self.stage.kind.end is TurnEnd.UNGATED
        known = self.h.controller.population
        return self.lives(name) and known.record(self.member(name)).compute.turn_end is TurnEnd.UNGATED

    def is_last(self, verb: str, name: str) -> bool:
        """Whether it holds that a program was frozen, or thawed, and it is there."""
        done = self.done_to(name)
        asked = [one for one in done if one in ("freeze", "thaw")]
        return asked[-1:] == [verb] and {"migrate", "kill"}.isdisjoint(done)

    async def migrate(self, name: str) -> int:
        """It stands by, which takes that it runs, and does not come to a rest."""
        before = name in self.may_run
        self.may_run.add(name)
        self.let_run(name)
        self.away.add(name)
        try:
            code = await self.write(name, "compute.migrate", 1)
        finally:
            self.away.discard(name)
        if code == errno.EOPNOTSUPP and not self.program(name).resident:
            code = errno.EBUSY  # two limits have taken all that it has, and the driver moves none without
        else:
            assert name in self.moves or "kill" in self.done_to(name), "nothing moved it"
        if not before:
            self.may_run.discard(name)
        await trio.sleep(MOMENT_S)
        self.stand_still()
        return code

    async def kill(self, name: str) -> int:
        """The program dies."""
        program = self.program(name)
        self.let_run(name)
        self.stage.machine.end(name)
        program.socket.close()
        await self.h.gone(program.process)
        return 0

    # The change, as the scheduler makes it

    async def arrive(self, step: str) -> None:
        """A step of the change: that of the order is held until its actions have begun."""
        if step and step == self.case.step and not self.go.is_set():
            self.arrived.set()
            await self.go.wait()

    async def change(self) -> None:
        """`a` ends its turn, the others have one each, and `a` begins again."""
        kind = self.stage.kind
        await self.arrive("runs")
        end = await self.finish("a", kind.bound_us, stays=kind.stays)
        if self.is_plain:
            assert end is kind.end, end
        await self.arrive("ended")
        self.lengthen()
        await self.apply("a")
        if kind.stays:
            await self.change_while_it_drains(kind)
        else:
            await self.arrive("off")
            await self.start("b")
        for name, follows in zip(self.case.names[1:], (*self.case.names[2:], "a"), strict=True):
            await self.finish(name, BOUND_US)
            await self.apply(name)
            if follows != "a" or not kind.returns:
                await self.start(follows)
        self.arrived.set()  # at the latest: it has no gate that would be held

    async def change_while_it_drains(self, kind: Kind) -> None:
        """`b` has its turn, and `a` goes off once it is drained or was waited for; or its next turn begins before."""
        await self.start("b")
        found: list[TurnEnd | None] = []

        async def drain() -> None:
            if self.lives("a"):
                async with self.may_be_gone("a"):
                    found.append(await follower(self.h).turning.drain(self.member("a"), DRAIN_MOST_US))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(drain)
            if kind.returns:
                await trio.sleep(2 * MOMENT_S)
                await self.arrive("waits")
                await self.start("a")
        if self.is_plain:
            assert found == [kind.drained], found
        await self.arrive("drained")
        await self.apply("a")
        await self.arrive("off")

    def lengthen(self) -> None:
        """Has `a` want the slice of what drains, if it does."""
        if self.lives("a") and (place := follower(self.h).place(self.member("a"))).drains:
            follower(self.h).schedule(self.member("a"), attrs.evolve(place, drain_us=DRAIN_SLICE_US))

    @property
    def is_plain(self) -> bool:
        """Whether nothing was begun that changes how the turn of `a` ends."""
        return {"migrate", "kill", "freeze"}.isdisjoint(self.done_to("a"))

    async def finish(self, name: str, bound_us: int, *, stays: bool = False) -> TurnEnd | None:
        """Ends the turn of a program that lives, unless it is frozen already."""
        if not self.lives(name) or self.h.ledger.books(self.member(name)).frozen:
            return None
        group, acting = self.member(name), follower(self.h)
        async with self.may_be_gone(name):
            return await acting.turning.end(group, Place(off=True), bound_us, stays=stays)
        acting.fall_back(group) if self.h.controller.population.holds(group) else None
        return None

    async def apply(self, name: str) -> None:
        """What is wanted of a program holds."""
        if self.lives(name):
            async with self.may_be_gone(name):
                await follower(self.h).apply(self.member(name))

    async def start(self, name: str) -> None:
        """Begins the turn of a program, until it was told."""
        if self.lives(name):
            follower(self.h).schedule(self.member(name), Place())
            await self.apply(name)
            await trio.sleep(MOMENT_S)

    @contextlib.asynccontextmanager
    async def may_be_gone(self, name: str) -> AsyncIterator[None]:
        """A program may have died meanwhile."""
        try:
            yield
        except OSError:
            if "kill" not in self.done_to(name):
                raise

    # What holds

    def holds(self) -> None:
        """At each step: what waits launches nothing, what is frozen does not run, and `b` keeps what is protected."""
        assert not self.stage.machine.fake.ran, "a frozen program ran"
        for name in filter(self.lives, self.case.names):
            compute = self.h.controller.population.record(self.member(name)).compute
            gr, copies = without(self.stage.machine.programs[name])
            program = self.program(name)
            if copies:
                assert gr, f"{name} has GR alone"
            if compute.is_busy() or program.ended.is_set():
                continue
            if compute.turn_end in (TurnEnd.DRAINED, TurnEnd.LATE):
                closes = compute.place.drains and program.listens.locked()  # as soon as it can
                assert program.is_closed or closes, f"{name} may launch, and waits"
            if compute.turn_end is TurnEnd.DRAINED:
                assert not program.pending, f"{name} is not drained"
        others = [name for name in self.case.names if name != "b" and "low" not in self.done_to(name)]
        if any(map(self.gives, others)) and not self.done_to("b"):
            assert not self.program("b").reclaims, "what was protected has moved"
        self.h.check()

    async def end(self, nursery: trio.Nursery) -> None:
        """Every program runs in the end, has the gate open and holds its limits, and the books are the driver's."""
        self.holds()
        if self.lives("a"):
            await self.connected(nursery)
        for name in filter(self.lives, self.case.names):
            assert await self.thaw(name) == 0
        if self.lives("a"):
            await self.is_told("a")
        for name in filter(self.lives, self.case.names):
            if follower(self.h).place(self.member(name)).off:  # what has its turn is told by what began it
                await self.start(name)
        await self.settled()

    async def is_told(self, name: str) -> None:
        """What has its turn and is not frozen was told so, by what let it run: nothing has to come and mend that."""
        program = self.program(name)
        while program.listens.locked():  # noqa: ASYNC110
            await trio.sleep(MOMENT_S / 3)
        await trio.sleep(MOMENT_S / 3)
        assert follower(self.h).place(self.member(name)).off or not program.is_closed, f"{name} has its turn, and waits"

    async def settled(self) -> None:
        """Waits until all that holds at the end of an order does."""
        wrong = ["?"]
        with trio.move_on_after(SETTLED_S):
            while wrong:
                wrong = list(self.wrong())
                await trio.sleep(MOMENT_S)
        assert not wrong, (self.case, wrong)

    def wrong(self) -> Sequence[str]:
        """What does not hold yet."""
        found = []
        for name in filter(self.lives, self.case.names):
            program, books = self.program(name), self.h.ledger.books(self.member(name))
            compute = self.h.controller.population.record(self.member(name)).compute
            waits = compute.turn_end is not None
            frozen = any(self.h.ledger.books(level).frozen for level in (self.member(name), SliceOn(Slice("/job"), 0)))
            if program.ended.is_set():
                found.append(f"{name}: its connection")
            elif (books.current, books.swap) != (program.resident, program.swapped):
                found.append(f"{name}: {books.current}, {books.swap} in the books")
            elif program.is_closed != (waits and compute.turn_end is not TurnEnd.UNGATED):
                found.append(f"{name}: its gate")
            if without(self.stage.machine.programs[name]) != ((True, True) if frozen else (waits, False)):
                found.append(f"{name}: its engines")
            if compute.doubtful or compute.inherited:
                found.append(f"{name}: in doubt")
            wanted = DRAIN_SLICE_US if compute.place.drains else OWN_SLICE_US
            if set(timeslices(self.stage.machine.programs[name])) != {wanted}:
                found.append(f"{name}: its slice")
            if books.current > books.high and not frozen and books.swap < books.swap_max:
                found.append(f"{name}: {books.current} over {books.high}")
        job: Group = SliceOn(Slice("/job"), 0)
        if self.h.controller.population.holds(job):
            books, members = self.h.ledger.books(job), map(self.member, filter(self.lives, self.case.names))
            some_may_go = any(one.swap < one.swap_max and not one.frozen for one in map(self.h.ledger.books, members))
            if books.current > books.high and some_may_go and not books.frozen:
                found.append(f"{books.current} over {books.high}")
        return found
