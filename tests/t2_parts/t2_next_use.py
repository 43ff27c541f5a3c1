"""Classes of next use: the class of a process, and that hysteresis bounds how often it changes."""

from __future__ import annotations

import attrs
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.core.nextuse import GREW_LEAST, HOLD_S, IDLE_S, NEXT_USE_MOST, TURNS_NEAR, NextUse, Order, Outlook, Sight
from backend.process.identity import Process
from backend.scheduler.order import behind, leads
from backend.scheduler.shares import Contender, Level

SETTINGS = settings(print_blob=True, max_examples=300)
ONE, TWIN, OTHER, LAST = (Process(pid, 0) for pid in range(1, 5))


@attrs.frozen
class Step:
    """The acts of a process up to a look, and what its scheduler says of it then."""

    seconds: float
    """Seconds since the last look."""
    busy_usec: int
    """Microseconds on the engine meanwhile."""
    charged: int
    """Number of times that it gained or gave up GREW_LEAST."""
    turn: int | None
    """Its place among those that wait for their turns; None if it does not wait."""
    is_leading: bool
    """Whether it goes before others."""


steps = st.builds(
    Step,
    st.one_of(st.floats(0.05, 2.0), st.floats(2.0, 700.0)),
    st.sampled_from((0, 0, 0, 0, 5)),
    st.sampled_from((0, 0, 0, 0, 1, -1)),
    st.one_of(st.none(), st.none(), st.integers(0, 3)),
    st.sampled_from((False, False, False, True)),
)


class Watched:
    """A process, among others that take turns."""

    def __init__(self) -> None:
        self.now, self.busy_usec = 100.0, 0
        self.sight = Sight(100 * GREW_LEAST, self.busy_usec)
        self.outlook = Outlook()
        self.outlook.see(self.now, {ONE: self.sight})
        self.next_use = self.outlook.judge(self.now)[ONE]

    def step(self, step: Step) -> NextUse:
        """Return the class of the process after a step."""
        self.now += step.seconds
        self.busy_usec += step.busy_usec
        self.sight = Sight(self.sight.charged + step.charged * GREW_LEAST, self.busy_usec)
        self.outlook.see(self.now, {ONE: self.sight})
        turns = () if step.turn is None else (*(Process(100 + n, 0) for n in range(step.turn)), ONE)
        leads = {ONE} if step.is_leading else set()
        self.next_use = self.outlook.judge(self.now, Order(turns, leads))[ONE]
        return self.next_use


@SETTINGS
@given(st.lists(steps, max_size=30))
def test_a_class_goes_farther_no_more_than_once_in_so_many_seconds(history: list[Step]) -> None:
    """And only where the last look showed no near use."""
    watched, farther = Watched(), -HOLD_S
    for step in history:
        before = watched.next_use
        after = watched.step(step)
        if after > before:
            assert watched.now - farther >= HOLD_S
            assert not (step.busy_usec or step.is_leading or step.charged > 0) or step.turn is not None
            farther = watched.now


@SETTINGS
@given(st.lists(steps, max_size=30), st.sampled_from((Step(0.1, 5, 0, None, False), Step(0.1, 0, 1, None, False))))
def test_a_process_at_work_is_near_at_once(history: list[Step], work: Step) -> None:
    watched = Watched()
    for step in history:
        watched.step(step)
    assert watched.step(work) is NextUse.SOON
    assert watched.step(Step(0.1, 0, 0, TURNS_NEAR - 1, False)) is NextUse.SOON
    assert watched.step(Step(50.0, 0, 0, None, True)) is NextUse.SOON, "what goes before others has the next turn"


@SETTINGS
@given(st.lists(steps, max_size=20), st.floats(HOLD_S, 2000.0), st.integers(1, 40))
def test_a_process_that_does_nothing_is_of_the_class_of_its_time(
    history: list[Step], seconds: float, looks: int
) -> None:
    """However often it is looked at, counted from the last look that saw it at work."""
    watched = Watched()
    for step in [*history, Step(0.1, 1, 0, None, False)]:
        watched.step(step)
    began = watched.now
    for _ in range(looks):
        watched.step(Step(seconds / looks, 0, 0, None, False))
    idle = watched.now - began
    watched.step(Step(HOLD_S + 0.1, 0, 0, None, False))
    due = [one for one, least in IDLE_S.items() if idle >= least]
    assert watched.next_use >= max(due, default=NextUse.SOON)
    still = [one for one, least in IDLE_S.items() if idle + HOLD_S + 0.2 >= least]
    assert watched.next_use <= max(still, default=NextUse.SOON)


