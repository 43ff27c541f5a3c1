"""Deadlines of callers that wait for levers: longer where programs move to or from the host only as a whole."""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Callable, Iterator

import attrs
import trio

from backend.common.errors import fail
from backend.process.identity import Group

log = logging.getLogger(__name__)

WHOLE_BYTES = 2 << 30
"""Bytes that go to the host, or come back, within the time that a lever has. 4.5 GiB take 2.6 s out and 1.7 s back, of
the usual 5 s, on an H200 (``tests/t7_nvidia/t7_whole.py``); this assumes half that speed for other hosts
(:const:`backend.nvidia.checkpoint.client.BYTES_A_SECOND`)."""


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[trio.CancelScope]:
    """Raise ETIMEDOUT where the body takes longer than `seconds`, or than the scope's deadline if that was changed
    meanwhile."""
    try:
        with trio.fail_after(seconds) as scope:
            yield scope
    except trio.TooSlowError:
        raise fail(errno.ETIMEDOUT) from None


@attrs.define
class Deadlines:
    """The deadlines of the callers that wait for levers at one place."""

    seconds: float
    """Seconds that a lever has which moves no memory."""
    _whole: Callable[[Group], int]
    """Bytes of a group that move only as a whole; 0 for none (:attr:`backend.core.records.Footprint.whole`). OSError
    where that is not known."""
    _waiting: dict[trio.CancelScope, tuple[float, Group]] = attrs.field(factory=dict)  # when each began, and for what
    _somebody: trio.Event = attrs.field(factory=trio.Event)  # set while there is a waiter

    @contextlib.contextmanager
    def deadline(self, group: Group) -> Iterator[trio.CancelScope]:
        """Raise ETIMEDOUT where the body, which waits for levers of a group, takes too long."""
        with deadline(self.seconds) as scope:
            self._waiting[scope] = scope.deadline - self.seconds, group
            self._somebody.set()
            try:
                yield scope
            finally:
                del self._waiting[scope]

    async def run(self) -> None:
        """Extend the deadlines of waiting callers once the amount of memory to move is known, until cancelled.

        Half a deadline passes before the first look, and none is made while nothing waits: the common immediate answer
        costs nothing.
        """
        while True:
            await self._somebody.wait()
            await trio.sleep(self.seconds / 2)
            for scope, (since, group) in self._waiting.items():
                try:
                    scope.deadline = max(scope.deadline, since + self.of(group))
                except OSError as error:  # the group is gone, for example
                    log.debug("GPU %d: how much of %s moves is not known: %s", group.gpu, group.node, error)
                except Exception:  # a bug here must not end the mount: the deadline stays
                    log.exception("GPU %d: how much of %s moves", group.gpu, group.node)
            if not self._waiting:
                self._somebody = trio.Event()

    def of(self, group: Group) -> float:
        """Return the seconds that a lever of a group has, as far as is known now."""
        return self.seconds * (1 + self._whole(group) / WHOLE_BYTES)
