"""Levers of the policy `lanes` that only record calls."""

from __future__ import annotations


class NoLevers:
    """Levers without hardware, and a list of the calls to them."""

    capacity = 100

    def __init__(self) -> None:
        self.pulled: list[tuple[str, str]] = []
        """Calls in their order."""
        self.stuck: set[str] = set()
        """Jobs whose thaw has no effect."""

    def add(self, job: str, pid: int) -> None:
        self.pulled.append(("add", job))

    def discard(self, job: str) -> None:
        self.pulled.append(("discard", job))

    def thaw(self, job: str) -> None:
        self.pulled.append(("thaw", job))

    def freeze(self, job: str) -> None:
        self.pulled.append(("freeze", job))
