"""Moves of programs between GPUs, without a GPU: the state machine on a strict driver that fails wherever it can."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import pytest
import trio
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import backend.core.hostroom as hostroom
from backend.nvidia import checkpoint
from backend.nvidia.checkpoint import CheckpointError, host_room, left
from backend.nvidia.checkpoint.agent import LANDED
from backend.nvidia.checkpoint.journal import VARIABLE, Journal
from backend.nvidia.checkpoint.machine import TRIES, Machine
from backend.nvidia.checkpoint.pinned import Pinned
from backend.nvidia.checkpoint.records import Action, Outcome, Progress, Request, State, Step, read_answer
from backend.process.identity import Process, Slice, identify
from tests.support.cgroups import cgroup, enter, frozen
from tests.support.strategies import history

GIB = 1 << 30
ONE, TWO, THREE, OTHER = "GPU-1", "GPU-2", "GPU-3", "GPU-4"
PID = 4242
PROGRAM = Process(PID, 1)
BYTES = 5 * GIB
CONTEXT = GIB // 2
CAPACITY = 16 * GIB


class Killed(BaseException):
    """The agent was killed: none of its code runs any more."""


@attrs.frozen
class Fault:
    """The effect of one call instead of the proper one."""

    code: int
    """Errno of the call; 0 if the agent is killed."""
    late: bool = False
    """Whether the call fails only after it has done its work."""


@attrs.define
class World:
    """A strict driver with one program, and neighbours that take memory."""

    used: dict[str, int] = attrs.field(factory=lambda: dict.fromkeys((ONE, TWO, THREE, OTHER), 0))
    """Memory that neighbours have."""
    state: State = State.RUNNING
    """State of the program."""
    place: str = ONE
    """GPU of the program, or its last GPU before its checkpoint."""
    there: bool = True
    """Whether the program lives."""
    busy: bool = False
    """Whether it never reaches a point where it can be locked."""

    def free(self, gpu: str, reserved: int = 0) -> int:
        """Return the bytes that no process has."""
        own = BYTES if self.place == gpu and self.state in (State.RUNNING, State.LOCKED) else 0
        return CAPACITY - self.used[gpu] - own - reserved


@attrs.define
class Strict:
    """The driver as one agent sees it."""

    world: World
    """State that all agents share."""
    faults: dict[tuple[str, int], Fault] = attrs.field(factory=dict)
    """Faults by name and number of the call; the first is 1."""
    calls: list[str] = attrs.field(factory=list)
    """Every call."""
    reserved: dict[int, tuple[str, int]] = attrs.field(factory=dict)
    """Its reservations."""
    contexts: set[str] = attrs.field(factory=set)
    """GPUs on which it has a context."""
    meanwhile: dict[tuple[str, int], Callable[[], None]] = attrs.field(factory=dict)
    """Acts of other programs right after a call."""

    def _do(self, name: str, effect: Callable[[], object], pid: int | None = None) -> object:
        self.calls.append(name)
        assert pid in (None, PID)
        assert self.world.there or pid is None, "a pid that is somebody else's by now"
        key = name, self.calls.count(name)
        fault = self.faults.get(key)
        if fault is not None and not fault.late:
            self._fail(name, fault)
        result = effect()
        self.meanwhile.get(key, lambda: None)()
        if fault is not None:
            self._fail(name, fault)
        return result

    def _fail(self, name: str, fault: Fault) -> None:
        if not fault.code:
            raise Killed
        raise OSError(fault.code, f"{name} fails")

    def _hold(self, gpu: str) -> int:
        return sum(n for at, n in self.reserved.values() if at == gpu) + CONTEXT * (gpu in self.contexts)

    def _need(self, *states: State) -> None:
        if self.world.state not in states:
            raise OSError(errno.EBUSY, "ILLEGAL_STATE")

    def open(self) -> None:
        self._do("open", lambda: None)

    def gpus(self) -> Sequence[str]:
        return [ONE, TWO, THREE, OTHER]

    def model(self, gpu: str) -> str:
        return "another" if gpu == OTHER else "one"

    def prepare(self, gpu: str) -> None:
        def effect() -> None:
            if self.contexts:
                return
            if self.world.free(gpu, self._hold(gpu)) < CONTEXT:
                raise OSError(errno.ENOSPC, "no room for a context")
            self.contexts.add(gpu)

        self._do("prepare", effect)

    def reserve(self, gpu: str, nbytes: int) -> int:
        def effect() -> int:
            if not self.contexts:
                self.prepare(gpu)
            if self.world.free(gpu, self._hold(gpu)) < nbytes:
                raise OSError(errno.ENOSPC, "OUT_OF_MEMORY")
            number = max(self.reserved, default=0) + 1
            self.reserved[number] = gpu, nbytes
            return number

        number = self._do("reserve", effect)
        assert isinstance(number, int)
        return number

    def release(self, reservation: int) -> None:
        self._do("release", lambda: self.reserved.pop(reservation))

    def state(self, pid: int) -> State:
        self._do("state", lambda: None, pid)
        return self.world.state

    def lock(self, pid: int, ms: int) -> None:
        def effect() -> None:
            self._need(State.RUNNING)
            if self.world.busy:
                raise OSError(errno.ETIMEDOUT, "NOT_READY")
            self.world.state = State.LOCKED

        self._do("lock", effect, pid)

    def checkpoint(self, pid: int) -> None:
        def effect() -> None:
            self._need(State.LOCKED)
            self.world.state = State.CHECKPOINTED

        self._do("checkpoint", effect, pid)

    def restore(self, pid: int, places: Sequence[tuple[str, str]]) -> None:
        def effect() -> None:
            self._need(State.CHECKPOINTED)
            if places:
                assert sorted(old for old, _ in places) == sorted(new for _, new in places) == sorted(self.gpus())
            place = dict(places).get(self.world.place, self.world.place)
            if self.world.free(place, self._hold(place)) < BYTES:
                self.world.state = State.FAILED
                raise OSError(errno.EIO, "it is lost")
            self.world.place = place
            self.world.state = State.LOCKED

        self._do("restore", effect, pid)

    def unlock(self, pid: int) -> None:
        def effect() -> None:
            self._need(State.LOCKED)
            self.world.state = State.RUNNING

        self._do("unlock", effect, pid)


@attrs.define
class Ran:
    """One run of an agent."""

    world: World
    request: Request
    place: str
    driver: Strict = attrs.field(init=False)
    steps: list[Progress] = attrs.field(factory=list)
    paused: float = 0.0
    ready: Callable[[], None] = lambda: None
    stands: Callable[[], bool] = lambda: True

    def go(self, **words: object) -> Outcome | None:
        """Run the agent; return its outcome, or None if it was killed. Its reservations are gone afterwards."""
        self.driver = Strict(self.world, **words)  # type: ignore[arg-type]
        times = itertools.count()
        ours = (self._check, self._report, lambda: float(next(times)), self._pause, self.ready, self.stands)
        machine = Machine(self.driver, *ours)
        try:
            outcome = machine.run(self.request, self.place)
        except Killed:
            return None
        # A reservation that the driver made and reports as failed, or the other way round, ends with the agent.
        assert not self.driver.reserved or {name for name, _ in self.driver.faults} & {"reserve", "release"}
        return outcome

    def _pause(self, seconds: float) -> None:
        self.paused += seconds

    def _check(self) -> None:
        if not self.world.there:
            raise ProcessLookupError(errno.ESRCH, "gone")

    def _report(self, progress: Progress) -> None:
        self.steps.append(progress)
        if progress.ms is None and progress.step in LANDED:  # as the journal has it
            self.place = self.request.destination if LANDED[progress.step] else self.request.source


def ask(action: Action, source: str = ONE, target: str = "") -> Request:
    """Return a request with everything that it needs."""
    return Request(action, PROGRAM, source, target, BYTES, 1000)


def move(world: World, **words: object) -> Outcome | None:
    """Move the program from ONE to TWO."""
    return Ran(world, ask(Action.MOVE, ONE, TWO), ONE).go(**words)


# Moves


def test_a_move_takes_the_steps_in_order_and_says_so() -> None:
    world = World()
    run = Ran(world, ask(Action.MOVE, ONE, TWO), ONE)
    assert run.go() == Outcome(State.RUNNING, TWO)
    assert (world.state, world.place) == (State.RUNNING, TWO)
    began = [step.step.value for step in run.steps if step.ms is None]
    assert began == [
        *("open", "open", "state", "reserve", "lock", "checkpoint", "keep", "release", "restore", "unlock", "release")
    ]
    assert [step.step for step in run.steps if step.ms is None] == [step.step for step in run.steps if step.ms]
    assert not any(step.errno for step in run.steps)
    calls = run.driver.calls
    assert calls[:2] == ["open", "prepare"], "its context is no part of the stall"
    assert calls[2:] == [
        *("state", "reserve", "lock", "checkpoint", "reserve", "release", "restore", "unlock", "release")
    ], "what is freed where it was stays ours until it runs"


ASKS = attrs.evolve(ask(Action.MOVE, ONE, TWO), asks=True, carried=CONTEXT)
"""A program that prepares itself: the driver need not restore most of its memory."""


def test_whoever_asked_has_it_stand_by_at_the_last_moment() -> None:
    """Room is required for all of it, and as much as a restore takes is reserved for the way back."""
    world, reserved = World(), list[int]()
    run = Ran(world, ASKS, ONE)

    def ready() -> None:
        assert (world.state, run.driver.calls[-1]) == (State.RUNNING, "reserve")
        reserved.extend(nbytes for _, nbytes in run.driver.reserved.values())

    def stands() -> bool:
        assert world.state is State.LOCKED
        return True

    def kept() -> None:
        reserved.extend(nbytes for gpu, nbytes in run.driver.reserved.values() if gpu == ONE)

    run.ready, run.stands = ready, stands
    assert run.go(meanwhile={("restore", 1): kept}) == Outcome(State.RUNNING, TWO)
    assert reserved == [BYTES, CONTEXT]
    began = [step.step for step in run.steps if step.ms is None]
    assert began.index(Step.READY) == began.index(Step.LOCK) - 1


THAWS = attrs.evolve(ask(Action.SUSPEND), asks=True)
"""A program that is frozen until then."""


def test_one_that_is_frozen_runs_from_the_question_on_and_not_before() -> None:
    """By then the driver is open, which takes seconds; nothing has been requested of the program yet."""
    world = World(busy=True)
    run = Ran(world, THAWS, ONE)

    def ready() -> None:
        assert run.driver.calls == ["open"]
        world.busy = False

    run.ready = ready
    assert run.go() == Outcome(State.CHECKPOINTED, "")
    assert run.driver.calls == ["open", "state", "lock", "checkpoint"]


@pytest.mark.parametrize(("request_", "known"), [(ASKS, State.RUNNING), (THAWS, None)])
def test_one_that_is_not_to_be_acted_on_after_all_is_not_locked(request_: Request, known: State | None) -> None:
    def ready() -> None:
        raise OSError(errno.ECANCELED, "it does not come to a rest")

    world = World()
    run = Ran(world, request_, ONE, ready=ready)
    outcome = run.go()
    assert outcome is not None
    assert (outcome.errno, outcome.step, outcome.state) == (errno.ECANCELED, Step.READY, known)
    assert "lock" not in run.driver.calls


def nobody_knows() -> bool:
    raise OSError(errno.EBADF, "its page cannot be read")


@pytest.mark.parametrize("stands", [lambda: False, nobody_knows])
def test_one_that_does_not_stand_by_any_more_is_let_go(stands: Callable[[], bool]) -> None:
    """The agent that made it prepare may have died: the program has begun to take its memory back, and would be
    lost.
    """
    world = World()
    run = Ran(world, ASKS, ONE, stands=stands)
    outcome = run.go()
    assert outcome is not None
    assert (outcome.errno, outcome.step, outcome.state) == (errno.EBUSY, Step.READY, State.RUNNING)
    assert (world.state, world.place) == (State.RUNNING, ONE)
    assert "checkpoint" not in run.driver.calls


def count(request: Request, world: World) -> Counter[str]:
    """Return how often an action makes each call when all goes well."""
    run = Ran(world, request, "")
    outcome = run.go()
    assert outcome is not None
    assert outcome.errno == 0
    return Counter(run.driver.calls)


def every(request: Request, world: Callable[[], World]) -> list[tuple[str, int]]:
    """Return each call of an action."""
    return [(name, n) for name, times in count(request, world()).items() for n in range(1, times + 1)]


STARTS: dict[Action, Callable[[], World]] = {
    Action.MOVE: World,
    Action.SUSPEND: World,
    Action.RESUME: lambda: World(state=State.CHECKPOINTED),
    Action.RECOVER: lambda: World(state=State.CHECKPOINTED),
}
OF = {action: ask(action, ONE, TWO if action is Action.MOVE else "") for action in STARTS}
EVERY = [(action, *call) for action in STARTS for call in every(OF[action], STARTS[action])]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("code", [errno.EIO, errno.EBUSY, errno.ETIMEDOUT, errno.EOPNOTSUPP, errno.ENOMEM])
@pytest.mark.parametrize(("action", "name", "n"), EVERY)
def test_whatever_call_fails_the_program_is_whole(action: Action, name: str, n: int, code: int, late: bool) -> None:
    world = STARTS[action]()
    run = Ran(world, OF[action], "" if action in (Action.RESUME, Action.RECOVER) else ONE)
    outcome = run.go(faults={(name, n): Fault(code, late)})
    assert outcome is not None
    assert world.state is not State.FAILED
    # Errors that the driver reports late mean something else than these codes say.
    somebody_elses = name == "lock" and late and code == errno.EBUSY
    if outcome.state is not None:
        assert outcome.state is world.state
    if outcome.place:
        assert outcome.place == world.place
    if outcome.errno == 0:
        assert action is not Action.SUSPEND or world.state is State.CHECKPOINTED
        assert action is Action.SUSPEND or (world.state, outcome.place) == (State.RUNNING, OF[action].destination)
        return
    assert outcome.errno == code
    assert outcome.step is not None
    assert name in outcome.words
    if somebody_elses:
        assert world.state is State.LOCKED
    elif action in (Action.RESUME, Action.RECOVER):
        assert world.state in (State.RUNNING, State.CHECKPOINTED)
    else:
        assert world.state is State.RUNNING
        assert world.place == (TWO if name == "restore" and late else ONE)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("action", "name", "n"), EVERY)
def test_whenever_the_agent_is_killed_another_makes_the_program_run(
    action: Action, name: str, n: int, late: bool
) -> None:
    world = STARTS[action]()
    run = Ran(world, OF[action], "" if action is Action.RESUME else ONE)
    assert run.go(faults={(name, n): Fault(0, late)}) is None
    second = Ran(world, attrs.evolve(run.request, action=Action.RECOVER), run.place)
    outcome = second.go()
    assert outcome is not None
    assert (outcome.errno, outcome.state, world.state) == (0, State.RUNNING, State.RUNNING)
    assert outcome.place == world.place
    restored = name in ("restore", "unlock", "release") and (name, n, late) not in {
        ("restore", 1, False),
        ("release", 1, False),
        ("release", 1, True),
    }
    assert world.place == (TWO if action is Action.MOVE and restored else ONE)


def test_a_fault_that_is_no_fault() -> None:
    """The test above can fail: a machine that restores without room loses the program."""
    world = World()
    neighbour = {("release", 1): lambda: world.used.update({TWO: CAPACITY - CONTEXT})}
    outcome = move(world, meanwhile=neighbour)
    assert outcome is not None
    assert (outcome.state, world.state) == (State.FAILED, State.FAILED), "the race that is left"
    assert outcome.errno == errno.EIO


# Refusals, with nothing done


def untouched(world: World, run: Ran, code: int, *words: str) -> None:
    """Check that the action was refused before the program was affected."""
    before = attrs.asdict(world)
    outcome = run.go()
    assert outcome is not None
    assert outcome.errno == code
    for word in words:
        assert word in outcome.words
    assert attrs.asdict(world) == before
    assert not {"lock", "checkpoint", "restore", "unlock"} & set(run.driver.calls)


def test_no_room() -> None:
    world = World(used={ONE: 0, TWO: CAPACITY - CONTEXT - BYTES + 1, THREE: 0, OTHER: 0})
    untouched(world, Ran(world, ask(Action.MOVE, ONE, TWO), ONE), errno.ENOSPC, "OUT_OF_MEMORY")
    world.used[TWO] -= 1
    outcome = move(world)
    assert outcome == Outcome(State.RUNNING, TWO)


@pytest.mark.parametrize(
    ("source", "target", "code", "word"),
    [
        (ONE, OTHER, errno.EOPNOTSUPP, "another, one"),
        (ONE, "GPU-9", errno.ENODEV, "GPU-9"),
        ("", TWO, errno.ENODEV, "not named"),
        (ONE, ONE, errno.EINVAL, "where it is"),
    ],
)
def test_nowhere_to_go(source: str, target: str, code: int, word: str) -> None:
    untouched(world := World(), Ran(world, ask(Action.MOVE, source, target), source), code, word)


@pytest.mark.parametrize("action", [Action.MOVE, Action.SUSPEND, Action.RESUME])
def test_a_program_in_another_state_is_left_alone(action: Action) -> None:
    for state in State:
        if state is (State.CHECKPOINTED if action is Action.RESUME else State.RUNNING):
            continue
        world = World(state=state)
        code = errno.EIO if state is State.FAILED else errno.EBUSY
        untouched(world, Ran(world, ask(action, ONE, TWO), ONE), code, state.name.lower())


def test_room_that_nobody_knows() -> None:
    """A reservation of nothing does not count: no program leaves or comes back because of it."""
    for action, start in STARTS.items():
        world = start()
        run = Ran(world, attrs.evolve(OF[action], room=0), ONE)
        untouched(world, run, errno.EINVAL, "how much room")
    locked = World(state=State.LOCKED)
    assert Ran(locked, attrs.evolve(ask(Action.RECOVER), room=0), ONE).go() == Outcome(State.RUNNING, ONE)


def test_recover_does_what_there_is_to_do() -> None:
    for state, calls in {State.RUNNING: [], State.LOCKED: ["unlock"], State.FAILED: []}.items():
        world = World(state=state)
        run = Ran(world, ask(Action.RECOVER), ONE)
        outcome = run.go()
        assert outcome is not None
        assert [call for call in run.driver.calls if call not in ("open", "state")] == calls
        assert outcome.errno == (errno.EIO if state is State.FAILED else 0)
        assert world.state is (State.FAILED if state is State.FAILED else State.RUNNING)


def test_the_lock_has_a_deadline() -> None:
    world = World(busy=True)
    outcome = move(world)
    assert outcome is not None
    assert (outcome.errno, outcome.step, outcome.place) == (errno.ETIMEDOUT, Step.LOCK, ONE)
    assert world == World(busy=True)


def test_who_is_locked_by_somebody_else_meanwhile_stays_so() -> None:
    world = World()

    def other() -> None:
        world.state = State.LOCKED

    run = Ran(world, ask(Action.MOVE, ONE, TWO), ONE)
    outcome = run.go(meanwhile={("reserve", 1): other})
    assert outcome is not None
    assert (outcome.errno, outcome.state, world.state) == (errno.EBUSY, None, State.LOCKED)
    assert "unlock" not in run.driver.calls


# The way back


def test_the_way_back_stays_open() -> None:
    """A neighbour takes all free memory of the source as soon as the program is off it, except the reservation."""
    world = World()
    greedy = {("reserve", 2): lambda: world.used.update({ONE: CAPACITY - BYTES - CONTEXT})}
    outcome = move(world, faults={("restore", 1): Fault(errno.EIO)}, meanwhile=greedy)
    assert outcome is not None
    assert (outcome.errno, outcome.step) == (errno.EIO, Step.RESTORE)
    assert (world.state, world.place) == (State.RUNNING, ONE)


def test_where_the_way_back_is_closed_it_goes_on() -> None:
    """No room is left on the source, not even for a reservation: the program goes to the target, or waits in the
    host.
    """
    for full in (False, True):
        world = World(used={ONE: CAPACITY - BYTES, TWO: 0, THREE: 0, OTHER: 0})

        def fill(world: World = world, full: bool = full) -> None:
            world.used[ONE] = CAPACITY
            if full:
                world.used[TWO] = CAPACITY - CONTEXT

        faults = {("restore", 1): Fault(errno.EIO), ("reserve", 2): Fault(errno.ENOSPC)}
        outcome = move(world, faults=faults, meanwhile={("release", 1): fill})
        assert outcome is not None
        assert (outcome.errno, outcome.step) == (errno.EIO, Step.RESTORE)
        if not full:
            assert (world.state, outcome.place, world.place) == (State.RUNNING, TWO, TWO)
            continue
        assert (outcome.state, outcome.place, world.state) == (State.CHECKPOINTED, "", State.CHECKPOINTED)
        assert "then reserve: " in outcome.words
        again = Ran(world, ask(Action.RECOVER, ONE, TWO), "").go()
        assert again is not None
        assert (again.errno, world.state) == (errno.ENOSPC, State.CHECKPOINTED), "never without room"
        world.used[ONE] = CAPACITY - BYTES - CONTEXT
        assert Ran(world, ask(Action.RECOVER, ONE, TWO), "").go() == Outcome(State.RUNNING, ONE)


def test_a_source_without_room_for_a_context_is_no_obstacle() -> None:
    """None is made there, where the program's own would have to go; the room that the program leaves is reserved
    anyway.
    """
    world = World(used={ONE: CAPACITY - BYTES, TWO: 0, THREE: 0, OTHER: 0})
    run = Ran(world, ask(Action.MOVE, ONE, TWO), ONE)
    assert run.go() == Outcome(State.RUNNING, TWO)
    assert run.driver.calls.count("reserve") == 2
    assert run.driver.contexts == {TWO}


def test_an_unlock_is_tried_again_and_not_for_ever() -> None:
    faults = {("unlock", n): Fault(errno.EIO) for n in range(1, TRIES)}
    world = World()
    run = Ran(world, ask(Action.MOVE, ONE, TWO), ONE)
    assert run.go(faults=faults) == Outcome(State.RUNNING, TWO)
    assert 0.2 < run.paused < 0.4
    world = World()
    outcome = move(world, faults=faults | {("unlock", TRIES): Fault(errno.EIO)})
    assert outcome is not None
    assert (outcome.errno, outcome.step, outcome.state, outcome.place) == (errno.EIO, Step.UNLOCK, State.LOCKED, TWO)


@pytest.mark.parametrize("name", ["state", "reserve", "lock", "checkpoint", "restore", "unlock"])
def test_a_program_that_ends_is_let_go(name: str) -> None:
    """Its pid is not acted on any more, since it may be another process's."""
    world = World()

    def end() -> None:
        world.there = False

    run = Ran(world, ask(Action.MOVE, ONE, TWO), ONE)
    outcome = run.go(meanwhile={(name, 1): end}, faults={(name, 1): Fault(errno.EIO, late=True)})
    assert outcome is not None
    before = name in ("state", "reserve")
    assert (outcome.errno, outcome.step is not None) == (errno.EIO if before else errno.ESRCH, True)
    assert not outcome.place or before
    assert run.driver.calls.count("unlock") == (name == "unlock")


