"""Estimates the GPU time that each group uses, and that it would use alone, from repeated readings. Pure.

A program alternates between computing for a time s and something else for a time z. Alone it uses s / (s + z) of the
GPU. With competition s takes longer, so the program uses a smaller part u, and has unfinished work for a part p of the
time; z is the rest. Both u and p can be observed, and it follows that alone the program would use u / (u + 1 - p): all
of a GPU if it always has work, and as much as now if it never waits for another. For requests that arrive independently
this is an upper bound. A quota limits a program on every GPU, so it wants no more than its quota.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import attrs

from ggroupfs.policies.balance.picture import Load, parts

LOOKS = 8
"""Looks over which use and waiting are measured."""
FULL = 0.9
"""Utilization above which a GPU has no time left that a group could have wanted."""
FAIR = 0.8
"""Fraction of its fair share above which a group is assumed to want more, if the machine cannot tell whether it
waits."""


@attrs.frozen
class Seen:
    """The figures of a group on a GPU at one time, from the control files."""

    name: str
    """Name of the group."""
    gpu: int
    """Index of the GPU."""
    used_us: int
    """Time on the engine so far, microseconds: gpu_usec."""
    waits: bool | None
    """Whether the group has unfinished work; None if the machine cannot tell."""
    throttled_us: int = 0
    """Time for which the scheduler has kept the group off the GPU so far, microseconds: throttled_usec."""
    frozen: bool = False
    """Whether the group is frozen; unfinished work does not count as demand then."""
    held: int = 0
    """Memory on the GPU, bytes: gmem.current."""
    swapped: int = 0
    """Memory in the host, bytes: gmem.swap.current."""
    weight: int = 100
    """Value of compute.weight."""
    priority: int = 8
    """Value of compute.priority."""
    ceiling: float = 1.0
    """Fraction of the time that the group may work, by its own quota and those above it (compute.max)."""


@attrs.frozen
class _Look:
    at: float
    used_us: int
    throttled_us: int
    waits: bool | None


class Demand:
    """The recent figures of all groups, and the demand that follows from them."""

    def __init__(self, span: float) -> None:
        """`span` is the time over which use is measured, in seconds."""
        self._span = span
        self._looks: dict[tuple[str, int], deque[_Look]] = {}

    def look(self, now: float, seen: list[Seen]) -> list[Load]:
        """Take in one look at all groups at the time `now`, in seconds, and return their loads, without bounds.

        Groups missing from `seen` are forgotten. A group that has just come has no known use, and so no demand yet.
        """
        before, self._looks = self._looks, {}
        for one in seen:
            looks = before.get((one.name, one.gpu), deque())
            if looks and one.used_us < looks[-1].used_us:
                looks = deque()  # another group of that name, or a process of the slice has ended
            waits = one.waits
            if looks and one.throttled_us > looks[-1].throttled_us:
                waits = True
            looks.append(_Look(now, one.used_us, one.throttled_us, waits and not one.frozen))
            while len(looks) > 2 and now - looks[1].at >= self._span:
                looks.popleft()
            self._looks[one.name, one.gpu] = looks
        loads = []
        for gpu in {one.gpu for one in seen}:
            here = {one.name: one for one in seen if one.gpu == gpu}
            use = {name: _use(self._looks[name, gpu]) for name in here}
            for name, want in self._wants(here, use).items():
                one = here[name]
                loads.append(
                    Load(name, gpu, want, one.held, one.swapped, use[name], weight=one.weight, priority=one.priority)
                )
        return loads

    def _wants(self, here: Mapping[str, Seen], use: Mapping[str, float]) -> dict[str, float]:
        """Demand of each group on one GPU."""
        is_full = sum(use.values()) >= FULL
        fair = parts(Load(one.name, one.gpu, 1.0, 0, weight=one.weight, priority=one.priority) for one in here.values())
        wants = {}
        for name, one in here.items():
            told = [look.waits for look in self._looks[name, one.gpu] if look.waits is not None]
            if told:
                waiting = sum(told) / len(told)
            else:
                waiting = 1.0 if is_full and use[name] >= FAIR * fair[name] else use[name]
            wants[name] = min(want(use[name], waiting), one.ceiling)
        return wants


def want(use: float, waiting: float) -> float:
    """Demand of a group that uses the part `use` of the time and has work for the part `waiting`; see the module."""
    idle = 1.0 - min(1.0, max(use, waiting))
    return min(1.0, use / (use + idle)) if idle > 0.0 else 1.0


def _use(looks: deque[_Look]) -> float:
    seconds = looks[-1].at - looks[0].at
    return min(1.0, (looks[-1].used_us - looks[0].used_us) / 1e6 / seconds) if seconds > 0 else 0.0
