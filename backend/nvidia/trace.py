"""The FECS context-switch trace: when each process was put on the graphics and compute engine, and taken off again.

FECS, the firmware that switches contexts, logs every switch; the driver collects the log about 30 times a second and
hands it to any process that binds an event buffer (NVIDIA/open-gpu-kernel-modules, fecs_event_list.c; Nsight's trace
is built on it). A process that is root when it binds gets the pids and exact times of all processes. Measured on an
H200 with driver 580: no slowdown of traced programs, about 1 ms of CPU a second for the reader.

Two things are never sent, since the driver follows them as pointers: a notification handle, and no subdevice.
"""

from __future__ import annotations

import errno
import logging
import struct
import threading
import time
from collections.abc import Iterator

from backend.nvidia import rm
from backend.nvidia.linux import System
from backend.nvidia.residency import Backlog, Edge, Residency, Switch
from backend.nvidia.subdevice import Subdevice

log = logging.getLogger(__name__)

CLASS_EVENT_BUFFER = 0x90CD  # NV_EVENT_BUFFER, cl90cd.h
CLASS_MEMORY_DEVICELESS = 0x90CE  # NV01_MEMORY_DEVICELESS, cl90ce.h

FECS_BIND = 0x20801238  # NV2080_CTRL_CMD_GR_FECS_BIND_EVTBUF_FOR_UID_V2, ctrl2080gr.h
BUFFER_ENABLE = 0x90CD0101  # ctrl90cd.h
BUFFER_UPDATE_GET = 0x90CD0102  # ctrl90cd.h

MEMORY = struct.Struct("<24xII32xQ48xi4x")
"""NV_MEMORY_ALLOCATION_PARAMS (nvos.h): attr@24, attr2@28, size u64@64, NUMA node i32@120; 128 bytes."""
ATTR_CACHED = 5 << 29  # NVOS32_ATTR_COHERENCY_WRITE_BACK
ATTR2_USER_READ_ONLY = 1 << 22  # NVOS32_ATTR2_PROTECTION_USER_READ_ONLY: else the event buffer refuses it
BUFFER = struct.Struct("<16xII16xQ4xI4xIII")
"""NV_EVENT_BUFFER_ALLOC_PARAMETERS: record size@16, records@20, notification@40, subdevice@52, header@60,
records@64."""
BIND = struct.Struct("<IIIIB3xI")
"""FECS_BIND: event buffer@0, record size@4, level of detail@8 (1: start and end), filter@12, all users u8@16, reason@20
(out); 24 bytes."""
ENABLE = struct.Struct("<B3xI")
"""BUFFER_ENABLE: on u8@0, flags@4 (1: keep the oldest); 8 bytes."""
UPDATE_GET = struct.Struct("<II")
"""BUFFER_UPDATE_GET: next record to be read@0, next byte of variable data@4; 8 bytes."""
HEADER_NBYTES = 4096
PUT, DROPPED = 1, 4
"""Position of recordPut (a u32 at byte 4) and recordDropcount (a u64 at byte 16) in the header, counted in u32."""
RECORD = struct.Struct("<HHIBBHIIHBBQ")
"""eventBufferRecord with its FECS payload: type@0, subtype@2, variable data@4, tag@8, VM@9, sequence u16@10,
context@12, pid@16, reserved@20, MIG instances@22, nanoseconds u64@24; 32 bytes."""
RECORDS = 65536
"""Number of records in the ring: 4 seconds of the most that the firmware can log."""

EDGES = {0x05: Edge.ON, 0x06: Edge.ON, 0x03: Edge.OFF, 0x07: Edge.OFF}
"""Tags (ctrl2080grmgr, fecs_event_list.h): context start and save end, and the same at the simple level of detail."""

OLDEST_NS = 1_000_000_000
"""Age before the binding, in nanoseconds, from which on a record has no time: it was half written, or
its process gone.
"""
LATE_NS = 70_000_000
"""Nanoseconds after which every record is here: the driver collects them every 33 ms, from a timer
that may be late.
"""
LAG_NS = 200_000_000
"""Age of every figure, in nanoseconds. The trace is read every tenth of a second, and what is newer than LATE_NS
is unknown then. With figures as old as the last look, a window of 3 s was measured 2.4 % short.
"""
STEP_NS = 500_000_000
"""Difference between the GPU's clock and the host's over two reads, in nanoseconds, from which on the GPU's clock
was set. The driver sets it when it wakes the GPU after a suspend; the time in between is charged to no process.
"""
REBIND_NS = 50_000_000
"""Nanoseconds from the end of a binding to the next one. The firmware notices the end at the next switch. If it
then writes at its old place, the driver passes it by, and the log looks full for good: no records, and slow
switches (measured: 1 of 31 bindings that followed at once).
"""

_HEADER, _RING, _BUFFER = (Subdevice.HANDLE + offset for offset in (1, 2, 3))

INITIAL_PIDS = 0xEFFFFFFC
"""Inode of the first pid namespace (proc_ns.h, PROC_PID_INIT_INO), to which the pids of the trace belong."""


