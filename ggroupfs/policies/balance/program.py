"""The running policy: takes reports, looks at all GPUs once an interval, asks the core, and makes the moves."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from functools import partial

import trio

from ggroupfs.client import Group, Tree, emit
from ggroupfs.policies.balance.choice import Plan
from ggroupfs.policies.balance.core import Core, Decision, Short
from ggroupfs.policies.balance.eyes import Eyes
from ggroupfs.policies.balance.mover import carry_out
from ggroupfs.policies.balance.picture import Picture
from ggroupfs.policies.balance.settings import Settings
from ggroupfs.policies.config import Table
from ggroupfs.policies.slo.reports import Desk, receive, receiving
from ggroupfs.policies.slo.samples import Interval

log = logging.getLogger(__name__)


class Program:
    """A running policy."""

    def __init__(self, tree: Tree, settings: Settings) -> None:
        self._eyes = Eyes(tree, settings.groups, settings.span, settings.room, settings.processes)
        self._core = Core(settings.pace)
        self._deadline = settings.deadline
        self.intervals = {name: Interval(statistic) for name, statistic in settings.statistics.items()}
        """Latencies that groups report."""

    async def step(self) -> None:
        """Let one interval pass."""
        picture = await self._eyes.look()
        now = trio.current_time()
        for name, interval in self.intervals.items():
            sample = interval.take()
            if sample is not None:
                self._core.sample(now, name, sample)
        for decision in self._core.decide(now, picture):
            await self._do(picture, decision)

    async def _do(self, picture: Picture, decision: Decision) -> None:
        if isinstance(decision, Plan):
            await carry_out(self._core, picture, decision, self._group, self._deadline)
            for interval in self.intervals.values():
                interval.take()  # measured while a group stood still
        elif isinstance(decision, Short):
            latency = None if decision.latency is None else round(1e3 * decision.latency, 3)
            log.warning("%s: GPU %d does not keep its bounds, and no move would help", decision.group, decision.gpu)
            emit("short", group=decision.group, gpu=decision.gpu, latency_ms=latency)
        else:
            emit("met", group=decision.group)

    def _group(self, name: str, gpu: int) -> Group:
        return Group(self._eyes.path(name, gpu))


async def check(tree: Tree) -> None:
    """Check that groups can be moved. OSError with EOPNOTSUPP if not, as on a machine with one GPU."""
    if (await tree.capabilities())["compute.migrate"] == "unsupported":
        raise OSError(errno.EOPNOTSUPP, "compute.migrate unsupported: is there another GPU?", os.fspath(tree.mount))


async def run(tree: Tree, config: Table) -> None:
    """Run the policy until it is cancelled; see docs/policies/balance.md."""
    settings = Settings.read(config)
    await check(tree)
    program = Program(tree, settings)
    places = {one.name: one.place for one in settings.groups}
    desk = Desk({name: (places[name], interval) for name, interval in program.intervals.items()})
    # Without bounds of latencies there are no reports to take, and the socket stays free for another policy.
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(receiving(settings.socket)) if program.intervals else None
        async with trio.open_nursery() as nursery:
            if ours is not None:
                nursery.start_soon(partial(receive, ours, desk.take))
            await program.step()
            await tree.ready()
            while True:
                await trio.sleep(settings.interval)
                await program.step()
