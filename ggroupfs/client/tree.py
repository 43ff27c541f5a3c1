"""A mounted tree for programs that keep running: its files, with trio.

Each access runs in a thread: a read takes some 20 microseconds, but a write returns only once it holds, which may take
seconds. Errors are those of the files (OSError): ENOENT for a missing group, ENODEV for one that has gone since.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import attrs
import trio

from backend.common.errors import fail
from backend.process.identity import Slice, cgroup_of
from ggroupfs.client.events import emit
from ggroupfs.client.reading import CONTENT_MOST, ELSEWHERE, content, flat, has_our_pids, numbers, require_tree
from ggroupfs.daemon.watchdog import notify
from ggroupfs.text.names import is_number, slice_directory, unescape

T = TypeVar("T")

THREADS = trio.CapacityLimiter(16)
"""Limit of concurrent accesses. It is separate from trio's own, so waiting writes do not block other threads."""
WAITING = trio.CapacityLimiter(math.inf)
"""Limit for threads in poll(2), one per watched file, or in a move; both may be abandoned."""

LOOK_S = 0.05
"""Seconds between two looks for an awaited directory: inotify does not report what a FUSE server makes by itself."""


async def _in_thread(work: Callable[[], T]) -> T:
    # Never abandoned: an abandoned write could take effect after the one that takes it back.
    return await trio.to_thread.run_sync(work, limiter=THREADS)


@attrs.frozen
class Tree:
    """A mounted tree."""

    mount: Path
    """Mountpoint of the tree."""

    def process(self, pid: int, gpu: int = 0) -> Group:
        """Return the group of a process on one GPU; it need not exist yet."""
        return self._at(str(pid), str(gpu))

    def slice(self, path: str, gpu: int = 0) -> Group:
        """Return the group of a cgroup on one GPU, by a path such as ``/batch.slice``; it need not exist yet."""
        return self._at(slice_directory(path), str(gpu))

    async def present(self, group: Group) -> None:
        """Wait until a group exists, which it does once one of its processes uses the GPU."""
        while not await _in_thread(group.path.is_dir):  # noqa: ASYNC110 - there is no event for it
            await trio.sleep(LOOK_S)

    async def capacity(self, gpu: int = 0) -> int:
        """Return the memory of a GPU in bytes. FileNotFoundError if there is no such GPU."""
        return int(await self._at("gpus", str(gpu)).read("gmem.capacity"))

    async def capabilities(self) -> dict[str, str]:
        """Return the capability of each control on this machine, by name: a word of ``ggroup.capabilities``."""
        return dict(line.split() for line in (await self._at().read("ggroup.capabilities")).splitlines())

    async def ready(self) -> None:
        """Report that the policy is at work: to systemd, if that started it, and as ``{"event": "ready"}``."""
        await _in_thread(partial(notify, "READY=1"))
        emit("ready")

    def _at(self, *parts: str) -> Group:
        """Return the files of a directory as a Group, through which everything is read and written."""
        return Group(self.mount.joinpath(*parts))


@attrs.frozen
class Group:
    """A process or slice on one GPU: a directory of control files."""

    path: Path
    """Directory of the control files."""

    async def read(self, name: str) -> str:
        """Return the content of a control file, without the newline at its end."""
        return await _in_thread(partial(content, self.path / name))

    async def number(self, name: str) -> int | None:
        """Return the number in a control file; None for ``max``."""
        text = await self.read(name)
        return None if text == "max" else int(text)

    async def flat(self, name: str) -> dict[str, int]:
        """Return the numbers of a flat keyed file."""
        return flat(await self.read(name))

    async def write(self, name: str, value: object) -> None:
        """``echo VALUE > NAME``: return once the value holds."""
        await _in_thread(partial((self.path / name).write_text, f"{value}\n"))

    async def migrate(self, gpu: int, seconds: float) -> None:
        """``echo GPU > compute.migrate``: return once the group runs there.

        ETIMEDOUT after `seconds`: it may still move.

        A cancelled caller waits all the same, since a move cannot be taken back.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        with trio.CancelScope(deadline=trio.current_time() + seconds, shield=True):
            write = partial((self.path / "compute.migrate").write_text, f"{gpu}\n")
            await trio.to_thread.run_sync(write, abandon_on_cancel=True, limiter=WAITING)
            return
        raise fail(errno.ETIMEDOUT)

    async def changed(self, name: str) -> None:
        """Wait for the next event of ``gmem.events`` or ``compute.events``. Events before the call do not count."""
        async with self.watch(name) as watch:
            await watch.changed()

    @contextlib.asynccontextmanager
    async def watch(self, name: str) -> AsyncIterator[Watch]:
        """Keep an events file open, so that no event is missed between two waits."""
        file = await _in_thread(partial(os.open, self.path / name, os.O_RDONLY | os.O_CLOEXEC))
        watch = Watch(file)
        try:
            await watch.read()
            yield watch
        finally:
            os.close(file)

    async def pids(self) -> list[int]:
        """Return the processes of a slice on this GPU, including those of slices in it; of a process itself.

        OSError with EOPNOTSUPP in another pid namespace than the daemon's.
        """
        return await _in_thread(partial(_pids, self.path))


@attrs.frozen
class Watch:
    """An open events file."""

    file: int
    """Descriptor of the file."""

    async def read(self) -> dict[str, int]:
        """Return the numbers in the file. Events up to now count as seen."""
        return await _in_thread(lambda: flat(os.pread(self.file, CONTENT_MOST, 0).decode()))

    async def changed(self) -> dict[str, int]:
        """Wait for an event that was not seen, and return the new numbers.

        OSError with ENODEV once the group is gone.
        """
        # The thread has descriptors of its own and closes them when it ends, possibly long after this task was
        # cancelled: a closed number may already be that of another file.
        file, stop = os.dup(self.file), os.eventfd(0, os.EFD_CLOEXEC)
        wake = os.dup(stop)
        try:
            await trio.to_thread.run_sync(partial(_poll, file, stop), abandon_on_cancel=True, limiter=WAITING)
        finally:
            os.eventfd_write(wake, 1)
            os.close(wake)
        return await self.read()


def _poll(file: int, stop: int) -> None:
    """Wait for an event in `file`, or for `stop`, and close both."""
    try:
        poll = select.poll()
        poll.register(file, select.POLLPRI)
        poll.register(stop, select.POLLIN)
        poll.poll()
    finally:
        os.close(file)
        os.close(stop)


def _pids(path: Path) -> list[int]:
    mount = next((above for above in path.parents if (above / "ggroup.backend").exists()), path)
    require_tree(mount)
    *parts, gpu = path.relative_to(mount).parts
    if len(parts) == 1 and is_number(parts[0]):
        return [int(parts[0])] if path.is_dir() else []
    if not has_our_pids(mount):
        raise OSError(errno.EOPNOTSUPP, ELSEWHERE, os.fspath(path))
    slice_ = Slice("/" + "/".join(unescape(part) for part in parts[1:]))
    found = []
    for pid in numbers(mount):
        with contextlib.suppress(OSError):  # gone since
            if (mount / str(pid) / gpu).is_dir() and slice_.contains(cgroup_of(pid)):
                found.append(pid)
    return found