class Trace:
    """A binding to the trace of one GPU, read into a Residency. Raises OSError where it is refused."""

    def __init__(self, system: System, card: rm.Card) -> None:
        if system.pid_namespace() != INITIAL_PIDS:
            raise OSError(errno.EOPNOTSUPP, "its pids are those of the first pid namespace")
        self._own = Subdevice(system, card)
        self._busy = threading.Lock()
        self._ended = False
        self._get = 0  # index of the next record in the ring
        self._number = -1  # sequence number of the last record; -1 for none
        self._last = 0  # time of the last record
        self._since = 0  # records that are older have no time
        self._unbound: int | None = None  # since when, by the monotonic clock
        self._set: int | None = None  # what the GPU's clock was set to; settled before anything else
        try:
            self._header = self._memory(system, _HEADER, HEADER_NBYTES).cast("I")
            self._ring = self._memory(system, _RING, RECORDS * RECORD.size)
            self._bind()
            now = self._own.time_ns()
            self.residency = Residency(now)
            self._backlog = Backlog(self.residency)
            self._clocks = time.monotonic_ns(), now  # of this host and of the GPU, at one time
        except BaseException:
            self.close()
            raise

    def read(self) -> None:
        """Take over the records since the last call; in a thread, one at a time. Raises OSError."""
        if not self._busy.acquire(blocking=False):
            raise OSError(errno.EBADF, "the trace was closed")  # before the thread began
        try:
            self._read()
        finally:
            self._busy.release()
            if self._ended:  # meanwhile
                self.close()

    def account(self) -> None:
        """Charge what happened until LAG_NS ago, as far as it was read."""
        if self._set is not None:  # nothing is noted before it is bound again
            self.residency.restart(self._set)
            self._backlog, self._set = Backlog(self.residency), None
        host, gpu = self._clocks
        self._backlog.account(gpu + time.monotonic_ns() - host - LAG_NS)

    def usec(self, pid: int) -> int:
        """Return the microseconds that a process used until LAG_NS ago."""
        self.account()
        return self.residency.usec(pid)

    def close(self) -> None:
        """End the binding. If a reader is using the files it closes them when it is done; if it hangs in the
        driver they stay open. For any thread, and more than once.
        """
        self._ended = True
        if self._busy.acquire(blocking=False):  # for good
            self._own.close()

    def _read(self) -> None:
        now = self._own.time_ns()
        host, gpu = self._clocks
        self._clocks = time.monotonic_ns(), now
        if abs(now - gpu - (self._clocks[0] - host)) > STEP_NS:
            log.info("the GPU's clock was set: its trace is bound again")
            self._set = now
            self._unbind()
            return
        if self._unbound is not None:
            if time.monotonic_ns() - self._unbound >= REBIND_NS:
                self._backlog.lose(now)
                self._bind()
            return
        put = self._header[PUT]
        if put >= RECORDS:
            raise OSError(errno.EIO, f"record {put} of {RECORDS}")
        dropped = self._header[DROPPED]  # the newest, for which there was no room
        if not self._note(put, now):
            self._unbind()
            self._backlog.lose(now)
            return
        if put != self._get:
            self._get = put
            self._own.control.query(self._own.root, _BUFFER, BUFFER_UPDATE_GET, UPDATE_GET, put, 0)
        if dropped:
            self._backlog.lose(now)
        self._backlog.know(now - LATE_NS)

    def _note(self, put: int, now: int) -> bool:
        """Note the records up to `put`; return whether the binding is still of use. A record of another
        time ends its use.
        """
        for number, tag, pid, ns in self._records(put):
            if number != (self._number + 1) & 0xFFFF and self._number >= 0:
                self._backlog.lose()
            self._number = number
            edge = EDGES.get(tag)
            if edge is None:
                continue
            if ns < self._since:  # its owner was gone before the record was read
                if edge is Edge.ON:
                    self._backlog.lose()
                continue
            if not self._last <= ns <= now + STEP_NS:
                log.info("a record of another time in the trace: bound again")
                return False
            self._last = ns
            self._backlog.note(Switch(edge, pid, ns))
        return True

    def _records(self, put: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield sequence number, tag, pid and nanoseconds of the records that were not read yet, up to `put`."""
        begin, size = self._get * RECORD.size, RECORD.size
        if put >= self._get:
            text = bytes(self._ring[begin : put * size])
        else:
            text = bytes(self._ring[begin:]) + bytes(self._ring[: put * size])
        for fields in RECORD.iter_unpack(text):
            yield fields[5], fields[3], fields[7], fields[11]

    def _bind(self) -> None:
        root, control = self._own.root, self._own.control
        buffer = BUFFER.pack(RECORD.size, RECORDS, 0, Subdevice.HANDLE, _HEADER, _RING, 0)
        control.allocate(root, root, _BUFFER, CLASS_EVENT_BUFFER, buffer)
        control.query(root, Subdevice.HANDLE, FECS_BIND, BIND, _BUFFER, RECORD.size, 1, 0, 1, 0)
        control.query(root, _BUFFER, BUFFER_ENABLE, ENABLE, 1, 1)
        self._get, self._number, self._last, self._since = 0, -1, 0, self._own.time_ns() - OLDEST_NS
        self._unbound = None

    def _unbind(self) -> None:
        if self._unbound is None:
            self._own.control.free(self._own.root, self._own.root, _BUFFER)
        self._unbound = time.monotonic_ns()

    def _memory(self, system: System, handle: int, nbytes: int) -> memoryview:
        """Memory that the driver writes and we read."""
        parameters = MEMORY.pack(ATTR_CACHED, ATTR2_USER_READ_ONLY, nbytes, -1)
        self._own.control.allocate(self._own.root, self._own.root, handle, CLASS_MEMORY_DEVICELESS, parameters)
        fd = system.open_control()  # the driver keeps one mapping per file
        try:
            self._own.control.map_to(fd, self._own.root, handle, nbytes)
            return system.map(fd, nbytes)
        finally:
            system.close(fd)
