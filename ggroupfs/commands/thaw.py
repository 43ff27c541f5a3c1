"""``ggroupfs doctor --thaw-all``: thaws what a daemon that is gone has left frozen, without starting another daemon.

For every program on every NVIDIA GPU it does what a daemon does at its end. Settings remain where they are stored, and
the next mount enforces them again. (A software GPU is gone with its daemon, so nothing is frozen there.)
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import trio

from backend.core.reasons import Off
from backend.core.records import GpuInfo
from backend.door.client import facts_of
from backend.ledgers import kernel
from backend.ledgers.journal import state
from backend.ledgers.journal.file import Busy, Journal, clock_time
from backend.ledgers.journal.levers import Timeslices
from backend.ledgers.journal.state import UNTOUCHED
from backend.process.identity import Process
from ggroupfs.commands.finding import Finding
from ggroupfs.daemon.mount import SOCKETS
from ggroupfs.mounts import mount_of, trees
from ggroupfs.serving import is_trusted

if TYPE_CHECKING:
    from backend.nvidia.gpu import NvidiaGpu

ANSWER_S = 2.0
"""Seconds that a tree has to answer whether its daemon lives."""


def thaw_all(journals: Iterable[Path], folder: Path = SOCKETS) -> Sequence[Finding]:
    """Thaw all programs. `journals` are used in addition to those in `folder`.

    RuntimeError if a daemon lives: it would freeze them again, and has to be asked instead.
    """
    if os.geteuid() != 0:
        raise RuntimeError("doctor: only root may: it acts on every process of the machine")
    from backend.nvidia.opening import open_gpus

    return trio.run(
        _thaw_all, [*sorted(folder.glob("*.journal")), *journals], lambda: open_gpus(selftest=False), roots(trees())
    )


def roots(places: Iterable[str]) -> Sequence[str]:
    """Return the places that root mounted. A user's own FUSE mount of that type is not a daemon's tree.

    It could block the whole repair, or name a journal that would then be skipped.
    """
    found = ((place, mount_of(place)) for place in places)
    return [place for place, mount in found if mount is not None and is_trusted(mount[0])]


async def _thaw_all(
    paths: Sequence[Path], open_gpus: Callable[[], Awaitable[Sequence[NvidiaGpu]]], places: Iterable[str]
) -> Sequence[Finding]:
    others = await _served(places)
    with contextlib.ExitStack() as stack:
        findings: list[Finding] = []
        journals = [*_taken((path for path in paths if os.fspath(path) not in others), stack, findings)]
        try:
            gpus = await open_gpus()
        except OSError as error:
            if error.errno != errno.ENODEV:
                raise
            return [*findings, Finding("NVIDIA GPU", "ok", f"none here ({error.strerror}): no program can be frozen")]
        books = {gpu.info.index: stack.enter_context(_kernel_books(gpu.info)) for gpu in gpus}
        findings += [finding async for finding in _recovered()]
        for gpu in gpus:
            gpu.notes = Noted([Timeslices(journal, gpu.info.uuid) for journal in journals])
            try:
                freed = await gpu.free()
            except OSError as error:
                findings.append(Finding(f"GPU {gpu.info.index}", "failed", f"{error.strerror}: nothing was done"))
                continue
            for one in freed:
                for journal in journals:
                    key, known = (gpu.info.uuid, one.process), journal.state
                    if (key in known.levers or key in known.reasons) and not one.failure:
                        journal.commit(state.lever(key, UNTOUCHED), state.reasons(key, Off()))
                subject = f"GPU {gpu.info.index} pid {one.process.pid}"
                if one.failure:
                    findings.append(Finding(subject, "failed", one.failure))
                    continue
                channels = f"{one.channels} channels" if one.asked else "all channels, since none can be asked,"
                done = bool(one.channels or one.timeslices or not one.asked)
                why = f"{channels} put back, {one.timeslices} timeslices given back" if done else "it was free"
                findings.append(Finding(subject, "thawed" if done else "ok", why))
            books[gpu.info.index].released = not any(one.failure for one in freed)
            if not freed:
                findings.append(Finding(f"GPU {gpu.info.index}", "ok", "no program uses it"))
        return findings


@attrs.define
class Books:
    """The kernel module's books of a GPU."""

    released: bool = False
    """Whether the module is told that nothing holds there any more; otherwise the next daemon first makes it hold."""


