"""The totals of each group, kept over the death of a daemon: with any ledger, as the kernel's counts only memory."""

from __future__ import annotations

from collections.abc import Mapping

from backend.ledgers.journal import state
from backend.ledgers.journal.file import Journal
from backend.process.identity import Group, Node


class WrittenTotals:
    """A :class:`backend.core.totals.Memory` in a journal. See the module."""

    def __init__(self, journal: Journal, names: Mapping[int, str]) -> None:
        """`names` has the UUID of each GPU, by index."""
        self._journal = journal
        self._names = dict(names)

    def kept(self) -> Mapping[tuple[int, Node], Mapping[str, int]]:
        indices = {uuid: index for index, uuid in self._names.items()}
        return {
            (indices[uuid], node): figures
            for (uuid, node), figures in self._journal.state.done.items()
            if uuid in indices  # else of a GPU that is not served now, and may be again
        }

    def keep(self, figures: Mapping[Group, Mapping[str, int]]) -> None:
        known = self._journal.state.done
        changes = {(self._names[group.gpu], group.node): now for group, now in figures.items()}
        told = [state.done(key, now) for key, now in changes.items() if now != known.get(key, {})]
        if told:
            self._journal.commit(*told)
