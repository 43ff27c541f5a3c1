"""Control files against the real thing: each operation is also done on a file of the running kernel's cgroup2.

``gmem.limit.high`` has the shape of ``cgroup.max.depth`` (a number or ``max``), ``compute.freeze`` that of
``cgroup.freeze`` (0 or 1). Our answer, a count, bytes or an errno, must be the kernel's. The few deliberate differences
are in :data:`DIFFERENCES`, with both answers and the reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import re
import select
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from tests.support.cgroups import answer, cgroup2
from tests.support.mounted import Mounted
from tests.support.strategies import chosen, history, pick

libc = ctypes.CDLL(None, use_errno=True)

CLOCK_REALTIME_COARSE = 5
"""Clock that the kernel stamps files with (linux/time.h); Python has no name for it."""


@attrs.frozen
class Side:
    """One of the two trees, with the places of files that have the same shape."""

    files: Path
    """Directory of the control files of a live process."""
    home: Path
    """Populated directory in which directories may be made."""
    number: str
    """File with a number or ``max``."""
    switch: str
    """File with 0 or 1."""
    shown: str
    """File that is only read."""
    told: str
    """File that is only written."""

    def open(self, name: str, flags: int) -> int:
        return os.open(self.files / name, flags)


@pytest.fixture(scope="module")
def sides(module_mount: Mounted) -> Iterator[tuple[Side, Side]]:
    """The kernel's side and ours, with the same idle process in both."""
    group = cgroup2() / f"ggroupfs-test-{os.getpid()}"
    group.mkdir()
    try:
        with subprocess.Popen(["sleep", "600"]) as process:
            try:
                (group / "cgroup.procs").write_text(str(process.pid))
                (module_mount / process.pid).mkdir()
                ours = module_mount / "slice" / group.name
                assert ours.is_dir()
                yield (
                    Side(group, group, "cgroup.max.depth", "cgroup.freeze", "cgroup.stat", "cgroup.kill"),
                    Side(
                        module_mount.group(process.pid),
                        ours,
                        "gmem.limit.high",
                        "compute.freeze",
                        "gmem.current",
                        "gmem.reclaim",
                    ),
                )
            finally:
                (group / "cgroup.freeze").write_text("0")
                process.kill()
    finally:
        group.rmdir()
    module_mount.check_log()


# Single operations

Operation = Callable[[Side], object]


@contextlib.contextmanager
def opened(side: Side, name: str, flags: int) -> Iterator[int]:
    fd = side.open(name, flags)
    try:
        yield fd
    finally:
        os.close(fd)


def on(flags: int, call: Callable[[int], object], name: str = "number") -> Operation:
    """Return a call on an open file, one of :class:`Side`'s names."""

    def operation(side: Side) -> object:
        with opened(side, getattr(side, name), flags) as fd:
            return call(fd)

    return operation


def at(call: Callable[[Path], object], name: str = "number") -> Operation:
    """Return a call on the path of a file, or on a new name (``new``) beside it."""
    return lambda side: call(side.files / getattr(side, name, name))


def write(raw: bytes, name: str = "number", flags: int = os.O_RDWR) -> Operation:
    """Return a write, which answers with what can be read after it."""

    def operation(side: Side) -> object:
        with opened(side, getattr(side, name), flags) as fd:
            return answer(lambda: os.write(fd, raw)), answer(lambda: os.pread(fd, 64, 0)) if name != "shown" else None

    return operation


def c_call(name: str, *args: Any) -> int:
    """Call a function of the C library that Python lacks; raise its errno."""
    result: int = getattr(libc, name)(*args)
    if result < 0:
        raise OSError(ctypes.get_errno(), name)
    return result


def mapped(fd: int, flags: int, prot: int) -> bool:
    """Call mmap(2) itself, since Python's looks at st_size first."""
    libc.mmap.restype = ctypes.c_void_p
    where = libc.mmap(None, ctypes.c_size_t(4096), prot, flags, fd, ctypes.c_long(0))
    if where == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")
    libc.munmap(ctypes.c_void_p(where), ctypes.c_size_t(4096))
    return True


