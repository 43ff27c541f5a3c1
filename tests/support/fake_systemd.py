"""A private bus, and a program on it that answers as systemd does (org.freedesktop.systemd1(5))."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import trio
from jeepney import DBusAddress, Message, MessageType, new_error, new_method_return, new_signal
from jeepney.bus_messages import message_bus
from jeepney.io.trio import DBusConnection, open_dbus_connection
from jeepney.low_level import HeaderFields

NAME = "org.freedesktop.systemd1"
MANAGER = DBusAddress("/org/freedesktop/systemd1", NAME, f"{NAME}.Manager")

CONFIG = """<busconfig><type>session</type><listen>unix:path={socket}</listen><auth>EXTERNAL</auth>
<policy context="default"><allow send_destination="*"/><allow receive_sender="*"/><allow own="*"/></policy>
</busconfig>"""


@contextlib.contextmanager
def bus(directory: Path) -> Iterator[str]:
    """Yield the address of a bus in `directory`; the bus ends with the context."""
    config, socket = directory / "bus.conf", directory / "bus"
    config.write_text(CONFIG.format(socket=socket))
    words = ["dbus-daemon", f"--config-file={config}", "--nofork", "--nopidfile", "--print-address"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as daemon:
        try:
            assert daemon.stdout is not None
            assert daemon.stdout.readline().startswith("unix:path=")
            yield f"unix:path={socket}"
        finally:
            daemon.terminate()


@attrs.define
class Unit:
    """A loaded unit."""

    files: list[Path]
    """Fragment and drop-ins."""
    cgroup: str
    """Its cgroup while it is active."""
    active: str = "active"
    """Its ActiveState."""
    run: int = 1
    """Number of times that it was started: its InvocationID."""
    slice: str = "system.slice"
    """Its slice, now or once it is started."""
    load: str = "loaded"
    """Its LoadState."""


@attrs.define(eq=False)
class FakeSystemd:
    """A systemd with units and without processes, which records the calls that it gets."""

    connection: DBusConnection
    units: dict[str, Unit] = attrs.field(factory=dict)
    """Loaded units by name."""
    installed: dict[str, Unit] = attrs.field(factory=dict)
    """Units by name that are not loaded, and can be."""
    aliases: dict[str, str] = attrs.field(factory=dict)
    """Other names of units."""
    calls: list[tuple[str, Any]] = attrs.field(factory=list)
    """Methods of the manager that were called, with their arguments."""
    gets: list[tuple[str, str]] = attrs.field(factory=list)
    """Properties that were read: object and name."""
    start: Callable[[str, dict[str, Any]], str] = lambda name, properties: "done"
    """Return the result of the job of a transient unit."""

    async def serve(self) -> None:
        """Answer until the bus is gone."""
        with contextlib.suppress(trio.EndOfChannel, trio.BrokenResourceError, trio.ClosedResourceError):
            while True:
                message = await self.connection.receive()
                if message.header.message_type is MessageType.method_call:
                    await self._answer(message)

    async def leave(self) -> None:
        """Leave the bus."""
        await self.connection.send(message_bus.ReleaseName(NAME))

    async def come(self) -> None:
        """Join the bus, again."""
        await self.connection.send(message_bus.RequestName(NAME))

    async def reload(self) -> None:
        """Send what subscribers get at a daemon-reload."""
        for begins in (True, False):
            await self._signal(MANAGER, "Reloading", "b", (begins,))

    async def load(self, name: str, unit: Unit) -> None:
        """Load a unit, in the state that it has."""
        self.units[name] = unit
        await self._signal(MANAGER, "UnitNew", "so", (name, path_of(name)))

    async def become(self, name: str, state: str) -> None:
        """Have a unit start or stop."""
        unit = self.units[name]
        unit.run += unit.active in ("inactive", "failed")
        unit.active = state
        await self.change(name)

    async def change(self, name: str) -> None:
        """Send what subscribers get when something about a unit has changed, other properties included."""
        unit = self.units[name]
        emitter = DBusAddress(path_of(name), NAME, "org.freedesktop.DBus.Properties")
        changed = {
            "Following": ("s", "ActiveState"),
            "ActiveState": ("s", unit.active),
            "StateChangeTimestamp": ("t", 1 << 50),
            "Job": ("(uo)", (0, "/")),
            "Markers": ("as", []),
            "InvocationID": ("ay", unit.run.to_bytes(16, "big")),
        }
        await self._signal(emitter, "PropertiesChanged", "sa{sv}as", (f"{NAME}.Unit", changed, []))

    async def _signal(self, emitter: DBusAddress, name: str, signature: str, body: tuple[Any, ...]) -> None:
        await self.connection.send(new_signal(emitter, name, signature, body))

    async def _answer(self, message: Message) -> None:
        fields = message.header.fields
        member, place = fields[HeaderFields.member], fields[HeaderFields.path]
        if member == "Get":
            self.gets.append((place, message.body[1]))
            await self._get(message, place, *message.body)
            return
        self.calls.append((member, message.body))
        match member:
            case "Subscribe":
                reply = new_method_return(message)
            case "ListUnitsByPatterns":
                rows = [
                    (name, name, "loaded", unit.active, "running", "", path_of(name), 0, "", "/")
                    for name, unit in self.units.items()
                    if any(fnmatch.fnmatchcase(name, pattern) for pattern in message.body[1])
                ]
                reply = new_method_return(message, "a(ssssssouso)", (rows,))
            case "GetUnit" if message.body[0] in self.units:
                reply = new_method_return(message, "o", (path_of(message.body[0]),))
            case "LoadUnit":
                name = self.aliases.get(message.body[0], message.body[0])
                if name not in self.units:
                    self.units[name] = self.installed.get(name, Unit([], "", "inactive", load="not-found"))
                reply = new_method_return(message, "o", (path_of(name),))
            case "GetUnit":
                reply = new_error(message, f"{NAME}.NoSuchUnit", "s", (f"Unit {message.body[0]} not loaded.",))
            case "StartTransientUnit":
                job = f"{MANAGER.object_path}/job/1"
                await self.connection.send(new_method_return(message, "o", (job,)))
                name, _, properties, _ = message.body
                result = self.start(name, dict(properties))
                await self._signal(MANAGER, "JobRemoved", "uoss", (1, job, name, result))
                return
            case _:
                reply = new_error(message, "org.freedesktop.DBus.Error.UnknownMethod")
        await self.connection.send(reply)

    async def _get(self, message: Message, place: str, interface: str, name: str) -> None:
        known, unit = next((one, unit) for one, unit in self.units.items() if path_of(one) == place)
        files = [os.fspath(path) for path in unit.files]
        value = {
            "FragmentPath": ("s", files[0] if files else ""),
            "DropInPaths": ("as", files[1:]),
            "ActiveState": ("s", unit.active),
            "ControlGroup": ("s", unit.cgroup if unit.active == "active" else ""),
            "Id": ("s", known),
            "LoadState": ("s", unit.load),
            "Slice": ("s", unit.slice if unit.load == "loaded" else ""),
        }[name]
        kind = place.rpartition("_2e")[2].capitalize()
        assert interface == (f"{NAME}.{kind}" if name in ("ControlGroup", "Slice") else f"{NAME}.Unit")
        await self.connection.send(new_method_return(message, "v", (value,)))


async def open_systemd(address: str) -> FakeSystemd:
    """Connect to a bus; the caller runs `serve`."""
    systemd = FakeSystemd(await open_dbus_connection(address))
    await systemd.come()
    while (await systemd.connection.receive()).header.message_type is not MessageType.method_return:
        pass  # the signal that the name was acquired
    return systemd


def path_of(unit: str) -> str:
    """Return the object path of a unit (sd_bus_path_encode(3))."""
    escaped = re.sub(rb"[^A-Za-z0-9]|^[0-9]", lambda match: b"_%02x" % match[0][0], unit.encode())
    return f"/org/freedesktop/systemd1/unit/{escaped.decode()}"
