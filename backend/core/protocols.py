"""The seams of the backend. Every ledger works with every GPU; they meet only in the Controller.

- :class:`Ledger` keeps the books: limits, hierarchical charge, protection, events, the wanted compute state.
- :class:`Gpu` is the hardware: what runs there, how much memory it holds, and the levers.
- :class:`Bookkeeping` is what a Gpu may ask of the Controller.
- :class:`Policy` is what the Controller asks before it lets a program go on: a policy may have limits for its slice.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Protocol

import attrs
import trio

from backend.core.families import Families
from backend.core.held import Held
from backend.core.reasons import Engines
from backend.core.records import Activity, Books, Capability, Channel, Footprint, GpuInfo, Move, Peak, Wanted
from backend.core.settings import Lever
from backend.core.turns import TurnEnd
from backend.core.workingset import WorkingSet
from backend.process.identity import Group, Member, Process, Slice, SliceOn


@attrs.frozen
class Target:
    """How much to take from one process, and why."""

    group: Member
    """The process to take from, and on which GPU."""
    nbytes: int
    """Bytes to move to the host."""
    below_low: bool
    """Whether this breaks the group's effective low: no other had anything left to give."""


@attrs.frozen
class Inherited:
    """A group that was in the books before this daemon."""

    group: Group
    """The process or slice, and its GPU."""
    parent: Group
    """The group above."""
    applied: Wanted
    """What the daemon before had made hold, of a process."""
    doubtful: bool
    """What holds is unknown: that daemon had begun to change it, and did not come to the end."""
    joined: bool = False
    """A process that said by itself that it uses the GPU, and does not say it again."""


