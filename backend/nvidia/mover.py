"""Migrate programs between NVIDIA GPUs: the checks before, and the recovery of programs that were left in between.

A program's state moves by way of the host (cuCheckpoint, :mod:`backend.nvidia.checkpoint`), so host and target both
need room for it. Memory that our library has placed stays where it is meanwhile, and then follows from GPU to GPU. A
program that was brought to rest and fits on no GPU any more waits in the host; this daemon or the next one tries it
again.
"""

from __future__ import annotations

import errno
import logging
import math
from collections.abc import Callable

import trio

from backend.core.records import GpuInfo
from backend.cuda.migrations import Standby
from backend.nvidia import checkpoint
from backend.nvidia.checkpoint.records import Action, Request, State
from backend.process.identity import Process

log = logging.getLogger(__name__)

LOCK_S = 5.0
"""Seconds within which a program has to come to rest: its submitted work ends, and its calls return."""
BEGUN_S = 2.0
"""Seconds after which the agents that an earlier daemon started are known."""
AGAIN_S = 5.0
"""Seconds between two attempts to resume a program that waits in the host."""


class Mover:
    """Migration between all GPUs of a machine that are of the same model."""

    def __init__(self, home: int, room: Callable[[Process], int] = checkpoint.host_room) -> None:
        """`room` returns the bytes that a process may have in the host in addition to what it has."""
        self.home = home
        """Index of the GPU that runs this Mover."""
        self.watchers: list[Callable[[Process, str], None]] = []
        """Called with a program that an earlier daemon suspended, and the UUID of its GPU, when the
        program runs again.
        """
        self._room = room
        self._look = trio.Event()
        self._look.set()  # at programs that an earlier daemon has left in between
        self._suspended: set[Process] | None = None  # those that an earlier daemon suspended, and that do not run yet
        self._told: set[Process] = set()  # those of which the log says that they cannot run
        self._sure = math.inf  # when all agents of an earlier daemon are known, by trio's clock

    async def move(
        self,
        process: Process,
        source: GpuInfo,
        target: GpuInfo,
        held: int,
        carried: int | None = None,
        standby: Standby | None = None,
    ) -> None:
        """Migrate a process that holds `held` bytes on `source`; return once it runs on `target`. `carried` of the
        bytes go by way of the host, by default all. Raises OSError as :meth:`backend.core.protocols.Gpu.migrate`;
        unless the message says otherwise, the process then runs on `source`, or stands by to run there.
        """
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
        """Return whether an agent is, or may be, at work on a process, or has left it where it cannot run."""
        try:
            return trio.current_time() < self._sure or any(one.request.process == process for one in checkpoint.left())
        except OSError:  # not known
            return True

    def is_due(self, process: Process) -> bool:
        """Return whether a process is in the host since an earlier daemon, and is brought back as
        soon as possible.
        """
        return self._suspended is not None and process in self._suspended

    async def run(self) -> None:
        """Resume programs that were left in the middle of a move, until cancelled. Programs that an earlier daemon
        suspended are resumed, too: those that are to be frozen are frozen again right after.
        """
        self._sure = trio.current_time() + BEGUN_S
        while True:
            await self._look.wait()
            self._look = trio.Event()
            try:
                left = checkpoint.left()
            except OSError as error:  # for lack of descriptors, say: no program is forgotten for that
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
        """Resume a program that no agent works on and that was not meant to stay so; return whether it runs."""
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
    """Return how long a program stood still, and in which steps."""
    steps = ", ".join(f"{step.value} {ms:.0f}" for step, ms in done.milliseconds.items())
    return f"it stood still for {done.stall_ms or 0:.0f} ms ({steps})"
