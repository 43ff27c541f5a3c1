"""The running policy: watches the high group, sets the limit of the low group, and restores both at the end.

Nothing announces that a program grows, so the groups are looked at every `interval`. An event tells when that was too
late: if the slice above both went over its limit, the filesystem itself has taken memory, and the next look follows at
once.
"""

from __future__ import annotations

import logging

import trio

from ggroupfs.client import GONE, Group, Tree, emit
from ggroupfs.policies.dynamic.core import Core, Figures
from ggroupfs.policies.dynamic.pace import Pace
from ggroupfs.policies.dynamic.settings import Settings

log = logging.getLogger(__name__)

HIGH, LOW = "gmem.limit.high", "gmem.limit.low"
WORK = ("submitted", "finished", "gpu_usec", "gpu_usec_estimate")
"""Keys of gcgroup.stat that change while a program works, as far as the machine can tell."""
SLOW_S = 1.0
"""Seconds between two looks at what seldom changes, such as limits set by other programs."""
ABSENT_S = 0.1
"""Seconds between two looks for a group that is missing."""
BACK_S = 10.0
"""Seconds within which the old settings have to be restored."""


async def manage(tree: Tree, settings: Settings) -> None:
    """Run the policy until it is cancelled. The groups may come and go."""
    capacity = await tree.capacity(settings.gpu)
    program = Program(settings, capacity)
    await tree.ready()
    try:
        async with trio.open_nursery() as nursery:
            if settings.within is not None:
                nursery.start_soon(program.watch, settings.within)
            nursery.start_soon(program.work)
    finally:
        with trio.CancelScope(deadline=trio.current_time() + BACK_S, shield=True):
            await program.take_back()


class Program:
    """A running policy."""

    def __init__(self, settings: Settings, capacity: int) -> None:
        """`capacity` is the memory of the GPU, bytes."""
        self._settings, self._capacity = settings, capacity
        self._core = Core(settings.options)
        self._pace = Pace(settings.least, settings.most)
        self._wake = trio.Event()
        self._lent = Borrowed(settings.low, HIGH)
        self._kept = Borrowed(settings.high, LOW)
        self._slow_at = 0.0
        self._budget = capacity
        self._ceiling: int | None = None
        self._away = 0  # bytes of the high group that are in the host
        self._began = trio.current_time()

    async def watch(self, within: Group) -> None:
        """Trigger a look at once whenever the limit of the slice above had to be enforced."""
        while True:
            try:
                async with within.watch("gmem.events") as events:
                    while True:
                        await events.changed()
                        self._wake.set()
            except OSError as error:
                if error.errno not in GONE:
                    raise
                await trio.sleep(ABSENT_S)

    async def work(self) -> None:
        """Look, decide and write, for ever."""
        last = trio.current_time()
        while True:
            try:
                low = await self._lower()
            except OSError as error:
                if error.errno not in GONE:
                    raise
                low = None
            if low is None:
                self._core.forget()
                self._lent.gone()
                await trio.sleep(ABSENT_S)
                last = trio.current_time()
            else:
                now = trio.current_time()
                figures = await self._figures(now - last, low)
                last = now
                limit = self._core.decide(figures, self._pace.step)
                if limit is not None:
                    await self._set(limit, figures)
                with trio.move_on_after(self._settings.interval):
                    await self._wake.wait()
                self._wake = trio.Event()

    async def _lower(self) -> int:
        """Return the bytes that the low group has. OSError if the group is missing."""
        low = self._settings.low
        if trio.current_time() >= self._slow_at:
            self._slow_at = trio.current_time() + SLOW_S
            await self._slowly()
        held = await low.number("gmem.current")
        await self._lent.meet()
        return held or 0

    async def _slowly(self) -> None:
        settings = self._settings
        within = await _of(settings.within, HIGH) if settings.within else None
        self._budget = min(one for one in (self._capacity, settings.budget, within) if one is not None)
        self._ceiling = await _of(settings.high, HIGH)
        self._away = await _of(settings.high, "gmem.swap.current") or 0
        if self._core.limit is not None and await settings.low.number(HIGH) != self._core.limit:
            self._core.forget()  # set by another program, or another group of the same name
            self._lent.gone()

    async def _figures(self, seconds: float, low: int) -> Figures:
        high, held, work, pending = self._settings.high, 0, None, 0
        try:
            if self._away:  # memory in the host is wanted back
                self._away = await high.number("gmem.swap.current") or 0
            held = (await high.number("gmem.current") or 0) + self._away
            stat = await high.flat("gcgroup.stat")
            await self._kept.meet("max")
        except OSError as error:
            if error.errno not in GONE:
                raise
            self._kept.gone()
        else:
            told = [stat[key] for key in WORK if key in stat]
            work, pending = sum(told) if told else None, stat.get("pending", 0)
        return Figures(seconds, self._budget, held, low, self._ceiling, work, pending)

    async def _set(self, limit: int, figures: Figures) -> None:
        low, before = self._settings.low, self._core.limit
        began = trio.current_time()
        try:
            moved = await _moved(low)
            await low.write(HIGH, limit)
            moved = await _moved(low) - moved
        except OSError as error:
            if error.errno in GONE:
                return
            self._core.refused()
            emit("refused", at=self._at(began), limit=limit, error=error.strerror)
            return
        self._core.accepted(limit)
        if before is None or limit < before:
            self._pace.took(max(0, figures.low - limit), moved)
        emit(
            "limit",
            at=self._at(began),
            limit=limit,
            high=figures.high,
            low=figures.low,
            growth=int(self._core.growth),
            moved=moved,
            took_ms=round((trio.current_time() - began) * 1000, 1),
        )

    def _at(self, now: float) -> float:
        return round(now - self._began, 3)

    async def take_back(self) -> None:
        """Restore both groups, as far as they still exist."""
        await self._lent.restore()
        await self._kept.restore()


class Borrowed:
    """A control file that the policy changes for a while."""

    def __init__(self, group: Group, name: str) -> None:
        self._group, self._name = group, name
        self._before: str | None = None

    async def meet(self, value: object | None = None) -> None:
        """Remember the value of a file that has just appeared, and write `value` to it.

        OSError if the file is gone; a refused value is only a warning.
        """
        if self._before is not None:
            return
        self._before = await self._group.read(self._name)
        if value is None:
            return
        try:
            await self._group.write(self._name, value)
        except OSError as error:
            if error.errno in GONE:
                raise
            log.warning("%s/%s: %s", self._group.path, self._name, error.strerror)

    def gone(self) -> None:
        """Forget the value: a group that comes in this place is another one."""
        self._before = None

    async def restore(self) -> None:
        """Write back the remembered value."""
        if self._before is None:
            return
        try:
            await self._group.write(self._name, self._before)
        except OSError as error:
            if error.errno not in GONE:
                log.warning("%s/%s: it stays as it is: %s", self._group.path, self._name, error.strerror)


async def _of(group: Group, name: str) -> int | None:
    """Return the number in a file; None if there is no number, or no such group."""
    try:
        return await group.number(name)
    except OSError as error:
        if error.errno in GONE:
            return None
        raise


async def _moved(group: Group) -> int:
    """Bytes of a group that ever went to the host."""
    return (await group.flat("gmem.stat"))["swapout_bytes"]
