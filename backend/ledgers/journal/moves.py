"""The moves between GPUs in progress, kept over the death of a daemon.

They are kept with any ledger, the kernel's too, which has both groups of such a process and does not say which of them
is to stay.
"""

from __future__ import annotations

from collections.abc import Mapping

from backend.core.records import Move
from backend.ledgers.journal import state
from backend.ledgers.journal.file import Journal
from backend.process.identity import Process


class WrittenMoves:
    """A :class:`backend.core.protocols.Moves` in a journal. See the module."""

    def __init__(self, journal: Journal, names: Mapping[int, str]) -> None:
        """`names` has the UUID of each GPU, by index."""
        self._journal = journal
        self._names = dict(names)

    def left(self) -> Mapping[Process, Move]:
        indices = {uuid: index for index, uuid in self._names.items()}
        return {
            process: Move(indices[one.source], indices[one.target], one.before)
            for process, one in self._journal.state.moves.items()
            if one.source in indices and one.target in indices  # else of a GPU that is not served now
        }

    def begin(self, process: Process, move: Move) -> None:
        source, target = self._names[move.source], self._names[move.target]
        self._journal.commit(state.moving(process, state.Moving(source, target, move.before)))

    def end(self, process: Process) -> None:
        if process in self._journal.state.moves:
            self._journal.commit(state.moved(process))
