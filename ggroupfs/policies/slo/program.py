"""The running policy: takes reports, looks for the groups, asks the core once an interval, and acts."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterable, Sequence

import attrs
import trio

from ggroupfs.client import GONE, Tree, emit
from ggroupfs.policies.config import Table
from ggroupfs.policies.slo.core import WHOLE, Change, Core, Decision, Migrate
from ggroupfs.policies.slo.levers import By, Levers, wanted
from ggroupfs.policies.slo.moves import Moves
from ggroupfs.policies.slo.reports import Desk, receive, receiving
from ggroupfs.policies.slo.samples import Interval
from ggroupfs.policies.slo.settings import Settings, Target

log = logging.getLogger(__name__)

RELEASE_S = 10.0
"""Seconds within which all settings have to be restored."""


class Tenant:
    """A configured group and its present state."""

    def __init__(self, tree: Tree, target: Target) -> None:
        self.target = target
        """Configuration of the group."""
        self.interval = Interval(target.statistic)
        """Latencies that the group reports."""
        self._tree = tree
        self._group = target.group(tree)
        self.levers = Levers(self._group, self._is_spatial)
        """Control files that the policy sets."""
        self.is_present = False
        """Whether a process of the group has a context on the GPU."""
        self._over = False

    async def follow(self, gpu: int) -> None:
        """Follow a group to another GPU.

        Settings of a process have moved with it; those of a slice are restored here.
        """
        self.target = attrs.evolve(self.target, gpu=gpu)
        self._group = self.target.group(self._tree)
        self.is_present = False
        if self.target.place.pid is not None:
            self.levers.follow(self._group)
        else:
            await self.levers.release()
            self.levers = Levers(self._group, self._is_spatial)

    async def _is_spatial(self) -> bool:
        return await self.target.is_spatial(self._tree)

    async def look(self) -> bool:
        """Look for the group, and return whether it came or went.

        A process that is gone does not come back: a later process with its pid is another one.
        """
        before = self.is_present
        try:
            populated = not self._over and (await self._group.flat("compute.events")).get("populated") == 1
        except OSError as error:
            if error.errno not in GONE:
                return False  # presence unknown
            populated = False
            self.levers.forget()
            self._over = self._over or (before and self.target.place.pid is not None)
        self.is_present = populated
        return populated != before


class Card:
    """One GPU and its groups."""

    def __init__(self, index: int, settings: Settings, moves: Moves | None) -> None:
        self._index = index
        self._priority, self._by, self._period_us = settings.priority, settings.by, settings.period_us
        self._core = Core(settings.pace, settings.reserve)
        self._tenants: list[Tenant] = []
        self._moves = moves
        self.asking: set[str] = set()
        """Names of groups that should go to another GPU."""

    async def step(self, now: float) -> None:
        """Let one interval pass."""
        made: list[Decision] = []
        for tenant in self._tenants:
            name, bounds = tenant.target.name, tenant.target.bounds
            changed = await tenant.look()
            if bounds is None:
                continue
            if changed:
                made += self._core.come(now, name, bounds) if tenant.is_present else self._core.go(name)
            sample = tenant.interval.take()
            if sample is not None:
                self._core.sample(now, name, sample)
                if self._moves is not None:
                    self._moves.sample(now, name, sample)
        present = [tenant for tenant in self._tenants if tenant.is_present]
        made += self._core.decide(now, contended=len(present) > 1 or self._by is not By.WEIGHT)
        for decision in made:
            self._tell(decision)
        await self._apply(present)

    def leave(self, name: str) -> Tenant:
        """Remove a group that has been moved away, and return it."""
        (tenant,) = (one for one in self._tenants if one.target.name == name)
        self._tenants.remove(tenant)
        for decision in self._core.go(name):
            self._tell(decision)
        return tenant

    def enter(self, tenant: Tenant) -> None:
        """Add a group that has been moved here.

        Its reports from the move itself, during which it stood still, are dropped.
        """
        tenant.interval.take()
        self._tenants.append(tenant)

    async def _apply(self, present: Sequence[Tenant]) -> None:
        others = sum(tenant.target.bounds is None for tenant in present)
        critical, rest = wanted(self._core.shares, others, self._priority, self._by, self._period_us)
        for tenant in present:
            await tenant.levers.apply(critical.get(tenant.target.name, rest))

    def _tell(self, decision: Decision) -> None:
        name, index = decision.group, self._index
        if isinstance(decision, Change):
            share, was = decision.share / WHOLE, decision.was / WHOLE
            log.info("%s: share of GPU %d from %g to %g", name, index, was, share)
            emit("share", group=name, gpu=index, share=share, was=was, latency_ms=_ms(decision.latency))
        elif isinstance(decision, Migrate):
            self.asking.add(name)
            share, missing = decision.share / WHOLE, decision.missing / WHOLE
            level = logging.WARNING if self._moves is None else logging.INFO
            words = "%s: GPU %d has no share left for it: it should migrate; %g GPU is missing"
            log.log(level, words, name, index, missing)
            emit("migrate", group=name, gpu=index, share=share, missing=missing, latency_ms=_ms(decision.latency))
        else:
            self.asking.discard(name)
            log.info("%s: may stay on GPU %d", name, index)
            emit("stay", group=name, gpu=index)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)


class Cards:
    """All GPUs that have a configured group."""

    def __init__(self, settings: Settings, tenants: Iterable[Tenant], moves: Moves | None) -> None:
        self._settings, self._moves = settings, moves
        self._cards: dict[int, Card] = {}
        for tenant in tenants:
            self._card(tenant.target.gpu).enter(tenant)

    async def step(self) -> None:
        """Let one interval pass on all GPUs, and make the moves that they ask for."""
        for _, card in sorted(self._cards.items()):
            await card.step(trio.current_time())
        if self._moves is not None:
            for move in await self._moves.step({index: card.asking for index, card in self._cards.items()}):
                tenant = self._card(move.load.gpu).leave(move.load.name)
                await tenant.follow(move.to)
                self._card(move.to).enter(tenant)

    def _card(self, index: int) -> Card:
        if index not in self._cards:
            self._cards[index] = Card(index, self._settings, self._moves)
        return self._cards[index]


async def _check(tree: Tree, settings: Settings) -> bool:
    """Return whether groups can be moved.

    FileNotFoundError for a GPU that does not exist; OSError with EOPNOTSUPP if shares cannot be given.
    """
    for index in {one.gpu for one in settings.targets}:
        await tree.capacity(index)
    capabilities = await tree.capabilities()
    needed = ("compute.weight",) if settings.by is By.WEIGHT else ("compute.weight", "compute.max")
    for name in needed:
        if capabilities.get(name, "unsupported") == "unsupported":  # a daemon of an earlier version has no quotas
            raise OSError(errno.EOPNOTSUPP, f"{name} unsupported: is the scheduler off?", os.fspath(tree.mount))
    return capabilities["compute.migrate"] != "unsupported"


async def run(tree: Tree, config: Table) -> None:
    """Run the policy until it is cancelled; see docs/policies/slo.md."""
    settings = Settings.read(config)
    can_move = await _check(tree, settings)
    tenants = [Tenant(tree, target) for target in settings.targets]
    cards = Cards(settings, tenants, Moves(tree, settings) if can_move and settings.migrate else None)
    desk = Desk({one.target.name: (one.target.place, one.interval) for one in tenants if one.target.bounds})
    with receiving(settings.socket) as ours:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(receive, ours, desk.take)
                await cards.step()
                await tree.ready()
                while True:
                    await trio.sleep(settings.interval)
                    await cards.step()
        finally:
            with trio.move_on_after(RELEASE_S, shield=True):
                for tenant in tenants:
                    await tenant.levers.release()
