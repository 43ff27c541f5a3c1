"""The life of a daemon that may be killed at any point, and the state that the next daemon finds."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import trio
from trio.testing import MockClock

import backend.process.identity
from backend.core.protocols import split_timeslice
from backend.ledgers.journal.file import Journal
from backend.nvidia import rm
from backend.nvidia.nvml import Nvml
from backend.nvidia.opening import open_gpus
from backend.process.identity import ROOT, Group, Process
from ggroupfs.commands import thaw
from ggroupfs.commands.finding import Finding
from tests.support.fake_nvidia import Program, patient
from tests.support.harness import Harness, Spawn, descriptors, settle
from tests.support.journaled import let_go
from tests.support.killed import OWN_US, Killed, Life, Machine, a_machine, mortal

FILES = {
    "gmem.limit.high": "max",
    "gmem.limit.low": "0",
    "gmem.swap.max": "max",
    "compute.timeslice": "default",
    "compute.freeze": "0",
    "compute.priority": "8",
    "compute.weight": "100",
    "compute.wait.max": "default",
}
"""Files of settings, and the content of each by default."""


def pid_of(machine: Machine, name: str) -> str:
    return f"{machine.programs[name].pid}/{machine.on[name]}"


async def past(machine: Machine, h: Harness) -> None:
    """Write every setting, start and end programs, and migrate one."""
    machine.start("a", "/job")
    gr = next(o for o in machine.programs["a"].objects.values() if o.class_ == rm.CLASS_TSG)
    gr.timeslice = OWN_US
    machine.start("b")
    await trio.sleep(0.25)
    a, b = pid_of(machine, "a"), pid_of(machine, "b")
    await machine.mkdir(h, "slice/made")
    await machine.chown(h, "slice/made", 1000)
    await machine.write(h, f"{a}/compute.freeze", "1")
    await machine.chown(h, f"{a}/compute.freeze", 1000)
    await machine.write(h, f"{b}/compute.timeslice", "4")
    await machine.write(h, "slice/job/0/compute.timeslice", "1")
    machine.programs["a"].context()  # frozen, and given its share, with the others
    await trio.sleep(0.6)
    await machine.write(h, "slice/made/0/gmem.limit.high", "1073741824")
    await machine.write(h, "slice/made/0/gmem.swap.max", "2147483648")
    await machine.write(h, "slice/job/0/compute.freeze", "1")
    await machine.write(h, f"{a}/compute.freeze", "0")
    machine.start("c", "/job")  # starts in a slice that is frozen
    await trio.sleep(0.25)
    machine.world.cgroups[machine.programs["a"].pid] = backend.process.identity.Slice("/made")  # and leaves it
    await trio.sleep(0.4)
    await machine.write(h, f"{b}/compute.freeze", "1")
    gone = Process(machine.programs["b"].pid, machine.programs["b"].start)
    machine.end("b")
    await h.gone(gone)
    await machine.write(h, "slice/job/0/compute.freeze", "0")
    await machine.write(h, "slice/job/0/compute.timeslice", "default")
    await machine.write(h, "slice/made/0/compute.freeze", "1")
    await machine.write(h, "slice/made/0/gmem.limit.low", "4194304")


async def wider(machine: Machine, h: Harness) -> None:
    """Do the same on a machine with a second GPU and a scheduler, so that shares are set as well."""
    machine.start("d", "/job", gpu=1)
    await trio.sleep(0.25)
    d = pid_of(machine, "d")
    await machine.write(h, "slice/job/0/compute.priority", "3")
    await machine.write(h, "slice/job/1/compute.weight", "300")
    await machine.write(h, f"{d}/compute.priority", "12")
    await machine.write(h, f"{d}/compute.freeze", "1")
    await machine.write(h, "slice/job/1/gmem.limit.low", "8388608")
    await past(machine, h)
    await machine.write(h, f"{d}/compute.freeze", "0")
    await machine.write(h, f"{d}/compute.weight", "50")
    await machine.write(h, f"{d}/compute.timeslice", "2")
    await machine.write(h, "slice/job/1/compute.freeze", "1")
    await machine.write(h, "slice/job/1/compute.weight", "100")


def candidates(machine: Machine, path: str, name: str) -> set[str]:
    """Return the contents that a file may have: the acknowledged value, or the one being written."""
    said = {machine.said.get(f"{path}/{name}", FILES[name])}
    if machine.doing is not None and machine.doing[0] == f"{path}/{name}":
        said.add(machine.doing[1])
    return said


def to_stand_still(machine: Machine) -> frozenset[int]:
    """Return the pids of processes that some level has frozen, whatever became of the write under way."""
    found = set()
    for name, program in machine.programs.items():
        cgroup, gpu = machine.world.cgroups.get(program.pid, ROOT).path, machine.on[name]
        levels = [pid_of(machine, name), *([f"slice{cgroup}/{gpu}"] if cgroup != "/" else [])]
        if not any(program.running()) and any(
            candidates(machine, level, "compute.freeze") == {"1"} for level in levels
        ):
            found.add(program.pid)
    return frozenset(found)


async def agrees(machine: Machine, h: Harness) -> None:
    """Check that the files have the values that were written, that the hardware does what they say, and that nothing
    else is left.
    """
    doing = machine.doing or ("", "")
    slices = set(await h.listdir("slice"))
    for path in machine.made:
        assert path.removeprefix("slice/") in slices, path
    for slice_ in slices:
        wanted = {f"slice/{slice_}" in machine.made, doing == (f"slice/{slice_}", "mkdir")}
        occupied = any(machine.world.cgroups[p.pid].path == f"/{slice_}" for p in machine.programs.values())
        touched = any(path.startswith(f"slice/{slice_}/") for path in (*machine.said, doing[0]))
        assert any(wanted) or occupied or touched, slice_
    for path, uid in machine.owned.items():
        allowed = {uid, int(doing[1].split()[1])} if doing[0] == path and "chown" in doing[1] else {uid}
        assert (await h.operations.getattr(await h.inode(path), h.ctx)).st_uid in allowed, path
    groups = [f"slice/{slice_}/{gpu}" for slice_ in slices for gpu in machine.gpus]
    for group in groups + [pid_of(machine, name) for name in machine.programs]:
        for name in FILES:
            assert await asked(h, group, name) in candidates(machine, group, name), (group, name)
    await obeys(machine, h)
    for name, program in machine.programs.items():
        if not h.controller.applied_timeslice(machine.group(name)):
            assert timeslices(program) == own_timeslices(name, len(timeslices(program))), name


async def obeys(machine: Machine, h: Harness) -> None:
    """Check that the hardware does what the files say, and that no channel is off more than once."""
    assert set(h.controller.population.pids()) == {program.pid for program in machine.programs.values()}
    for name, program in machine.programs.items():
        group = machine.group(name)
        assert await h.listdir(str(program.pid)) == [str(group.gpu)], name
        path = h.controller.population.path(group)
        frozen = any(h.ledger.books(level).frozen for level in path)
        states = {program.objects[channel].disabled for channel in program.channels()}
        off = frozen or h.controller._follower.place(group).off
        assert states == {int(off)}, (name, states, off)
        assert f"frozen {int(frozen)}" in await h.read(f"{pid_of(machine, name)}/compute.events"), name
        us, asked = h.controller.applied_timeslice(group), expected_timeslice(h, group)
        assert us == asked or (machine.scheduler and not asked), name  # otherwise the scheduler's
        gr = timeslices(program)
        assert not us or gr == [split_timeslice(us, len(gr))] * len(gr), name


def timeslices(program: Program) -> list[int]:
    """Return the timeslices of its GR TSGs."""
    return [o.timeslice for o in program.objects.values() if o.class_ == rm.CLASS_TSG and o.timeslice != 1024]


async def asked(h: Harness, path: str, name: str) -> str:
    """Return the setting that a file shows; a process's timeslice file shows what holds."""
    if name != "compute.timeslice":
        return (await h.read(f"{path}/{name}")).strip()
    group = h.tree.directory(await h.inode(path)).subject
    assert isinstance(group, Group)
    us = h.ledger.books(group).timeslice_us
    return f"{us // 1000}" if us else "default"