class Ledger(Protocol):
    """The books. Every call is short and synchronous, and either happens whole or raises OSError and changes nothing.

    A group that is not in the books raises ``OSError(ENODEV)``.
    """

    name: str
    """Shown in ``ggroup.backend``."""
    peaks: frozenset[Peak]
    """The peaks that it keeps; of others the figures in its books mean nothing."""

    def listen(self, listener: Callable[[Group, Channel], None], configured: Callable[[Group], None]) -> None:
        """From now on calls `listener` for every event of every group, and `configured` for a group on which
        something was set without this object."""

    async def run(self) -> None:
        """Tells the listeners of what happens without one of these calls, until cancelled."""

    def add_gpu(self, index: int, capacity: int, granule: int = 1) -> None:
        """Opens the books of a GPU: its root group, whose high is the capacity in bytes. `granule` bytes move together:
        what reclaim is planned in, and what room a swap.max has. EEXIST, EBUSY where others keep them."""

    def inherited(self) -> Sequence[Inherited]:
        """The groups that were in the books of these GPUs when they were opened, each after the one above it."""

    def add(self, group: Group, parent: SliceOn) -> None:
        """Adds an empty group below `parent`, a slice; FileExistsError if it is there already."""

    def move(self, group: Group, parent: SliceOn) -> None:
        """Moves a group, with everything charged to it, below another parent of the same GPU."""

    def remove(self, group: Group) -> None:
        """Removes a group and takes what it was charged off every group above. EBUSY while it has children."""

    def parent(self, group: Group) -> Group | None:
        """The group above, None for a GPU's root."""

    def books(self, group: Group) -> Books:
        """What is known about a group now."""

    def held(self, group: Group) -> Held:
        """Return the memory on the GPU over time, since the group is in these books, or since they were opened: exact
        at each call here that changes it, else as it was seen. ENODEV when the group is gone."""

    def configure(self, group: Group, **changes: int | bool) -> None:
        """Sets any of high, limit_max, low, swap_max (bytes), timeslice_us, frozen, priority, weight, oom_group; kept,
        uid, gid of a slice.

        EINVAL for any other name, and for what only a slice has; EPERM for a GPU's root; ERANGE.
        """

    def reset_peak(self, group: Group, peak: Peak) -> None:
        """Starts `peak` again at `current`, or `swap_peak` at `swap`, for all that ask this ledger."""

    def charge(self, group: Group, nbytes: int) -> None:
        """Charges GPU memory to a process and every slice above it.

        Going over a high never fails: it is reclaimed. ENOMEM (records `oom`) where swap.max leaves no room to bring
        every level back under its high, or one would hold more than MAX. Going over a limit_max records `max` there:
        EAGAIN where as much could leave that level before, else ENOMEM. Nothing is charged then.
        """

    def uncharge(self, group: Group, nbytes: int) -> None:
        """The process freed GPU memory. EINVAL for more than it holds."""

    def uncharge_swap(self, group: Group, nbytes: int) -> None:
        """The process freed memory that was in the host. EINVAL for more than it holds."""

    def swap_out(self, group: Group, nbytes: int, usec: int = 0) -> None:
        """`nbytes` moved to the host in `usec` microseconds. ENOSPC over a swap.max, EINVAL for more than it holds."""

    def swap_in(self, group: Group, nbytes: int, usec: int = 0) -> None:
        """`nbytes` moved to the GPU. EAGAIN if that would put some level over its high, or its limit_max."""

    def observe(self, group: Group, nbytes: int) -> None:
        """The driver says that the process holds `nbytes`: the books follow, whatever the limits say. EINVAL where
        some group would hold more than MAX."""

    def excess(self, group: Group) -> int:
        """Bytes by which a group is over its high, or its limit_max; 0 when under."""

    def plan(self, group: Group, nbytes: int) -> Sequence[Target]:
        """What to take `nbytes` from, below (or at) `group`: what swap.max allows, low respected while possible; first
        from those whose next use is the farthest, level among those of one class."""

    def set_next_use(self, gpu: int, ranks: Mapping[Member, int]) -> None:
        """Note how soon processes of a GPU use their memory again, from 0 to NEXT_USE_MOST, the greater, the farther
        (:meth:`backend.core.nextuse.Outlook.rank`). It holds for NEXT_USE_S from now on; after that, and for a process
        of which nothing was said, it is 0. A process that is not in the books is passed over. ENODEV for the GPU;
        EINVAL for a slice, a process of another GPU, or a number beyond that, and then nothing is set."""

    def note(self, group: Group, event: str) -> None:
        """Counts one event, here and in every group above: ``low``, ``high``, ``reclaim``, ``fail``; and of a limit_max
        what the ledger does not see by itself, ``max``, ``oom``, ``oom_kill`` and ``oom_group_kill``."""

    def set_reasons(self, group: Group, off_all: int, off_gr: int) -> None:
        """Notes why a process is off the runlist: all reasons that take every engine, and all that take GR alone, as
        bits of `REASONS`. EINVAL for a slice, for other bits, and for a bit that is in both. No lever moves."""

    def press(self, group: Group, nbytes: int) -> None:
        """Asks the program to give back `nbytes`: the latest record of its usermemfd."""

    def close(self, *, released: bool = False, handed_over: bool = False) -> None:
        """The last call. `released` says that every process has its TSGs and default timeslices back, `handed_over`
        that another daemon goes on at once, with the same GPUs."""


class Moves(Protocol):
    """The programs on the way from one GPU to another, for the daemon after one that does not see the end of it."""

    def left(self) -> Mapping[Process, Move]:
        """Those that were begun, and not ended, between GPUs of ours."""

    def begin(self, process: Process, move: Move) -> None:
        """Noted before the books of the other GPU have anything of it."""

    def end(self, process: Process) -> None:
        """The books say where it is; nothing where nothing was begun."""


