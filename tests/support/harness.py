"""Level 3: the whole program in one process and in virtual time, without a kernel: its handlers are called directly.

Processes are real (their pids, start times and exits come from the kernel), time is not: it jumps as soon as
every task waits. So what takes a real moment, an exit, is waited for with :func:`until`, which keeps time standing.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import attrs
import pyfuse3
import trio
import trio.testing

import backend.core.lives
import backend.core.membership
import backend.process.identity
import backend.process.looks
from backend.common.errors import fail
from backend.core.controller import Controller
from backend.core.lives import Memory as LivesMemory
from backend.core.member import UNTOUCHED
from backend.core.protocols import Bookkeeping, Gpu, Moves
from backend.core.reasons import Engines, Off
from backend.core.records import Activity, Capability, Footprint, GpuInfo
from backend.core.settings import TIMESLICE, Lever
from backend.core.tally import Memory
from backend.core.turns import HOLD_US, TurnEnd
from backend.core.workingset import WorkingSet
from backend.ledgers.soft import SoftLedger
from backend.process.dmem import Walls
from backend.process.identity import ROOT, Member, Process, Slice, SliceOn
from backend.scheduler.memory.turns import WAIT_US
from backend.soft.config import SoftConfig
from backend.soft.gpu import SoftGpu
from ggroupfs.fs.controls import LEVERS
from ggroupfs.fs.files import Events
from ggroupfs.fs.inodes import ROOT_INODE
from ggroupfs.fs.keeper import Keeper
from ggroupfs.fs.messenger import Messenger
from ggroupfs.fs.notify import Notifier
from ggroupfs.fs.operations import Operations
from ggroupfs.fs.tree import Tree

T = TypeVar("T")

Spawn = Callable[..., subprocess.Popen[bytes]]
"""Type of the fixture `spawn`."""

MIB = 1 << 20

REAL_S = 120.0
"""Real seconds after which something real hangs: on a busy machine what takes 0.1 s has taken 10."""


async def at_once(what: str, function: Callable[[], T], limiter: trio.CapacityLimiter | None = None) -> T:
    """As :func:`backend.common.threads.in_a_thread`, without a thread: virtual time goes on while one is at work."""
    await trio.lowlevel.cancel_shielded_checkpoint()
    return function()


looks_at_once = functools.partial(mock.patch.object, backend.process.looks, "in_a_thread", at_once)
"""Programs are looked at without threads."""


def virtual(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs an async test in virtual time."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with looks_at_once():
            trio.run(functools.partial(test, *args, **kwargs), clock=trio.testing.MockClock(autojump_threshold=0))

    return run


async def until(condition: Callable[[], T], what: str) -> T:
    """Waits for something real while virtual time stands still: with a task that can run, it does not jump."""
    give_up = time.monotonic() + REAL_S
    while not (result := condition()):
        assert time.monotonic() < give_up, f"never happened: {what}"
        await trio.lowlevel.checkpoint()
    return result


async def answers(awaitable: Awaitable[object]) -> int:
    """The errno of a request, 0 if there is none."""
    try:
        await awaitable
    except pyfuse3.FUSEError as error:
        return error.errno
    return 0


def but_time(text: str) -> str:
    """The lines of a file but that which grows with time."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("byte_seconds "))


async def settle() -> None:
    """Lets every task that can run do so; no time passes."""
    for _ in range(50):
        await trio.lowlevel.checkpoint()


async def time_for_a_look(clock: trio.testing.MockClock) -> None:
    """Has all the time for a look pass, part by part, on a clock that stands still."""
    for _ in range(backend.process.looks.PARTS):
        await trio.testing.wait_all_tasks_blocked()
        clock.jump(backend.process.looks.ANSWER_S / backend.process.looks.PARTS)


# What a lever of a StubGpu can do


async def hang() -> None:
    """Never answers."""
    await trio.sleep_forever()


def raises(error: BaseException) -> Callable[[], Awaitable[None]]:
    """Fails."""

    async def behave() -> None:
        await trio.lowlevel.checkpoint()
        raise error

    return behave


def refuses(code: int) -> Callable[[], Awaitable[None]]:
    """Fails with an errno."""
    return raises(fail(code))


