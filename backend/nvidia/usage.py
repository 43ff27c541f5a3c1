"""How much of a GPU each process used: exact from the trace of context switches, otherwise an estimate; and for how
much of that time it was busy (busy.py).

The last use of a process is known some time after it has ended. Its figures are reported as they are when it ends, and
the rest is reported late.
"""

from __future__ import annotations

import errno
import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

import attrs
import trio

from backend.nvidia import rm
from backend.nvidia.busy import BusyTime
from backend.nvidia.deadline import Deadline
from backend.nvidia.nvml import Nvml
from backend.nvidia.parts import Parts, Shared
from backend.nvidia.sampling import SAMPLE_S, Sampling
from backend.nvidia.sight import Sight
from backend.nvidia.trace import LAG_NS, Trace
from backend.process.identity import Process, is_borne

log = logging.getLogger(__name__)

READ_S = 0.1
"""Seconds between two reads of the trace: 0.3 ms of CPU each. The ring has room for 40 times what the busiest GPU
records in that time.
"""
SWITCH_US = 197
"""Microseconds of each stay in the trace that are not work: the gap before it (81), and the part of the stay itself
that is not work (117). With these, time agrees with the kernels that two programs run (an H200, docs/nvidia.md).
"""
DEADLINE = 2.0
"""Deadline of one read, seconds."""


@attrs.frozen
class Ended:
    """A process that has ended, while some of its records in the trace are not charged yet."""

    process: Process
    """The process."""
    told: int
    """Microseconds reported when it ended."""
    until: float
    """Time at which all records are charged, by trio's clock."""


