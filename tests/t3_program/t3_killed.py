"""A daemon killed at every point where anything that outlives it changes: the next one goes on from there.

The driver, the journal and the programs, which come and go meanwhile, outlive a daemon. Between two changes of these no
moment differs from another. So a kill right before, in the middle of, and right after each change covers a kill at
every await and at every call of the driver.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
from collections.abc import Callable

import pytest
import trio

from tests.support.harness import Harness, settle
from tests.support.killed import Life, Machine, a_machine
from tests.support.killed_life import again, live, obeys, one_death, past, pid_of, sleepers, to_stand_still, whole_life


@pytest.fixture(scope="module")
def points() -> int:
    """Return the number of points in a whole life."""
    return whole_life().points


PARTS = 20
WIDE_STEP = 17
CUTS = 3


@pytest.mark.parametrize("part", range(PARTS))
def test_killed_at_every_point(points: int, part: int) -> None:
    """Every acknowledged write holds, one in progress may; what was frozen never runs, and what was not runs."""
    for at in range(1 + part, points + 1, PARTS):
        one_death(at)


def test_killed_where_nothing_can_be_asked(points: int) -> None:
    """Without the read-back of channels, which a driver may refuse: nothing is disabled twice, so a thaw thaws."""
    for at in range(1, points + 1, 25):
        one_death(at, readback=False)


def test_killed_where_shares_are_asked_for(points: int) -> None:
    """Two GPUs and a scheduler, which sets timeslices all the time; at some of the points."""
    for at in range(1, whole_life(wide=True).points + 1, WIDE_STEP):
        one_death(at, wide=True)


@pytest.mark.parametrize("part", range(CUTS))
def test_a_journal_that_is_cut_off_after_a_driver_that_went_on(points: int, part: int) -> None:
    """The journal says what was true at some moment, and the driver is as it was when the daemon was killed: what the
    next daemon reports as found holds, and in the end no program is left off the runlist."""
    rng = random.Random(part)
    for at in range(points // 4 + part, points + 1, 4 * CUTS):
        with sleepers() as spawn, a_machine(spawn) as machine:
            live(machine, Life(at), past)
            data = machine.path.read_bytes()
            ends = [found.end() for found in re.finditer(b"\n", data)]
            cut = rng.choice((rng.choice(ends), rng.randrange(len(data))))
            os.truncate(machine.path, cut)
            try:
                live(machine, Life(), hold)
                assert all(all(program.running()) for program in machine.programs.values())
            except BaseException as error:
                error.add_note(f"killed at point {at}, cut off at byte {cut} of {len(data)}: {data[:cut]!r}")
                raise


async def hold(machine: Machine, h: Harness) -> None:
    """Check that frozen programs stand still, whichever daemon froze them, and that thawed ones run."""
    await settle()
    await trio.sleep(1.2)
    await obeys(machine, h)
    for value in ("1", "0"):
        for name in machine.programs:
            await h.write(f"{pid_of(machine, name)}/compute.freeze", value)
        await obeys(machine, h)


def test_who_hands_over_gives_nothing_back(spawn: Callable[..., subprocess.Popen[bytes]]) -> None:
    """A program that is frozen does not run for a moment while one daemon replaces another."""

    async def hand_over(machine: Machine, h: Harness) -> None:
        await past(machine, h)
        machine.fake.still = to_stand_still(machine)
        h.controller.hand_over()

    with a_machine(spawn) as machine:
        live(machine, Life(), hand_over)
        assert machine.fake.still
        assert not machine.fake.ran
        again(machine, further=False)
