"""NVML: which GPUs there are, which processes use them, and how much memory each holds.

Any call can hang in the driver, so all of them go through a :class:`~backend.nvidia.deadline.Deadline`: one for each
GPU, so that one that hangs keeps no caller from the others. A GPU is asked for by its UUID, which means the same GPU
whatever else has fallen off the bus; that it is not there any more is ENODEV.
"""

from __future__ import annotations

import errno
import importlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

import attrs

from backend.core.records import GpuInfo
from backend.nvidia import rm
from backend.nvidia.deadline import Deadline
from backend.nvidia.sight import joined

T = TypeVar("T")

log = logging.getLogger(__name__)

UNLIMITED = "GGROUP_NVML"
"""Variable of the environment with which, where it is "0", NVML says in this process what it says without the library:
a daemon that was started by `ggroupfs run`, or below a limit of its own, is to see the GPU as it is."""
DEADLINE = 2.0
"""Seconds for one call; the usual one takes 40 us, the first after a driver load a second."""
P2P_READ_WRITE = (0, 1)
"""NVML_P2P_CAPS_INDEX_READ and _WRITE of nvml.h; the first is no number in pynvml. NVML_P2P_STATUS_OK is 0."""
STEP_S = 1.0
"""The clock of the day was set where it went by so much more, or less, than time did between two looks at samples: they
have its time."""

