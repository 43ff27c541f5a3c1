"""A state machine of turns beside everything else that is asked of programs and daemons, with checks after each step.

The rules write a story; at their end it is told, in virtual time, over as many daemons as it has.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import trio
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from backend.core.reasons import Engines, Reason
from backend.core.records import MAX
from backend.core.turns import TurnEnd
from backend.cuda.migrations import Standby
from backend.cuda.page import CounterPage
from backend.cuda.server import Session
from backend.door import tenants
from backend.door.wire import CUDA, Feature
from backend.nvidia.gpu import NvidiaGpu
from backend.process.identity import ROOT, Group, Member, Slice, SliceOn
from tests.support.cuda_session import GIB
from tests.support.harness import Harness, answers
from tests.support.killed import Killed, Life, Machine, a_machine
from tests.support.killed_life import live, sleepers
from tests.support.turn_daemons import first_gpu, serve
from tests.support.turns import Gated, begin_turn, end_turn, proven, without

NAMES = ("a", "b", "c")
"""Names of the programs; the last one has no gate."""

FIRST_BYTES = 4 * GIB
"""Bytes that each has on the GPU at first."""

MOST_BYTES = 12 * GIB
"""Bytes that each has in all, at most."""

SETTLED_S = 1.5
"""Seconds within which all that was begun has ended, and the driver's figures are in the books."""

SPIN_S = 3600.0
"""Seconds of a kernel that does not end."""

OFF = {Engines.NONE: (False, False), Engines.GR: (True, False), Engines.ALL: (True, True)}
"""Whether the hardware is without GR, and without the copy engines, by the engines that are taken."""

REFUSED = {0, errno.EBUSY, errno.EAGAIN}
"""Allowed answers to a write that moves memory."""

Step = tuple[str, str, int]
"""An action, its program, and a number."""


class Older(Gated):
    """A program without a gate."""

    features = CUDA & ~Feature.TURNS


@attrs.define
class Told:
    """One program of a story, across all daemons."""

    name: str
    resident: int = FIRST_BYTES
    swapped: int = 0
    drain_s: float = 0.0
    waits: TurnEnd | None = None
    """How its turn ended; None while it has its turn."""
    program: Gated | None = None
    """Its connection to this daemon."""

    def note(self) -> None:
        """Record what it has, for the next connection."""
        if self.program is not None:
            self.resident, self.swapped = self.program.resident, self.program.swapped
            self.drain_s, self.program = self.program.drain_s, None


@attrs.define
class Story:
    """A story on a machine whose daemons come and go."""

    machine: Machine
    steps: list[Step]
    """Steps that are left to do."""
    told: dict[str, Told] = attrs.field(factory=dict)
    """Programs that live."""
    pages: list[CounterPage] = attrs.field(factory=list)
    """Counter pages of a killed daemon, remains of which in this process still read them."""
    goes_on: bool = True
    """Whether another daemon goes on from the last one."""

    @property
    def fake(self) -> Any:
        """The driver, as a program knows it."""
        return self.machine.fake

    def driver_says(self, pid: int, nbytes: int, gpu: int = 0) -> None:
        """Have NVML count `nbytes` for a process."""
        others = [entry for entry in self.machine.nvml.compute.get(gpu, []) if entry[0] != pid]
        self.machine.nvml.compute[gpu] = [*others, (pid, nbytes)]

    def begin(self, names: Sequence[str]) -> None:
        """Start the programs."""
        for name in names:
            self.machine.start(name, "/job" if name != "b" else "/")
            self.told[name] = Told(name)

    def live(self) -> None:
        """Run one daemon, up to the step that ends it."""
        life, self.goes_on = Life(), False

        async def story(machine: Machine, h: Harness) -> None:
            await Telling(self, h, life).run()

        live(self.machine, life, story)
        while self.pages:
            self.pages.pop().close()  # as the kernel does


