"""Requests of a program that limits itself (WANT, FAMILY): its families and the settings that they ask for."""

from __future__ import annotations

import errno

from backend.common.errors import fail
from backend.core.families import FAMILIES_MOST, Family
from backend.core.protocols import Bookkeeping
from backend.core.settings import SETTINGS
from backend.door.wire import Message, Op
from backend.process.identity import Process

ABOUT_FAMILIES = (Op.WANT, Op.FAMILY)
"""The requests that are answered here."""


class Asking:
    """The families that one connection has named for its program."""

    def __init__(self, process: Process, uid: int) -> None:
        """`uid` is the user at the other end, according to the kernel."""
        self._process = process
        self._uid = uid
        self._wanted: dict[str, int] = {}
        self._families: tuple[Family, ...] = ()
        self._tries = 0

    async def take(self, request: Message, bookkeeping: Bookkeeping) -> None:
        """Carry out one request of `ABOUT_FAMILIES`. Raises OSError as wire.py says, and as
        :meth:`Bookkeeping.ask`.
        """
        first, second = request.args[:2]
        if request.op == Op.WANT:
            setting = SETTINGS[first] if first < len(SETTINGS) else None
            if setting is None or setting.environment is None:
                raise fail(errno.EINVAL)
            if second not in setting.allowed:
                raise fail(errno.ERANGE)
            self._wanted[setting.field] = second
            return
        if not first or second > 1:
            raise fail(errno.EINVAL)
        if self._tries >= FAMILIES_MOST:  # refused requests count, too: each costs the daemon as much
            raise fail(errno.E2BIG)
        self._tries += 1
        families = (*self._families, Family(first, self._uid, dict(self._wanted)))
        self._wanted.clear()
        await bookkeeping.ask(self._process, families, everywhere=bool(second))
        self._families = families
