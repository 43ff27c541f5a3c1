"""Killed at every point where anything that outlives a daemon changes: the next one goes on from there.

What outlives it are the driver and the journal (and programs, which come and go meanwhile). Between two changes of
those no moment differs from another, so death right before, in the middle of, and right after each of them is death at
every await and at every call of the driver.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import re
import struct
import subprocess
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import attrs
import pytest
import trio
from trio.testing import MockClock

import backend.process.identity
from backend.core.protocols import Gpu, split_timeslice
from backend.ledgers import abi, kernel
from backend.ledgers.journal.attributes import Attributes
from backend.ledgers.journal.file import Journal
from backend.ledgers.journal.ledger import JournaledLedger
from backend.ledgers.journal.levers import JournaledGpu, Timeslices
from backend.ledgers.kernel import KernelLedger
from backend.ledgers.provider import ProviderGpu
from backend.nvidia import rm
from backend.nvidia.nvml import Nvml
from backend.nvidia.opening import open_gpus
from backend.process.identity import ROOT, Group, Member, Process
from tests.support.fake_nvidia import FakeNvml, FakeSystem, Program, patient
from tests.support.harness import MIB, REAL_S, Harness, World, descriptors, running, settle
from tests.t2_parts.t2_journal import MEMORY, let_go

CHANGES = (rm.SET_TIMESLICE, rm.FIFO_DISABLE_CHANNELS)
"""Calls that leave something behind."""

SECONDS = 5.0
"""What a lever may take that goes through the kernel."""

OWN_US = 777
"""A timeslice that a program gave itself."""

FILES = {
    "gmem.limit.high": "max",
    "gmem.limit.low": "0",
    "gmem.swap.max": "max",
    "compute.timeslice": "default",
    "compute.freeze": "0",
    "compute.priority": "8",
    "compute.weight": "100",
}
"""What is asked for by a file, and what that says where nobody asked."""


class Killed(BaseException):
    """From here on the daemon does nothing any more."""


@attrs.define
class Life:
    """One daemon's, up to a point."""

    at: int | None = None
    """The point at which it ends; None: it ends cleanly."""
    points: int = 0
    """Passed so far."""
    asked: list[int] = attrs.field(factory=list)
    """Those of them at which the kernel was asked for something."""
    open: set[int] = attrs.field(factory=set)
    """Descriptors by which it was."""
    dead: bool = False

    def point(self) -> bool:
        """Here it may be killed. Whether it is now, for who has something to leave half done; Killed afterwards."""
        if self.dead:
            raise Killed
        self.points += 1
        self.dead = self.points == self.at
        return self.dead

    def pass_(self) -> None:
        """Here it may be killed."""
        if self.point():
            raise Killed


class Minded(FakeSystem):
    """A driver that minds that nobody runs who is not to."""

    def __init__(self, readback: bool) -> None:
        super().__init__(trace=None, readback=readback)
        self.still: frozenset[int] = frozenset()
        """Pids of those that are not to run, not for a moment."""
        self.ran: list[int] = []

    def mind(self) -> None:
        """A lever has moved."""
        self.ran += [pid for pid in self.still if pid in self.programs and any(self.programs[pid].running())]


class Driver:
    """The same, as one daemon has it: who is dead does not reach it, in none of his threads."""

    def __init__(self, fake: Minded, life: Life) -> None:
        self._fake = fake
        self._life = life
        self._inside = 0
        self._left = threading.Condition()

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._fake, name)

        def reached(*args: Any) -> Any:
            with self._entered():
                return call(*args)

        return reached

    def ioctl(self, fd: int, request: int, argument: bytearray) -> None:
        with self._entered():
            changes = request == rm.IOCTL_CONTROL and struct.unpack_from("<III", argument)[2] in CHANGES
            if changes:
                self._life.pass_()
            self._fake.ioctl(fd, request, argument)
            if changes:
                self._fake.mind()
                self._life.pass_()

    def end(self) -> None:
        """A call that was under way comes to its end; then the kernel closes what is open."""
        with self._left:
            self._left.wait_for(lambda: not self._inside, REAL_S)
        for fd in list(self._fake.open):
            self._fake.close(fd)

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        with self._left:
            if self._life.dead:
                raise Killed
            self._inside += 1
        try:
            yield
        finally:
            with self._left:
                self._inside -= 1
                self._left.notify_all()


