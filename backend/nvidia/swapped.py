"""Swap frozen programs without the library into the host: as a whole, since cuCheckpoint knows no parts.

A running program cannot be swapped that way: it would stand still until it was brought back, and nothing tells when
it has work again. A frozen program stands still anyway, and the thaw brings it back.
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
"""Seconds within which a program has to come to rest: a kernel that runs is waited for."""

SILENT_S = 10.0
"""Seconds until a program is asked about its library again, once that was found silent. A library connects again
once a second, and from then on says itself how much it can give.
"""


class SwappedPrograms:
    """The swapped programs of one GPU."""

    def __init__(
        self,
        info: GpuInfo,
        freeze: Callable[[Process, bool], Awaitable[None]],
        anew: Callable[[Process], None],
        room: Callable[[Process], int] = checkpoint.host_room,
    ) -> None:
        """`freeze` pulls the lever of a process. `anew` is called when a process has come back: everything that
        the driver had for it is new. `room` returns the bytes that a process may have in the host in addition
        to what it has.
        """
        self.bookkeeper: Bookkeeping | None = None
        """The books, once the GPU runs."""
        self.ends = False
        """Whether the daemon ends: a process that is frozen from now on would not be thawed any more."""
        self._info = info
        self._freeze = freeze
        self._anew = anew
        self._room = room
        self._away: dict[Process, int] = {}  # bytes in the host
        self._leaving: dict[Process, int] = {}  # bytes of a process that is on its way out
        self._turns: dict[Process, trio.Lock] = {}  # held while a process goes or comes
        self._moved: dict[Process, float] = {}  # when a process last went or came, by trio's clock
        self._returned: set[Process] = set()  # of those that an earlier daemon had in the host
        self._silent: dict[Process, float] = {}  # until when a library counts as silent, by trio's clock

    def __contains__(self, process: Process) -> bool:
        return process in self._away

    def has(self, process: Process) -> bool:
        """Return whether a process is in the host, or on the way there or back: then this object alone
        pulls its levers.
        """
        return process in self._away or self._is_moving(process)

    def nbytes(self, process: Process) -> int:
        """Return the bytes of a process that is in the host, or on the way there or back; 0 for any other."""
        return self._away.get(process, 0) or self._leaving.get(process, 0)

    def can(self, process: Process, held: int) -> bool:
        """Return whether a frozen program that holds `held` bytes could go into the host now."""
        if process in self._away or self.is_silent(process):
            return False
        return held > 0 and self._room(process) >= held

    def is_silent(self, process: Process) -> bool:
        """Return whether the library was found in a program without speaking. Its memory in the host would not be
        restored, so nothing of the program is moved.
        """
        return trio.current_time() < self._silent.get(process, -math.inf)

    def was_silent(self, process: Process) -> bool:
        """Return whether that was so when the program was last looked at, however long ago."""
        return process in self._silent

    def moved_since(self, process: Process, when: float) -> bool:
        """Return whether a process goes or comes, or has since `when`: then the books must not follow the driver's
        figure, which is too early or too late.
        """
        return self._is_moving(process) or self._moved.get(process, -math.inf) >= when

    async def out(self, process: Process, held: Callable[[], Awaitable[int]]) -> int:
        """Swap a frozen program into the host; return the bytes that it held.

        `held` returns the bytes that it holds, 0 where it may not go any more. It is called when the program's turn
        comes, and once more before the program runs, since its pending calls that allocate do return. The program
        stays, and 0 is returned, if it :meth:`is_silent`, which is recorded. Raises OSError as
        :func:`backend.nvidia.checkpoint.suspend`, and EAGAIN where the program has allocated meanwhile, since no room
        was kept for that. Then it is on the GPU as before.
        """

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
            # The program has to come to rest by itself, which it cannot while it is off the runlist. So it runs
            # between the agent's question and the lock, for as long as its submitted work takes.

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
        """Bring a process back onto the GPU from the host, or from the way there. Raises ENOSPC where a limit, or
        the GPU, has no room for it: then it stays in the host.
        """

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
                # The room was given away meanwhile. The process is there all the same: the books follow the driver.
                bookkeeper.uncharge(process, self._info.index, nbytes, swapped=True)
            return nbytes

        if self.has(process):
            await self._finish(process, come)

    def returned(self, process: Process, uuid: str) -> None:
        """Note that a process runs again which an earlier daemon had in the host, on the GPU with that UUID."""
        if uuid == self._info.uuid:
            self._returned.add(process)

    def seen(self, process: Process) -> None:
        """Correct the books when the driver shows a returned process on the GPU: what they have in the host
        for it, from the time of the earlier daemon, is on the GPU by then. Without the library it has
        nothing else in the host.
        """
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
        """Forget a process that is gone."""
        for known in (self._away, self._turns, self._moved, self._silent):
            known.pop(process, None)
        self._returned.discard(process)

    def _is_moving(self, process: Process) -> bool:
        return process in self._turns and self._turns[process].locked()

    async def _finish(self, process: Process, work: Callable[[], Awaitable[int]]) -> int:
        """Run `work` when the turn of the process comes, and to its end, even if the caller is gone by then: the
        agent goes on as well, and its result has to be known here. Return the result of `work`.
        """
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
