"""The slices in which no program is to run on any GPU, kept as freezes and thaws are asked for.

A program that has no context yet is on no GPU, and it is not known which it will use. So what has it wait is a freeze
on all of them that are there: none can use one that is lost, nor be frozen there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from backend.core.member import Record
from backend.core.protocols import Gpu
from backend.process.identity import Group, Slice, SliceOn


class FrozenSlices:
    """See the module. Told of each group by :class:`backend.core.tally.Tally` and the population."""

    def __init__(self, gpus: Mapping[int, Gpu]) -> None:
        self._gpus = gpus
        self._on: dict[Slice, set[int]] = {}
        self._all: set[Slice] = set()
        self.watcher: Callable[[], None] = lambda: None
        """What is told that :meth:`highest` may say something else."""

    def asked(self, group: Group, frozen: bool) -> None:
        """A group is to be frozen from now on, by itself or by one above it, or not any more."""
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
        """A GPU was lost, or is back."""
        for slice_, on in self._on.items():
            self._turn(slice_, self._suffices(on))

    def left(self, record: Record, heir: Record | None) -> None:
        """A group has left the tree."""
        self.asked(record.group, False)

    def highest(self) -> Collection[Slice]:
        """Those of them that are below no other: what is below one of these is to be frozen, too."""
        return [slice_ for slice_ in self._all if slice_.parent not in self._all]

    def _suffices(self, on: Collection[int]) -> bool:
        """Whether a slice that is frozen on these GPUs is so on all that are there; with none there, on all of the
        tree."""
        there = {index for index, gpu in self._gpus.items() if not gpu.lost}
        return (there or self._gpus.keys()) <= set(on)

    def _turn(self, slice_: Slice, frozen: bool) -> None:
        if frozen != (slice_ in self._all):
            if frozen:
                self._all.add(slice_)
            else:
                self._all.discard(slice_)
            self.watcher()
