"""Look at files of /proc that can keep a reader waiting: in threads, and for a limited time.

Since Linux 7.2, and in stable kernels, ``/proc/<pid>/stat`` takes ``exec_update_lock`` of the process (commit
6650527444da, "proc: protect ptrace_may_access() with exec_update_lock"), and with 6255da28d4bb so does a link in
``/proc/<pid>/fd``. ``/proc/<pid>/maps`` always did, and also takes the mmap lock. A process holds the first lock as
long as it executes another program and its files are closed; one of them it may serve itself without answering
(FUSE_FLUSH). Until Linux 6.17 it could hold the second by a page fault on a file that it serves itself.

So a start time is read once for each new process, and here. After that, a pidfd tells whether the process is still
the same. The files that are read all the time (``status``, ``cgroup``, ``comm``, the directories and their owners)
take neither lock.

The time for a look is counted in parts, and a part counts once, however long it took. On a machine that is suspended,
or has no processor for the daemon, neither the thread nor its waiter makes progress: by the clock alone, every
program that is looked at just then would seem to be stuck. The thread has its turns between those of its waiter.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Generic, TypeVar

import attrs
import outcome
import trio

from backend.common.errors import fail
from backend.common.threads import in_a_thread
from backend.process import identity
from backend.process.identity import Process, owner_of

ANSWER_S = 2.0
"""Time limit of one look, seconds; a look takes 0.1 ms, or 1 ms with a program's maps."""
PARTS = 20
"""Parts in which the time for a look is counted."""
STUCK = 4
"""Threads at work on, or stuck in, looks at programs of one user. At that number none of the user's programs is
looked at until a thread returns. Besides, each user's programs are looked at one after the other.
"""

START_S = 5.0
"""Time limit for all processes that an earlier daemon has left, seconds: 10,000 take less than one."""

T = TypeVar("T")

log = logging.getLogger(__name__)

_guard = threading.Lock()


@attrs.define(eq=False)
class _User:
    """A user whose programs are being looked at."""

    at: int = 0
    """Threads at work on the user's programs."""
    waiting: int = 0
    """Callers in either queue, or at the head of one."""
    queue: threading.Lock = attrs.field(factory=threading.Lock)
    """The queue of callers that are threads."""


_users: dict[int | None, _User] = {}
_tasks: trio.lowlevel.RunVar[dict[int | None, trio.Lock]] = trio.lowlevel.RunVar("tasks")  # the queues of those


@attrs.define
class _Patience:
    """The time that a caller waits for a thread, counted in parts."""

    whole: float
    """Seconds at the beginning."""
    left: float = attrs.field(init=False)
    """Seconds that are left."""

    @left.default
    def _all(self) -> float:
        return self.whole

    def wait(self, come: Callable[[float], bool]) -> bool:
        """Return whether `come` succeeds in time; `come` waits for as many seconds as it is given."""
        part = self.whole / PARTS
        while self.left > 0:
            began = time.monotonic()
            came = come(min(part, self.left))
            self.left -= min(part, time.monotonic() - began)
            if came:
                return True
        return come(0.0)


class _Look(Generic[T]):
    """One look: the function that a thread runs, and its result."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._uid: int | None = None
        self._result: outcome.Outcome[T] | None = None
        self.came = threading.Event()

    def begin(self, uid: int | None) -> None:
        """Count a thread for this look. Raises OSError(EBUSY) where too many are with that user's programs."""
        with _guard:
            if _users[uid].at >= STUCK:
                raise OSError(errno.EBUSY, "programs of its user do not let themselves be looked at")
            _users[uid].at += 1
            self._uid = uid

    def run(self) -> None:
        """Run the function, in the thread."""
        self._result = outcome.capture(self._function)
        self.over()
        self.came.set()

    def over(self) -> None:
        """Stop counting the thread: it is done, or never began."""
        with _guard:
            _users[self._uid].at -= 1
            _tidy(self._uid)

    def result(self) -> T:
        """Return the result, even if it came at the last moment; raise OSError(EBUSY) if there is none."""
        if self._result is None:
            raise OSError(errno.EBUSY, "it does not let itself be looked at")
        return self._result.unwrap()


