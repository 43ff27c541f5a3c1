"""A driver and an NVML that exist only in memory, at the seam of the system calls.

The driver decodes the ioctl buffers byte by byte with layouts of its own, not with those of the code under test; it
checks ownership as RM does (the open file is the identity), counts disables as the firmware does, and can hang,
refuse, free objects and lose processes in the middle of a request.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import attrs
import trio
from trio.testing import MockClock

from backend.process.identity import Process
from backend.space.space import Space

TICK = os.sysconf("SC_CLK_TCK")
GPU_IDS = (0x100, 0x200)
PCI = ("0000:01:00.0", "0000:02:00.0")


SIZES = {
    0xD02: 16,
    0x13D: 16,
    0x205: 32,
    0x20800142: 4,
    0x20800403: 8,
    0x20801238: 24,
    0x90CD0101: 8,
    0x90CD0102: 8,
    0x2080110B: 536,
    0x208F0403: 16,
    0xA06C0103: 8,
    0xA06C0104: 8,
}
"""Bytes of the parameters of each control."""


@attrs.define
class Object:
    class_: int
    parent: int
    gpu: int = 0
    timeslice: int = 0
    disabled: int = 0


@attrs.define(eq=False)
class File:
    """An open file of /dev/nvidiactl, which is the identity that RM goes by."""

    clients: dict[int, dict[int, Object]] = attrs.field(factory=dict)
    references: int = 1


@attrs.define(eq=False)
class Program:
    """A CUDA process."""

    system: FakeSystem
    pid: int
    start: int
    files: dict[int, File] = attrs.field(factory=dict)
    client: int = 0
    top: int = 0x5C000000
    devices: dict[int, int] = attrs.field(factory=dict)
    ctl: int = 9

    @property
    def identity(self) -> Process:
        return Process(self.pid, self.start)

    @property
    def objects(self) -> dict[int, Object]:
        return self.files[self.ctl].clients[self.client]

    def add(self, class_: int, parent: int, skip: int = 0, **values: int) -> int:
        self.top += 1 + skip
        self.objects[self.top] = Object(class_, parent, **values)
        return self.top

    def device(self, gpu: int) -> int:
        if gpu not in self.devices:
            device = self.add(0x80, self.client)
            self.devices[gpu] = device
            self.add(0x2080, device, gpu=GPU_IDS[gpu])
        return self.devices[gpu]

    def tsg(self, gpu: int = 0, channels: int = 8, gr: bool = True, skip: int = 0) -> int:
        """Make a TSG as libcuda does: with a memory object, and the engine's objects for each channel."""
        device = self.device(gpu)
        tsg = self.add(0xA06C, device, skip, timeslice=2048 if gr else 1024)
        if gr:
            self.add(0x9067, tsg)
        for _ in range(channels):
            self.add(0x3E, device)
            channel = self.add(0xC86F, tsg, 1)
            if gr:
                self.add(0xCBC0, channel)
            self.add(0xC8B5, channel)
        return tsg

    def context(self, gpu: int = 0) -> int:
        """Make a CUDA context, a GR TSG of 8 channels and three copy TSGs of 4; return the GR TSG."""
        gr = self.tsg(gpu)
        for _ in range(3):
            self.tsg(gpu, channels=4, gr=False)
        return gr

    def destroy(self) -> None:
        """Destroy the contexts on every GPU; the process lives on."""
        kept = {handle: one for handle, one in self.objects.items() if one.class_ in (0x41, 0x80, 0x2080)}
        self.files[self.ctl].clients[self.client] = kept

    def channels(self, tsg: int | None = None) -> list[int]:
        return [h for h, o in self.objects.items() if o.class_ == 0xC86F and tsg in (None, o.parent)]

    def checkpointed(self, *, keeps_file: bool) -> None:
        """Drop the clients, as a checkpoint does; the files are closed or, with `keeps_file`, kept empty."""
        for file in self.files.values():
            self.system._drop(file)
        self.files = {self.ctl: File()} if keeps_file else {}
        self.devices.clear()

    def restored(self, gpu: int, ctl: int) -> None:
        """Make a context again, in a client with the former number, perhaps in another file."""
        if ctl != self.ctl:
            self.files.clear()
        self.ctl = ctl
        self.files.setdefault(ctl, File()).clients[self.client] = {self.client: Object(0x41, 0)}
        self.top = 0x5C000000
        self.context(gpu)

    def running(self) -> list[bool]:
        """Return for each channel whether it is on the runlist."""
        return [self.objects[channel].disabled == 0 for channel in self.channels()]


