"""systemd over D-Bus (org.freedesktop.systemd1(5)): which units there are, where their files and their cgroups are."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import trio
from jeepney.auth import BEGIN, Authenticator
from jeepney.bus import get_bus

from ggroupfs.units import wire
from ggroupfs.units.manager import KINDS, News

log = logging.getLogger(__name__)

NAME = "org.freedesktop.systemd1"
MANAGER = ("/org/freedesktop/systemd1", f"{NAME}.Manager")
UNITS = "/org/freedesktop/systemd1/unit/"
UNIT = f"{NAME}.Unit"
PROPERTIES = "org.freedesktop.DBus.Properties"
BUS = "org.freedesktop.DBus"

CONNECT_S = 2.0
"""Seconds that a bus has to take us in."""

ASKED = 32
"""Units that are asked about at the same time, by two calls each at most: a bus refuses more calls than it has room
for, 128 by default (dbus-daemon(1))."""

PIECE = 1 << 16
"""Bytes read at once."""

GONE = (f"{NAME}.NoSuchUnit", "org.freedesktop.DBus.Error.UnknownObject", "org.freedesktop.DBus.Error.UnknownInterface")
"""What is said of a unit that is not, or no longer, loaded."""

IDLE = frozenset(("inactive", "failed"))
"""ActiveState of a unit that does nothing."""

SIGNALS = (
    *(f"type='signal',sender='{NAME}',interface='{NAME}.Manager',member='{m}'" for m in ("UnitNew", "UnitRemoved")),
    f"type='signal',sender='{NAME}',interface='{NAME}.Manager',member='Reloading'",
    f"type='signal',sender='{NAME}',interface='{PROPERTIES}',member='PropertiesChanged',arg0='{UNIT}'",
    f"type='signal',sender='org.freedesktop.DBus',member='NameOwnerChanged',arg0='{NAME}'",
)

ENDINGS = tuple(f"_2e{kind[1:]}" for kind in KINDS)
"""Of the objects of units that have a cgroup."""

LOST = (trio.EndOfChannel, trio.BrokenResourceError, trio.ClosedResourceError)
"""What the connection says when there is nobody any more."""


class Refused(Exception):
    """The other end answers with an error, by this name and in these words."""

    def __init__(self, name: str, words: str) -> None:
        super().__init__(f"{name}: {words}")
        self.name = name


@attrs.define(eq=False)
class Call:
    """A method call under way."""

    then: Callable[[wire.Arrived], None] | None = None
    """Takes an answer that is none of an error, before anything that came behind it is looked at."""
    answered: trio.Event = attrs.field(factory=trio.Event)
    """There is an answer, or will be none."""
    reply: wire.Arrived | None = None
    """The answer; None once the connection is lost."""


@attrs.frozen
class Systemd:
    """The system manager: see :class:`ggroupfs.units.manager.Manager`."""

    address: str = "SYSTEM"
    """The address of a bus (D-Bus Specification, "Server Addresses"), or the system bus."""
    name: str = "systemd"
    """Shown in ``ggroup.backend``."""

    async def connect(self) -> Bus:
        """OSError where there is no bus, or nobody on it who is systemd."""
        try:
            with trio.fail_after(CONNECT_S):
                bus = Bus(await _open(self.address))
                try:
                    await bus.greet()
                except BaseException:
                    await trio.aclose_forcefully(bus.stream)
                    raise
                return bus
        except Exception as error:  # of a library: many kinds, some in groups
            raise ConnectionError(str(_first(error)) or type(error).__name__) from None


async def _open(address: str) -> trio.SocketStream:
    """A connection that a bus has taken (D-Bus Specification, "Authentication Protocol")."""
    stream = await trio.open_unix_socket(get_bus(address))
    try:
        authenticator = Authenticator()
        for line in authenticator:
            await stream.send_all(line)
            authenticator.feed(await stream.receive_some())
        await stream.send_all(BEGIN)
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise
    return stream


class Bus:
    """A connection: see :class:`ggroupfs.units.manager.Connection`.

    An object of a unit is asked only while the unit is known to be loaded: to ask the path that a name makes would load
    it, which would be told of as new, and asked for again.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        """To the bus."""
        self.answered = 0
        self._incoming = wire.Stream()
        self._outgoing = bytearray()
        self._more = trio.Event()  # to be sent
        self._serials = itertools.count(1)
        self._calls: dict[int, Call] = {}
        self._places: dict[str, str] = {}  # the objects of units that are loaded
        self._room = trio.CapacityLimiter(ASKED)
        self._owner = ""  # the unique name of systemd: signals of others are none
        self._lost = False

    async def greet(self) -> None:
        """Says hello, and learns who systemd is: ConnectionError if nobody."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._serve, lambda news: None)
            try:
                await self._bus("Hello")
                self._owner = (await self._bus("GetNameOwner", NAME)).first()
            except Refused:
                raise ConnectionError(f"{NAME} is not on the bus") from None
            nursery.cancel_scope.cancel()

    async def run(self, tell: Callable[[News], None]) -> None:
        try:
            await self._serve(tell)
        finally:
            await trio.aclose_forcefully(self.stream)
            self._give_up()

    async def _serve(self, tell: Callable[[News], None]) -> None:
        """Sends and receives, until the connection is lost."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send)
            try:
                while not self._lost and (data := await self.stream.receive_some(PIECE)):
                    for message in self._incoming.feed(data):
                        self._take(message, tell)
            except (*LOST, ValueError) as error:
                log.debug("the bus: %r", error)
            self._give_up()
            nursery.cancel_scope.cancel()

    def _give_up(self) -> None:
        """The connection is lost: nobody is answered any more."""
        self._lost = True
        for call in self._calls.values():
            call.answered.set()

    async def _send(self) -> None:
        """Sends what there is to be sent, as much as there is at once."""
        while True:
            await self._more.wait()
            self._more = trio.Event()
            data, self._outgoing = bytes(self._outgoing), bytearray()
            try:
                await self.stream.send_all(data)
            except LOST as error:
                log.debug("the bus: %r", error)
                self._give_up()
                return  # who receives finds so, too

    def _take(self, message: wire.Arrived, tell: Callable[[News], None]) -> None:
        call = self._calls.pop(message.fields.get(wire.REPLY_SERIAL, 0), None)
        if call is not None:
            self.answered += 1
            if call.then is not None and message.type == wire.RETURN:
                call.then(message)
            call.reply = message
            call.answered.set()
        elif message.type == wire.SIGNAL:
            self._signal(message, tell)

    def _signal(self, message: wire.Arrived, tell: Callable[[News], None]) -> None:
        member, sender = message.fields.get(wire.MEMBER), message.fields.get(wire.SENDER)
        if member == "NameOwnerChanged" and sender == BUS:
            name, _, owner = message.values()
            if name == NAME and owner != self._owner:
                self._give_up()  # it was executed again, or is another: begin anew
        elif sender != self._owner:
            pass  # anybody may send one to us
        elif member == "PropertiesChanged":
            if message.fields.get(wire.PATH, "").endswith(ENDINGS):
                self._changed(name_at(message.fields[wire.PATH]), message, tell)
        elif member == "Reloading":
            if not message.first():
                tell(News(None))
        elif member == "UnitNew":
            name, place = message.values()
            if name.endswith(KINDS):
                known, self._places[name] = name in self._places, place
                tell(News(name, loaded=not known))  # we may have asked for it before it was told of
        elif member == "UnitRemoved":
            name, _ = message.values()
            if name.endswith(KINDS):
                self._places.pop(name, None)
                tell(News(name, loaded=True, active=False))

    def _changed(self, unit: str, message: wire.Arrived, tell: Callable[[News], None]) -> None:
        active = message.named("ActiveState", "s")
        if active is not None:
            self._places[unit] = message.fields[wire.PATH]
            tell(News(unit, active=active not in IDLE, run=message.named("InvocationID", "ay") or b""))

    async def subscribe(self) -> None:
        try:
            for rule in SIGNALS:
                await self._bus("AddMatch", rule)
            if (await self._bus("GetNameOwner", NAME)).first() != self._owner:
                raise ConnectionError(f"{NAME} is another")  # since then: nothing told us
            await self._one(*MANAGER, "Subscribe")
        except Refused as error:
            raise ConnectionError(str(error)) from None

    async def active(self) -> Sequence[str]:
        def loaded(reply: wire.Arrived) -> None:
            self._places.update({name: place for name, _, _, _, _, _, place, *_ in reply.first()})

        call = self._call(NAME, *MANAGER, "ListUnitsByPatterns", (), [f"*{kind}" for kind in KINDS])
        call.then = loaded
        try:
            reply = await self._reply(call)
        except Refused as error:
            raise ConnectionError(str(error)) from None
        return [name for name, _, _, state, *_ in reply.first() if state not in IDLE]

    async def is_active(self, unit: str) -> bool:
        try:
            state = await self._get(await self._place(unit), UNIT, "ActiveState")
        except Refused as error:
            _note(unit, error)
            return False
        return state[0] not in IDLE

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

    async def _place(self, unit: str) -> str:
        """The object of a unit, which is to be loaded."""
        async with self._room:
            call = self._call(NAME, *MANAGER, "GetUnit", unit)
            call.then = lambda reply: self._places.update({unit: reply.first()})
            return str((await self._reply(call)).first())

    async def _get(self, place: str, interface: str, *names: str) -> Sequence[Any]:
        """Properties of an object."""
        async with self._room:
            calls = [self._call(NAME, place, PROPERTIES, "Get", interface, name) for name in names]
            return [(await self._reply(call)).first() for call in calls]

    async def _one(self, path: str, interface: str, member: str, *arguments: str | Sequence[str]) -> wire.Arrived:
        """What a method of systemd returns. Refused, or ConnectionError."""
        return await self._reply(self._call(NAME, path, interface, member, *arguments))

    async def _bus(self, member: str, *arguments: str) -> wire.Arrived:
        """What a method of the bus returns. Refused, or ConnectionError."""
        return await self._reply(self._call(BUS, "/org/freedesktop/DBus", BUS, member, *arguments))

    def _call(self, *what: Any) -> Call:
        """Calls soon, with all others that are called now."""
        serial, call = next(self._serials), Call()
        if self._lost:
            call.answered.set()
        else:
            self._calls[serial] = call
            self._outgoing += wire.call(serial, *what)
            self._more.set()
        return call

    async def _reply(self, call: Call) -> wire.Arrived:
        await call.answered.wait()
        reply = call.reply
        if reply is None:
            raise ConnectionError("the bus is gone")
        if reply.type == wire.ERROR:
            words = reply.first() if reply.fields.get(wire.SIGNATURE, "").startswith("s") else ""
            raise Refused(reply.fields.get(wire.ERROR_NAME, ""), words)
        return reply


def _note(unit: str, error: Refused) -> None:
    """A unit that is not loaded asks for nothing; anything else somebody should know of."""
    log.log(logging.DEBUG if error.name in GONE else logging.WARNING, "%s: %s", unit, error)


def name_at(path: str) -> str:
    """The unit whose object this is, empty for none (sd_bus_path_decode(3))."""
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
