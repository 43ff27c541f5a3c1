"""Owners and modes of the tree's files, kept over the death of a daemon. Owners of slices are in the books as well."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from backend.ledgers.journal import state
from backend.ledgers.journal.file import Journal
from backend.ledgers.journal.state import Owned, Subject
from backend.process.identity import Group, Node, group_on


class Attributes:
    """A :class:`ggroupfs.fs.keeper.Keeper` that writes into a journal."""

    def __init__(self, journal: Journal, names: Mapping[int, str]) -> None:
        """`names` has the UUID of each GPU, by index."""
        self._journal = journal
        self._names = names

    def kept(self) -> Iterable[tuple[Group | Node | str, str, Owned]]:
        indices = {uuid: index for index, uuid in self._names.items()}
        for subject, files in list(self._journal.state.given.items()):
            for file, owned in list(files.items()):
                if not isinstance(subject, tuple):
                    yield subject, file, owned
                elif subject[0] in indices:  # else of a GPU that is not served now, and may be again
                    yield group_on(subject[1], indices[subject[0]]), file, owned

    def keep(self, subject: Group | Node | str, file: str, owned: Owned) -> None:
        self._journal.commit(state.give(self._key(subject), file, owned))

    def forget(self, subject: Group | Node | str) -> None:
        if self._key(subject) in self._journal.state.given:
            self._journal.commit(state.forget(self._key(subject)))

    def _key(self, subject: Group | Node | str) -> Subject:
        return (self._names[subject.gpu], subject.node) if isinstance(subject, Group) else subject
