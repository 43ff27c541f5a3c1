"""A driver, a journal and programs that outlive the daemon, which is killed at a chosen point of its life."""

from __future__ import annotations

import contextlib
import ctypes
import os
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

import backend.process.identity
from backend.core.protocols import Gpu
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
from backend.nvidia.waiting import Waiting
from backend.process.identity import Group, Member
from tests.support.fake_nvidia import FakeNvml, FakeSystem, Program
from tests.support.harness import MIB, REAL_S, Harness, World, running
from tests.support.journaled import MEMORY, let_go

CHANGES = (rm.SET_TIMESLICE, rm.FIFO_DISABLE_CHANNELS)
"""Controls whose effect outlives the daemon."""

SECONDS = 5.0
"""Seconds that a lever may take that goes through the kernel."""

OWN_US = 777
"""Timeslice that a program gave itself, in microseconds."""


class Killed(BaseException):
    """The daemon was killed: it does nothing any more."""


@attrs.define
class Life:
    """The life of one daemon, up to a point."""

    at: int | None = None
    """Point at which it is killed; None for a clean end."""
    points: int = 0
    """Number of points passed so far."""
    asked: list[int] = attrs.field(factory=list)
    """Points at which the kernel was called."""
    open: set[int] = attrs.field(factory=set)
    """Descriptors of the kernel's books."""
    dead: bool = False
    waiting: Waiting | None = None
    """Its notes of what is off the runlist."""
    left: bytes = b""
    """What was in these notes when it was killed."""

    def point(self) -> bool:
        """Pass a point. Return whether the daemon is killed here, for a caller that leaves something half done; Killed
        if it is dead already."""
        if self.dead:
            raise Killed
        self.points += 1
        self.dead = self.points == self.at
        if self.dead:
            self.leave()
        return self.dead

    def leave(self) -> None:
        """Keep its notes as they are now: what is done after a death to end the tasks of this process is not of it."""
        if self.waiting is not None and not self.left:
            self.left = noted_in(self.waiting)

    def pass_(self) -> None:
        """Pass a point, and raise Killed if the daemon is killed here."""
        if self.point():
            raise Killed


def noted_in(waiting: Waiting) -> bytes:
    """Return what the guard of a daemon would find now."""
    return os.pread(waiting.fileno(), os.fstat(waiting.fileno()).st_size, 0)


class Minded(FakeSystem):
    """A driver that notes each program that runs and must not."""

    def __init__(self, readback: bool) -> None:
        super().__init__(trace=None, readback=readback)
        self.still: frozenset[int] = frozenset()
        """Pids of programs that must not run, even for a moment."""
        self.ran: list[int] = []

    def mind(self) -> None:
        """Look which programs run, after a lever has moved."""
        self.ran += [pid for pid in self.still if pid in self.programs and any(self.programs[pid].running())]


class Driver:
    """The same driver as one daemon has it: a dead daemon does not reach it, in none of its threads."""

    def __init__(self, fake: Minded, life: Life) -> None:
        self._fake = fake
        self._life = life
        self._inside = 0
        self._has_ended = False
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
        """Let a call in progress end, and keep abandoned threads from making another; then close all that is open, as
        the kernel does."""
        with self._left:
            self._left.wait_for(lambda: not self._inside, REAL_S)
            self._has_ended = True
        for fd in list(self._fake.open):
            self._fake.close(fd)

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        with self._left:
            if self._life.dead or self._has_ended:
                raise Killed
            self._inside += 1
        try:
            yield
        finally:
            with self._left:
                self._inside -= 1
                self._left.notify_all()


class Mortal(Journal):
    """A journal whose daemon may be killed before, during and after each write."""

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
"""Requests that change nothing in the kernel."""


@contextlib.contextmanager
def mortal(life: Life) -> Iterator[None]:
    """Give the kernel module's books to one daemon, which may be killed before and after each call."""
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
    """Close a ledger as the death of a daemon does, as far as the kernel notices."""
    for descriptor in {*ledger._queues.values(), *ledger._streams, ledger._control, *life.open}:
        os.close(descriptor)
    ledger._events.close()


@attrs.define
class Machine:
    """Everything that outlives daemons, and what was asked of them."""

    path: Path
    """The journal."""
    spawn: Callable[..., subprocess.Popen[bytes]]
    fake: Minded
    nvml: FakeNvml = attrs.field(factory=lambda: FakeNvml(count=1))
    scheduler: bool = False
    """Whether daemons schedule."""
    kernel: bool = False
    """Whether the books are the kernel's."""
    world: World = attrs.field(factory=World)
    said: dict[str, str] = attrs.field(factory=dict)
    """Values that were written and acknowledged, by path."""
    owned: dict[str, int] = attrs.field(factory=dict)
    """Owners by path."""
    made: set[str] = attrs.field(factory=set)
    """Paths of slices and processes that were made."""
    doing: tuple[str, str] | None = None
    """Request that is not answered yet: path and value, of any kind."""
    programs: dict[str, Program] = attrs.field(factory=dict)
    """Programs by a name that the test gives."""
    on: dict[str, int] = attrs.field(factory=dict)
    """GPU of each program."""
    processes: dict[str, subprocess.Popen[bytes]] = attrs.field(factory=dict)

    @property
    def gpus(self) -> range:
        """Indices of the GPUs."""
        return range(self.nvml.count)

    def group(self, name: str) -> Group:
        """Return the group of a program on its GPU."""
        return Member(self.programs[name].identity, self.on[name])

    def start(self, name: str, cgroup: str = "/", gpu: int = 0) -> None:
        """Start a program, which makes a context."""
        self.on[name] = gpu
        self.processes[name] = self.spawn()
        process = backend.process.identity.identify(self.processes[name].pid)
        self.world.cgroups[process.pid] = backend.process.identity.Slice(cgroup)
        self.programs[name] = self.fake.program(process.pid, gpu, start=process.start)
        self.nvml.compute.setdefault(gpu, []).append((process.pid, MIB))

    def end(self, name: str) -> None:
        """End a program."""
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
        """Start the next daemon."""
        driver = Driver(self.fake, life)
        journal = Mortal(self.path, life)
        life.waiting = Waiting()
        h: Harness | None = None
        ledger: JournaledLedger | KernelLedger | None = None
        try:
            gpus = await open_gpus(system=driver, nvml=Nvml(self.nvml), selftest=False)  # type: ignore[arg-type]
            names = {gpu.info.index: gpu.info.uuid for gpu in gpus}
            for gpu in gpus:
                gpu.notes, gpu.waiting = Timeslices(journal, gpu.info.uuid), life.waiting
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
                h.controller.spaces._exits.close()
            raise
        finally:
            driver.end()
            life.leave()
            life.waiting.close()
            life.waiting = None

    # Steps of a history

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


@contextlib.contextmanager
def a_machine(
    spawn: Callable[..., subprocess.Popen[bytes]], readback: bool = True, *, wide: bool = False, kernel: bool = False
) -> Iterator[Machine]:
    """Yield a machine. `wide`: with two GPUs and a scheduler. `kernel`: with the module's books."""
    fake = Minded(readback)
    small = {"FIRST_RUN": 64, "WIDE_RUN": 32}  # since handles are tried in Python here
    with (
        tempfile.TemporaryDirectory(prefix="ggroup-killed-", dir=MEMORY) as folder,
        mock.patch.multiple("backend.nvidia.discover", **small),
        mock.patch.object(backend.nvidia.checkpoint, "left", tuple),
    ):
        yield Machine(Path(folder) / "one.journal", spawn, fake, FakeNvml(count=1 + wide), wide, kernel)
