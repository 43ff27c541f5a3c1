"""A tenant with a file system of its own that answers as the test likes: FUSE in a user namespace, or as root.

    python fuse_tenant.py device NAME          opens the real NAME, a file of its own with that name, and NAME by O_PATH

The variable FUSE names FUSE's device. The program prints those descriptors, and then each request of the kernel, as one
word. It needs nothing but Python.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import struct
import sys
from collections.abc import Callable

GETATTR, OPEN, READ, FLUSH, INIT = 3, 14, 15, 25, 26
FORGET, RELEASE, INTERRUPT, BATCH_FORGET = 2, 18, 36, 42
NAMES = {GETATTR: "GETATTR", OPEN: "OPEN", READ: "READ", FLUSH: "FLUSH"}

IN = struct.Struct("<IIQQIIII")
OUT = struct.Struct("<IiQ")
ATTR = struct.Struct("<6Q10I")
SIZE = 1 << 20
PR_SET_PDEATHSIG = 1

libc = ctypes.CDLL(None, use_errno=True)


def say(*words: object) -> None:
    """Print a line for the test."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def mount(source: str, place: str, kind: str, data: str = "") -> None:
    """Call mount(2)."""
    if libc.mount(source.encode(), place.encode(), kind.encode(), 0, data.encode()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), place)


def serve(fuse: int, silent: set[int]) -> None:
    """Answer the kernel, except for requests in `silent`, until killed; the kill releases every waiter."""
    attributes = ATTR.pack(1, SIZE, SIZE // 512, *[0] * 6, 0o100755, 1, *[0] * 3, 4096, 0)
    while True:
        request = os.read(fuse, 1 << 21)
        _, op, unique = IN.unpack_from(request)[:3]
        code, body = 0, b""
        if op in NAMES:
            say(NAMES[op])
        if op in silent or op in (FORGET, BATCH_FORGET, INTERRUPT):
            continue
        if op == INIT:
            body = struct.pack("<4I2H2I2H8I", 7, 31, 0, 0, 12, 12, 65536, 1, 0, 0, *[0] * 8)
        elif op == GETATTR:
            body = struct.pack("<QII", 1, 0, 0) + attributes
        elif op == OPEN:
            body = struct.pack("<QII", 7, 0, 0)
        elif op != RELEASE:
            code = -errno.EIO if op == READ else -errno.ENOSYS
        os.write(fuse, OUT.pack(OUT.size + len(body), code, unique) + body)


def with_server(place: str, silent: set[int], tenant: Callable[[], None]) -> None:
    """Mount a file system at `place` that is a single file, and run `tenant` in a child that ends with this process."""
    fuse = os.open(os.environ["FUSE"], os.O_RDWR)
    mount("x", place, "fuse", f"fd={fuse},rootmode=100000,user_id=0,group_id=0")
    if os.fork():
        serve(fuse, silent)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.close(fuse)  # otherwise the process would wait for itself as it ends
    tenant()
    while True:
        signal.pause()


def device(name: str) -> None:
    """Open the three descriptors; see the module."""
    real, path = os.open(name, os.O_RDWR), os.open(name, os.O_PATH)
    folder = os.path.dirname(name)
    os.environ["FUSE"] = f"/proc/self/fd/{os.open(os.environ['FUSE'], os.O_PATH)}"
    mount("none", folder, "tmpfs")
    os.close(os.open(name, os.O_CREAT))
    with_server(name, {FLUSH}, lambda: say("ready", os.getpid(), real, os.open(name, os.O_RDWR), path))


if __name__ == "__main__":
    {"device": device}[sys.argv[1]](sys.argv[2])
