"""Notes of the native timeslices of TSGs, which outlive the daemon."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from backend.nvidia import levers
from backend.nvidia.discover import Tsg
from backend.nvidia.levers import Key
from backend.process.identity import Process


class Notes(Protocol):
    """A record, which outlives the daemon, of the native timeslices of TSGs. For any thread."""

    def known(self, process: Process) -> Mapping[str, int]:
        """Return the noted timeslices of a process, microseconds, by the names under which they were noted."""

    def note(self, process: Process, timeslices: Mapping[str, int]) -> None:
        """Replace the notes of a process: the timeslices that have to be given back to its TSGs,
        microseconds by name.
        """


class NoNotes:
    """Notes that keep nothing."""

    def known(self, process: Process) -> Mapping[str, int]:
        return {}

    def note(self, process: Process, timeslices: Mapping[str, int]) -> None:
        pass


def noted(tsgs: Iterable[Tsg]) -> Mapping[str, int]:
    """Return the native timeslices of TSGs as they are noted: microseconds by name."""
    return {f"{tsg.client:x}:{tsg.handle:x}": us for tsg, us in levers.shares(list(tsgs), 0).items()}


def recalled(known: Mapping[str, int]) -> Mapping[Key, int]:
    """Return noted timeslices by (client, handle), microseconds."""
    return {_key(name): us for name, us in known.items()}


def _key(name: str) -> Key:
    client, _, handle = name.partition(":")
    return int(client, 16), int(handle, 16)
