"""For programs: tells a process how much GPU memory to give back, from its own usermemfd, before it is taken.

    for nbytes in Usermem():         # in a thread of its own, or
        cache.shrink(nbytes)

    watch(cache.shrink)              # starts one

The daemon waits 50 ms for memory that the program frees by itself, and moves the rest to the host.
"""

from __future__ import annotations

import errno
import os
import select
import struct
import threading
from collections.abc import Callable, Iterator

RECORD = struct.Struct("=QQ")
"""Bytes to give back, sequence number."""

OPEN_AGAIN = (errno.ENODEV, errno.ENOTCONN, errno.EBADF)
"""Errors of a read once the tree, or the directory of the process, is gone."""


class Usermem:
    """The records of a process on one GPU, by default this one; an iterator that blocks, and ends with the tree.

    OSError if the process is not in the tree. It is there once it has a context, or if `ggroupfs run -p` started it.
    `pid` is the pid in the tree's namespace, which differs from its own in a container.
    """

    def __init__(self, gpu: int = 0, *, mount: str = "/run/ggroup", pid: int | None = None) -> None:
        who = "self" if pid is None else str(pid)  # self is right in any pid namespace
        self._fd = os.open(f"{mount}/{who}/{gpu}/usermemfd", os.O_RDONLY | os.O_CLOEXEC)

    def __enter__(self) -> Usermem:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening; the daemon does not wait for this process any more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def fileno(self) -> int:
        """Return the descriptor, which is readable when there is a record."""
        return self._fd

    def wait(self, seconds: float | None = None) -> int | None:
        """Return the bytes to give back; None after `seconds` without a record. EOFError at the end of the tree."""
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        while True:
            events = poller.poll(None if seconds is None else seconds * 1000)
            if not events:
                return None
            try:
                nbytes, _ = RECORD.unpack(os.read(self._fd, RECORD.size))
            except BlockingIOError:
                continue
            except OSError as error:
                if error.errno in OPEN_AGAIN:
                    raise EOFError("the tree is gone") from None
                raise
            return int(nbytes)

    def __iter__(self) -> Iterator[int]:
        while True:
            try:
                nbytes = self.wait()
            except EOFError:
                return
            if nbytes is not None:
                yield nbytes


def watch(
    give_back: Callable[[int], object], gpu: int = 0, *, mount: str = "/run/ggroup", pid: int | None = None
) -> threading.Thread:
    """Call `give_back` with every record, in a thread that ends with the tree or the program."""
    records = Usermem(gpu, mount=mount, pid=pid)

    def work() -> None:
        with records:
            for nbytes in records:
                give_back(nbytes)

    thread = threading.Thread(target=work, name="usermem", daemon=True)
    thread.start()
    return thread