def expected_timeslice(h: Harness, group: Group) -> int:
    """Return the shortest timeslice on the path, where that of a slice is shared by its members."""
    found = []
    for level in h.controller.population.path(group):
        if us := h.ledger.books(level).timeslice_us:
            sharers = 1 if isinstance(level.node, Process) else len(list(h.controller.population.below(level)))
            found.append(us // sharers)
    return min(found, default=0)


def own_timeslices(name: str, count: int) -> list[int]:
    return [OWN_US if name == "a" and not n else 2048 for n in range(count)]


def is_released(machine: Machine) -> None:
    """Check that after a clean end every program runs with its own settings."""
    for name, program in machine.programs.items():
        assert all(program.running()), name
        assert timeslices(program) == own_timeslices(name, len(timeslices(program))), name


REST_S = 0.005
"""Seconds for which all tasks are blocked before virtual time jumps."""


def in_virtual_time(main: Callable[[], Any], rest_s: float = REST_S) -> None:
    clock = MockClock(autojump_threshold=min(0.002, rest_s))
    with patient(clock, lambda: False, rest_s):
        trio.run(main, clock=clock)


def live(machine: Machine, life: Life, story: Callable[[Machine, Harness], Any], rest_s: float = REST_S) -> None:
    """Run a daemon with a story, to its end."""

    async def main() -> None:
        async with machine.daemon(life) as h:
            await story(machine, h)

    try:
        with mortal(life):
            in_virtual_time(main, rest_s)
    except* Killed:
        assert life.dead


def again(machine: Machine, *, further: bool, readback: bool = True) -> None:
    """Run the daemon after the killed one; with `further`, also the daemons after that, which ended cleanly."""

    async def check(machine: Machine, h: Harness) -> None:
        await settle()
        await trio.sleep(1.2)
        await agrees(machine, h)
        assert not readback or not machine.fake.ran, "somebody ran who was to stand still"
        machine.fake.still = frozenset()

    machine.fake.still = to_stand_still(machine)
    before = descriptors()
    live(machine, Life(), check)
    is_released(machine)
    assert descriptors() == before
    assert machine.fake.open == {}
    left = os.listdir(machine.path.parent)  # with the kernel's books there may be nothing to note
    assert left == [machine.path.name] or (machine.kernel and not left)
    if not further:
        return
    live(machine, Life(), check)
    is_released(machine)

    async def leave(machine: Machine, h: Harness) -> None:
        for name in list(machine.programs):
            gone = machine.programs[name].identity
            machine.end(name)
            await h.gone(gone)
        for slice_ in await h.listdir("slice"):
            await h.operations.rmdir(await h.inode("slice"), slice_.encode(), h.ctx)
        assert (h.leftovers()["accounts"], h.leftovers()["owners"]) == (len(machine.gpus), 0)

    live(machine, Life(), leave)
    journal = Journal(machine.path, boot="b")
    assert set(journal.state.groups) == {(f"GPU-{gpu}", ROOT) for gpu in machine.gpus if not machine.kernel}
    assert (journal.state.levers, journal.state.own, journal.state.given) == ({}, {}, {}), "nothing is left of anybody"
    let_go(journal)


@contextlib.contextmanager
def sleepers() -> Iterator[Spawn]:
    """Start idle processes, and end them."""
    processes: list[subprocess.Popen[bytes]] = []

    def spawn() -> subprocess.Popen[bytes]:
        processes.append(subprocess.Popen(["sleep", "600"]))
        return processes[-1]

    try:
        yield spawn
    finally:
        for process in processes:
            process.kill()
            process.wait()


def whole_life(*, wide: bool = False, kernel: bool = False) -> Life:
    """Return a life up to its clean end, with all points."""
    life = Life()
    with sleepers() as spawn, a_machine(spawn, wide=wide, kernel=kernel) as machine:
        live(machine, life, wider if wide else past)
        is_released(machine)
    assert life.points > 150
    return life


def one_death(at: int, readback: bool = True, *, wide: bool = False, kernel: bool = False) -> None:
    with sleepers() as spawn, a_machine(spawn, readback, wide=wide, kernel=kernel) as machine:
        life = Life(at)
        live(machine, life, wider if wide else past)
        try:
            again(machine, further=at % 4 == 0, readback=readback)
        except BaseException as error:
            error.add_note(f"killed at point {at} of {life.points}, while {machine.doing}")
            raise


def run(machine: Machine, paths: Sequence[Path] | None = None, places: Sequence[str] = ()) -> list[Finding]:
    """Run the command on this driver."""
    found: list[Finding] = []

    async def main() -> None:
        found.extend(
            await thaw._thaw_all(
                [machine.path] if paths is None else paths,
                lambda: open_gpus(
                    system=machine.fake,
                    nvml=Nvml(machine.nvml),  # type: ignore[arg-type]
                    selftest=False,
                ),
                places,
            )
        )
        for fd in list(machine.fake.open):  # as at the end of the command
            machine.fake.close(fd)

    with tempfile.NamedTemporaryFile("w+") as boot:
        boot.write("b\n")
        boot.flush()
        with mock.patch("backend.ledgers.journal.file.BOOT", Path(boot.name)):
            trio.run(main)
    return found
