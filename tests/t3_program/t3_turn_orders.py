"""Turns beside everything else that is asked of programs and daemons, in every order, on the fake driver.

At each step of a change of turns, every pair of actions; and a daemon that is killed at each point of its life. In
virtual time.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterable, Sequence

import pytest

from tests.support.killed import a_machine
from tests.support.killed_life import sleepers
from tests.support.turn_orders import ACTIONS, DRAINING, KINDS, ONE, STEPS, WAITED_FOR, Case
from tests.support.turn_programs import Stage
from tests.support.turn_walks import go_through, next_daemon

UNGATED = pytest.mark.logs("its library is older than this daemon and lacks turns")

ALL_BUT_ENDS = tuple(action for action in ACTIONS if action not in ("upgrade", "kill_daemon", "kill"))
"""Actions that leave the daemon and the program alive."""

KILLED = ("limit", "freeze", "thaw", "migrate")
"""Actions of a daemon that is killed at each point."""

SAMPLED = int(os.environ.get("GGROUP_TURN_ORDERS", "12"))
"""Sample size: orders of each sort for each kind of program and step, where there are too many for all."""

SEED = os.environ.get("GGROUP_TURN_SEED", "")
"""Seed of the sample, beside the name of its sort."""

Orders = Iterable[tuple[str, ...]]


def walk(kind: str, step: str, orders: Orders, names: Sequence[str] = ("a", "b")) -> None:
    """Go through orders on a machine of their own."""
    with sleepers() as spawn, a_machine(spawn, wide=True) as machine:
        machine.scheduler = False
        stage = Stage(machine, KINDS[kind], [Case(step, list(order), names=tuple(names)) for order in orders])
        try:
            go_through(stage)
        except BaseException as error:
            error.add_note(f"{kind}: {stage.cases[:1]}")
            raise


def steps_of(kind: str) -> Sequence[str]:
    """Return the steps at which a program of this kind may be held."""
    if KINDS[kind].stays:
        return DRAINING
    return STEPS if KINDS[kind].gives else [step for step in STEPS if step not in WAITED_FOR]


@pytest.mark.parametrize("step", STEPS)
def test_every_pair_at_each_step_of_a_turn_that_drains(step: str) -> None:
    """No limit is refused, unless the program is frozen, moved or may not swap; protected memory stays."""
    walk("gated", step, itertools.product(ALL_BUT_ENDS, ACTIONS))


@pytest.mark.parametrize("step", DRAINING)
def test_every_pair_at_each_step_of_a_drain(step: str) -> None:
    """The program is not done in time, and goes off once it is. No limit is refused, as above."""
    walk("drains", step, itertools.product(ALL_BUT_ENDS, ACTIONS))


@pytest.mark.parametrize(("kind", "step"), [("gated", "off"), ("drains", "ended"), ("drains", "waits")])
def test_what_comes_after_the_end_of_a_daemon_or_a_program(kind: str, step: str) -> None:
    """Every action, under the next daemon."""
    walk(kind, step, itertools.product(("upgrade", "kill_daemon", "kill"), ACTIONS))


@pytest.mark.parametrize("step", [step for step in STEPS if step not in WAITED_FOR])
@pytest.mark.parametrize("kind", ["late", pytest.param("ungated", marks=UNGATED)])
def test_every_action_at_each_step_of_a_turn_that_does_not_drain(kind: str, step: str) -> None:
    """A limit holds or is refused with EBUSY while the program waits, and holds once it has its turn."""
    walk(kind, step, [(action,) for action in ACTIONS])


@pytest.mark.parametrize("step", DRAINING)
@pytest.mark.parametrize("kind", ["stuck", "returns"])
def test_every_action_at_each_step_of_a_drain_that_does_not_end(kind: str, step: str) -> None:
    """The drain is given up, or the next turn begins before that."""
    walk(kind, step, [(action,) for action in ACTIONS])


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        ("late", "off"),
        pytest.param("ungated", "off", marks=UNGATED),
        ("stuck", "waits"),
        ("stuck", "off"),
        ("returns", "waits"),
        ("returns", "begins"),
    ],
)
def test_every_pair_while_a_program_waits_that_did_not_drain(kind: str, step: str) -> None:
    """As above; also with actions that keep its memory from moving."""
    walk(kind, step, itertools.permutations(ALL_BUT_ENDS, 2))


@pytest.mark.parametrize(("kind", "step"), [("gated", "drains"), ("drains", "waits")])
def test_every_triple_with_a_freeze_while_a_program_drains(kind: str, step: str) -> None:
    """A program that is to stand still does not run, however its turn ends."""
    triples = itertools.permutations(ALL_BUT_ENDS, 3)
    walk(kind, step, [triple for triple in triples if "freeze" in triple])


@pytest.mark.parametrize(("kind", "step"), [("gated", "off"), ("drains", "ended")])
def test_every_triple_with_a_move_after_a_limit(kind: str, step: str) -> None:
    """The host may hold more of the program than it may have there from then on."""
    triples = itertools.permutations([action for action in ALL_BUT_ENDS if action != "limit"], 3)
    walk(kind, step, [("limit", *triple) for triple in triples if {"swap_max", "migrate"} < {*triple}])


def test_an_order_finds_nothing_of_those_before_it() -> None:
    """A program that gave less than it was asked for is not asked again for a while; and a limit that a killed daemon
    was asked for takes effect later."""
    walk("gated", "runs", [("limit", "reclaim", "own_limit"), ("limit", "thaw", "own_limit")])
    walk("gated", "begins", [("own_limit", "thaw", "kill_daemon"), ("swap_max", "own_limit", "kill_daemon")])


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=UNGATED) if kind == "ungated" else kind for kind in KINDS])
def test_orders_of_three_programs(kind: str) -> None:
    """Up to three random actions each. The third program gives what `a` cannot: no limit is refused."""
    rng = random.Random(kind + SEED)
    for step in steps_of(kind):
        orders = [rng.sample(ACTIONS, rng.randint(1, 3)) for _ in range(SAMPLED)]
        walk(kind, step, map(tuple, orders), ("a", "b", "c"))


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=UNGATED) if kind == "ungated" else kind for kind in KINDS])
def test_orders_with_the_program_that_has_its_turn(kind: str) -> None:
    """At least one action on it, or on the third, between those on `a` and on the slice."""
    rng = random.Random(f"{kind} and others{SEED}")
    for step in steps_of(kind):
        orders = []
        for _ in range(-(-SAMPLED // 2)):
            order = rng.sample(ACTIONS, rng.randint(0, 2))
            other = rng.sample(ONE, rng.randint(1, 3 - len(order)))
            order += [f"{action} {rng.choice('bbc')}" for action in other]
            orders.append(tuple(rng.sample(order, len(order))))
        walk(kind, step, orders, ("a", "b", "c"))


@pytest.mark.parametrize(
    ("kind", "step"), [*(("gated", step) for step in STEPS), *(("drains", step) for step in DRAINING)]
)
def test_triples_at_each_step(kind: str, step: str) -> None:
    """Random triples of all actions on one program; the last may be its end, or its daemon's."""
    rng = random.Random(f"{kind} {step}{SEED}")
    triples = [triple for triple in itertools.permutations(ACTIONS, 3) if {*triple[:2]} <= {*ALL_BUT_ENDS}]
    walk(kind, step, rng.sample(triples, min(SAMPLED, len(triples))))


