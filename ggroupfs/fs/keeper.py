"""Who knows whose files are when the daemon is gone: the seam between the tree and a journal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from backend.ledgers.journal.state import Owned
from backend.process.identity import Group, Process, Slice

Subject = Group | Process | Slice | str
"""What a directory is of: a group's control files, a process, a slice, or ``root``, ``gpus``."""


class Keeper(Protocol):
    """See the module, and :class:`backend.ledgers.journal.attributes.Attributes`."""

    def kept(self) -> Iterable[tuple[Subject, str, Owned]]:
        """What a daemon before us knew: of what a directory is, the name of a file in it or none, and whose it is."""

    def keep(self, subject: Subject, file: str, owned: Owned) -> None:
        """A file, or the directory itself, is somebody's from now on."""

    def forget(self, subject: Subject) -> None:
        """The directory is gone."""


class Nobody:
    """A Keeper that keeps nothing."""

    def kept(self) -> Iterable[tuple[Subject, str, Owned]]:
        return ()

    def keep(self, subject: Subject, file: str, owned: Owned) -> None:
        pass

    def forget(self, subject: Subject) -> None:
        pass
