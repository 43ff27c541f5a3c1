"""What TSGs had of their own, over the death of a daemon."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from backend.nvidia import levers
from backend.nvidia.discover import Tsg
from backend.nvidia.levers import Key
from backend.process.identity import Process


class Notes(Protocol):
    """A memory, over the death of a daemon, of what TSGs had of their own. For any thread."""

    def known(self, process: Process) -> Mapping[str, int]:
        """Timeslices, microseconds, by the names under which they were noted."""

    def note(self, process: Process, timeslices: Mapping[str, int]) -> None:
        """From now on these are to be given back, and no others."""


class NoNotes:
    """A memory of nothing."""

    def known(self, process: Process) -> Mapping[str, int]:
        return {}

    def note(self, process: Process, timeslices: Mapping[str, int]) -> None:
        pass


def noted(tsgs: Iterable[Tsg]) -> Mapping[str, int]:
    """The own timeslices of TSGs, microseconds, as they are noted."""
    return {f"{tsg.client:x}:{tsg.handle:x}": us for tsg, us in levers.shares(list(tsgs), 0).items()}


def recalled(known: Mapping[str, int]) -> Mapping[Key, int]:
    """The same, of what was noted."""
    return {_key(name): us for name, us in known.items()}


def _key(name: str) -> Key:
    client, _, handle = name.partition(":")
    return int(client, 16), int(handle, 16)