class Bookkeeping(Protocol):
    """What a Gpu may ask for."""

    async def arrive(self, process: Process, gpu: int) -> None:
        """A process has a context on `gpu`. On return it is in the books and its slices' policy holds."""

    async def ask(self, process: Process, families: Families, *, everywhere: bool = False) -> None:
        """A process is in families, each in the one before, with what they ask for; it has a directory on every GPU
        where it is to be in the tree `everywhere`. EOPNOTSUPP where no GPU acts on what is asked for, EAGAIN for too
        many families of its user or of all, E2BIG for too many of one process; ProcessLookupError, and EBUSY where it
        does not let itself be looked at."""

    def knows(self, process: Process, gpu: int) -> bool:
        """Whether the process is in the books of `gpu`: what is asked for one that is not comes too late."""

    def observe(self, process: Process, gpu: int, nbytes: int) -> None:
        """The driver's own figure for a process's GPU memory, bytes."""

    def undone(self, process: Process, gpu: int) -> None:
        """The process had undone its freeze or its timeslice by itself; it holds again."""

    def take_down(self, process: Process, gpu: int) -> None:
        """The Gpu is about to tell less of what the process has done: what it tells now counts."""

    def late(self, process: Process, gpu: int, figures: Mapping[str, int]) -> None:
        """What a process that has ended did besides, by the names of :class:`Activity`. Once, after `forget`."""

    async def charge(self, process: Process, gpu: int, nbytes: int) -> None:
        """Charges `nbytes`, once there is room for them under every limit_max, and returns once every level is back
        under its high. OSError(ENOMEM) if refused."""

    def uncharge(self, process: Process, gpu: int, nbytes: int, *, swapped: bool) -> None:
        """The process freed `nbytes` that were on the GPU, or (`swapped`) in the host."""

    def moved_out(self, process: Process, gpu: int, nbytes: int, usec: int, *, already: bool = False) -> None:
        """`nbytes` of the process are in the host from now on. ENOSPC over a swap.max, unless they are there `already`:
        then it is too late to refuse."""

    def move_in(self, process: Process, gpu: int, nbytes: int, usec: int) -> bool:
        """Whether `nbytes` may come back to the GPU: True and booked, or False for lack of room under some high."""

    def levels(self, process: Process, gpu: int) -> Sequence[Books]:
        """The books of the process, and of every slice above it, the GPU's root last. ENODEV for one that is gone."""

    async def prospect(self, process: Process, gpu: int) -> Sequence[Books]:
        """What :meth:`levels` says once its slices' policy holds; of a process that is not in the books of `gpu`, as it
        would be if it came now, from the slice above it on. It is not in the books by that. ProcessLookupError for one
        that is gone."""

    def presence(self, gpu: int) -> None:
        """A GPU was lost, or is back: its `lost` says which."""

    def not_drained(self, process: Process, gpu: int) -> None:
        """The process, whose turn was said to have ended drained, waits with work that has not run: it is late."""

    def reclaim_soon(self, process: Process, gpu: int) -> None:
        """What the process holds has changed: every level above it is to be back under its high, soon."""


class Policy(Protocol):
    """What configures slices by itself, with the calls that writers of files end in."""

    async def prepare(self, slice_: Slice, gpu: int) -> None:
        """Returns once a slice, and every one above it, has what it is to have on a GPU; in any case soon."""

    def asked(self, slice_: Slice, gpu: int) -> Mapping[str, int]:
        """The limits that a slice which is not in the tree would have on a GPU, as far as that is known: after
        :meth:`prepare` it is. By the fields of their settings."""

    def again(self, gpu: int) -> None:
        """A GPU that was lost is back: what was refused meanwhile is to be asked for once more."""