class Usage:
    """Engine time of each process on one GPU, microseconds."""

    def __init__(self, index: int, nvml: Nvml, bind: Callable[[], Trace]) -> None:
        self._index = index
        self._nvml = nvml
        self._bind = bind
        self._trace: Trace | None = None
        self._deadline = Deadline(f"the trace of GPU {index}", DEADLINE)
        self._estimates: dict[int, float] = {}
        self._sampled = False  # whether samples are available
        self._past: Counter[int] = Counter()  # by pid: microseconds from the traces before the GPU was lost
        self._back = trio.Event()
        self._waits = False  # for the GPU to be back; figures do not change meanwhile
        self.lost: Callable[[OSError], None] = lambda error: None
        """Called with the error when the GPU is found to be lost."""
        self.programs: Callable[[], Iterable[tuple[Process, bool | None]]] = lambda: ()
        """Yields the processes on this GPU, and whether they have kernels pending; None if a process does not count
        them.
        """
        self.standing: Callable[[], Collection[Process]] = frozenset
        """Returns the programs that are off the runlist and do not count their kernels."""
        self.late: Callable[[Process, Mapping[str, int]], None] = lambda process, figures: None
        """Called with further figures of a process that has ended, by the names of Activity."""
        self.spaces: Callable[[], Iterable[Shared]] = lambda: ()
        """Yields the spaces on this GPU, whose programs the trace does not tell apart."""
        self._busy = BusyTime(round(LAG_NS / 1e9 / READ_S))
        self._parts = Parts(round(LAG_NS / 1e9 / READ_S))
        self._looked = 0.0  # time of the last look at kernels
        self._sampling = Sampling()
        self._sight = Sight()
        self._ended: list[Ended] = []
        self._unsampled: dict[int, Process] = {}  # processes that have ended since the last sample, by pid

    def exact(self, process: Process) -> int | None:
        """Return the microseconds of a process in the trace; None without a trace. The figure only grows, even if the
        GPU was lost and came back.
        """
        if self._trace is None:
            return self._past[process.pid] if self._waits and self._past else None
        return self._past[process.pid] + self._trace.usec(process.pid)

    def stays(self, process: Process) -> int | None:
        """Return how often a process came onto the engine since the trace began; None without a trace."""
        return None if self._trace is None else self._trace.residency.stays(process.pid)

    def estimate(self, process: Process) -> int | None:
        """Return the sum of NVML's samples of a process, microseconds, if there is no trace; None if there are no
        samples either. With a trace: the part of a program of a space; None for any other, which is told exactly.
        """
        if self._trace is not None:
            return self._parts.usec(process)
        if not self._sampled:
            return None
        return int(self._estimates.get(process.pid, 0.0))

    def busy(self, process: Process) -> tuple[int | None, int | None]:
        """Return the microseconds that a process was busy, and the part of that which comes from samples; None where
        unknown.
        """
        return self._busy.usec(process), self._busy.sampled_usec(process)

    def watched(self, process: Process) -> tuple[int, int] | None:
        """Return the time of a process on the runlist for which samples tell how busy the engine was, and the time of
        that in which the engine worked, microseconds; None if the process is not watched.
        """
        return self._sight.told(process)

    def turns(self, process: Process, is_on: bool) -> None:
        """Note that a process is about to go off the runlist, or was put back."""
        self._sight.turns(process, trio.current_time(), is_on)

    def forget(self, process: Process) -> None:
        """Note that the process is gone: further figures are reported late."""
        self._estimates.pop(process.pid, None)
        if self._parts.usec(process) is not None:  # what the trace has under its pid is not its own
            self._parts.forget(process)
            self._busy.forget(process)
        elif (told := self.exact(process)) is not None and self._trace is not None:
            self._ended.append(Ended(process, told, trio.current_time() + LAG_NS / 1e9))
        else:
            self._drop(process)
        if self._sampled:
            self._unsampled[process.pid] = process

    def _drop(self, process: Process) -> None:
        self._past.pop(process.pid, None)
        self._busy.forget(process)
        if self._trace is not None:
            self._trace.residency.drop(process.pid)

    def _settle(self, now: float) -> None:
        """Report the rest of the figures of ended processes whose records are all charged."""
        while self._ended and self._ended[0].until <= now:
            one = self._ended.pop(0)
            used = self.exact(one.process) or 0
            rest = {"gpu_usec": max(0, used - one.told), "busy_usec": self._busy.rest(one.process, used)}
            self._drop(one.process)
            self.late(one.process, rest)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Read the trace or samples until cancelled; started once it is known which of the two there is."""
        await self._begin()
        self._looked = trio.current_time()
        self._sampling.begin(self._looked)
        task_status.started()
        while True:
            self._back = trio.Event()
            try:
                while (trace := self._trace) is not None:
                    await self._read(trace)
                    self._look()
                    await self._sample_others()
                    await trio.sleep(READ_S)
                if not self._waits:
                    await self._sample()
            except trio.Cancelled:
                self._waits = True  # known figures stay as they are to the end
                raise
            finally:
                self._end()
            await self._back.wait()
            self._waits = False
            await self._begin()

    def back(self) -> None:
        """Note that the lost GPU is back."""
        self._back.set()

    def gone(self) -> None:
        """Note that the GPU is lost: keep its figures, and hold nothing of it open."""
        if self._trace is not None:
            self._waits = True
            self._end()

    async def _begin(self) -> None:
        made: list[Trace] = []
        late = threading.Event()

        def bind() -> None:
            made.append(self._bind())
            if late.is_set():
                made[0].close()

        try:
            await self._deadline.call(bind)
            (self._trace,) = made
        except OSError as error:
            log.info("GPU %d: no trace of context switches, times are estimates: %s", self._index, error)
        finally:
            if self._trace is None:  # a call that is no longer waited for may still return
                late.set()
                for trace in made:
                    trace.close()

    def _end(self) -> None:
        self._settle(math.inf)
        trace, self._trace = self._trace, None
        if trace is not None:
            for pid, usec in trace.residency.used().items():
                self._past[pid] += usec
            trace.close()

    async def _read(self, trace: Trace) -> None:
        try:
            await self._deadline.call(trace.read)
        except (TimeoutError, BlockingIOError):
            return  # the thread goes on, and so does the ring; or no thread could be started (EAGAIN)
        except OSError as error:
            if self._trace is not trace:
                return  # the GPU was lost meanwhile
            if isinstance(error, rm.RmError) and error.lost:
                self._waits = True
                self.lost(error)
                self._end()
                return
            log.warning("GPU %d: the trace of context switches ended: %s: times are estimates now", self._index, error)
            self._settle(math.inf)
            self._trace = None
            trace.close()
        else:
            if self._trace is trace:
                trace.account()
                self._settle(trio.current_time())
                late = {one.process.pid for one in self._ended}
                trace.residency.prune(lambda pid: pid in late or _lives(pid))

    async def _sample(self) -> None:
        while True:
            await trio.sleep(SAMPLE_S)
            self._look()
            for pid, estimate in (await self._ask()).items():
                if (ended := self._unsampled.pop(pid, None)) is None:
                    self._estimates[pid] = self._estimates.get(pid, 0.0) + estimate
                else:
                    usec = int(estimate)
                    self.late(ended, {"gpu_usec_estimate": usec, "busy_usec": usec, "busy_sampled_usec": usec})
            self._unsampled.clear()

    async def _sample_others(self) -> None:
        """Take the samples of programs that do not count their kernels; the trace covers the rest."""
        now = trio.current_time()
        if not self._sampling.is_due(now, self.standing()):
            return
        if any(pending is None for _, pending in self.programs()):
            await self._ask()
        else:
            self._sampling.begin(now)

    async def _ask(self) -> Mapping[int, float]:
        """Return the use since the last request, microseconds by pid, as samples tell it, and count it as busy time as
        well. Empty if there are no samples.
        """
        try:
            samples = await self._nvml.busy(self._index)
        except OSError as error:
            if error.errno == errno.ENODEV:
                self.lost(error)
                self._sampling.begin(trio.current_time())
            else:
                log.log(logging.DEBUG if self._sampled else logging.INFO, "GPU %d: %s", self._index, error)
            return {}
        self._sampled = True
        now, span_us = trio.current_time(), samples.span_us
        self._sight.take(now, samples.shares, samples.age_us / 1e6, None if span_us is None else span_us / 1e6)
        window_us = self._sampling.window_us(now, span_us)
        busy = {pid: share * window_us for pid, share in samples.shares.items()}
        self._busy.sample(self.programs(), self.exact, busy)
        return busy

    def _look(self) -> None:
        """Note which programs have kernels pending."""
        since, self._looked = self._looked, trio.current_time()
        uncounted = [process for process, pending in self.programs() if pending is None]
        self._sight.keep(uncounted, self._looked, self.standing())
        self._busy.look(self.programs(), self.exact, (self._looked - since) * 1e6)
        if self._trace is not None:
            for pid in self._parts.look(self.spaces(), self._usec):
                if not _lives(pid):
                    self._past.pop(pid, None)
                    self._trace.residency.drop(pid)

    def _usec(self, pid: int) -> int:
        """Return the microseconds that the trace has under a pid."""
        return self._past[pid] + (0 if self._trace is None else self._trace.usec(pid))


def _lives(pid: int) -> bool:
    try:
        return is_borne(pid)
    except OSError:
        return True  # unknown, so it may live