# Everything, in any order

names = st.sampled_from(("open", "prepare", "reserve", "release", "state", "lock", "checkpoint", "restore", "unlock"))
faults = st.dictionaries(
    st.tuples(names, st.integers(1, 3)),
    st.builds(Fault, st.sampled_from((0, errno.EIO, errno.ENOMEM, errno.ETIMEDOUT)), st.booleans()),
    max_size=3,
)
gpus = st.sampled_from((ONE, TWO, THREE))


class Histories(RuleBasedStateMachine):
    """Actions on one program, with faults, deaths of agents, and neighbours that come and go between them."""

    @initialize(used=st.lists(st.integers(0, 16), min_size=3, max_size=3))
    def begin(self, used: list[int]) -> None:
        amounts = dict(zip((ONE, TWO, THREE), (GIB * n for n in used), strict=True))
        amounts[ONE] = min(amounts[ONE], CAPACITY - BYTES)
        self.world = World(used=amounts | {OTHER: 0})
        self.left: Ran | None = None
        """The last agent, unless it left the program running."""

    def act(self, request: Request, place: str, faults: dict[tuple[str, int], Fault]) -> None:
        before = self.world.state
        run = Ran(self.world, request, place)
        outcome = run.go(faults=faults)
        if outcome is not None:
            if outcome.state is not None:
                assert outcome.state is self.world.state
            if outcome.place:
                assert (outcome.place, outcome.state) == (self.world.place, self.world.state)
            if outcome.errno == 0:
                suspended = request.action is Action.SUSPEND
                assert self.world.state is (State.CHECKPOINTED if suspended else State.RUNNING)
                if request.action in (Action.MOVE, Action.RESUME):
                    assert self.world.place == request.destination
            else:
                assert outcome.step is not None
            if before is State.RUNNING and outcome.step is not Step.UNLOCK and outcome.errno:
                waits = self.world.state is State.CHECKPOINTED
                assert (
                    not waits
                    or {name for name, _ in faults} & {"reserve", "release", "restore", "prepare"}
                    or (self.no_room())
                ), "it could have been brought back"
        self.left = None if self.world.state is State.RUNNING else run

    def no_room(self) -> bool:
        return self.world.free(self.world.place) < BYTES + CONTEXT

    @rule(to=gpus, faults=faults)
    def move(self, to: str, faults: dict[tuple[str, int], Fault]) -> None:
        if self.left is None:
            self.act(ask(Action.MOVE, self.world.place, to), self.world.place, faults)

    @rule(faults=faults)
    def suspend(self, faults: dict[tuple[str, int], Fault]) -> None:
        if self.left is None:
            self.act(ask(Action.SUSPEND, self.world.place), self.world.place, faults)

    @rule(to=st.sampled_from((ONE, TWO, THREE, "")), faults=faults)
    def resume(self, to: str, faults: dict[tuple[str, int], Fault]) -> None:
        if self.world.state is State.CHECKPOINTED:
            self.act(ask(Action.RESUME, self.world.place, to), "", faults)

    @rule(faults=faults)
    def recover(self, faults: dict[tuple[str, int], Fault]) -> None:
        if self.left is not None:
            self.act(attrs.evolve(self.left.request, action=Action.RECOVER), self.left.place, faults)

    @rule()
    def recover_well(self) -> None:
        """Without faults the program runs again, if any GPU that it may go to has room."""
        if self.left is None:
            return
        source = self.world.place
        self.act(attrs.evolve(self.left.request, action=Action.RECOVER), self.left.place, {})
        assert self.world.state is State.RUNNING or self.world.free(source) < BYTES + CONTEXT

    @rule(gpu=gpus, gib=st.integers(0, 16))
    def neighbour(self, gpu: str, gib: int) -> None:
        own = BYTES if self.world.place == gpu and self.world.state in (State.RUNNING, State.LOCKED) else 0
        self.world.used[gpu] = min(gib * GIB, CAPACITY - own)

    @invariant()
    def it_lives(self) -> None:
        assert not hasattr(self, "world") or self.world.state is not State.FAILED


