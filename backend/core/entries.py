"""What is in the tree, one by one: a process, a slice, and the watchers of their comings and goings."""

from __future__ import annotations

from collections import Counter
from collections.abc import KeysView
from typing import Protocol

import attrs

from backend.core.families import Families, below
from backend.core.member import Record
from backend.core.settings import MAX
from backend.process.identity import Member, Process, Slice

NEVER, CAME = 0, 1
"""Identities that no cgroup of a slice has: for one that never came, and for one that came and was not looked at then.
The root of cgroup2 has inode 1, and is no slice's."""

FOREVER = MAX
"""Milliseconds that have no end."""


@attrs.frozen
class Life:
    """How long a slice stays that was made, or on which something was set (:mod:`backend.core.lives`)."""

    since_ms: int
    """When that was, or was asked for anew, milliseconds since the machine was started."""
    cgroup: int = NEVER
    """The cgroup that it is of, by :func:`backend.process.cgroups.ids`; NEVER, or CAME."""
    timeout_ms: int | None = None
    """Milliseconds that the cgroup has to come; None where its maker did not say, FOREVER for no end."""
    maker: int = 0
    """The user that made it by mkdir; root where it came to stay otherwise."""
    is_over: bool = False
    """Whether the cgroup has gone, and the slice is there for what is below it alone."""


@attrs.define(eq=False)
class Resident:
    """One process of the tree."""

    process: Process
    """The process."""
    slice: Slice
    """In which it is counted: that of its cgroup, or the nearest above that there is."""
    cgroup: Slice
    """Its cgroup when last looked at."""
    families: Families = ()
    """Families that it is in, each in the one before."""
    records: dict[int, Record] = attrs.field(factory=dict)
    """What is known of it on each GPU that it has a directory for."""
    contexts: set[int] = attrs.field(factory=set)
    """The GPUs it was seen to have a context on. :meth:`Population.join` and `quit` change it."""
    moves: int = 0
    """How often it was moved to another GPU."""
    unfollowed: bool = False
    """Whether the log says that its cgroup is not followed."""

    @property
    def gpus(self) -> KeysView[int]:
        """The GPUs that it has a directory for."""
        return self.records.keys()

    @property
    def place(self) -> Slice:
        """The slice of its families below that of its cgroup: where it is, if that is not refused."""
        return below(self.cgroup, self.families) if self.families else self.cgroup


@attrs.define(eq=False)
class SliceEntry:
    """One slice of the tree."""

    slice: Slice
    """Which."""
    above: SliceEntry | None
    """The one that it is in; None for the root."""
    depth: int = 0
    """How many are above it."""
    user: int = 0
    """The user for which it is counted (:mod:`backend.core.bounds`), from when it is made until it is gone."""
    given: int | None = None
    """The user that it was given to, with what is below it."""
    kept: bool = False
    """Stays when nothing is below it: made by mkdir, or something was set on it."""
    unit: bool = False
    """Stays as long as a unit is active, whatever becomes of its cgroup."""
    family: bool = False
    """Whether it is the slice of a family, which goes with its last process whatever was set on it."""
    children: set[Slice] = attrs.field(factory=set)
    """Slices directly below."""
    members: dict[Process, Resident] = attrs.field(factory=dict)
    """Processes directly in it."""
    occupied: dict[SliceEntry, None] = attrs.field(factory=dict)
    """Those directly below in which, or below which, a process is."""
    sharers: Counter[int] = attrs.field(factory=Counter)
    """How many processes in it, or below, have a context on a GPU."""

    def admit(self, resident: Resident) -> None:
        """A process is directly in it."""
        self.members[resident.process] = resident
        for gpu in resident.contexts:
            self.share(gpu, 1)
        entry = self
        while entry.above is not None and entry not in entry.above.occupied:
            entry.above.occupied[entry] = None
            entry = entry.above

    def dismiss(self, process: Process) -> None:
        """It is not any more."""
        for gpu in self.members.pop(process).contexts:
            self.share(gpu, -1)
        entry = self
        while entry.above is not None and not entry.members and not entry.occupied:
            del entry.above.occupied[entry]
            entry = entry.above

    def share(self, gpu: int, change: int) -> None:
        """A process directly in it has a context on a GPU, or has none any more."""
        entry: SliceEntry | None = self
        while entry is not None:
            entry.sharers[gpu] += change
            entry = entry.above


class Watcher(Protocol):
    """A watcher of comings and goings: the filesystem, to keep the kernel's dentries true."""

    def process_came(self, process: Process) -> None:
        """There is a directory for one more process, or one more GPU's in it."""

    def process_gone(self, process: Process) -> None:
        """The directory of a process is no more."""

    def process_moved(self, process: Process) -> None:
        """A process is in another slice now, and may have another owner by that."""

    def process_migrated(self, here: Member, there: Member) -> None:
        """A process is on another GPU now: one of its directories has taken the place of another."""

    def process_left(self, group: Member) -> None:
        """A process has no directory for that GPU any more, and lives on."""

    def slice_made(self, slice_: Slice) -> None:
        """There is a directory for one more slice."""

    def slice_gone(self, slice_: Slice) -> None:
        """The directory of a slice is no more."""

    def slice_renewed(self, slice_: Slice) -> None:
        """A slice that stays is another cgroup's: nothing is set on it, and it is root's."""
