"""How much of a GPU each process used: exact from the trace of context switches, else an estimate."""

from __future__ import annotations

import errno
import logging
import threading
from collections import Counter
from collections.abc import Callable

import trio

from backend.nvidia import rm
from backend.nvidia.deadline import Deadline
from backend.nvidia.nvml import Nvml
from backend.nvidia.trace import Trace
from backend.process.identity import Process, is_borne

log = logging.getLogger(__name__)

READ_S = 0.1
"""Seconds between two looks at the trace: 0.3 ms of CPU each, and the ring has room for 40 of the busiest."""
SAMPLE_S = 1.0
"""Seconds between two looks at NVML's samples, which it takes about once a second."""
DEADLINE = 2.0
"""Seconds for one look."""


class Usage:
    """Microseconds on the engine of one GPU, by process."""

    def __init__(self, index: int, nvml: Nvml, bind: Callable[[], Trace]) -> None:
        self._index = index
        self._nvml = nvml
        self._bind = bind
        self._trace: Trace | None = None
        self._deadline = Deadline(f"the trace of GPU {index}", DEADLINE)
        self._estimates: dict[int, float] = {}
        self._sampled = False  # there are samples to be had
        self._past: Counter[int] = Counter()  # by pid: microseconds by the traces of before the GPU was lost
        self._back = trio.Event()
        self._waits = False  # for the GPU to be back: what is known is what it was
        self.lost: Callable[[OSError], None] = lambda error: None
        """Is told that the GPU is not there any more."""

    def exact(self, process: Process) -> int | None:
        """What the trace says; None where there is none. It only grows, also where the GPU was lost and came back."""
        if self._trace is None:
            return self._past[process.pid] if self._waits and self._past else None
        return self._past[process.pid] + self._trace.usec(process.pid)

    def stays(self, process: Process) -> int | None:
        """How often it came onto the engine since the trace began; None where there is none."""
        return None if self._trace is None else self._trace.residency.stays(process.pid)

    def estimate(self, process: Process) -> int | None:
        """What NVML's samples add up to, where there is no trace; None where there are no samples either."""
        if self._trace is not None or not self._sampled:
            return None
        return int(self._estimates.get(process.pid, 0.0))

    def forget(self, process: Process) -> None:
        """The process is gone."""
        self._estimates.pop(process.pid, None)
        self._past.pop(process.pid, None)
        if self._trace is not None:
            self._trace.residency.drop(process.pid)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Reads what there is until cancelled; started once that is known."""
        await self._begin()
        task_status.started()
        while True:
            self._back = trio.Event()
            try:
                while (trace := self._trace) is not None:
                    await self._read(trace)
                    await trio.sleep(READ_S)
                if not self._waits:
                    await self._sample()
            finally:
                self._end()
            await self._back.wait()
            self._waits = False
            await self._begin()

    def back(self) -> None:
        """The GPU was lost, and is there again."""
        self._back.set()

    def gone(self) -> None:
        """The GPU is lost: what it said is kept, and nothing of it is held open."""
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
            if self._trace is None:  # a call may come back that nobody waits for any more
                late.set()
                for trace in made:
                    trace.close()

    def _end(self) -> None:
        trace, self._trace = self._trace, None
        if trace is not None:
            for pid, usec in trace.residency.used().items():
                self._past[pid] += usec
            trace.close()

    async def _read(self, trace: Trace) -> None:
        try:
            await self._deadline.call(trace.read)
        except (TimeoutError, BlockingIOError):
            return  # the thread goes on, and so does the ring; or there was none to be had (EAGAIN)
        except OSError as error:
            if self._trace is not trace:
                return  # the GPU was lost meanwhile
            if isinstance(error, rm.RmError) and error.lost:
                self._waits = True
                self.lost(error)
                self._end()
                return
            log.warning("GPU %d: the trace of context switches ended: %s: times are estimates now", self._index, error)
            self._trace = None
            trace.close()
        else:
            if self._trace is trace:
                trace.account()
                trace.residency.prune(_lives)

    async def _sample(self) -> None:
        since = trio.current_time()
        while True:
            await trio.sleep(SAMPLE_S)
            try:
                shares = await self._nvml.busy(self._index)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    self.lost(error)
                    since = trio.current_time()
                    continue
                log.log(logging.DEBUG if self._sampled else logging.INFO, "GPU %d: %s", self._index, error)
                continue
            now = trio.current_time()
            self._sampled = True
            for pid, share in shares.items():
                self._estimates[pid] = self._estimates.get(pid, 0.0) + share * (now - since) * 1e6
            since = now


def _lives(pid: int) -> bool:
    try:
        return is_borne(pid)
    except OSError:
        return True  # nobody knows