def sent(fd: int) -> int:
    left, right = socket.socketpair()
    with left, right:
        return os.sendfile(left.fileno(), fd, 0, 1)


def spliced(fd: int) -> int:
    read_end, write_end = os.pipe()
    try:
        return os.splice(fd, write_end, 1, offset_src=0)
    finally:
        os.close(read_end)
        os.close(write_end)


def copied(fd: int) -> int:
    target = os.open("/tmp", os.O_TMPFILE | os.O_RDWR)
    try:
        return os.copy_file_range(fd, target, 1, 0)
    finally:
        os.close(target)


EVERYTHING = (
    select.POLLIN | select.POLLOUT | select.POLLPRI | select.POLLRDNORM | select.POLLWRNORM
    | select.POLLRDBAND | select.POLLWRBAND
)  # fmt: skip


def polled(fd: int) -> list[tuple[int, int]]:
    poller = select.poll()
    poller.register(fd, EVERYTHING)
    return [(0, events) for _, events in poller.poll(0)]


def locked(fd: int) -> bool:
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return True


def kept(change: Callable[[Path], object], undo: Callable[[Path], object], name: str) -> Operation:
    """Return a change of attributes that answers with what stat(2) shows of it, and is then undone."""

    def operation(side: Side) -> object:
        path = side.files / getattr(side, name)
        try:
            change(path)
            found = path.stat()
            return stat.filemode(found.st_mode), found.st_uid, found.st_gid
        finally:
            undo(path)

    return operation


def timed(change: Callable[[Path], object]) -> Operation:
    """Return a change that answers what it makes of an mtime of 1970, and whether it changes the inode."""

    def operation(side: Side) -> object:
        path = side.files / side.number
        os.utime(path, ns=(1, 1))
        before = time.clock_gettime_ns(CLOCK_REALTIME_COARSE)
        change(path)
        found = path.stat()
        return found.st_mtime_ns if found.st_mtime_ns < 10**9 else "now", found.st_ctime_ns >= before

    return operation


def links(side: Side) -> object:
    """Return by how much st_nlink of a directory grows while another is in it, and after that."""
    before = side.home.stat().st_nlink
    (side.home / "one-more").mkdir()
    try:
        during = side.home.stat().st_nlink - before
    finally:
        (side.home / "one-more").rmdir()
    return during, side.home.stat().st_nlink - before


def stat_of(name: str) -> Operation:
    def operation(side: Side) -> object:
        found = (side.files / getattr(side, name)).stat()
        return stat.filemode(found.st_mode), found.st_uid, found.st_gid, found.st_nlink, found.st_blksize

    return operation


def made(name: str) -> Operation:
    """Return an mkdir in a populated directory, followed by rmdir."""

    def operation(side: Side) -> object:
        (side.home / name).mkdir()
        (side.home / name).rmdir()
        return True

    return operation


def rmdir_with_a_child(side: Side) -> object:
    (side.home / "parent").mkdir()
    (side.home / "parent" / "child").mkdir()
    try:
        return answer((side.home / "parent").rmdir)
    finally:
        (side.home / "parent" / "child").rmdir()
        (side.home / "parent").rmdir()


R, W, RW = os.O_RDONLY, os.O_WRONLY, os.O_RDWR
REGULAR, NEW = stat.S_IFREG | 0o600, "new"