RECORDS = 65536

OWN_OBJECTS = 100
"""Objects of the kernel's own clients."""


@attrs.define(eq=False)
class Reader:
    """A client that reads what the firmware logs."""

    memory: dict[int, bytearray] = attrs.field(factory=dict)
    """Contents of each memory object, by handle."""
    buffers: dict[int, tuple[int, int]] = attrs.field(factory=dict)
    """Header and ring of each event buffer, by handle."""
    bound: tuple[int, int] | None = None
    """Header and ring of the buffer that is bound and enabled."""
    binds: int = 0
    read: int = 0
    """Index up to which the client says that it has read."""

    def take(self, record: bytes) -> None:
        if self.bound is None:
            return
        header, ring = (self.memory[handle] for handle in self.bound)
        put = struct.unpack_from("<I", header, 4)[0]
        if (put + 1) % RECORDS == self.read:  # full: keep the oldest
            struct.pack_into("<Q", header, 16, struct.unpack_from("<Q", header, 16)[0] + 1)
        else:
            ring[put * 32 : put * 32 + 32] = record
            struct.pack_into("<I", header, 4, (put + 1) % RECORDS)


@attrs.define(eq=False)
class FakeTrace:
    """The firmware's log, one for all GPUs."""

    clock: Callable[[], int] = time.time_ns
    readers: dict[int, Reader] = attrs.field(factory=dict)
    """Readers by client."""
    number: int = 0xFFF0  # wraps soon

    def log(self, tag: int, pid: int, ns: int, lost: int = 0) -> None:
        """Write a record, before which `lost` others were lost."""
        self.number = (self.number + 1 + lost) & 0xFFFF
        for reader in self.readers.values():
            reader.take(struct.pack("<HHIBBHIIHBBQ", 2, 0, 0, tag, 0, self.number, 7, pid, 0, 0, 0, ns))

    def stay(self, pid: int, begin: int, end: int) -> None:
        """Log that a process was on the engine."""
        self.log(6, pid, begin)
        self.log(7, pid, end)