@SETTINGS
@given(st.lists(st.floats(0.05, 0.9), min_size=1, max_size=40))
def test_turns_that_are_shorter_than_the_hold_leave_equals_equal(history: list[float]) -> None:
    """Three take turns shorter than HOLD_S: each is next, or at work, before its class would become farther."""
    outlook, now, sight = Outlook(), 0.0, Sight(1, 1)
    processes = [ONE, OTHER, LAST]
    for seconds in history:
        now += seconds
        outlook.see(now, dict.fromkeys(processes, sight))
        found = outlook.judge(now, Order(processes[1:]))
        assert set(found.values()) <= {NextUse.SOON}
        processes = [*processes[1:], processes[0]]


def test_a_process_behind_several_turns_is_farther_and_near_as_its_turn_is_next() -> None:
    outlook, sight = Outlook(), Sight(1, 1)
    processes = [ONE, TWIN, OTHER, LAST]
    for tick in range(6):
        outlook.see(tick * 0.5, dict.fromkeys(processes, sight))
        found = outlook.judge(tick * 0.5, Order(processes[1:]))
    assert found == {ONE: NextUse.SOON, TWIN: NextUse.SOON, OTHER: NextUse.LATER, LAST: NextUse.LATER}
    found = outlook.judge(3.0, Order([LAST, ONE, TWIN]))
    assert set(found.values()) == {NextUse.SOON}, "the two that ran are farther only once that was so for a while"
    assert outlook.judge(3.0 + HOLD_S, Order([LAST, ONE, TWIN]))[TWIN] is NextUse.LATER


def test_a_process_that_the_machine_cannot_tell_of_is_near() -> None:
    outlook = Outlook()
    for now in (0.0, 5.0, 9.9, 1000.0, 1002.0):
        outlook.see(now, {ONE: Sight(1, 7), OTHER: Sight(1)})
        found = outlook.judge(now)
    assert found == {ONE: NextUse.ASLEEP, OTHER: NextUse.SOON}
    outlook.see(1003.0, {OTHER: Sight(1)})
    assert outlook.judge(1003.0) == {OTHER: NextUse.SOON}, "what is gone is forgotten"


def test_a_process_that_is_off_without_work_waits_for_nothing() -> None:
    """A scheduler may keep a process off whose turns come seldom: it is as idle as it is."""
    outlook, order = Outlook(), Order([OTHER, ONE, TWIN])
    for now in (0.0, 10.0, 11.0, 12.0):
        outlook.see(now, {ONE: Sight(1, 1, has_work=False), TWIN: Sight(1, 1), OTHER: Sight(1, 1)})
        found = outlook.judge(now, order)
    assert found == {OTHER: NextUse.SOON, ONE: NextUse.IDLE, TWIN: NextUse.LATER}


def test_between_looks_that_are_far_apart_turns_have_come_and_gone() -> None:
    """A thousand programs are looked at every ten seconds: one that waits at two looks may have run in between."""
    outlook, order = Outlook(), Order([OTHER, ONE, TWIN])
    for look in range(6):
        outlook.see(10.0 * look, dict.fromkeys([ONE, TWIN, OTHER], Sight(1, 1)))
        found = outlook.judge(10.0 * look, order)
        assert set(found.values()) == {NextUse.SOON}, "it is not idle either: it has work"


def test_one_that_can_give_nothing_is_asked_last() -> None:
    outlook = Outlook()
    for now in (0.0, 10.0, 11.0):
        outlook.see(now, {ONE: Sight(1, 1, can_give=False), TWIN: Sight(1, 1)})
        found = outlook.judge(now)
    assert found == {ONE: NextUse.IDLE, TWIN: NextUse.IDLE}
    assert outlook.rank(found) == {ONE: 0, TWIN: len(NextUse) * NextUse.IDLE}


IDLE_FOR = st.sampled_from((0.0, *sorted(IDLE_S.values())))


