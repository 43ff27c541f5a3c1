"""The Reclaimer: brings groups back under their limits. It plans with the ledger, warns programs, and has the GPU
move."""

from __future__ import annotations

import errno
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping

import trio

from backend.common.errors import fail
from backend.common.turns import Turns
from backend.core.background import Background
from backend.core.deadlines import Deadlines
from backend.core.member import Record
from backend.core.population import Population
from backend.core.protocols import Gpu, Ledger, Target
from backend.core.records import MAX
from backend.process.identity import ROOT, Group, Member, SliceOn

log = logging.getLogger(__name__)

ROUNDS = 16
"""Times that a charge is tried while it waits for room under a limit_max, as MAX_RECLAIM_RETRIES of mm/memcontrol.c:
other charges may take the room."""

USERMEM_S = 0.05
"""Seconds that a program which listens to its usermemfd has to give memory back by itself, before it is moved out."""

IGNORED_S = 10.0
"""Seconds for which a program that gave nothing back in USERMEM_S is not waited for again: its neighbours lose at most
0.5 % of their time."""


class Reclaimer:
    """Moves memory between a GPU and the host as the limits demand."""

    def __init__(
        self, ledger: Ledger, gpus: Mapping[int, Gpu], population: Population, turns: Turns, deadlines: Deadlines
    ) -> None:
        self._ledger = ledger
        self._gpus = gpus
        self._population = population
        self._turns = turns
        self._listeners: Counter[Group] = Counter()  # number of open usermemfds, by group
        self._moves: dict[Member, list[trio.Event]] = {}  # in progress; each event is set at the end
        self.background = Background("reclaim", population, self.settle_path, deadlines, lambda record: record.memory)
        """Reclaims for changes that have no writer."""
        self.left_over: Callable[[Group], None] = lambda level: None
        """Called with each level that reclaim is done with; the level may still be over its limit."""

    async def charge(self, group: Member, nbytes: int) -> None:
        """Charge memory to a process, once there is room for it under every limit_max of its path. What is over a high
        then is left to :meth:`settle_path`. ENOMEM where there is no such room to be had, ENODEV."""
        held: dict[Group, int] | None = None
        for _ in range(ROUNDS):
            try:
                self._ledger.charge(group, nbytes)
            except OSError as error:
                if error.errno != errno.EAGAIN:
                    raise
            else:
                return
            if held is None:
                held = {level: self._held(level) for level in self._population.path(group) if self._is_bounded(level)}
            if not await self._make_room(group, nbytes, held):
                break
        self._ledger.note(group, "oom")
        raise fail(errno.ENOMEM)

    async def _make_room(self, group: Member, nbytes: int, held: dict[Group, int]) -> bool:
        """Move memory out until every limit_max has room for `nbytes` more, and return whether that worked. Nothing
        moves where it could not be enough.

        `held` has, for each level, the bytes that its movable members held as the charge began. These members give what
        is charged in place of those that cannot be moved: once, however many rounds it takes, and in addition what they
        have taken of that room since.
        """
        waits = 0
        while self._population.holds(group) and (full := self._full(group, nbytes)) is not None:
            level, short = full
            now = self._held(level)
            owed = max(0, nbytes + now - held.setdefault(level, now))
            if _total(self.plan(level, short, owed=owed)) < short:
                waits += 1
                if waits > ROUNDS or not await self._moved(level):
                    return False
                continue  # a move for another caller was not part of the plan, and may have made room
            try:
                if not await self.reclaim(level, short, owed):
                    return False
            except OSError as error:
                log.error("GPU %d: nothing moved out for %s: %s", group.gpu, group.process, error)
                return False
        return True

    async def _moved(self, level: Group) -> bool:
        """Wait until a move out of a member at or below a level ends. Return whether there was any."""
        for resident in self._population.below(level):
            if moves := self._moves.get(Member(resident.process, level.gpu)):
                await moves[0].wait()
                return True
        return False

    def _is_bounded(self, level: Group) -> bool:
        return self._ledger.books(level).limit_max != MAX

    def _held(self, level: Group) -> int:
        """Return the bytes held by the members at or below a level that the GPU can move."""
        gpu = self._gpus[level.gpu]
        members = (one.process for one in self._population.below(level) if gpu.manages(one.process))
        return sum(self._ledger.books(Member(process, level.gpu)).current for process in members)

    def _full(self, group: Member, nbytes: int) -> tuple[Group, int] | None:
        """Return the lowest level of a path that `nbytes` more would put over its limit_max, and by how much; None for
        none."""
        for level in self._population.path(group):
            books = self._ledger.books(level)
            if (short := books.current + nbytes - books.limit_max) > 0:
                return level, short
        return None

    async def settle_path(self, group: Group, owed: int = 0) -> None:
        """Bring a group and every one above it back under its limits, the lowest first. `owed`: bytes that a program
        with the library has just allocated."""
        for level in self._population.path(group):
            if self._population.holds(level) and self._ledger.excess(level):
                await self.settle(level, owed)

    async def settle(self, level: Group, owed: int = 0) -> None:
        """Move memory of a group out until it is under its limits, or nothing more can be moved. `owed` as in
        :meth:`plan`."""
        # Two simultaneous reclaims of one group would each take the whole excess.
        async with self._population.record(level).memory.settling():
            if not self._population.holds(level) or not (excess := self._ledger.excess(level)):
                return
            books = self._ledger.books(level)
            if books.current > books.high:
                self._ledger.note(level, "high")
            if books.current > books.limit_max:
                self._ledger.note(level, "max")
            if isinstance(level, SliceOn):
                self._ledger.press(level, excess)
            try:
                await self._settle(level, excess, owed)
            finally:
                self.left_over(level)

    async def _settle(self, level: Group, excess: int, owed: int) -> None:
        spent: set[Member] = set()
        while excess:
            given, asked = await self.take(level, excess, spent, owed)
            owed = max(0, owed - given)
            excess = self._ledger.excess(level) if self._population.holds(level) else 0
            if not asked:
                break
        if excess and self._population.holds(level):
            self._ledger.note(level, "fail")

    async def reclaim(self, top: Group, nbytes: int, owed: int | None = None) -> int:
        """Move `nbytes` of a group out, or as much as can be; return how many bytes less its processes hold. `owed` as
        in :meth:`plan`; None for all of it."""
        spent: set[Member] = set()
        moved = 0
        while moved < nbytes:
            still = nbytes - moved if owed is None else max(0, owed - moved)
            given, asked = await self.take(top, nbytes - moved, spent, still)
            moved += given
            if not asked or not self._population.holds(top):
                break
        return moved

    def plan(self, top: Group, nbytes: int, spent: Collection[Member] = (), owed: int = 0) -> list[Target]:
        """Return the ledger's plan, limited to what the GPU can move: what some members cannot give is asked of others.
        Members in `spent` are left out.

        The books know only how much is on the GPU. So the ledger is asked to plan for more than is needed, by as little
        as suffices, and parts that cannot be moved are dropped.

        The part of a program whose memory can never be moved is asked of no other: a neighbour without the library
        takes nothing from programs with it. These give in its place only up to `owed`, the bytes that they have just
        allocated themselves or that a writer asks for. At the root they give all of it, since the capacity of the GPU
        has to hold.
        """
        targets, planned, stays = self._movable(top, nbytes, spent)
        if planned < nbytes or _total(targets) == planned:
            return targets
        if top != SliceOn(ROOT, top.gpu) and stays:
            nbytes = max(nbytes - stays, min(nbytes, owed))
            if _total(targets) >= nbytes:
                return targets
        short, enough = planned, planned
        while _total(targets) < nbytes and planned >= enough:
            short, enough = enough, 2 * enough
            targets, planned, _ = self._movable(top, enough, spent)
        while enough - short > self._gpus[top.gpu].info.granule and _total(targets) >= nbytes:
            middle = (short + enough) // 2
            fewer, _, _ = self._movable(top, middle, spent)
            if _total(fewer) >= nbytes:
                enough, targets = middle, fewer
            else:
                short = middle
        return targets

    def _movable(self, top: Group, nbytes: int, spent: Collection[Member]) -> tuple[list[Target], int, int]:
        """Return the movable part of the ledger's plan, the bytes planned in all, and the bytes planned of programs
        that can never be moved."""
        gpu = self._gpus[top.gpu]
        left: dict[Member, int] = {}
        targets, planned, stays = [], 0, 0
        for target in self._ledger.plan(top, nbytes):
            planned += target.nbytes
            if not gpu.manages(target.group.process):
                stays += target.nbytes
                continue
            if target.group in spent:
                continue
            most = left.setdefault(target.group, gpu.footprint(target.group.process).movable)
            if take := min(target.nbytes, most):
                left[target.group] -= take
                targets.append(Target(target.group, take, target.below_low))
        return targets, planned, stays

    async def take(self, top: Group, nbytes: int, spent: set[Member], owed: int) -> tuple[int, bool]:
        """Take `nbytes` from the processes at or below `top`, in one round. Return how many bytes less they hold, and
        whether any was asked. A process that gives less than it was asked for is added to `spent`. `owed` as in
        :meth:`plan`.

        All are asked at the same time, so a slow one delays only the callers that wait for it. Each is told through its
        usermemfd; a program that listens may for a short time give back by itself what it needs least.
        """
        given: list[int] = []
        failed: list[Exception] = []

        async def take_one(target: Target) -> None:
            try:
                given.append(await self._take_from(target))
            except Exception as error:  # the moves that have begun elsewhere go on
                failed.append(error)
            else:
                if given[-1] < target.nbytes:
                    spent.add(target.group)

        await self._turns.turn()
        if not self._population.holds(top):
            return 0, False
        targets = _merged(self.plan(top, nbytes, spent, owed))
        async with trio.open_nursery() as nursery:
            for target in targets:
                if target.below_low:
                    self._ledger.note(target.group, "low")
                nursery.start_soon(take_one, target)
        if failed:
            raise failed[0]
        return sum(given), bool(targets)

    async def _take_from(self, target: Target) -> int:
        moves, over = self._moves.setdefault(target.group, []), trio.Event()
        moves.append(over)
        try:
            return await self._move_from(target)
        finally:
            over.set()
            moves.remove(over)
            if not moves:
                del self._moves[target.group]

    async def _move_from(self, target: Target) -> int:
        group = target.group
        if not self._population.holds(group):
            return target.nbytes
        given = await self._let(group, target.nbytes)
        if given >= target.nbytes or not self._population.holds(group):
            return given  # it died meanwhile, with its memory
        try:
            taken = await self._gpus[group.gpu].reclaim(group.process, target.nbytes - given)
        except OSError:
            if self._population.holds(group):
                raise
            return given
        if taken and self._population.holds(group):
            self._ledger.note(group, "reclaim")
        return given + taken

    # Programs that give by themselves

    def listens(self, group: Group, change: int) -> None:
        """Note that the program of a group opened (1) or closed (-1) its usermemfd."""
        self._listeners[group] += change
        if not self._listeners[group]:
            del self._listeners[group]

    def fell(self, group: Group) -> None:
        """Note that a process holds less than before."""
        self.wake(self._population.record(group))

    def wake(self, record: Record) -> None:
        """Wake the waiters for a group to hold less."""
        if record.memory.waiting is not None:
            record.memory.waiting.unpark_all()

    async def _let(self, group: Group, nbytes: int) -> int:
        """Tell a program to give back `nbytes`, and, if it listens, wait up to USERMEM_S for it to do so. Return the
        bytes that it gave."""
        before = self._ledger.books(group).current  # read first: a program may give at once
        self._ledger.press(group, nbytes)
        memory = self._population.record(group).memory
        if not self._listeners[group] or memory.ignored_until > trio.current_time():
            return 0
        given = self._given(group, before)
        if memory.waiting is None:  # an empty lot is falsy
            memory.waiting = trio.lowlevel.ParkingLot()
        lot = memory.waiting
        try:
            with trio.move_on_after(USERMEM_S):
                while self._population.holds(group) and given < nbytes:
                    await lot.park()
                    given = self._given(group, before)
        finally:
            if not lot and memory.waiting is lot:
                memory.waiting = None
        given = self._given(group, before)
        if not given and self._population.holds(group):
            memory.ignored_until = trio.current_time() + IGNORED_S
        return given

    def _given(self, group: Group, before: int) -> int:
        return max(0, before - self._ledger.books(group).current) if self._population.holds(group) else before


def _merged(targets: list[Target]) -> list[Target]:
    """Return one target per process: a plan takes unprotected memory first, and may come back to a process for more."""
    merged: dict[Member, Target] = {}
    for target in targets:
        if target.group in merged:
            first = merged[target.group]
            target = Target(target.group, first.nbytes + target.nbytes, first.below_low or target.below_low)
        merged[target.group] = target
    return list(merged.values())


def _total(targets: list[Target]) -> int:
    return sum(target.nbytes for target in targets)
