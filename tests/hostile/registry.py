"""A hostile tenant, and the kinds of things that it does: named functions, each of which is one operation.

An operation may be refused with any OSError, as happens to a hostile program. It may end the program. It never takes
longer than a few tens of milliseconds, except for those that hold on to something on purpose.
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
"""The protocols of the two doors: of the software GPU, and of the library in CUDA programs."""

CHILD_S = 0.04
"""Seconds that a child lives that is not kept."""
HELD = 200
"""Number of descriptors that a tenant holds before it lets the first one go."""


@attrs.define(eq=False)
class Tenant:
    """One life of a hostile program, shared by both of its halves."""

    mount: str
    """Path of the mountpoint."""
    door: str
    """Path of the daemon's socket."""
    protocol: str
    """Protocol of that socket: one of :data:`BOTH`."""
    own: str
    """Directory of a slice that it was given."""
    cgroups: Sequence[str]
    """Directories of cgroups that it may move between."""
    number: int
    """Number of the tenant in its round."""
    page: Page
    held: list[int] = attrs.field(factory=list)
    """Descriptors that it keeps open."""
    allocated: list[tuple[int, int]] = attrs.field(factory=list)
    """First page and number of pages of its memory on the software GPU."""
    tsgs: list[int] = attrs.field(factory=list)
    """Contexts that it has there."""
    seq: Iterator[int] = attrs.field(factory=lambda: itertools.count(1))
    line: socket.socket | None = None
    """Connection that both halves use."""
    _lock: threading.Lock = attrs.field(factory=threading.Lock)
    _places: Iterator[int] = attrs.field(factory=lambda: itertools.cycle(range(1, PLACES)))

    @property
    def greeting(self) -> tuple[int, int]:
        """Arguments of its HELLO: every other tenant speaks as ggroupfs 0.1 did, which had fewer features."""
        return wire.VERSION, 0 if self.number % 2 else wire.CUDA | wire.SOFT

    def hold(self, descriptor: int) -> None:
        """Keep a descriptor open for some time."""
        self.held.append(descriptor)
        if len(self.held) > HELD:
            with contextlib.suppress(OSError):
                os.close(self.held.pop(0))

    def connect(self) -> socket.socket:
        """Return a new connection, on which nothing was sent."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(0.03)
            connection.connect(self.door)
        except BaseException:
            connection.close()
            raise
        return connection

    def shared(self) -> tuple[socket.socket, bool]:
        """Return the connection of both halves, and whether it is new."""
        with self._lock:
            if self.line is not None:
                return self.line, False
            self.line = self.connect()
            self.allocated.clear()
            self.tsgs.clear()
            return self.line, True

    def hang_up(self, line: socket.socket) -> None:
        """Close the shared connection, if it is still that one."""
        with self._lock:
            if self.line is line:
                self.line = None
            line.close()

    def place(self) -> int:
        """Return the index of a place in the page in which a child may claim a context."""
        return self.page.place(self.number, next(self._places))


Act = Callable[[Tenant, random.Random], None]


@attrs.frozen
class Kind:
    """A kind of thing that hostile programs do."""

    name: str
    act: Act
    protocols: Collection[str] = BOTH


KINDS: dict[str, Kind] = {}


def kind(name: str, protocols: Collection[str] = BOTH) -> Callable[[Act], Act]:
    """Register a function as a kind, for the GPUs with these protocols."""

    def enter(act: Act) -> Act:
        assert name not in KINDS
        KINDS[name] = Kind(name, act, protocols)
        return act

    return enter


def kinds_of(protocol: str) -> Sequence[str]:
    """Return the names of the kinds at a door, in order."""
    return sorted(kind.name for kind in KINDS.values() if protocol in kind.protocols)


def child(work: Callable[[], object], seconds: float = CHILD_S) -> None:
    """Do it in a child, which is killed after `seconds`. The kernel reaps it, since a tenant ignores SIGCHLD."""
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
