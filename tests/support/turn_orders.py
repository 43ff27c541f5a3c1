"""The end of a turn and the beginning of the next, held at each of their steps while a test does something.

Two programs of one slice change places: `a` has its turn and `b` waits, whose memory is protected; then `b` has it, and
`a` again. What is done at one step is begun in order, and is still going on when the next step comes where it takes
longer than that. What is asked of a daemon that ends meanwhile is asked no more; the next daemon goes on with the rest.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import attrs
import trio

from backend.core.protocols import Gpu
from backend.core.records import Place
from backend.core.turns import TurnEnd
from backend.cuda.managed import Standby
from backend.cuda.page import CounterPage
from backend.cuda.server import Session
from backend.door import tenants
from backend.door.wire import CUDA, Feature, Message, Op
from backend.ledgers.forwarding import ForwardingGpu
from backend.nvidia.gpu import NvidiaGpu
from backend.process.identity import Group, Member, Slice, SliceOn
from tests.support.cuda_session import GIB
from tests.support.harness import Harness, answers
from tests.support.killed import Killed, Life, Machine
from tests.support.killed_life import live
from tests.support.turns import Gated, follower, proven, without

STEPS = ("runs", "asked", "drains", "ended", "off", "next", "begins")
"""Steps of a change: `a` runs; it was asked to close its gate; that is closed and kernels of it run; its turn has ended
and all its engines are on; GR is off; the gate of `b` is about to open; that of `a` is about to open again."""

INSIDE = ("asked", "drains", "next", "begins")
"""Those of them at which a program has not answered yet."""

ACTIONS = ("limit", "low", "swap_max", "reclaim", "freeze", "thaw", "migrate", "upgrade", "kill_daemon", "kill")
"""What may be done: to `a`, to its slice, or to the daemon."""

HELD_BYTES = 4 * GIB
"""What each program has on the GPU at first."""

LIMIT_BYTES = 6 * GIB
"""A limit of the slice: a part of what `a` has, and nothing of `b`."""

BOUND_US, SHORT_US = 10_000_000, 50_000
"""Microseconds that `a` has to drain; and one whose kernel does not end."""

SPIN_S = 3600.0
"""Seconds of a kernel that does not end."""

MOMENT_S = 0.03
"""Seconds of virtual time from one action to the next."""

SETTLED_S = 3.0
"""Seconds in which what was begun comes to its end."""

KINDS = {"gated": TurnEnd.DRAINED, "late": TurnEnd.LATE, "ungated": TurnEnd.UNGATED}
"""What `a` may be, and how its turn ends."""

STAYS = {"freeze", "migrate", "swap_max", "upgrade", "kill_daemon", "kill"}
"""After these memory of `a` may have to stay where it is."""

REFUSED = {0, errno.EBUSY, errno.EAGAIN}
"""What a write that moves memory says where that has to stay."""

GONE = {errno.ENOENT, errno.ESRCH, errno.ENODEV}
"""What is said of a program that died meanwhile."""


class Held(Gated):
    """A program with a gate that may be held before it does as it is asked."""

    arrive: Callable[[str], Awaitable[None]]
    """What it tells the steps of its gate."""
    steps: Sequence[str] = ()
    """Names of them: before its gate closes, once it is closed, before it opens."""
    departs = False

    async def library(self, message: Message) -> Message | None:
        """The answer to what the daemon asks, in its time."""
        self.departs |= message.op == Op.DEPART
        if message.op == Op.BEGIN_TURN and message.args[0] and self.is_closed:
            await self.arrive(self.steps[2])
        return await super().library(message)

    async def end_turn(self, message: Message) -> Message:
        """The gate closes, unless it stands by to be moved."""
        await self.arrive(self.steps[0])
        if self.departs:
            return message.refuse(errno.EBUSY)
        self.is_closed = self.pending = True
        await self.arrive(self.steps[1])
        return await super().end_turn(message)


class Ungated(Held):
    """A program without a gate."""

    features = CUDA & ~Feature.TURNS


@attrs.define
class Case:
    """One order: actions at one step."""

    step: str
    actions: list[str]
    """Those that are left to do."""
    all: tuple[str, ...] = attrs.Factory(lambda self: tuple(self.actions), takes_self=True)

    @property
    def may_stay(self) -> bool:
        """Whether memory of `a` may have to stay where it is."""
        return bool(STAYS & set(self.all))


@attrs.define
class Stage:
    """A machine whose daemons come and go, and the orders that are left."""

    machine: Machine
    kind: str
    cases: list[Case]
    pages: list[CounterPage] = attrs.field(factory=list)
    """Those of killed daemons, which look at them no more once their lives have ended."""
    programs: dict[str, Held] = attrs.field(factory=dict)
    life: Life = attrs.field(factory=Life)
    at: int | None = None
    """The point of the next daemon's life at which it is killed."""

    @property
    def fake(self) -> Any:
        """The driver, as a program knows it."""
        return self.machine.fake

    def driver_says(self, pid: int, nbytes: int, gpu: int = 0) -> None:
        """NVML counts so much for a process."""
        others = [entry for entry in self.machine.nvml.compute.get(gpu, []) if entry[0] != pid]
        self.machine.nvml.compute[gpu] = [*others, (pid, nbytes)]

    def walk(self) -> None:
        """All orders, over as many daemons as they take."""
        while self.cases:
            self.next_daemon()
        for program in self.machine.programs.values():
            assert without(program) == (False, False)

    def next_daemon(self) -> int:
        """Has one more daemon live, to its end; returns the points of its life."""
        self.life, self.at = Life(self.at), None

        async def story(machine: Machine, h: Harness) -> None:
            await Walk(self, h).run()

        live(self.machine, self.life, story, rest_s=0.0)
        while self.pages:
            self.pages.pop().close()  # as the kernel does
        for program in self.programs.values():
            program.ended.set()
        return self.life.points


