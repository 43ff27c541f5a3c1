"""Turns beside all else that is asked of programs and daemons, in every order and on the fake driver, in virtual time:
at each step of a change of turns every pair of actions, and a daemon that is killed at each point of its life.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest

from tests.support.killed import a_machine
from tests.support.killed_life import sleepers
from tests.support.turn_orders import ACTIONS, INSIDE, STEPS, Case, Stage

UNGATED = pytest.mark.logs("its library is older than this daemon and lacks turns")

ALL_BUT_ENDS = tuple(action for action in ACTIONS if action not in ("upgrade", "kill_daemon", "kill"))
"""Actions of one daemon and one program."""

KILLED = ("limit", "freeze", "thaw", "migrate")
"""What a daemon does that is killed at each point."""


def walk(kind: str, step: str, orders: Iterable[tuple[str, ...]]) -> None:
    """Goes through orders on a machine of their own."""
    with sleepers() as spawn, a_machine(spawn, wide=True) as machine:
        machine.scheduler = False
        stage = Stage(machine, kind, [Case(step, list(order)) for order in orders])
        try:
            stage.walk()
        except BaseException as error:
            error.add_note(f"{kind}: {stage.cases[:1]}")
            raise


@pytest.mark.parametrize("step", STEPS)
def test_every_pair_at_each_step_of_a_turn_that_drains(step: str) -> None:
    """No limit is refused, unless the program is frozen, moved or may not swap; what is protected stays."""
    walk("gated", step, itertools.product(ALL_BUT_ENDS, ACTIONS))


def test_what_comes_after_the_end_of_a_daemon_or_a_program() -> None:
    """Every action, of the next daemon."""
    walk("gated", "off", itertools.product(("upgrade", "kill_daemon", "kill"), ACTIONS))


@pytest.mark.parametrize("step", [step for step in STEPS if step not in INSIDE])
@pytest.mark.parametrize("kind", ["late", pytest.param("ungated", marks=UNGATED)])
def test_every_action_at_each_step_of_a_turn_that_does_not_drain(kind: str, step: str) -> None:
    """A limit is held or refused with EBUSY while the program waits, and is held once it has its turn."""
    walk(kind, step, [(action,) for action in ACTIONS])


@pytest.mark.parametrize("kind", ["late", pytest.param("ungated", marks=UNGATED)])
def test_every_pair_while_a_program_waits_that_did_not_drain(kind: str) -> None:
    """As above; of what keeps its memory from moving, of limits and of the program."""
    walk(kind, "off", itertools.permutations(ALL_BUT_ENDS, 2))


def test_every_triple_with_a_freeze_while_a_program_drains() -> None:
    """A program that is to stand still does not run, however its turn ends."""
    triples = itertools.permutations(ALL_BUT_ENDS, 3)
    walk("gated", "drains", [triple for triple in triples if "freeze" in triple])


def test_a_daemon_that_is_killed_at_each_point() -> None:
    """Before, in the middle of and after all that it changes on the hardware and writes down, while turns change; the
    next daemon finds everything as it was asked, and goes on with what is left."""
    with sleepers() as spawn, a_machine(spawn, wide=True) as machine:
        machine.scheduler = False
        stage = Stage(machine, "gated", [Case("off", list(KILLED))])
        points = stage.next_daemon()
        assert points > 50
        for at in range(1, points + 1):
            stage.cases, stage.at = [Case("off", list(KILLED))], at
            try:
                stage.walk()
            except BaseException as error:
                error.add_note(f"killed at point {at} of {points}")
                raise
