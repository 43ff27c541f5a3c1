"""The self-test: prove each lever on this machine by the progress of two programs of our own.

A status of OK proves nothing: drivers have been seen that accept a timeslice and do not act on it. So two children
that do not cooperate (:mod:`backend.nvidia.probe`) share the GPU for about two seconds, and the verdict depends on
their progress, which the GPU itself counts.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Protocol

import trio

from backend.common import interpreter
from backend.core.reasons import Engines
from backend.core.records import OF_MEMORY, Capability, GpuInfo
from backend.core.settings import OF_THE_SCHEDULER
from backend.nvidia import probe, spatial
from backend.nvidia.proven import GR_ALONE, OPTIONAL, SPATIAL, Proven, Verdict
from backend.process.identity import Process, identify
from backend.space import control

log = logging.getLogger(__name__)

KERNEL_US = 100
"""Length of a child's kernels, microseconds: far below a timeslice, so that slices decide."""
START_SECONDS = 10.0
"""Time limit for a child's first kernel, seconds. Half a second is usual; the first after a driver
load takes longer.
"""
WINDOW = 0.4
"""Seconds over which progress is measured."""
GR_WINDOW = 0.2
"""Seconds over which progress without the GR engine is measured."""
COPY_START_S = 2.0
"""Time limit for a child's first copies, seconds."""
ASKED = (6000, 2000)
"""Timeslices asked for, microseconds: 3 to 1, both far above the 0.2 ms that a switch costs."""
TOLERANCE = 0.25
"""Relative deviation of the progress from the ratio asked for, up to which a timeslice counts as enforced."""
LIBRARY = "moves the memory of programs with the library in them (`ggroupfs run`, units); that of others is pinned"
CHECKPOINT = "cuCheckpoint, by way of the host; of programs with the library most goes from GPU to GPU"
PLACED = (
    "kernels of programs with the library, by green contexts, from the next launch on; for others that are clients of"
    " MPS CUDA_MPS_ACTIVE_THREAD_PERCENTAGE in their environment at the start is left"
)
UNPLACED = (
    "the driver has no green contexts (CUDA 12.4) or does not tell its SMs; for clients of MPS"
    " CUDA_MPS_ACTIVE_THREAD_PERCENTAGE in their environment at the start is left"
)
SCHEDULED = tuple(setting.control for setting in OF_THE_SCHEDULER if setting.control is not None)
"""Controls that the scheduler implements with the two levers."""


TESTED = ("compute.timeslice", "compute.freeze", GR_ALONE)
"""Controls that are proven by progress."""


class Levers(Protocol):
    """The levers that are tested."""

    info: GpuInfo

    async def set_timeslice(self, process: Process, us: int) -> None:
        """See :class:`backend.core.protocols.Gpu`."""

    async def detach(self, process: Process) -> None:
        """See :class:`backend.core.protocols.Gpu`."""

    async def take(self, process: Process, engines: Engines) -> None:
        """See :class:`backend.nvidia.gpu.NvidiaGpu`."""

    async def attach(self, process: Process) -> None:
        """See :class:`backend.core.protocols.Gpu`."""

    async def clients(self) -> frozenset[int]:
        """See :class:`backend.nvidia.gpu.NvidiaGpu`."""

    def forget(self, process: Process) -> None:
        """See :class:`backend.core.protocols.Gpu`."""


