"""Makes room for groups that should go to another GPU: moves them, or a best-effort neighbour.

The core of the policy balance chooses the move, and decides which groups were moved too recently.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping

import trio

from ggroupfs.client import Group, Tree
from ggroupfs.policies.balance.core import Core, Pace
from ggroupfs.policies.balance.demand import LOOKS
from ggroupfs.policies.balance.eyes import Eyes, Watched
from ggroupfs.policies.balance.mover import DEADLINE_S, carry_out
from ggroupfs.policies.balance.picture import Bound, Move
from ggroupfs.policies.slo.core import WHOLE
from ggroupfs.policies.slo.settings import Settings, Target

log = logging.getLogger(__name__)


class Moves:
    """The moves of the policy slo. Processes that the configuration does not name are counted, and never moved."""

    def __init__(self, tree: Tree, settings: Settings) -> None:
        places = Counter(target.place for target in settings.targets)
        watched = [_watched(target, movable=places[target.place] == 1) for target in settings.targets]
        pace = settings.pace
        self._eyes = Eyes(tree, watched, LOOKS * settings.interval, others=False)
        self._core = Core(Pace(window=pace.window, silence=pace.silence, cooldown=pace.cooldown))
        self._cooldown = pace.cooldown
        self._since: dict[str, float] = {}
        self._told: set[str] = set()

    def sample(self, now: float, name: str, latency: float) -> None:
        """Record a latency of a group, in seconds."""
        self._core.sample(now, name, latency)

    async def step(self, asking: Mapping[int, Collection[str]]) -> list[Move]:
        """Let one interval pass, and return the moves that were made.

        `asking` gives the names of the groups that should go, by the index of their GPU.
        """
        picture = await self._eyes.look()
        now = trio.current_time()
        picture = self._core.look(now, picture)
        asked = {name for names in asking.values() for name in names}
        self._told &= asked
        self._since = {name: self._since.get(name, now) for name in asked}
        for gpu, names in asking.items():
            plan = self._core.relieve(now, picture, gpu, names) if names else None
            if plan is not None:
                made = await carry_out(self._core, picture, plan, self._group, DEADLINE_S)
                for move in made:
                    self._eyes.moved(move.load.name, move.to)
                self._since.clear()
                return made
            for name in set(names) - self._told:
                is_short = picture.find(name, gpu) is not None and picture.strain(name, gpu) > 1.0
                if is_short and now - self._since[name] >= self._cooldown:
                    self._told.add(name)
                    log.warning("%s: no move from GPU %d would help it now", name, gpu)
        return []

    def _group(self, name: str, gpu: int) -> Group:
        return Group(self._eyes.path(name, gpu))


def _watched(target: Target, movable: bool) -> Watched:
    """Describe a group to :class:`Eyes`. A place that is configured on two GPUs stays on both."""
    bounds = target.bounds
    bound = None if bounds is None else Bound(bounds.upper, bounds.least / WHOLE)
    return Watched(target.name, target.place, bound, movable, target.gpu)