@attrs.define
class Walk:
    """The orders as one daemon has them."""

    stage: Stage
    h: Harness
    case: Case = attrs.field(factory=lambda: Case("", []))
    arrived: trio.Event = attrs.field(factory=trio.Event)
    go: trio.Event = attrs.field(factory=trio.Event)
    may_run: bool = False
    """Whether it was said that `a` is to run, or to be moved, in this order."""

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

    async def reconnect(self, nursery: trio.Nursery) -> None:
        """Programs without a connection have one: those that are new to this daemon, or were to be moved."""
        for name in ("a", "b"):
            found = self.stage.programs.get(name)
            if found is None or name not in self.stage.machine.programs or found.ended.is_set():
                await self.connect(nursery, name)

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
        kind = Ungated if name == "a" and self.stage.kind == "ungated" else Held
        program = kind(self.stage, process, trio.socket.from_stdlib_socket(ours))  # type: ignore[arg-type]
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
        program.steps = ("asked", "drains", "begins") if name == "a" else ("", "", "next")
        if name == "a" and self.stage.kind == "late":
            program.drain_s = SPIN_S
        await program.manage(resident, swapped)
        self.stage.programs[name] = program

    async def move(self, *words: Any) -> None:
        """The agent of checkpoints, as the daemon sees it: it finds a program that runs and launches."""
        standby = words[-1]
        assert isinstance(standby, Standby)
        assert without(self.stage.machine.programs["a"]) == (False, False)
        await standby.begin()
        assert not self.program("a").is_closed
        standby.over.set()
        raise OSError(errno.EBUSY, "it does not come to a rest")

    # One order

    async def one(self, nursery: trio.Nursery, case: Case) -> bool:
        """Does one order, from a start that is the same for all. Whether the daemon is still there."""
        self.case, self.may_run = case, False
        self.arrived, self.go = trio.Event(), trio.Event()
        await self.begin_anew(nursery)
        async with trio.open_nursery() as acting:
            acting.start_soon(self.change)
            with trio.fail_after(60):
                await self.arrived.wait()
            if await self.act(nursery, acting):
                acting.cancel_scope.cancel()
                nursery.cancel_scope.cancel()
                return False
            self.holds()
            self.go.set()
        await self.end(nursery)
        return True

    async def begin_anew(self, nursery: trio.Nursery) -> None:
        """What the order before has left is set back; `b` waits for its turn, and is protected."""
        await self.reconnect(nursery)
        await self.settled()
        await self.thaw()
        for path in ("slice/job/0/", f"{self.program('a').process.pid}/0/"):
            for file, value in (("gmem.limit.high", "max"), ("gmem.limit.low", 0), ("gmem.swap.max", "max")):
                assert await answers(self.h.write(path + file, value)) == 0
        for name in ("a", "b"):
            found = self.program(name)
            await found.free(found.resident, found.swapped)
            assert await found.alloc(HELD_BYTES) == 0
            found.reclaims.clear()
        await self.write("b", "gmem.limit.low", "max")
        self.case.step, step = "", self.case.step
        assert await self.finish("b", BOUND_US) is TurnEnd.DRAINED
        await self.apply("b")
        self.case.step = step

    async def act(self, nursery: trio.Nursery, acting: trio.Nursery) -> bool:
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
            if self.lives("a"):
                await self.reconnect(nursery)
                acting.start_soon(self.do, action)
            await trio.sleep(MOMENT_S)
        return False

    async def do(self, action: str) -> None:
        """One action, and what it may say."""
        code = await getattr(self, action)()
        can_give = self.stage.kind == "gated" and not self.case.may_stay
        allowed = {0} if can_give else REFUSED
        if "kill" in self.case.all:
            allowed = allowed | GONE
        if "migrate" in self.case.all:  # until it is connected again none of its memory can be moved
            allowed = allowed | {errno.EOPNOTSUPP}
        assert code in allowed, (action, errno.errorcode.get(code))

    async def write(self, name: str, file: str, value: object) -> int:
        """The errno of a write to a file of a program."""
        return await answers(self.h.write(f"{self.program(name).process.pid}/0/{file}", value))

    async def limit(self) -> int:
        return await answers(self.h.write("slice/job/0/gmem.limit.high", LIMIT_BYTES))

    async def low(self) -> int:
        return await self.write("a", "gmem.limit.low", "max")

    async def swap_max(self) -> int:
        return await self.write("a", "gmem.swap.max", GIB)

    async def reclaim(self) -> int:
        return await self.write("a", "gmem.reclaim", GIB)

    async def freeze(self) -> int:
        """From the answer on it does not run, not for a moment."""
        code = await self.write("a", "compute.freeze", 1)
        self.stand_still()
        return code

    def stand_still(self) -> None:
        """What is frozen, and is not asked to run, does not."""
        if self.lives("a") and not self.may_run and self.h.ledger.books(self.member("a")).frozen:
            self.stage.machine.fake.still = frozenset({self.program("a").process.pid})

    async def thaw(self) -> int:
        """It runs again, in its turn."""
        self.may_run, self.stage.machine.fake.still = True, frozenset()
        return await self.write("a", "compute.freeze", 0)

    async def migrate(self) -> int:
        """It stands by, which takes that it runs, and does not come to a rest."""
        before, self.may_run, self.stage.machine.fake.still = self.may_run, True, frozenset()
        code = await self.write("a", "compute.migrate", 1)
        full = {errno.ENOSPC} if "swap_max" in self.case.all else set()
        assert code in {errno.EBUSY, *GONE, *full}, errno.errorcode.get(code)
        self.may_run = before
        await trio.sleep(MOMENT_S)
        self.stand_still()
        return errno.EBUSY

    async def kill(self) -> int:
        """The program dies."""
        process = self.program("a").process
        self.stage.machine.fake.still = frozenset()
        self.program("a").socket.close()
        self.stage.machine.end("a")
        await self.h.gone(process)
        return 0

    # The change, as the scheduler makes it

    async def arrive(self, step: str) -> None:
        """A step of the change: that of the order is held until its actions have begun."""
        if step and step == self.case.step and not self.go.is_set():
            self.arrived.set()
            await self.go.wait()

    async def change(self) -> None:
        """`a` ends its turn, `b` has one, and `a` begins again."""
        await self.arrive("runs")
        end = await self.finish("a", SHORT_US if self.stage.kind == "late" else BOUND_US)
        if not {"migrate", "kill", "freeze"} & set(self.case.all):
            assert end is KINDS[self.stage.kind], end
        await self.arrive("ended")
        await self.apply("a")
        await self.arrive("off")
        await self.start("b")
        await self.finish("b", BOUND_US)
        await self.apply("b")
        await self.start("a")
        self.arrived.set()  # at the latest: it has no gate that would be held

    async def finish(self, name: str, bound_us: int) -> TurnEnd | None:
        """Ends the turn of a program that lives, unless it is frozen already."""
        if not self.lives(name) or self.h.ledger.books(self.member(name)).frozen:
            return None
        group, acting = self.member(name), follower(self.h)
        async with self.may_be_gone(name):
            return await acting.turning.end(group, Place(off=True), bound_us)
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
        """A program may have died meanwhile, or be moved by its driver."""
        dies = name == "a" and {"kill", "migrate"} & set(self.case.all)
        with contextlib.suppress(OSError) if dies else contextlib.nullcontext():
            yield

    # What holds

    def holds(self) -> None:
        """At each step: what waits launches nothing, what is frozen does not run, and `b` keeps what is protected."""
        assert not self.stage.machine.fake.ran, "a frozen program ran"
        for name in ("a", "b"):
            if self.lives(name):
                compute = self.h.controller.population.record(self.member(name)).compute
                gr, copies = without(self.stage.machine.programs[name])
                program = self.program(name)
                if compute.turn_end in (TurnEnd.DRAINED, TurnEnd.LATE) and not program.ended.is_set():
                    assert program.is_closed or compute.is_busy(), f"{name} may launch, and waits"
                if copies:
                    assert gr, f"{name} has GR alone"
        if "low" not in self.case.all and not self.case.may_stay and self.stage.kind == "gated":
            assert not self.program("b").reclaims, "what was protected has moved"
        self.h.check()

    async def end(self, nursery: trio.Nursery) -> None:
        """Every program runs in the end, has the gate open and holds its limits, and the books are the driver's."""
        self.holds()
        if self.lives("a"):
            await self.reconnect(nursery)
            await self.thaw()
        for name in ("a", "b"):
            await self.start(name)
        await self.settled()

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
        for name in ("a", "b"):
            if not self.lives(name):
                continue
            program, books = self.program(name), self.h.ledger.books(self.member(name))
            compute = self.h.controller.population.record(self.member(name)).compute
            waits = compute.turn_end is not None
            frozen = any(self.h.ledger.books(level).frozen for level in (self.member(name), SliceOn(Slice("/job"), 0)))
            if not program.ended.is_set():
                if (books.current, books.swap) != (program.resident, program.swapped):
                    found.append(f"{name}: {books.current}, {books.swap} in the books")
                if program.is_closed != (waits and compute.turn_end is not TurnEnd.UNGATED):
                    found.append(f"{name}: its gate")
            if without(self.stage.machine.programs[name]) != ((True, True) if frozen else (waits, False)):
                found.append(f"{name}: its engines")
            if compute.doubtful or compute.inherited:
                found.append(f"{name}: in doubt")
        job: Group = SliceOn(Slice("/job"), 0)
        if self.h.controller.population.holds(job) and "swap_max" not in self.case.all:
            books = self.h.ledger.books(job)
            if books.current > books.high:
                found.append(f"{books.current} over {books.high}")
        return found
