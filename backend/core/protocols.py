"""The interfaces of the backend. Every ledger works with every GPU; they meet only in the Controller.

- :class:`Ledger` keeps the books: limits, hierarchical charge, protection, events, the wanted compute state.
- :class:`Gpu` is the hardware: what runs there, how much memory it holds, and the levers.
- :class:`Bookkeeping` is what a Gpu may ask of the Controller.
- :class:`Policy` is what the Controller asks before it lets a program go on: a policy may have limits for its slice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Protocol

import attrs
import trio

from backend.core.families import Families
from backend.core.held import Held
from backend.core.reasons import Engines, Off
from backend.core.records import Activity, Books, Capability, Channel, Footprint, GpuInfo, Move, Peak, Wanted
from backend.core.settings import Lever
from backend.core.turns import TurnEnd
from backend.core.workingset import WorkingSet
from backend.process.identity import Group, Member, Process, Slice, SliceOn
from backend.space.space import Space


@attrs.frozen
class Target:
    """How much to take from one process, and why."""

    group: Member
    """The process to take from, and on which GPU."""
    nbytes: int
    """Bytes to move to the host."""
    below_low: bool
    """Whether this breaks the group's effective low, because no other group had anything left to give."""


@attrs.frozen
class Inherited:
    """A group that was in the books before this daemon."""

    group: Group
    """The process or slice, and its GPU."""
    parent: Group
    """The group above."""
    applied: Wanted
    """State that the previous daemon had applied to a process."""
    doubtful: bool
    """Whether the applied state is unknown: the previous daemon had begun to change it and did not finish."""
    joined: bool = False
    """Whether the process announced by itself that it uses the GPU; it does not announce it again."""


