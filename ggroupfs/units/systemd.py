"""systemd over D-Bus (org.freedesktop.systemd1(5)): which units there are, where their files and their cgroups are."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import trio
from jeepney import DBusAddress, Message, MessageType, Properties, new_method_call
from jeepney.bus_messages import message_bus
from jeepney.io.trio import DBusConnection, open_dbus_connection
from jeepney.low_level import HeaderFields

from ggroupfs.units.manager import KINDS, News, State

log = logging.getLogger(__name__)

NAME = "org.freedesktop.systemd1"
MANAGER = DBusAddress("/org/freedesktop/systemd1", NAME, f"{NAME}.Manager")
UNITS = "/org/freedesktop/systemd1/unit/"
UNIT = f"{NAME}.Unit"
PROPERTIES = "org.freedesktop.DBus.Properties"

CONNECT_S = 2.0
"""Seconds that a bus has to take us in."""

CALLS = 64
"""Calls under way at the same time: a bus refuses more than it has room for, 128 by default (dbus-daemon(1))."""

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

    answered: trio.Event = attrs.field(factory=trio.Event)
    """There is an answer, or will be none."""
    reply: Message | None = None
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
                return Bus(connection, reply.body[0])
        except Exception as error:  # of jeepney: many kinds, some in groups
            raise ConnectionError(str(_first(error)) or type(error).__name__) from None


class Bus:
    """A connection: see :class:`ggroupfs.units.manager.Connection`."""

    def __init__(self, connection: DBusConnection, owner: str) -> None:
        self.answered = 0
        self._connection = connection
        self._calls: dict[int, Call] = {}
        self._room = trio.CapacityLimiter(CALLS)
        self._owner = owner  # the unique name of systemd: signals of others are none
        self._lost = False

    async def run(self, tell: Callable[[News], None]) -> None:
        try:
            while not self._lost:
                message = await self._connection.receive()
                call = self._calls.pop(message.header.fields.get(HeaderFields.reply_serial, -1), None)
                if call is not None:
                    self.answered += 1
                    call.reply = message
                    call.answered.set()
                elif message.header.message_type is MessageType.signal:
                    self._signal(message, tell)
        except LOST as error:
            log.debug("the bus: %r", error)
        finally:
            self._lost = True
            for call in self._calls.values():
                call.answered.set()
            with trio.CancelScope(shield=True):
                await self._connection.aclose()

    def _signal(self, message: Message, tell: Callable[[News], None]) -> None:
        fields = message.header.fields
        member, sender = fields.get(HeaderFields.member), fields.get(HeaderFields.sender)
        if member == "NameOwnerChanged" and sender == "org.freedesktop.DBus":
            if message.body[0] == NAME and message.body[2] != self._owner:
                self._lost = True  # it was executed again, or is another: begin anew
        elif sender != self._owner:
            pass  # anybody may send one to us
        elif member == "Reloading":
            if not message.body[0]:
                tell(News(None))
        elif member in ("UnitNew", "UnitRemoved"):
            if message.body[0].endswith(KINDS):
                tell(News(message.body[0], loaded=True))
        elif member == "PropertiesChanged":
            unit = name_at(fields.get(HeaderFields.path, ""))
            _, changed, invalidated = message.body
            if unit.endswith(KINDS) and ("ActiveState" in changed or "ActiveState" in invalidated):
                tell(News(unit))

    async def subscribe(self) -> None:
        try:
            for rule in SIGNALS:
                await self._call(message_bus.AddMatch(rule))
            if await self._call(message_bus.GetNameOwner(NAME)) != (self._owner,):
                raise ConnectionError(f"{NAME} is another")  # since then: nothing told us
            await self._call(new_method_call(MANAGER, "Subscribe"))
        except Refused as error:
            raise ConnectionError(str(error)) from None

    async def active(self) -> Sequence[str]:
        try:
            (units,) = await self._call(new_method_call(MANAGER, "ListUnits"))
        except Refused as error:
            raise ConnectionError(str(error)) from None
        return [name for name, _, _, state, *_ in units if name.endswith(KINDS) and state not in IDLE]

    async def files(self, unit: str) -> Sequence[Path]:
        try:
            place = await self._place(unit)
            fragment = await self._get(place, UNIT, "FragmentPath")
            drop_ins = await self._get(place, UNIT, "DropInPaths")
        except Refused as error:
            _note(unit, error)
            return []
        return [Path(path) for path in (fragment, *drop_ins) if path]

    async def state(self, unit: str) -> State:
        try:
            place = await self._place(unit)
            active = await self._get(place, UNIT, "ActiveState")
            kind = unit.rpartition(".")[2].capitalize()
            return State(active not in IDLE, await self._get(place, f"{NAME}.{kind}", "ControlGroup"))
        except Refused as error:
            _note(unit, error)
            return State(False, "")

    async def _place(self, unit: str) -> str:
        """The object of a unit. GetUnit, and not its path by rule: to ask for that would load it."""
        (place,) = await self._call(new_method_call(MANAGER, "GetUnit", "s", (unit,)))
        return str(place)

    async def _get(self, place: str, interface: str, name: str) -> Any:
        ((_, value),) = await self._call(Properties(DBusAddress(place, NAME, interface)).get(name))
        return value

    async def _call(self, message: Message) -> tuple[Any, ...]:
        """What a method returns. Refused, or ConnectionError."""
        async with self._room:
            return await self._call_now(message)

    async def _call_now(self, message: Message) -> tuple[Any, ...]:
        serial, call = next(self._connection.outgoing_serial), Call()
        self._calls[serial] = call
        try:
            if not self._lost:
                await self._connection.send(message, serial=serial)
                await call.answered.wait()
        except LOST as error:
            raise ConnectionError(str(error)) from None
        finally:
            self._calls.pop(serial, None)
        if call.reply is None:
            raise ConnectionError("the bus is gone")
        if call.reply.header.message_type is MessageType.error:
            words = call.reply.body[0] if call.reply.body else ""
            raise Refused(call.reply.header.fields.get(HeaderFields.error_name, ""), words)
        return tuple(call.reply.body)


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
