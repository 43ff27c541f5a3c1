"""The Migrator: moves running programs to another GPU. The Gpu moves them; books, levers and directory follow.

Room is booked on the target first, so that no other process gets it. Then the program is let run freely, as it has to
come to a rest by itself (a frozen one never would); then it is moved; then its settings are applied on the target. On
any failure it goes on where it was, and the books say so.

The program that moves it may outlive this daemon, and its end is not seen then. So a note is written before the move. A
daemon that finds one asks both GPUs until one of them has the program and nothing moves it any more; the group on the
other GPU is dropped.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping

import trio

from backend.common.errors import fail
from backend.core.entries import Resident
from backend.core.follower import BY_PROGRAMS, Follower
from backend.core.population import Population
from backend.core.protocols import Gpu, Ledger, Moves
from backend.core.records import MAX, Books, Channel, Move
from backend.core.settings import SETTINGS
from backend.core.tally import MIGRATED, Tally
from backend.process.identity import Group, Member, Process, SliceOn

log = logging.getLogger(__name__)

FOLLOWS = tuple(setting.field for setting in SETTINGS if setting.follows_migration)
"""Fields of the settings that go with a process to another GPU."""

AGAIN_S = 1.0
"""Seconds between two looks for a process that is being moved without a waiting caller."""


class Unwritten(dict[Process, Move]):
    """A :class:`backend.core.protocols.Moves` that lasts as long as this daemon."""

    def left(self) -> Mapping[Process, Move]:
        return self

    def begin(self, process: Process, move: Move) -> None:
        self[process] = move

    def end(self, process: Process) -> None:
        self.pop(process, None)


class Migrator:
    """See the module. One move at a time, as moves share the bus and the host's memory."""

    def __init__(
        self,
        ledger: Ledger,
        gpus: Mapping[int, Gpu],
        population: Population,
        follower: Follower,
        admit: Callable[[Process, Iterable[int]], Resident],
        tell: Callable[[Group, Channel], None],
        tally: Tally,
        moves: Moves | None = None,
    ) -> None:
        """`admit` gives a process a directory for some GPUs. `moves` holds the notes of moves, earlier daemons'
        included."""
        self._ledger = ledger
        self._gpus = gpus
        self._population = population
        self._follower = follower
        self._admit = admit
        self._tell = tell
        self._tally = tally
        self._moves = Unwritten() if moves is None else moves
        self._look = trio.Event()
        self._look.set()
        self._turn = trio.Lock()

    def target(self, name: str) -> int:
        """Return the index of a GPU, given its index or UUID as text. ENODEV where there is none."""
        for index, gpu in self._gpus.items():
            if name in (str(index), gpu.info.uuid):
                return index
        raise fail(errno.ENODEV)

    def moved(self, group: Group) -> int:
        """Return how often a process was moved to another GPU; for a slice, how often one came to this GPU by a
        move."""
        if isinstance(group, SliceOn):
            return self._tally.counted(group, MIGRATED)
        resident = self._population.resident(group.process)
        return resident.moves if resident is not None else 0

    def gone(self, process: Process) -> None:
        """Drop the note of a process that left the tree."""
        self._moves.end(process)

    async def run(self) -> None:
        """Settle unfinished moves, until cancelled: write into the books where each process is."""
        while True:
            await self._look.wait()
            self._look = trio.Event()
            for process in list(self._moves.left()):
                async with self._turn:
                    try:
                        await self._conclude(process)
                    except OSError as error:  # of the books: the next look tries again
                        log.warning("where pid %d is after a move is not known: %s", process.pid, error)
                    except Exception:
                        log.exception("where pid %d is after a move is not known", process.pid)
            if self._moves.left():
                await trio.sleep(AGAIN_S)
                self._look.set()

    async def migrate(self, group: Member, target: int) -> None:
        """Return once the process runs on `target`, another GPU. Errors are those of :meth:`Gpu.migrate`; besides,
        EINVAL for a process that is not on its GPU, and ENOSPC where a limit on the target leaves no room for it."""
        process = group.process
        async with self._turn:
            resident = self._population.resident(process)
            if resident is None or not self._population.holds(group):
                raise fail(errno.ENODEV)
            if group.gpu not in resident.contexts:
                raise fail(errno.EINVAL)
            if target in resident.contexts:
                raise fail(errno.EEXIST)
            await self._conclude(process)
            if process in self._moves.left() or not self._population.holds(group):
                raise fail(errno.EBUSY)  # an earlier move is not settled, or was, and the process is elsewhere
            there = Member(process, target)
            with self._booked(group, there):
                async with self._follower.released(group, there):
                    await self._gpus[group.gpu].migrate(process, self._gpus[target])
                    self._arrived(group, there)
            with contextlib.suppress(OSError):  # it has arrived: what does not hold at once is retried and logged
                await self._follower.apply(there, BY_PROGRAMS)

    def _arrived(self, here: Member, there: Member) -> None:
        """Write an arrival into the books, without a pause in which a reader could see the process on both GPUs or on
        none."""
        if not self._population.holds(there):
            raise fail(errno.ESRCH)  # it died on arrival
        before = self._population.path(here)
        resident = self._population.resident(there.process)
        assert resident is not None, "the tree holds it"
        self._population.migrated(here, there)
        self._moves.end(there.process)
        resident.moves += 1
        path = self._population.path(there)
        self._tally.migrated(path, resident.moves)
        for level in path:
            self._tell(level, Channel.COMPUTE)
        for level in before[1:]:
            self._tell(level, Channel.COMPUTE)
        self._follower.sharers_changed(there)
        self._follower.sharers_changed(before[1])

    @contextlib.contextmanager
    def _booked(self, here: Member, there: Member) -> Iterator[None]:
        """Book on the target what the process holds, with its settings. Undone where the body fails."""
        process = here.process
        before = self._ledger.books(there) if self._population.holds(there) else None
        asked = None if before is None else {name: getattr(before, name) for name in FOLLOWS}
        self._moves.begin(process, Move(here.gpu, there.gpu, asked))
        begun = False
        try:
            self._admit(process, {there.gpu})
            self._book(there, self._ledger.books(here))
            begun = True
            yield
        except BaseException:
            self._undo(here, there, before)
            if begun:
                self._look.set()  # the move may still be under way, and succeed
            else:
                self._moves.end(process)
            raise

    def _undo(self, here: Member, there: Member, before: Books | None) -> None:
        """Remove a move from the target's books."""
        if not self._population.holds(there) or not self._population.holds(here):
            return
        if before is None:
            self._population.leave(there)
        else:
            self._unbook(there, before)

    # Unfinished moves: those without a known end

    async def _conclude(self, process: Process) -> None:
        """Write into the books where a process is now; where no GPU can tell, the note stays for the next look."""
        move = self._moves.left().get(process)
        if move is None:
            return
        here, there = Member(process, move.source), Member(process, move.target)
        try:
            on = [await self._gpus[group.gpu].finds(process) for group in (here, there)]
        except OSError:
            return
        if self._population.holds(here):
            if None in on or all(on):
                return
            if on[1]:
                self._follow(here, there)
            else:
                self._stay(here, there, move)
        self._moves.end(process)

    def _stay(self, here: Member, there: Member, move: Move) -> None:
        """Undo a move that did not happen, or was reverted: the process keeps what it had on the other GPU before."""
        resident = self._population.resident(here.process)
        assert resident is not None
        known = there.gpu in resident.contexts or not self._follower.is_untouched(there)
        self._population.quit(resident, there.gpu)
        self._undo(here, there, None if move.before is None else Books(**move.before))  # type: ignore[arg-type]
        if self._population.holds(there):
            self._follower.background.later(there)
        elif known:
            self._gpus[there.gpu].forget(there.process)  # the Gpu kept a freeze for its arrival

    def _follow(self, here: Member, there: Member) -> None:
        """Complete a move that happened: the settings go to the target."""
        self._admit(here.process, {there.gpu})
        held = self._ledger.books(here)
        self._ledger.configure(there, **{name: getattr(held, name) for name in FOLLOWS})
        self._gpus[here.gpu].forget(here.process)
        self._arrived(here, there)
        self._follower.background.later(there)

    def _book(self, there: Member, held: Books) -> None:
        """Book a process on the target. ENOSPC where some level above has no room: no other process there has to give
        way."""
        # It may hold more in the host already than its swap.max allows: it did so on the source, too.
        self._ledger.configure(there, **{**{name: getattr(held, name) for name in FOLLOWS}, "swap_max": MAX})
        for level in self._population.path(there)[1:]:
            books = self._ledger.books(level)
            if books.current + held.current > books.limit or books.swap + held.swap > books.swap_max:
                raise fail(errno.ENOSPC)
        if held.swap:
            self._ledger.observe(there, held.swap)
            self._ledger.swap_out(there, held.swap)
        self._ledger.observe(there, held.current)
        self._ledger.configure(there, swap_max=held.swap_max)

    def _unbook(self, there: Member, before: Books) -> None:
        self._ledger.configure(there, **{name: getattr(before, name) for name in FOLLOWS})
        now = self._ledger.books(there)
        self._ledger.observe(there, before.current)
        if now.swap > before.swap:
            self._ledger.uncharge_swap(there, now.swap - before.swap)