class Child:
    """A program of our own that keeps the GPU busy."""

    def __init__(self, uuid: str, more: Mapping[str, str] | None = None) -> None:
        """`more` is put into its environment."""
        self._fd = os.memfd_create("ggroupfs-probe", os.MFD_CLOEXEC)
        self._process: subprocess.Popen[bytes] | None = None
        try:
            os.ftruncate(self._fd, probe.PAGE)
            self._page = mmap.mmap(self._fd, probe.PAGE)
            self._process = subprocess.Popen(
                [sys.executable, "-m", probe.__name__, str(self._fd), str(KERNEL_US)],
                env=interpreter.environment() | {"CUDA_VISIBLE_DEVICES": uuid, **(more or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[self._fd],
            )
            self.identity = identify(self._process.pid)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Kill the child by its pid, whatever state it is in, and wait for it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        os.close(self._fd)

    def _word(self, offset: int) -> int:
        value: int = struct.unpack_from("<Q", self._page, offset)[0]
        return value

    @property
    def finished(self) -> int:
        """Kernels that the GPU completed for the child."""
        return self._word(probe.FINISHED)

    @property
    def copied(self) -> int:
        """Copies from the GPU to the host that were completed for the child."""
        return self._word(probe.COPIED)

    async def copies(self) -> None:
        """Make the child copy as well, and wait for its first copies."""
        struct.pack_into("<Q", self._page, probe.COPY, 1)
        with trio.move_on_after(COPY_START_S):
            while self.copied < 2:  # noqa: ASYNC110 - another process counts
                await trio.sleep(0.01)

    async def started(self) -> None:
        """Wait for the child's first kernels. Raises OSError when it cannot run any."""
        assert self._process is not None
        with trio.move_on_after(START_SECONDS):
            while self.finished < 2 * probe.IN_FLIGHT:
                if self._process.poll() is not None:
                    error = self._word(probe.ERROR)
                    raise OSError(errno.EIO, f"the probe could not run kernels (CUDA error {error})")
                await trio.sleep(0.01)
            return
        raise OSError(errno.ETIMEDOUT, "the probe ran no kernel")


async def _rates(children: Sequence[Child], seconds: float = WINDOW) -> list[float]:
    """Return the kernels per second that each child completes from now on."""
    before = [child.finished for child in children]
    start = trio.current_time()
    await trio.sleep(seconds)
    elapsed = trio.current_time() - start
    return [(child.finished - count) / elapsed for child, count in zip(children, before, strict=True)]


async def prove(gpu: Levers, run: bool = True, movable: bool = False, proven: Proven | None = None) -> list[Verdict]:
    """Return a verdict for every control. Does not raise OSError: what could not be tested is advisory, with the
    reason.

    `movable` says whether there is another GPU that programs can be moved to. A GPU in `proven` is not tested again.
    """
    verdicts = [Verdict(control, Capability.ADVISORY, LIBRARY) for control in OF_MEMORY]
    verdicts.append(
        Verdict("compute.sm.max", Capability.ADVISORY, PLACED)
        if gpu.info.sms
        else Verdict("compute.sm.max", Capability.UNSUPPORTED, UNPLACED)
    )
    if movable:
        verdicts.append(Verdict("compute.migrate", Capability.ADVISORY, CHECKPOINT))
    else:
        verdicts.append(Verdict("compute.migrate", Capability.UNSUPPORTED, "there is no other GPU of this model"))
    if not run:
        why = "not tested"
        tested = [*(Verdict(name, Capability.ADVISORY, why) for name in TESTED), await _spatial(gpu, run=False)]
        return [*tested, *_scheduled(tested), *verdicts]
    if proven is not None and (known := proven.of(gpu.info.uuid)):
        # The program may have come or gone since then; and what did not act is no promise for having been tested.
        if control.find() is None or not any(verdict.control == SPATIAL for verdict in known):
            rest = [verdict for verdict in known if verdict.control != SPATIAL]
            known = [*rest, await _spatial(gpu, run=True)]
            proven.keep(gpu.info.uuid, known)
        return [*known, *_scheduled(known), *verdicts]
    with ExitStack() as stack:
        try:
            children = []
            for _ in range(2):
                children.append(Child(gpu.info.uuid))
                stack.callback(_end, gpu, children[-1])
            for child in children:
                await child.started()
        except OSError as error:
            why = f"not proven: {error.strerror}"
            tested = [*(Verdict(name, Capability.ADVISORY, why) for name in TESTED), await _spatial(gpu, run=False)]
            proven = None
        else:
            tested = [await _timeslice(gpu, children), await _freeze(gpu, children), await _gr_alone(gpu, children)]
    if len(tested) == len(TESTED):  # the GPU is free of the children by now
        tested.append(await _spatial(gpu, run=True))
    if proven is not None:
        proven.keep(gpu.info.uuid, tested)
    for verdict in tested:
        log.info("GPU %d: %s %s: %s", gpu.info.index, verdict.control, verdict.capability.value, verdict.evidence)
    return [*tested, *_scheduled(tested), *verdicts]


def _scheduled(levers: Sequence[Verdict]) -> list[Verdict]:
    """Return the verdicts on priorities and weights, which are as good as the levers that the scheduler pulls."""
    capability = Capability.weakest([verdict.capability for verdict in levers if verdict.control not in OPTIONAL])
    return [
        Verdict(name, capability, "by timeslices, and by taking off the runlist what has to wait") for name in SCHEDULED
    ]


async def _spatial(gpu: Levers, *, run: bool) -> Verdict:
    return await spatial.prove(gpu, run, control.find(), lambda more: Child(gpu.info.uuid, more), WINDOW)


def _end(gpu: Levers, child: Child) -> None:
    child.end()
    gpu.forget(child.identity)


def _refused(control: str, error: OSError) -> Verdict:
    return Verdict(control, Capability.UNSUPPORTED, f"refused: {error.strerror}")


async def _timeslice(gpu: Levers, children: Sequence[Child]) -> Verdict:
    before = await _rates(children)
    try:
        for child, us in zip(children, ASKED, strict=True):
            await gpu.set_timeslice(child.identity, us)
        after = await _rates(children)
        for child in children:
            await gpu.set_timeslice(child.identity, 0)
    except OSError as error:
        return _refused("compute.timeslice", error)
    asked = ASKED[0] / ASKED[1]
    moved = _ratio(after) / _ratio(before)
    enforced = abs(moved / asked - 1) <= TOLERANCE
    return Verdict(
        "compute.timeslice",
        Capability.ENFORCED if enforced else Capability.ADVISORY,
        f"asked for {asked:.2f} to 1, kernels completed moved by {moved:.2f}: from {before[0]:.0f}/s and "
        f"{before[1]:.0f}/s to {after[0]:.0f}/s and {after[1]:.0f}/s",
    )


async def _freeze(gpu: Levers, children: Sequence[Child]) -> Verdict:
    victim = children[0]
    try:
        start = trio.current_time()
        await gpu.detach(victim.identity)
        took = (trio.current_time() - start) * 1e3
        frozen = await _rates(children)
        await gpu.attach(victim.identity)
        thawed = await _rates(children)
    except OSError as error:
        return _refused("compute.freeze", error)
    stopped = frozen[0] == 0 and frozen[1] > 0
    evidence = (
        f"detached in {took:.1f} ms, then {frozen[0]:.0f} kernels/s in it and {frozen[1]:.0f}/s beside it; "
        f"{thawed[0]:.0f}/s and {thawed[1]:.0f}/s after attaching"
    )
    if stopped and thawed[0] > 0:
        return Verdict("compute.freeze", Capability.ENFORCED, evidence)
    # A freeze that cannot be undone is worse than none.
    return Verdict("compute.freeze", Capability.ADVISORY if thawed[0] > 0 else Capability.UNSUPPORTED, evidence)


async def _gr_alone(gpu: Levers, children: Sequence[Child]) -> Verdict:
    """Test whether the GR engine can be taken alone: kernels stop, copies go on."""
    victim = children[0]
    try:
        await victim.copies()
        await gpu.take(victim.identity, Engines.GR)
        before, start = victim.copied, trio.current_time()
        stopped = await _rates(children, GR_WINDOW)
        copies = (victim.copied - before) / (trio.current_time() - start)
        await gpu.attach(victim.identity)
        thawed = await _rates(children, GR_WINDOW)
    except OSError as error:
        return _refused(GR_ALONE, error)
    proven = stopped[0] == 0 and stopped[1] > 0 and copies > 0 and thawed[0] > 0
    return Verdict(
        GR_ALONE,
        Capability.ENFORCED if proven else Capability.ADVISORY,
        f"without the GR engine {stopped[0]:.0f} kernels/s and {copies:.0f} copies/s in it, {stopped[1]:.0f} kernels/s "
        f"beside it; {thawed[0]:.0f} kernels/s in it after attaching",
    )


def _ratio(rates: Sequence[float]) -> float:
    return (rates[0] + 1) / (rates[1] + 1)