@SETTINGS
@given(
    st.lists(IDLE_FOR, min_size=4, max_size=4),
    st.lists(st.tuples(*[st.sets(st.sampled_from([ONE, TWIN, OTHER, LAST]))] * 2), max_size=3),
)
def test_one_that_is_behind_others_is_as_far_as_the_farthest_of_them(
    idle: list[float], behind: list[tuple[set[Process], set[Process]]]
) -> None:
    """Only those that it is behind count; with several levels, those of all levels."""
    seconds = dict(zip([ONE, TWIN, OTHER, LAST], idle, strict=True))
    outlook, order = Outlook(), Order(behind=behind)
    for now in (0.0, *(1000.0 - one for one in (*sorted(IDLE_S.values(), reverse=True), 0.0)), 1001.0):
        done = {process: min(now, 1000.0 - since) for process, since in seconds.items() if since}
        outlook.see(now, {process: Sight(1, done.get(process, now)) for process in seconds})
        found = outlook.judge(now, order)
    own = {
        process: max((next_use for next_use, least in IDLE_S.items() if since >= least), default=NextUse.SOON)
        for process, since in seconds.items()
    }
    for process in seconds:
        ahead = {other for those, before in behind if process in those for other in before}
        assert found[process] is max(own[one] for one in {process, *ahead})
    ranks = outlook.rank(found, order)
    last = {process for those, _ in behind for process in those}
    for process, rank in ranks.items():
        assert 0 <= rank < len(NextUse) ** 2 <= NEXT_USE_MOST
        assert divmod(rank, len(NextUse)) == (found[process], own[process] if process in last else 0)


def contender(pid: int, *priorities: int) -> Contender:
    """Return a process below one slice per priority, each its own except the first."""
    groups = [
        f"/{priority}" if level == 0 and len(priorities) > 1 else pid for level, priority in enumerate(priorities)
    ]
    path = tuple(Level(group, priority, 100) for group, priority in zip(groups, priorities, strict=True))
    return Contender(Process(pid, 0), path)


def test_priorities_lead_where_they_are_better_than_the_default_and_are_behind_where_worse() -> None:
    """A job of priority 9 does not make all of priority 8 near; one of 0 is near beside one of 8."""
    server, one, batch = contender(1, 0), contender(2, 8), contender(3, 9)
    within, beside = contender(4, 8, 3), contender(5, 8, 8)

    def found(*contenders: Contender) -> tuple[set[int], set[int]]:
        return {p.pid for p in leads(contenders)}, {p.pid for those, _ in behind(contenders) for p in those}

    assert found(server, one, batch) == ({1}, {3})
    assert found(one, batch) == (set(), {3})
    assert found(server, batch) == ({1}, {3})
    assert found(batch, contender(6, 15)) == (set(), {6})
    assert found(server) == found(batch) == found(one, contender(6, 8)) == (set(), set())
    assert found(within, beside, one) == ({4}, set())
    assert found(within, one) == (set(), set())


def test_a_process_is_behind_those_before_it_at_each_level_and_no_others() -> None:
    """A process behind a sibling in its slice is behind none in another slice of the same priority."""
    first, second, other = contender(1, 8, 8), contender(2, 8, 9), contender(3, 8)
    last, worst = contender(4, 9, 8), contender(5, 9, 12)

    def found(*contenders: Contender) -> dict[int, set[int]]:
        before: dict[int, set[int]] = {}
        for those, ahead in behind(contenders):
            for process in those:
                before.setdefault(process.pid, set()).update(one.pid for one in ahead)
        return before

    assert found(first, second, other) == {2: {1}}
    assert found(first, second, other, last, worst) == {2: {1}, 4: {1, 2, 3}, 5: {1, 2, 3, 4}}
    assert found(worst, last) == {5: {4}}
    assert found(contender(1, 0), contender(2, 8)) == {}


def test_memory_that_comes_back_from_the_host_is_no_use() -> None:
    """A look counts the memory of a process in both places, so a move does not count as new memory."""
    outlook = Outlook()
    for now in (0.0, 10.0, 11.0):
        outlook.see(now, {ONE: Sight(100, 0)})
        found = outlook.judge(now)
    assert found == {ONE: NextUse.IDLE}
    outlook.see(11.5, {ONE: Sight(100 + GREW_LEAST - 1, 0)})
    assert outlook.judge(11.5) == {ONE: NextUse.IDLE}, "page tables that a move takes are no growth"
    outlook.see(12.0, {ONE: Sight(100 + 2 * GREW_LEAST, 0)})
    assert outlook.judge(12.0) == {ONE: NextUse.SOON}
