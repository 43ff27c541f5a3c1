"""systemd over D-Bus (org.freedesktop.systemd1(5)): which units exist, and where their files and cgroups are."""

from __future__ import annotations

import contextlib
import logging
import re
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import trio
from jeepney import DBusAddress, HeaderFields, Message, MessageType, Properties, new_method_call
from jeepney.bus_messages import message_bus
from jeepney.io.trio import DBusConnection, open_dbus_connection

from ggroupfs.units.manager import KINDS, News
from ggroupfs.units.naming import escaped, place_of
from ggroupfs.units.wire import Malformed, Reader, Unread

log = logging.getLogger(__name__)

NAME = "org.freedesktop.systemd1"
MANAGER = DBusAddress("/org/freedesktop/systemd1", NAME, f"{NAME}.Manager")
UNITS = "/org/freedesktop/systemd1/unit/"
UNIT = f"{NAME}.Unit"
PROPERTIES = "org.freedesktop.DBus.Properties"

CONNECT_S = 2.0
"""Seconds within which the bus has to accept the connection."""

ASKED = 32
"""Units queried at the same time, with two calls each at most: a bus refuses calls beyond its limit, which is 128 by
default (dbus-daemon(1))."""

GONE = (f"{NAME}.NoSuchUnit", "org.freedesktop.DBus.Error.UnknownObject", "org.freedesktop.DBus.Error.UnknownInterface")
"""Errors for a unit that is not loaded, or not any more."""

IDLE = frozenset(("inactive", "failed"))
"""Values of ActiveState for a unit that is not active."""

SIGNALS = (
    *(f"type='signal',sender='{NAME}',interface='{NAME}.Manager',member='{m}'" for m in ("UnitNew", "UnitRemoved")),
    f"type='signal',sender='{NAME}',interface='{NAME}.Manager',member='Reloading'",
    f"type='signal',sender='{NAME}',interface='{PROPERTIES}',member='PropertiesChanged',arg0='{UNIT}'",
    f"type='signal',sender='org.freedesktop.DBus',member='NameOwnerChanged',arg0='{NAME}'",
)

ENDINGS = tuple(f"_2e{kind[1:]}" for kind in KINDS)
"""Suffixes of the object paths of units that have a cgroup."""

LOST = (trio.EndOfChannel, trio.BrokenResourceError, trio.ClosedResourceError)
"""Exceptions of a connection that was closed at the other end."""


class Refused(Exception):
    """An error reply from the other end, with its name and message."""

    def __init__(self, name: str, words: str) -> None:
        super().__init__(f"{name}: {words}")
        self.name = name


@attrs.define(eq=False)
class Call:
    """A method call in progress."""

    then: Callable[[Unread], None] | None = None
    """Called with a successful reply before any message behind it is handled."""
    answered: trio.Event = attrs.field(factory=trio.Event)
    """Set when there is a reply, or will be none."""
    reply: Unread | None = None
    """Reply; None once the connection is lost."""


@attrs.frozen
class Systemd:
    """The system manager, a :class:`ggroupfs.units.manager.Manager`."""

    address: str = "SYSTEM"
    """Address of a bus (D-Bus Specification, "Server Addresses"), or SYSTEM for the system bus."""
    name: str = "systemd"
    """Name shown in ``ggroup.backend``."""

    async def connect(self) -> Bus:
        """OSError if there is no bus, or no systemd on it."""
        try:
            with trio.fail_after(CONNECT_S):
                connection = await open_dbus_connection(self.address)
                try:
                    async with connection.router() as router:
                        reply = await router.send_and_get_reply(message_bus.GetNameOwner(NAME))
                    if reply.header.message_type is MessageType.error:
                        raise ConnectionError(f"{NAME} is not on the bus")
                except BaseException:
                    with trio.CancelScope(shield=True):
                        await connection.aclose()
                    raise
                connection.parser = Reader(connection.parser)
                return Bus(connection, reply.body[0])
        except Exception as error:  # jeepney raises many kinds, some in groups
            raise ConnectionError(str(_first(error)) or type(error).__name__) from None


