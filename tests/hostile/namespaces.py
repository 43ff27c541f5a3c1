"""Kinds in namespaces of the tenant's own, where it is root, mounts what it likes, and serves files."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import select
import struct
import time
from collections.abc import Callable

from tests.hostile.processes import LIBC, join
from tests.hostile.registry import Tenant, child, kind

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x02000000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE, MS_REMOUNT, MS_RDONLY, MNT_DETACH = 4096, 16384, 1 << 18, 32, 1, 2

CONTROL = "/dev/nvidiactl"
INIT, GETATTR, OPEN, READ, STATFS, RELEASE, FLUSH, FORGET, ACCESS = 26, 3, 14, 15, 17, 18, 25, 2, 34
BATCH_FORGET = 42
SERVED_S = 3.0
"""Seconds for which a tenant serves its file system, unless it is killed before."""


def check(result: int) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def unshare(flags: int) -> None:
    """Call unshare(2), and become root in the user namespace."""
    check(LIBC.unshare(flags | CLONE_NEWUSER))
    for name, text in (("setgroups", "deny"), ("uid_map", "0 65534 1"), ("gid_map", "0 65534 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def mount(source: str, target: str, type_: str, flags: int, words: str = "") -> None:
    """Call mount(2)."""
    raw = [os.fsencode(text) for text in (source, target, type_)]
    check(LIBC.mount(*raw, ctypes.c_ulong(flags), os.fsencode(words)))


@kind("be root in a user namespace")
def users(tenant: Tenant, random: random.Random) -> None:
    def act() -> None:
        unshare(random.choice((0, CLONE_NEWIPC, CLONE_NEWNET, CLONE_NEWCGROUP | CLONE_NEWUTS)))
        for call in (lambda: os.chown(f"{tenant.own}/0/gmem.limit.high", 0, 0), lambda: join(tenant)):
            with contextlib.suppress(OSError):
                call()
        with open(f"{tenant.own}/0/gmem.limit.high", "w", encoding="ascii") as file:
            file.write("max")

    child(act)


@kind("mount and unmount")
def mounts(tenant: Tenant, random: random.Random) -> None:
    """Bind the tree elsewhere, make it read-only, move or detach it, or mount other things over it or the socket."""

    def act() -> None:
        unshare(CLONE_NEWNS)
        mount("none", "/", "", MS_REC | MS_PRIVATE)
        mount("none", "/mnt", "tmpfs", 0)
        os.mkdir("/mnt/tree")
        if random.random() < 0.3:
            mount("none", tenant.mount, "tmpfs", 0)
            check(LIBC.umount2(os.fsencode(tenant.mount), MNT_DETACH))
        mount(tenant.mount, "/mnt/tree", "", MS_BIND | MS_REC)
        mount("none", "/mnt/tree", "", MS_BIND | MS_REMOUNT | MS_RDONLY)
        os.listdir("/mnt/tree/slice")
        os.chroot("/mnt/tree")
        os.listdir("/gpus")

    child(act)


@kind("be in a pid namespace")
def pids(tenant: Tenant, random: random.Random) -> None:
    """Connect as pid 1 of a pid namespace, and end with all of it."""

    def act() -> None:
        unshare(CLONE_NEWPID)
        if os.fork() == 0:
            join(tenant)
            os.fork()
            time.sleep(0.02)
            os._exit(0)
        time.sleep(0.03)

    child(act)


def impersonate(tenant: Tenant, make: Callable[[int], int], seconds: float) -> None:
    """Become a program of the driver with an open file that only has the name of the driver's. `make` gets a descriptor
    of the FUSE device."""
    unshare(CLONE_NEWNS)
    device = os.open("/dev/fuse", os.O_RDWR)  # belongs to the namespace in which it is opened
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    mount("none", "/dev", "tmpfs", 0)
    descriptor = make(device)
    place = tenant.place()
    tenant.page.words[place + 1] = 64 << 20
    tenant.page.words[place] = os.getpid()
    with contextlib.suppress(OSError):
        join(tenant)
    time.sleep(seconds)
    os.dup2(2, descriptor)  # reuses the number; the server may never answer the close


@kind("own file as the driver's")
def impostor(tenant: Tenant, random: random.Random) -> None:
    """Use a file, a fifo, a socket, or an O_PATH descriptor of that name."""

    def make(_: int) -> int:
        what = random.choice(("file", "fifo", "path", "directory"))
        if what == "fifo":
            os.mkfifo(CONTROL)
            return os.open(CONTROL, os.O_RDWR)
        if what == "directory":
            os.mkdir(CONTROL)
            return os.open(CONTROL, os.O_RDONLY)
        return os.open(CONTROL, os.O_CREAT | os.O_RDWR if what == "file" else os.O_CREAT | os.O_PATH, 0o666)

    child(lambda: impersonate(tenant, make, 0.15), 0.2)


@kind("own file system as the driver's")
def fuse(tenant: Tenant, random: random.Random) -> None:
    """Serve a FUSE of its own, which answers what is needed to open a file there, and never a close."""
    silent = random.choice(((), (FLUSH,), (FLUSH, GETATTR), (FLUSH, RELEASE)))

    def make(device: int) -> int:
        os.close(os.open(CONTROL, os.O_CREAT | os.O_RDWR, 0o666))
        mount("x", CONTROL, "fuse", 0, f"fd={device},rootmode=100000,user_id=0,group_id=0")
        if os.fork() == 0:
            serve(device, silent)
        os.close(device)
        return os.open(CONTROL, os.O_RDWR)

    child(lambda: impersonate(tenant, make, 0.3), 0.35)


def serve(device: int, silent: tuple[int, ...]) -> None:
    """Serve a file system that is one file."""
    attributes = struct.pack("<QQQQQQIIIIIIIIII", 1, 0, 0, 0, 0, 0, 0, 0, 0, 0o100666, 1, 0, 0, 0, 4096, 0)
    opened = False
    until = time.monotonic() + SERVED_S
    try:
        poll = select.poll()
        poll.register(device, select.POLLIN)
        while poll.poll(max(0.0, until - time.monotonic()) * 1000):
            raw = os.read(device, 1 << 20)
            _, op, unique = struct.unpack_from("<IIQ", raw)
            body, code = b"", 0
            if op == INIT:
                body = struct.pack("<IIIIHHIIHHI", 7, 31, 0, 0, 12, 12, 65536, 1, 0, 0, 0) + bytes(28)
            elif op in (FORGET, BATCH_FORGET) or (opened and op in silent):
                continue
            elif op == GETATTR:
                body = struct.pack("<QII", 0, 0, 0) + attributes
            elif op == OPEN:
                body, opened = struct.pack("<QII", 7, 0, 0), True
            elif op not in (RELEASE, FLUSH, ACCESS):
                code = -38
            os.write(device, struct.pack("<IiQ", 16 + len(body), code, unique) + body)
    finally:
        os._exit(0)
