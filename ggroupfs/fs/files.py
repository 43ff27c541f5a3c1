"""Open files: a snapshot for each opener, and the events that it has already seen. Synchronous, without FUSE.

A control file is classified once, at open. Its content is made when it is read from offset 0, and later offsets are
served from that snapshot, so no reader mixes two states.
"""

from __future__ import annotations

import errno
import os
import select
import struct
from collections import Counter
from collections.abc import Awaitable
from typing import Any, Protocol

from backend.common.errors import fail
from backend.core.controller import Controller
from backend.core.peaks import Mark
from backend.core.records import Channel
from backend.process.identity import Group, Member, owner_of
from ggroupfs.fs.controls import PEAKS, Control, Show
from ggroupfs.text import values

WRITE_MOST = 4095
"""Largest write(2), bytes; kernfs takes a page less the NUL and answers a longer one with E2BIG."""

READABLE = select.POLLIN | select.POLLRDNORM
READY = READABLE | select.POLLOUT | select.POLLWRNORM
"""Events of a readable and writable file, as in kernfs (DEFAULT_POLLMASK), under both of the names that programs
use."""
EVENT = select.POLLPRI | select.POLLERR
GONE = EVENT | select.POLLHUP

RECORD = struct.Struct("<QQ")
"""Record of usermemfd: bytes to give back, sequence number."""


class Waker(Protocol):
    """Tells the kernel to poll a file again (pyfuse3.PollHandle)."""

    def notify(self) -> None: ...