class StubGpu:
    """A Gpu that records what is asked of it, and whose levers do as the test says: hang, fail, or die midway."""

    def __init__(self, index: int = 0, capacity: int = 1 << 30) -> None:
        self.late_us = 0
        self.switch_us = 0
        self.info = GpuInfo(index, f"GPU-{index}", "stub", "none", capacity, 2000, 10, 100_000)
        self.calls: list[tuple[str, int, int]] = []
        """(lever, pid, value) of every call."""
        self.detached: set[Process] = set()
        """Processes whose TSGs are off the runlist, all of them."""
        self.without_gr: set[Process] = set()
        """Processes whose GR TSGs alone are off the runlist."""
        self.timeslices: dict[Process, int] = {}
        """Timeslices in force; absent for the default."""
        self.forgotten: list[Process] = []
        """Processes that were reported to be gone."""
        self.found: dict[Process, bool | None] = {}
        """Whether a process that was moved is here, where a test says it."""
        self.unsupported: set[str] = set()
        """Controls to disclaim."""
        self.unmanaged: set[Process] = set()
        """Whose memory cannot be moved."""
        self.footprints: dict[Process, Footprint] = {}
        """What is said of a process's memory, where a test says it."""
        self.leaving: set[Process] = set()
        """Whose memory is on its way to the host, where a test says it."""
        self.works: dict[Process, Activity] = {}
        """What is said of a process's work, where a test says it."""
        self.turns: list[tuple[str, int, int]] = []
        """(end or begin, pid, microseconds) of every turn that was ended or begun."""
        self.ends: dict[Process, tuple[TurnEnd, float]] = {}
        """How the turns of a process end, and after how many seconds, where a test says it."""
        self.offers: list[Callable[[Process], int]] = []
        """Every time that there was room again."""
        self.bookkeeper: Bookkeeping | None = None
        self.lost = False
        self._scripts: dict[tuple[str, int | None], list[Callable[[], Awaitable[None]] | None]] = {}

    def script(self, lever: str, *behaviours: Callable[[], Awaitable[None]] | None, pid: int | None = None) -> None:
        """What the next calls of a lever do, for one process or for any; None is as usual, as are all after them."""
        self._scripts[lever, pid] = list(behaviours)

    def capabilities(self) -> Mapping[str, Capability]:
        return {name: Capability.ENFORCED for name in LEVERS if name not in self.unsupported}

    async def run(
        self, bookkeeper: Bookkeeping, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        self.bookkeeper = bookkeeper
        task_status.started()
        await trio.sleep_forever()

    def activity(self, process: Process) -> Activity:
        idle = Activity(tsgs=1, attached=int(process not in self.detached), managed=True)
        return self.works.get(process, idle)

    def manages(self, process: Process) -> bool:
        return process not in self.unmanaged

    def spoken(self, process: Process) -> float:
        return 0.0

    def footprint(self, process: Process) -> Footprint:
        return self.footprints.get(process, Footprint(movable=0) if process in self.unmanaged else Footprint())

    def is_leaving(self, process: Process) -> bool:
        return process in self.leaving

    def offer(self, room: Callable[[Process], int]) -> None:
        self.offers.append(room)

    async def set_lever(self, lever: Lever, process: Process, value: int) -> None:
        if lever is TIMESLICE:
            await self.set_timeslice(process, value)
        else:
            await self._act(f"set_{lever.constant.lower()}", process, value)

    async def set_timeslice(self, process: Process, us: int) -> None:
        """What a lever does that is a timeslice, microseconds."""
        await self._act("set_timeslice", process, us)
        self.timeslices[process] = us
        if not us:
            del self.timeslices[process]

    async def detach(self, process: Process, engines: Engines = Engines.ALL) -> None:
        await self._act("detach", process, 0 if engines is Engines.ALL else engines.value)
        (self.detached.add if engines is Engines.ALL else self.detached.discard)(process)
        (self.without_gr.add if engines is Engines.GR else self.without_gr.discard)(process)

    async def attach(self, process: Process) -> None:
        await self._act("attach", process)
        self.detached.discard(process)
        self.without_gr.discard(process)

    def note_reasons(self, process: Process, off: Off) -> None:
        pass

    async def end_turn(self, process: Process, bound_us: int, leaves: int = 0) -> TurnEnd:
        self.turns.append(("end", process.pid, bound_us))
        end, seconds = self.ends.get(process, (TurnEnd.UNGATED, 0.0))
        await trio.sleep(min(seconds, bound_us / 1e6))
        return end

    def rank(self, behind: Mapping[Process, Sequence[Process]], hold_us: int) -> None:
        pass

    async def begin_turn(self, process: Process) -> None:
        self.turns.append(("begin", process.pid, 0))

    def working_set(self, process: Process) -> WorkingSet | None:
        return None

    def shares(self, process: Process) -> frozenset[Hashable] | None:
        return None

    async def prepare(self, process: Process, nbytes: int) -> int:
        return 0

    async def reclaim(self, process: Process, nbytes: int) -> int:
        await self._act("reclaim", process, nbytes)
        assert self.bookkeeper is not None
        self.bookkeeper.moved_out(process, self.info.index, nbytes, 1)
        return nbytes

    async def migrate(self, process: Process, target: Gpu) -> None:
        assert isinstance(target, StubGpu)
        assert process not in self.detached, "a frozen program never comes to a rest"
        await self._act("migrate", process, target.info.index)
        self.forget(process)

    async def finds(self, process: Process) -> bool | None:
        return self.found.get(process, False)

    def hand_over(self) -> None:
        self.handed_over = True

    def forget(self, process: Process) -> None:
        self.forgotten.append(process)
        self.detached.discard(process)
        self.timeslices.pop(process, None)

    async def _act(self, lever: str, process: Process, value: int = 0) -> None:
        self.calls.append((lever, process.pid, value))
        for key in ((lever, process.pid), (lever, None)):
            if self._scripts.get(key):
                behave = self._scripts[key].pop(0)
                if behave is not None:
                    await behave()
                return


class World:
    """What the kernel would say of processes, where a test says otherwise: their cgroups and their start times."""

    def __init__(self) -> None:
        self.cgroups: dict[int, Slice] = {}
        """Cgroup of a pid; the root for others."""
        self.later: dict[int, int] = {}
        """Clock ticks by which a pid was started later than it was: a recycled pid."""
        self.ids: dict[str, int] | None = None
        """Identity of the cgroup at each path where there is one; None where it cannot be told of any."""
        self._start_time = backend.process.identity.start_time

    def start_time(self, pid: int) -> int:
        """As :func:`backend.process.identity.start_time`."""
        return self._start_time(pid) + self.later.get(pid, 0)

    def cgroup_of(self, pid: int) -> Slice:
        """As :func:`backend.process.identity.cgroup_of`."""
        return self.cgroups.get(pid, ROOT)

    def ids_of(self, slice_: Slice) -> tuple[int, ...] | None:
        """As :func:`backend.process.cgroups.ids`."""
        if self.ids is None:
            return None
        return (self.ids[slice_.path],) if slice_.path in self.ids else ()


class FakeKernel:
    """The dentry cache as a list of what it was told."""

    def __init__(self) -> None:
        self.dropped: list[tuple[int, bytes, int]] = []
        """(parent, name, inode) of every entry that was invalidated."""
        self.stale: list[int] = []
        """Inodes whose attributes were."""

    def invalidate_entry(self, inode_p: int, name: bytes, deleted: int = 0) -> None:
        self.dropped.append((inode_p, name, deleted))

    def invalidate_inode(self, inode: int, attr_only: bool = False) -> None:
        self.stale.append(inode)


@attrs.define
class Token:
    """A readdir buffer with room for so many entries."""

    room: int
    entries: list[tuple[bytes, int, int]] = attrs.field(factory=list)
    """(name, inode, next id)."""


def _readdir_reply(token: Token, name: bytes, attr: pyfuse3.EntryAttributes, next_id: int) -> bool:
    if len(token.entries) >= token.room:
        return False
    token.entries.append((name, attr.st_ino, next_id))
    return True


class Waker:
    """A poll handle."""

    def __init__(self) -> None:
        self.woken = 0
        """How often."""

    def notify(self) -> None:
        self.woken += 1


@attrs.define
class Harness:
    """The program, with handles on all of its parts."""

    controller: Controller
    ledger: SoftLedger
    tree: Tree
    events: Events
    notifier: Notifier
    operations: Operations
    kernel: FakeKernel
    world: World
    scope: trio.CancelScope

    ctx: Any = attrs.field(factory=lambda: SimpleNamespace(uid=0, gid=0, pid=os.getpid(), umask=0o022))
    """The caller of the requests."""

    # Processes

    async def arrive(self, pid: int, cgroup: str = "/", *, gmem: int = 0, gpu: int = 0) -> Process:
        """A process makes a context on a GPU, and holds memory there."""
        if cgroup != "/":
            self.world.cgroups[pid] = Slice(cgroup)
        process = backend.process.identity.identify(pid)
        await self.controller.bookkeeper.arrive(process, gpu)
        if gmem:
            await self.controller.bookkeeper.charge(process, gpu, gmem)
        return process

    async def gone(self, process: Process) -> None:
        """Waits until the exit of a process was noticed."""
        await until(lambda: self.controller.population.resident(process) is None, f"{process} is gone")

    # Files, by path as seen from the mountpoint, through the handlers

    async def inode(self, path: str) -> int:
        """lookup() of every component. FUSEError."""
        inode = ROOT_INODE
        for name in path.strip("/").split("/"):
            inode = (await self.operations.lookup(inode, os.fsencode(name), self.ctx)).st_ino
        return inode

    async def open(self, path: str) -> int:
        """open(2)."""
        return (await self.operations.open(await self.inode(path), os.O_RDWR, self.ctx)).fh

    async def read(self, path: str) -> str:
        """cat."""
        fh = await self.open(path)
        try:
            return (await self.operations.read(fh, 0, 65536)).decode()
        finally:
            await self.operations.release(fh)

    async def write(self, path: str, value: object) -> None:
        """echo VALUE > PATH."""
        fh = await self.open(path)
        try:
            await self.operations.write(fh, 0, f"{value}\n".encode())
        finally:
            await self.operations.release(fh)

    async def refused(self, path: str, value: object) -> int:
        """The errno that a write gives."""
        code = await answers(self.write(path, value))
        assert code, f"{value!r} was taken by {path}"
        return code

    async def listdir(self, path: str, room: int = 1000) -> list[str]:
        """ls, `room` entries a request."""
        fh = await self.operations.opendir(await self.inode(path) if path != "/" else ROOT_INODE, self.ctx)
        names: list[str] = []
        start = 0
        while True:
            token = Token(room)
            await self.operations.readdir(fh, start, token)
            if not token.entries:
                await self.operations.releasedir(fh)
                return names
            names += [os.fsdecode(name) for name, _, _ in token.entries]
            start = token.entries[-1][2]

    def kill(self) -> None:
        """SIGKILL: everything ends at once, and nothing is given back."""

        async def release() -> bool:
            return False

        self.controller._follower.release = release  # type: ignore[method-assign]
        self.scope.cancel()

    # What may not be left over

    def leftovers(self) -> dict[str, int]:
        """How much every table holds that a process is entered in. White box: these are what a leak would fill."""
        follower, reclaimer = self.controller._follower, self.controller._reclaimer
        population, exits = self.controller.population, self.controller._membership.exits
        of_slices = len(population._slices) * len(self.controller.gpus)
        resident = len([record for record in population.records() if isinstance(record.group, Member)])
        return {
            "residents": len(population),
            "slices": len(population._slices),
            "accounts": len(getattr(self.ledger, "_accounts", None) or self.ledger._ids),
            "records": resident,
            "records of no slice": len(population.records()) - resident - of_slices,
            "applied": len([r for r in population.records() if r.compute.applied != UNTOUCHED]),
            "scheduled": len(follower._placed),
            "shown as frozen": len([r for r in population.records() if r.compute.shown]),
            "held": len([r for r in population.records() if r.compute.held]),
            "kills": len(self.controller._killer._ends) + len(self.controller._killer._refused),
            "silences": len(self.controller._killer._silences),
            "moves": len(self.controller._migrator._moves.left()),
            "to be applied": len(follower.background),
            "listeners of the dead": len([g for g in reclaimer._listeners if not population.holds(g)]),
            "pidfds": len(exits._pidfds),
            "members of spaces": len(self.controller.spaces._members),
            "watched": len(exits._processes),
            "families promised": len(self.controller._membership._promises),
            "families": population.families,
            "places of families": len(population._places._holds),
            "directories": len([d for d in self.tree._directories.values() if d.subject not in ("root", "gpus", ROOT)]),
            "owners": len(self.tree._ownership),
            "times": len(self.tree._times),
            "lives": len(self.controller.lives),
            "peaks of the dead": len([g for g in self.controller._peaks._marks if not population.holds(g)]),
            "events of the dead": len([g for g, _ in self.events._counts if not population.holds(g)]),
            "pollers": len(self.events._waiting),
            "open files": len(self.operations._files),
            "listings": len(self.operations._listings),
        }

    def check(self) -> None:
        """What always holds: every sum is that of its parts, and nothing is detached that is not frozen."""
        population = self.controller.population
        for index, gpu in self.controller.gpus.items():
            for entry in population._slices.values():
                books = self.ledger.books(SliceOn(entry.slice, index))
                below = [Member(r.process, index) for r in entry.members.values() if index in r.gpus]
                below += [SliceOn(child, index) for child in entry.children]
                assert books.current == sum(self.ledger.books(group).current for group in below)
                assert books.swap == sum(self.ledger.books(group).swap for group in below)
                group = SliceOn(entry.slice, index)
                assert population.sharers(group) == sum(index in r.contexts for r in population.below(group))
            if isinstance(gpu, StubGpu):
                for process in gpu.detached:
                    path = population.path(Member(process, index))
                    off = self.controller._follower.place(Member(process, index)).off
                    frozen = any(self.ledger.books(level).frozen for level in path)
                    assert frozen or off, f"{process} is frozen by nobody"
            if isinstance(gpu, SoftGpu):
                for process, tenant in gpu._tenants.items():
                    books, page = self.ledger.books(Member(process, index)), gpu.config.page
                    assert tenant.memory.resident * page == books.current, (process, books)
                    assert (len(tenant.memory) - tenant.memory.resident) * page == books.swap, (process, books)


@contextlib.asynccontextmanager
async def running(
    *gpus: Gpu,
    ledger: SoftLedger | None = None,
    world: World | None = None,
    mountpoint: Path | None = None,
    poll: bool = True,
    scheduler: bool = False,
    hold_us: int | None = HOLD_US,
    keeper: Keeper | None = None,
    moves: Moves | None = None,
    memory: Memory | None = None,
    lives: LivesMemory | None = None,
    turn_wait_us: int | None = WAIT_US,
    walls: Walls | None = None,
    servers: tuple[Path, Path] | None = None,
) -> AsyncIterator[Harness]:
    """The program on these GPUs (by default one SoftGpu of 64 MiB), checked and ended at the end; no descriptor stays.

    `keeper` knows owners and modes from before, `moves` the processes that were on the way to another GPU, `memory`
    what happened in groups, and `lives` how long slices stay; `walls` are the kernel's own limits, and `servers` what
    the spaces of slices have. The Notifier's waiting part runs only with a `mountpoint`, which it truncates files in.
    """
    gc.collect()
    before = descriptors()
    ledger, kernel, world = ledger or SoftLedger(), FakeKernel(), world or World()
    with (
        looks_at_once(),
        mock.patch.object(backend.process.identity, "start_time", world.start_time),
        mock.patch.object(backend.core.membership, "cgroup_of", world.cgroup_of),
        mock.patch.object(backend.core.lives, "ids", world.ids_of),
        mock.patch.object(pyfuse3, "readdir_reply", _readdir_reply),
    ):
        gpus = gpus or (SoftGpu(0, SoftConfig(capacity=64 * MIB)),)
        controller = Controller(
            *(ledger, gpus),
            scheduler=scheduler,
            moves=moves,
            memory=memory,
            lives=lives,
            hold_us=hold_us,
            turn_wait_us=turn_wait_us,
            servers=servers,
        )
        if walls is not None:
            controller.walls.files = walls
        tree, events = Tree(controller, keeper), Events()
        messenger = Messenger()
        notifier = Notifier(tree, events, kernel, messenger, os.fspath(mountpoint or "/nowhere"))
        operations = Operations(tree, events, notifier, poll=poll)
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(controller.run)
                nursery.start_soon(controller.lives.run)
                if mountpoint is not None:
                    nursery.start_soon(notifier.run)
                scope = nursery.cancel_scope
                harness = Harness(controller, ledger, tree, events, notifier, operations, kernel, world, scope)
                yield harness
                if not scope.cancel_called:
                    harness.check()
                scope.cancel()
        finally:
            messenger.end()  # its thread, which keeps all of this
    kept = [*getattr(ledger, "_queues", ()), *getattr(ledger, "_streams", ())]  # until it is closed, of the kernel's
    assert descriptors() == before + len(kept), "descriptors were left open"


def descriptors() -> int:
    """How many this process has open, but for those of trio's own threads and the listing itself."""
    return len(os.listdir("/proc/self/fd")) - 1
