"""The file of a journal: held by one daemon at a time, appended to with every change, and rewritten when it has grown.

**Appending.** A change is one write(2) at the end, which is done when the call that makes the change returns: the page
cache outlives any daemon, and what a power cut loses is of a boot that is over. fdatasync(2) follows within a second,
in a thread, so that a disk that cannot write is noticed soon. No writer waits for it: /run is not a tmpfs everywhere,
and a disk takes as long for it as ten writes to a control file do, or a thousand.

**Rewriting** makes a file beside the journal that takes its name (rename(2)), so that there is a whole journal at every
moment. The lock (flock(2)) is on the file, and the new one is locked before it has the name: a daemon that waits for
the old one finds that it is gone, and begins again.

**A journal that is out of date says so.** Where a change could not be written, what was written whole before stays, and
is marked at once, by the mode of the file: that takes no room on a disk that is full. No caller fails for that; the
file is rewritten as soon as that is possible. The next daemon goes on from a marked journal, and logs that it does. A
lack of descriptors or threads says nothing about the disk: what is written stays, more is appended, and the rest comes
later.
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
"""Bytes by which the file may grow, besides doubling, before it is rewritten."""
AT_ONCE = 2000
"""Most groups that are rewritten in one go, some 10 ms in which no caller is answered. With more it is done in
pieces."""
RETRY_S = 1.0
"""Seconds from a failed write to the next try."""

STALE_MODE = 0o400
"""Permissions of a journal that is out of date; one that is kept has 0600."""

_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC


class Busy(OSError):
    """Another daemon holds the journal."""


class Journal:
    """See the module. :meth:`commit` may be called in any thread."""

    def __init__(self, path: Path, *, boot: str | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Take the journal, and read what the former daemon left. Busy where another daemon holds it; OSError, with its
        reason in words, where it cannot be used."""
        self.path = path
        self._boot = boot if boot is not None else procfs.text(BOOT)
        self._clock = clock
        self._lock = threading.RLock()
        self._broken = False
        self._tried = -RETRY_S
        self._size = self._began = self._checksum = 0
        self._synced = True
        self._runs = False
        self._later: list[Operation] = []  # happened, and written with the next change
        self._tail: list[Collection[Operation]] | None = None  # what happened since rewriting began
        self.stale_since: float | None = None
        """Unix time since when the former daemon could not write what was read here; None where it could."""
        self.listener: Callable[[bool], None] = lambda kept: None
        """Called with whether changes are being written, when that changes."""
        self.temporary: set[str] = set()
        """UUIDs of GPUs that end with the daemon, unless a successor takes over, and their books with them."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, self._folder)
            self._fd = self._take()
            stack.callback(lambda: os.close(self._fd))
            self.state = self._read()
            """The content."""
            try:
                self._write_anew()
            except OSError as error:
                self._fail(error)
            stack.pop_all()

    @property
    def broken(self) -> bool:
        """Whether changes cannot be written at the moment."""
        return self._broken

    def commit(self, *operations: Operation) -> None:
        """Apply operations, so that they are known after the daemon's death. Never fails: see the module."""
        with self._lock:
            for operation in operations:
                self.state.apply(operation)
            if self._broken:
                self._try_again()
            elif operations or self._later:
                self._append((*self._later, *operations))

    def later(self, *operations: Operation) -> None:
        """Apply operations, to be written with the next :meth:`commit`, or RETRY_S later: one write(2) is enough for
        both. For changes that the next daemon can do without, as long as nothing else has happened."""
        with self._lock:
            for operation in operations:
                self.state.apply(operation)
            if not self._broken:
                self._later += operations

    async def run(self) -> None:
        """Have written changes reach the disk, and retry failed writes, until cancelled."""
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
        """Wait until what was written is on the disk; a failure counts as a failed write. Without a descriptor to wait
        with it is still to be done."""
        with self._lock:
            try:
                fd = os.dup(self._fd)  # the file may be replaced before the disk answers
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
        """Let go of the journal. Settings stay for the next daemon, except those of GPUs that have `ended` with this
        one; where nothing is left, the file goes, too."""
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
                    self._empty()  # settings of these GPUs are void, whatever else is in it
                elif self._broken:
                    log.error("the journal %s stays out of date: %s", self.path, error.strerror)
                else:  # the file is true, if longer than need be
                    log.debug("the journal %s is left as it is: %s", self.path, error.strerror)
            os.close(self._fd)
            os.close(self._folder)

    # Taking

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
            os.close(fd)  # rewritten or removed before the lock was taken

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
        if data.find(b"\n", content.end) >= 0:  # else the rest of a write that was cut off
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
                found.levers[key] = attrs.evolve(lever, moving=True)  # what holds now is unknown
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
        """Rewrite the journal, unless that was just tried, and return whether that worked. Otherwise it can still be
        appended to."""
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
        """Do as :meth:`_write_anew`, in pieces between which callers are answered. Changes meanwhile are appended to
        the journal as it is, and at last to the new one. A failure is tried again later."""
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
                    if self._tail is None:  # a write failed, or it was rewritten at once
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
        """Rewrite the journal with exactly what `state` holds. On failure it is as it was."""
        text, checksum = format.begin(self._boot, self.state)
        with self._another() as fd:
            self._put(fd, text)
            os.fsync(fd)
            self._take_its_place(fd, checksum)
        self._synced = True

    @contextlib.contextmanager
    def _another(self) -> Iterator[int]:
        """Open a new file, locked, that is to replace the journal; where it does not, it is removed afterwards."""
        new = f"{self.path.name}.new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new, dir_fd=self._folder)  # left by a daemon that died
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
        with contextlib.suppress(OSError):  # it is there; after a power cut it does not matter
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
        """Note a failed write: the file is out of date. What was written whole stays, marked."""
        self._broken, self._tried, self._tail = True, self._clock(), None
        self._later = []  # the state has them, and is what is written next
        words = "a daemon that is killed now forgets what is set from now on"
        log.error("the journal %s: %s: %s", self.path, error.strerror, words)
        try:
            if self._is_there(self._fd):  # and was not put aside
                os.ftruncate(self._fd, self._size)
                os.utime(self._fd)
                os.fchmod(self._fd, STALE_MODE)
        except OSError:
            self._empty()
        self.listener(False)

    def _empty(self) -> None:
        """Empty the file, which is wrong and cannot be marked."""
        try:
            if self._is_there(self._fd):  # and was not put aside
                os.ftruncate(self._fd, 0)
        except OSError:
            try:
                os.unlink(self.path.name, dir_fd=self._folder)
            except OSError as worse:
                log.error("the journal %s is out of date, and cannot be removed: %s", self.path, worse.strerror)


def stale_since(file: os.stat_result) -> float | None:
    """Return the Unix time since when a journal is out of date; None for one that is kept."""
    return file.st_mtime if stat.S_IMODE(file.st_mode) == STALE_MODE else None


def clock_time(seconds: float) -> str:
    """Return a time as logs show it."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def default_path(folder: Path, mountpoint: str) -> Path:
    """Return the path of a mount's journal, named after the mountpoint: another name for each."""
    name = quote(mountpoint.strip("/"), safe="", errors="surrogateescape") or "root"
    if len(name) > 200:  # a name may have 255 bytes
        name = hashlib.sha256(mountpoint.encode(errors="surrogateescape")).hexdigest()
    return folder / f"{name}.journal"
