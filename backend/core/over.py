"""Levels that reclaim left over a limit: shown while they are, logged once each, with what stands in the way.

A level that is over its gmem.limit.max for NOTICE_S is handed to the killer (:mod:`backend.core.oom`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import attrs
import trio

from backend.core.oom import NOTICE_S, OomKiller
from backend.core.population import Population
from backend.core.protocols import Ledger
from backend.core.records import Channel
from backend.process.identity import Group

log = logging.getLogger(__name__)

LOOK_S = 0.1
"""Seconds between two looks whether a level is still over its limit."""

PASSING_S = 30.0
"""Seconds that a level may be over its limit before that is logged, where all of its members can be moved in principle:
one that waits for its turn, is stopped or is slow to answer gives later."""


@attrs.define(eq=False)
class Mark:
    """A level that reclaim left over a limit."""

    since: float = attrs.field(factory=trio.current_time)
    """Time since which it is over, by trio's clock."""
    beyond_since: float | None = None
    """Time since which it is over its gmem.limit.max, by trio's clock; None where it is not."""
    shown: bool = False
    """Whether gmem.events was notified."""
    told: bool = False
    """Whether that is logged."""
    killing: bool = False
    """Whether the killer is at work on it."""
    vain: bool = False
    """Whether it is logged that no process is killed, as that would not be enough."""
    settled: trio.Event = attrs.field(factory=trio.Event)
    """Set once the level is under its limits, or killing will not bring it there."""


class Overs:
    """See the module."""

    def __init__(
        self,
        ledger: Ledger,
        population: Population,
        killer: OomKiller,
        tell: Callable[[Group, Channel], None],
    ) -> None:
        self._ledger = ledger
        self._population = population
        self._killer = killer
        self._tell = tell
        self._marks: dict[Group, Mark] = {}
        self._some = trio.Event()

    def is_over(self, level: Group) -> bool:
        """Return whether a level is over a limit that reclaim could not bring it under."""
        return level in self._marks and self._is_over(level)

    def mark(self, level: Group) -> None:
        """Note that reclaim is done with a level, in case that it is still over a limit."""
        if not self._is_over(level):
            return
        mark = self._marks.setdefault(level, Mark())
        if mark.settled.is_set():
            mark.settled = trio.Event()
        self._some.set()

    async def settled(self, level: Group) -> None:
        """Return once a level is under its limits, or killing will not bring it there."""
        if (mark := self._marks.get(level)) is not None:
            await mark.settled.wait()

    def eased(self, level: Group) -> None:
        """Note that a limit of a level was raised, or is met: a notice ends at once, and the next starts its time
        anew."""
        mark = self._marks.get(level)
        if mark is not None and not self._killer.beyond(level):
            mark.beyond_since = None
            mark.settled.set()

    async def run(self) -> None:
        """Look at the marked levels, until cancelled."""
        self._killer.begin()
        async with trio.open_nursery() as nursery:
            while True:
                while not self._marks:
                    self._some = trio.Event()
                    await self._some.wait()
                await trio.sleep(LOOK_S)
                for level, mark in list(self._marks.items()):
                    try:
                        self._look(level, mark, nursery)
                    except OSError as error:  # gone from the kernel's books, not yet from the daemon's
                        log.debug("GPU %d: %s: %s", level.gpu, level.node, error)

    def _is_over(self, level: Group) -> bool:
        if not self._population.holds(level):
            return False
        try:
            return self._ledger.excess(level) > 0
        except OSError:  # gone from the kernel's books, not yet from the daemon's
            return False

    def _look(self, level: Group, mark: Mark, nursery: trio.Nursery) -> None:
        if not self._is_over(level):
            del self._marks[level]
            mark.settled.set()
            if self._population.holds(level):
                self._tell(level, Channel.GMEM)
            return
        now = trio.current_time()
        if not mark.shown:
            mark.shown = True
            self._tell(level, Channel.GMEM)
        # While a write is not decided, what it lowers is no limit yet.
        is_long = now - mark.since >= PASSING_S or self._is_to_stay(level)
        if not mark.told and is_long and not self._killer.is_held(level):
            mark.told = True
            self._complain(level)
        if not self._killer.beyond(level):
            mark.beyond_since = None
            mark.settled.set()
            return
        if self._killer.is_held(level):
            mark.beyond_since = None
            return
        if mark.beyond_since is None:
            mark.beyond_since = now
        if now - mark.beyond_since >= NOTICE_S and not mark.killing and not self._killer.is_early():
            mark.killing = True
            nursery.start_soon(self._relieve, level, mark, mark.beyond_since)

    def _is_to_stay(self, level: Group) -> bool:
        """Return whether immovable memory keeps a level over its limit, rather than memory that is still to be
        moved."""
        books = self._ledger.books(level)
        fixed = sum(one.nbytes for one in self._killer.fixed(level))
        return fixed > min(books.high, books.limit_max) or bool(self._killer.lasting(level))

    async def _relieve(self, level: Group, mark: Mark, since: float) -> None:
        """Have members killed for the notice that began at `since`, for as long as no later one replaced it."""
        try:
            vain = await self._killer.relieve(level, lambda: mark.beyond_since == since)
            if vain and not mark.vain:
                mark.vain = True
                log.warning(
                    "GPU %d: %s: no process is killed for its gmem.limit.max, which it exceeds by %d: all that may be"
                    " killed hold %d (raise the limit, or end one that is spared)",
                    *(level.gpu, level.node, self._killer.beyond(level), vain),
                )
        except OSError as error:  # the level is gone
            log.debug("GPU %d: %s: %s", level.gpu, level.node, error)
        except Exception:  # a bug here must end no other level's care
            log.exception("GPU %d: no process is killed for %s", level.gpu, level.node)
        finally:
            mark.killing = False
            if mark.beyond_since == since:
                mark.beyond_since = None
                if not self._killer.is_held(level):  # else what is to hold is undecided
                    mark.settled.set()

    def _complain(self, level: Group) -> None:
        """Log once what keeps a level over its limit, and what would help."""
        books = self._ledger.books(level)
        which = "gmem.limit.max" if books.current > books.limit_max else "gmem.limit.high"
        obstacles, fixed = self._killer.lasting(level), self._killer.fixed(level)
        if obstacles:
            first = obstacles[0]
            why = f"process {first.member.process.pid} holds {first.nbytes} that cannot be moved, as " + (
                "it is past the library in it (in PyTorch, expandable segments are not: PYTORCH_CUDA_ALLOC_CONF)"
                if first.past
                else "the library is not in it, or does not speak (start it by `ggroupfs run`, or its service with a"
                " memory key)"
            )
        elif fixed:
            first = fixed[0]
            why = (
                f"process {first.member.process.pid} holds {first.nbytes} that its library cannot move: arrays, or"
                " memory that it has exported or that a peer has mapped (raise the limit, or have it share less)"
            )
        else:
            why = (
                "its members hold what cannot be moved now: gmem.swap.max is met, or memory is shared with a peer or"
                " was not placed by the library (in PyTorch, expandable segments are: PYTORCH_CUDA_ALLOC_CONF)"
            )
        log.warning("GPU %d: %s holds %d, over its %s: %s", level.gpu, level.node, books.current, which, why)
