"""Writers of controls: a write holds when it returns, or everything is as it was before.

Mostly it holds at once. Then it takes no deadline, no turn and nothing else of trio's, which would take ten times as
long as the rest of the write.
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
"""New values, by the field names of :class:`Books`."""


@attrs.define(eq=False)
class Asked:
    """A write in progress."""

    scope: trio.CancelScope
    """The scope that has its deadline."""
    turn: trio.Lock
    """The lock that is the writer's turn."""
    before: dict[str, int | bool]
    """The values, by field, that a failed write takes the books back to."""
    has_turn: bool = True
    """Whether the writer still has its turn."""

    def leave(self) -> None:
        """Let other writers of the same group go on, with other fields: this one may wait for long."""
        if self.has_turn:
            self.has_turn = False
            self.turn.release()


class Writers:
    """See the module. The writers of a group take turns, so that what is taken back is never another's."""

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
        self._open: dict[Group, list[Asked]] = {}  # writes in progress

    async def note(self, group: Group, books: Books, changes: Changes) -> None:
        """Write changes into the books of a group, which are `books` now. No lever has to follow."""
        if self.ask(group, books, changes) is not None:
            self.holds(group, changes)
            return
        async with self.asked(group, changes):
            pass

    async def pull(self, group: Group, books: Books, changes: Changes) -> None:
        """Write changes into the books of a group, which are `books` now, and return once the levers have followed."""
        before = self.ask(group, books, changes)
        if before is not None and self._follower.follows(group):
            self._follower.show(group)
            self.holds(group, changes)
            return
        async with self.asked(group, changes, before):
            await self._follower.apply(group, changes)

    def ask(self, group: Group, books: Books, changes: Changes, patient: bool = False) -> Books | None:
        """Write changes into the books without waiting, and return `books`, as they were before. Return None, with
        nothing written, where another write is in progress, or where this one is `patient` and another patient one is.
        The caller goes on, without a wait in between, to :meth:`holds` or :meth:`asked`."""
        record = self._population.record(group)
        if record.is_written() or (patient and record.is_decided_on()):
            return None
        try:
            self._ledger.configure(group, **changes)
        except Exception as error:
            raise self._reason(group, error) from None
        return books

    def holds(self, group: Group, changes: Iterable[str]) -> None:
        """Note that the changes of these fields hold."""
        if isinstance(group, SliceOn) and self._population.holds(group):
            self._population.keep(group.slice)
        self._schedulers.configured(group.gpu, changes)

    @contextlib.asynccontextmanager
    async def asked(
        self, group: Group, changes: Changes, before: Books | None = None, patient: bool = False
    ) -> AsyncIterator[Asked]:
        """Write changes into the books and let the body make them hold; take them back if it fails. Changes that
        :meth:`ask` wrote are in the books already, and `before` is what it returned.

        After a failure the hardware follows the books back in the background: that may fail again, and the writer has
        its answer already. ETIMEDOUT after the deadline, ENODEV for a process that died meanwhile. A `patient` write
        has the whole deadline from when its turn comes, and waits for other patient ones. The body is given the write:
        it may extend the deadline, and let further writers have their turn.
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
        """Write changes into the books during another write, which does not take them back."""
        self._ledger.configure(group, **changes)
        self.stand(group, changes)
        self.holds(group, changes)

    def stand(self, group: Group, changes: Iterable[str]) -> None:
        """Have writes in progress not take back the current values of these fields."""
        for asked in self._open.get(group, ()):
            for name in changes:
                asked.before.pop(name, None)

    @contextlib.asynccontextmanager
    async def turn_of(self, group: Group) -> AsyncIterator[None]:
        """Hold a writer's turn. ENODEV, whatever went wrong, where the group is gone at the end."""
        with trio.CancelScope() as scope:
            async with self._turn(group, scope):
                yield

    @contextlib.asynccontextmanager
    async def _turn(self, group: Group, scope: trio.CancelScope) -> AsyncIterator[Asked]:
        """Hold a writer's turn, as a write of no field yet, with the deadline of `scope`."""
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
        """Return the error that a writer is told: ENODEV, whatever went wrong, where the group is gone."""
        if isinstance(error, ProcessLookupError) or not self._population.holds(group):
            return fail(errno.ENODEV)
        return error

    def _take_back(self, group: Group, before: Changes) -> None:
        """Take a failed write back in the books; the hardware follows in the background."""
        if self._population.holds(group):
            if before:
                self._ledger.configure(group, **before)
            self._follower.background.later(group)


async def _acquire(lock: trio.Lock) -> None:
    """Do as :meth:`trio.Lock.acquire`, without a checkpoint where the lock is free."""
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
