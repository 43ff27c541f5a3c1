"""Units: what files ask for holds for a cgroup before a program in it gets its first byte of a GPU.

Everything that was read is a :class:`Load`; a reload is another one. Each group is configured once by each load, so
what is written by hand lasts until the next.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import attrs
import trio

from backend.common.turns import Turns
from backend.core.controller import Controller
from backend.core.settings import HIGH, LIMIT_MAX
from backend.process.identity import ROOT, Member, Process, Slice, SliceOn
from ggroupfs.text import values
from ggroupfs.text.properties import PROPERTIES, text_of
from ggroupfs.units import files, writer
from ggroupfs.units.active import Active
from ggroupfs.units.manager import Manager, unit_of
from ggroupfs.units.naming import path_of
from ggroupfs.units.settings import Mistake, Settings

log = logging.getLogger(__name__)

WAIT_S = 10.0
"""Seconds that a program waits for the limits of its slices, where nothing else is asked for: when 200 services start
at once the last waits for what is asked for them all. The library in a CUDA program waits 15 s for its welcome (ANSWER,
backend/cuda/library/daemon/session.h)."""

SILENCE = 0.5
"""The part of that for which it waits without a word about anything: a manager that does not answer holds no
program for ever."""

SHORT_S = 1.0
"""Seconds until files are read again for which there was no descriptor."""


@attrs.define(eq=False)
class Reading:
    """The files of a unit, which a task may still be reading."""

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
    """A program went on without what it asks for: this is told once, too."""
    over: trio.Event = attrs.field(factory=trio.Event)
    """There is a newer one."""
    timeouts: dict[Slice, int | None] = attrs.field(factory=dict)
    """How long slices that were made ahead wait for their cgroups, milliseconds: each pattern is tried once for one."""

    def tell(self, mistakes: Iterable[Mistake]) -> None:
        """Logs what was not logged yet."""
        for mistake in mistakes:
            if mistake not in self.logged:
                self.logged.add(mistake)
                log.warning("%s", mistake)


@attrs.define(eq=False)
class Configured:
    """What files did to one group."""

    load: Load | None = None
    """The load that configured it last."""
    reading: Reading | None = None
    """The files of the unit, as they were then: a unit may be loaded again by itself."""
    named: set[str] = attrs.field(factory=set)
    """Properties that it wrote."""
    turn: trio.Lock = attrs.field(factory=trio.Lock)
    """Of the task that configures it."""


class Units:
    """See the module: a :class:`backend.core.protocols.Policy`, and a watcher of the population."""

    def __init__(
        self, controller: Controller, directory: Path, manager: Manager | None, *, wait: float = WAIT_S
    ) -> None:
        self._controller = controller
        self._population = controller.population
        self._directory = directory
        self._manager = manager
        self._active = Active(manager, controller.population, self) if manager is not None else None
        self._wait = wait
        self._silence = SILENCE * wait
        self._load = Load(files.Table())
        self._groups: dict[SliceOn, Configured] = {}
        self._named: set[Slice] = set()  # on which some file set something
        self._jobs: dict[SliceOn, trio.Event] = {}
        self._begun = trio.Event()  # everything was read once
        self._configurations = 0  # of groups, until now
        self._turns = Turns()  # not the Controller's: a program that waits for limits is behind none that has them
        self._nursery: trio.Nursery

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Follows files and units until cancelled; started once what is there has what it is to have, or soon."""
        async with trio.open_nursery() as self._nursery:
            self._load = self._directory_load()
            self._population.watchers.append(self)
            self._controller.bookkeeper.policy = self
            self._controller.lives.timeout_of = self._timeout_of
            self._controller.lives.knows_units = self._begun.is_set
            try:
                self._nursery.start_soon(self._begin)
                with trio.move_on_after(self._silence):
                    await self._begun.wait()
                    while waiting := [*self._jobs.values(), *(self._active.looking() if self._active else ())]:
                        for event in waiting:
                            await event.wait()
                task_status.started()
                await trio.sleep_forever()
            finally:
                self._controller.bookkeeper.policy = None
                self._controller.lives.timeout_of = lambda _: None
                self._controller.lives.knows_units = lambda: True
                self._population.watchers.remove(self)

    # What the Controller asks

    async def prepare(self, slice_: Slice, gpu: int) -> None:
        if all(self._is_configured(SliceOn(level, gpu)) for level in path_of(slice_)):
            return
        load, began = self._load, trio.current_time()
        job, before = self._later(SliceOn(slice_, gpu)), (-1, -1)
        with trio.move_on_after(self._wait):
            while not job.is_set() and before != (progress := self._progress):
                before = progress
                with trio.move_on_after(self._silence):
                    await job.wait()
        if not job.is_set() and not load.slow:
            load.slow = True
            seconds = round(trio.current_time() - began)
            log.warning("%s: not configured within %d s: programs go on, limits come later", slice_.path, seconds)

    def asked(self, slice_: Slice, gpu: int) -> Mapping[str, int]:
        unit = unit_of(slice_) if self._active is not None else None
        reading = NO_UNIT if unit is None else self._load.units.get(unit, NO_UNIT)
        info, by_unit = self._controller.gpus[gpu].info, reading.settings or Settings()
        wanted = {**self._load.slices.of(slice_).on(info), **by_unit.on(info)}
        found = {}
        for one in (HIGH, LIMIT_MAX):
            if one.unit_key is not None and one.unit_key in wanted:
                _, text = text_of(one.unit_key, wanted[one.unit_key].value, info.capacity)
                found[one.field] = values.size(text)
        return found

    @property
    def _progress(self) -> tuple[int, int]:
        """Is another while something gets done."""
        return self._configurations, self._active.answered if self._active is not None else 0

    def again(self, gpu: int) -> None:
        for slice_ in self._population.slices():
            self._later(SliceOn(slice_, gpu))

    def process_came(self, process: Process) -> None:
        """Watcher: it has been asked for by then."""

    def process_gone(self, process: Process) -> None:
        """Watcher: nothing to do."""

    def process_migrated(self, here: Member, there: Member) -> None:
        """Watcher: policy is of slices."""

    def process_left(self, group: Member) -> None:
        """Watcher: policy is of slices."""

    def process_moved(self, process: Process) -> None:
        """Watcher: what is asked for where it is now is to hold soon."""
        resident = self._population.resident(process)
        if resident is not None:
            for gpu in resident.gpus:
                self._later(SliceOn(resident.slice, gpu))

    def slice_made(self, slice_: Slice) -> None:
        """Watcher: it is told of a slice when it settles it."""

    def slice_gone(self, slice_: Slice) -> None:
        """Watcher: one that comes back is another."""
        for gpu in self._controller.gpus:
            self._groups.pop(SliceOn(slice_, gpu), None)
            self._jobs.pop(SliceOn(slice_, gpu), None)
        self._load.timeouts.pop(slice_, None)
        self._count(slice_, named=False)

    def slice_renewed(self, slice_: Slice) -> None:
        """Watcher: what files ask for is for each cgroup of that name."""
        self.slice_gone(slice_)
        self.configure(slice_)

    # Loads

    async def _begin(self) -> None:
        """Everything for the first time, and what comes. Without a manager there is ``slices.d`` only."""
        if self._manager is not None and self._active is not None:
            try:
                connection = await self._manager.connect()
            except OSError as error:
                log.info("%s: %s: %s only", self._manager.name, error.strerror or error, self._directory)
                self._active = None
        self._controller.facts["units"] = self._manager.name if self._manager and self._active else "slices.d"
        self._count(ROOT, named=False)
        if self._active is not None:
            await self._active.run(connection, self._begun)
        else:
            self.load_again()
            self._begun.set()

    def reload(self) -> None:
        """Has all files count as they are now, for units that are active and have no slice yet, too."""
        if self._active is not None and self._begun.is_set():
            self._active.reload()
        else:
            self.load_again()

    def load_again(self) -> None:
        """From now on what is in the files now counts, for every slice that is there."""
        former, self._load = self._load, self._directory_load()
        former.over.set()
        for slice_ in self._population.slices():
            if not self._asks_nothing(slice_):
                self.configure(slice_)

    def _timeout_of(self, slice_: Slice) -> int | None:
        """How long a slice that was made ahead waits for its cgroup, as ``slices.d`` says now, milliseconds."""
        timeouts = self._load.timeouts
        if slice_ not in timeouts:
            timeouts[slice_] = self._load.slices.of(slice_).timeout_ms
        return timeouts[slice_]

    def _asks_nothing(self, slice_: Slice) -> bool:
        """Whether no file has a word about a slice, nor had: of ten thousand that a user made, as good as all. A
        process that comes into one settles that, and what is asked of those above."""
        if self._active is not None and unit_of(slice_) is not None:
            return False
        known = any(SliceOn(slice_, gpu) in self._groups for gpu in self._controller.gpus)
        return not known and not self._load.slices.of(slice_)

    def drop(self, unit: str) -> None:
        """A unit was loaded or unloaded: its files are read again when they are needed."""
        self._load.units.pop(unit, None)

    def _directory_load(self) -> Load:
        """A load of which only ``slices.d`` is read."""
        load = Load(files.of_directory(self._directory, self._load.slices))
        if not self._begun.is_set():
            load.logged = self._load.logged  # all of that is one load, to readers of the log
        load.tell(load.slices.mistakes)
        return load

    def tell(self, mistakes: Iterable[Mistake]) -> None:
        """Something does not act."""
        self._load.tell(mistakes)

    # Configuring groups

    def configure(self, slice_: Slice) -> None:
        """Has a slice, and every one above it, configured on every GPU soon."""
        for gpu in self._controller.gpus:
            self._later(SliceOn(slice_, gpu))

    def _is_configured(self, group: SliceOn) -> bool:
        state = self._groups.get(group)
        if state is None or state.load is not self._load:
            return False
        unit = unit_of(group.slice) if self._active is not None else None
        return state.reading is (NO_UNIT if unit is None else self._load.units.get(unit))

    def _later(self, group: SliceOn) -> trio.Event:
        """Has a slice, and every one above it, configured on a GPU soon; what is returned is set when that is done."""
        done = self._jobs.get(group)
        if done is None:
            done = self._jobs[group] = trio.Event()
            self._nursery.start_soon(self._configure_path, group, done)
        return done

    async def _configure_path(self, group: SliceOn, done: trio.Event) -> None:
        try:
            while not await self._configure_levels(self._load, group):
                pass
        except Exception:
            log.exception("GPU %d: %s: not configured", group.gpu, group.node)
        finally:
            if self._jobs.get(group) is done:
                del self._jobs[group]
            done.set()

    async def _configure_levels(self, load: Load, group: SliceOn) -> bool:
        """Whether it was done, by the load that counts now."""
        levels = path_of(group.slice)
        await self._turns.turn()
        for level in levels:
            self._reading(load, unit_of(level))  # all at once
        for level in levels:
            reading = self._reading(load, unit_of(level))
            if not reading.done.is_set():
                await reading.done.wait()
                await self._turns.turn()
            if reading.settings is None:
                await load.over.wait()  # which comes with the next connection
            if load is not self._load:
                return False
            await self._configure(load, reading, SliceOn(level, group.gpu))
        return load is self._load

    def is_plain(self, unit: str) -> bool:
        """Whether a unit is known to ask for nothing."""
        reading = self._load.units.get(unit)
        plain = reading is not None and reading.settings is not None and not reading.settings
        return plain and not self._load.slices.of_name(unit)

    async def unit(self, unit: str) -> Settings | None:
        """What the files of a unit ask for, else ``slices.d`` by its name; None where its files cannot be read now."""
        load = self._load
        reading = self._reading(load, unit)
        await reading.done.wait()
        return None if reading.settings is None else reading.settings or load.slices.of_name(unit)

    def _reading(self, load: Load, unit: str | None) -> Reading:
        """The files of a unit, read once a load."""
        if unit is None or self._active is None:
            return NO_UNIT
        reading = load.units.get(unit)
        if reading is None:
            reading = load.units[unit] = Reading()
            self._nursery.start_soon(self._read_unit, self._active, load, unit, reading)
        return reading

    async def _read_unit(self, active: Active, load: Load, unit: str, reading: Reading) -> None:
        try:
            paths = await active.files(unit)
            await self._turns.turn()
        except ConnectionError:
            if load.units.get(unit) is reading:
                del load.units[unit]
        else:
            try:
                reading.settings, mistakes = await self._settings(unit, paths)
                gpus = [gpu.info for gpu in self._controller.gpus.values()]
                load.tell([*mistakes, *reading.settings.unknown(gpus)])
            except Exception:  # whatever it says, others have what theirs say
                log.exception("%s: its files are not understood", unit)
                reading.settings = Settings()
        finally:
            reading.done.set()

    async def _settings(self, unit: str, paths: Sequence[Path]) -> tuple[Settings, Sequence[Mistake]]:
        """What the files of a unit ask for. Where they cannot be read for want of descriptors or memory, what it has
        stays, and it is tried again."""
        short = False
        while True:
            try:
                return files.of_unit(paths)
            except OSError as error:
                log.log(logging.DEBUG if short else logging.WARNING, "%s: not read yet: %s", unit, error.strerror)
            short = True
            await trio.sleep(SHORT_S)

    async def _configure(self, load: Load, reading: Reading, group: SliceOn) -> None:
        """Writes what is asked for on one group, and back to its default what was and is not any more."""
        slice_ = group.slice
        entry = self._population.slice_entry(slice_)
        if entry is None:
            return
        state = self._groups.setdefault(group, Configured())
        if state.load is load and state.reading is reading:
            return
        async with state.turn:
            if state.load is load and state.reading is reading:
                return  # another has done it meanwhile
            info = self._controller.gpus[group.gpu].info
            by_path, by_unit = load.slices.of(slice_), reading.settings or Settings()
            load.tell(by_path.unknown(gpu.info for gpu in self._controller.gpus.values()))
            asked = {**by_path.on(info), **by_unit.on(info)}
            wanted = {one.name: asked[one.name] for one in PROPERTIES if one.name in asked}
            dropped = state.named - wanted.keys()
            if wanted or dropped:
                kept = entry.kept and not self._is_held(slice_)
                try:
                    written, mistakes = await writer.write(self._controller, group, wanted, dropped)
                except OSError:
                    return  # the slice is gone
                finally:
                    if not kept and not self._is_held(slice_):
                        self._population.let_go(slice_)  # to write on it has it stay, which no file asked for
                load.tell(mistakes)
                state.named = written | state.named & wanted.keys()
                self._count(slice_, named=any(self._is_named(SliceOn(slice_, gpu)) for gpu in self._controller.gpus))
            state.load, state.reading = load, reading
            self._configurations += 1

    def _is_held(self, slice_: Slice) -> bool:
        return self._active is not None and self._active.holds(slice_)

    def _is_named(self, group: SliceOn) -> bool:
        state = self._groups.get(group)
        return state is not None and bool(state.named)

    def _count(self, slice_: Slice, *, named: bool) -> None:
        """How many slices have something from files."""
        (self._named.add if named else self._named.discard)(slice_)
        self._controller.facts["units.configured"] = str(len(self._named))


def _read_already() -> Reading:
    reading = Reading(settings=Settings())
    reading.done.set()
    return reading


NO_UNIT = _read_already()
"""Of a cgroup that is no unit."""
