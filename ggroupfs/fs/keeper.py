"""The interface between the tree and a journal that remembers the owners of files for the next daemon."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from backend.ledgers.journal.state import Owned
from backend.process.identity import Group, Process, Slice

Subject = Group | Process | Slice | str
"""Subject of a directory: a group (its control files), a process, a slice, or the words ``root`` and ``gpus``."""


class Keeper(Protocol):
    """Remembers owners of files; see :class:`backend.ledgers.journal.attributes.Attributes`."""

    def kept(self) -> Iterable[tuple[Subject, str, Owned]]:
        """Return the records of the previous daemon: subject of the directory, name of the file, and owner.

        The name is "" for the directory itself.
        """

    def keep(self, subject: Subject, file: str, owned: Owned) -> None:
        """Remember the owner of a file, or of the directory itself if `file` is ""."""

    def forget(self, subject: Subject) -> None:
        """Forget a directory that is gone."""


class Nobody:
    """A Keeper that remembers nothing."""

    def kept(self) -> Iterable[tuple[Subject, str, Owned]]:
        return ()

    def keep(self, subject: Subject, file: str, owned: Owned) -> None:
        pass

    def forget(self, subject: Subject) -> None:
        pass
