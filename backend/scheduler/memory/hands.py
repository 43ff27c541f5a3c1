"""Hands: what the switch does to programs, and what it knows of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from backend.scheduler.memory.claims import Name
from backend.scheduler.memory.planner import Plan, Program


class Hands(Protocol):
    """See the module. What waits may be cancelled, and raises OSError; that of a program that is gone is none."""

    def programs(self) -> Mapping[Name, Program]:
        """The programs that contend, as they are now."""

    def rooms(self) -> Mapping[int, int]:
        """What all claims have room for on each GPU, bytes. None while it is lost: nothing waits for its turn then."""

    def chunk(self, gpu: int) -> int:
        """Bytes in the largest part of memory that moves as a whole on a GPU: fewer may not come at all."""

    def is_off(self, name: Name) -> bool:
        """Whether a program waits for its turn, as it was had to, on all of its GPUs."""

    def is_on(self, name: Name) -> bool:
        """Whether a program waits for a turn on none of its GPUs."""

    def is_drained(self, name: Name) -> bool:
        """Whether all that a program launched before its turn ended has run, on all of its GPUs."""

    def is_stuck(self, name: Name) -> bool:
        """Whether a program that waits could not be drained, and is waited for no more: nothing of it moves."""

    async def end(self, name: Name, leaves: Mapping[int, int]) -> bool:
        """Ends the turn of a program on each of its GPUs, of which so many bytes there are to go before its next one:
        returns once it is off, or drains, gate first; and whether it is drained on all of them."""

    async def begin(self, name: Name) -> None:
        """Begins the turn of a program, on each of its GPUs."""

    async def evict(self, gpu: int, name: Name, nbytes: int) -> int:
        """Moves so many bytes of a program to the host, what it uses last first; returns how many those were."""

    async def fetch(self, gpu: int, name: Name, nbytes: int) -> int:
        """Moves at most so many bytes of the working set of a program to the GPU; returns how many those were."""

    def planned(self, plan: Plan) -> None:
        """Takes note of which programs have turns from now on, and which of them wait for one."""

    def turned(self, names: frozenset[Name]) -> None:
        """Takes note that a turn began, of those programs."""

    async def news(self) -> None:
        """Returns once anything else may be known of the programs, or some time has passed."""
