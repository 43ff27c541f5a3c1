"""The entries of the tree: a process, a slice, and the watchers of their comings and goings."""

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
"""Values of `Life.cgroup` that no cgroup of a slice has: for a cgroup that never came, and for one that came without
being looked at then. The root of cgroup2 has inode 1, and is no slice's."""

FOREVER = MAX
"""A timeout in milliseconds that never ends."""


@attrs.frozen
class Life:
    """The life of a slice that was made, or on which something was set: how long it stays
    (:mod:`backend.core.lives`)."""

    since_ms: int
    """Time when it was made, or last asked for anew, in milliseconds since boot."""
    cgroup: int = NEVER
    """The slice's cgroup, by :func:`backend.process.cgroups.ids`; NEVER, or CAME."""
    timeout_ms: int | None = None
    """Milliseconds that the cgroup has to come; None where its maker did not say, FOREVER for no end."""
    maker: int = 0
    """The user that made the slice by mkdir; root where it came to stay otherwise."""
    is_over: bool = False
    """Whether the cgroup is gone, and the slice stays only for what is below it."""


@attrs.define(eq=False)
class Resident:
    """A process of the tree."""

    process: Process
    """The process."""
    slice: Slice
    """The slice that it is counted in: that of its cgroup, or the nearest one above that exists."""
    cgroup: Slice
    """Its cgroup, when last looked at."""
    families: Families = ()
    """The families that it is in, each in the one before."""
    records: dict[int, Record] = attrs.field(factory=dict)
    """Its record on each GPU that it has a directory for, by GPU index."""
    contexts: set[int] = attrs.field(factory=set)
    """The GPUs that it was seen to have a context on. Changed by :meth:`Population.join` and `quit`."""
    moves: int = 0
    """Number of times that it was moved to another GPU."""
    unfollowed: bool = False
    """Whether the log already says that its cgroup is not followed."""

    @property
    def gpus(self) -> KeysView[int]:
        """The GPUs that it has a directory for."""
        return self.records.keys()

    @property
    def place(self) -> Slice:
        """The slice of its families below that of its cgroup: where the process belongs, unless that slice is
        refused."""
        return below(self.cgroup, self.families) if self.families else self.cgroup


@attrs.define(eq=False)
class SliceEntry:
    """A slice of the tree."""

    slice: Slice
    """The slice."""
    above: SliceEntry | None
    """The entry of the slice that it is in; None for the root."""
    depth: int = 0
    """Number of slices above it."""
    user: int = 0
    """The user that it is counted for (:mod:`backend.core.bounds`), from when it is made until it is gone."""
    given: int | None = None
    """The user that it was given to, with everything below it; None for none."""
    kept: bool = False
    """Whether it stays when nothing is below it: it was made by mkdir, or something was set on it."""
    unit: bool = False
    """Whether it belongs to an active unit, and so stays whatever becomes of its cgroup."""
    family: bool = False
    """Whether it is the slice of a family, which goes with its last process whatever was set on it."""
    children: set[Slice] = attrs.field(factory=set)
    """The slices directly below it."""
    members: dict[Process, Resident] = attrs.field(factory=dict)
    """The processes directly in it."""
    occupied: dict[SliceEntry, None] = attrs.field(factory=dict)
    """The entries directly below it that have a process in them or further below."""
    sharers: Counter[int] = attrs.field(factory=Counter)
    """Number of processes in it or below it that have a context on a GPU, by GPU index."""

    def admit(self, resident: Resident) -> None:
        """Note that a process is directly in the slice."""
        self.members[resident.process] = resident
        for gpu in resident.contexts:
            self.share(gpu, 1)
        entry = self
        while entry.above is not None and entry not in entry.above.occupied:
            entry.above.occupied[entry] = None
            entry = entry.above

    def dismiss(self, process: Process) -> None:
        """Note that a process is no longer directly in the slice."""
        for gpu in self.members.pop(process).contexts:
            self.share(gpu, -1)
        entry = self
        while entry.above is not None and not entry.members and not entry.occupied:
            del entry.above.occupied[entry]
            entry = entry.above

    def share(self, gpu: int, change: int) -> None:
        """Add `change` to the number of processes that have a context on a GPU, in the slice and in those above it."""
        entry: SliceEntry | None = self
        while entry is not None:
            entry.sharers[gpu] += change
            entry = entry.above


class Watcher(Protocol):
    """A watcher of comings and goings: the filesystem, which uses it to keep the kernel's dentries true."""

    def process_came(self, process: Process) -> None:
        """A directory was made for a process, or for another GPU in it."""

    def process_gone(self, process: Process) -> None:
        """The directory of a process is gone."""

    def process_moved(self, process: Process) -> None:
        """A process is in another slice now, which may have given it another owner."""

    def process_migrated(self, here: Member, there: Member) -> None:
        """A process is on another GPU now: its directory for that GPU replaced the one for the former."""

    def process_left(self, group: Member) -> None:
        """The directory of a process for one GPU is gone, and the process lives on."""

    def slice_made(self, slice_: Slice) -> None:
        """A directory was made for a slice."""

    def slice_gone(self, slice_: Slice) -> None:
        """The directory of a slice is gone."""

    def slice_renewed(self, slice_: Slice) -> None:
        """A slice that stays belongs to another cgroup now: nothing is set on it, and root owns it."""