OPERATIONS: dict[str, Operation] = {
    # Making and removing names
    "creat": at(lambda path: os.close(os.open(path, W | os.O_CREAT)), NEW),
    "creat exclusively": at(lambda path: os.close(os.open(path, W | os.O_CREAT | os.O_EXCL))),
    "creat what is there": on(W | os.O_CREAT | os.O_TRUNC, lambda fd: True),
    "open what is not there": at(lambda path: os.close(os.open(path, R)), NEW),
    "open as a directory": at(lambda path: os.close(os.open(path, R | os.O_DIRECTORY))),
    "open a directory to write": lambda side: os.close(os.open(side.files, RW)),
    "open O_TMPFILE": lambda side: os.close(os.open(side.files, RW | os.O_TMPFILE)),
    "open O_DIRECT": on(R | os.O_DIRECT, lambda fd: True),
    "open O_PATH": on(os.O_PATH, lambda fd: True),
    "mknod regular": at(lambda path: os.mknod(path, REGULAR), NEW),
    "mknod fifo": at(lambda path: os.mkfifo(path), NEW),
    "mknod device": at(lambda path: os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3)), NEW),
    "bind a socket": at(lambda path: _bound(path), NEW),
    "unlink": at(os.unlink),
    "unlink what is not there": at(os.unlink, NEW),
    "unlink a directory": lambda side: os.unlink(side.home),
    "rmdir a file": at(os.rmdir),
    "rmdir what is not there": at(os.rmdir, NEW),
    "rmdir a populated directory": lambda side: os.rmdir(side.home),
    "rmdir with a child": rmdir_with_a_child,
    "rename": at(lambda path: os.rename(path, path.parent / NEW)),
    "rename over": lambda side: os.rename(side.files / side.number, side.files / side.switch),
    "rename to itself": at(lambda path: os.rename(path, path)),
    "rename a directory": lambda side: os.rename(side.home, side.home.parent / "renamed"),
    "exchange": lambda side: c_call(
        "renameat2", -100, bytes(side.files / side.number), -100, bytes(side.files / side.switch), 2
    ),
    "link": at(lambda path: os.link(path, path.parent / NEW)),
    "symlink": at(lambda path: os.symlink("target", path), NEW),
    "readlink": at(os.readlink),
    "mkdir": made("child"),
    "mkdir of a name with a blank": made("a child"),
    "mkdir of a name with a newline": made("a\nchild"),
    "mkdir of a long name": made("x" * 255),
    "mkdir of a name too long": made("x" * 256),
    "mkdir where there is one": lambda side: side.home.mkdir(),
    "mkdir where there is a file": at(os.mkdir),
    "mkdir below nothing": lambda side: os.mkdir(side.home / "a" / "b"),
    "mkdir in a process": at(os.mkdir, NEW),
    # Attributes
    "stat": stat_of("number"),
    "stat a read-only file": stat_of("shown"),
    "stat a write-only file": stat_of("told"),
    "stat a directory": lambda side: (stat.filemode(side.files.stat().st_mode), side.files.stat().st_nlink),
    "st_size": at(lambda path: path.stat().st_size),
    "chmod": kept(lambda path: path.chmod(0o600), lambda path: path.chmod(0o644), "number"),
    "chown": kept(lambda path: os.chown(path, 7, 8), lambda path: os.chown(path, 0, 0), "number"),
    "utime": at(lambda path: os.utime(path, (1, 1))),
    "times of a utime": timed(lambda path: os.utime(path, ns=(5, 7))),
    "times of a utime that is now": timed(os.utime),
    "times of a chmod": timed(lambda path: path.chmod(0o644)),
    "times of a chown": timed(lambda path: os.chown(path, 0, 0)),
    "st_nlink": links,
    "access": at(lambda path: [os.access(path, mode) for mode in (os.R_OK, os.W_OK, os.X_OK)]),
    "truncate": at(lambda path: os.truncate(path, 0)),
    "truncate longer": at(lambda path: os.truncate(path, 100_000)),
    "truncate a directory": lambda side: os.truncate(side.files, 0),
    "truncate a read-only file": at(lambda path: os.truncate(path, 0), "shown"),
    "ftruncate": on(RW, lambda fd: os.ftruncate(fd, 5)),
    "ftruncate not open to write": on(R, lambda fd: os.ftruncate(fd, 5)),
    "getxattr": at(lambda path: os.getxattr(path, "user.none")),
    "getxattr of an ACL": at(lambda path: os.getxattr(path, "system.posix_acl_access")),
    "setxattr": at(lambda path: os.setxattr(path, "user.none", b"")),
    "statfs": lambda side: os.statvfs(side.files)[:8] + os.statvfs(side.files)[9:10],
    "f_type": lambda side: subprocess.run(["stat", "-f", "-c", "%t", side.files], stdout=-1, text=True).stdout,
    # An open file
    "fsync": on(RW, os.fsync),
    "fdatasync": on(RW, os.fdatasync),
    "fsync a directory": lambda side: _in_directory(side, os.fsync),
    "fallocate": on(RW, lambda fd: c_call("fallocate", fd, 0, ctypes.c_long(0), ctypes.c_long(4096))),
    "posix_fallocate": on(RW, lambda fd: os.posix_fallocate(fd, 0, 4096)),
    "mmap shared": on(RW, lambda fd: mapped(fd, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)),
    "mmap shared to read": on(R, lambda fd: mapped(fd, mmap.MAP_SHARED, mmap.PROT_READ)),
    "mmap private": on(R, lambda fd: mapped(fd, mmap.MAP_PRIVATE, mmap.PROT_READ)),
    "sendfile": on(R, sent),
    "splice": on(R, spliced),
    "copy_file_range": on(R, copied),
    "ioctl": on(R, lambda fd: fcntl.ioctl(fd, 0x5401)),
    "lock": on(RW, locked),
    "poll": on(R, polled),
    "execute": at(lambda path: os.execve(path, ["x"], {})),
    "chdir": at(os.chdir),
    "list a file": at(os.listdir),
    "read a directory": lambda side: _in_directory(side, lambda fd: os.read(fd, 10)),
    # Rights of the open file, and of the file itself
    "read a write-only file": on(R, lambda fd: os.read(fd, 10), "told"),
    "read not open to read": on(W, lambda fd: os.read(fd, 10)),
    "write not open to write": on(R, lambda fd: os.write(fd, b"1")),
    "pwrite not open to write": on(R, lambda fd: os.pwrite(fd, b"1", 0)),
    "write a read-only file": write(b"1", "shown"),
    "write nothing to a read-only file": write(b"", "shown"),
    "write too much to a read-only file": write(b"1".ljust(4097), "shown"),
    "write much to a read-only file": write(b"1".ljust(4096), "shown"),
    "append to a read-only file": write(b"1", "shown", W | os.O_APPEND),
    "seek after appending": on(RW | os.O_APPEND, lambda fd: (os.write(fd, b"1"), os.lseek(fd, 0, os.SEEK_CUR))),
    "seek before the start": on(R, lambda fd: os.lseek(fd, -1, os.SEEK_SET)),
    "seek for data": on(R, lambda fd: os.lseek(fd, 0, os.SEEK_DATA)),
    "read at a negative offset": on(R, lambda fd: os.pread(fd, 10, -1)),
    "read far away": on(R, lambda fd: os.pread(fd, 10, 1 << 40)),
    "read nothing": on(R, lambda fd: os.pread(fd, 0, 0)),
    # Text on which parsers may differ
    **{
        f"write {label}": write(raw)
        for label, raw in {
            "nothing": b"",
            "a newline": b"\n",
            "a NUL": b"\0",
            "a number and a NUL": b"12\0 34",
            "max in blanks": b"\t max \v\f\r\n",
            "max and a NUL": b"max\0imum",
            "4094 bytes": b"1".ljust(4094),
            "4095 bytes": b"1".ljust(4095),
            "4096 bytes": b"1".ljust(4096),
            "4097 bytes": b"1".ljust(4097),
            "64 KiB": b"1".ljust(1 << 16),
            "2 MiB": b"1".ljust(2 << 20),
            "4096 NULs": bytes(4096),
            "a no-break space": b"5\xa0",
            "a letter that is not ASCII": "é".encode(),
            "2^64": str(1 << 64).encode(),
            "2^64 and more": f"{1 << 64}x".encode(),
            "2^64 and a word": f"{1 << 64} x".encode(),
            "-2^64": str(-(1 << 64)).encode(),
            "minus nothing": b"-0",
            "two signs": b"+-1",
        }.items()
    },
    "write 2^31 to a switch": write(b"2147483648", "switch"),
    "write max to a switch": write(b"max", "switch"),
}


