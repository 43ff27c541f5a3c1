"""The lives of slices, kept over the death of a daemon: with any ledger, as the kernel's books only say that slices
stay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from backend.core.entries import Life
from backend.ledgers.journal import state
from backend.ledgers.journal.file import Journal
from backend.process.identity import Slice


class WrittenLives:
    """A :class:`backend.core.lives.Memory` in a journal. See the module."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def kept(self) -> Mapping[Slice, Life]:
        return dict(self._journal.state.lives)

    def keep(self, slice_: Slice, life: Life, *, now: bool) -> None:
        if self._journal.state.lives.get(slice_) != life:
            (self._journal.commit if now else self._journal.later)(state.live(slice_, life))

    def forget(self, slices: Iterable[Slice]) -> None:
        known = self._journal.state.lives
        self._journal.later(*[state.live(slice_, None) for slice_ in slices if slice_ in known])