@attrs.define(eq=False, slots=False)  # a test may replace a method
class FakeSystem:
    """See :class:`backend.nvidia.linux.System`."""

    programs: dict[int, Program] = attrs.field(factory=dict)
    open: dict[int, object] = attrs.field(factory=dict)
    calls: list[tuple[int, int, int]] = attrs.field(factory=list)
    """(command, client, object) of every control."""
    disables: list[tuple[bool, int]] = attrs.field(factory=list)
    """(disable, number of channels) of every FIFO_DISABLE_CHANNELS."""
    refuse: Callable[[int, int, int], int] = lambda cmd, client, handle: 0
    """Status to answer a control with, 0 to serve it."""
    before: Callable[[int], None] = lambda cmd: None
    """Called before each control is served."""
    hang: set[int] = attrs.field(factory=set)
    """Commands that do not return until `release` is set."""
    release: threading.Event = attrs.field(factory=threading.Event)
    stuck: int = 0
    """Threads that are in a command that hangs."""
    readback: bool = True
    index: int = 0x19
    trace: FakeTrace | None = attrs.field(factory=lambda: FakeTrace())
    """The context switches of each GPU, None for a driver that refuses them."""
    namespace: int = 0xEFFFFFFC
    _next: int = 1000

    def begin(self) -> None:
        """Do nothing: the fake needs no preparation before programs are looked at."""

    def program(self, pid: int, *gpus: int, start: int | None = None) -> Program:
        """Start a CUDA program with a context on each of `gpus`."""
        if start is None:
            start = int(time.clock_gettime(time.CLOCK_BOOTTIME) * TICK)
        file = File()
        program = Program(self, pid, start, {9: file, 30: File()})
        program.client = 0xC1D00000 + self.index
        file.clients[program.client] = {program.client: Object(0x41, 0)}
        self.index += 1
        self.programs[pid] = program
        for gpu in gpus:
            program.context(gpu)
        return program

    def kill(self, pid: int) -> None:
        for file in self.programs.pop(pid).files.values():
            self._drop(file)

    def _drop(self, file: File) -> None:
        file.references -= 1
        if not file.references:
            file.clients.clear()

    @property
    def resources(self) -> int:
        """Count the objects of the host, those of the kernel's own clients included."""
        opened = (what[0] if isinstance(what, tuple) else what for what in list(self.open.values()))
        files = {id(file): file for program in self.programs.values() for file in program.files.values()}
        files |= {id(file): file for file in opened if isinstance(file, File)}
        return OWN_OBJECTS + sum(len(objects) for file in files.values() for objects in file.clients.values())

    # ---- System ------------------------------------------------------------------------------------------------

    def _new(self, what: object) -> int:
        self._next += 1
        self.open[self._next] = what
        return self._next

    def _alive(self, pid: int) -> Program:
        if pid not in self.programs:
            raise ProcessLookupError(errno.ESRCH, "no such process")
        return self.programs[pid]

    def open_control(self) -> int:
        return self._new(File())

    def open_gpu(self, minor: int) -> int:
        return self._new(minor)

    def control_fds(self, pid: int) -> Sequence[int]:
        return list(self._alive(pid).files)

    def pidfd_open(self, pid: int) -> int:
        return self._new(self._alive(pid))

    def look(self, pid: int, fds: Sequence[int]) -> tuple[int, Sequence[int]]:
        start = self.start_time(pid)
        return start, [fd for fd in fds if fd in self._alive(pid).files]

    def pidfd_getfd(self, pidfd: int, fd: int) -> int:
        program = self.open[pidfd]
        assert isinstance(program, Program)
        if self.programs.get(program.pid) is not program:
            raise ProcessLookupError(errno.ESRCH, "no such process")
        if fd not in program.files:
            raise OSError(errno.EBADF, "bad descriptor")
        program.files[fd].references += 1
        return self._new(program.files[fd])

    def start_time(self, pid: int) -> int:
        return self._alive(pid).start

    def map(self, fd: int, nbytes: int) -> memoryview:
        what = self.open[fd]
        assert isinstance(what, tuple)
        assert len(what[1]) == nbytes
        return memoryview(what[1]).toreadonly()

    def pid_namespace(self) -> int:
        return self.namespace

    def close(self, fd: int) -> None:
        what = self.open.pop(fd)
        if isinstance(what, tuple):
            what = what[0]
        if isinstance(what, File):
            self._drop(what)

    def ioctl(self, fd: int, request: int, argument: bytearray) -> None:
        file = self.open[fd]
        assert isinstance(file, File)
        match request:
            case 0xC020462A:
                assert len(argument) == 32
                client, handle, cmd, flags, params, size = struct.unpack_from("<IIIIQI", argument)
                assert flags == 0
                status = self._control(file, client, handle, cmd, params, size)
                struct.pack_into("<I", argument, 28, status)
            case 0xC020462B:
                assert len(argument) == 32
                struct.pack_into("<I", argument, 28, self._alloc(file, argument))
            case 0xC0104629:
                client, _parent, handle = struct.unpack_from("<III", argument)
                if client == handle:
                    del file.clients[client]
                else:
                    reader = self._reader(client)
                    del file.clients[client][handle], reader.buffers[handle]
                    reader.bound = None
                struct.pack_into("<I", argument, 12, 0)
            case 0xC038464E:
                assert len(argument) == 56
                client, device, memory, offset, length = struct.unpack_from("<III4xQQ", argument)
                flags, mapped = struct.unpack_from("<Ii", argument, 44)
                assert (device, offset, flags) == (client, 0, 1)
                assert length == len(self._reader(client).memory[memory])
                self.open[mapped] = (self.open[mapped], self._reader(client).memory[memory])
                struct.pack_into("<I", argument, 40, 0)
            case 0xC90046C8:
                assert len(argument) == 32 * 72
                for n, gpu_id in enumerate(GPU_IDS):
                    struct.pack_into("<B3xIBBB", argument, n * 72, 1, 0, n + 1, 0, 0)
                    struct.pack_into("<I", argument, n * 72 + 16, gpu_id)
                    struct.pack_into("<I", argument, n * 72 + 56, n)
            case _:
                raise OSError(errno.EINVAL, "unknown request")

    def _alloc(self, file: File, argument: bytearray) -> int:
        client, parent, handle, class_, params, size = struct.unpack_from("<IIIIQI", argument)
        if class_ == 0x41:
            new = 0xC1D00000 + self.index
            self.index += 1
            file.clients[new] = {new: Object(0x41, 0)}
            struct.pack_into("<I", argument, 8, new)
            return 0
        if class_ == 0x208F and not self.readback:
            return 0x56
        if class_ in (0x90CE, 0x90CD):
            return self._alloc_trace(file, client, handle, class_, ctypes.string_at(params, size))
        if size != {0x80: 56, 0x2080: 4, 0x208F: 0}[class_]:
            return 0x1F
        file.clients[client][handle] = Object(class_, parent)
        return 0

    def _alloc_trace(self, file: File, client: int, handle: int, class_: int, params: bytes) -> int:
        if self.trace is None:
            return 0x56
        if class_ == 0x90CE:
            attr, attr2 = struct.unpack_from("<II", params, 24)
            assert len(params) == 128
            assert (attr, attr2, struct.unpack_from("<i", params, 120)[0]) == (5 << 29, 1 << 22, -1)
            reader = self.trace.readers.setdefault(client, Reader())
            reader.memory[handle] = bytearray(struct.unpack_from("<Q", params, 64)[0])
        else:
            assert len(params) == 72
            size, count = struct.unpack_from("<II", params, 16)
            assert (size, count, struct.unpack_from("<Q", params, 40)[0]) == (32, RECORDS, 0)
            subdevice, _flags, header, ring = struct.unpack_from("<IIII", params, 52)
            assert file.clients[client][subdevice].class_ == 0x2080  # otherwise the real driver follows a null pointer
            self._reader(client).buffers[handle] = (header, ring)
        file.clients[client][handle] = Object(class_, client)
        return 0

    def _reader(self, client: int) -> Reader:
        assert self.trace is not None
        return self.trace.readers[client]

    def _find(self, client: int, handle: int) -> Object | None:
        for program in self.programs.values():
            for file in program.files.values():
                if client in file.clients:
                    return file.clients[client].get(handle)
        return None

    def _control(self, file: File, client: int, handle: int, cmd: int, params: int, size: int) -> int:
        self.calls.append((cmd, client, handle))
        self.before(cmd)
        if cmd in self.hang:
            self.stuck += 1
            self.release.wait()
            self.stuck -= 1
        if client not in file.clients:
            return 0x23
        if status := self.refuse(cmd, client, handle):
            return status
        objects = file.clients[client]
        target = objects.get(handle)
        if target is None:
            return 0x33
        if cmd not in SIZES:
            return 0x56
        if size != SIZES[cmd]:
            return 0x1F
        data = bytearray(ctypes.string_at(params, size))
        status = getattr(self, f"_do_{cmd:x}")(objects, target, data)
        ctypes.memmove(params, bytes(data), size)
        return int(status)

    def _do_d02(self, objects: dict[int, Object], _target: Object, data: bytearray) -> int:
        handle, index = struct.unpack_from("<II", data)
        found = objects.get(handle)
        if found is None:
            return 0x57
        struct.pack_into("<Q", data, 8, {1: found.parent, 2: found.class_}[index])
        return 0

    def _do_13d(self, _objects: dict[int, Object], _target: Object, data: bytearray) -> int:
        clients = sum(len(f.clients) for p in self.programs.values() for f in p.files.values())
        struct.pack_into("<I4xQ", data, 0, clients, self.resources)
        return 0

    def _do_205(self, _objects: dict[int, Object], _target: Object, data: bytearray) -> int:
        struct.pack_into("<I", data, 8, GPU_IDS.index(struct.unpack_from("<I", data)[0]))
        return 0

    def _do_20800142(self, _objects: dict[int, Object], target: Object, data: bytearray) -> int:
        assert target.class_ == 0x2080
        struct.pack_into("<I", data, 0, target.gpu)
        return 0

    def _do_208f0403(self, _objects: dict[int, Object], _target: Object, data: bytearray) -> int:
        channel, client = struct.unpack_from("<II", data)
        found = self._find(client, channel)
        if found is None:
            return 0x57
        data[8:11] = bytes((1, found.disabled == 0, 1))
        return 0

    def _do_2080110b(self, _objects: dict[int, Object], target: Object, data: bytearray) -> int:
        assert target.class_ == 0x2080
        disable, count, only, rewind, event = (
            data[0],
            struct.unpack_from("<I", data, 4)[0],
            data[8],
            data[9],
            data[16:24],
        )
        assert (only, rewind, bytes(event)) == (0, 0, bytes(8))
        assert 0 < count <= 64
        self.disables.append((bool(disable), count))
        status = 0
        for n in range(count):
            client = struct.unpack_from("<I", data, 24 + 4 * n)[0]
            channel = struct.unpack_from("<I", data, 280 + 4 * n)[0]
            found = self._find(client, channel)
            if found is None or found.class_ & 0xFF != 0x6F:
                status = 0x21  # the other channels are served: measured
            else:
                found.disabled = found.disabled + 1 if disable else max(0, found.disabled - 1)
        return status

    def _do_20800403(self, _objects: dict[int, Object], target: Object, data: bytearray) -> int:
        assert target.class_ == 0x2080
        struct.pack_into("<Q", data, 0, self.trace.clock() if self.trace is not None else time.time_ns())
        return 0

    def _do_20801238(self, objects: dict[int, Object], target: Object, data: bytearray) -> int:
        assert target.class_ == 0x2080
        assert self.trace is not None
        buffer, size, detail, filter_, everybody = struct.unpack_from("<IIIIB", data)
        assert (size, detail, filter_, everybody) == (32, 1, 0, 1)
        assert objects[buffer].class_ == 0x90CD
        return 0

    def _do_90cd0101(self, objects: dict[int, Object], target: Object, data: bytearray) -> int:
        assert target.class_ == 0x90CD
        assert struct.unpack("<B3xI", data) == (1, 1)
        reader = self._reader(next(iter(objects)))
        (reader.bound,) = reader.buffers.values()
        struct.pack_into("<II", reader.memory[reader.bound[0]], 0, 0, 0)
        reader.read, reader.binds = 0, reader.binds + 1
        return 0

    def _do_90cd0102(self, objects: dict[int, Object], target: Object, data: bytearray) -> int:
        assert target.class_ == 0x90CD
        reader = self._reader(next(iter(objects)))
        assert reader.bound is not None
        reader.read = struct.unpack_from("<I", data)[0]
        struct.pack_into("<Q", reader.memory[reader.bound[0]], 16, 0)
        return 0

    def _do_a06c0103(self, _objects: dict[int, Object], target: Object, data: bytearray) -> int:
        assert target.class_ == 0xA06C
        target.timeslice = struct.unpack("<Q", data)[0]
        return 0

    def _do_a06c0104(self, _objects: dict[int, Object], target: Object, data: bytearray) -> int:
        struct.pack_into("<Q", data, 0, target.timeslice)
        return 0


class FakeNvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


@attrs.define(eq=False)
class FakeNvml:
    """Double of the module pynvml."""

    count: int = 2
    compute: dict[int, list[tuple[int, int | None]]] = attrs.field(factory=dict)
    """Lists of (pid, bytes) by GPU index."""
    graphics: dict[int, list[tuple[int, int | None]]] = attrs.field(factory=dict)
    clients: dict[int, list[int]] = attrs.field(factory=dict)
    """Pids of the clients of MPS, by GPU index."""
    samples: list[tuple[int, int, int]] = attrs.field(factory=list)
    """(pid, microseconds, percent)."""
    error: int = 0
    hang: bool = False
    release: threading.Event = attrs.field(factory=threading.Event)
    calls: int = 0
    stuck: int = 0
    p2p: int = 0
    """A value of NVML_P2P_STATUS_*."""
    cuda: int = 13000
    """Version of CUDA that the driver has."""

    NVMLError = FakeNvmlError
    NVML_P2P_STATUS_NOT_SUPPORTED = 5
    NVML_ERROR_UNINITIALIZED = 1
    NVML_ERROR_INVALID_ARGUMENT = 2
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_NO_PERMISSION = 4
    NVML_ERROR_NOT_FOUND = 6
    NVML_ERROR_DRIVER_NOT_LOADED = 9
    NVML_ERROR_TIMEOUT = 10
    NVML_ERROR_LIBRARY_NOT_FOUND = 12
    NVML_ERROR_FUNCTION_NOT_FOUND = 13
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_ERROR_RESET_REQUIRED = 16
    NVML_ERROR_IN_USE = 19
    NVML_ERROR_MEMORY = 20
    NVML_ERROR_INSUFFICIENT_RESOURCES = 23
    NVML_ERROR_GPU_NOT_FOUND = 28

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, how: int) -> int:
        self._enter()
        assert one != other
        assert how in (0, 1)
        return self.p2p

    def _enter(self) -> None:
        self.calls += 1
        if self.hang:
            self.stuck += 1
            self.release.wait()
            self.stuck -= 1
        if self.error:
            raise FakeNvmlError(self.error)

    def nvmlInit(self) -> None:
        self._enter()

    def nvmlDeviceGetCount(self) -> int:
        return self.count

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return self.cuda

    def nvmlDeviceGetCudaComputeCapability(self, device: int) -> list[int]:
        return [9, 0]

    def nvmlDeviceGetNumGpuCores(self, device: int) -> int:
        return 132 * 128

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        for device in range(self.count):
            if self.nvmlDeviceGetUUID(device) == uuid:
                return device
        raise FakeNvmlError(self.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetUUID(self, device: int) -> str:
        return f"GPU-{device}"

    def nvmlDeviceGetName(self, device: int) -> bytes:
        return b"NVIDIA Fake"

    def nvmlDeviceGetPciInfo(self, device: int) -> Any:
        return SimpleNamespace(busId=f"0000{PCI[device].upper()}")

    def nvmlDeviceGetMemoryInfo(self, device: int) -> Any:
        return SimpleNamespace(total=80 << 30)

    def nvmlDeviceGetComputeRunningProcesses(self, device: int) -> Iterator[Any]:
        self._enter()
        return iter([SimpleNamespace(pid=p, usedGpuMemory=n) for p, n in self.compute.get(device, [])])

    def nvmlDeviceGetMPSComputeRunningProcesses(self, device: int) -> list[Any]:
        self._enter()
        return [SimpleNamespace(pid=pid) for pid in self.clients.get(device, [])]

    def nvmlDeviceGetProcessUtilization(self, device: int, since: int) -> list[Any]:
        self._enter()
        found = [SimpleNamespace(pid=p, timeStamp=t, smUtil=u) for p, t, u in self.samples if t > since]
        if not found:
            raise FakeNvmlError(self.NVML_ERROR_NOT_FOUND)
        return found

    def nvmlDeviceGetGraphicsRunningProcesses(self, device: int) -> Iterator[Any]:
        return iter([SimpleNamespace(pid=p, usedGpuMemory=n) for p, n in self.graphics.get(device, [])])


@attrs.define(eq=False)
class FakeBookkeeper:
    """Double of the Controller."""

    arrived: list[tuple[Process, int]] = attrs.field(factory=list)
    seen: dict[tuple[Process, int], int] = attrs.field(factory=dict)
    brought_back: Counter[Process] = attrs.field(factory=Counter)
    on_arrive: Mapping[int, Callable[[Process], Any]] = attrs.field(factory=dict)
    presences: list[int] = attrs.field(factory=list)
    """GPUs that were lost, or came back."""
    taken: list[Process] = attrs.field(factory=list)
    """Processes whose work was recorded, as the GPU was about to report less of it."""
    told_late: list[tuple[Process, Mapping[str, int]]] = attrs.field(factory=list)
    """Figures that were reported for processes that had ended."""
    spaces: dict[Process, Space] = attrs.field(factory=dict)
    servers: set[int] = attrs.field(factory=set)
    thawed: set[Process] = attrs.field(factory=set)
    """Processes that are not to be frozen; all others are."""
    beside: list[Process] = attrs.field(factory=list)
    """Processes that were reported to have come to run beside others, or not to do so any more."""

    def presence(self, gpu: int) -> None:
        self.presences.append(gpu)

    async def arrive(self, process: Process, gpu: int) -> None:
        self.arrived.append((process, gpu))
        if process.pid in self.on_arrive:
            await self.on_arrive[process.pid](process)

    def observe(self, process: Process, gpu: int, nbytes: int) -> None:
        self.seen[process, gpu] = nbytes

    def knows(self, process: Process, gpu: int) -> bool:
        return (process, gpu) in self.arrived

    def levels(self, process: Process, gpu: int) -> Sequence[Any]:
        return [SimpleNamespace(frozen=process not in self.thawed)]

    def take_down(self, process: Process, gpu: int) -> None:
        self.taken.append(process)

    def late(self, process: Process, gpu: int, figures: Mapping[str, int]) -> None:
        self.told_late.append((process, figures))

    def undone(self, process: Process, gpu: int) -> None:
        self.brought_back[process] += 1

    def space_of(self, process: Process) -> Space | None:
        return self.spaces.get(process)

    def is_server(self, pid: int, nbytes: int) -> bool:
        return pid in self.servers

    def servers_of(self, space: Space) -> Collection[int]:
        return self.servers

    def beside_changed(self, process: Process, gpu: int) -> None:
        self.beside.append(process)

    async def charge(self, process: Process, gpu: int, nbytes: int) -> None:
        raise AssertionError("not for this GPU")

    def uncharge(self, process: Process, gpu: int, nbytes: int, *, swapped: bool) -> None:
        raise AssertionError("not for this GPU")

    def moved_out(self, process: Process, gpu: int, nbytes: int, usec: int, *, already: bool = False) -> None:
        raise AssertionError("not for this GPU")

    def move_in(self, process: Process, gpu: int, nbytes: int, usec: int) -> bool:
        raise AssertionError("not for this GPU")


@contextlib.contextmanager
def patient(clock: MockClock, hung: Callable[[], bool], rest_s: float = 0.005) -> Iterator[None]:
    """Keep `clock` from jumping while a thread is at work, however slow the machine; it jumps only if the thread hangs.
    While no thread works, it jumps once all tasks have been blocked for `rest_s` seconds."""
    real = trio.to_thread.run_sync
    flying = 0

    async def run_sync(*args: Any, **keywords: Any) -> Any:
        nonlocal flying
        flying += 1
        clock.autojump_threshold = 0.5 if hung() else 30.0
        try:
            return await real(*args, **keywords)
        finally:
            flying -= 1
            if not flying:
                clock.autojump_threshold = rest_s

    with mock.patch.object(trio.to_thread, "run_sync", run_sync):
        yield
