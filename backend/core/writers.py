"""Writers of controls: what they ask for is in the books, and holds, or everything is as it was before.

Mostly it holds at once. Such a write costs no deadline, no turn and nothing else of trio's, which would take ten times
as long as the rest of it.
"""

from __future__ import annotations

import contextlib
import errno
import math
from collections.abc import AsyncIterator, Iterable, Mapping

import attrs
import trio

from backend.common.errors import fail
from backend.core.deadlines import Deadlines
from backend.core.follower import Follower
from backend.core.population import Population
from backend.core.protocols import Ledger
from backend.core.records import Books
from backend.process.identity import Group, SliceOn
from backend.scheduler.schedulers import Schedulers

Changes = Mapping[str, int | bool]
"""What is asked for, by the names of :class:`Books`."""


@attrs.define(eq=False)
class Asked:
    """A write that is under way."""

    scope: trio.CancelScope
    """What has its deadline."""
    turn: trio.Lock
    """The turn of the writer."""
    before: dict[str, int | bool]
    """What the books said under the names that are taken back if it fails."""
    has_turn: bool = True
    """Whether the writer has its turn still."""

    def leave(self) -> None:
        """Have others go on that write the same group, under other names: what this one waits for may take long."""
        if self.has_turn:
            self.has_turn = False
            self.turn.release()


class Writers:
    """See the module. Those of one group take turns, so that what is taken back is never another's."""

    def __init__(
        self,
        ledger: Ledger,
        population: Population,
        follower: Follower,
        schedulers: Schedulers,
        deadlines: Deadlines,
    ) -> None:
        self._ledger = ledger
        self._population = population
        self._follower = follower
        self._schedulers = schedulers
        self._deadlines = deadlines
        self._open: dict[Group, list[Asked]] = {}  # writes that are under way

    async def note(self, group: Group, books: Books, changes: Changes) -> None:
        """Writes what is asked into the books, which say `books`; that is all of it."""
        if self.ask(group, books, changes) is not None:
            self.holds(group, changes)
            return
        async with self.asked(group, changes):
            pass

    async def pull(self, group: Group, books: Books, changes: Changes) -> None:
        """Writes what is asked into the books, which say `books`, and returns once the levers have followed."""
        before = self.ask(group, books, changes)
        if before is not None and self._follower.follows(group):
            self._follower.show(group)
            self.holds(group, changes)
            return
        async with self.asked(group, changes, before):
            await self._follower.apply(group)

    def ask(self, group: Group, books: Books, changes: Changes, patient: bool = False) -> Books | None:
        """Writes what is asked into the books and returns `books`, which they said before; None, and nothing is
        written, where another write is under way, or where one that is `patient` would wait for another that is. A
        caller goes on, without a wait, to :meth:`holds` or :meth:`asked`."""
        record = self._population.record(group)
        if record.is_written() or (patient and record.is_decided_on()):
            return None
        try:
            self._ledger.configure(group, **changes)
        except Exception as error:
            raise self._reason(group, error) from None
        return books

    def holds(self, group: Group, changes: Iterable[str]) -> None:
        """What was written under these names holds."""
        if isinstance(group, SliceOn) and self._population.holds(group):
            self._population.keep(group.slice)
        self._schedulers.configured(group.gpu, changes)

    @contextlib.asynccontextmanager
    async def asked(
        self, group: Group, changes: Changes, before: Books | None = None, patient: bool = False
    ) -> AsyncIterator[Asked]:
        """Writes what is asked into the books and lets the body make it hold; if it cannot, takes it back. What was
        asked for with :meth:`ask`, which returned `before`, is in the books already.

        Then the hardware follows the books back, in the background: whatever failed may fail again, and the writer
        has its answer. ETIMEDOUT after the deadline, ENODEV for a process that died meanwhile. One that is `patient`
        has all of it from when its turn comes, and waits for others that are. The body is given the write: it may put
        the deadline off, and let others have their turn.
        """
        with self._deadlines.deadline(group) as scope:
            async with contextlib.AsyncExitStack() as stack:
                if patient:
                    scope.deadline = math.inf
                    await stack.enter_async_context(_held(self._population.record(group).deciding()))
                asked = await stack.enter_async_context(self._turn(group, scope))
                if patient:
                    scope.deadline = trio.current_time() + self._deadlines.seconds
                try:
                    books = before if before is not None else self._ledger.books(group)
                    if before is None:
                        self._ledger.configure(group, **changes)
                    asked.before = {name: getattr(books, name) for name in changes}
                    try:
                        yield asked
                    except BaseException:
                        self._take_back(group, asked.before)
                        raise
                    if isinstance(group, SliceOn) and self._population.holds(group):
                        self._population.keep(group.slice)
                finally:
                    self._schedulers.configured(group.gpu, changes)

    def overrule(self, group: Group, changes: Changes) -> None:
        """Writes what is asked into the books while another write is under way, which does not take that back."""
        self._ledger.configure(group, **changes)
        self.stand(group, changes)
        self.holds(group, changes)

    def stand(self, group: Group, changes: Iterable[str]) -> None:
        """What the books say under these names is not taken back by a write that is under way."""
        for asked in self._open.get(group, ()):
            for name in changes:
                asked.before.pop(name, None)

    @contextlib.asynccontextmanager
    async def turn_of(self, group: Group) -> AsyncIterator[None]:
        """A writer's turn. ENODEV, whatever went wrong, where the group is gone by then."""
        with trio.CancelScope() as scope:
            async with self._turn(group, scope):
                yield

    @contextlib.asynccontextmanager
    async def _turn(self, group: Group, scope: trio.CancelScope) -> AsyncIterator[Asked]:
        """The same, as a write under no name yet, whose deadline `scope` has."""
        lock = self._population.record(group).writing()
        await _acquire(lock)
        asked = Asked(scope, lock, {})
        self._open.setdefault(group, []).append(asked)
        try:
            yield asked
        except Exception as error:
            reason = self._reason(group, error)
            if reason is error:
                raise
            raise reason from None
        finally:
            self._open[group].remove(asked)
            if not self._open[group]:
                del self._open[group]
            asked.leave()

    def _reason(self, group: Group, error: Exception) -> Exception:
        """What a writer is told of an error: ENODEV, whatever went wrong, where the group is gone by then."""
        if isinstance(error, ProcessLookupError) or not self._population.holds(group):
            return fail(errno.ENODEV)
        return error

    def _take_back(self, group: Group, before: Changes) -> None:
        """A write failed: the books say again what they said, and the hardware is to follow."""
        if self._population.holds(group):
            if before:
                self._ledger.configure(group, **before)
            self._follower.background.later(group)


async def _acquire(lock: trio.Lock) -> None:
    """As :meth:`trio.Lock.acquire`, without a checkpoint where it is free."""
    try:
        lock.acquire_nowait()
    except trio.WouldBlock:
        await lock.acquire()


@contextlib.asynccontextmanager
async def _held(lock: trio.Lock) -> AsyncIterator[None]:
    await _acquire(lock)
    try:
        yield
    finally:
        lock.release()