HistoriesTest = Histories.TestCase
HistoriesTest.settings = history(300)


# Messages between agent and daemon


def test_lines_say_what_they_were_made_of() -> None:
    request = Request(Action.MOVE, Process(7, 9), "a", "b", 1 << 40, 1500)
    assert Request.read(request.line()) == request
    for answer in (
        Progress(Step.LOCK, 1.5),
        Progress(Step.RESTORE, 2.5, 7.25, errno.EIO, "words"),
        Outcome(None, "", errno.EIO, None, "died"),
        Outcome(State.LOCKED, "GPU-1", errno.EIO, Step.UNLOCK, "x"),
        Outcome(State.RUNNING, "GPU-1"),
    ):
        assert answer.line().count(b"\n") == 1
        assert read_answer(answer.line()) == answer
    for nonsense in (b"", b"[]", b"{}", b'{"outcome": 1}', b'{"progress": {"step": "x"}}', b'{"action": "move"}'):
        with pytest.raises(ValueError, match=r"no |Expecting|not a valid"):
            read_answer(nonsense)
        with pytest.raises(ValueError, match=r"no |Expecting|not a valid"):
            Request.read(nonsense)
    for number in (-1, 512, 2**31, 5.0, True, "EIO", None):
        for one in (Progress(Step.LOCK, 1.5), Outcome(None, "")):
            with pytest.raises(ValueError, match="is no errno"):
                read_answer(attrs.evolve(one, errno=number).line())