class Bus:
    """A connection to systemd, a :class:`ggroupfs.units.manager.Connection`.

    A unit's object is queried only while the unit is known to be loaded. A query of the object path made from a name
    would load the unit, systemd would report it as new, and it would be queried again.
    """

    def __init__(self, connection: DBusConnection, owner: str) -> None:
        self.answered = 0
        self._connection = connection
        self._outgoing: deque[tuple[int, Message]] = deque()
        self._more = trio.Event()  # set when there is something to send
        self._calls: dict[int, Call] = {}
        self._places: dict[str, str] = {}  # the objects of loaded units
        self._room = trio.CapacityLimiter(ASKED)
        self._owner = owner  # the unique name of systemd: signals from other senders are ignored
        self._lost = False

    async def run(self, tell: Callable[[News], None]) -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send)
                try:
                    while not self._lost:
                        self._take(await self._connection.receive(), tell)
                except LOST as error:
                    log.debug("the bus: %r", error)
                except Malformed as error:
                    log.warning("the bus: %s", error)
                self._give_up()
                nursery.cancel_scope.cancel()
        finally:
            self._give_up()
            with trio.CancelScope(shield=True):
                await self._connection.aclose()

    def _give_up(self) -> None:
        """Note that the connection is lost, and end all waiting calls."""
        self._lost = True
        for call in self._calls.values():
            call.answered.set()

    async def _send(self) -> None:
        """Send queued messages."""
        while True:
            await self._more.wait()
            self._more = trio.Event()
            while self._outgoing:
                serial, message = self._outgoing.popleft()
                try:
                    await self._connection.send(message, serial=serial)
                except LOST as error:
                    log.debug("the bus: %r", error)
                    self._give_up()
                    return  # the receiver notices this as well

    def _take(self, message: Unread, tell: Callable[[News], None]) -> None:
        call = self._calls.pop(message.header.fields.get(HeaderFields.reply_serial, 0), None)
        if call is not None:
            self.answered += 1
            if call.then is not None and message.header.message_type is MessageType.method_return:
                call.then(message)
            call.reply = message
            call.answered.set()
        elif message.header.message_type is MessageType.signal:
            self._signal(message, tell)

    def _signal(self, message: Unread, tell: Callable[[News], None]) -> None:
        fields = message.header.fields
        member, sender = fields.get(HeaderFields.member), fields.get(HeaderFields.sender)
        if member == "NameOwnerChanged" and sender == message_bus.bus_name:
            name, _, owner = message.body
            if name == NAME and owner != self._owner:
                self._give_up()  # systemd was re-executed, or is another one: start over
        elif sender != self._owner:
            pass  # any program on the bus may send signals
        elif member == "PropertiesChanged":
            if fields.get(HeaderFields.path, "").endswith(ENDINGS):
                self._changed(fields[HeaderFields.path], message, tell)
        elif member == "Reloading":
            if not message.body[0]:
                tell(News(None))
        elif member == "UnitNew":
            name, place = message.body
            if name.endswith(KINDS):
                known, self._places[name] = name in self._places, place
                tell(News(name, loaded=not known))  # a query may have loaded it before this signal
        elif member == "UnitRemoved":
            name, _ = message.body
            if name.endswith(KINDS):
                self._places.pop(name, None)
                tell(News(name, loaded=True, active=False))

    def _changed(self, place: str, message: Unread, tell: Callable[[News], None]) -> None:
        unit, active, run = name_at(place), message.named("ActiveState", "s"), message.named("InvocationID", "ay")
        if active is not None:
            self._places[unit] = place
            tell(News(unit, active=active not in IDLE, run=run if isinstance(run, bytes) else b""))

    async def subscribe(self) -> None:
        try:
            for rule in SIGNALS:
                await self._reply(self._call(message_bus.AddMatch(rule)))
            if await self._reply(self._call(message_bus.GetNameOwner(NAME))) != (self._owner,):
                raise ConnectionError(f"{NAME} is another")  # and its changes since then were not reported
            await self._reply(self._call(new_method_call(MANAGER, "Subscribe")))
        except Refused as error:
            raise ConnectionError(str(error)) from None

    async def active(self) -> Sequence[str]:
        def loaded(reply: Unread) -> None:
            self._places.update({name: place for name, _, _, _, _, _, place, *_ in reply.body[0]})

        patterns: tuple[list[str], list[str]] = ([], [f"*{kind}" for kind in KINDS])
        try:
            call = self._call(new_method_call(MANAGER, "ListUnitsByPatterns", "asas", patterns), loaded)
            (units,) = await self._reply(call)
        except Refused as error:
            raise ConnectionError(str(error)) from None
        return [name for name, _, _, state, *_ in units if state not in IDLE]

    async def is_active(self, unit: str) -> bool:
        try:
            (state,) = await self._get(await self._place(unit), UNIT, "ActiveState")
        except Refused as error:
            _note(unit, error)
            return False
        return state not in IDLE

    async def files(self, unit: str) -> Sequence[Path]:
        try:
            place = self._places.get(unit) or await self._place(unit)
            fragment, drop_ins = await self._get(place, UNIT, "FragmentPath", "DropInPaths")
        except Refused as error:
            _note(unit, error)
            return []
        return [Path(path) for path in (fragment, *drop_ins) if path]

    async def cgroup(self, unit: str) -> str:
        try:
            place = self._places.get(unit) or await self._place(unit)
            (path,) = await self._get(place, f"{NAME}.{unit.rpartition('.')[2].capitalize()}", "ControlGroup")
        except Refused as error:
            _note(unit, error)
            return ""
        return str(path)

    async def home(self, unit: str) -> str:
        """Return the path of the cgroup where a unit is, or will be once started; empty if systemd cannot start it.

        The unit is loaded for this if necessary. ConnectionError.
        """
        try:
            place = await self._place(unit, "LoadUnit")
            name, state = await self._get(place, UNIT, "Id", "LoadState")
            kind = f"{NAME}.{name.rpartition('.')[2].capitalize()}"
            path, slice_ = await self._get(place, kind, "ControlGroup", "Slice")
            if path or state != "loaded" or not slice_:
                return str(path)
            return f"{place_of(slice_).rstrip('/')}/{escaped(name)}"
        except Refused as error:
            _note(unit, error)
            return ""
        except ValueError as error:
            raise ConnectionError(str(error)) from None

    async def _place(self, unit: str, method: str = "GetUnit") -> str:
        """Return the object of a unit, which has to be loaded already, or gets loaded by `method`."""
        async with self._room:
            call = self._call(
                new_method_call(MANAGER, method, "s", (unit,)),
                lambda reply: self._places.update({unit: reply.body[0]}),
            )
            return str((await self._reply(call))[0])

    async def _get(self, place: str, interface: str, *names: str) -> Sequence[Any]:
        """Return properties of an object."""
        properties = Properties(DBusAddress(place, NAME, interface))
        async with self._room:
            calls = [self._call(properties.get(name)) for name in names]
            return [(await self._reply(call))[0][1] for call in calls]

    def _call(self, message: Message, then: Callable[[Unread], None] | None = None) -> Call:
        """Queue a method call."""
        serial, call = next(self._connection.outgoing_serial), Call(then)
        if self._lost:
            call.answered.set()
        else:
            self._calls[serial] = call
            self._outgoing.append((serial, message))
            self._more.set()
        return call

    async def _reply(self, call: Call) -> tuple[Any, ...]:
        """Return the result of a method. Refused, or ConnectionError."""
        await call.answered.wait()
        if call.reply is None:
            raise ConnectionError("the bus is gone")
        try:
            if call.reply.header.message_type is MessageType.error:
                words = call.reply.body[0] if call.reply.body else ""
                raise Refused(call.reply.header.fields.get(HeaderFields.error_name, ""), words)
            return call.reply.body
        except Malformed as error:
            raise ConnectionError(str(error)) from None


def _note(unit: str, error: Refused) -> None:
    """Log an error about a unit. A unit that is not loaded has no settings; any other error deserves a warning."""
    log.log(logging.DEBUG if error.name in GONE else logging.WARNING, "%s: %s", unit, error)


def name_at(path: str) -> str:
    """Return the unit with this object path; empty if there is none (sd_bus_path_decode(3))."""
    if not path.startswith(UNITS):
        return ""
    escaped = path.removeprefix(UNITS).encode()
    with contextlib.suppress(UnicodeDecodeError):
        return re.sub(rb"_([0-9a-f]{2})", lambda match: bytes([int(match[1], 16)]), escaped).decode()
    return ""


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
