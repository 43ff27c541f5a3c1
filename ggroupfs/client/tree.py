"""A mounted tree for programs that stay: the files, with trio.

Each access is in a thread: a read takes some 20 microseconds, but a write returns once it holds, which may take
seconds. Errors are those of the files (OSError): ENOENT for who is not there, ENODEV for who has gone since.
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
"""Accesses at a time. Of its own: whoever waits for writes does not keep others of trio's threads from working."""
WAITING = trio.CapacityLimiter(math.inf)
"""Threads in poll(2), one for each file that is watched, or in a move: both may be left behind."""

LOOK_S = 0.05
"""Between two looks for a directory that is to come: inotify tells of nothing that a FUSE server makes by itself."""


async def _in_thread(work: Callable[[], T]) -> T:
    # Never abandoned: a write that nobody waits for any more could come after the one that takes it back.
    return await trio.to_thread.run_sync(work, limiter=THREADS)


@attrs.frozen
class Tree:
    """A mounted tree."""

    mount: Path
    """The mountpoint."""

    def process(self, pid: int, gpu: int = 0) -> Group:
        """A process on one GPU; it need not be there yet."""
        return self._at(str(pid), str(gpu))

    def slice(self, path: str, gpu: int = 0) -> Group:
        """A cgroup on one GPU, by its path such as ``/batch.slice``; it need not be there yet."""
        return self._at(slice_directory(path), str(gpu))

    async def present(self, group: Group) -> None:
        """Waits until there is such a group: it comes when a process of it first uses the GPU."""
        while not await _in_thread(group.path.is_dir):  # noqa: ASYNC110 - nothing tells of it
            await trio.sleep(LOOK_S)

    async def capacity(self, gpu: int = 0) -> int:
        """Bytes of memory that a GPU has. FileNotFoundError where there is no such GPU."""
        return int(await self._at("gpus", str(gpu)).read("gmem.capacity"))

    async def capabilities(self) -> dict[str, str]:
        """What each control does on this machine, by its name: a word of ``ggroup.capabilities``."""
        return dict(line.split() for line in (await self._at().read("ggroup.capabilities")).splitlines())

    async def ready(self) -> None:
        """Says that the policy is at work: to systemd, where it started us, and as ``{"event": "ready"}``."""
        await _in_thread(partial(notify, "READY=1"))
        emit("ready")

    def _at(self, *parts: str) -> Group:
        """The files of a directory: all that is read and written goes through such a Group."""
        return Group(self.mount.joinpath(*parts))


@attrs.frozen
class Group:
    """A process or slice on one GPU: a directory of control files."""

    path: Path
    """The directory."""

    async def read(self, name: str) -> str:
        """The content of a control file, without the newline at its end."""
        return await _in_thread(partial(content, self.path / name))

    async def number(self, name: str) -> int | None:
        """The number in a control file; None for ``max``."""
        text = await self.read(name)
        return None if text == "max" else int(text)

    async def flat(self, name: str) -> dict[str, int]:
        """The numbers of a flat keyed file."""
        return flat(await self.read(name))

    async def write(self, name: str, value: object) -> None:
        """``echo VALUE > NAME``: returns once it holds."""
        await _in_thread(partial((self.path / name).write_text, f"{value}\n"))

    async def migrate(self, gpu: int, seconds: float) -> None:
        """``echo GPU > compute.migrate``: returns once it runs there. OSError ETIMEDOUT after `seconds`: it may be
        moved yet. Whoever is cancelled meanwhile waits for it all the same: a move cannot be taken back."""
        await trio.lowlevel.checkpoint_if_cancelled()
        with trio.CancelScope(deadline=trio.current_time() + seconds, shield=True):
            write = partial((self.path / "compute.migrate").write_text, f"{gpu}\n")
            await trio.to_thread.run_sync(write, abandon_on_cancel=True, limiter=WAITING)
            return
        raise fail(errno.ETIMEDOUT)

    async def changed(self, name: str) -> None:
        """Waits for the next event of ``gmem.events`` or ``compute.events``. What came before the call is none."""
        async with self.watch(name) as watch:
            await watch.changed()

    @contextlib.asynccontextmanager
    async def watch(self, name: str) -> AsyncIterator[Watch]:
        """Keeps an events file open, so that nothing is missed between two waits."""
        file = await _in_thread(partial(os.open, self.path / name, os.O_RDONLY | os.O_CLOEXEC))
        watch = Watch(file)
        try:
            await watch.read()
            yield watch
        finally:
            os.close(file)

    async def pids(self) -> list[int]:
        """The processes of a slice that are on this GPU, those of the slices in it too; a process is itself. OSError
        EOPNOTSUPP in another pid namespace than the daemon's."""
        return await _in_thread(partial(_pids, self.path))


@attrs.frozen
class Watch:
    """An events file that is open."""

    file: int
    """Its descriptor."""

    async def read(self) -> dict[str, int]:
        """The numbers in it. Events up to now are seen."""
        return await _in_thread(lambda: flat(os.pread(self.file, CONTENT_MOST, 0).decode()))

    async def changed(self) -> dict[str, int]:
        """Waits until there is an event that was not seen; the numbers since. OSError ENODEV once the group is gone."""
        # The thread has descriptors of its own, which it closes when it ends, be that long after we have been
        # cancelled: a number that is closed meanwhile may be another file's by then.
        file, stop = os.dup(self.file), os.eventfd(0, os.EFD_CLOEXEC)
        wake = os.dup(stop)
        try:
            await trio.to_thread.run_sync(partial(_poll, file, stop), abandon_on_cancel=True, limiter=WAITING)
        finally:
            os.eventfd_write(wake, 1)
            os.close(wake)
        return await self.read()


def _poll(file: int, stop: int) -> None:
    """Waits for an event in `file`, or for `stop`, and closes both."""
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