class Gpu(Protocol):
    """One GPU: its truth and its levers.

    Levers return once the state holds. They raise ProcessLookupError when the process is gone and OSError otherwise
    (EOPNOTSUPP cannot, ETIMEDOUT no answer, EIO refused by the driver, ENODEV while the GPU is lost). They may be
    cancelled at a checkpoint. A Gpu remembers what was asked for a process and applies it to every TSG that appears
    later.
    """

    info: GpuInfo
    late_us: int
    """How late the time that a process had the engine is told (`gpu_usec` of its activity), microseconds; 0 at once."""
    switch_us: int
    """What of that time each stay on the engine (`stays`) takes for switches of contexts, and no work, microseconds."""

    @property
    def lost(self) -> bool:
        """Whether it is not there: fallen off the bus, or of no use until it is reset. What is known of it stays."""

    def capabilities(self) -> Mapping[str, Capability]:
        """What each control (by file name) does on this GPU; a control that is not named is unsupported. The same table
        as long as nothing changed, as every write asks, and another one then."""

    async def run(
        self, bookkeeper: Bookkeeping, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Finds processes and reports them to `bookkeeper` until cancelled; started once the first look is done."""

    def activity(self, process: Process) -> Activity:
        """What is known about the work of `process`; an empty Activity for one that has no context."""

    def manages(self, process: Process) -> bool:
        """Whether the memory of `process` can be moved (gmem.limit.* act on it)."""

    def spoken(self, process: Process) -> float:
        """Seconds for which the library of `process` has spoken to this daemon, altogether; 0 where it never has."""

    def footprint(self, process: Process) -> Footprint:
        """What is known about the memory of `process`, besides what is in the books."""

    def is_leaving(self, process: Process) -> bool:
        """Whether memory of `process` is on its way to the host, by :meth:`reclaim`, and its program may answer nothing
        else before that is over, the end of its turn neither."""

    def offer(self, room: Callable[[Process], int]) -> None:
        """There may be room on the GPU again: programs that have memory in the host may ask for it back. `room` is
        how many bytes one could get now; not all of them at once."""

    async def set_lever(self, lever: Lever, process: Process, value: int) -> None:
        """Has a lever of `process` at a value, in the unit of its setting; 0 restores what the driver gives, and holds
        on every GPU. EOPNOTSUPP for another value of a lever that this GPU does not have.

        A timeslice is the longest run in a round, split over the GR TSGs of `process`.
        """

    async def detach(self, process: Process, engines: Engines = Engines.ALL) -> None:
        """Has the TSGs of these engines off the runlist, none of them running on return, and the others on it. All of
        them where a GPU was not proven to do so for GR alone: that stops what was to be stopped."""

    async def attach(self, process: Process) -> None:
        """Puts its TSGs back on the runlist, those of every engine."""

    async def end_turn(self, process: Process, bound_us: int, leaves: int = 0) -> TurnEnd:
        """Has `process` launch nothing more until :meth:`begin_turn`, and waits up to `bound_us` microseconds for what
        it launched before. `leaves` bytes of it are about to go before that. No TSG goes off the runlist by that:
        :meth:`detach` is the caller's. ProcessLookupError and ENODEV as the levers; whatever else goes wrong is
        UNGATED."""

    def rank(self, behind: Mapping[Process, Sequence[Process]], hold_us: int) -> None:
        """Has programs go behind others: while one of these works through a burst of requests, and for `hold_us`
        microseconds after the last, those that go behind it launch nothing, as far as both have a library for it. From
        now on, in the place of what was said last; nothing is said to a program for which nothing has changed."""

    async def begin_turn(self, process: Process) -> None:
        """Lets `process` launch again, which is attached by now; nothing where its turn was not ended."""

    def working_set(self, process: Process) -> WorkingSet | None:
        """What `process` used of its memory in its last turn, in sums; None where its library does not say."""

    def shares(self, process: Process) -> frozenset[Hashable] | None:
        """Names of the GPU memory that `process` shares with others, the same in each of them, and ``ANY`` for what it
        shares with one that is not known; None where its library does not say."""

    async def prepare(self, process: Process, nbytes: int) -> int:
        """Moves at most `nbytes` (rounded down to pages) of the working set of `process` from the host to the GPU, in
        the order of their first use, as far as every level has room; returns the bytes moved. For one that waits for
        its turn. It may be cancelled between pieces."""

    async def reclaim(self, process: Process, nbytes: int) -> int:
        """Moves at least `nbytes` (rounded up to pages) to the host, or what can be; returns the bytes moved."""

    async def migrate(self, process: Process, target: Gpu) -> None:
        """Moves a running program, which comes attached, to another GPU of this machine. On return it runs there, with
        nothing asked for it, and this Gpu knows it no more; on failure it runs here as before.

        EXDEV where it cannot run there (another chip), EEXIST where it has work there already, ENOSPC for lack of room
        there, ENOMEM for lack of room in the host, EBUSY or ETIMEDOUT where it does not come to a rest, EOPNOTSUPP
        where it has something that cannot be moved.
        """

    async def finds(self, process: Process) -> bool | None:
        """Whether a program that was to be moved is on this GPU, asked anew; None while that cannot be said, since an
        agent may be at it still, whichever daemon had asked for that."""

    def forget(self, process: Process) -> None:
        """The process exited: drop what was remembered for it."""

    def hand_over(self) -> None:
        """The end is near, and another daemon goes on from here: what holds then is not given back."""


def split_timeslice(us: int, tsgs: int) -> int:
    """One TSG's part of a process's timeslice, microseconds: forking contexts buys nothing."""
    return max(1, us // max(1, tsgs))
