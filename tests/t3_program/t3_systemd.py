"""Units as systemd reports them: on a real bus, in real time."""

from __future__ import annotations

import contextlib
import functools
import itertools
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from jeepney import Message, new_signal
from jeepney.io.trio import open_dbus_connection
from jeepney.low_level import HeaderFields, Parser

from backend.process.identity import Slice, SliceOn
from ggroupfs.units import Units
from ggroupfs.units.systemd import Bus, Systemd, name_at
from ggroupfs.units.wire import Reader, Unread
from tests.support.fake_systemd import MANAGER, FakeSystemd, Unit, bus, open_systemd, path_of
from tests.support.harness import MIB, REAL_S, Harness, Spawn, running, until

pytestmark = pytest.mark.skipif(shutil.which("dbus-daemon") is None, reason="there is no dbus-daemon")


def real(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test, which must not hang."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def limited() -> None:
            with trio.fail_after(REAL_S):
                await test(*args, **kwargs)

        trio.run(limited)

    return run


@contextlib.asynccontextmanager
async def serving(address: str, units: dict[str, Unit]) -> AsyncIterator[FakeSystemd]:
    systemd = await open_systemd(address)
    systemd.units = units
    async with systemd.connection, trio.open_nursery() as nursery:
        nursery.start_soon(systemd.serve)
        yield systemd
        nursery.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def policy(tmp_path: Path, address: str) -> AsyncIterator[Harness]:
    async with running() as h, trio.open_nursery() as nursery:
        await nursery.start(Units(h.controller, tmp_path / "slices.d", Systemd(address)).run)
        yield h
        nursery.cancel_scope.cancel()


def high(h: Harness, path: str) -> int | None:
    group = SliceOn(Slice(path), 0)
    return h.ledger.books(group).high // MIB if h.controller.population.holds(group) else None


def unit(tmp_path: Path, name: str, cgroup: str, *lines: str, active: str = "active") -> Unit:
    path = tmp_path / name
    path.write_text("\n".join(["[X-GGroup]", *lines, ""]))
    return Unit([path], cgroup, active)


@real
async def test_units_of_the_bus(tmp_path: Path, spawn: Spawn) -> None:
    """Units at the start, units that are started, stopped and reloaded, and a process that comes."""
    units = {
        "a.slice": unit(tmp_path, "a.slice", "/a.slice", "GMemHigh=8M"),
        "idle.service": unit(tmp_path, "idle.service", "/idle.service", "GMemHigh=8M", active="inactive"),
        "dev-x.mount": unit(tmp_path, "dev-x.mount", "/dev-x.mount", "GMemHigh=8M"),
    }
    drop_in = tmp_path / "50.conf"
    drop_in.write_text("[X-GGroup]\nGMemHigh=4M\n")
    units["a.slice"].files.append(drop_in)
    with bus(tmp_path) as address:
        async with serving(address, units) as systemd, policy(tmp_path, address) as h:
            assert high(h, "/a.slice") == 4
            assert await h.listdir("slice") == ["a.slice"]
            await systemd.become("idle.service", "active")
            await until(lambda: high(h, "/idle.service") == 8, "it is told")
            await systemd.load("1-b@\\x2d.scope", unit(tmp_path, "b.scope", "/a.slice/1-b@\\x2d.scope", "GMemHigh=2M"))
            await until(lambda: high(h, "/a.slice/1-b@\\x2d.scope") == 2, "it is told")
            await systemd.become("idle.service", "inactive")
            await until(lambda: high(h, "/idle.service") is None, "it is told")
            units["c.service"] = unit(tmp_path, "c.service", "/a.slice/c.service", "GMemHigh=1M")
            await h.arrive(spawn().pid, "/a.slice/c.service/inner")
            assert high(h, "/a.slice/c.service") == 1, "nobody told of it, but who came had its limit"
            drop_in.write_text("")
            await systemd.reload()
            await until(lambda: high(h, "/a.slice") == 8, "it is told")


@real
async def test_where_a_unit_is_or_will_be(tmp_path: Path) -> None:
    """A running unit, one that systemd has to load, one under another name, and one that cannot be started."""
    installed = {
        "later.service": Unit([], "", "inactive", slice="a-b.slice"),
        "cpu.service": Unit([], "", "inactive", slice="-.slice"),
        "hidden.service": Unit([], "", "inactive", load="masked"),
        "odd.service": Unit([], "", "inactive", slice="a--b.slice"),
    }
    places = {
        "c.service": "/a.slice/c.service",
        "later.service": "/a.slice/a-b.slice/later.service",
        "cpu.service": "/_cpu.service",
        "other.service": "/a.slice/c.service",
        "hidden.service": "",
        "never.service": "",
    }
    with bus(tmp_path) as address:
        units = {"c.service": unit(tmp_path, "c.service", "/a.slice/c.service")}
        async with serving(address, units) as systemd, trio.open_nursery() as nursery:
            systemd.installed, systemd.aliases = installed, {"other.service": "c.service"}
            connection = await Systemd(address).connect()
            nursery.start_soon(connection.run, lambda news: None)
            assert {name: await connection.home(name) for name in places} == places
            with pytest.raises(ConnectionError, match=r"a--b\.slice is no name of a slice"):
                await connection.home("odd.service")
            nursery.cancel_scope.cancel()


@real
async def test_two_hundred_services(tmp_path: Path) -> None:
    """Their calls are in flight together: none waits for another's answers."""
    names = [f"s{number}.service" for number in range(1, 201)]
    units = {name: unit(tmp_path, name, f"/all.slice/{name}", f"GMemHigh={name[1:-8]}M") for name in names}
    with bus(tmp_path) as address:
        async with serving(address, units) as systemd, policy(tmp_path, address) as h:
            await until(lambda: [high(h, f"/all.slice/{name}") for name in names] == list(range(1, 201)), "all limits")
            assert Counter(name for _, name in systemd.gets) == {
                **{"FragmentPath": 200, "DropInPaths": 200, "ControlGroup": 200}
            }, "what they do was listed, and so were their objects"
            assert [body for member, body in systemd.calls if member == "GetUnit"] == [("all.slice",)]
            names_asked = [name for _, name in systemd.gets]
            assert "ControlGroup" not in names_asked[:64], "none waits for the answers to another's"


@real
async def test_signals_of_others_are_none(tmp_path: Path) -> None:
    """Any client of the bus may send us a signal."""
    units = {"a.slice": unit(tmp_path, "a.slice", "/a.slice", "GMemHigh=8M")}
    with bus(tmp_path) as address:
        async with serving(address, units) as systemd, policy(tmp_path, address) as h:
            loads = len([call for call in systemd.calls if call[0] == "ListUnitsByPatterns"])
            stranger = await open_dbus_connection(address)
            async with stranger:
                for number in range(1, 9):
                    signal = new_signal(MANAGER, "Reloading", "b", (False,))
                    signal.header.fields[HeaderFields.destination] = f":1.{number}"
                    await stranger.send(signal)
                await systemd.become("a.slice", "inactive")
                await until(lambda: high(h, "/a.slice") is None, "it is told")
            assert len([call for call in systemd.calls if call[0] == "ListUnitsByPatterns"]) == loads


@pytest.mark.logs("^systemd: connection lost$")
@real
async def test_a_systemd_that_is_another(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After a re-execution everything is read anew. While there is no systemd, the configuration stays."""
    units = {"a.slice": unit(tmp_path, "a.slice", "/a.slice", "GMemHigh=8M")}
    with bus(tmp_path) as address:
        async with serving(address, units) as systemd, policy(tmp_path, address) as h:
            assert high(h, "/a.slice") == 8
            await systemd.leave()
            await until(lambda: bool(caplog.records), "it is noticed")
            assert high(h, "/a.slice") == 8
            units["a.slice"] = unit(tmp_path, "a.slice", "/a.slice", "GMemHigh=4M")
            await systemd.come()
            await until(lambda: high(h, "/a.slice") == 4, "it is read anew")


@real
async def test_a_bus_without_systemd(tmp_path: Path, spawn: Spawn) -> None:
    (tmp_path / "slices.d").mkdir()
    (tmp_path / "slices.d" / "a.conf").write_text("[/a.slice]\nGMemHigh=8M\n")
    with bus(tmp_path) as address:
        async with policy(tmp_path, address) as h:
            assert h.controller.facts["units"] == "slices.d"
            await h.arrive(spawn().pid, "/a.slice")
            assert high(h, "/a.slice") == 8


def test_names_and_objects() -> None:
    for name in ("a.service", "1-b@\\x2d.scope", "über.slice"):
        assert name_at(path_of(name)) == name
    assert name_at("/org/freedesktop/systemd1/job/1") == ""
    assert name_at("/org/freedesktop/systemd1/unit/_ff") == ""


@real
@pytest.mark.logs("^the bus: no message of D-Bus")
async def test_what_is_no_message_loses_the_connection() -> None:
    """Nothing else is lost: a caller that waits for an answer gets an error, as when the bus is gone."""

    class Garbled:
        """A connection on which a message of an unknown kind arrives."""

        outgoing_serial = itertools.count(1)

        def __init__(self) -> None:
            self.reader = Reader(Parser())
            self.sent = trio.Event()

        async def send(self, message: Message, serial: int) -> None:
            self.sent.set()

        async def receive(self) -> Unread | None:
            await self.sent.wait()
            self.reader.add_data(b"l" + bytes(40))
            return self.reader.get_next_message()

        async def aclose(self) -> None:
            pass

    bus = Bus(Garbled(), ":1.1")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bus.run, lambda news: None)
        with pytest.raises(ConnectionError, match="the bus is gone"):
            await bus.active()
