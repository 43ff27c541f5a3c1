"""Programs of NVIDIA GPUs that go from one to another: what is looked at before, and what is looked after behind.

What is in the program moves by way of the host (cuCheckpoint, :mod:`backend.nvidia.checkpoint`), so both have to have
room for it; but what our library has placed stays where it is meanwhile, and follows from one GPU to the other. A
program that came to a rest and has room nowhere any more waits in the host: it is tried again, by us or by the daemon
after us.
"""

from __future__ import annotations

import errno
import logging
import math
from collections.abc import Callable

import trio

from backend.core.records import GpuInfo
from backend.cuda.managed import Standby
from backend.nvidia import checkpoint
from backend.nvidia.checkpoint.records import Action, Request, State
from backend.process.identity import Process

log = logging.getLogger(__name__)

LOCK_S = 5.0
"""Seconds in which a program has to come to a rest: what it has given to the GPU ends, and its calls return."""
BEGUN_S = 2.0
"""Seconds in which an agent that a daemon before us has started is known to be at it."""
AGAIN_S = 5.0
"""Seconds between two tries to have one run that waits in the host."""


class Mover:
    """One for all GPUs of a machine that are of the same model."""

    def __init__(self, home: int, room: Callable[[Process], int] = checkpoint.host_room) -> None:
        """`room` is how many bytes a process may have in the host besides what it has."""
        self.home = home
        """The index of the GPU that runs it."""
        self.watchers: list[Callable[[Process, str], None]] = []
        """Told which program was suspended on which GPU (its UUID) by a daemon before us, and runs again."""
        self._room = room
        self._look = trio.Event()
        self._look.set()  # at what a daemon before us has left
        self._suspended: set[Process] | None = None  # those that a daemon before us has, and that do not run yet
        self._told: set[Process] = set()  # of which it was said that they cannot run
        self._sure = math.inf  # when all agents of a daemon before us are known, by trio's clock

    async def move(
        self,
        process: Process,
        source: GpuInfo,
        target: GpuInfo,
        held: int,
        carried: int | None = None,
        standby: Standby | None = None,
    ) -> None:
        """Returns once the process, which holds so many bytes on `source`, runs on `target`. `carried` of them go by
        way of the host, by default all. OSError as for :meth:`backend.core.protocols.Gpu.migrate`; unless its words say
        something else, it runs on `source`, or stands by to do so."""
        if source.name != target.name:
            raise OSError(errno.EXDEV, f"{source.name} and {target.name} are not the same")
        carried = held if carried is None else carried
        if self._room(process) < carried:
            raise OSError(errno.ENOMEM, f"the host, or the memory cgroup, has no room for its {carried} bytes")
        try:
            done = await checkpoint.move(process, source.uuid, target.uuid, held, LOCK_S, standby, carried)
        except checkpoint.CheckpointError as error:
            if error.errno == errno.ESRCH:
                raise ProcessLookupError(errno.ESRCH, error.strerror) from None
            if error.state is not State.RUNNING:
                log.error("pid %d was to go from GPU %d to %d: %s", process.pid, source.index, target.index, error)
                self._look.set()
            raise
        log.info("pid %d is on GPU %d now, was on %d: %s", process.pid, target.index, source.index, _told(done))

    def is_at(self, process: Process) -> bool:
        """Whether an agent is, or may be, at a process, or has left it where it cannot run."""
        try:
            return trio.current_time() < self._sure or any(one.request.process == process for one in checkpoint.left())
        except OSError:  # it is not known
            return True

    def is_due(self, process: Process) -> bool:
        """Whether a process is in the host since a daemon before us, and is brought back as soon as that can be."""
        return self._suspended is not None and process in self._suspended

    async def run(self) -> None:
        """Has programs run that something was begun with, until cancelled. Those, too, that were suspended by a daemon
        before us: what is to be frozen still is so soon after."""
        self._sure = trio.current_time() + BEGUN_S
        while True:
            await self._look.wait()
            self._look = trio.Event()
            try:
                left = checkpoint.left()
            except OSError as error:  # descriptors are short, say: none is forgotten for that
                log.debug("which programs are in the middle of a move is not known: %s", error)
                self._look.set()
            else:
                there = {one.request.process for one in left}
                if self._suspended is None:
                    self._suspended = {one.request.process for one in left if one.request.action is Action.SUSPEND}
                self._suspended &= there
                self._told &= there
                for one in left:
                    process, action = one.request.process, one.request.action
                    due = not one.busy and (action is not Action.SUSPEND or process in self._suspended)
                    if due and await self._recover(one.request):
                        self._suspended.discard(process)
                if self._suspended:  # no room, or its agent is still at it
                    self._look.set()
            await trio.sleep(AGAIN_S)

    async def _recover(self, request: Request) -> bool:
        """Has one run that is not worked on, and that was not meant to be so; returns whether it does."""
        process = request.process
        try:
            await checkpoint.recover(process)
        except checkpoint.CheckpointError as error:
            if error.errno != errno.ESRCH:
                level = logging.DEBUG if process in self._told else logging.WARNING
                log.log(level, "pid %d is in the middle of a move: %s", process.pid, error)
                self._told.add(process)
                self._look.set()
            else:
                checkpoint.removed(process)
            return False
        self._told.discard(process)
        log.warning("pid %d was in the middle of a move, and runs again", process.pid)
        for watcher in self.watchers if request.action is Action.SUSPEND else ():
            watcher(process, request.source)
        return True


def _told(done: checkpoint.Done) -> str:
    """How long it stood still, and for what."""
    steps = ", ".join(f"{step.value} {ms:.0f}" for step, ms in done.milliseconds.items())
    return f"it stood still for {done.stall_ms or 0:.0f} ms ({steps})"
