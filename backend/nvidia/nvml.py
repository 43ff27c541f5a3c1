"""NVML: which GPUs there are, which processes use them, and how much memory each holds.

Any call can hang in the driver, so all of them go through one :class:`~backend.nvidia.deadline.Deadline`.
"""

from __future__ import annotations

import errno
import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

from backend.nvidia import rm
from backend.nvidia.deadline import Deadline
from backend.records import GpuInfo

T = TypeVar("T")

DEADLINE = 2.0
"""Seconds for one call; the usual one takes 40 us, the first after a driver load a second."""


class Nvml:
    """NVML with deadlines. `module` is pynvml or what stands in for it."""

    def __init__(self, module: ModuleType | None = None) -> None:
        if module is None:
            module = importlib.import_module("pynvml")
        self._nvml: Any = module
        self._deadline = Deadline("NVML", DEADLINE)
        self._since: dict[int, int] = {}  # by GPU: the time of the last sample, microseconds by NVML

    async def open(self) -> None:
        """Loads the library. OSError(ENODEV) where there is none or no driver."""
        await self._call(self._nvml.nvmlInit)

    async def gpus(self) -> Sequence[GpuInfo]:
        """The GPUs, in NVML's order."""
        return await self._call(self._gpus)

    async def usage(self, index: int) -> Mapping[int, int | None]:
        """Pid to bytes of GPU memory held, for each process with a context; None where the driver does not say."""
        return await self._call(partial(self._usage, index))

    async def busy(self, index: int) -> Mapping[int, float]:
        """Pid to the part of the time, from 0 to 1, that its kernels ran of late. It counts two that ran at once
        twice, and says nothing of the driver's last second or so. OSError where the GPU takes no such samples."""
        return await self._call(partial(self._busy, index))

    async def _call(self, function: Callable[[], T]) -> T:
        def translated() -> T:
            try:
                return function()
            except self._nvml.NVMLError as error:
                raise self._translate(error) from error

        return await self._deadline.call(translated)

    def _translate(self, error: Any) -> OSError:
        nvml = self._nvml
        codes = {
            nvml.NVML_ERROR_LIBRARY_NOT_FOUND: errno.ENODEV,
            nvml.NVML_ERROR_DRIVER_NOT_LOADED: errno.ENODEV,
            nvml.NVML_ERROR_UNINITIALIZED: errno.ENODEV,
            nvml.NVML_ERROR_GPU_IS_LOST: errno.ENODEV,
            nvml.NVML_ERROR_NOT_SUPPORTED: errno.EOPNOTSUPP,
            nvml.NVML_ERROR_NO_PERMISSION: errno.EACCES,
            nvml.NVML_ERROR_TIMEOUT: errno.ETIMEDOUT,
        }
        return OSError(codes.get(error.value, errno.EIO), f"NVML: {error}")

    def _gpus(self) -> Sequence[GpuInfo]:
        found = []
        for index in range(self._nvml.nvmlDeviceGetCount()):
            device = self._nvml.nvmlDeviceGetHandleByIndex(index)
            found.append(
                GpuInfo(
                    index=index,
                    uuid=_text(self._nvml.nvmlDeviceGetUUID(device)),
                    name=_text(self._nvml.nvmlDeviceGetName(device)),
                    pci=sysfs_address(_text(self._nvml.nvmlDeviceGetPciInfo(device).busId)),
                    capacity=int(self._nvml.nvmlDeviceGetMemoryInfo(device).total),
                    timeslice_default_us=rm.TIMESLICE_DEFAULT_US,
                )
            )
        return found

    def _usage(self, index: int) -> Mapping[int, int | None]:
        device = self._nvml.nvmlDeviceGetHandleByIndex(index)
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

    def _busy(self, index: int) -> Mapping[int, float]:
        device = self._nvml.nvmlDeviceGetHandleByIndex(index)
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(device, self._since.get(index, 0))
        except self._nvml.NVMLError as error:
            if error.value == self._nvml.NVML_ERROR_NOT_FOUND:
                return {}  # none since the last
            raise
        shares: dict[int, float] = {}
        for sample in samples:
            if sample.timeStamp > self._since.get(index, 0):
                shares[int(sample.pid)] = min(1.0, sample.smUtil / 100)
        self._since[index] = max((int(sample.timeStamp) for sample in samples), default=self._since.get(index, 0))
        return shares


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def sysfs_address(bus_id: str) -> str:
    """NVML's ``00000000:1B:00.0`` as ``0000:1b:00.0``, the way sysfs and RM's card list have it."""
    domain, rest = bus_id.lower().split(":", 1)
    return f"{int(domain, 16):04x}:{rest}"