def _enter(uid: int | None) -> _User:
    with _guard:
        user = _users.setdefault(uid, _User())
        user.waiting += 1
    return user


def _leave(uid: int | None) -> None:
    with _guard:
        _users[uid].waiting -= 1
        _tidy(uid)


def _tidy(uid: int | None) -> None:
    if not _users[uid].at and not _users[uid].waiting:
        del _users[uid]


async def look(pid: int, function: Callable[[], T]) -> T:
    """Return the result of `function`, which may not return, about a process. Raises OSError: EBUSY where the process
    cannot be looked at in time, EAGAIN where no thread can be had, or that of `function`.
    """
    uid = owner_of(pid)
    _enter(uid)
    try:
        async with _queue(uid):
            one = _Look(function)
            await trio.lowlevel.checkpoint_if_cancelled()  # from here on a thread starts, or the lack of one is raised
            one.begin(uid)
            with trio.move_on_after(ANSWER_S / PARTS):
                try:
                    # Not a thread of the pool that others rely on: the number of these is bounded by user.
                    await in_a_thread("a program", one.run, trio.CapacityLimiter(1))
                except BlockingIOError:  # there is no thread
                    one.over()
                    raise
            for _ in range(PARTS - 1):
                if one.came.is_set():
                    break
                await trio.sleep(ANSWER_S / PARTS)
            return one.result()
    finally:
        _leave(uid)


@asynccontextmanager
async def _queue(uid: int | None) -> AsyncIterator[None]:
    try:
        queues = _tasks.get()
    except LookupError:
        _tasks.set(queues := {})
    queue = queues.setdefault(uid, trio.Lock())
    try:
        async with queue:
            yield
    finally:
        if not queue.locked():  # no task waits: a waiting task would have the lock at once
            queues.pop(uid, None)


def look_here(pid: int, function: Callable[[], T]) -> T:
    """As :func:`look`, for a caller that is a thread: it blocks."""
    uid = owner_of(pid)
    user = _enter(uid)
    try:
        with user.queue:
            one = _Look(function)
            one.begin(uid)
            try:
                trio.lowlevel.start_thread_soon(one.run, lambda _: None)
            except RuntimeError as error:
                one.over()
                raise OSError(errno.EAGAIN, f"a program is not asked: {error}") from None
            _Patience(ANSWER_S).wait(one.came.wait)
            return one.result()
    finally:
        _leave(uid)


async def identified(pid: int) -> Process:
    """As :func:`backend.process.identity.identify`, for a task. Raises OSError as :func:`look`."""
    return await look(pid, partial(identity.identify, pid))


async def verify(process: Process) -> None:
    """Raise ProcessLookupError where that very process no longer runs. Raises OSError as :func:`look`."""
    if not await look(process.pid, partial(identity.is_alive, process)):
        raise fail(errno.ESRCH)


def gone(processes: Iterable[Process]) -> Collection[Process]:
    """Return those processes of an earlier daemon that no longer run; at the start, before there are tasks. A process
    that cannot be looked at in time counts as running, so its settings are kept. It is known by its pid until it
    comes by itself and is identified.
    """
    found: set[Process] = set()
    living: dict[int | None, list[Process]] = defaultdict(list)
    for process in set(processes):
        if _is_free(process.pid):
            found.add(process)
        else:
            living[owner_of(process.pid)].append(process)
    latch = threading.Semaphore(0)

    def ask(theirs: Iterable[Process]) -> None:
        try:
            for process in theirs:
                with contextlib.suppress(OSError):  # this process lacks a resource
                    if not identity.is_alive(process):
                        found.add(process)
        finally:
            latch.release()

    patience = _Patience(START_S)
    for theirs in living.values():
        with contextlib.suppress(RuntimeError):  # no thread can be had
            trio.lowlevel.start_thread_soon(partial(ask, theirs), lambda _: None)
            continue
        latch.release()
    for _ in living:
        if not patience.wait(lambda seconds: latch.acquire(timeout=seconds)):
            log.warning("some programs do not let themselves be looked at: they are taken for those from before")
            break
    return frozenset(found.copy())


def _is_free(pid: int) -> bool:
    try:
        return not identity.is_borne(pid)
    except OSError:  # this process lacks a resource
        return False
