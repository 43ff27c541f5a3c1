"""The policy at work: takes reports, looks who is there, asks the core once an interval, and writes what it says."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterable, Iterator, Sequence

import trio

from ggroupfs.client import GONE, Group, Tree, emit
from ggroupfs.policies.config import Table
from ggroupfs.policies.slo.core import WHOLE, Change, Core, Decision, Migrate
from ggroupfs.policies.slo.levers import Levers, wanted
from ggroupfs.policies.slo.reports import Desk, receive, receiving
from ggroupfs.policies.slo.samples import Interval
from ggroupfs.policies.slo.settings import Settings, Target

log = logging.getLogger(__name__)

RELEASE_S = 10.0
"""Seconds for taking everything back."""


class Tenant:
    """A group of the configuration, and whether it is there."""

    def __init__(self, tree: Tree, target: Target) -> None:
        self.target = target
        """Which."""
        self.interval = Interval(target.statistic)
        """What it reports."""
        self._group = target.group(tree)
        self.levers = Levers(self._group)
        """What is written for it."""
        self.is_present = False
        """Whether a process of it has a context on the GPU."""
        self._over = False

    async def look(self) -> bool:
        """Whether it came or went. A process that has gone does not come back: who has its pid then is another one."""
        before = self.is_present
        try:
            populated = not self._over and (await self._group.flat("compute.events")).get("populated") == 1
        except OSError as error:
            if error.errno not in GONE:
                return False  # nobody knows
            populated = False
            self.levers.forget()
            self._over = self._over or (before and self.target.place.pid is not None)
        self.is_present = populated
        return populated != before


class Card:
    """One GPU, and its groups."""

    def __init__(self, index: int, settings: Settings, tenants: Iterable[Tenant]) -> None:
        self._index = index
        self._priority = settings.priority
        self._core = Core(settings.pace, settings.reserve)
        self._tenants = list(tenants)

    async def step(self, now: float) -> None:
        """One interval has passed."""
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
        present = [tenant for tenant in self._tenants if tenant.is_present]
        made += self._core.decide(now, contended=len(present) > 1)
        for decision in made:
            self._tell(decision)
        await self._apply(present)

    async def _apply(self, present: Sequence[Tenant]) -> None:
        others = sum(tenant.target.bounds is None for tenant in present)
        critical, rest = wanted(self._core.shares, others, self._priority)
        for tenant in present:
            await tenant.levers.apply(critical.get(tenant.target.name, rest))

    def _tell(self, decision: Decision) -> None:
        name, index = decision.group, self._index
        if isinstance(decision, Change):
            share, was = decision.share / WHOLE, decision.was / WHOLE
            log.info("%s: share of GPU %d from %g to %g", name, index, was, share)
            emit("share", group=name, gpu=index, share=share, was=was, latency_ms=_ms(decision.latency))
        elif isinstance(decision, Migrate):
            share, missing = decision.share / WHOLE, decision.missing / WHOLE
            log.warning(
                "%s: GPU %d has no share left for it: it should migrate; %g GPU is missing", name, index, missing
            )
            emit("migrate", group=name, gpu=index, share=share, missing=missing, latency_ms=_ms(decision.latency))
        else:
            log.info("%s: may stay on GPU %d", name, index)
            emit("stay", group=name, gpu=index)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)


def _cards(settings: Settings, tenants: Sequence[Tenant]) -> Iterator[Card]:
    for index in sorted({one.target.gpu for one in tenants}):
        yield Card(index, settings, [one for one in tenants if one.target.gpu == index])


async def _check(tree: Tree, settings: Settings) -> None:
    """FileNotFoundError for a GPU that is not there; OSError EOPNOTSUPP where there are no shares to be given."""
    for index in {one.gpu for one in settings.targets}:
        await tree.capacity(index)
    capabilities = await Group(tree.mount).read("ggroup.capabilities")
    for line in capabilities.splitlines():
        if line == "compute.weight unsupported":
            raise OSError(errno.EOPNOTSUPP, f"{line}: is the scheduler off?", os.fspath(tree.mount))


async def run(tree: Tree, config: Table) -> None:
    """The program; see docs/policies.md."""
    settings = Settings.read(config)
    await _check(tree, settings)
    tenants = [Tenant(tree, target) for target in settings.targets]
    cards = list(_cards(settings, tenants))
    desk = Desk({one.target.name: (one.target.place, one.interval) for one in tenants if one.target.bounds})
    with receiving(settings.socket) as ours:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(receive, ours, desk.take)
                for card in cards:
                    await card.step(trio.current_time())
                await tree.ready()
                while True:
                    await trio.sleep(settings.interval)
                    for card in cards:
                        await card.step(trio.current_time())
        finally:
            with trio.move_on_after(RELEASE_S, shield=True):
                for tenant in tenants:
                    await tenant.levers.release()