def _bound(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as unbound:
        directory = os.open(path.parent, os.O_PATH)
        try:
            unbound.bind(f"/proc/self/fd/{directory}/{path.name}")
        finally:
            os.close(directory)


def _in_directory(side: Side, call: Callable[[int], object]) -> object:
    fd = os.open(side.files, R)
    try:
        return call(fd)
    finally:
        os.close(fd)


DIFFERENCES: dict[str, tuple[object, object, str]] = {
    "st_size": (0, 4096, "with 0, FUSE's splice path gives sendfile(2), and so shutil.copyfile(), nothing"),
    "seek for data": ("ENXIO", 0, "as st_size: there are 4096 bytes of data to seek in"),
    "seek after appending": ((1, 1), (1, 4097), "as st_size: it is where the file ends"),
    "f_type": ("63677270\n", "65735546\n", "the kernel says FUSE_SUPER_MAGIC for every FUSE filesystem"),
    "mmap private": ("ENODEV", True, "FUSE allows it on a direct_io file; the server is not asked"),
    "getxattr": ("ENODATA", "ENOTSUP", "no xattrs: a handler would cost a request at each open to write"),
    "setxattr": (None, "ENOTSUP", "as getxattr"),
    "pwrite not open to write": ("ESPIPE", "EBADF", "seq_file calls it a file without positions; FUSE has them"),
    "write 4096 bytes": (
        (4096, b"1\n"),
        ("E2BIG", b"max\n"),
        "a page less the NUL at its end, and no more",
    ),
    "write 4096 NULs": (("EINVAL", b"max\n"), ("E2BIG", b"max\n"), "as above"),
    "write much to a read-only file": (("EINVAL", None), ("E2BIG", None), "as above: the size is looked at first"),
    "mkdir in a process": (None, "EPERM", "a process has GPUs below it and no groups"),
}
"""``operation -> (the kernel's answer, ours, why)``."""

LINUX = tuple(int(number) for number in os.uname().release.split("-")[0].split(".")[:2])
if LINUX >= (6, 2):  # before that, an ACL is an ordinary xattr, of which FUSE says that there is none
    DIFFERENCES["getxattr of an ACL"] = "ENOTSUP", "ENODATA", "as getxattr: where nobody answers, a file has none"


@pytest.mark.parametrize("name", OPERATIONS)
def test_one_operation(sides: tuple[Side, Side], name: str) -> None:
    """The answers are the same, or differ exactly as explained."""
    here = os.getcwd()
    for side in sides:
        (side.files / side.number).write_text("max")
        (side.files / side.switch).write_text("0")
    try:
        kernel, ours = (answer(lambda side=side: OPERATIONS[name](side)) for side in sides)  # type: ignore[misc]
    finally:
        os.chdir(here)
        with contextlib.suppress(OSError):
            (sides[0].files / NEW).rmdir()  # the kernel makes a cgroup here, we make nothing
    expected = DIFFERENCES.get(name)
    assert (kernel, ours) == (expected[:2] if expected else (kernel, kernel))


# Histories

shared = st.one_of(
    st.integers(0, 20),
    st.sampled_from((-1, -5, 4095, 4096, 65535, (1 << 31) - 2, 1 << 64, 1 << 66, -(1 << 31) - 1)),
)
"""Numbers with the same meaning for both: max.depth is an int, and 2^31 - 1 is its ``max``."""


def spelled(number: int) -> list[str]:
    sign, size = ("-", -number) if number < 0 else ("", number)
    return [str(number), f"{sign}{size:#x}", f"{sign}0{size:o}", f"{sign}0X{size:X}", f"+{number}", f"0{number}"]


SUFFIXED = re.compile(r"[0-9a-f]m")
"""A number with a suffix, in either base."""
words = st.one_of(
    shared.flatmap(lambda number: st.sampled_from(spelled(number))),
    st.just("max"),
    # No K, M, G and T, which are suffixes for only one of the two, nor the m of max; and no number that may grow beyond
    # what they share.
    st.text("0123456789abcdefx+-. \t\n\0max", max_size=5).filter(
        lambda text: "max" not in text[1:] and not SUFFIXED.search(text)
    ),
)
blanks = st.text(" \t\n\v\f\r", max_size=2)
texts = st.builds(
    lambda before, word, after: (before + word + after).encode(),
    blanks,
    words,
    st.one_of(blanks, st.sampled_from(("\0", "\0x", " 1", "\n2", "x"))),
)
# Lengths near the limit are in the table above, which decides about 4096 bytes.
payloads = st.one_of(texts, texts, texts, st.integers(4090, 4095).map(lambda n: b"7".ljust(n)), st.just(b"1" * 5000))
switches = st.one_of(st.sampled_from((b"0", b"1", b"0\n", b"1\n", b" 01", b"2", b"-1", b"+1")), payloads)
flags = st.sampled_from(
    (R, W, RW, RW, RW, RW | os.O_APPEND, W | os.O_TRUNC, RW | os.O_TRUNC, R | os.O_TRUNC, RW | os.O_CREAT)
)
offsets = st.one_of(st.integers(0, 6), st.sampled_from((100, 4095, 4096, 1 << 20, 1 << 40)))
counts = st.sampled_from((0, 1, 2, 3, 5, 64, 4096, 70_000))


class DifferentialMachine(RuleBasedStateMachine):
    """Pairs of open files, one of the kernel's and one of ours; every call is made on both, with the same answer."""

    sides: ClassVar[tuple[Side, Side]]

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[str, tuple[int, int]]] = []
        self.dirty: set[tuple[int, int]] = set()  # pairs whose value was changed since their last read from the start
        for side in self.sides:
            (side.files / side.number).write_text("max")
            (side.files / side.switch).write_text("0")

    def teardown(self) -> None:
        for _, fds in self.pairs:
            for fd in fds:
                os.close(fd)

    def both(self, call: Callable[[int], object], fds: tuple[int, int]) -> object:
        """Make a call on both; return the answer, which must be the same."""
        kernel, ours = (answer(lambda fd=fd: call(fd)) for fd in fds)  # type: ignore[misc]
        assert ours == kernel
        return kernel

    @precondition(lambda self: len(self.pairs) < 4)
    @rule(name=st.sampled_from(("number", "number", "switch", "told")), flags=flags)
    def open(self, name: str, flags: int) -> None:
        fds = (*(side.open(getattr(side, name), flags) for side in self.sides),)
        assert len(fds) == 2
        self.pairs.append((name, fds))

    @precondition(lambda self: self.pairs)
    @rule(index=pick)
    def close(self, index: int) -> None:
        name, fds = chosen(self.pairs, index)
        self.pairs.remove((name, fds))
        self.dirty.discard(fds)
        for fd in fds:
            os.close(fd)

    @precondition(lambda self: self.pairs)
    @rule(index=pick, raw=payloads, switch=switches, offset=st.one_of(st.none(), st.none(), offsets))
    def write(self, index: int, raw: bytes, switch: bytes, offset: int | None) -> None:
        name, fds = chosen(self.pairs, index)
        if name == "told":
            return  # cgroup.kill would act
        raw = switch if name == "switch" else raw
        if not fcntl.fcntl(fds[0], fcntl.F_GETFL) & os.O_ACCMODE:
            offset = None  # the kernel's ESPIPE is in DIFFERENCES
        self.both(lambda fd: os.write(fd, raw) if offset is None else os.pwrite(fd, raw, offset), fds)
        self.dirty.update(fds for _, fds in self.pairs)
        if fcntl.fcntl(fds[0], fcntl.F_GETFL) & os.O_APPEND:
            self.both(lambda fd: os.lseek(fd, 0, os.SEEK_SET), fds)  # the offset at the end is in DIFFERENCES

    @precondition(lambda self: self.pairs)
    @rule(index=pick, count=counts)
    def read(self, index: int, count: int) -> None:
        _, fds = chosen(self.pairs, index)
        here = self.both(lambda fd: os.lseek(fd, 0, os.SEEK_CUR), fds)
        if here == 0:
            self.dirty.discard(fds)
        elif fds in self.dirty:
            return  # the kernel may mix two states, we never do: see test_a_snapshot_is_never_mixed
        self.both(lambda fd: os.read(fd, count), fds)

    @precondition(lambda self: self.pairs)
    @rule(index=pick, count=counts, offset=offsets)
    def pread(self, index: int, count: int, offset: int) -> None:
        _, fds = chosen(self.pairs, index)
        if offset == 0:
            self.dirty.discard(fds)
        elif fds in self.dirty:
            return
        self.both(lambda fd: os.pread(fd, count, offset), fds)

    @precondition(lambda self: self.pairs)
    @rule(index=pick, offset=st.integers(-3, 6), relative=st.booleans())
    def seek(self, index: int, offset: int, relative: bool) -> None:
        _, fds = chosen(self.pairs, index)
        self.both(lambda fd: os.lseek(fd, offset, os.SEEK_CUR if relative else os.SEEK_SET), fds)

    @precondition(lambda self: self.pairs)
    @rule(index=pick)
    def dup_and_flags(self, index: int) -> None:
        _, fds = chosen(self.pairs, index)
        self.both(lambda fd: fcntl.fcntl(fd, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_APPEND), fds)

    @rule(name=st.sampled_from(("number", "switch")))
    def cat(self, name: str) -> None:
        """Check that a new reader sees what the last good write set."""
        kernel, ours = (answer((side.files / getattr(side, name)).read_bytes) for side in self.sides)
        assert ours == kernel


