"""Levers of the policy `lanes` that are only noted."""

from __future__ import annotations


class NoLevers:
    """Levers that have nothing on them, and a list of what was pulled."""

    capacity = 100

    def __init__(self) -> None:
        self.pulled: list[tuple[str, str]] = []
        """In that order."""
        self.stuck: set[str] = set()
        """Jobs that are to be thawed in vain."""

    def add(self, job: str, pid: int) -> None:
        self.pulled.append(("add", job))

    def discard(self, job: str) -> None:
        self.pulled.append(("discard", job))

    def thaw(self, job: str) -> None:
        self.pulled.append(("thaw", job))

    def freeze(self, job: str) -> None:
        self.pulled.append(("freeze", job))
