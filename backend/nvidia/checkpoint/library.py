"""libcuda.so.1 through ctypes: checkpoints of other processes, and reservations of GPU memory.

Layouts and codes are those of cuda.h, CUDA 13.0. A restore onto other GPUs needs driver 580.
"""

from __future__ import annotations

import ctypes
import errno
import os
import uuid
from collections.abc import Sequence
from typing import Any

from backend.nvidia.checkpoint.records import State

LIBRARY = "libcuda.so.1"
VARIABLE = "GGROUP_LIBCUDA"
"""Environment variable that names another library."""

# CUresult
SUCCESS = 0
OUT_OF_MEMORY = 2
ERRNOS = {
    OUT_OF_MEMORY: errno.ENOMEM,
    401: errno.EBUSY,  # ILLEGAL_STATE
    600: errno.ETIMEDOUT,  # NOT_READY: the lock's time was up
    800: errno.EPERM,  # NOT_PERMITTED
    801: errno.EOPNOTSUPP,  # NOT_SUPPORTED: managed memory, IPC, MPS
}
"""Errnos of the CUresult codes that have one; any other code becomes EIO."""

# CUmemAllocationType, CUmemLocationType, CUmemAllocationGranularity_flags
MEM_ALLOCATION_TYPE_PINNED = 1
MEM_LOCATION_TYPE_DEVICE = 1
MEM_ALLOC_GRANULARITY_MINIMUM = 0
NAME_LENGTH = 256


class Uuid(ctypes.Structure):
    """CUuuid."""

    _fields_ = (("bytes", ctypes.c_ubyte * 16),)


class LockArgs(ctypes.Structure):
    """CUcheckpointLockArgs, 64 bytes."""

    _fields_ = (
        ("timeout_ms", ctypes.c_uint),  # 0: no end
        ("reserved0", ctypes.c_uint),
        ("reserved1", ctypes.c_uint64 * 7),
    )


class GpuPair(ctypes.Structure):
    """CUcheckpointGpuPair."""

    _fields_ = (("old", Uuid), ("new", Uuid))


class RestoreArgs(ctypes.Structure):
    """CUcheckpointRestoreArgs, 64 bytes."""

    _fields_ = (
        ("pairs", ctypes.POINTER(GpuPair)),
        ("count", ctypes.c_uint),
        ("reserved", ctypes.c_char * (52 - ctypes.sizeof(ctypes.c_void_p))),
        ("reserved1", ctypes.c_uint64),
    )


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class AllocationProp(ctypes.Structure):
    """CUmemAllocationProp_v1, 32 bytes."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class CudaError(OSError):
    """A driver call failed. The errno is the nearest to the code; the message has the driver's own name of it."""

    def __init__(self, call: str, code: int, name: str, number: int | None = None) -> None:
        super().__init__(number or ERRNOS.get(code, errno.EIO), f"{call}: {name} ({code})")
        self.code = code
        """The CUresult."""
        self.name = name
        """The name of the code in cuda.h."""