@attrs.define
class Telling:
    """A story under one daemon."""

    story: Story
    h: Harness
    life: Life

    @property
    def gpu(self) -> NvidiaGpu:
        """The first GPU, without its wrappers."""
        return first_gpu(self.h)

    async def run(self) -> None:
        """Do the steps of this daemon's life; check invariants before the first and after each."""
        proven(self.gpu)
        self.gpu.mover.move = self.move  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            for told in self.story.told.values():
                await self.connect(nursery, told)
            await self.holds()
            while self.story.steps:
                verb, name, number = self.story.steps.pop(0)
                if verb in ("upgrade", "kill_daemon"):
                    self.story.goes_on, self.life.dead = True, verb == "kill_daemon"
                    if verb == "upgrade":
                        self.h.controller.hand_over()
                    break
                if name in self.story.told or verb in ("slice_limit", "slice_freeze"):
                    await getattr(self, verb)(name, number)
                    await self.holds()
                for told in self.story.told.values():
                    if told.program is None or told.program.ended.is_set():
                        told.note()
                        await self.connect(nursery, told)
            for told in self.story.told.values():
                told.note()
                told.waits = None
            nursery.cancel_scope.cancel()
        if self.life.dead:
            raise Killed

    async def connect(self, nursery: trio.Nursery, told: Told) -> None:
        """Connect a program to this daemon."""
        process = self.story.machine.programs[told.name].identity
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        end = trio.socket.from_stdlib_socket(ours)
        program = (Older if told.name == NAMES[-1] else Gated)(self.story, process, end)  # type: ignore[arg-type]
        line = tenants.Line(trio.socket.from_stdlib_socket(theirs), process)
        session = Session(process, {0: self.gpu.managed}, line)

        nursery.start_soon(serve, session, theirs, program, self.life, self.story.pages)
        nursery.start_soon(program.run)
        program.context, program.drain_s = 0, told.drain_s
        await program.manage(told.resident, told.swapped)
        told.program = program

    # The steps

    def program(self, name: str) -> Gated:
        """Return a connected program."""
        found = self.story.told[name].program
        assert found is not None
        return found

    async def end(self, name: str, _: int) -> None:
        """Have the scheduler end a turn, unless the program is frozen."""
        told = self.story.told[name]
        if told.waits is None and not self.is_frozen(name):
            told.waits = await end_turn(self.h, self.program(name))
            spins = told.program is not None and told.program.drain_s
            gated = TurnEnd.LATE if spins else TurnEnd.DRAINED
            assert told.waits is (TurnEnd.UNGATED if name == NAMES[-1] else gated)

    async def begin(self, name: str, _: int) -> None:
        """Have the scheduler begin a turn."""
        await begin_turn(self.h, self.program(name))
        self.story.told[name].waits = None

    async def spin(self, name: str, number: int) -> None:
        """Make launches from now on endless, or short again."""
        if self.story.told[name].waits is None:
            self.program(name).drain_s = SPIN_S * (number % 2)

    async def limit(self, name: str, number: int) -> None:
        await self.write(self.program(name).file + "gmem.limit.high", number, [name])

    async def low(self, name: str, number: int) -> None:
        await self.write(self.program(name).file + "gmem.limit.low", number, ())

    async def swap_max(self, name: str, number: int) -> None:
        await self.write(self.program(name).file + "gmem.swap.max", number, ())

    async def slice_limit(self, _: str, number: int) -> None:
        if self.job is not None:
            await self.write("slice/job/0/gmem.limit.high", number, self.below(self.job))

    async def reclaim(self, name: str, number: int) -> None:
        nbytes = GIB * (1 + number % 2)
        able = self.gives(name) and self.program(name).resident >= nbytes
        code = await answers(self.h.write(self.program(name).file + "gmem.reclaim", nbytes))
        assert code in ({0} if able else REFUSED), (name, nbytes, code)

    async def write(self, path: str, number: int, below: Sequence[str]) -> None:
        """Write a limit for these programs, in GiB; none for more than a program has. It may be refused only where one
        of them keeps its memory."""
        code = await answers(self.h.write(path, "max" if number * GIB > MOST_BYTES else number * GIB))
        assert code in ({0} if all(map(self.gives, below)) else REFUSED), (path, number, code)

    async def alloc(self, name: str, number: int) -> None:
        program, nbytes = self.program(name), GIB * (1 + number % 2)
        if program.resident + program.swapped + nbytes <= MOST_BYTES:
            levels = self.h.controller.population.path(self.member(name))
            fits = all(nbytes <= self.h.ledger.books(level).high for level in levels)
            able = fits and all(self.gives(one) for level in levels[:-1] for one in self.below(level))
            assert await program.alloc(nbytes) in ({0} if able else {0, errno.ENOMEM}), (name, nbytes)

    async def freeze(self, name: str, number: int) -> None:
        await self.h.write(self.program(name).file + "compute.freeze", number % 2)

    async def slice_freeze(self, _: str, number: int) -> None:
        if self.job is not None:
            await self.h.write("slice/job/0/compute.freeze", number % 2)

    async def migrate(self, name: str, _: int) -> None:
        """Move a program, which stands by and stays busy. The driver moves no program without memory on the GPU."""
        told = self.story.told[name]
        if not self.program(name).resident:
            return
        assert await self.h.refused(self.program(name).file + "compute.migrate", 1) == errno.EBUSY
        told.waits = None
        program = self.program(name)
        with trio.fail_after(10):
            await program.ended.wait()

    async def move(self, *words: Any) -> None:
        """Stand in for the agent, as the daemon sees it: the program must run and be able to launch."""
        process, standby = words[0], words[-1]
        assert isinstance(standby, Standby)
        (name,) = [name for name in self.story.told if self.program(name).process == process]
        assert without(self.story.machine.programs[name]) == (False, False)
        await standby.begin()
        assert not self.program(name).is_closed
        standby.over.set()
        raise OSError(errno.EBUSY, "it does not come to a rest")

    async def kill(self, name: str, _: int) -> None:
        """Kill a program."""
        process = self.program(name).process
        self.program(name).socket.close()
        del self.story.told[name]
        self.story.machine.end(name)
        await self.h.gone(process)

    async def wait(self, _: str, number: int) -> None:
        await trio.sleep(number)

    # Invariants

    def member(self, name: str) -> Member:
        """Return the group of a program."""
        return Member(self.story.machine.programs[name].identity, 0)

    @property
    def job(self) -> SliceOn | None:
        """Return the slice, while any program is in it."""
        slice_ = SliceOn(Slice("/job"), 0)
        return slice_ if self.h.controller.population.holds(slice_) else None

    def below(self, level: Group) -> Sequence[str]:
        """Return the programs of a group."""
        return [name for name in self.story.told if level in self.h.controller.population.path(self.member(name))]

    def is_frozen(self, name: str) -> bool:
        """Return whether a program, or its slice, is to be frozen."""
        path = self.h.controller.population.path(self.member(name))
        return any(self.h.ledger.books(level).frozen for level in path)

    def gives(self, name: str) -> bool:
        """Return whether all memory of a program moves: nothing holds it, and gmem.swap.max allows it."""
        holds = self.is_frozen(name) or self.story.told[name].waits in (TurnEnd.LATE, TurnEnd.UNGATED)
        return not holds and self.h.ledger.books(self.member(name)).swap_max == MAX

    async def holds(self) -> None:
        """Check all invariants, once everything has settled."""
        await trio.sleep(SETTLED_S)
        for name, told in self.story.told.items():
            self.has_its_engines(name, told)
            self.is_booked(name, told)
        levels: list[Group] = [self.member(name) for name in self.story.told]
        levels += [level for level in (self.job, SliceOn(ROOT, 0)) if level is not None]
        for level in levels:
            self.is_limited(level)

    def has_its_engines(self, name: str, told: Told) -> None:
        """Check that a program is off the runlist for a reason, with exactly the engines that its reasons take, and
        that its gate agrees with its turn."""
        group, follower = self.member(name), self.h.controller._follower
        compute = self.h.controller.population.record(group).compute
        reasons = Reason(0)
        if self.is_frozen(name):
            reasons |= Reason.FREEZE
        if told.waits is not None:
            reasons |= Reason.TURN
        assert compute.applied == follower.wanted(group), name
        assert compute.applied.off.reasons == compute.noted.reasons == reasons, name
        assert (compute.doubtful, compute.inherited, compute.turn_end) == (False, False, told.waits), name
        assert without(self.story.machine.programs[name]) == OFF[compute.applied.engines], name
        if told.waits in (TurnEnd.DRAINED, TurnEnd.LATE) and not self.is_frozen(name):
            assert compute.applied.engines is Engines.GR
        if told.program is not None and not told.program.ended.is_set():
            assert told.program.is_closed == (told.waits in (TurnEnd.DRAINED, TurnEnd.LATE)), name

    def is_booked(self, name: str, told: Told) -> None:
        """Check that the books have what the program has."""
        if told.program is not None and not told.program.ended.is_set():
            books = self.h.ledger.books(self.member(name))
            assert (books.current, books.swap) == (told.program.resident, told.program.swapped), name

    def is_limited(self, level: Group) -> None:
        """Check that a group is within its limit, unless the excess cannot move."""
        books = self.h.ledger.books(level)
        below = self.below(level)
        if all(map(self.gives, below)):
            assert books.current <= books.high, (level, [self.story.told[name] for name in below])


