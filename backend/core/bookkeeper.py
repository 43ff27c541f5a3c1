"""The Bookkeeper: what GPUs report and ask for, written into the books and passed to the parts that act on it."""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import trio

from backend.common.errors import fail
from backend.common.turns import Turns
from backend.core.deadlines import deadline
from backend.core.families import Families, below
from backend.core.follower import BY_PROGRAMS, Follower
from backend.core.membership import Membership
from backend.core.population import Population
from backend.core.protocols import Gpu, Ledger, Policy
from backend.core.reclaimer import Reclaimer
from backend.core.records import Books, Capability, Channel
from backend.core.room import RoomNotices
from backend.core.settings import BY_FIELD, HIGH, LIMIT_MAX, MAX, SPATIAL
from backend.core.totals import Totals
from backend.core.turns import TurnEnd
from backend.process.identity import ROOT, Group, Member, Process, Slice, SliceOn
from backend.scheduler.schedulers import Schedulers
from backend.space.space import Space
from backend.space.spaces import Spaces

log = logging.getLogger(__name__)


class Bookkeeper:
    """See :class:`backend.core.protocols.Bookkeeping`."""

    def __init__(
        self,
        ledger: Ledger,
        gpus: Mapping[int, Gpu],
        population: Population,
        membership: Membership,
        follower: Follower,
        reclaimer: Reclaimer,
        notices: RoomNotices,
        schedulers: Schedulers,
        totals: Totals,
        turns: Turns,
        spaces: Spaces,
        tell: Callable[[Group, Channel], None],
        seconds: float,
    ) -> None:
        """`seconds`: the longest that an arriving process waits for its settings to hold."""
        self.policy: Policy | None = None
        """The policy, which says what slices are to have; asked before a program in them may go on."""
        self.presences: list[Callable[[], None]] = []
        """Called when a GPU was lost, or is back."""
        self._ledger = ledger
        self._gpus = gpus
        self._population = population
        self._membership = membership
        self._follower = follower
        self._reclaimer = reclaimer
        self._notices = notices
        self._schedulers = schedulers
        self._totals = totals
        self._turns = turns
        self._spaces = spaces
        self._tell = tell
        self._seconds = seconds

    async def arrive(self, process: Process, gpu: int) -> None:
        await self._turns.turn()
        resident = await self._membership.welcome(process, {gpu})
        if self.policy is not None:
            await self.policy.prepare(resident.slice, gpu)
            resident = await self._membership.welcome(process, {gpu})  # ProcessLookupError for one that died meanwhile
        group, is_known = Member(process, gpu), gpu in resident.contexts
        if not is_known:
            self._population.join(resident, gpu)
            self._follower.sharers_changed(group)
            for level in self._population.path(group):
                self._tell(level, Channel.COMPUTE)
        self._schedulers.greet(group)
        if self._follower.is_held(group):
            return  # it is being migrated: its settings are applied once it has arrived
        if is_known:  # a lever of it may be waiting for the program to speak, which has to arrive for that
            if not self._follower.follows(group):
                self._follower.background.later(group)
            return
        try:
            with deadline(self._seconds):
                await self._follower.apply(group, BY_PROGRAMS)
        except ProcessLookupError:
            raise
        except OSError as error:
            self._follower.background.failed(group, error)

    async def ask(self, process: Process, families: Families, *, everywhere: bool = False) -> None:
        for control in {BY_FIELD[name].control for family in families for name in family.asked}:
            if self._is_unsupported(control):
                raise fail(errno.EOPNOTSUPP)
        resident = await self._membership.ask(process, families)
        if everywhere:
            resident = await self._membership.welcome(process, self._gpus)
            for group in [Member(process, gpu) for gpu in self._gpus]:
                if not self._follower.follows(group):
                    self._follower.background.later(group)
        if resident is not None:
            if families and resident.slice != resident.place:
                raise fail(errno.EAGAIN)  # the books have no room for its families
            for gpu in self._gpus:
                self._schedulers.poke(gpu)

    def knows(self, process: Process, gpu: int) -> bool:
        return self._population.holds(Member(process, gpu))

    def observe(self, process: Process, gpu: int, nbytes: int) -> None:
        group = Member(process, gpu)
        if not self._population.holds(group):
            return  # the process may have left since the driver was asked
        before = self._ledger.books(group).current
        self._ledger.observe(group, nbytes)
        if nbytes > before:
            self.reclaim_soon(process, gpu)
        elif nbytes < before:
            self._fell(group)

    def undone(self, process: Process, gpu: int) -> None:
        path = self._population.path(Member(process, gpu))
        self._totals.tally.undone(path)
        for level in path:
            self._tell(level, Channel.COMPUTE)

    def take_down(self, process: Process, gpu: int) -> None:
        if self.knows(process, gpu):
            self._totals.take_down([Member(process, gpu)])

    def late(self, process: Process, gpu: int, figures: Mapping[str, int]) -> None:
        self._totals.late(Member(process, gpu), figures)
        self._schedulers.late(Member(process, gpu), figures)

    async def charge(self, process: Process, gpu: int, nbytes: int) -> None:
        group = Member(process, gpu)
        await self._reclaimer.charge(group, nbytes)
        try:
            await self._reclaimer.settle_path(group, nbytes)
        except OSError as error:  # the charge stands: a reclaim that fails is not the program's failure
            if self._population.holds(group) and error.errno != errno.ENODEV:
                log.error("GPU %d: nothing moved out for %s: %s", gpu, process, error)

    def uncharge(self, process: Process, gpu: int, nbytes: int, *, swapped: bool) -> None:
        group = Member(process, gpu)
        if swapped:
            self._ledger.uncharge_swap(group, nbytes)
        else:
            self._ledger.uncharge(group, nbytes)
            self._fell(group)

    def moved_out(self, process: Process, gpu: int, nbytes: int, usec: int, *, already: bool = False) -> None:
        group = Member(process, gpu)
        try:
            self._ledger.swap_out(group, nbytes, usec)
        except OSError as error:
            if error.errno != errno.ENOSPC or not already:
                raise
            with self._made_room(group, nbytes):
                self._ledger.swap_out(group, nbytes, usec)

    @contextlib.contextmanager
    def _made_room(self, group: Group, nbytes: int) -> Iterator[None]:
        """Give every swap.max on the path room for `nbytes` while the body runs, since one was lowered while memory
        moved."""
        before = {level: self._ledger.books(level) for level in self._population.path(group)}
        short = {level: books for level, books in before.items() if books.swap_max - books.swap < nbytes}
        for level, books in short.items():
            self._ledger.configure(level, swap_max=books.swap + nbytes)
        yield
        for level, books in short.items():
            self._ledger.configure(level, swap_max=books.swap_max)

    def move_in(self, process: Process, gpu: int, nbytes: int, usec: int) -> bool:
        group = Member(process, gpu)
        try:
            self._ledger.swap_in(group, nbytes, usec)
        except OSError as error:
            if error.errno != errno.EAGAIN:
                raise
            return False
        self._population.record(group).memory.came_at = trio.current_time()
        return True

    def levels(self, process: Process, gpu: int) -> Sequence[Books]:
        group = Member(process, gpu)
        if not self._population.holds(group):
            raise fail(errno.ENODEV)
        return [self._ledger.books(level) for level in self._population.path(group)]

    async def prospect(self, process: Process, gpu: int) -> Sequence[Books]:
        if self.policy is not None:
            await self.policy.prepare(below(*self._membership.place(process)), gpu)
        if self.knows(process, gpu):  # it may have come while the policy was asked
            return self.levels(process, gpu)
        cgroup, families = self._membership.place(process)
        asked = {below(cgroup, families[:count]): families[count - 1].asked for count in range(1, len(families) + 1)}
        return [self._foreseen(level, asked) for level in self._population.path(SliceOn(below(cgroup, families), gpu))]

    def _foreseen(self, level: Group, asked: Mapping[Slice, Mapping[str, int]]) -> Books:
        """Return the books of a slice; for one that is not in the tree yet, the limits that it will have there.

        `asked` holds what families ask for, by their slices.
        """
        assert isinstance(level, SliceOn)
        if self._population.slice_entry(level.slice) is not None:
            return self._ledger.books(level)
        wanted = asked.get(level.slice)
        if wanted is None:
            wanted = self.policy.asked(level.slice, level.gpu) if self.policy is not None else {}
        return Books(high=wanted.get(HIGH.field, MAX), limit_max=wanted.get(LIMIT_MAX.field, MAX))

    def _is_unsupported(self, control: str | None) -> bool:
        """Return whether no GPU can do what a control says."""
        each = (self._schedulers.capabilities(gpu) for gpu in self._gpus.values())
        return all(one.get(str(control), Capability.UNSUPPORTED) is Capability.UNSUPPORTED for one in each)

    async def enter(self, process: Process, uid: int, given: int = 0) -> int:
        if not given and self._is_unsupported(SPATIAL.control):
            return 0  # a setting of a daemon that could
        slice_ = below(*self._membership.place(process))
        if self.policy is not None:
            for gpu in self._gpus:
                await self.policy.prepare(slice_, gpu)
        return await self._spaces.enter(process, slice_, uid, given)

    def space_of(self, process: Process) -> Space | None:
        return self._spaces.of(process)

    def is_server(self, pid: int, nbytes: int) -> bool:
        return self._spaces.is_server(pid, nbytes)

    def servers_of(self, space: Space) -> Collection[int]:
        return self._spaces.servers().get(space, ())

    def beside_changed(self, process: Process, gpu: int) -> None:
        self._schedulers.poke(gpu)
        if self.knows(process, gpu):
            self._follower.sharers_changed(Member(process, gpu))
            self._follower.follow_anew(Member(process, gpu))

    def presence(self, gpu: int) -> None:
        root, is_lost = SliceOn(ROOT, gpu), self._gpus[gpu].lost
        everybody: list[Group] = [SliceOn(slice_, gpu) for slice_ in self._population.slices()]
        everybody += [Member(resident.process, gpu) for resident in self._population.below(root)]
        if is_lost:
            self._totals.tally.lost(gpu, everybody)
        else:
            self._totals.tally.back(gpu)
        for listener in self.presences:
            listener()
        self._tell(root, Channel.GPU)
        for group in everybody:
            self._tell(group, Channel.COMPUTE)
        if not is_lost:
            self._follower.begin_again(gpu)
            self._reclaimer.background.later(root)
            if self.policy is not None:
                self.policy.again(gpu)
        self._schedulers.poke(gpu)

    def not_drained(self, process: Process, gpu: int) -> None:
        if self.knows(process, gpu):
            compute = self._population.record(Member(process, gpu)).compute
            if compute.turn_end is TurnEnd.DRAINED:
                compute.turn_end = TurnEnd.LATE

    def reclaim_soon(self, process: Process, gpu: int) -> None:
        group = Member(process, gpu)
        if not self._population.holds(group):
            return
        if any(self._ledger.excess(level) for level in self._population.path(group)):
            self._reclaimer.background.later(group)

    def _fell(self, group: Group) -> None:
        """Note that a process holds less memory of a GPU than before."""
        self._reclaimer.fell(group)
        self._notices.freed(group.gpu)