class Library:
    """A :class:`backend.nvidia.checkpoint.records.Driver`. Its reservations go with its process."""

    def __init__(self, path: str | None = None) -> None:
        self._path = path or os.environ.get(VARIABLE) or LIBRARY
        self._devices: dict[str, int] = {}
        self._context: ctypes.c_void_p | None = None
        self._cuda: ctypes.CDLL

    def open(self) -> None:
        """Load and initialise the driver. Raises OSError(ENODEV) where there is none."""
        try:
            self._cuda = ctypes.CDLL(self._path)
        except OSError as error:
            raise OSError(errno.ENODEV, str(error)) from None
        self._call("cuInit", 0)
        count, device, name = ctypes.c_int(), ctypes.c_int(), Uuid()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        for index in range(count.value):
            self._call("cuDeviceGet", ctypes.byref(device), index)
            self._call("cuDeviceGetUuid_v2", ctypes.byref(name), device)
            self._devices[f"GPU-{uuid.UUID(bytes=bytes(name.bytes))}"] = device.value

    def gpus(self) -> Sequence[str]:
        return list(self._devices)

    def model(self, gpu: str) -> str:
        name = ctypes.create_string_buffer(NAME_LENGTH)
        self._call("cuDeviceGetName", name, NAME_LENGTH, self._device(gpu))
        return name.value.decode(errors="replace")

    def prepare(self, gpu: str) -> None:
        """Make a context; a single one is enough for memory on all GPUs."""
        if self._context is not None:
            return
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device(gpu), no_room=errno.ENOSPC)
        self._context = context

    def reserve(self, gpu: str, nbytes: int) -> int:
        """Reserve physical memory that is mapped nowhere, so that no other program gets it."""
        self.prepare(gpu)
        self._call("cuCtxSetCurrent", self._context)
        location = Location(MEM_LOCATION_TYPE_DEVICE, self._device(gpu))
        prop = AllocationProp(type=MEM_ALLOCATION_TYPE_PINNED, location=location)
        granule, handle = ctypes.c_size_t(), ctypes.c_uint64()
        self._call(
            "cuMemGetAllocationGranularity",
            ctypes.byref(granule),
            ctypes.byref(prop),
            MEM_ALLOC_GRANULARITY_MINIMUM,
        )
        size = ctypes.c_size_t(max(1, -(-nbytes // granule.value)) * granule.value)
        self._call(
            "cuMemCreate",
            ctypes.byref(handle),
            size,
            ctypes.byref(prop),
            ctypes.c_uint64(0),
            no_room=errno.ENOSPC,
        )
        return handle.value

    def release(self, reservation: int) -> None:
        self._call("cuMemRelease", ctypes.c_uint64(reservation))

    def state(self, pid: int) -> State:
        state = ctypes.c_int()
        self._call("cuCheckpointProcessGetState", pid, ctypes.byref(state))
        try:
            return State(state.value)
        except ValueError:
            raise OSError(errno.EBUSY, f"the driver has the program in state {state.value}") from None

    def lock(self, pid: int, ms: int) -> None:
        self._call("cuCheckpointProcessLock", pid, ctypes.byref(LockArgs(timeout_ms=max(1, ms))))

    def checkpoint(self, pid: int) -> None:
        self._call("cuCheckpointProcessCheckpoint", pid, None)

    def restore(self, pid: int, places: Sequence[tuple[str, str]]) -> None:
        if not places:
            self._call("cuCheckpointProcessRestore", pid, None)
            return
        pairs = (GpuPair * len(places))(*(GpuPair(_uuid(old), _uuid(new)) for old, new in places))
        self._call("cuCheckpointProcessRestore", pid, ctypes.byref(RestoreArgs(pairs=pairs, count=len(places))))

    def unlock(self, pid: int) -> None:
        self._call("cuCheckpointProcessUnlock", pid, None)

    def _device(self, gpu: str) -> int:
        if gpu not in self._devices:
            raise OSError(errno.ENODEV, f"no GPU {gpu}")
        return self._devices[gpu]

    def _call(self, name: str, *arguments: Any, no_room: int = errno.ENOMEM) -> None:
        """Call a function of the library; `no_room` is the errno for a lack of memory: ENOSPC where it
        must be the GPU's.
        """
        try:
            function = getattr(self._cuda, name)
        except AttributeError:
            raise OSError(errno.EOPNOTSUPP, f"the driver is too old: it has no {name}") from None
        code = function(*arguments)
        if code != SUCCESS:
            raise CudaError(name, code, self._name(code), no_room if code == OUT_OF_MEMORY else None)

    def _name(self, code: int) -> str:
        text = ctypes.c_char_p()
        if self._cuda.cuGetErrorName(code, ctypes.byref(text)) != SUCCESS or text.value is None:
            return "CUDA error"
        return text.value.decode(errors="replace")


def _uuid(name: str) -> Uuid:
    return Uuid((ctypes.c_ubyte * 16)(*uuid.UUID(name.removeprefix("GPU-")).bytes))
