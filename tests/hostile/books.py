"""The sums of the books, read through the mount: each slice has what its children have, and no figure is impossible."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs

from backend.core.records import MAX, OVERCOMMIT
from backend.process.identity import cgroup_of
from ggroupfs.client.reading import branches, content, flat, members

FIGURES_MOST = 1 << 53
"""Bound that no count of events, bytes or microseconds of a run reaches."""
READINGS = 4
"""Number of equal readings in a row after which a wrong sum will not come right by itself."""
PAUSE_S = 0.02
"""Seconds between two of them."""


@attrs.frozen
class Figures:
    """The contents of a group's files."""

    where: str
    current: int
    swap: int


class Books:
    """The books of one mount."""

    def __init__(self, mount: Path, processes: int) -> None:
        """`processes` is the number that may be in the tree."""
        self._mount = mount
        self._gpus = [int(entry.name) for entry in (mount / "gpus").iterdir() if not entry.is_symlink()]
        self._capacities = {gpu: int((mount / f"gpus/{gpu}/gmem.capacity").read_text()) for gpu in self._gpus}
        self._processes = processes

    def check(self, what: str, looked: Callable[[], None]) -> None:
        """Wait until the sums are right, with programs that do nothing; AssertionError where they stay wrong, and at
        once for impossible figures.

        A program that was moved is counted in its old place until the daemon has looked at it, which may take any time.
        So wrong sums are a failure only if nothing has changed after the daemon has `looked` at every process.
        """
        before: Sequence[str] = ()
        while wrong := self._lasting():
            assert wrong != before, f"{what}: {wrong[:8]}"
            before = wrong
            looked()

    def _lasting(self) -> Sequence[str]:
        """Return what is wrong several times in a row; nothing as soon as everything adds up."""
        wrong: Sequence[str] = ()
        equal = 0
        while equal < READINGS:
            before = wrong
            try:
                wrong = self._wrong()
            except OSError as error:
                wrong = [f"{error}"]  # the group went meanwhile
            if not wrong:
                return ()
            equal = equal + 1 if wrong == before else 1
            time.sleep(PAUSE_S)
        return wrong

    def _wrong(self) -> Sequence[str]:
        """Return what does not add up."""
        wrong: list[str] = []
        below: dict[tuple[str, int], list[Figures]] = defaultdict(list)
        known: dict[tuple[str, int], Figures] = {}
        for member in members(self._mount):
            figures = self._read(str(member.path), member.gpu, 1)
            below[cgroup_of(member.pid).path, member.gpu].append(figures)
        for branch in branches(self._mount):
            if branch.slice == "/":
                continue
            figures = known[branch.slice, branch.gpu] = self._read(str(branch.path), branch.gpu, self._processes)
            below[os.path.dirname(branch.slice), branch.gpu].append(figures)
        for (path, gpu), parts in below.items():
            if path == "/":
                current = int(content(self._mount / f"gpus/{gpu}/gmem.current"))
                if current != sum(part.current for part in parts):
                    wrong.append(f"GPU {gpu}: {current} is not the sum of {parts}")
            elif (path, gpu) not in known:
                wrong.append(f"{path} on GPU {gpu} is not there, and has {parts}")
        for (path, gpu), figures in known.items():
            parts = below.get((path, gpu), [])
            for name in ("current", "swap"):
                if getattr(figures, name) != sum(getattr(part, name) for part in parts):
                    wrong.append(f"{path} on GPU {gpu}: {name} {getattr(figures, name)} is not the sum of {parts}")
        return wrong

    def _read(self, group: str, gpu: int, processes: int) -> Figures:
        """Return the figures of a group. AssertionError for impossible ones."""
        current, swap = int(content(f"{group}/gmem.current")), int(content(f"{group}/gmem.swap.current"))
        most = OVERCOMMIT * self._capacities[gpu] * processes
        assert 0 <= current <= most, f"{group}: gmem.current {current}"
        assert 0 <= swap <= most, f"{group}: gmem.swap.current {swap}"
        for name in ("gmem.stat", "gmem.events"):
            self._possible(group, name, flat(content(f"{group}/{name}")))
        return Figures(group, current, swap)

    @staticmethod
    def _possible(group: str, name: str, figures: Mapping[str, int]) -> None:
        for key, value in figures.items():
            most = MAX if key == "exchanged_bytes" else FIGURES_MOST  # reported by a program itself
            assert 0 <= value <= most, f"{group}/{name}: {key} {value}"
