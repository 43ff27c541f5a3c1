"""What groups use of their GPU, and what they would use if they had it for themselves: from counters, looked at again
and again. Pure.

A program computes for a time s and does something else for a time z, again and again. Alone it uses s / (s + z) of the
GPU. Beside others s takes longer, so it uses a smaller part u of it, and has work that is not done for a part p of the
time; z is what is left. From u and p, which can be seen, it follows that alone it would use u / (u + 1 - p): all of a
GPU if it always has work, and as much as now if it never waits for another. Where requests come by themselves that is
an upper bound. More than its quota it has on no GPU, so it wants no more than that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import attrs

from ggroupfs.policies.balance.picture import Load, parts

LOOKS = 8
"""Over so many looks use and waiting are measured."""
FULL = 0.9
"""A GPU that is used for that part of the time has no time left that a group would have wanted."""
FAIR = 0.8
"""Part of what a group would get if all wanted all: using that, it wants more, where nothing tells whether it waits."""


@attrs.frozen
class Seen:
    """What the files say of a group on a GPU at one time."""

    name: str
    """Its name."""
    gpu: int
    """Index of the GPU."""
    used_us: int
    """gpu_usec: microseconds on the engine, ever."""
    waits: bool | None
    """Whether it has work that is not done; None where the machine cannot tell."""
    throttled_us: int = 0
    """throttled_usec: how long the scheduler kept it off the GPU, ever."""
    frozen: bool = False
    """Whether it is frozen: what it does not do then, it does not want."""
    held: int = 0
    """gmem.current, bytes."""
    swapped: int = 0
    """gmem.swap.current, bytes."""
    weight: int = 100
    """compute.weight."""
    priority: int = 8
    """compute.priority."""
    ceiling: float = 1.0
    """The part of the time that it may work, by its quota and those above it (compute.max)."""


@attrs.frozen
class _Look:
    at: float
    used_us: int
    throttled_us: int
    waits: bool | None


class Demand:
    """Remembers what was seen for a while."""

    def __init__(self, span: float) -> None:
        """`span` are the seconds over which use is measured."""
        self._span = span
        self._looks: dict[tuple[str, int], deque[_Look]] = {}

    def look(self, now: float, seen: list[Seen]) -> list[Load]:
        """One look at all groups, at the time `now`, seconds. What is not in it is forgotten. The loads are without
        bounds, and of one that has just come nothing is known yet: it wants nothing."""
        before, self._looks = self._looks, {}
        for one in seen:
            looks = before.get((one.name, one.gpu), deque())
            if looks and one.used_us < looks[-1].used_us:
                looks = deque()  # another one of that name, or a process of the slice has ended
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
        """Of all groups on a GPU."""
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
    """See the module: of the part of the time that a group uses, and the part in which it has work."""
    idle = 1.0 - min(1.0, max(use, waiting))
    return min(1.0, use / (use + idle)) if idle > 0.0 else 1.0


def _use(looks: deque[_Look]) -> float:
    seconds = looks[-1].at - looks[0].at
    return min(1.0, (looks[-1].used_us - looks[0].used_us) / 1e6 / seconds) if seconds > 0 else 0.0
