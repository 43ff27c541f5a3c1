"""The ioctl interface of the NVIDIA Resource Manager (RM), the kernel half of the driver.

Every request is an ioctl on ``/dev/nvidiactl``. The ioctl returns 0 even when RM refused; the result is the status in
the argument. Offsets, sizes and numbers are those of the open driver (NVIDIA/open-gpu-kernel-modules, tags 580 and
595), each with the header that defines it. All integers are little endian on the hosts that this driver supports.

A control on the objects of another process is accepted on a duplicate of *its* open file and refused on ours with
``INVALID_CLIENT`` (client.c, rmclientValidate: the open file is the identity). The system calls that this takes are
those of :class:`backend.nvidia.linux.System`.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import attrs

from backend.process.identity import Process

if TYPE_CHECKING:  # else the guard would load all that looks at programs
    from backend.nvidia.linux import Files

# nv_escape.h and nv-ioctl-numbers.h: _IOWR('F', number, struct)
IOCTL_FREE = 0xC0104629
IOCTL_CONTROL = 0xC020462A
IOCTL_ALLOC = 0xC020462B
IOCTL_MAP_MEMORY = 0xC038464E
IOCTL_CARD_INFO = 0xC90046C8

CLASS_ROOT = 0x41  # NV01_ROOT_CLIENT, cl0041.h
CLASS_DEVICE = 0x80  # NV01_DEVICE_0, cl0080.h
CLASS_SUBDEVICE = 0x2080  # NV20_SUBDEVICE_0, cl2080.h
CLASS_DIAG = 0x208F  # NV20_SUBDEVICE_DIAG, cl208f.h
CLASS_CONTEXT_SHARE = 0x9067  # FERMI_CONTEXT_SHARE_A, cl9067.h: a subcontext, of a GR TSG only
CLASS_TSG = 0xA06C  # KEPLER_CHANNEL_GROUP_A, cla06c.h

GET_CLIENT_DATABASE_INFO = 0x13D  # ctrl0000system.h
GPU_GET_ID_INFO = 0x205  # ctrl0000gpu.h
CLIENT_GET_HANDLE_INFO = 0xD02  # ctrl0000client.h
GPU_GET_ID = 0x20800142  # ctrl2080gpu.h
FIFO_DISABLE_CHANNELS = 0x2080110B  # ctrl2080fifo.h
FIFO_GET_CHANNEL_STATE = 0x208F0403  # ctrl208ffifo.h
SET_TIMESLICE = 0xA06C0103  # ctrla06cgpfifo.h
GET_TIMESLICE = 0xA06C0104  # ctrla06cgpfifo.h

HANDLE_INFO_PARENT = 1  # NV0000_CTRL_CMD_CLIENT_GET_HANDLE_INFO_INDEX_PARENT
HANDLE_INFO_CLASS = 2  # ..._INDEX_CLASSID

CHANNELS_A_CALL = 64  # NV2080_CTRL_FIFO_DISABLE_CHANNELS_MAX_ENTRIES

TIMESLICE_DEFAULT_US = 2048
"""Timeslice that libcuda sets for a GR TSG under the default compute policy, microseconds."""

CLIENT_BASE = 0xC1D00000  # RS_CLIENT_HANDLE_BASE, resserv.h: a client's handle is this plus a counter
CLIENT_COUNT = 0x100000  # RS_CLIENT_HANDLE_MAX: where that counter wraps

NVOS54 = struct.Struct("<IIIIQII")
"""RM_CONTROL (nvos.h): client@0, object@4, cmd@8, flags@12, params pointer@16, params size@24, status@28; 32 bytes."""
NVOS21 = struct.Struct("<IIIIQII")
"""RM_ALLOC (nvos.h): root@0, parent@4, handle@8 (in and out), class@12, params@16, size@24, status@28; 32 bytes."""
MAP_MEMORY = struct.Struct("<III4xQQQIIi4x")
"""nv_ioctl_nvos33_parameters_with_fd (nv-unix-nvos-params-wrappers.h): client@0, device@4, memory@8, offset@16,
length@24, address@32, status@40, flags@44, file to map with@48; 56 bytes."""
MAP_READ_ONLY = 1  # NVOS33_FLAGS_ACCESS_READ_ONLY
NVOS00 = struct.Struct("<IIII")
"""RM_FREE (nvos.h): root@0, parent@4, object@8, status@12; 16 bytes."""
HANDLE_INFO = struct.Struct("<IIQ")
"""CLIENT_GET_HANDLE_INFO: object@0, index@4, result@8; 16 bytes."""
DATABASE_INFO = struct.Struct("<I4xQ")
"""SYSTEM_GET_CLIENT_DATABASE_INFO: clients@0, resources@8, of the whole host; 16 bytes."""
ID_INFO = struct.Struct("<8I")
"""GPU_GET_ID_INFO: gpu id@0 (in), flags@4, device instance@8, subdevice instance@12, ...; 32 bytes."""
CHANNEL_STATE = struct.Struct("<II7B1x")
"""FIFO_GET_CHANNEL_STATE: channel@0, client@4, then u8: bound@8, enabled@9, scheduled@10, CPU map@11, contention@12,
runlist set@13, RC deferred@14; 16 bytes."""
GPU_ID = struct.Struct("<I")
"""GPU_GET_ID: gpu id@0; 4 bytes."""
TIMESLICE = struct.Struct("<Q")
"""SET_TIMESLICE and GET_TIMESLICE: microseconds@0; 8 bytes."""
DISABLE_CHANNELS = struct.Struct("<B3xIBB6xQ64I64I")
"""FIFO_DISABLE_CHANNELS: disable u8@0, count u32@4, only scheduling u8@8, rewind GP_PUT u8@9, event u64@16,
clients u32[64]@24, channels u32[64]@280; 536 bytes."""
CARD = struct.Struct("<B3xIBBBxHHIH2xQQQQI10s2x")
"""nv_ioctl_card_info_t (nv-ioctl.h): valid@0, PCI domain@4, bus@8, slot@9, function@10, vendor@12, device@14,
gpu id@16, interrupt@20, BAR@24, frame buffer@40, minor@56 of ``/dev/nvidia<minor>``; 72 bytes, 32 of them."""
CARD_COUNT = 32


class Status(enum.IntEnum):
    """The RM status codes (nvstatuscodes.h) that are handled specially here, of about 140."""

    OK = 0x00
    BUSY_RETRY = 0x03
    CARD_NOT_PRESENT = 0x05
    GPU_IS_LOST = 0x0F
    GPU_IN_FULLCHIP_RESET = 0x10
    GPU_NOT_FULL_POWER = 0x11
    IN_USE = 0x17
    INSUFFICIENT_RESOURCES = 0x1A
    INSUFFICIENT_PERMISSIONS = 0x1B
    INVALID_ARGUMENT = 0x1F
    INVALID_CHANNEL = 0x21
    INVALID_CLIENT = 0x23
    INVALID_OBJECT = 0x31
    INVALID_OBJECT_HANDLE = 0x33
    INVALID_OBJECT_PARENT = 0x36
    INVALID_PARAM_STRUCT = 0x3A
    INVALID_PARAMETER = 0x3B
    INVALID_STATE = 0x40
    NO_MEMORY = 0x51
    NOT_READY = 0x55
    NOT_SUPPORTED = 0x56
    OBJECT_NOT_FOUND = 0x57
    RESET_REQUIRED = 0x62
    STATE_IN_USE = 0x63
    TIMEOUT = 0x65
    TIMEOUT_RETRY = 0x66
    RESOURCE_LOST = 0x6E
    GENERIC = 0xFFFF


_ERRNO = {
    Status.CARD_NOT_PRESENT: errno.ENODEV,
    Status.GPU_IS_LOST: errno.ENODEV,
    Status.GPU_IN_FULLCHIP_RESET: errno.ENODEV,
    Status.RESET_REQUIRED: errno.ENODEV,
    Status.BUSY_RETRY: errno.EBUSY,
    Status.GPU_NOT_FULL_POWER: errno.EBUSY,
    Status.IN_USE: errno.EBUSY,
    Status.NOT_READY: errno.EBUSY,
    Status.INSUFFICIENT_RESOURCES: errno.ENOMEM,
    Status.TIMEOUT_RETRY: errno.ETIMEDOUT,
    Status.INSUFFICIENT_PERMISSIONS: errno.EPERM,
    Status.INVALID_ARGUMENT: errno.EINVAL,
    Status.INVALID_PARAM_STRUCT: errno.EINVAL,
    Status.INVALID_PARAMETER: errno.EINVAL,
    Status.RESOURCE_LOST: errno.ENOENT,
    Status.INVALID_CHANNEL: errno.ENOENT,
    Status.INVALID_CLIENT: errno.ENOENT,
    Status.INVALID_OBJECT: errno.ENOENT,
    Status.INVALID_OBJECT_HANDLE: errno.ENOENT,
    Status.INVALID_OBJECT_PARENT: errno.ENOENT,
    Status.OBJECT_NOT_FOUND: errno.ENOENT,
    Status.NO_MEMORY: errno.ENOMEM,
    Status.NOT_SUPPORTED: errno.EOPNOTSUPP,
    Status.STATE_IN_USE: errno.EBUSY,
    Status.TIMEOUT: errno.ETIMEDOUT,
}

# A handle that is no longer what it was. NOT_SUPPORTED is not one of them: 0x56 beside 0x57 is easily misread.
GONE = frozenset(status for status, code in _ERRNO.items() if code == errno.ENOENT)

PASSING = frozenset((errno.ENOMEM, errno.EBUSY, errno.ETIMEDOUT, errno.ENODEV))
"""Errnos of failures that may pass."""

LOST = frozenset(status for status, code in _ERRNO.items() if code == errno.ENODEV)


class RmError(OSError):
    """A refusal by RM: `errno` says it in the system's terms, `status` in RM's. GPU_IS_LOST and its
    like are ENODEV.
    """

    def __init__(self, status: int, what: str) -> None:
        try:
            known = Status(status)
        except ValueError:
            code, name = errno.EIO, "status"
        else:
            code, name = _ERRNO.get(known, errno.EIO), known.name
        super().__init__(code, f"{what}: {name} 0x{status:x}")
        self.status = status

    @property
    def gone(self) -> bool:
        """Whether the named object is no longer there."""
        return self.status in GONE

    @property
    def lost(self) -> bool:
        """Whether the GPU itself is not there, or unusable until it is reset."""
        return self.status in LOST


class CallError(RmError):
    """A failure of the ioctl itself, before RM could answer: out of memory, interrupted, or the
    driver is unloading.
    """

    def __init__(self, error: OSError, what: str) -> None:
        super().__init__(Status.GENERIC, what)
        self.errno, self.strerror = error.errno, f"{what}: {error.strerror}"


def check(status: int, what: str) -> None:
    """Raise RmError for every status but OK."""
    if status != Status.OK:
        raise RmError(status, what)


class Control:
    """One open file of ``/dev/nvidiactl``, to send requests through. For one thread at a time: the
    buffer is reused.
    """

    def __init__(self, system: Files, fd: int) -> None:
        self._system = system
        self._fd = fd
        self._argument = bytearray(NVOS54.size)
        self._info = ctypes.create_string_buffer(HANDLE_INFO.size)

    def _call(self, request: int, argument: bytearray, what: str) -> None:
        try:
            self._system.ioctl(self._fd, request, argument)
        except OSError as error:
            raise CallError(error, what) from None

    def send(self, client: int, target: int, cmd: int, params: ctypes.Array[ctypes.c_char]) -> int:
        """Send RM_CONTROL `cmd` to object `target` of `client` and return the status; `params` is read and
        written. Raises CallError.
        """
        argument = self._argument
        NVOS54.pack_into(
            argument, 0, client, target, cmd, 0, ctypes.addressof(params), len(params), Status.GENERIC.value
        )
        self._call(IOCTL_CONTROL, argument, f"control 0x{cmd:x}")
        status: int = NVOS54.unpack_from(argument)[6]
        return status

    def query(self, client: int, target: int, cmd: int, layout: struct.Struct, *fields: int) -> tuple[int, ...]:
        """Send RM_CONTROL with parameters of `layout`; return them as RM left them. Raises RmError."""
        params = ctypes.create_string_buffer(layout.pack(*fields), layout.size)
        check(self.send(client, target, cmd, params), f"control 0x{cmd:x}")
        return layout.unpack(params.raw)

    def handle_info(self, client: int, handle: int, index: int) -> int | None:
        """CLIENT_GET_HANDLE_INFO: return the class or parent of an object; None if `client` has no such object, or is
        not a client of this file.

        Raises RmError for any other refusal: a lever that took it for "no such object" would freeze nothing and
        report success.
        """
        HANDLE_INFO.pack_into(self._info, 0, handle, index, 0)
        status = self.send(client, client, CLIENT_GET_HANDLE_INFO, self._info)
        if status in GONE:
            return None
        check(status, "handle info")
        result: int = HANDLE_INFO.unpack_from(self._info)[2]
        return result & 0xFFFFFFFF

    def class_of(self, client: int, handle: int) -> int | None:
        """Return the class of an object, None if there is no such object. Raises RmError."""
        return self.handle_info(client, handle, HANDLE_INFO_CLASS)

    def is_client(self, handle: int) -> bool:
        """Return whether `handle` is a client of this file. The number may be any program's, so any refusal means
        no, except one that may pass: then RmError is raised.
        """
        try:
            return self.class_of(handle, handle) is not None
        except RmError as error:
            if isinstance(error, CallError) or error.errno in PASSING:
                raise
            return False

    def parent_of(self, client: int, handle: int) -> int | None:
        """Return the parent of an object, None if there is no such object. Raises RmError."""
        return self.handle_info(client, handle, HANDLE_INFO_PARENT)

    def allocate(self, client: int, parent: int, handle: int, class_: int, params: bytes = b"") -> int:
        """RM_ALLOC with the parameters of the class; return the handle of the new object. Raises RmError."""
        buffer = ctypes.create_string_buffer(params, len(params)) if params else None
        address = ctypes.addressof(buffer) if buffer is not None else 0
        argument = bytearray(NVOS21.pack(client, parent, handle, class_, address, len(params), Status.GENERIC.value))
        self._call(IOCTL_ALLOC, argument, f"allocate class 0x{class_:x}")
        fields = NVOS21.unpack(argument)
        check(fields[6], f"allocate class 0x{class_:x}")
        new: int = fields[2]
        return new

    def free(self, client: int, parent: int, handle: int) -> None:
        """RM_FREE of an object and everything below it. Raises RmError."""
        argument = bytearray(NVOS00.pack(client, parent, handle, Status.GENERIC.value))
        self._call(IOCTL_FREE, argument, "free")
        check(NVOS00.unpack(argument)[3], "free")

    def map_to(self, fd: int, client: int, memory: int, nbytes: int) -> None:
        """RM_MAP_MEMORY: make `memory` readable through a mapping of `fd`, a file of the control device
        that has no other.
        """
        argument = bytearray(
            MAP_MEMORY.pack(client, client, memory, 0, nbytes, 0, Status.GENERIC.value, MAP_READ_ONLY, fd)
        )
        self._call(IOCTL_MAP_MEMORY, argument, "map memory")
        check(MAP_MEMORY.unpack(argument)[6], "map memory")

    def cards(self) -> Sequence[Card]:
        """Return the GPUs that the driver has, from NV_ESC_CARD_INFO. Raises CallError."""
        argument = bytearray(CARD.size * CARD_COUNT)
        self._call(IOCTL_CARD_INFO, argument, "card info")
        found = []
        for fields in CARD.iter_unpack(argument):
            valid, domain, bus, slot, function, _vendor, _device, gpu_id = fields[:8]
            if valid:
                pci = f"{domain:04x}:{bus:02x}:{slot:02x}.{function:x}"
                found.append(Card(gpu_id=gpu_id, pci=pci, minor=fields[13]))
        return found


@attrs.frozen
class Card:
    """A GPU as the driver numbers it."""

    gpu_id: int
    """RM's id of the GPU, as GPU_GET_ID of a subdevice returns it."""
    pci: str
    """PCI address, ``dddd:bb:dd.f``."""
    minor: int
    """Minor number of ``/dev/nvidia<minor>``."""