@contextlib.contextmanager
def _kernel_books(gpu: GpuInfo) -> Iterator[Books]:
    """Hold the books of one GPU, so that no daemon begins meanwhile. Without the module this does nothing."""
    books = Books()
    try:
        kernel.check()
    except OSError:
        yield books
        return
    ledger = kernel.KernelLedger({gpu.index: gpu.uuid}, temporary=[gpu.index])
    try:
        ledger.add_gpu(gpu.index, gpu.capacity, gpu.granule)
        yield books
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        raise RuntimeError(f"doctor: {error.strerror}") from None
    finally:
        ledger.close(released=books.released, handed_over=bool(ledger.inherited()))  # otherwise they are new


class Noted:
    """The notes of several journals together (:class:`backend.nvidia.notes.Notes`)."""

    def __init__(self, each: Sequence[Timeslices]) -> None:
        self._each = each

    def known(self, process: Process) -> Mapping[str, int]:
        return {name: us for one in self._each for name, us in one.known(process).items()}

    def note(self, process: Process, timeslices: Mapping[str, int]) -> None:
        for one in self._each:
            kept = {name: us for name, us in one.known(process).items() if name in timeslices}
            one.note(process, kept)


async def _served(places: Iterable[str]) -> set[str]:
    """Return the journals of daemons for software GPUs, which are not affected.

    RuntimeError for any other live daemon.
    """
    found = set()
    for place in places:
        facts: dict[str, str] = {}

        def look(place: str = place, facts: dict[str, str] = facts) -> None:
            with contextlib.suppress(OSError):  # ENOTCONN: its daemon is dead
                facts.update(facts_of(place))

        with trio.move_on_after(ANSWER_S) as scope:
            await trio.to_thread.run_sync(look, abandon_on_cancel=True)
        if scope.cancelled_caught:
            raise RuntimeError(f"doctor: the daemon of {place} hangs: kill it first")
        if facts.get("gpu") == "soft":
            found.add(facts.get("journal", ""))
        elif facts:
            raise RuntimeError(f"doctor: {place} has a daemon: `ggroupfs umount {place}` thaws what it froze")
    return found


def _taken(paths: Iterable[Path], stack: contextlib.ExitStack, findings: list[Finding]) -> Iterator[Journal]:
    """Open the journals, so that no daemon begins meanwhile."""
    for path in paths:
        try:
            path.stat()  # a missing one must not be created
            journal = Journal(path)
        except Busy as error:
            raise RuntimeError(f"doctor: {error.strerror}") from None
        except OSError as error:
            findings.append(Finding(os.fspath(path), "failed", f"it is not read: {error.strerror}"))
            continue
        if journal.stale_since is not None:
            findings.append(stale(path, journal.stale_since))
        stack.callback(journal.close, ended=False)
        yield journal


def stale(path: Path, since: float) -> Finding:
    """Report a journal that could no longer be written."""
    why = f"it could not be written since {clock_time(since)}: the next mount after a kill forgets what was set then"
    return Finding(os.fspath(path), "advisory", why)


async def _recovered() -> AsyncIterator[Finding]:
    """Resume programs that were being moved, or that wait in the host."""
    from backend.nvidia import checkpoint

    for one in checkpoint.left():
        process = one.request.process
        try:
            await checkpoint.recover(process)
        except checkpoint.CheckpointError as error:
            if error.errno != errno.ESRCH:
                yield Finding(f"pid {process.pid}", "failed", f"it is in the middle of a move: {error.strerror}")
            else:
                checkpoint.removed(process)
        else:
            yield Finding(f"pid {process.pid}", "thawed", "it was in the middle of a move, or in the host")