class Ledger(Protocol):
    """The books of all GPUs. Every call is short and synchronous, and either happens whole or raises OSError and
    changes nothing.

    A group that is not in the books raises ``OSError(ENODEV)``.
    """

    name: str
    """Name of the ledger, shown in ``ggroup.backend``."""
    peaks: frozenset[Peak]
    """Peaks that the ledger keeps; the figures of other peaks in its books mean nothing."""

    def listen(self, listener: Callable[[Group, Channel], None], configured: Callable[[Group], None]) -> None:
        """From now on call `listener` for every event of every group, and `configured` for a group whose settings were
        changed by another client of the books.
        """

    async def run(self) -> None:
        """Report events that none of these calls caused to the listeners, until cancelled."""

    def add_gpu(self, index: int, capacity: int, granule: int = 1) -> None:
        """Open the books of a GPU: its root group, whose high is `capacity` bytes. `granule` is the number of bytes
        that move together: reclaim is planned, and the room under a swap.max is counted, in granules. EEXIST; EBUSY if
        another daemon keeps these books.
        """

    def inherited(self) -> Sequence[Inherited]:
        """Return the groups that were in the books of these GPUs when they were opened, each after its parent."""

    def add(self, group: Group, parent: SliceOn) -> None:
        """Add an empty group below `parent`, a slice. FileExistsError if it is there already."""

    def move(self, group: Group, parent: SliceOn) -> None:
        """Move a group, with everything charged to it, below another parent on the same GPU."""

    def remove(self, group: Group) -> None:
        """Remove a group and uncharge what it holds from every group above. EBUSY while it has children."""

    def parent(self, group: Group) -> Group | None:
        """Return the group above, None for a GPU's root."""

    def books(self, group: Group) -> Books:
        """Return the present figures and settings of a group."""

    def held(self, group: Group) -> Held:
        """Return the memory that a group held on the GPU over time, since it is in these books or since they were
        opened. Exact at each call here that changes it, otherwise as it was seen. ENODEV when the group is gone.
        """

    def configure(self, group: Group, **changes: int | bool) -> None:
        """Set any of high, limit_max, low, swap_max (bytes), timeslice_us, frozen, priority, weight, oom_group; of a
        slice also kept, uid, gid.

        EINVAL for any other name, and for a setting of slices on a process; EPERM for a GPU's root; ERANGE.
        """

    def reset_peak(self, group: Group, peak: Peak) -> None:
        """Start `peak` again at `current`, or `swap_peak` at `swap`, for all clients of this ledger."""

    def charge(self, group: Group, nbytes: int) -> None:
        """Charge GPU memory to a process and every slice above it.

        A charge over a high succeeds, and is reclaimed. ENOMEM, recorded as `oom`, if swap.max leaves no room to bring
        every level back under its high, or if a level would hold more than MAX. A charge over a limit_max is recorded
        as `max` there: EAGAIN if as much could leave that level first, otherwise ENOMEM. Nothing is charged then.
        """

    def uncharge(self, group: Group, nbytes: int) -> None:
        """Uncharge GPU memory that the process freed. EINVAL for more than it holds."""

    def uncharge_swap(self, group: Group, nbytes: int) -> None:
        """Uncharge memory in the host that the process freed. EINVAL for more than it holds."""

    def swap_out(self, group: Group, nbytes: int, usec: int = 0) -> None:
        """Book `nbytes` as moved to the host in `usec` microseconds. ENOSPC over a swap.max, EINVAL for more than it
        holds.
        """

    def swap_in(self, group: Group, nbytes: int, usec: int = 0) -> None:
        """Book `nbytes` as moved to the GPU in `usec` microseconds. EAGAIN if that would put a level over its high or
        its limit_max.
        """

    def observe(self, group: Group, nbytes: int) -> None:
        """Set the charge of a process to `nbytes`, as the driver reports it, whatever the limits say. EINVAL if a group
        would hold more than MAX.
        """

    def excess(self, group: Group) -> int:
        """Return the bytes by which a group is over its high or its limit_max; 0 if it is under both."""

    def plan(self, group: Group, nbytes: int) -> Sequence[Target]:
        """Return the processes at or below `group` from which to take `nbytes` in total. No more than swap.max allows,
        and effective low is respected while possible. Processes with the farthest next use come first; among those of
        one class, what they hold is levelled.
        """

    def set_next_use(self, gpu: int, ranks: Mapping[Member, int]) -> None:
        """Note how soon processes of a GPU use their memory again, as ranks from 0 to NEXT_USE_MOST; the greater the
        rank, the later the use (:meth:`backend.core.nextuse.Outlook.rank`). A rank holds for NEXT_USE_S from now on;
        after that, and for a process without one, it is 0. Processes that are not in the books are ignored. ENODEV for
        the GPU; EINVAL for a slice, a process of another GPU, or a rank out of range, and then nothing is set.
        """

    def note(self, group: Group, event: str) -> None:
        """Count an event of a group, and of every group above it: ``low``, ``high``, ``reclaim``, ``fail``; and the
        events of a limit_max that the ledger does not see itself: ``max``, ``oom``, ``oom_kill`` and
        ``oom_group_kill``.
        """

    def set_reasons(self, group: Group, off_all: int, off_gr: int) -> None:
        """Note the reasons for which a process is off the runlist, as bits of `REASONS`: `off_all` take every engine
        off, `off_gr` only GR. EINVAL for a slice, for other bits, and for a bit in both. This moves no lever.
        """

    def press(self, group: Group, nbytes: int) -> None:
        """Ask the program to give back `nbytes`, in a record of its usermemfd, which replaces the one before."""

    def close(self, *, released: bool = False, handed_over: bool = False) -> None:
        """Close the ledger; the last call. `released` says that every process has its TSGs and default timeslices back,
        `handed_over` that another daemon continues at once with the same GPUs.
        """


class Moves(Protocol):
    """Journal of migrations that are under way, for a daemon that takes over before their end."""

    def left(self) -> Mapping[Process, Move]:
        """Return the migrations between our GPUs that were begun and not ended."""

    def begin(self, process: Process, move: Move) -> None:
        """Note a migration, before anything of it is in the books of the other GPU."""

    def end(self, process: Process) -> None:
        """Note that the books say where the process is; without effect if no migration was begun."""


