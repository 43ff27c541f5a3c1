"""A daemon that is killed while a program waits for its turn without the GR engine: the program's copies go on and its
kernels do not; the next daemon, or `ggroupfs doctor --thaw-all`, restores what is off and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import trio

from backend.core.reasons import ON, Engines, Off, Reason
from backend.core.records import Capability, Place
from backend.ledgers.journal import format
from backend.ledgers.journal.state import State
from backend.nvidia.proven import GR_ALONE
from tests.support.fake_nvidia import Program
from tests.support.harness import Harness, settle
from tests.support.killed import Killed, Life, Machine, a_machine
from tests.support.killed_life import is_released, live, pid_of, run, sleepers

GR_CHANNELS, COPY_CHANNELS = 8, 12
"""Channels of a program with one context."""


@pytest.fixture
def machine() -> Iterator[Machine]:
    """A machine with the books of daemons and one GPU."""
    with sleepers() as spawn, a_machine(spawn) as found:
        yield found


def disabled(program: Program) -> list[int]:
    """Return how often each channel is disabled: first the channels for kernels, then those for copies."""
    objects = program.objects
    kernels = {objects[one.parent].parent for one in objects.values() if one.class_ == 0xCBC0}
    channels = [objects[channel] for channel in program.channels()]
    return [one.disabled for one in sorted(channels, key=lambda one: one.parent not in kernels)]


WITHOUT_GR = [1] * GR_CHANNELS + [0] * COPY_CHANNELS
WITH_ALL = [0] * (GR_CHANNELS + COPY_CHANNELS)


def noted(machine: Machine) -> State:
    """Return the state that the journal records."""
    return format.read(machine.path.read_bytes()).state


def killed_in_a_turn(machine: Machine, *, proven: bool = True, frozen: bool = False, dies: bool = True) -> None:
    """Run the life of a daemon up to its death, while a program waits for its turn without GR. `proven`: the driver can
    take that engine alone off the runlist."""
    life = Life()

    async def wait(machine: Machine, h: Harness) -> None:
        machine.start("b")
        await trio.sleep(0.25)
        follower, group = h.controller._follower, machine.group("b")
        capabilities = h.controller.gpus[0].capabilities()
        assert isinstance(capabilities, dict)
        capabilities[GR_ALONE] = Capability.ENFORCED if proven else Capability.UNSUPPORTED
        follower.schedule(group, Place(off=True, engines=Engines.GR))  # type: ignore[arg-type]
        await follower.apply(group)
        if frozen:
            await machine.write(h, f"{pid_of(machine, 'b')}/compute.freeze", "1")
        life.dead = dies
        if dies:
            raise Killed

    live(machine, life, wait)


async def off(h: Harness, machine: Machine) -> dict[str, str]:
    """Return why the program is off the runlist, as gcgroup.stat says."""
    stat = await h.read(f"{pid_of(machine, 'b')}/gcgroup.stat")
    return {key: value for key, value in map(str.split, stat.splitlines()) if key.startswith("off_") and value != "0"}


@pytest.mark.parametrize("proven", [True, False], ids=["gr", "all"])
def test_the_next_daemon_puts_it_on(machine: Machine, proven: bool) -> None:
    """A single call restores its engines: GR alone, or all of them where a driver takes no less."""
    killed_in_a_turn(machine, proven=proven)
    program = machine.programs["b"]
    assert disabled(program) == (WITHOUT_GR if proven else [1] * len(WITH_ALL)), "a death takes nothing back"
    state = noted(machine)
    assert list(state.reasons.values()) == [Off(gr=Reason.TURN)]
    assert [(lever.engines, lever.moving) for lever in state.levers.values()] == [(Engines.GR, False)]
    machine.fake.disables.clear()

    async def look(machine: Machine, h: Harness) -> None:
        await settle()
        await trio.sleep(1.2)
        assert disabled(program) == WITH_ALL
        assert machine.fake.disables == [(False, GR_CHANNELS if proven else len(WITH_ALL))]
        assert await off(h, machine) == {}
        assert h.controller._follower.applied(machine.group("b")).off == ON  # type: ignore[arg-type]

    live(machine, Life(), look)
    is_released(machine)
    assert not noted(machine).reasons


def test_the_next_daemon_takes_up_a_freeze_beside_it(machine: Machine) -> None:
    """A program that was frozen meanwhile stays frozen, without a moment of running; the turn ended with the daemon."""
    killed_in_a_turn(machine, frozen=True)
    program = machine.programs["b"]
    assert all(disabled(program))
    assert list(noted(machine).reasons.values()) == [Off(Reason.FREEZE, Reason.TURN)]
    machine.fake.still = frozenset({program.pid})

    async def look(machine: Machine, h: Harness) -> None:
        await settle()
        await trio.sleep(1.2)
        assert await off(h, machine) == {"off_freeze": "1"}
        assert set(disabled(program)) == {1}
        assert not machine.fake.ran
        machine.fake.still = frozenset()
        await machine.write(h, f"{pid_of(machine, 'b')}/compute.freeze", "0")
        assert disabled(program) == WITH_ALL, "its turn is not waited for any more"
        assert await off(h, machine) == {}

    live(machine, Life(), look)
    is_released(machine)


def test_a_daemon_that_ends_puts_it_on(machine: Machine) -> None:
    killed_in_a_turn(machine, dies=False)
    is_released(machine)
    assert disabled(machine.programs["b"]) == WITH_ALL


def test_doctor_puts_it_on(machine: Machine) -> None:
    """`ggroupfs doctor --thaw-all` works without another daemon, and says how much was off."""
    killed_in_a_turn(machine)
    program = machine.programs["b"]
    assert disabled(program) == WITHOUT_GR
    (found,) = run(machine)
    assert (found.subject, found.verdict) == (f"GPU 0 pid {program.pid}", "thawed")
    assert found.why == f"{GR_CHANNELS} channels put back, 0 timeslices given back"
    assert disabled(program) == WITH_ALL
    assert {one.verdict for one in run(machine)} == {"ok"}, "there is nothing left to do"
    is_released(machine)


def test_doctor_needs_no_journal_for_it(machine: Machine) -> None:
    """The driver reports what is off."""
    killed_in_a_turn(machine)
    machine.path.unlink()
    run(machine, [])
    assert disabled(machine.programs["b"]) == WITH_ALL
