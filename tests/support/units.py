"""A manager of units in this process, which does as a test tells it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import attrs
import pytest
import trio

from backend.core.protocols import Gpu
from backend.core.records import Books
from backend.ledgers.soft import SoftLedger
from backend.process.identity import Slice, SliceOn
from ggroupfs.units import Units
from ggroupfs.units.manager import News
from tests.support.harness import Harness, World, running


@attrs.define
class Unit:
    """A loaded unit."""

    files: Sequence[Path]
    """Fragment and drop-ins."""
    cgroup: str
    """Its cgroup once it is active."""
    active: bool = True
    """Whether it was started."""


class FakeManager:
    """Double of :class:`ggroupfs.units.manager.Manager`."""

    name = "systemd"

    def __init__(self, directory: Path) -> None:
        self.units: dict[str, Unit] = {}
        """Loaded units by name."""
        self.calls: list[tuple[str, str]] = []
        """Every call, with its unit."""
        self.answers = trio.Event()
        """Set while it answers calls for files."""
        self.answers.set()
        self.seconds = 0.0
        """Seconds that the files of a unit take; units are served one after another."""
        self.turn = trio.Lock()
        """Held by the caller that is being answered."""
        self.refuses = False
        """Whether connections are refused."""
        self.connected = 0
        """Number of connections made."""
        self._runs = 0
        self._directory = directory
        self._connection: FakeConnection | None = None

    # Acts of a test

    def unit(self, cgroup: str, *lines: str, active: bool = True) -> Path:
        """Load a unit with a section, named as its cgroup; return its file."""
        name = cgroup.rpartition("/")[2]
        path = self._directory / name
        path.write_text("\n".join(["[X-GGroup]", *lines, ""]) if lines else "[Unit]\n")
        self.units[name] = Unit([path], cgroup, active)
        return path

    def start(self, *names: str) -> None:
        """Start units, and announce it as often as systemd does."""
        self._runs += 1
        for name in names:
            self.units[name].active = True
            self.tell(News(name, active=False))
            for _ in range(2):
                self.tell(News(name, active=True, run=b"%d" % self._runs))

    def stop(self, name: str) -> None:
        """Stop a unit, and drop it."""
        del self.units[name]
        self.tell(News(name, loaded=True, active=False))

    def reload(self) -> None:
        """Announce a daemon-reload."""
        self.tell(News(None))

    def lose(self) -> None:
        """Cut the connection to the bus."""
        assert self._connection is not None
        self._connection.lost.set()
        self._connection = None

    def hold(self) -> trio.Event:
        """Withhold files from now on, until the returned event is set."""
        self.answers = trio.Event()
        return self.answers

    def tell(self, news: News) -> None:
        assert self._connection is not None
        assert self._connection.tell is not None
        self._connection.tell(news)

    # Calls of the code under test

    async def connect(self) -> FakeConnection:
        await trio.lowlevel.checkpoint()
        if self.refuses:
            raise ConnectionRefusedError("nobody there")
        self.connected += 1
        self._connection = FakeConnection(self)
        return self._connection


class FakeConnection:
    """Double of :class:`ggroupfs.units.manager.Connection`."""

    def __init__(self, manager: FakeManager) -> None:
        self.lost = trio.Event()
        """Set when the connection is over."""
        self.answered = 0
        """Number of answered calls for files."""
        self.tell: Callable[[News], None] | None = None
        """Receiver of news; None before `run`."""
        self._manager = manager

    async def run(self, tell: Callable[[News], None]) -> None:
        self.tell = tell
        await self.lost.wait()

    async def subscribe(self) -> None:
        await self._called("subscribe")

    async def active(self) -> Sequence[str]:
        await self._called("active")
        return [name for name, unit in self._manager.units.items() if unit.active]

    async def files(self, unit: str) -> Sequence[Path]:
        await self._called("files", unit)
        await self._until(self._manager.answers)
        async with self._manager.turn:
            await trio.sleep(self._manager.seconds)
        self.answered += 1
        return self._manager.units[unit].files if unit in self._manager.units else []

    async def is_active(self, unit: str) -> bool:
        await self._called("is_active", unit)
        found = self._manager.units.get(unit)
        return found is not None and found.active

    async def cgroup(self, unit: str) -> str:
        await self._called("cgroup", unit)
        found = self._manager.units.get(unit)
        return found.cgroup if found is not None and found.active else ""

    async def _called(self, name: str, unit: str = "") -> None:
        await trio.lowlevel.checkpoint()
        if self.lost.is_set():
            raise ConnectionError("lost")
        self._manager.calls.append((name, unit))

    async def _until(self, event: trio.Event) -> None:
        """Wait for an event; ConnectionError if the connection ends first."""
        async with trio.open_nursery() as nursery:

            async def watch(other: trio.Event) -> None:
                await other.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch, self.lost)
            nursery.start_soon(watch, event)
        if not event.is_set():
            raise ConnectionError("lost")


@contextlib.asynccontextmanager
async def policy(
    tmp_path: Path,
    manager: FakeManager | None,
    *gpus: Gpu,
    ledger: SoftLedger | None = None,
    world: World | None = None,
) -> AsyncIterator[Harness]:
    """Run the program with its units, `tmp_path` being the slices.d."""
    async with running(*gpus, ledger=ledger, world=world) as h, trio.open_nursery() as nursery:
        await nursery.start(Units(h.controller, tmp_path, manager).run)
        yield h
        nursery.cancel_scope.cancel()


@pytest.fixture
def manager(tmp_path: Path) -> FakeManager:
    directory = tmp_path / "system"
    directory.mkdir()
    return FakeManager(directory)


def books(h: Harness, path: str, gpu: int = 0) -> Books:
    return h.ledger.books(SliceOn(Slice(path), gpu))