def test_histories(sides: tuple[Side, Side]) -> None:
    machine = type("Machine", (DifferentialMachine,), {"sides": sides})
    run_state_machine_as_test(machine, settings=history(150, shrink=False))


def test_a_snapshot_is_never_mixed(sides: tuple[Side, Side]) -> None:
    """Text that was read from the start goes on as it began, whatever is written meanwhile, until it is read anew."""
    ours = sides[1]
    path = ours.files / ours.number
    path.write_text("123456")
    with open(path, "rb", buffering=0) as file:
        assert file.read(3) == b"123"
        path.write_text("max")
        assert file.read(10) == b"456\n"
        assert os.pread(file.fileno(), 10, 4) == b"56\n"
        assert os.pread(file.fileno(), 10, 0) == b"max\n"
        assert os.pread(file.fileno(), 10, 1) == b"ax\n"


def test_what_is_gone(module_mount: Mounted) -> None:
    """The files of a group that is gone give ENODEV to a process that has them open, and its name is free again."""
    group = cgroup2() / f"ggroupfs-gone-{os.getpid()}"
    group.mkdir()
    ours = module_mount / "slice" / "gone"
    ours.mkdir()
    names = {group: group / "cgroup.max.depth", ours: ours / "0" / "gmem.limit.high"}
    fds = {directory: [os.open(path, RW) for _ in range(2)] for directory, path in names.items()}
    try:
        found = {}
        for directory, (fresh, read) in fds.items():
            os.read(read, 2)
            directory.rmdir()
            found[directory] = [
                answer(lambda fd=fresh: os.pread(fd, 10, 0)),  # type: ignore[misc]
                answer(lambda fd=fresh: os.write(fd, b"1")),  # type: ignore[misc]
                answer(lambda fd=read: os.pread(fd, 10, 0)),  # type: ignore[misc]
                answer(lambda name=names[directory]: os.stat(name)),  # type: ignore[misc]
                answer(lambda name=directory: name.mkdir()),  # type: ignore[misc]
                answer(lambda name=directory: name.rmdir()),  # type: ignore[misc]
            ]
        assert found[ours] == found[group]
    finally:
        for fd in (*fds[group], *fds[ours]):
            os.close(fd)
