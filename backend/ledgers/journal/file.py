"""The file of a journal: one daemon's at a time, added to with every change, and written anew when it has grown.

**Added to.** A change is one write(2) at the end, which has happened when the call that it is of returns: what is in
the page cache outlives any daemon, and what a power cut takes along is of a boot that is over. fdatasync(2) follows
within a second, in a thread, so that a disk that cannot write is known soon. No writer waits for it: /run is not a
tmpfs everywhere, and a disk takes as long for it as ten writes to a control file do, or a thousand.

**Written anew** by a file beside it that takes its name (rename(2)), so that there is a whole journal at every moment.
The lock (flock(2)) is on the file, and the new one is locked before it has the name: one that waits for the old finds
that it is not there any more, and begins again.

**It says when it is out of date.** Where a change could not be written, what was written whole before stays, and is
marked at once: by the mode of the file, which takes no room on a disk that is full. Nothing fails for that; it is
written anew as soon as that is possible. The next daemon goes on from one that is marked, and says so. That there is no
descriptor or no thread to be had says nothing about the disk: what is written stays, more is added to it, and the rest
comes later.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import stat
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from urllib.parse import quote

import attrs
import trio

from backend.common.threads import in_a_thread
from backend.ledgers.journal import format
from backend.ledgers.journal.state import Operation, State
from backend.process import procfs
from backend.process.identity import Process
from backend.process.looks import gone

log = logging.getLogger(__name__)

BOOT = Path(procfs.BOOT)

GROWN = 1 << 21
"""Bytes by which it may grow, besides as much as it began with, before it is written anew."""
AT_ONCE = 2000
"""Groups that are written anew in one go, some 10 ms in which no caller is answered. With more it is done in pieces."""
RETRY_S = 1.0
"""Seconds from a write that failed to the next try."""

STALE_MODE = 0o400
"""Permissions of a journal that is out of date; 0600 are those of one that is kept."""

_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC


class Busy(OSError):
    """Another daemon has it."""


class Journal:
    """See the module. :meth:`commit` may be called in any thread."""

    def __init__(self, path: Path, *, boot: str | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Takes it, and reads what a daemon before us left. Busy; OSError, in words, where it cannot be ours."""
        self.path = path
        self._boot = boot if boot is not None else procfs.text(BOOT)
        self._clock = clock
        self._lock = threading.RLock()
        self._broken = False
        self._tried = -RETRY_S
        self._size = self._began = self._checksum = 0
        self._synced = True
        self._runs = False
        self._later: list[Operation] = []  # what happened, and is written with what happens next
        self._tail: list[Collection[Operation]] | None = None  # what happened since it began to be written anew
        self.stale_since: float | None = None
        """When the daemon before us could not write any more what it read here now (Unix time); None where it could."""
        self.listener: Callable[[bool], None] = lambda kept: None
        """Is told whether what happens is written down, when that turns."""
        self.temporary: set[str] = set()
        """UUIDs of GPUs that end with the daemon, where it comes to an end, and their books with them."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, self._folder)
            self._fd = self._take()
            stack.callback(lambda: os.close(self._fd))
            self.state = self._read()
            """What it says."""
            try:
                self._write_anew()
            except OSError as error:
                self._fail(error)
            stack.pop_all()

    @property
    def broken(self) -> bool:
        """Whether what happens is not written down at the moment."""
        return self._broken

    def commit(self, *operations: Operation) -> None:
        """Has something happen, and be known after our death. Never fails: see the module."""
        with self._lock:
            for operation in operations:
                self.state.apply(operation)
            if self._broken:
                self._try_again()
            elif operations or self._later:
                self._append((*self._later, *operations))

    def later(self, *operations: Operation) -> None:
        """Has something happen, and be known after our death with the next :meth:`commit`, or RETRY_S later: one
        write(2) is enough for both. For what the next daemon does without, as long as nothing else has happened.
        """
        with self._lock:
            for operation in operations:
                self.state.apply(operation)
            if not self._broken:
                self._later += operations

    async def run(self) -> None:
        """Has what was written be on the disk, and tries again what could not be written, until cancelled."""
        self._runs = True
        try:
            await self._look_after_it()
        finally:
            self._runs = False

    async def _look_after_it(self) -> None:
        while True:
            await trio.sleep(RETRY_S)
            if self._broken:
                self.commit()
                continue
            if self._later:
                self.commit()
            if self._is_grown(0):
                await self._compact()
            if not self._synced:
                try:
                    await in_a_thread("the disk", self.sync)
                except OSError as error:
                    log.debug("the journal %s: %s", self.path, error.strerror)

    def sync(self) -> None:
        """Waits until what was written is on the disk; where that fails, it is as if it could not be written. Without a
        descriptor to wait with it is still to be done."""
        with self._lock:
            try:
                fd = os.dup(self._fd)  # the file may be another before the disk has answered
            except OSError as error:
                log.debug("the journal %s: the disk is not asked: %s", self.path, error.strerror)
                return
            self._synced = True
        try:
            os.fdatasync(fd)
        except OSError as error:
            with self._lock:
                self._fail(error)
        finally:
            os.close(fd)

    def close(self, *, ended: bool = True) -> None:
        """Lets go of it. What was asked for stays, for the next daemon, but for GPUs that have `ended` with this one;
        where nothing is left, the file goes, too."""
        with self._lock:
            if self._later:
                self.commit()
            ends = self.temporary if ended else ()
            for uuid in ends:
                self.state.forget_gpu(uuid)
            try:
                if not self.state.is_empty:
                    self._write_anew()
                elif self._is_there(self._fd):
                    os.unlink(self.path.name, dir_fd=self._folder)
            except OSError as error:
                if ends:
                    self._fail(error)
                    self._empty()  # what was asked of these is over, whatever else is in it
                elif self._broken:
                    log.error("the journal %s stays out of date: %s", self.path, error.strerror)
                else:  # what is there is so, if longer than need be
                    log.debug("the journal %s is left as it is: %s", self.path, error.strerror)
            os.close(self._fd)
            os.close(self._folder)

    # Taking it

    def _take(self) -> int:
        while True:
            fd = os.open(self.path.name, os.O_RDWR | os.O_CREAT | _FLAGS, 0o600, dir_fd=self._folder)
            try:
                found = os.fstat(fd)
                if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
                    raise OSError(errno.EPERM, f"{self.path} is not a file of ours alone")
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise Busy(errno.EBUSY, f"another daemon keeps its journal in {self.path}") from None
                if self._is_there(fd):
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # written anew, or removed, before we had the lock

    def _is_there(self, fd: int) -> bool:
        try:
            there = os.stat(self.path.name, dir_fd=self._folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(os.fstat(fd), there)

    def _read(self) -> State:
        with open(self._fd, "rb", closefd=False) as file:
            data = file.read()
        try:
            content = format.read(data)
        except format.NotOurs:
            raise OSError(errno.EINVAL, f"{self.path} is no journal, and stays as it is") from None
        except format.Refused as error:
            aside = f"{self.path.name}.refused"
            os.rename(self.path.name, aside, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            log.error("the journal %s is not obeyed: %s; it is %s now", self.path, error, aside)
            return State()
        if content.boot != self._boot:
            if content.boot:
                log.info("the journal %s is of another boot of this machine", self.path)
            return State()
        self._size = content.end
        if data.find(b"\n", content.end) >= 0:  # else it is what a write that was cut off leaves
            log.warning("the journal %s is damaged from byte %d on: what is before that counts", self.path, content.end)
        if content.left_out:
            words = "the journal %s was written by a later ggroupfs: %d entries mean nothing to this one"
            log.warning(words, self.path, content.left_out)
        found = content.state
        self.stale_since = stale_since(os.fstat(self._fd))
        if self.stale_since is not None:
            words = "what was set after that is forgotten"
            log.warning("the journal %s is out of date since %s: %s", self.path, clock_time(self.stale_since), words)
            for key, lever in list(found.levers.items()):
                found.levers[key] = attrs.evolve(lever, moving=True)  # it is not known what holds now
        keys = {*found.groups, *found.levers, *found.own, *found.done}
        whose = {subject: subject[1] if isinstance(subject, tuple) else subject for subject in found.given}
        dead = gone(one for one in (*(key[1] for key in keys), *whose.values()) if isinstance(one, Process))
        found.drop({key for key in keys if key[1] in dead})
        for subject, node in whose.items():
            if node in dead:
                found.given.pop(subject, None)
        return found

    # Writing

    def _append(self, operations: Collection[Operation]) -> None:
        text, checksum = format.line(operations, self._checksum)
        self._later = []
        try:
            small = len(self.state.groups) <= AT_ONCE or not self._runs
            if small and self._is_grown(len(text)) and self._is_compacted():
                return
            self._put(self._fd, text)
        except OSError as error:
            self._fail(error)
        else:
            self._size += len(text)
            self._checksum = checksum
            self._synced = False
            if self._tail is not None:
                self._tail.append(operations)

    def _is_grown(self, more: int) -> bool:
        return self._size + more > 2 * self._began + GROWN

    def _is_compacted(self) -> bool:
        """Writes it anew, if it was not tried just now. Where that fails it can still be added to."""
        if self._clock() - self._tried < RETRY_S:
            return False
        self._tried = self._clock()
        try:
            self._write_anew()
        except OSError as error:
            log.debug("the journal %s is not written anew yet: %s", self.path, error.strerror)
            return False
        return True

    async def _compact(self) -> None:
        """As :meth:`_write_anew`, in pieces between which callers are answered. What happens meanwhile is added to the
        journal as it is, and at last to the new one. Where it fails there is another try."""
        with self._lock:
            state, self._tail = self.state.copy(), []
        try:
            with self._another() as fd:
                head, checksum = format.head(self._boot)
                self._put(fd, head + format.NO_CHECKSUM)
                for piece in format.pieces(state.operations()):
                    checksum = zlib.crc32(piece, checksum)
                    self._put(fd, piece)
                    await trio.lowlevel.checkpoint()
                self._put(fd, b"\n")
                os.pwrite(fd, b"%08x" % checksum, len(head))
                await in_a_thread("the disk", partial(os.fsync, fd))
                with self._lock:
                    if self._tail is None:  # it could not be written, or was written anew at once
                        raise InterruptedError(errno.EINTR, "another was quicker")
                    for operations in self._tail:
                        text, checksum = format.line(operations, checksum)
                        self._put(fd, text)
                    self._take_its_place(fd, checksum)
        except OSError as error:
            log.debug("the journal %s is not written anew yet: %s", self.path, error.strerror)
        finally:
            with self._lock:
                self._tail = None

    def _write_anew(self) -> None:
        """The journal is what `state` says and nothing else. On failure it is as it was."""
        text, checksum = format.begin(self._boot, self.state)
        with self._another() as fd:
            self._put(fd, text)
            os.fsync(fd)
            self._take_its_place(fd, checksum)
        self._synced = True

    @contextlib.contextmanager
    def _another(self) -> Iterator[int]:
        """A new file, locked, that is to take the journal's place; where it does not it is gone afterwards."""
        new = f"{self.path.name}.new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new, dir_fd=self._folder)  # of one that died on the way
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600, dir_fd=self._folder)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield fd
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(new, dir_fd=self._folder)
            raise

    def _take_its_place(self, fd: int, checksum: int) -> None:
        os.rename(f"{self.path.name}.new", self.path.name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        os.close(self._fd)
        size = os.fstat(fd).st_size
        self._fd, self._checksum, self._size, self._began, self._tail = fd, checksum, size, size, None
        with contextlib.suppress(OSError):  # it is there; after a power cut it is not asked for
            os.fsync(self._folder)

    @staticmethod
    def _put(fd: int, text: bytes) -> None:
        left = memoryview(text)
        while left:
            left = left[os.write(fd, left) :]

    def _try_again(self) -> None:
        if self._clock() - self._tried < RETRY_S:
            return
        self._tried = self._clock()
        try:
            self._write_anew()
        except OSError as error:
            log.debug("the journal %s still cannot be written: %s", self.path, error.strerror)
        else:
            self._broken = False
            log.warning("the journal %s is kept again", self.path)
            self.listener(True)

    def _fail(self, error: OSError) -> None:
        """What is there is not true any more, but for what was written whole: that stays, marked."""
        self._broken, self._tried, self._tail = True, self._clock(), None
        self._later = []  # the state has them, and what is written next is the state
        words = "a daemon that is killed now forgets what is set from now on"
        log.error("the journal %s: %s: %s", self.path, error.strerror, words)
        try:
            if self._is_there(self._fd):  # and is not one that was put aside
                os.ftruncate(self._fd, self._size)
                os.utime(self._fd)
                os.fchmod(self._fd, STALE_MODE)
        except OSError:
            self._empty()
        self.listener(False)

    def _empty(self) -> None:
        """What is there has to go: it is not so, and cannot be marked."""
        try:
            if self._is_there(self._fd):  # and is not one that was put aside
                os.ftruncate(self._fd, 0)
        except OSError:
            try:
                os.unlink(self.path.name, dir_fd=self._folder)
            except OSError as worse:
                log.error("the journal %s is out of date, and cannot be removed: %s", self.path, worse.strerror)


def stale_since(file: os.stat_result) -> float | None:
    """Since when a journal is out of date (Unix time), None for one that is kept."""
    return file.st_mtime if stat.S_IMODE(file.st_mode) == STALE_MODE else None


def clock_time(seconds: float) -> str:
    """A moment as a log has it."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def default_path(folder: Path, mountpoint: str) -> Path:
    """The journal of a mount, named after its place: another name for each place."""
    name = quote(mountpoint.strip("/"), safe="", errors="surrogateescape") or "root"
    if len(name) > 200:  # a name may have 255 bytes
        name = hashlib.sha256(mountpoint.encode(errors="surrogateescape")).hexdigest()
    return folder / f"{name}.journal"
