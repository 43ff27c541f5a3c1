"""Notes which channels are off the runlist, in memory that outlives the daemon: what goes back on when it is killed.

A channel that was taken off the runlist stays off until a request enables it. The daemon's own decisions, as whose turn
it is, end with the daemon: the guard beside it (``ggroupfs/daemon/guard.py``) puts back what stands in this memory
(:mod:`backend.nvidia.release`). A freeze and a move to another GPU outlive the daemon: what they took stays off.

The memory is a header and slots, each with up to 64 channels of one process: a request to the driver. A slot is filled
before its channels go off, and emptied after they are back on: to enable a channel that is on does no harm. Its count
is written last and erased first, so a daemon that is killed in between leaves an empty slot. No system call is made for
it, but for one where the memory has to grow.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import threading
from collections.abc import Iterable, Iterator

import attrs

from backend.process.identity import Process

log = logging.getLogger(__name__)

RELEASE = "backend.nvidia.release"
"""Module that puts back what stands in this memory, given its descriptor."""

CHANNELS = 64
"""Channels of a slot, at most: of a request (``CHANNELS_A_CALL`` of :mod:`backend.nvidia.rm`)."""
HEADER = b"ggroupfs waiting 1\n".ljust(64, b"\0")
"""First bytes of the memory. Its number is that of the layout: a guard may load a newer module than its daemon had."""
WORD = struct.Struct("=I")
COUNT, GOES_BACK = 0, 4
"""Offsets of two words of a slot: the number of its channels, 0 for an empty slot; and whether these go back on when
the daemon is killed.
"""
BATCH_AT = 8
BATCH = struct.Struct(f"=QiIII{CHANNELS}I")
"""The rest of a slot: start time@8, pid@16, descriptor@20, client@24, subdevice@28, channels@32."""
SLOT = BATCH_AT + BATCH.size
"""Size of a slot, bytes."""
FIRST_SLOTS = 1024
"""Slots of the memory at first, which doubles as often as they are all taken. What is not used takes no memory."""


@attrs.frozen
class Batch:
    """Channels of one client, as one request to the driver names them."""

    fd: int
    """The process's descriptor of /dev/nvidiactl that the client belongs to."""
    client: int
    """RM client handle."""
    subdevice: int
    """Handle of the client's subdevice object: the target of the request."""
    channels: tuple[int, ...]
    """Handles of the channels, at most :data:`CHANNELS`."""


class Waiter:
    """What is noted for one process on one GPU. For any thread."""

    def __init__(self, waiting: Waiting | None, process: Process) -> None:
        """Without `waiting` nothing is noted."""
        self._waiting = waiting
        self._process = process
        self._slots: list[int] = []
        self._goes_back = False

    def note(self, batches: Iterable[Batch]) -> None:
        """Note the channels that are off or are about to go off, in place of what is noted.

        Slots are filled before those of before are emptied, since channels in both are off all the while.
        """
        if self._waiting is not None:
            with self._waiting.lock:
                before, filled = self._slots, list[int]()
                self._slots = filled
                try:
                    for batch in batches:
                        filled.append(self._waiting.fill(self._process, batch, self._goes_back))
                except OSError as error:
                    self._waiting.tell_of(error)
                    filled += before
                else:
                    self._waiting.empty(before)

    def clear(self) -> None:
        """Note that no channel is off."""
        if self._waiting is not None and self._slots:
            with self._waiting.lock:
                self._waiting.empty(self._slots)
                self._slots = []

    def decide(self, goes_back: bool) -> None:
        """Set whether the channels, those noted later too, go back on when the daemon is killed; at first they do
        not."""
        if self._waiting is not None and goes_back != self._goes_back:
            with self._waiting.lock:
                self._goes_back = goes_back
                self._waiting.mark(self._slots, goes_back)


class Waiting:
    """The memory, of all GPUs of a daemon."""

    def __init__(self) -> None:
        """OSError where no memory can be shared."""
        self.lock = threading.Lock()
        """Held while slots are written, by the method of a :class:`Waiter`."""
        self._fd = os.memfd_create("ggroupfs-waiting", os.MFD_CLOEXEC)
        self._free: list[int] = []
        self._count = 0
        self._told = False  # whether the log says that the memory cannot grow
        try:
            self._grow()
        except BaseException:
            os.close(self._fd)
            raise
        self._memory[: len(HEADER)] = HEADER

    def fileno(self) -> int:
        """Return the descriptor of the memory."""
        return self._fd

    def close(self) -> None:
        """Close the memory, once no thread writes any more; a guard still has it."""
        self._memory.close()
        os.close(self._fd)

    # With the lock held

    def fill(self, process: Process, batch: Batch, goes_back: bool) -> int:
        """Fill an empty slot and return its number. OSError where the memory cannot grow."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        at, count = _at(slot), len(batch.channels)
        channels = batch.channels + (0,) * (CHANNELS - count)
        words = (process.start, process.pid, batch.fd, batch.client, batch.subdevice, *channels)
        BATCH.pack_into(self._memory, at + BATCH_AT, *words)
        WORD.pack_into(self._memory, at + GOES_BACK, goes_back)
        WORD.pack_into(self._memory, at + COUNT, count)
        return slot

    def empty(self, slots: Iterable[int]) -> None:
        """Empty these slots."""
        for slot in slots:
            WORD.pack_into(self._memory, _at(slot) + COUNT, 0)
            self._free.append(slot)

    def mark(self, slots: Iterable[int], goes_back: bool) -> None:
        """Set of these slots whether they go back."""
        for slot in slots:
            WORD.pack_into(self._memory, _at(slot) + GOES_BACK, goes_back)

    def tell_of(self, error: OSError) -> None:
        """Log, once, that the memory cannot grow: the levers of programs that have no room in it move all the while."""
        if not self._told:
            self._told = True
            log.warning("some programs that wait stand still if the daemon is killed: no room: %s", error.strerror)

    def _grow(self) -> None:
        count = 2 * self._count or FIRST_SLOTS
        os.ftruncate(self._fd, _at(count))
        self._memory = mmap.mmap(self._fd, _at(count))
        self._free += range(count - 1, self._count - 1, -1)  # the lowest first: they share pages
        self._count, self._told = count, False


def noted(memory: bytes | mmap.mmap) -> Iterator[tuple[Process, Batch]]:
    """Yield what goes back, of the memory that a killed daemon has left. What makes no sense is skipped, and all of a
    memory with another layout."""
    if memory[: len(HEADER)] != HEADER:
        return
    for at in range(_at(0), len(memory) - SLOT + 1, SLOT):
        [count] = WORD.unpack_from(memory, at + COUNT)
        [goes_back] = WORD.unpack_from(memory, at + GOES_BACK)
        if 0 < count <= CHANNELS and goes_back:
            start, pid, fd, client, subdevice, *channels = BATCH.unpack_from(memory, at + BATCH_AT)
            yield Process(pid, start), Batch(fd, client, subdevice, tuple(channels[:count]))


def _at(slot: int) -> int:
    return len(HEADER) + slot * SLOT