@pytest.mark.logs("the agent says b'.*: no answer: -600 is no errno", "is looked after", "the agent ended with")
def test_an_agent_that_talks_nonsense_is_followed_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is treated as dead: once it has ended, another agent inspects the program."""
    (tmp_path / "first").touch()
    agent = tmp_path / "agent"
    bad, good = Outcome(State.RUNNING, "", -600, Step.LOCK, "x"), Outcome(State.RUNNING, "GPU-1")
    agent.write_text(
        f"#!/bin/sh\nread request\n"
        f"if rm {tmp_path}/first 2>/dev/null; then printf '%s' '{bad.line().decode()}'; exit 3; fi\n"
        f"printf '%s' '{good.line().decode()}'\n"
    )
    agent.chmod(0o755)
    monkeypatch.setattr(sys, "executable", os.fspath(agent))
    with pytest.raises(CheckpointError, match="the agent ended with status 3") as raised:
        trio.run(checkpoint.move, Process(7, 9), "GPU-1", "GPU-2", 1, 1.0)
    assert raised.value.errno == errno.EIO
    assert raised.value.state is State.RUNNING
    assert not (tmp_path / "first").exists()


# The journal


@pytest.fixture
def journals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory of journals."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "checkpoints"))
    return tmp_path / "checkpoints"


def test_one_agent_a_program(journals: Path) -> None:
    process = identify(os.getpid())
    request = Request(Action.MOVE, process, ONE, TWO, BYTES)
    journal = Journal(process, wait=False)
    assert left() == [], "nothing has begun"
    journal.write(request, Step.RESERVE, ONE)
    with pytest.raises(BlockingIOError) as refused:
        Journal(process, wait=False)
    assert refused.value.errno == errno.EBUSY
    [entry] = left()
    assert (entry.request, entry.step, entry.place, entry.busy) == (request, Step.RESERVE, ONE, True)
    journal.write(request, Step.RESTORE, TWO)
    journal.close(keep=True)
    [entry] = left()
    assert (entry.step, entry.place, entry.busy) == (Step.RESTORE, TWO, False)
    again = Journal(process, wait=True)
    assert again.before == attrs.evolve(entry, busy=False)
    again.close(keep=False)
    assert left() == []
    assert not list(journals.iterdir())


def test_the_journal_of_a_dead_program_goes(journals: Path, spawn: Callable[..., subprocess.Popen[bytes]]) -> None:
    child = spawn()
    process = identify(child.pid)
    journal = Journal(process, wait=False)
    journal.write(Request(Action.SUSPEND, process, ONE), Step.LOCK, ONE)
    child.kill()
    child.wait()
    assert [entry.busy for entry in left()] == [True], "its agent will see to it"
    journal.close(keep=True)
    assert left() == []
    assert not list(journals.iterdir())


def test_who_waits_for_a_journal_that_was_removed_makes_another(journals: Path) -> None:
    process = identify(os.getpid())
    journal = Journal(process, wait=False)
    old = os.open(journals / f"{process.pid}.{process.start}", os.O_RDWR)
    journal.close(keep=False)
    fcntl.flock(old, fcntl.LOCK_EX)  # a lock on the removed file
    other = Journal(process, wait=False)
    other.write(Request(Action.SUSPEND, process, ONE), Step.LOCK, ONE)
    assert len(left()) == 1
    other.close(keep=False)
    os.close(old)


# Processes that are acted on


def test_a_later_bearer_of_a_pid_is_somebody_else(spawn: Callable[..., subprocess.Popen[bytes]]) -> None:
    child = spawn()
    process = identify(child.pid)
    with pytest.raises(ProcessLookupError):
        Pinned(Process(process.pid, process.start - 1))
    pinned = Pinned(process)
    pinned.check()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(ProcessLookupError):
        pinned.check()  # a zombie has ended
    pinned.close()


def test_who_is_stopped_or_frozen_is_not_locked(spawn: Callable[..., subprocess.Popen[bytes]]) -> None:
    child = spawn()
    pinned = Pinned(identify(child.pid))
    with cgroup() as path:
        enter(child.pid, path)
        pinned.responds()
        with frozen(path), pytest.raises(OSError, match="frozen"):
            pinned.responds()
        pinned.responds()
    child.send_signal(19)  # SIGSTOP
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    with pytest.raises(OSError, match="stopped"):
        pinned.responds()
    pinned.close()


# Room in the host


def test_host_room_is_what_the_tightest_level_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostroom, "cgroup_of", lambda pid: Slice("/a/b/c"))
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 64 kB\nMemFree: 8 kB\nMemAvailable: 50 kB\n")
    assert host_room(PROGRAM, tmp_path) == 50 * 1024, "no cgroups at all"
    levels = [tmp_path / "sys/fs/cgroup" / path for path in ("a", "a/b", "a/b/c")]
    levels[-1].mkdir(parents=True)

    def write(level: Path, current: int, high: str = "max", most: str = "max", given: int = 0) -> None:
        for name, text in (("current", current), ("high", high), ("max", most)):
            (level / f"memory.{name}").write_text(f"{text}\n")
        (level / "memory.stat").write_text(f"anon 5\nfile 7\ninactive_file {given}\nactive_file 9\n")

    for level in levels:
        write(level, 1000)
    assert host_room(PROGRAM, tmp_path) == 50 * 1024, "no limits"
    write(levels[0], 1000, most="9000")
    assert host_room(PROGRAM, tmp_path) == 8000
    write(levels[2], 1000, most="5000")
    assert host_room(PROGRAM, tmp_path) == 4000
    write(levels[1], 3000, high="6000", most="9000")
    assert host_room(PROGRAM, tmp_path) == 3000
    write(levels[1], 3000, high="6000", given=500)
    assert host_room(PROGRAM, tmp_path) == 3500, "page cache that nobody uses"
    write(levels[2], 7000, most="5000")
    assert host_room(PROGRAM, tmp_path) == 0, "over its limit already"
