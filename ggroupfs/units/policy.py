"""Units: what files ask for holds for a cgroup before a program in it gets its first byte of a GPU.

Everything that was read is a :class:`Load`; a reload is another one. Each group is configured once by each load, so
what is written by hand lasts until the next.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

import attrs
import trio

from backend.controller import Controller
from backend.identity import ROOT, Group, Process, Slice, slice_at
from ggroupfs.properties import PROPERTIES
from ggroupfs.units import files, writer
from ggroupfs.units.manager import Connection, Manager, News, unit_of
from ggroupfs.units.settings import Mistake, Settings

log = logging.getLogger(__name__)

SETTLE_S = 2.0
"""Seconds that a program waits for the limits of its slices: a manager that does not answer holds nobody for ever."""

RECONNECT_S, RECONNECT_MOST_S = 0.1, 30.0
"""Seconds until a lost connection is made again: the first time, and at most, doubled each time."""


@attrs.define(eq=False)
class Reading:
    """The files of a unit, which somebody may still be reading."""

    done: trio.Event = attrs.field(factory=trio.Event)
    """They were read, or cannot be."""
    settings: Settings | None = None
    """What they ask for; None before `done`, and after it if the connection was lost."""


@attrs.define(eq=False)
class Load:
    """What was read since everything was last read again."""

    slices: files.Table
    """Of ``slices.d``."""
    units: dict[str, Reading] = attrs.field(factory=dict)
    """By the name of the unit."""
    logged: set[Mistake] = attrs.field(factory=set)
    """Mistakes that were told of: once is enough."""
    slow: bool = False
    """Somebody went on without what it asks for: this is told once, too."""
    over: trio.Event = attrs.field(factory=trio.Event)
    """There is a newer one."""


@attrs.define(eq=False)
class Configured:
    """What files did to one group."""

    load: Load | None = None
    """The load that configured it last."""
    named: set[str] = attrs.field(factory=set)
    """Properties that it wrote."""
    turn: trio.Lock = attrs.field(factory=trio.Lock)
    """Of who configures it."""


@attrs.define(eq=False)
class Look:
    """A look at what a unit does."""

    again: bool = True
    """Something happened since."""
    done: trio.Event = attrs.field(factory=trio.Event)
    """It is over."""


class Units:
    """See the module: a :class:`backend.protocols.Policy`, and a watcher of the population."""

    def __init__(
        self, controller: Controller, directory: Path, manager: Manager | None, *, seconds: float = SETTLE_S
    ) -> None:
        self._controller = controller
        self._population = controller.population
        self._directory = directory
        self._manager = manager
        self._seconds = seconds
        self._connection: Connection | None = None
        self._load = Load(files.Table())
        self._groups: dict[Group, Configured] = {}
        self._named: set[Slice] = set()  # on which some file set something
        self._held: dict[str, Slice] = {}  # of units that are active and configured: these stay while nobody is in
        self._holders: dict[Slice, str] = {}
        self._looks: dict[str, Look] = {}
        self._jobs: dict[Group, trio.Event] = {}
        self._read = trio.Event()  # everything, for the first time
        self._nursery: trio.Nursery

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Follows files and units until cancelled; started once what is there has what it is to have, or soon."""
        async with trio.open_nursery() as self._nursery:
            self._load = self._directory_load()
            self._population.watchers.append(self)
            self._controller.policy = self
            try:
                self._nursery.start_soon(self._begin)
                with trio.move_on_after(self._seconds):
                    await self._read.wait()
                    await self._quiet()
                task_status.started()
                await trio.sleep_forever()
            finally:
                self._controller.policy = None
                self._population.watchers.remove(self)

    # What the Controller asks

    async def settle(self, slice_: Slice, gpu: int) -> None:
        if all(self._is_configured(Group(gpu, level)) for level in _levels(slice_)):
            return
        load = self._load
        with trio.move_on_after(self._seconds) as scope:
            await self._later(Group(gpu, slice_)).wait()
        if scope.cancelled_caught and not load.slow:
            load.slow = True
            log.warning("%s: not configured within %g s: programs go on, limits come later", slice_.path, self._seconds)

    def process_gone(self, process: Process) -> None:
        """Watcher: nothing to do."""

    def process_moved(self, process: Process) -> None:
        """Watcher: what is asked for where it is now is to hold soon."""
        resident = self._population.resident(process)
        if resident is not None:
            for gpu in resident.gpus:
                self._later(Group(gpu, resident.slice))

    def slice_gone(self, slice_: Slice) -> None:
        """Watcher: one that comes back is another."""
        for gpu in self._controller.gpus:
            self._groups.pop(Group(gpu, slice_), None)
        self._count(slice_, named=False)

    # Loads

    async def _begin(self) -> None:
        """Everything for the first time, and what comes. Without a manager there is ``slices.d`` only."""
        connection = None
        if self._manager is not None:
            try:
                connection = await self._manager.connect()
            except OSError as error:
                log.info("%s: %s: %s only", self._manager.name, error.strerror or error, self._directory)
                self._manager = None
        self._controller.facts["units"] = self._manager.name if self._manager is not None else "slices.d"
        self._count(ROOT, named=False)
        if connection is not None:
            await self._follow(connection)
        else:
            self._replace(Load(self._load.slices, logged=self._load.logged))
            self._read.set()

    async def _follow(self, connection: Connection) -> NoReturn:
        """Keeps up a connection to the manager. While there is none, what is configured stays."""
        manager, pause = self._manager, RECONNECT_S
        assert manager is not None
        while True:
            if await self._serve(connection):
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

    async def _serve(self, connection: Connection) -> bool:
        """Lives with a connection until it is lost; whether it was of any use."""
        async with trio.open_nursery() as nursery:

            async def listen() -> None:
                await connection.run(self._told)
                nursery.cancel_scope.cancel()

            nursery.start_soon(listen)
            try:
                await connection.subscribe()
                self._connection = connection
                first = not self._read.is_set()
                await self._load_all(Load(self._load.slices, logged=self._load.logged) if first else None)
                self._read.set()
            except ConnectionError as error:
                log.debug("not to be used: %s", error)
                nursery.cancel_scope.cancel()
        used, self._connection = self._connection is not None, None
        return used

    def _told(self, news: News) -> None:
        """The manager says that something happened."""
        if news.unit is None:
            self._nursery.start_soon(self._load_again)
        else:
            if news.loaded:
                self._load.units.pop(news.unit, None)
            self._look(news.unit)

    async def _load_again(self) -> None:
        with contextlib.suppress(ConnectionError):  # there is another load once there is another connection
            await self._load_all(None)

    async def _load_all(self, load: Load | None) -> None:
        """A new load, and a look at every unit that may have a part in it."""
        self._replace(load or self._directory_load())
        for unit in {*self._held, *await self._connected().active()}:
            self._look(unit)

    def _directory_load(self) -> Load:
        load = Load(files.of_directory(self._directory))
        self._tell(load, load.slices.mistakes)
        return load

    def _replace(self, load: Load) -> None:
        """From now on this one counts, for everybody who is there."""
        former, self._load = self._load, load
        former.over.set()
        for slice_ in self._population.slices():
            for gpu in self._controller.gpus:
                self._later(Group(gpu, slice_))

    def _tell(self, load: Load, mistakes: Iterable[Mistake]) -> None:
        for mistake in mistakes:
            if mistake not in load.logged:
                load.logged.add(mistake)
                log.warning("%s", mistake)

    def _connected(self) -> Connection:
        if self._connection is None:
            raise ConnectionError("not connected")
        return self._connection

    async def _quiet(self) -> None:
        """Returns once nothing is under way."""
        while waiting := [*self._jobs.values(), *(look.done for look in self._looks.values())]:
            for event in waiting:
                await event.wait()

    # Units that are active and configured are in the tree, whether or not somebody is in them

    def _look(self, unit: str) -> None:
        """Has a look at a unit soon, once however often it is asked for."""
        if unit in self._looks:
            self._looks[unit].again = True
            return
        reading = self._load.units.get(unit)
        if reading is None or reading.settings is None or reading.settings or unit in self._held:
            self._looks[unit] = look = Look()
            self._nursery.start_soon(self._look_at, unit, look)

    async def _look_at(self, unit: str, look: Look) -> None:
        while look.again:
            look.again = False
            try:
                await self._look_once(unit)
            except ConnectionError:
                pass  # the next load looks at all of them
            except Exception:
                log.exception("%s: not looked at", unit)
        del self._looks[unit]
        look.done.set()

    async def _look_once(self, unit: str) -> None:
        state = await self._connected().state(unit)
        settings = await self._unit(self._load, unit) if state.active else Settings()
        if settings is None:
            return
        slice_ = slice_at(state.cgroup) if state.cgroup else None
        former = self._held.get(unit)
        if not settings or slice_ is None or slice_ == ROOT:
            if settings and slice_ == ROOT:
                self._tell(self._load, [one.mistake("the root has no limits") for one in settings.values.values()])
            slice_ = None
        if former is not None and former != slice_:
            del self._held[unit], self._holders[former]
            self._population.let_go(former)
        if slice_ is not None:
            self._held[unit], self._holders[slice_] = slice_, unit
            self._population.hold(slice_)
            for gpu in self._controller.gpus:
                self._later(Group(gpu, slice_))

    # Configuring groups

    def _is_configured(self, group: Group) -> bool:
        state = self._groups.get(group)
        return state is not None and state.load is self._load

    def _later(self, group: Group) -> trio.Event:
        """Has a slice, and every one above it, configured on a GPU soon; what is returned is set when that is done."""
        done = self._jobs.get(group)
        if done is None:
            done = self._jobs[group] = trio.Event()
            self._nursery.start_soon(self._configure_path, group, done)
        return done

    async def _configure_path(self, group: Group, done: trio.Event) -> None:
        try:
            while not await self._configure_levels(self._load, group):
                pass
        except Exception:
            log.exception("GPU %d: %s: not configured", group.gpu, group.node)
        finally:
            del self._jobs[group]
            done.set()

    async def _configure_levels(self, load: Load, group: Group) -> bool:
        """Whether it was done, by the load that counts now."""
        assert isinstance(group.node, Slice)
        levels = _levels(group.node)
        for level in levels:
            self._reading(load, level)  # all at once
        for level in levels:
            reading = self._reading(load, level)
            await reading.done.wait()
            if reading.settings is None:
                await load.over.wait()  # which comes with the next connection
            if load is not self._load:
                return False
            assert reading.settings is not None
            await self._configure(load, Group(group.gpu, level), reading.settings)
        return load is self._load

    def _reading(self, load: Load, slice_: Slice) -> Reading:
        """The files of the unit that a cgroup is."""
        unit = unit_of(slice_) if self._manager is not None else None
        if unit is None:
            return NO_UNIT
        reading = load.units.get(unit)
        if reading is None:
            reading = load.units[unit] = Reading()
            self._nursery.start_soon(self._read_unit, load, unit, reading)
        return reading

    async def _unit(self, load: Load, unit: str) -> Settings | None:
        """What the files of a unit ask for, None where they cannot be read now."""
        reading = load.units.get(unit)
        if reading is None:
            reading = load.units[unit] = Reading()
            await self._read_unit(load, unit, reading)
        await reading.done.wait()
        return reading.settings

    async def _read_unit(self, load: Load, unit: str, reading: Reading) -> None:
        try:
            paths = await self._connected().files(unit)
        except ConnectionError:
            if load.units.get(unit) is reading:
                del load.units[unit]
        else:
            reading.settings, mistakes = files.of_unit(paths)
            gpus = [gpu.info for gpu in self._controller.gpus.values()]
            self._tell(load, [*mistakes, *reading.settings.unknown(gpus)])
        finally:
            reading.done.set()

    async def _configure(self, load: Load, group: Group, by_unit: Settings) -> None:
        """Writes what is asked for on one group, and back to its default what was and is not any more."""
        slice_ = group.node
        assert isinstance(slice_, Slice)
        entry = self._population.slice_entry(slice_)
        if entry is None:
            return
        state = self._groups.setdefault(group, Configured())
        async with state.turn:
            if state.load is load:
                return
            info = self._controller.gpus[group.gpu].info
            by_path = load.slices.of(slice_)
            self._tell(load, by_path.unknown(gpu.info for gpu in self._controller.gpus.values()))
            asked = {**by_path.on(info), **by_unit.on(info)}
            wanted = {one.name: asked[one.name] for one in PROPERTIES if one.name in asked}
            dropped = state.named - wanted.keys()
            if wanted or dropped:
                kept = entry.kept and slice_ not in self._holders
                try:
                    written, mistakes = await writer.write(self._controller, group, wanted, dropped)
                except OSError:
                    return  # the slice is gone
                finally:
                    if not kept and slice_ not in self._holders:
                        self._population.let_go(slice_)  # to write on it has it stay, and nobody asked for that
                self._tell(load, mistakes)
                state.named = written | state.named & wanted.keys()
                self._count(slice_, named=any(self._is_named(Group(gpu, slice_)) for gpu in self._controller.gpus))
            state.load = load

    def _is_named(self, group: Group) -> bool:
        state = self._groups.get(group)
        return state is not None and bool(state.named)

    def _count(self, slice_: Slice, *, named: bool) -> None:
        """How many slices have something from files."""
        (self._named.add if named else self._named.discard)(slice_)
        self._controller.facts["units.configured"] = str(len(self._named))


def _levels(slice_: Slice) -> list[Slice]:
    """A slice and those above it, but for the root, which comes first."""
    levels: list[Slice] = []
    level: Slice | None = slice_
    while level is not None and level != ROOT:
        levels.append(level)
        level = level.parent
    return levels[::-1]


def _read_already() -> Reading:
    reading = Reading(settings=Settings())
    reading.done.set()
    return reading


NO_UNIT = _read_already()
"""Of a cgroup that is no unit."""