GREEN_CONTEXTS_SINCE = 12040
"""Version of the CUDA driver from which on it has green contexts."""
CORES = {(7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}
CORES_ELSEWHERE = 128
"""Cores in an SM, by compute capability (CUDA C++ Programming Guide, "Compute Capabilities")."""
STEPS = {6: 2, 7: 2, 8: 4}
STEP_ELSEWHERE = 8
"""SMs in the smallest part of a GPU, by the major number of that (cuda.h, "Green Contexts")."""

ERRNOS = {
    "UNINITIALIZED": errno.ENODEV,
    "INVALID_ARGUMENT": errno.EINVAL,
    "NOT_SUPPORTED": errno.EOPNOTSUPP,
    "NO_PERMISSION": errno.EACCES,
    "NOT_FOUND": errno.ENODEV,
    "DRIVER_NOT_LOADED": errno.ENODEV,
    "TIMEOUT": errno.ETIMEDOUT,
    "LIBRARY_NOT_FOUND": errno.ENODEV,
    "FUNCTION_NOT_FOUND": errno.EOPNOTSUPP,
    "GPU_IS_LOST": errno.ENODEV,
    "RESET_REQUIRED": errno.ENODEV,
    "IN_USE": errno.EBUSY,
    "MEMORY": errno.ENOMEM,
    "INSUFFICIENT_RESOURCES": errno.ENOMEM,
    "GPU_NOT_FOUND": errno.ENODEV,
}
"""Of nvmlReturn_t (nvml.h), by the names behind ``NVML_ERROR_``; all others are EIO. NOT_FOUND is that of a UUID."""


@attrs.frozen
class Samples:
    """What NVML has sampled since it was asked last."""

    shares: Mapping[int, float]
    """Pid to the part of the time, from 0 to 1, that its kernels ran, of those that ran: in the last sample, or on the
    average of several."""
    span_us: int | None
    """Microseconds between that sample and the last one before; 0 where there is no new one, None where there was none
    before, or the clock of the day was set meanwhile."""
    age_us: float = 0.0
    """Microseconds since the end of the last sample."""


class Nvml:
    """NVML with deadlines. `module` is pynvml or what stands in for it."""

    def __init__(self, module: ModuleType | None = None) -> None:
        if module is None:
            module = importlib.import_module("pynvml")
        self._nvml: Any = module
        self._errnos = {
            getattr(module, f"NVML_ERROR_{name}"): code
            for name, code in ERRNOS.items()
            if hasattr(module, f"NVML_ERROR_{name}")
        }
        self._deadline = Deadline("NVML", DEADLINE)
        self._deadlines: dict[int, Deadline] = {}  # by GPU
        self._uuids: dict[int, str] = {}  # by GPU
        self._since: dict[int, int] = {}  # by GPU: the time of the last sample, microseconds by NVML
        self._stepped = False  # the clock of the day was set once
        self._offset: dict[int, float] = {}  # by GPU: of the clock of the day, at the last look at samples

    async def open(self) -> None:
        """Loads the library. OSError(ENODEV) where there is none or no driver."""
        os.environ[UNLIMITED] = "0"
        await self._call(self._nvml.nvmlInit)

    async def gpus(self) -> Sequence[GpuInfo]:
        """The GPUs, in NVML's order. One that is lost is left out, and told of; OSError where nothing else is left."""
        return await self._call(self._gpus)

    async def usage(self, index: int) -> Mapping[int, int | None]:
        """Pid to bytes of GPU memory held, for each process with a context; None where the driver does not say."""
        return await self._call(partial(self._usage, index), index)

    async def clients(self, index: int) -> frozenset[int]:
        """Pids of the clients of MPS servers. OSError where the driver does not say."""
        return await self._call(partial(self._clients, index), index)

    async def held(self, index: int, pid: int) -> int:
        """Bytes of GPU memory that a process holds now; 0 where it has no context, or the driver does not say."""
        return (await self.usage(index)).get(pid) or 0

    async def busy(self, index: int) -> Samples:
        """Return what was sampled of late. It counts two that ran at once twice, and says nothing of the driver's last
        second or so. OSError where the GPU takes no such samples."""
        return await self._call(partial(self._busy, index), index)

    async def are_near(self, one: int, other: int) -> bool:
        """Whether each of two GPUs can use memory of the other; False where it is not known."""
        try:
            return await self._call(partial(self._are_near, one, other), one)
        except OSError:
            return False

    async def _call(self, function: Callable[[], T], index: int | None = None) -> T:
        def translated() -> T:
            try:
                return function()
            except self._nvml.NVMLError as error:
                raise self._translate(error) from error

        if index is None:
            return await self._deadline.call(translated)
        deadline = self._deadlines.setdefault(index, Deadline("NVML", DEADLINE))
        return await deadline.call(translated)

    def _translate(self, error: Any) -> OSError:
        return OSError(self._errnos.get(error.value, errno.EIO), f"NVML: {error}")

    def _gpus(self) -> Sequence[GpuInfo]:
        found = []
        lost: OSError | None = None
        for index in range(self._nvml.nvmlDeviceGetCount()):
            try:
                found.append(self._gpu(index))
            except self._nvml.NVMLError as error:
                lost = self._translate(error)
                log.warning("GPU %d is left out: %s", index, lost.strerror)
        if not found and lost is not None:
            raise OSError(errno.EIO, lost.strerror)  # not ENODEV, whatever it was: they are there
        self._uuids = {info.index: info.uuid for info in found}
        return found

    def _gpu(self, index: int) -> GpuInfo:
        device = self._nvml.nvmlDeviceGetHandleByIndex(index)
        return GpuInfo(
            index=index,
            uuid=_text(_undecoded(self._nvml.nvmlDeviceGetUUID)(device)),
            name=_text(_undecoded(self._nvml.nvmlDeviceGetName)(device)),
            pci=sysfs_address(_text(self._nvml.nvmlDeviceGetPciInfo(device).busId)),
            capacity=int(self._nvml.nvmlDeviceGetMemoryInfo(device).total),
            timeslice_default_us=rm.TIMESLICE_DEFAULT_US,
            **self._sms(device),
        )

    def _sms(self, device: Any) -> Mapping[str, int]:
        """Return the SMs of a GPU and the step in which programs get some of them, as fields of :class:`GpuInfo`;
        nothing where the driver does not tell, or has no green contexts."""
        try:
            if self._nvml.nvmlSystemGetCudaDriverVersion_v2() < GREEN_CONTEXTS_SINCE:
                return {}
            capability = tuple(self._nvml.nvmlDeviceGetCudaComputeCapability(device))
            cores = int(self._nvml.nvmlDeviceGetNumGpuCores(device))
        except (self._nvml.NVMLError, AttributeError):  # a driver, or pynvml, from before it
            return {}
        each = CORES.get(capability, CORES_ELSEWHERE)
        return {"sms": cores // each, "sm_step": STEPS.get(capability[0], STEP_ELSEWHERE)}

    def _device(self, index: int) -> Any:
        uuid = self._uuids.get(index)
        if uuid is None:
            return self._nvml.nvmlDeviceGetHandleByIndex(index)
        return self._nvml.nvmlDeviceGetHandleByUUID(uuid)

    def _are_near(self, one: int, other: int) -> bool:
        devices = self._device(one), self._device(other)
        pairs = devices, devices[::-1]
        return not any(self._nvml.nvmlDeviceGetP2PStatus(*pair, how) for pair in pairs for how in P2P_READ_WRITE)

    def _usage(self, index: int) -> Mapping[int, int | None]:
        device = self._device(index)
        held: dict[tuple[int, int], int | None] = {}
        for listing in (
            self._nvml.nvmlDeviceGetComputeRunningProcesses,
            self._nvml.nvmlDeviceGetGraphicsRunningProcesses,
        ):
            for entry in listing(device):
                # A process that computes and draws is in both lists with the same figure; one that uses two MIG
                # instances has an entry, and memory, in each.
                key = (int(entry.pid), int(getattr(entry, "gpuInstanceId", None) or 0))
                known = held.get(key)
                nbytes = None if entry.usedGpuMemory is None else int(entry.usedGpuMemory)
                held[key] = nbytes if known is None else max(known, nbytes or 0)
        usage: dict[int, int | None] = {}
        for (pid, _instance), nbytes in held.items():
            before = usage.get(pid)
            usage[pid] = nbytes if before is None else before + (nbytes or 0)
        return usage

    def _clients(self, index: int) -> frozenset[int]:
        listed = self._nvml.nvmlDeviceGetMPSComputeRunningProcesses(self._device(index))
        return frozenset(int(entry.pid) for entry in listed)

    def _busy(self, index: int) -> Samples:
        device, before = self._device(index), self._since.get(index)
        offset = time.time() - time.monotonic()
        if abs(offset - self._offset.setdefault(index, offset)) > STEP_S:
            # Samples from before have another time, perhaps one to come: what is of now on counts.
            self._since[index] = int(time.time() * 1e6)
            self._stepped, before = True, None
        self._offset[index] = offset
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(device, self._since.get(index, 0))
        except self._nvml.NVMLError as error:
            if error.value == self._nvml.NVML_ERROR_NOT_FOUND:
                return Samples({}, 0)  # none since the last
            raise
        if self._stepped:
            samples = [sample for sample in samples if sample.timeStamp <= (time.time() + STEP_S) * 1e6]
        since = self._since.get(index, 0)
        new = [
            (int(one.pid), int(one.timeStamp), min(1.0, one.smUtil / 100)) for one in samples if one.timeStamp > since
        ]
        last = self._since[index] = max((stamp for _, stamp, _ in new), default=since)
        span_us = None if before is None else max(0, last - before)
        return Samples(joined(new, since) if new else {}, span_us, max(0.0, time.time() * 1e6 - last))


def _undecoded(function: Callable[[Any], str | bytes]) -> Callable[[Any], str | bytes]:
    """A function of pynvml without what it has around it, which ends in a UnicodeDecodeError for what is no UTF-8."""
    inner: Callable[[Any], str | bytes] = getattr(function, "__wrapped__", function)
    return inner


def _text(value: str | bytes) -> str:
    """What the driver calls something, fit for a line of a file: what is no text is spelt ``\\xff``, ``\\n``."""
    text = value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def sysfs_address(bus_id: str) -> str:
    """NVML's ``00000000:1B:00.0`` as ``0000:1b:00.0``, the way sysfs and RM's card list have it."""
    domain, rest = bus_id.lower().split(":", 1)
    return f"{int(domain, 16):04x}:{rest}"