class Mortal(Journal):
    """A journal whose daemon may be killed before, in the middle of and after each write."""

    def __init__(self, path: Path, life: Life) -> None:
        self._life = life
        super().__init__(path, boot="b")

    def _put(self, fd: int, text: bytes) -> None:  # type: ignore[override]
        self._life.pass_()
        if self._life.point():
            os.write(fd, text[: len(text) // 2])
            raise Killed
        Journal._put(fd, text)
        self._life.pass_()


LOOKS = {abi.IOC_GET, abi.IOC_NEXT, abi.IOC_PLAN, abi.IOC_HELLO, abi.IOC_EVENTS}
"""What changes nothing in the kernel."""


@contextlib.contextmanager
def mortal(life: Life) -> Iterator[None]:
    """The kernel module's books as one daemon has them: it may be killed before and after each call."""
    real = kernel._ask

    def ask(descriptor: int, request: int, argument: ctypes.Structure) -> None:
        if request in LOOKS:
            if life.dead:
                raise Killed
            real(descriptor, request, argument)
            return
        life.open.add(descriptor)
        life.pass_()
        life.asked.append(life.points)
        real(descriptor, request, argument)
        life.pass_()

    with mock.patch.object(kernel, "_ask", ask):
        yield


def abandon(ledger: KernelLedger, life: Life) -> None:
    """The death of a daemon, as far as the kernel sees it."""
    for descriptor in {*ledger._queues.values(), *ledger._streams, ledger._control, *life.open}:
        os.close(descriptor)
    ledger._events.close()


@attrs.define
class Machine:
    """What outlives daemons, and what was asked of them."""

    path: Path
    """The journal."""
    spawn: Callable[..., subprocess.Popen[bytes]]
    fake: Minded
    nvml: FakeNvml = attrs.field(factory=lambda: FakeNvml(count=1))
    scheduler: bool = False
    """Whether daemons have one."""
    kernel: bool = False
    """Whether the books are the kernel's."""
    world: World = attrs.field(factory=World)
    said: dict[str, str] = attrs.field(factory=dict)
    """What was written and acknowledged, by path."""
    owned: dict[str, int] = attrs.field(factory=dict)
    """Owners, by path."""
    made: set[str] = attrs.field(factory=set)
    """Slices that were made, and processes, by path."""
    doing: tuple[str, str] | None = None
    """What was asked and not answered: path and value, of whatever kind."""
    programs: dict[str, Program] = attrs.field(factory=dict)
    """By a name of ours."""
    on: dict[str, int] = attrs.field(factory=dict)
    """The GPU of each."""
    processes: dict[str, subprocess.Popen[bytes]] = attrs.field(factory=dict)

    @property
    def gpus(self) -> range:
        """Their indices."""
        return range(self.nvml.count)

    def group(self, name: str) -> Group:
        """Of a program, on its GPU."""
        return Member(self.programs[name].identity, self.on[name])

    def start(self, name: str, cgroup: str = "/", gpu: int = 0) -> None:
        """A program makes a context."""
        self.on[name] = gpu
        self.processes[name] = self.spawn()
        process = backend.process.identity.identify(self.processes[name].pid)
        self.world.cgroups[process.pid] = backend.process.identity.Slice(cgroup)
        self.programs[name] = self.fake.program(process.pid, gpu, start=process.start)
        self.nvml.compute.setdefault(gpu, []).append((process.pid, MIB))

    def end(self, name: str) -> None:
        """A program ends."""
        pid = self.programs.pop(name).pid
        self.processes[name].kill()
        self.processes[name].wait()
        gpu = self.on.pop(name)
        self.nvml.compute[gpu] = [(other, held) for other, held in self.nvml.compute[gpu] if other != pid]
        self.fake.kill(pid)
        for table in (self.said, self.owned):
            for path in [path for path in table if path.startswith(f"{pid}/")]:
                del table[path]
        self.made.discard(str(pid))

    @contextlib.asynccontextmanager
    async def daemon(self, life: Life) -> AsyncIterator[Harness]:
        """The next one."""
        driver = Driver(self.fake, life)
        journal = Mortal(self.path, life)
        h: Harness | None = None
        ledger: JournaledLedger | KernelLedger | None = None
        try:
            gpus = await open_gpus(system=driver, nvml=Nvml(self.nvml), selftest=False)  # type: ignore[arg-type]
            names = {gpu.info.index: gpu.info.uuid for gpu in gpus}
            for gpu in gpus:
                gpu.notes = Timeslices(journal, gpu.info.uuid)
            keeper = Attributes(journal, names)
            behind: list[Gpu]
            if self.kernel:
                ledger = books = KernelLedger(names)
                behind = [ProviderGpu(gpu, books, SECONDS) for gpu in gpus]
            else:
                ledger = JournaledLedger(journal, names)
                behind = [JournaledGpu(gpu, journal) for gpu in gpus]
            async with running(*behind, ledger=ledger, world=self.world, keeper=keeper, scheduler=self.scheduler) as h:
                yield h
            ledger.close(released=h.controller.released)
            ledger = None
            journal.close()
        except BaseException:
            let_go(journal)  # as the kernel closes what a dead process had open
            if isinstance(ledger, KernelLedger):
                abandon(ledger, life)
            if h is not None:
                h.controller._membership.exits.close()
            raise
        finally:
            driver.end()

    # What a history is made of

    async def write(self, h: Harness, path: str, value: str) -> None:
        self.doing = path, value
        await h.write(path, value)
        self.said[path], self.doing = value, None

    async def mkdir(self, h: Harness, path: str) -> None:
        self.doing = path, "mkdir"
        above, _, name = path.rpartition("/")
        await h.operations.mkdir(await h.inode(above) if above else 1, name.encode(), 0o755, h.ctx)
        self.made.add(path)
        self.doing = None

    async def chown(self, h: Harness, path: str, uid: int) -> None:
        self.doing = path, f"chown {uid}"
        fields = SimpleNamespace(
            update_atime=False, update_mtime=False, update_uid=True, update_gid=False, update_mode=False
        )
        entry = SimpleNamespace(st_uid=uid, st_gid=0, st_mode=0)
        await h.operations.setattr(await h.inode(path), entry, fields, None, h.ctx)
        self.owned[path], self.doing = uid, None


def pid_of(machine: Machine, name: str) -> str:
    return f"{machine.programs[name].pid}/{machine.on[name]}"


async def past(machine: Machine, h: Harness) -> None:
    """Everything that can be asked, programs that come and go, and a move."""
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
    machine.programs["a"].context()  # frozen, and given its part, with the others
    await trio.sleep(0.6)
    await machine.write(h, "slice/made/0/gmem.limit.high", "1073741824")
    await machine.write(h, "slice/made/0/gmem.swap.max", "2147483648")
    await machine.write(h, "slice/job/0/compute.freeze", "1")
    await machine.write(h, f"{a}/compute.freeze", "0")
    machine.start("c", "/job")  # comes into a slice that is frozen
    await trio.sleep(0.25)
    machine.world.cgroups[machine.programs["a"].pid] = backend.process.identity.Slice("/made")  # and out of it
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
    """The same on a machine with another GPU and a scheduler, so that shares are asked for too."""
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
    """What a file may say: what was acknowledged, or what was under way."""
    said = {machine.said.get(f"{path}/{name}", FILES[name])}
    if machine.doing is not None and machine.doing[0] == f"{path}/{name}":
        said.add(machine.doing[1])
    return said


def to_stand_still(machine: Machine) -> frozenset[int]:
    """Pids of those that some level has frozen, whatever became of what was under way."""
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
    """The files say what was asked; the hardware does what they say; and nobody is there who should not be."""
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
    """The hardware does what the files say, whatever they say, and no channel is off more than once."""
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
        assert us == asked or (machine.scheduler and not asked), name  # else the scheduler's
        gr = timeslices(program)
        assert not us or gr == [split_timeslice(us, len(gr))] * len(gr), name


def timeslices(program: Program) -> list[int]:
    """Those of its GR TSGs."""
    return [o.timeslice for o in program.objects.values() if o.class_ == rm.CLASS_TSG and o.timeslice != 1024]


async def asked(h: Harness, path: str, name: str) -> str:
    """What a file says is asked for. Of timeslices a process's says what holds."""
    if name != "compute.timeslice":
        return (await h.read(f"{path}/{name}")).strip()
    group = h.tree.directory(await h.inode(path)).subject
    assert isinstance(group, Group)
    us = h.ledger.books(group).timeslice_us
    return f"{us // 1000}" if us else "default"


def expected_timeslice(h: Harness, group: Group) -> int:
    """The shortest of those on the path; a slice's is shared by who is in it."""
    found = []
    for level in h.controller.population.path(group):
        if us := h.ledger.books(level).timeslice_us:
            sharers = 1 if isinstance(level.node, Process) else len(list(h.controller.population.below(level)))
            found.append(us // sharers)
    return min(found, default=0)


def own_timeslices(name: str, count: int) -> list[int]:
    return [OWN_US if name == "a" and not n else 2048 for n in range(count)]


def is_released(machine: Machine) -> None:
    """After a clean end: everybody runs, and has what it had of its own."""
    for name, program in machine.programs.items():
        assert all(program.running()), name
        assert timeslices(program) == own_timeslices(name, len(timeslices(program))), name


def in_virtual_time(main: Callable[[], Any]) -> None:
    clock = MockClock(autojump_threshold=0.002)
    with patient(clock, lambda: False):
        trio.run(main, clock=clock)


@contextlib.contextmanager
def a_machine(
    spawn: Callable[..., subprocess.Popen[bytes]], readback: bool = True, *, wide: bool = False, kernel: bool = False
) -> Iterator[Machine]:
    """`wide`: with two GPUs, and a scheduler. `kernel`: with the module's books."""
    fake = Minded(readback)
    small = {"FIRST_RUN": 64, "WIDE_RUN": 32}  # handles are tried in Python here
    with (
        tempfile.TemporaryDirectory(prefix="ggroup-killed-", dir=MEMORY) as folder,
        mock.patch.multiple("backend.nvidia.discover", **small),
        mock.patch.object(backend.nvidia.checkpoint, "left", tuple),
    ):
        yield Machine(Path(folder) / "one.journal", spawn, fake, FakeNvml(count=1 + wide), wide, kernel)


def live(machine: Machine, life: Life, story: Callable[[Machine, Harness], Any]) -> None:
    """A daemon, with a story, to its end."""

    async def main() -> None:
        async with machine.daemon(life) as h:
            await story(machine, h)

    try:
        with mortal(life):
            in_virtual_time(main)
    except* Killed:
        assert life.dead


def again(machine: Machine, *, further: bool, readback: bool = True) -> None:
    """The daemon after the one that was killed; and, to go `further`, those after that, which was ended."""

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


Spawn = Callable[..., subprocess.Popen[bytes]]


@contextlib.contextmanager
def sleepers() -> Iterator[Spawn]:
    """Makes idle processes, and ends them."""
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
    """One to its clean end, with all points."""
    life = Life()
    with sleepers() as spawn, a_machine(spawn, wide=wide, kernel=kernel) as machine:
        live(machine, life, wider if wide else past)
        is_released(machine)
    assert life.points > 150
    return life


@pytest.fixture(scope="module")
def points() -> int:
    """How many there are in a whole life."""
    return whole_life().points


PARTS = 20
WIDE_STEP = 17
CUTS = 3


@pytest.mark.parametrize("part", range(PARTS))
def test_killed_at_every_point(points: int, part: int) -> None:
    """Every write is there or, if it was under way, perhaps not; who was frozen never runs, and who was not does."""
    for at in range(1 + part, points + 1, PARTS):
        one_death(at)


def test_killed_where_nothing_can_be_asked(points: int) -> None:
    """Without the read-back of channels (a driver that refuses it): nothing is disabled twice, so that a thaw thaws."""
    for at in range(1, points + 1, 25):
        one_death(at, readback=False)


def test_killed_where_shares_are_asked_for(points: int) -> None:
    """With two GPUs, and a scheduler that has timeslices set all the time: at some of the points."""
    for at in range(1, whole_life(wide=True).points + 1, WIDE_STEP):
        one_death(at, wide=True)


@pytest.mark.parametrize("part", range(CUTS))
def test_a_journal_that_is_cut_off_after_a_driver_that_went_on(points: int, part: int) -> None:
    """It says what was true at some moment, and the driver is where it was when the daemon was killed: what the next
    daemon says that it found holds, and nobody is left off the runlist in the end."""
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
    """Whoever is frozen by what was left, or is frozen now, stands still; whoever is let go runs."""
    await settle()
    await trio.sleep(1.2)
    await obeys(machine, h)
    for value in ("1", "0"):
        for name in machine.programs:
            await h.write(f"{pid_of(machine, name)}/compute.freeze", value)
        await obeys(machine, h)


def one_death(at: int, readback: bool = True, *, wide: bool = False, kernel: bool = False) -> None:
    with sleepers() as spawn, a_machine(spawn, readback, wide=wide, kernel=kernel) as machine:
        life = Life(at)
        live(machine, life, wider if wide else past)
        try:
            again(machine, further=at % 4 == 0, readback=readback)
        except BaseException as error:
            error.add_note(f"killed at point {at} of {life.points}, while {machine.doing}")
            raise


def test_who_hands_over_gives_nothing_back(spawn: Callable[..., subprocess.Popen[bytes]]) -> None:
    """A daemon that another one replaces: whoever is frozen does not run for a moment, from the one to the other."""

    async def hand_over(machine: Machine, h: Harness) -> None:
        await past(machine, h)
        machine.fake.still = to_stand_still(machine)
        h.controller.hand_over()

    with a_machine(spawn) as machine:
        live(machine, Life(), hand_over)
        assert machine.fake.still
        assert not machine.fake.ran
        again(machine, further=False)
