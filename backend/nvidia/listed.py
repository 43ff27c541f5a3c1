"""Who NVML lists on one GPU, since when, and how much it says that each holds."""

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
"""Seconds in which those who are new on a list are looked at; who takes longer is new with the next one."""
THREADS = 16
"""In which they are."""


@attrs.define
class ProcessList:
    """See the module."""

    _index: int
    _nvml: Nvml
    _system: System
    _knows: Callable[[Process], bool]
    """Whether a process is in the tree, and its exit would have been told."""
    _see: Callable[[Process, int], None]
    """Told what a process that is not new holds, each time, to compare with what it says itself; 0 for one that is not
    listed any more."""
    _since: dict[Process, float] = attrs.field(factory=dict)
    _held: dict[Process, int] = attrs.field(factory=dict)
    _answers: bool = True
    _limiter: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(THREADS))
    _unmet: bool = False  # a program could not be looked at, and it was told of

    async def look(self) -> Sequence[Process]:
        """Looks at the list; who is new on it, and is to be :meth:`met`. OSError(ENODEV) where the GPU is lost."""
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
                listed.update(known for known in self._since if known.pid == pid)  # as it was
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
        """Who bears each of them, or why that is not known; nothing for those that take too long. A process that is in
        the tree is not looked at again, since its end would have been told."""
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
        """One that was new is known now."""
        self._unmet = False

    def not_met(self, process: Process, error: OSError) -> None:
        """One that was new cannot be known: something is short here, say descriptors. With the next list it is new."""
        self.forget(process)
        self._tell(process.pid, error)

    def forget(self, process: Process) -> None:
        """It is gone."""
        for known in (self._since, self._held):
            known.pop(process, None)

    def since(self, process: Process) -> float | None:
        """When it came, by trio's clock; None for who was never listed."""
        return self._since.get(process)

    def held(self, process: Process) -> int:
        """Bytes, as NVML last said; 0 where it does not say."""
        return self._held.get(process, 0)

    def tell(self, process: Process, see: Callable[[Process, int], None]) -> None:
        """What the last look showed of one that was new then; nothing where NVML does not say."""
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
