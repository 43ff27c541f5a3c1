"""The unit policy: the settings of a cgroup take effect before a program in it gets its first byte of a GPU.

Everything that was read is a :class:`Load`, and a reload makes a new one. Each load configures each group once, so a
value written by hand lasts until the next load.
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
"""Seconds for which a program waits for the limits of its slices, unless another time is configured. When 200 services
start at once, the last one waits for the settings of all. The library in a CUDA program waits 15 s for its welcome
(ANSWER, backend/cuda/library/daemon/session.h)."""

SILENCE = 0.5
"""Fraction of WAIT_S for which a program waits while nothing progresses: a manager that does not answer must not hold
programs for ever."""

SHORT_S = 1.0
"""Seconds before files are read again that could not be read for lack of descriptors."""


@attrs.define(eq=False)
class Reading:
    """The settings from the files of a unit, possibly still being read."""

    done: trio.Event = attrs.field(factory=trio.Event)
    """Set once the files were read, or cannot be read."""
    settings: Settings | None = None
    """Settings of the unit; None before `done`, and afterwards if the connection was lost."""


@attrs.define(eq=False)
class Load:
    """Everything read since the last complete reload."""

    slices: files.Table
    """Contents of ``slices.d``."""
    units: dict[str, Reading] = attrs.field(factory=dict)
    """Settings of units, by name."""
    logged: set[Mistake] = attrs.field(factory=set)
    """Mistakes that were logged; each is logged once."""
    slow: bool = False
    """Whether a program went on without its settings, which is logged once as well."""
    over: trio.Event = attrs.field(factory=trio.Event)
    """Set when there is a newer load."""
    timeouts: dict[Slice, int | None] = attrs.field(factory=dict)
    """Time that each slice made ahead waits for its cgroup, milliseconds, so that the patterns are tried once per
    slice."""

    def tell(self, mistakes: Iterable[Mistake]) -> None:
        """Log the mistakes that were not logged yet."""
        for mistake in mistakes:
            if mistake not in self.logged:
                self.logged.add(mistake)
                log.warning("%s", mistake)


@attrs.define(eq=False)
class Configured:
    """The state of one group with respect to files."""

    load: Load | None = None
    """Load that last configured the group."""
    reading: Reading | None = None
    """Files of the unit at that time; a unit may be loaded again on its own."""
    named: set[str] = attrs.field(factory=set)
    """Properties that were written."""
    turn: trio.Lock = attrs.field(factory=trio.Lock)
    """Lock of the task that configures the group."""


class Units:
    """The unit policy: a :class:`backend.core.protocols.Policy`, and a watcher of the population."""

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
        self._named: set[Slice] = set()  # slices on which a file set something
        self._jobs: dict[SliceOn, trio.Event] = {}
        self._begun = trio.Event()  # set once everything was read
        self._configurations = 0  # number of groups configured so far
        self._turns = Turns()  # not the Controller's, so programs that wait for limits do not queue behind it
        self._nursery: trio.Nursery

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Follow files and units until cancelled.

        Started once the present groups are configured, or after `_silence` seconds.
        """
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

    # Questions of the Controller

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
        """A value that changes while the configuration progresses."""
        return self._configurations, self._active.answered if self._active is not None else 0

    def again(self, gpu: int) -> None:
        for slice_ in self._population.slices():
            self._later(SliceOn(slice_, gpu))

    def process_came(self, process: Process) -> None:
        """Watcher: `prepare` was called for it before."""

    def process_gone(self, process: Process) -> None:
        """Watcher: nothing to do."""

    def process_migrated(self, here: Member, there: Member) -> None:
        """Watcher: the policy concerns slices only."""

    def process_left(self, group: Member) -> None:
        """Watcher: the policy concerns slices only."""

    def process_moved(self, process: Process) -> None:
        """Watcher: have the slices above the process's new place configured soon."""
        resident = self._population.resident(process)
        if resident is not None:
            for gpu in resident.gpus:
                self._later(SliceOn(resident.slice, gpu))

    def slice_made(self, slice_: Slice) -> None:
        """Watcher: nothing to do; a slice is configured when it is settled."""

    def slice_gone(self, slice_: Slice) -> None:
        """Watcher: forget the slice; one that comes back is another."""
        for gpu in self._controller.gpus:
            self._groups.pop(SliceOn(slice_, gpu), None)
            self._jobs.pop(SliceOn(slice_, gpu), None)
        self._load.timeouts.pop(slice_, None)
        self._count(slice_, named=False)

    def slice_renewed(self, slice_: Slice) -> None:
        """Watcher: configure the slice again, as it now stands for a new cgroup of that name."""
        self.slice_gone(slice_)
        self.configure(slice_)

    # Loads

    async def _begin(self) -> None:
        """Read everything for the first time, and follow changes. Without a manager there is only ``slices.d``."""
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
        """Read all files again, including those of active units that have no slice yet."""
        if self._active is not None and self._begun.is_set():
            self._active.reload()
        else:
            self.load_again()

    def load_again(self) -> None:
        """Read the files again, and configure every slice of the tree by them."""
        former, self._load = self._load, self._directory_load()
        former.over.set()
        for slice_ in self._population.slices():
            if not self._asks_nothing(slice_):
                self.configure(slice_)

    def _timeout_of(self, slice_: Slice) -> int | None:
        """Return the time in ``slices.d`` that a slice made ahead waits for its cgroup, milliseconds; None if not
        given."""
        timeouts = self._load.timeouts
        if slice_ not in timeouts:
            timeouts[slice_] = self._load.slices.of(slice_).timeout_ms
        return timeouts[slice_]

    def _asks_nothing(self, slice_: Slice) -> bool:
        """Whether no file has settings for a slice, now or before.

        That is true for nearly all of ten thousand slices that a user made.

        A process that enters such a slice has it configured, with the slices above.
        """
        if self._active is not None and unit_of(slice_) is not None:
            return False
        known = any(SliceOn(slice_, gpu) in self._groups for gpu in self._controller.gpus)
        return not known and not self._load.slices.of(slice_)

    def drop(self, unit: str) -> None:
        """Forget the files of a unit that was loaded or unloaded. They are read again when needed."""
        self._load.units.pop(unit, None)

    def _directory_load(self) -> Load:
        """Return a load for which only ``slices.d`` has been read."""
        load = Load(files.of_directory(self._directory, self._load.slices))
        if not self._begun.is_set():
            load.logged = self._load.logged  # to readers of the log, this is still the first load
        load.tell(load.slices.mistakes)
        return load

    def tell(self, mistakes: Iterable[Mistake]) -> None:
        """Report settings that have no effect."""
        self._load.tell(mistakes)

    # Configuring groups

    def configure(self, slice_: Slice) -> None:
        """Have a slice, and every slice above it, configured on every GPU soon."""
        for gpu in self._controller.gpus:
            self._later(SliceOn(slice_, gpu))

    def _is_configured(self, group: SliceOn) -> bool:
        state = self._groups.get(group)
        if state is None or state.load is not self._load:
            return False
        unit = unit_of(group.slice) if self._active is not None else None
        return state.reading is (NO_UNIT if unit is None else self._load.units.get(unit))

    def _later(self, group: SliceOn) -> trio.Event:
        """Have a slice, and every one above it, configured on a GPU soon.

        Return an event that is set when that is done.
        """
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
        """Configure all levels, and return whether that was done with the current load."""
        levels = path_of(group.slice)
        await self._turns.turn()
        for level in levels:
            self._reading(load, unit_of(level))  # start reading all of them at once
        for level in levels:
            reading = self._reading(load, unit_of(level))
            if not reading.done.is_set():
                await reading.done.wait()
                await self._turns.turn()
            if reading.settings is None:
                await load.over.wait()  # a new load comes with the next connection
            if load is not self._load:
                return False
            await self._configure(load, reading, SliceOn(level, group.gpu))
        return load is self._load

    def is_plain(self, unit: str) -> bool:
        """Whether a unit is known to have no settings."""
        reading = self._load.units.get(unit)
        plain = reading is not None and reading.settings is not None and not reading.settings
        return plain and not self._load.slices.of_name(unit)

    async def unit(self, unit: str) -> Settings | None:
        """Return the settings from a unit's files, else from ``slices.d``; None if the files cannot be read now."""
        load = self._load
        reading = self._reading(load, unit)
        await reading.done.wait()
        return None if reading.settings is None else reading.settings or load.slices.of_name(unit)

    def _reading(self, load: Load, unit: str | None) -> Reading:
        """Return the files of a unit, which are read once per load."""
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
            except Exception:  # whatever one unit's files contain, other units get their settings
                log.exception("%s: its files are not understood", unit)
                reading.settings = Settings()
        finally:
            reading.done.set()

    async def _settings(self, unit: str, paths: Sequence[Path]) -> tuple[Settings, Sequence[Mistake]]:
        """Return the settings from the files of a unit, trying again while descriptors or memory are short.

        Until that works the unit keeps its present settings.
        """
        short = False
        while True:
            try:
                return files.of_unit(paths)
            except OSError as error:
                log.log(logging.DEBUG if short else logging.WARNING, "%s: not read yet: %s", unit, error.strerror)
            short = True
            await trio.sleep(SHORT_S)

    async def _configure(self, load: Load, reading: Reading, group: SliceOn) -> None:
        """Write the settings of one group, and the defaults of properties that have no setting any more."""
        slice_ = group.slice
        entry = self._population.slice_entry(slice_)
        if entry is None:
            return
        state = self._groups.setdefault(group, Configured())
        if state.load is load and state.reading is reading:
            return
        async with state.turn:
            if state.load is load and state.reading is reading:
                return  # another task has done it in the meantime
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
                        self._population.let_go(slice_)  # the write kept the slice in the tree, which no file asked for
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
        """Update the number of slices with settings from files."""
        (self._named.add if named else self._named.discard)(slice_)
        self._controller.facts["units.configured"] = str(len(self._named))


def _read_already() -> Reading:
    reading = Reading(settings=Settings())
    reading.done.set()
    return reading


NO_UNIT = _read_already()
"""Reading for cgroups that are not units."""
