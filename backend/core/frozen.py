"""The slices in which no program may run on any GPU, kept up to date as freezes and thaws are asked for.

A program without a context is on no GPU yet, and which one it will use is unknown. So it has to wait where its slice is
frozen on every GPU that is there; a lost GPU can neither be used nor frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from backend.core.member import Record
from backend.core.protocols import Gpu
from backend.process.identity import Group, Slice, SliceOn


class FrozenSlices:
    """See the module. :class:`backend.core.tally.Tally` and the population report each group to it."""

    def __init__(self, gpus: Mapping[int, Gpu]) -> None:
        self._gpus = gpus
        self._on: dict[Slice, set[int]] = {}
        self._all: set[Slice] = set()
        self.watcher: Callable[[], None] = lambda: None
        """Called when the result of :meth:`highest` may have changed."""

    def asked(self, group: Group, frozen: bool) -> None:
        """Note that a group is, or no longer is, to be frozen, by itself or by one above it."""
        if not isinstance(group, SliceOn):
            return
        on = self._on.setdefault(group.slice, set())
        if frozen:
            on.add(group.gpu)
        else:
            on.discard(group.gpu)
        if not on:
            del self._on[group.slice]
        self._turn(group.slice, self._suffices(on))

    def presence(self) -> None:
        """Note that a GPU was lost, or is back."""
        for slice_, on in self._on.items():
            self._turn(slice_, self._suffices(on))

    def left(self, record: Record, heir: Record | None) -> None:
        """Note that a group left the tree."""
        self.asked(record.group, False)

    def highest(self) -> Collection[Slice]:
        """Return the frozen slices that are below no other frozen slice: everything below them is frozen too."""
        return [slice_ for slice_ in self._all if slice_.parent not in self._all]

    def _suffices(self, on: Collection[int]) -> bool:
        """Return whether a slice frozen on the GPUs `on` is frozen on all that are there; if none is there, on all of
        the tree."""
        there = {index for index, gpu in self._gpus.items() if not gpu.lost}
        return (there or self._gpus.keys()) <= set(on)

    def _turn(self, slice_: Slice, frozen: bool) -> None:
        if frozen != (slice_ in self._all):
            if frozen:
                self._all.add(slice_)
            else:
                self._all.discard(slice_)
            self.watcher()
