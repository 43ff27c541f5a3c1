"""The processes that NVML lists on one GPU: since when, and how much memory it reports for each."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import attrs
import trio

from backend.common.threads import in_a_thread
from backend.nvidia.linux import System
from backend.nvidia.nvml import Nvml
from backend.process.identity import Process

log = logging.getLogger(__name__)

ANSWER_S = 1.0
"""Seconds within which new processes on a list are identified; a process that takes longer is new on
the next list.
"""
THREADS = 16
"""Threads that identify them."""


@attrs.define
class ProcessList:
    """The list of processes of one GPU."""

    _index: int
    _nvml: Nvml
    _system: System
    _knows: Callable[[Process], bool]
    """Return whether a process is in the tree, so that its exit would have been reported."""
    _see: Callable[[Process, int], None]
    """Called at each look with a process that is not new and the bytes that it holds, to compare with what it says
    itself; with 0 once it is no longer listed.
    """
    _since: dict[Process, float] = attrs.field(factory=dict)
    _held: dict[Process, int] = attrs.field(factory=dict)
    _answers: bool = True
    _limiter: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(THREADS))
    _unmet: bool = False  # whether a program could not be looked at, and the log says so

    async def look(self) -> Sequence[Process]:
        """Look at the list, and return the processes that are new on it, for :meth:`met` or :meth:`not_met`.
        Raises OSError(ENODEV) where the GPU is lost.
        """
        try:
            usage = await self._nvml.usage(self._index)
        except OSError as error:
            if error.errno == errno.ENODEV:
                raise
            if self._answers:
                log.warning("GPU %d: no list of processes: %s", self._index, error)
            self._answers = False
            return ()
        if not self._answers:
            log.info("GPU %d: NVML answers again", self._index)
            self._answers = True
        new: list[Process] = []
        listed: set[Process] = set()
        whose = await self._identify(usage)
        for pid, nbytes in usage.items():
            process = whose.get(pid)
            if isinstance(process, ProcessLookupError):
                continue
            if process is None or isinstance(process, OSError):
                if process is not None:
                    self._tell(pid, process)
                listed.update(known for known in self._since if known.pid == pid)  # kept as it was
                continue
            listed.add(process)
            if process not in self._since:
                self._since[process] = trio.current_time()
                new.append(process)
                if nbytes is not None:
                    self._held[process] = nbytes
            elif nbytes is not None:
                self._hold(process, nbytes)
        for process in self._since.keys() - listed:
            self._hold(process, 0)
        return new

    async def _identify(self, pids: Iterable[int]) -> Mapping[int, Process | OSError]:
        """Return the process of each pid, or the error that hides it; pids that take too long are left out. A
        process in the tree is not looked at again, since its end would have been reported.
        """
        known = {process.pid: process for process in self._since}
        found: dict[int, Process | OSError] = {}

        async def ask(pid: int) -> None:
            try:
                start = await in_a_thread("a program", partial(self._system.start_time, pid), self._limiter)
                found[pid] = Process(pid, start)
            except OSError as error:
                found[pid] = error

        with trio.move_on_after(ANSWER_S):
            async with trio.open_nursery() as nursery:
                for pid in pids:
                    if pid in known and self._knows(known[pid]):
                        found[pid] = known[pid]
                    else:
                        nursery.start_soon(ask, pid)
        return found

    def met(self, process: Process) -> None:
        """Note that a new process was taken into the tree."""
        self._unmet = False

    def not_met(self, process: Process, error: OSError) -> None:
        """Note that a new process could not be taken into the tree, for lack of descriptors, say. It is new on
        the next list.
        """
        self.forget(process)
        self._tell(process.pid, error)

    def forget(self, process: Process) -> None:
        """Forget a process that is gone."""
        for known in (self._since, self._held):
            known.pop(process, None)

    def since(self, process: Process) -> float | None:
        """Return when a process was first listed, by trio's clock; None if it never was."""
        return self._since.get(process)

    def held(self, process: Process) -> int:
        """Return the bytes that NVML reported last; 0 where it reports none."""
        return self._held.get(process, 0)

    def tell(self, process: Process, see: Callable[[Process, int], None]) -> None:
        """Call `see` with the bytes of a process that was new at the last look, if NVML reports them."""
        if process in self._held:
            see(process, self._held[process])

    def _hold(self, process: Process, nbytes: int) -> None:
        self._held[process] = nbytes
        self._see(process, nbytes)

    def _tell(self, pid: int, error: OSError) -> None:
        log.log(
            logging.DEBUG if self._unmet else logging.WARNING,
            "pid %d on GPU %d is not in the tree yet: %s",
            *(pid, self._index, error),
        )
        self._unmet = True