EACH = int(os.environ.get("GGROUP_TURN_KILLS", "0"))
"""Stride through the points of a daemon's life at each step; 0 for the test's own."""


@pytest.mark.parametrize(
    ("kind", "step", "every"),
    [
        ("gated", "off", 1),
        ("drains", "waits", 2),
        *(("gated", step, 15) for step in STEPS if step != "off"),
        *(("drains", step, 15) for step in DRAINING if step != "waits"),
    ],
)
def test_a_daemon_that_is_killed_at_each_point(kind: str, step: str, every: int) -> None:
    """Before, during and after every change of the hardware and of the journal, while turns change; the next daemon
    finds all settings as requested, and goes on with what is left. Only one point in `each`, where other steps pass the
    same."""
    every = EACH or every
    with sleepers() as spawn, a_machine(spawn, wide=True) as machine:
        machine.scheduler = False
        stage = Stage(machine, KINDS[kind], [Case(step, list(KILLED))])
        points = next_daemon(stage)
        assert points > 50
        first = random.Random(f"{kind} {step}{SEED}").randint(1, every)
        for at in range(first, points + 1, every):
            stage.cases, stage.at = [Case(step, list(KILLED))], at
            try:
                go_through(stage)
            except BaseException as error:
                error.add_note(f"killed at point {at} of {points}")
                raise
