"""Kinds about the files of a tree: every system call that exists for them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import random
import select
import time

from ggroupfs.fs.controls import CONTROLS
from tests.hostile.page import Word
from tests.hostile.registry import Tenant, kind

NAMES = [control.name for control in CONTROLS]
VALUES = (b"0", b"1", b"max", b"64M", b"1G", b"-1", b"\0", b"", b"default", b"2ms", b"1" * 4095, b"1" * 5000, b"\xff")


def directory(tenant: Tenant, random: random.Random) -> str:
    """Return a directory of the tree: its own, another's, a slice, or one that does not exist."""
    neighbour = int(tenant.page.words[Word.NEIGHBOUR_PID])
    return tenant.mount + random.choice(
        (
            f"/{os.getpid()}",
            f"/{os.getpid()}/0",
            "/self/0",
            "/self/1",
            f"/{neighbour}/0",
            "",
            "/gpus/0",
            "/gpus/1",
            "/slice",
            "/1/0",
            "/nowhere",
            tenant.own[len(tenant.mount) :],
            tenant.own[len(tenant.mount) :] + "/0",
            os.path.dirname(tenant.own)[len(tenant.mount) :] + "/0",
        )
    )


def file(tenant: Tenant, random: random.Random) -> str:
    """Return a control file, mostly."""
    name = random.choice(("gmem.current", "gmem.events", "ggroup.backend", "usermemfd", *NAMES))
    if random.random() < 0.3:
        return f"{tenant.own}/0/{name}"
    return f"{directory(tenant, random)}/{name}"


@contextlib.contextmanager
def opened(path: str, flags: int) -> object:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@kind("read files")
def read(tenant: Tenant, random: random.Random) -> None:
    with opened(file(tenant, random), os.O_RDONLY) as descriptor:
        os.pread(descriptor, random.choice((1, 16, 4096, 1 << 20)), random.choice((0, 0, 1, 4096, 1 << 62)))


@kind("write files")
def write(tenant: Tenant, random: random.Random) -> None:
    """Write; most writes are refused, but in its own slice it sets limits, and freezes itself."""
    with opened(file(tenant, random), random.choice((os.O_WRONLY, os.O_RDWR))) as descriptor:
        os.pwrite(descriptor, random.choice(VALUES), random.choice((0, 0, 7)))


@kind("poll files")
def poll(tenant: Tenant, random: random.Random) -> None:
    """Poll files; some are closed during a poll, some are kept open."""
    names = random.choice(("gmem.events", "compute.events", "usermemfd", "gmem.current"))
    descriptor = os.open(f"{tenant.mount}/self/0/{names}", os.O_RDONLY)
    try:
        poller = select.epoll()
    except OSError:
        os.close(descriptor)
        raise
    try:
        poller.register(descriptor, select.EPOLLPRI | select.EPOLLIN)
        poller.poll(random.choice((0, 0.001)))
        os.read(descriptor, 4096)
        poller.poll(0)
    finally:
        tenant.hold(descriptor)
        poller.close()


@kind("list directories")
def lists(tenant: Tenant, random: random.Random) -> None:
    os.listdir(directory(tenant, random))
    tenant.hold(os.open(directory(tenant, random), os.O_RDONLY | os.O_DIRECTORY))


@kind("make slices")
def make(tenant: Tenant, random: random.Random) -> None:
    """Make as many slices in its own, and as deep, as is allowed."""
    name = random.choice(("a", "b", "_0", "0", "é", "x" * 255, "..a", "\udcff", str(random.randrange(400))))
    below = random.choice(("", "", "/a", "/a/b", "/a/b/a", f"/{random.randrange(40)}"))
    if random.random() < 0.2:
        os.rmdir(f"{tenant.own}{below}/{name}")
    else:
        os.mkdir(f"{tenant.own}{below}/{name}")


@kind("rename and link")
def names(tenant: Tenant, random: random.Random) -> None:
    one, other = file(tenant, random), file(tenant, random)
    random.choice(
        (
            lambda: os.rename(one, other),
            lambda: os.unlink(one),
            lambda: os.link(one, other),
            lambda: os.symlink(one, other),
            lambda: os.mkfifo(f"{tenant.own}/fifo"),
            lambda: os.rmdir(directory(tenant, random)),
            lambda: os.rename(tenant.own, f"{tenant.own}x"),
            lambda: os.close(os.open(f"{tenant.own}/file", os.O_CREAT | os.O_WRONLY)),
        )
    )()


