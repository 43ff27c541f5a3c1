"""What a hostile tenant is, and the kinds of things that it does: functions with a name, each one operation.

An operation may be refused, with any OSError: that is what happens to a hostile program. It may end the program. It
never takes longer than a few tens of milliseconds, but for those that hold on to something on purpose.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import select
import signal
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Sequence

import attrs

from backend.door import wire
from tests.hostile.page import PLACES, Page

SOFT, CUDA = "soft", "cuda"
BOTH = (SOFT, CUDA)
"""The protocols of the two doors: that of the software GPU, and that of the library in CUDA programs."""

CHILD_S = 0.04
"""How long a child lives that is not to be kept, in seconds."""
HELD = 200
"""Descriptors that a tenant holds on to, before it lets go of the first again."""


@attrs.define(eq=False)
class Tenant:
    """One life of a hostile program; both of its halves have it in common."""

    mount: str
    """The mountpoint."""
    door: str
    """The daemon's socket."""
    protocol: str
    """What is spoken there: one of :data:`BOTH`."""
    own: str
    """The directory of a slice that it was given."""
    cgroups: Sequence[str]
    """Directories of cgroups that it may move between."""
    number: int
    """Which tenant of its round it is."""
    page: Page
    held: list[int] = attrs.field(factory=list)
    """Descriptors that it keeps open."""
    allocated: list[tuple[int, int]] = attrs.field(factory=list)
    """First page and number of pages of what it has on the software GPU."""
    tsgs: list[int] = attrs.field(factory=list)
    """Contexts that it has there."""
    seq: Iterator[int] = attrs.field(factory=lambda: itertools.count(1))
    line: socket.socket | None = None
    """The connection that both halves use."""
    _lock: threading.Lock = attrs.field(factory=threading.Lock)
    _places: Iterator[int] = attrs.field(factory=lambda: itertools.cycle(range(1, PLACES)))

    @property
    def greeting(self) -> tuple[int, int]:
        """The arguments of its HELLO: every other tenant speaks as ggroupfs 0.1 did, which could less."""
        return wire.VERSION, 0 if self.number % 2 else wire.CUDA | wire.SOFT

    def hold(self, descriptor: int) -> None:
        """Keeps it open, for some time."""
        self.held.append(descriptor)
        if len(self.held) > HELD:
            with contextlib.suppress(OSError):
                os.close(self.held.pop(0))

    def connect(self) -> socket.socket:
        """A new connection, on which nothing was said."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(0.03)
            connection.connect(self.door)
        except BaseException:
            connection.close()
            raise
        return connection

    def shared(self) -> tuple[socket.socket, bool]:
        """The connection of both halves, and whether it is new."""
        with self._lock:
            if self.line is not None:
                return self.line, False
            self.line = self.connect()
            self.allocated.clear()
            self.tsgs.clear()
            return self.line, True

    def hang_up(self, line: socket.socket) -> None:
        """Closes the shared connection, if it is still that one."""
        with self._lock:
            if self.line is line:
                self.line = None
            line.close()

    def place(self) -> int:
        """Where a child of it may say that it has a context."""
        return self.page.place(self.number, next(self._places))


Act = Callable[[Tenant, random.Random], None]


@attrs.frozen
class Kind:
    """Something that hostile programs do."""

    name: str
    act: Act
    protocols: Collection[str] = BOTH


KINDS: dict[str, Kind] = {}


def kind(name: str, protocols: Collection[str] = BOTH) -> Callable[[Act], Act]:
    """Makes a function known as a kind; one of the GPUs with these protocols."""

    def enter(act: Act) -> Act:
        assert name not in KINDS
        KINDS[name] = Kind(name, act, protocols)
        return act

    return enter


def kinds_of(protocol: str) -> Sequence[str]:
    """The names of the kinds at a door, in order."""
    return sorted(kind.name for kind in KINDS.values() if protocol in kind.protocols)


def child(work: Callable[[], object], seconds: float = CHILD_S) -> None:
    """A process of its own does it, and is killed after `seconds`; no process waits for it to be gone (it is reaped by
    the kernel: a tenant ignores SIGCHLD)."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except OSError:
            pass
        finally:
            os._exit(code)
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if not poll.poll(seconds * 1000):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    finally:
        os.close(pidfd)