class Bookkeeping(Protocol):
    """Requests that a Gpu may make of the Controller."""

    async def arrive(self, process: Process, gpu: int) -> None:
        """Put a process with a context on `gpu` into the books. On return the policy of its slices holds."""

    async def ask(self, process: Process, families: Families, *, everywhere: bool = False) -> None:
        """Put a process into families, each within the one before, with the settings that they ask for. With
        `everywhere` it has a directory in the tree on every GPU. EOPNOTSUPP if no GPU acts on a setting, EAGAIN for too
        many families of its user or of all users, E2BIG for too many of one process; ProcessLookupError, and EBUSY if
        the process cannot be inspected now.
        """

    def knows(self, process: Process, gpu: int) -> bool:
        """Return whether the process is in the books of `gpu`. A request for a process that is not there comes too
        late.
        """

    def observe(self, process: Process, gpu: int, nbytes: int) -> None:
        """Report the driver's own figure for a process's GPU memory, bytes."""

    def undone(self, process: Process, gpu: int) -> None:
        """Report that the process had undone its freeze or its timeslice by itself, and that it holds again."""

    def take_down(self, process: Process, gpu: int) -> None:
        """Take down the figures of a process now, because the Gpu is about to report less."""

    def late(self, process: Process, gpu: int, figures: Mapping[str, int]) -> None:
        """Report further figures of a process that has ended, by the names of :class:`Activity`. Called once, after
        `forget`.
        """

    async def charge(self, process: Process, gpu: int, nbytes: int) -> None:
        """Charge `nbytes` once there is room for them under every limit_max; return once every level is back under its
        high. OSError(ENOMEM) if refused.
        """

    def uncharge(self, process: Process, gpu: int, nbytes: int, *, swapped: bool) -> None:
        """Report that the process freed `nbytes` on the GPU or, with `swapped`, in the host."""

    def moved_out(self, process: Process, gpu: int, nbytes: int, usec: int, *, already: bool = False) -> None:
        """Report that `nbytes` of the process are in the host from now on. ENOSPC over a swap.max, unless they are
        there `already`, when it is too late to refuse.
        """

    def move_in(self, process: Process, gpu: int, nbytes: int, usec: int) -> bool:
        """Return whether `nbytes` may come back to the GPU: True, and booked, or False for lack of room under some
        high.
        """

    def levels(self, process: Process, gpu: int) -> Sequence[Books]:
        """Return the books of the process and of every slice above it, the GPU's root last. ENODEV if the process is
        gone.
        """

    async def prospect(self, process: Process, gpu: int) -> Sequence[Books]:
        """Return what :meth:`levels` will return once the policy of the slices holds. For a process that is not in the
        books of `gpu`, return the slices that it would be in if it came now; this does not add it. ProcessLookupError
        if the process is gone.
        """

    def presence(self, gpu: int) -> None:
        """Report that a GPU was lost or is back, as its `lost` says."""

    async def enter(self, process: Process, uid: int, given: int = 0) -> int:
        """Put a program of a user that starts into the space of its slice, and return the number of that once it may
        use it; 0 where it runs by itself. `given` is the number that it was told before.
        """

    def space_of(self, process: Process) -> Space | None:
        """Return the space that a program was put into."""

    def is_server(self, pid: int, nbytes: int) -> bool:
        """Return whether a process that holds `nbytes` of a GPU is the server of a space, and no program."""

    def servers_of(self, space: Space) -> Collection[int]:
        """Return the pids of the servers of a space."""

    def beside_changed(self, process: Process, gpu: int) -> None:
        """Report that a process runs beside the others of its space from now on, or does so no longer."""

    def not_drained(self, process: Process, gpu: int) -> None:
        """Report that a process is late: its turn was reported as ended and drained, but it waits with work that has
        not run.
        """

    def reclaim_soon(self, process: Process, gpu: int) -> None:
        """Report that the memory of the process has changed: every level above it is to be back under its high soon."""


class Policy(Protocol):
    """Code that configures slices by itself, through the calls that writes to control files end in."""

    async def prepare(self, slice_: Slice, gpu: int) -> None:
        """Return once a slice and every slice above it is configured on a GPU, or after a short time at most."""

    def asked(self, slice_: Slice, gpu: int) -> Mapping[str, int]:
        """Return the limits that a slice outside the tree would have on a GPU, by the fields of their settings. They
        are known once :meth:`prepare` has returned.
        """

    def again(self, gpu: int) -> None:
        """Note that a lost GPU is back: what was refused meanwhile is to be requested again."""