class Events:
    """The event counts of every group, and the open files that wait for them."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[Group, Channel]] = Counter()
        self._waiting: dict[tuple[Group, Channel], set[OpenFile]] = {}

    def count(self, group: Group, channel: Channel) -> int:
        """Number of events so far."""
        return self._counts[group, channel]

    def happened(self, group: Group, channel: Channel) -> None:
        """Count an event, and wake the files that wait for it."""
        self._counts[group, channel] += 1
        self.wake(group, channel)

    def wake(self, group: Group, channel: Channel) -> None:
        """Make all waiting files poll again."""
        for file in self._waiting.pop((group, channel), ()):
            file.wake()

    def wait(self, file: OpenFile, group: Group, channel: Channel) -> None:
        """Register a poller for the next event."""
        self._waiting.setdefault((group, channel), set()).add(file)

    def leave(self, file: OpenFile, group: Group, channel: Channel) -> None:
        """Remove a poller that closed its file."""
        waiting = self._waiting.get((group, channel))
        if waiting is not None:
            waiting.discard(file)
            if not waiting:
                del self._waiting[group, channel]

    def forget(self, group: Group) -> None:
        """Drop a group that is gone. Its pollers look once more and find that out."""
        for channel in Channel:
            self.wake(group, channel)
            self._counts.pop((group, channel), None)


class OpenFile:
    """An open control file."""

    __slots__ = ("_controller", "_data", "_events", "_seen", "_waker", "control", "group")

    def __init__(self, controller: Controller, events: Events, control: Control, group: Group) -> None:
        self.control = control
        self.group = group
        self._controller = controller
        self._events = events
        self._data: bytes | None = None
        self._seen = -1  # kernfs: a poll before the first read reports an event
        self._waker: Waker | None = None

    def read(self, offset: int, size: int) -> bytes:
        """Return content from a snapshot. EINVAL for a file that cannot be read, ENODEV if the group is gone."""
        if offset == 0 or self._data is None:
            control = self.control
            if control.show is None:
                raise fail(errno.EINVAL)
            if control.channel is not None:
                self._seen = self._events.count(self.group, control.channel)
            self._data = None  # a failure leaves nothing of an earlier state
            self._data = os.fsencode(self._show(control.show))
        return self._data[offset : offset + size]

    async def write(self, data: bytes) -> int:
        """Apply one value, whatever offset it is written to, and return the bytes written once the value holds.

        E2BIG for more than WRITE_MOST bytes, EINVAL for a file that cannot be written; otherwise the errors of the
        control.
        """
        control = self.control
        if len(data) > WRITE_MOST:
            raise fail(errno.E2BIG)
        if control.parse is None:
            raise fail(errno.EINVAL)
        await self._apply(control.parse(values.text(data)))
        return len(data)

    def _show(self, show: Show) -> str:
        return show(self._controller, self.group)

    def _apply(self, value: Any) -> Awaitable[None]:
        assert self.control.apply is not None, "one that is parsed"
        return self.control.apply(self._controller, self.group, value)

    def poll(self, waker: Waker | None) -> int:
        """Return the pending poll(2) events, and keep `waker` for the next change."""
        if self.control.channel is None:
            return READY | EVENT if self._data is None else READY
        if waker is not None:
            self._waker = waker
            self._events.wait(self, self.group, self.control.channel)
        try:
            return self._pending()
        except OSError:
            return GONE

    def wake(self) -> None:
        """Make the kernel call :meth:`poll` again."""
        waker, self._waker = self._waker, None
        if waker is not None:
            waker.notify()

    def close(self) -> None:
        """Release the file; it is not polled any more."""
        self._waker = None
        if self.control.channel is not None:
            self._events.leave(self, self.group, self.control.channel)

    def _pending(self) -> int:
        self._controller.books(self.group)
        assert self.control.channel is not None
        seen = self._seen == self._events.count(self.group, self.control.channel)
        return READY if seen else READY | EVENT


class PeakFile(OpenFile):
    """A gmem.peak or gmem.swap.peak. A write resets it for this open file alone, as memory.peak since Linux 6.12."""

    __slots__ = ("_mark", "_peak")

    def __init__(self, controller: Controller, events: Events, control: Control, group: Group) -> None:
        super().__init__(controller, events, control, group)
        self._peak = PEAKS[control.name]
        self._mark: Mark | None = None

    def close(self) -> None:
        super().close()
        if self._mark is not None:
            self._controller.leave_peak(self.group, self._mark)

    def _show(self, show: Show) -> str:
        return f"{self._controller.peak(self.group, self._peak, self._mark)}\n"

    async def _apply(self, value: Any) -> None:
        mark = self._mark or Mark(self._peak)
        self._controller.reset_peak(self.group, mark)
        self._mark = mark


class UsermemFile(OpenFile):
    """A usermemfd: the latest record of memory pressure, once for each opener.

    Nothing blocks: neither the reader (EAGAIN) nor the reclaim that made the record (Ghost, section 4.2).
    """

    __slots__ = ("_listens",)

    def __init__(
        self, controller: Controller, events: Events, control: Control, group: Group, uid: int | None = None
    ) -> None:
        super().__init__(controller, events, control, group)
        controller.require(group, control.name)
        self._seen = controller.books(group).pressure_seq
        # A reclaim waits a moment for a listener, so only root and the owner of the process count as listeners.
        self._listens = isinstance(group, Member) and uid is not None and uid in (0, owner_of(group.process.pid))
        if self._listens:
            controller.listens(group, 1)

    def close(self) -> None:
        super().close()
        if self._listens:
            self._listens = False
            self._controller.listens(self.group, -1)

    def read(self, offset: int, size: int) -> bytes:
        """Return the latest record if it is unread.

        EAGAIN without one, EINVAL if the buffer is too small for a record.
        """
        if size < RECORD.size:
            raise fail(errno.EINVAL)
        books = self._controller.books(self.group)
        if books.pressure_seq == self._seen:
            raise fail(errno.EAGAIN)
        self._seen = books.pressure_seq
        return RECORD.pack(books.pressure_bytes, books.pressure_seq)

    def _pending(self) -> int:
        return READABLE if self._controller.books(self.group).pressure_seq != self._seen else 0


def open_file(controller: Controller, events: Events, control: Control, group: Group, uid: int) -> OpenFile:
    """Open a control file for a user.

    EOPNOTSUPP for a usermemfd to which nothing would ever be written, ENODEV for a group that is gone.
    """
    if control.channel is Channel.USERMEM:
        return UsermemFile(controller, events, control, group, uid)
    if control.name in PEAKS:
        return PeakFile(controller, events, control, group)
    return OpenFile(controller, events, control, group)
