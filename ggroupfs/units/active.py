"""Which units are active: these are in the tree with their limits, whether or not a process is in them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import attrs
import trio

from backend.core.population import Population
from backend.process.identity import ROOT, Slice, slice_at
from ggroupfs.units.manager import Connection, Manager, News, unit_of
from ggroupfs.units.settings import Mistake, Settings

log = logging.getLogger(__name__)

RECONNECT_S, RECONNECT_MOST_S = 0.1, 30.0
"""Seconds until a lost connection is made again: the first time, and at most, doubled each time."""


class Reader(Protocol):
    """The part that reads the files of units and configures their slices."""

    def load_again(self) -> None:
        """Everything may say something else now."""

    def drop(self, unit: str) -> None:
        """The files of a unit may."""

    def is_plain(self, unit: str) -> bool:
        """Whether a unit is known to ask for nothing."""

    async def unit(self, unit: str) -> Settings | None:
        """What is asked for a unit by its name, None where its files cannot be read now."""

    def configure(self, slice_: Slice) -> None:
        """Has a slice configured soon."""

    def tell(self, mistakes: Iterable[Mistake]) -> None:
        """Something does not act."""


@attrs.define(eq=False)
class Look:
    """A look at what a unit does."""

    news: News
    """What was told of it last."""
    again: bool = True
    """That was not looked at."""
    done: trio.Event = attrs.field(factory=trio.Event)
    """It is over."""


@attrs.frozen
class Held:
    """The slice of a unit that is held."""

    slice: Slice
    """Which."""
    run: bytes
    """Since which start of the unit (:attr:`News.run`)."""


class Active:
    """A connection to a manager, kept up, and what is held in the tree by what it says."""

    def __init__(self, manager: Manager, population: Population, reader: Reader) -> None:
        self._manager = manager
        self._population = population
        self._reader = reader
        self._connection: Connection | None = None
        self._held: dict[str, Held] = {}  # by unit
        self._holders: dict[Slice, str] = {}
        self._looks: dict[str, Look] = {}
        self._told_of: set[str] = set()  # since units were last asked for
        self._nursery: trio.Nursery

    def holds(self, slice_: Slice) -> bool:
        """Whether a slice is that of a unit that is active and configured."""
        return slice_ in self._holders

    def looking(self) -> list[trio.Event]:
        """Set when what is looked at now has been."""
        return [look.done for look in self._looks.values()]

    @property
    def answered(self) -> int:
        """Calls that the manager has answered, of this connection."""
        return self._connection.answered if self._connection is not None else 0

    def reload(self) -> None:
        """Has everything read again soon, and every active unit looked at."""
        self._nursery.start_soon(self._load_again)

    async def files(self, unit: str) -> Sequence[Path]:
        """The files of a unit, in the order in which they count. ConnectionError."""
        return await self._connected().files(unit)

    async def run(self, connection: Connection, begun: trio.Event) -> None:
        """Keeps a connection up until cancelled. While there is none, what is configured stays.

        Sets `begun` once every unit that is active is looked at.
        """
        async with trio.open_nursery() as self._nursery:
            await self._keep_up(connection, begun)

    async def _keep_up(self, connection: Connection, begun: trio.Event) -> None:
        manager, pause = self._manager, RECONNECT_S
        while True:
            if await self._serve(connection, begun):
                pause = RECONNECT_S
            log.warning("%s: connection lost", manager.name)
            while True:
                await trio.sleep(pause)
                pause = min(2 * pause, RECONNECT_MOST_S)
                try:
                    connection = await manager.connect()
                    break
                except OSError as error:
                    log.debug("%s: %s", manager.name, error)

    async def _serve(self, connection: Connection, begun: trio.Event) -> bool:
        """Lives with a connection until it is lost; whether it was of any use."""
        async with trio.open_nursery() as nursery:

            async def listen() -> None:
                await connection.run(self._told)
                nursery.cancel_scope.cancel()

            nursery.start_soon(listen)
            try:
                await connection.subscribe()
                self._connection = connection
                await self._load()
                begun.set()
            except ConnectionError as error:
                log.debug("not to be used: %s", error)
                nursery.cancel_scope.cancel()
        used, self._connection = self._connection is not None, None
        return used

    def _told(self, news: News) -> None:
        """The manager says that something happened."""
        if news.unit is None:
            self.reload()
        else:
            self._told_of.add(news.unit)
            if news.loaded:
                self._reader.drop(news.unit)
            self._look(news.unit, news)

    async def _load_again(self) -> None:
        with contextlib.suppress(ConnectionError):  # there is another load once there is another connection
            await self._load()

    async def _load(self) -> None:
        """Reads everything again, and looks at every unit that may have a part in it."""
        self._reader.load_again()
        newer: set[str] = set()
        self._told_of = newer
        active = set(await self._connected().active())
        for unit in {*self._held, *active}:
            self._look(unit, News(unit, active=None if unit in newer else unit in active))

    def _connected(self) -> Connection:
        if self._connection is None:
            raise ConnectionError("not connected")
        return self._connection

    def _look(self, unit: str, news: News) -> None:
        """Has a look at a unit soon, once however often something is told of it until then."""
        look, held = self._looks.get(unit), self._held.get(unit)
        if look is not None:
            look.news, look.again = news, True
        elif held is not None:
            if not (news.active and news.run and news.run == held.run):
                self._begin_look(unit, news)
        elif news.active is not False and not self._reader.is_plain(unit):
            self._begin_look(unit, news)

    def _begin_look(self, unit: str, news: News) -> None:
        self._looks[unit] = look = Look(news)
        self._nursery.start_soon(self._look_at, unit, look)

    async def _look_at(self, unit: str, look: Look) -> None:
        while look.again:
            look.again = False
            try:
                await self._look_once(unit, look)
            except ConnectionError:
                pass  # the next load looks at all of them
            except Exception:
                log.exception("%s: not looked at", unit)
        del self._looks[unit]
        look.done.set()

    async def _look_once(self, unit: str, look: Look) -> None:
        """Holds the slice of a unit that is active and asks for something.

        The manager is asked for no more than that takes, and for nothing that was told meanwhile.
        """
        news, settings, slice_ = look.news, None, None
        active = await self._connected().is_active(unit) if news.active is None else news.active
        if active and not look.again:
            settings = await self._reader.unit(unit)
            if settings is None:
                return
            if settings and not look.again:
                slice_ = self._slice(unit, await self._connected().cgroup(unit), settings)
        if look.again:
            return
        former = self._held.get(unit)
        if former is not None and former.slice != slice_:
            del self._held[unit], self._holders[former.slice]
            self._population.let_go(former.slice)
        if slice_ is not None:
            self._population.hold(slice_)
            self._held[unit], self._holders[slice_] = Held(slice_, news.run), unit
            self._reader.configure(slice_)

    def _slice(self, unit: str, cgroup: str, settings: Settings) -> Slice | None:
        """Where a unit is; None where that is no place for limits, which is told."""
        slice_ = slice_at(cgroup) if cgroup else None
        if slice_ is None or unit_of(slice_) == unit:
            return slice_
        reason = "the root has no limits" if slice_ == ROOT else f"{slice_.path} is not where units are"
        self._reader.tell([one.mistake(reason) for one in settings.values.values()])
        return None