class Gpu(Protocol):
    """One GPU: what it reports, and its levers.

    Levers return once the state holds. They raise ProcessLookupError when the process is gone and OSError otherwise
    (EOPNOTSUPP cannot, ETIMEDOUT no answer, EIO refused by the driver, ENODEV while the GPU is lost). They may be
    cancelled at a checkpoint. A Gpu remembers what was asked for a process and applies it to every TSG that appears
    later.
    """

    info: GpuInfo
    late_us: int
    """Delay with which the engine time of a process (`gpu_usec` of its activity) is reported, microseconds; 0 if
    none.
    """
    switch_us: int
    """Part of the engine time that each stay on the engine (`stays`) spends on context switches, microseconds."""

    @property
    def lost(self) -> bool:
        """Whether the GPU is missing: fallen off the bus, or unusable until it is reset. What is known of it is
        kept.
        """

    def capabilities(self) -> Mapping[str, Capability]:
        """Return what each control (by file name) does on this GPU; a control without an entry is unsupported. The same
        object is returned until something changes, because every write asks, and a new one then.
        """

    async def run(
        self, bookkeeper: Bookkeeping, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Find processes and report them to `bookkeeper` until cancelled; started once the first look is done."""

    def activity(self, process: Process) -> Activity:
        """Return what is known about the work of `process`; an empty Activity if it has no context."""

    def manages(self, process: Process) -> bool:
        """Return whether the memory of `process` can be moved (gmem.limit.* act on it)."""

    def spoken(self, process: Process) -> float:
        """Return the seconds for which the library of `process` has been connected to this daemon, in total; 0 if
        never.
        """

    def footprint(self, process: Process) -> Footprint:
        """Return what is known about the memory of `process`, besides what is in the books."""

    def is_leaving(self, process: Process) -> bool:
        """Return whether :meth:`reclaim` is moving memory of `process` to the host, so that its program may answer
        nothing else before that is over, including the end of its turn.
        """

    def offer(self, room: Callable[[Process], int]) -> None:
        """Note that there may be room on the GPU again: programs with memory in the host may ask for it back. `room`
        returns the bytes that one process could get now; not all of them can at once.
        """

    async def set_lever(self, lever: Lever, process: Process, value: int) -> None:
        """Set a lever of `process` to a value, in the unit of its setting. 0 restores the driver's default, and works
        on every GPU. EOPNOTSUPP for another value of a lever that this GPU does not have.

        A timeslice is the longest run in a round, split over the GR TSGs of `process`.
        """

    async def detach(self, process: Process, engines: Engines = Engines.ALL) -> None:
        """Take the TSGs of these engines off the runlist, so that none of them runs on return, and put the others on.
        Takes all engines off on a GPU that was not proven to detach GR alone, since at least what is named must stop.
        """

    async def attach(self, process: Process) -> None:
        """Put the TSGs of every engine of `process` back on the runlist."""

    def note_reasons(self, process: Process, off: Off) -> None:
        """Note why `process` is off the runlist, or is about to be: before the hardware takes more of it off, and after
        it puts some back. This moves no lever.
        """

    async def end_turn(self, process: Process, bound_us: int, leaves: int = 0) -> TurnEnd:
        """End the turn of `process`: it launches nothing more until :meth:`begin_turn`. Wait up to `bound_us`
        microseconds for what it launched before. `leaves` bytes of it are about to be moved out before then. This takes
        no TSG off the runlist: the caller does, by :meth:`detach`. ProcessLookupError and ENODEV as for levers; any
        other failure returns UNGATED.
        """

    def rank(self, behind: Mapping[Process, Sequence[Process]], hold_us: int) -> None:
        """Put programs behind others: while one of the programs named by a value works through a burst of requests, and
        for `hold_us` microseconds after the last, the key launches nothing. Both need a library that can do so. This
        replaces what was said before; only programs for which something has changed are told.
        """

    async def begin_turn(self, process: Process) -> None:
        """Let `process`, which is attached by now, launch again; without effect if its turn was not ended."""

    def working_set(self, process: Process) -> WorkingSet | None:
        """Return how much of its memory `process` used in its last turn; None if its library does not say."""

    def shares(self, process: Process) -> frozenset[Hashable] | None:
        """Return the names of the GPU memory that `process` shares with others, the same in each of them, and ``ANY``
        for memory whose other user is not known; None if its library does not say.
        """

    async def prepare(self, process: Process, nbytes: int) -> int:
        """Move at most `nbytes` (rounded down to pages) of the working set of `process` from the host to the GPU, in
        the order of first use, as far as every level has room; return the bytes moved. For a process that waits for its
        turn. May be cancelled between pieces.
        """

    async def reclaim(self, process: Process, nbytes: int) -> int:
        """Move at least `nbytes` (rounded up to pages) to the host, or as many as possible; return the bytes moved."""

    async def migrate(self, process: Process, target: Gpu) -> None:
        """Move a running program, attached when this is called, to another GPU of this machine. On return it runs there
        with no lever set, and this Gpu has forgotten it. On failure it runs here as before.

        EXDEV if it cannot run there (another chip), EEXIST if it has work there already, ENOSPC for lack of room there,
        ENOMEM for lack of room in the host, EBUSY or ETIMEDOUT if it does not come to rest, EOPNOTSUPP if it has
        something that cannot be moved.
        """

    async def finds(self, process: Process) -> bool | None:
        """Return whether a program that was to be moved is on this GPU, from a new query. None while that is unknown,
        because an agent of this daemon or an earlier one may still be moving it.
        """

    def forget(self, process: Process) -> None:
        """Drop all state of a process that exited."""

    def hand_over(self) -> None:
        """Note that another daemon is about to take over: levers are not given back at the end."""


def split_timeslice(us: int, tsgs: int) -> int:
    """Return one TSG's part of a process's timeslice, microseconds. The parts add up, so more contexts gain no time."""
    return max(1, us // max(1, tsgs))
