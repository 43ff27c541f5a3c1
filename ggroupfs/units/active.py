"""Follows which units are active, and keeps their slices in the tree with their limits, with or without processes."""

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
"""Seconds before a lost connection is made again: the first delay and the largest one; the delay doubles each time."""


class Reader(Protocol):
    """Reads the files of units and configures their slices."""

    def load_again(self) -> None:
        """Read everything again, as any file may have changed."""

    def drop(self, unit: str) -> None:
        """Forget the files of a unit, as they may have changed."""

    def is_plain(self, unit: str) -> bool:
        """Whether a unit is known to have no settings."""

    async def unit(self, unit: str) -> Settings | None:
        """Return the settings of a unit by its name; None if its files cannot be read now."""

    def configure(self, slice_: Slice) -> None:
        """Have a slice configured soon."""

    def tell(self, mistakes: Iterable[Mistake]) -> None:
        """Report settings that have no effect."""


@attrs.define(eq=False)
class Look:
    """A check of a unit's state, in progress."""

    news: News
    """Latest news of the unit."""
    again: bool = True
    """Whether there is news that has not been checked."""
    done: trio.Event = attrs.field(factory=trio.Event)
    """Set when the check is over."""


@attrs.frozen
class Held:
    """The slice that is kept in the tree for a unit."""

    slice: Slice
    """The slice."""
    run: bytes
    """The start of the unit that it belongs to (:attr:`News.run`)."""


class Active:
    """A connection to a manager that is kept up, and the slices kept in the tree for its active units."""

    def __init__(self, manager: Manager, population: Population, reader: Reader) -> None:
        self._manager = manager
        self._population = population
        self._reader = reader
        self._connection: Connection | None = None
        self._held: dict[str, Held] = {}  # by unit
        self._holders: dict[Slice, str] = {}
        self._looks: dict[str, Look] = {}
        self._told_of: set[str] = set()  # since the list of units was last requested
        self._nursery: trio.Nursery

    def holds(self, slice_: Slice) -> bool:
        """Whether a slice is kept for an active unit with settings."""
        return slice_ in self._holders

    def looking(self) -> list[trio.Event]:
        """Events that are set when the present checks are over."""
        return [look.done for look in self._looks.values()]

    @property
    def answered(self) -> int:
        """Number of calls that the manager has answered on this connection."""
        return self._connection.answered if self._connection is not None else 0

    def reload(self) -> None:
        """Have everything read again soon, and every active unit checked."""
        self._nursery.start_soon(self._load_again)

    async def files(self, unit: str) -> Sequence[Path]:
        """Return the files of a unit, in the order in which systemd applies them. ConnectionError."""
        return await self._connected().files(unit)

    async def run(self, connection: Connection, begun: trio.Event) -> None:
        """Keep a connection up until cancelled. While there is none, what is configured stays.

        Sets `begun` once the check of every active unit has been started.
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
        """Use a connection until it is lost, and return whether it was of any use."""
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
        """Handle news from the manager."""
        if news.unit is None:
            self.reload()
        else:
            self._told_of.add(news.unit)
            if news.loaded:
                self._reader.drop(news.unit)
            self._look(news.unit, news)

    async def _load_again(self) -> None:
        with contextlib.suppress(ConnectionError):  # the next connection begins with another load
            await self._load()

    async def _load(self) -> None:
        """Read everything again, and check every unit that may have settings."""
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
        """Have a unit checked soon: once, however much news of it arrives until then."""
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
                pass  # the next load checks all units
            except Exception:
                log.exception("%s: not looked at", unit)
        del self._looks[unit]
        look.done.set()

    async def _look_once(self, unit: str, look: Look) -> None:
        """Keep the slice of a unit in the tree if it is active and has settings, and let it go otherwise.

        The manager is asked only for what that takes, and not for what it has reported in the meantime.
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
        """Return the slice of a unit; None, after a report, if it is in a place that cannot have limits."""
        slice_ = slice_at(cgroup) if cgroup else None
        if slice_ is None or unit_of(slice_) == unit:
            return slice_
        reason = "the root has no limits" if slice_ == ROOT else f"{slice_.path} is not where units are"
        self._reader.tell([one.mistake(reason) for one in settings.values.values()])
        return None
