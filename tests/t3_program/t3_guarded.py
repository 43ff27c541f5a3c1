"""A daemon killed at every point of its turns, and its guard, which puts back what waits for a turn and nothing else.

The programs, the driver and the notes for the guard outlive the daemon. Programs wait for their turn, are frozen and
thawed meanwhile, make further contexts, and end.
"""

from __future__ import annotations

import pytest
import trio

from backend.core.reasons import Engines
from backend.core.records import NOWHERE, Place
from backend.nvidia.release import put_back
from tests.support.harness import Harness
from tests.support.killed import Life, Machine, a_machine
from tests.support.killed_life import again, candidates, is_released, live, pid_of, sleepers, to_stand_still

PARTS = 4
"""Number of tests that the points are divided over."""
NOBODY = (0, 0)
"""Numbers of programs that were put back, and that were to be, where there are none."""


async def place(machine: Machine, h: Harness, name: str, *, off: bool, engines: Engines = Engines.ALL) -> None:
    """Have a program wait for its turn, or not any more."""
    follower, group = h.controller._follower, machine.group(name)
    follower.schedule(group, Place(off=True, engines=engines) if off else NOWHERE)  # type: ignore[arg-type]
    await follower.apply(group)


async def turns(machine: Machine, h: Harness) -> None:
    """Have programs wait, and freeze and thaw them as they wait."""
    for name in "xyz":
        machine.start(name, "/job" if name == "y" else "/")
    await trio.sleep(0.25)
    await machine.mkdir(h, "slice/job") if "job" not in await h.listdir("slice") else None
    await place(machine, h, "x", off=True)
    await place(machine, h, "y", off=True, engines=Engines.GR)
    machine.programs["x"].context()
    await trio.sleep(0.6)
    await machine.write(h, f"{pid_of(machine, 'x')}/compute.freeze", "1")
    await machine.write(h, "slice/job/0/compute.freeze", "1")
    await place(machine, h, "z", off=True)
    await machine.write(h, f"{pid_of(machine, 'x')}/compute.freeze", "0")
    await place(machine, h, "y", off=False)
    await place(machine, h, "x", off=False)
    await machine.write(h, "slice/job/0/compute.freeze", "0")
    gone = machine.programs["z"].identity
    machine.end("z")
    await h.gone(gone)
    await place(machine, h, "x", off=True)


def points() -> int:
    """Return the number of points in a whole life."""
    life = Life()
    with sleepers() as spawn, a_machine(spawn) as machine:
        live(machine, life, turns)
        is_released(machine)
        assert put_back(life.left, machine.fake) == NOBODY, "it ended by itself"
    assert life.points > 60
    return life.points


def may_stand(machine: Machine) -> set[int]:
    """Return the pids of programs that some level has frozen, or is about to freeze or thaw."""
    found = set()
    for name, program in machine.programs.items():
        cgroup = machine.world.cgroups[program.pid].path
        levels = [pid_of(machine, name), *([f"slice{cgroup}/0"] if cgroup != "/" else [])]
        if any("1" in candidates(machine, level, "compute.freeze") for level in levels):
            found.add(program.pid)
    return found


@pytest.mark.parametrize("part", range(PARTS))
def test_killed_at_every_point(part: int) -> None:
    """Right after the guard has acted each program runs that is not frozen, and none of those that stood still for a
    freeze. The next daemon goes on from there."""
    waited = 0
    for at in range(1 + part, points() + 1, PARTS):
        with sleepers() as spawn, a_machine(spawn) as machine:
            life = Life(at)
            live(machine, life, turns)
            machine.fake.still = to_stand_still(machine)
            done, count = put_back(life.left, machine.fake)
            try:
                assert done == count
                machine.fake.mind()
                assert not machine.fake.ran
                for name, program in machine.programs.items():
                    assert all(program.running()) or program.pid in may_stand(machine), name
                again(machine, further=False)
            except BaseException as error:
                error.add_note(f"killed at point {at} of {life.points}, while {machine.doing}")
                raise
            waited += count
    assert waited
