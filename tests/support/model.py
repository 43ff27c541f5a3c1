"""The books kept the naive way: settings of each group, memory of each process, and sums made from scratch.

Slow, and so plain that it can be compared with the rules (docs/semantics.md) by reading. It shares no code with any
ledger; the effective protection is transcribed from the kernel's C.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Iterator
from typing import Any

from backend.core.records import MAX, Books, Peak
from backend.core.settings import SETTINGS
from backend.process.identity import Group, Process


def effective_protection(
    usage: int, parent_usage: int, setting: int, parent_effective: int, siblings_protected: int
) -> int:
    """effective_protection() of Linux's mm/page_counter.c, line by line, with memory_recursiveprot."""
    protected = min(usage, setting)
    if siblings_protected > parent_effective:
        return protected * parent_effective // siblings_protected
    ep = protected
    if parent_effective > siblings_protected and parent_usage > siblings_protected and usage > protected:
        unclaimed = parent_effective - siblings_protected
        unclaimed *= usage - protected
        unclaimed //= parent_usage - siblings_protected
        ep += unclaimed
    return ep


class NaiveLedger:
    """Settings of each group and memory of each process, and nothing else: all other figures are computed on demand."""

    def __init__(self) -> None:
        self.above: dict[Group, Group | None] = {}
        self.held: Counter[Group] = Counter()
        self.swapped: Counter[Group] = Counter()
        self.asked: dict[Group, dict[str, Any]] = {}
        self.peaks: dict[Peak, Counter[Group]] = {"peak": Counter(), "swap_peak": Counter()}
        self.ever: dict[Peak, Counter[Group]] = {"peak": Counter(), "swap_peak": Counter()}
        self.counts: dict[Group, Counter[str]] = {}
        self.pressed: dict[Group, tuple[int, int]] = {}
        self.off: dict[Group, tuple[int, int]] = {}
        self.next_use: Counter[Group] = Counter()

    def enter(self, group: Group, above: Group | None, high: int = MAX) -> None:
        self.above[group] = above
        self.asked[group] = {setting.field: setting.default for setting in SETTINGS} | {"high": high}
        self.counts[group] = Counter()

    def leave(self, group: Group) -> None:
        for table in (self.above, self.asked, self.counts, self.held, self.swapped, self.pressed, self.off):
            table.pop(group, None)
        self.next_use.pop(group, None)
        for peaks in (*self.peaks.values(), *self.ever.values()):
            peaks.pop(group, None)

    def path(self, group: Group) -> Iterator[Group]:
        """Yield a group and those above it."""
        level: Group | None = group
        while level is not None:
            yield level
            level = self.above[level]

    def children(self, group: Group) -> list[Group]:
        return [child for child, above in self.above.items() if above == group]

    def leaves(self, top: Group) -> list[Group]:
        """Return the processes at or below a group."""
        return [g for g in self.above if isinstance(g.node, Process) and top in self.path(g)]

    def current(self, group: Group) -> int:
        return self.sum(self.held, group)

    def swap(self, group: Group) -> int:
        return self.sum(self.swapped, group)

    def sum(self, table: Counter[Group], group: Group) -> int:
        """Return the sum over a table for the processes at or below a group."""
        return sum(nbytes for leaf, nbytes in table.items() if nbytes and group in self.path(leaf))

    def raise_peaks(self) -> None:
        """Raise all peaks to the present figures; called after every step."""
        for group in self.above:
            for peak in self.peaks:
                figure = self.figure(group, peak)
                for highest in (self.peaks[peak], self.ever[peak]):
                    highest[group] = max(highest[group], figure)

    def figure(self, group: Group, peak: Peak) -> int:
        """Return the present value of the figure that a peak is the maximum of."""
        return self.current(group) if peak == "peak" else self.swap(group)

    def reset_peak(self, group: Group, peak: Peak) -> None:
        self.peaks[peak][group] = self.figure(group, peak)

    def books(self, group: Group) -> Books:
        nbytes, sequence = self.pressed.get(group, (0, 0))
        off_all, off_gr = self.off.get(group, (0, 0))
        figures: dict[str, Any] = {**self.asked[group], **self.counts[group]}
        return Books(
            current=self.current(group),
            swap=self.swap(group),
            peak=self.peaks["peak"][group],
            swap_peak=self.peaks["swap_peak"][group],
            peak_ever=self.ever["peak"][group],
            swap_peak_ever=self.ever["swap_peak"][group],
            pressure_bytes=nbytes,
            pressure_seq=sequence,
            off_all=off_all,
            off_gr=off_gr,
            **figures,
        )

    def limit(self, group: Group) -> int:
        """Return the lower one of a group's limits."""
        return min(int(self.asked[group]["high"]), int(self.asked[group]["limit_max"]))

    def room(self, group: Group) -> int:
        """Return how much more a group's own swap.max admits."""
        return max(0, int(self.asked[group]["swap_max"]) - self.swap(group))

    def most(self, top: Group, extra: Counter[Group] | None = None) -> int:
        """Return the most that can leave the GPU below `top` if `extra` were held too.

        Processes give one after the other what they can: the limits nest, so no order yields more than another
        (test_reclaimable_is_the_most_that_any_way_of_taking_takes tries all of them).
        """
        room = {group: self.room(group) for group in self.above}
        total = 0
        for leaf in self.leaves(top):
            gives = min([self.held[leaf] + (extra or Counter())[leaf]] + [room[level] for level in self.path(leaf)])
            total += gives
            for level in self.path(leaf):
                room[level] -= gives
        return total

    def refusal(self, group: Group, nbytes: int) -> tuple[int, Group | None]:
        """Return the errno of a charge, 0 for none, and the level whose limit_max it met. The event counts at the
        lowest level that the charge would put over MAX, over its limit_max, or over its high with no way back under
        it."""
        for level in self.path(group):
            holds, asked = self.current(level) + nbytes, self.asked[level]
            if holds > MAX:
                return errno.ENOMEM, None
            if (beyond := holds - asked["limit_max"]) > 0:
                return errno.EAGAIN if beyond <= self.most(level) else errno.ENOMEM, level
            if holds - asked["high"] > max(0, self.most(level, Counter({group: nbytes}))):
                return errno.ENOMEM, None
        return 0, None

    def protected(self, group: Group, top: Group) -> int:
        """Return the effective low, as the kernel computes it (tests.t2_parts.t2_reclaim)."""
        above, held = self.above[group], self.current(group)
        if group == top or above is None:
            return 0
        if above == top:
            return min(held, int(self.asked[group]["low"]))
        asked = sum(min(self.current(child), self.asked[child]["low"]) for child in self.children(above))
        ceiling = self.protected(above, top)
        return effective_protection(held, self.current(above), self.asked[group]["low"], ceiling, asked)