@kind("change modes and owners")
def modes(tenant: Tenant, random: random.Random) -> None:
    path = random.choice((file(tenant, random), directory(tenant, random), f"{tenant.own}/0/gmem.limit.high"))
    random.choice(
        (
            lambda: os.chmod(path, random.choice((0, 0o777, 0o7777, 0o644))),
            lambda: os.chown(path, random.choice((-1, 0, 65534, 1000)), random.choice((-1, 0, 65534))),
            lambda: os.utime(path, ns=(random.getrandbits(62), random.getrandbits(62))),
        )
    )()


@kind("attributes")
def attributes(tenant: Tenant, random: random.Random) -> None:
    path = random.choice((file(tenant, random), directory(tenant, random)))
    name = random.choice(("user.x", "security.capability", "system.posix_acl_access", "trusted.x"))
    random.choice(
        (
            lambda: os.setxattr(path, name, bytes(random.choice((0, 1, 4096)))),
            lambda: os.getxattr(path, name),
            lambda: os.listxattr(path),
            lambda: os.removexattr(path, name),
        )
    )()


@kind("map files")
def maps(tenant: Tenant, random: random.Random) -> None:
    with opened(file(tenant, random), os.O_RDONLY) as descriptor:
        flags = random.choice((mmap.MAP_SHARED, mmap.MAP_PRIVATE, mmap.MAP_PRIVATE | 0x8000))  # MAP_POPULATE
        area = mmap.mmap(descriptor, 4096, flags=flags, prot=mmap.PROT_READ)
        with contextlib.suppress(ValueError):
            area.madvise(mmap.MADV_WILLNEED)  # not touched, since a missing page is SIGBUS
        area.close()


@kind("truncate and seek")
def truncate(tenant: Tenant, random: random.Random) -> None:
    with opened(file(tenant, random), random.choice((os.O_RDWR, os.O_RDWR | os.O_TRUNC, os.O_RDONLY))) as descriptor:
        random.choice(
            (
                lambda: os.truncate(descriptor, random.choice((0, 1, 1 << 40))),
                lambda: os.lseek(descriptor, random.choice((0, 1 << 62)), random.choice((0, 1, 2, 3, 4))),
                lambda: os.posix_fallocate(descriptor, 0, 4096),
                lambda: os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED),
                lambda: os.fsync(descriptor),
                lambda: os.sendfile(1, descriptor, 0, 0),
                lambda: os.copy_file_range(descriptor, descriptor, 16),
            )
        )()


@kind("open oddly")
def odd(tenant: Tenant, random: random.Random) -> None:
    flags = random.choice((os.O_DIRECT, os.O_PATH, os.O_APPEND | os.O_WRONLY, os.O_ASYNC, os.O_NOATIME, os.O_DIRECTORY))
    flags |= random.choice((0, os.O_NONBLOCK, os.O_EXCL | os.O_CREAT, os.O_NOFOLLOW))
    descriptor = os.open(file(tenant, random), flags, 0o7777)
    try:
        random.choice(
            (
                lambda: fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB),
                lambda: fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB),
                lambda: fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK),
                lambda: fcntl.fcntl(descriptor, fcntl.F_NOTIFY, fcntl.DN_MODIFY),
                lambda: fcntl.ioctl(descriptor, random.getrandbits(32), b""),
                lambda: os.statvfs(descriptor),
                lambda: os.preadv(descriptor, [bytearray(1)] * 1000, 0),
            )
        )()
    finally:
        os.close(descriptor)


@kind("hold files")
def hold(tenant: Tenant, random: random.Random) -> None:
    """Hold a hundred files at a time, read once, whatever becomes of their groups."""
    for _ in range(50):
        try:
            tenant.hold(os.open(file(tenant, random), os.O_RDONLY))
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
    time.sleep(0.002)
    for descriptor in tenant.held[-10:]:
        with contextlib.suppress(OSError):
            os.read(descriptor, 100)
