"""Frozen programs without the library whose memory is in the host: whole, as cuCheckpoint knows no parts.

A program that runs cannot be moved so: it would stand still until it was brought back, and nothing tells when it wants
to go on. One that is frozen stands still anyway, and the thaw brings it back.
"""

from __future__ import annotations

import errno
import logging
import math
import time
from collections.abc import Awaitable, Callable

import outcome
import trio

from backend.core.protocols import Bookkeeping
from backend.core.records import GpuInfo
from backend.nvidia import checkpoint
from backend.process.identity import Process
from backend.process.inside import has_library

log = logging.getLogger(__name__)

LOCK_S = 2.0
"""Seconds in which a program has to come to a rest: a kernel that runs is waited for."""

SILENT_S = 10.0
"""Seconds in which a program whose library did not speak is not looked at for it again: the library connects again once
a second, and from then on says itself what it can give."""


class SwappedPrograms:
    """Those of one GPU."""

    def __init__(
        self,
        info: GpuInfo,
        freeze: Callable[[Process, bool], Awaitable[None]],
        anew: Callable[[Process], None],
        room: Callable[[Process], int] = checkpoint.host_room,
    ) -> None:
        """`freeze` is the lever. `anew` is told that a process has come back: nothing that the driver had for it is as
        before. `room` is how many bytes a process may have in the host besides what it has."""
        self.bookkeeper: Bookkeeping | None = None
        """The books, once the GPU runs."""
        self.ends = False
        """Whether the daemon ends: what is frozen from now on would not be thawed any more."""
        self._info = info
        self._freeze = freeze
        self._anew = anew
        self._room = room
        self._away: dict[Process, int] = {}  # bytes
        self._leaving: dict[Process, int] = {}  # bytes of one that is on its way out
        self._turns: dict[Process, trio.Lock] = {}  # held while one goes or comes
        self._moved: dict[Process, float] = {}  # when it last did, by trio's clock
        self._returned: set[Process] = set()  # of those that a daemon before us had in the host
        self._silent: dict[Process, float] = {}  # until when one is, by trio's clock

    def __contains__(self, process: Process) -> bool:
        return process in self._away

    def has(self, process: Process) -> bool:
        """Whether it is in the host, or on the way there or back: no lever is pulled then but by us."""
        return process in self._away or self._is_moving(process)

    def nbytes(self, process: Process) -> int:
        """Of one that is in the host, or on the way there or back; 0 for another."""
        return self._away.get(process, 0) or self._leaving.get(process, 0)

    def can(self, process: Process, held: int) -> bool:
        """Whether a frozen program, which holds so many bytes, could go into the host now."""
        if process in self._away or self.is_silent(process):
            return False
        return held > 0 and self._room(process) >= held

    def is_silent(self, process: Process) -> bool:
        """Whether the library was found in a program without speaking: what that has in the host would not be restored,
        so the program gives nothing."""
        return trio.current_time() < self._silent.get(process, -math.inf)

    def was_silent(self, process: Process) -> bool:
        """Whether that was so when it was looked at last, however long ago."""
        return process in self._silent

    def moved_since(self, process: Process, when: float) -> bool:
        """Whether one goes or comes, or has since some time: what the driver says that it holds is not yet, or no more,
        what the books are to say."""
        return self._is_moving(process) or self._moved.get(process, -math.inf) >= when

    async def out(self, process: Process, held: Callable[[], Awaitable[int]]) -> int:
        """Have a frozen program go into the host; return the bytes that it held. `held` says so when it is its turn,
        and once more before it runs (its calls that allocate do return): 0 where it may not go any more. It stays, too,
        where it :meth:`is_silent`, which is known from then on. OSError as for
        :func:`backend.nvidia.checkpoint.suspend`, and EAGAIN where it has allocated meanwhile: what is not known of has
        no room kept for it. Then it is on the GPU as before."""

        async def go() -> int:
            bookkeeper, nbytes = self.bookkeeper, await held()
            if bookkeeper is None or not nbytes:
                return 0
            if await has_library(process.pid):
                self._silent[process] = trio.current_time() + SILENT_S
                return 0
            self._silent.pop(process, None)
            bookkeeper.observe(process, self._info.index, nbytes)
            began = time.monotonic()
            # It has to come to a rest by itself, which it does not while it is off the runlist. So it runs between the
            # agent's question and the lock: for as long as what it had submitted takes.

            async def thaw() -> None:
                if await held() > nbytes:
                    raise OSError(errno.EAGAIN, "it has allocated meanwhile")
                await self._freeze(process, False)

            self._leaving[process] = nbytes
            try:
                await checkpoint.suspend(process, self._info.uuid, nbytes, LOCK_S, thaw)
            except BaseException as error:
                if isinstance(error, checkpoint.CheckpointError) and error.was_away:
                    self._anew(process)
                await self._freeze(process, True)
                raise
            finally:
                del self._leaving[process]
            self._away[process] = nbytes
            bookkeeper.moved_out(process, self._info.index, nbytes, _usec(began), already=True)
            return nbytes

        return await self._finish(process, go)

    async def back(self, process: Process) -> None:
        """Have one that is in the host, or on the way there, be on the GPU again. ENOSPC where some limit, or the GPU,
        has no room for it: it stays in the host."""

        async def come() -> int:
            bookkeeper = self.bookkeeper
            if bookkeeper is None or process not in self._away:
                return 0
            nbytes = self._away[process]
            if any(books.current + nbytes > books.limit for books in bookkeeper.levels(process, self._info.index)):
                raise OSError(errno.ENOSPC, f"there is no room for the {nbytes} bytes that are in the host")
            began = time.monotonic()
            await checkpoint.resume(process, self._info.uuid, nbytes)
            self._anew(process)
            self._away.pop(process, None)  # it may have ended right then
            if not bookkeeper.move_in(process, self._info.index, nbytes, _usec(began)):
                # That room was given away meanwhile: it is there all the same, and the books follow the driver.
                bookkeeper.uncharge(process, self._info.index, nbytes, swapped=True)
            return nbytes

        if self.has(process):
            await self._finish(process, come)

    def returned(self, process: Process, uuid: str) -> None:
        """A daemon before us had it in the host, on the GPU of that UUID, and it runs again."""
        if uuid == self._info.uuid:
            self._returned.add(process)

    def seen(self, process: Process) -> None:
        """The driver has it on the GPU: so has it, by then, what the books say that is in the host, as they said to the
        daemon before us. Without the library it has nothing else there."""
        if (
            self.bookkeeper is None
            or process not in self._returned
            or not self.bookkeeper.knows(process, self._info.index)
        ):
            return
        self._returned.discard(process)
        swapped = self.bookkeeper.levels(process, self._info.index)[0].swap
        if swapped and not self.has(process):
            self.bookkeeper.uncharge(process, self._info.index, swapped, swapped=True)

    def forget(self, process: Process) -> None:
        """The process is gone."""
        for known in (self._away, self._turns, self._moved, self._silent):
            known.pop(process, None)
        self._returned.discard(process)

    def _is_moving(self, process: Process) -> bool:
        return process in self._turns and self._turns[process].locked()

    async def _finish(self, process: Process, work: Callable[[], Awaitable[int]]) -> int:
        """Do something when its turn comes, and to the end, even where the caller is gone by then: an agent goes on as
        well, and what it does is to be known here."""
        done = trio.Event()
        results: list[outcome.Outcome[int]] = []

        async def freeze_again() -> int:
            if not self.ends and process not in self._away:
                await self._freeze(process, True)
            return 0

        async def run() -> None:
            async with self._turns.setdefault(process, trio.Lock()):
                results.append(await outcome.acapture(work))
                if process in self._turns:
                    self._moved[process] = trio.current_time()
                if not waits:  # the caller was told that it is frozen, and would have thawed it
                    results.append(await outcome.acapture(freeze_again))
            done.set()
            for result in () if waits else results:
                if isinstance(result, outcome.Error):
                    log.warning("pid %d on GPU %d: %s", process.pid, self._info.index, result.error)

        waits = True
        trio.lowlevel.spawn_system_task(run)
        try:
            await done.wait()
        finally:
            waits = done.is_set()
        return results[0].unwrap()


def _usec(began: float) -> int:
    return int((time.monotonic() - began) * 1e6)