WHO, NUMBER = st.sampled_from(NAMES), st.integers(1, 16)


class Turns(RuleBasedStateMachine):
    """The state machine; see the module."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Sequence[str] = ()
        self.steps: list[Step] = []

    @initialize(count=st.integers(1, len(NAMES)))
    def begin(self, count: int) -> None:
        """Start `count` programs; the one without a gate is always among them."""
        self.names = NAMES[-count:] if count < len(NAMES) else NAMES

    @rule(who=WHO, verb=st.sampled_from(["end", "end", "begin"]))
    def turn(self, who: str, verb: str) -> None:
        self.steps.append((verb, who, 0))

    @rule(who=WHO, verb=st.sampled_from(["limit", "low", "slice_limit", "swap_max", "reclaim", "alloc"]), number=NUMBER)
    def memory(self, who: str, verb: str, number: int) -> None:
        self.steps.append((verb, who, number))

    @rule(who=WHO, verb=st.sampled_from(["freeze", "slice_freeze", "spin", "wait"]), number=NUMBER)
    def compute(self, who: str, verb: str, number: int) -> None:
        self.steps.append((verb, who, number))

    @rule(who=WHO, verb=st.sampled_from(["migrate", "kill", "upgrade", "kill_daemon"]))
    def upheaval(self, who: str, verb: str) -> None:
        self.steps.append((verb, who, 0))

    def teardown(self) -> None:
        """Tell the story."""
        if self.names:
            tell(self.names, self.steps)


def tell(names: Sequence[str], steps: Sequence[Step]) -> None:
    """Tell a story to its end, when every program runs and has all of its own memory."""
    with sleepers() as spawn, a_machine(spawn, wide=True) as machine:
        machine.scheduler = False
        story = Story(machine, list(steps))
        story.begin(names)
        while story.goes_on:
            story.live()
        for name in story.told:
            assert without(machine.programs[name]) == (False, False)


UNGATED = pytest.mark.logs("older than this daemon and lacks turns, .* without its copy engines, and none of")
"""Log line about the program without a gate."""

TestTurns = UNGATED(Turns.TestCase)
STORIES = int(os.environ.get("GGROUP_TURN_STORIES", "8"))
"""Number of random stories."""

TestTurns.settings = settings(
    max_examples=STORIES, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


@UNGATED
def test_each_kind_of_step_beside_a_turn() -> None:
    """One step of every kind, with one program that waits drained, one that waits late and one without a gate."""
    steps: list[Step] = [("spin", "b", 1), *(("end", name, 0) for name in NAMES)]
    for verb in ("limit", "low", "reclaim", "alloc", "spin", "freeze"):
        steps += [(verb, name, number) for number in (3, 16) for name in NAMES]
    steps += [("slice_limit", "a", 5), ("slice_freeze", "a", 1), ("slice_freeze", "a", 2)]
    steps += [("upgrade", "a", 0), ("spin", "b", 2), *(("end", name, 0) for name in NAMES), ("kill_daemon", "a", 0)]
    steps += [("end", "a", 0), ("migrate", "a", 0), ("end", "a", 0), ("kill", "a", 0), ("slice_limit", "a", 16)]
    tell(NAMES, steps)