def is_channel(class_: int) -> bool:
    """Return whether a class is a GPFIFO channel: 0xC36F Volta, 0xC56F Ampere, 0xC86F Hopper, 0xC96F
    Blackwell, ...
    """
    return class_ & 0xFF == 0x6F


def still_channels(control: Control, client: int, channels: Sequence[int]) -> list[int]:
    """Return those of `channels` whose handles still are channels."""
    return [channel for channel in channels if is_channel(control.class_of(client, channel) or 0)]


def switch(control: Control, client: int, subdevice: int, channels: Sequence[int], disable: bool) -> None:
    """Take channels off the runlist, or put them back on. Raises RmError; then the request may have had effect on some
    of the channels.
    """
    data = pack_disable(disable, [(client, channel) for channel in channels])
    params = ctypes.create_string_buffer(data, len(data))
    check(control.send(client, subdevice, FIFO_DISABLE_CHANNELS, params), "disable channels")


def pack_disable(disable: bool, channels: Sequence[tuple[int, int]]) -> bytes:
    """Return the parameters of FIFO_DISABLE_CHANNELS for up to 64 (client, channel) pairs.

    "None running in hardware and will not run until enabled" (ctrl2080fifo.h) holds for the form with neither
    bOnlyDisableScheduling nor bRewindGpPut (which drops work) and no event (kernel clients only).
    """
    if not 0 < len(channels) <= CHANNELS_A_CALL:
        raise ValueError(f"{len(channels)} channels in one call")
    padding = [0] * (CHANNELS_A_CALL - len(channels))
    clients = [client for client, _ in channels] + padding
    handles = [channel for _, channel in channels] + padding
    return DISABLE_CHANNELS.pack(disable, len(channels), 0, 0, 0, *clients, *handles)


@contextmanager
def borrowed(system: Files, process: Process, fds: Sequence[int]) -> Iterator[dict[int, Control]]:
    """Yield a Control on a duplicate of each descriptor in `fds` of a process, by number; all are closed on exit.

    Duplicates are never kept longer: RM frees a client when the last reference to its open file goes, so a duplicate
    keeps the GPU memory of a dead process. Descriptors that the process has closed are left out. Raises
    ProcessLookupError when the process is gone.
    """
    pidfd = system.pidfd_open(process.pid)
    mine: dict[int, int] = {}
    with ExitStack() as stack:
        stack.callback(system.close, pidfd)
        # The pidfd names the process that bears the pid now. If that is ours it stays so: a pidfd is never recycled.
        start, found = system.look(process.pid, fds)
        if start != process.start:
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        for fd in found:
            try:
                mine[fd] = system.pidfd_getfd(pidfd, fd)
            except OSError as error:
                if error.errno != errno.EBADF:
                    raise
            else:
                stack.callback(system.close, mine[fd])
        yield {fd: Control(system, copy) for fd, copy in mine.items()}
