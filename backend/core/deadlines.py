"""How long a caller waits for levers: longer where programs go into the host, or come back, only as a whole."""

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
"""What goes into the host, or comes back, within the time that a lever has. 4.5 GiB take 2.6 and 1.7 s of the usual 5 s
on an H200 (``tests/t7_nvidia/t7_whole.py``); other hosts are told to be half as fast
(:const:`backend.nvidia.checkpoint.client.BYTES_A_SECOND`)."""


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[trio.CancelScope]:
    """ETIMEDOUT where the body takes longer than `seconds`, or than the deadline of the scope says by then."""
    try:
        with trio.fail_after(seconds) as scope:
            yield scope
    except trio.TooSlowError:
        raise fail(errno.ETIMEDOUT) from None


@attrs.define
class Deadlines:
    """Of those that wait for levers at one place."""

    seconds: float
    """For a lever that moves no memory."""
    _whole: Callable[[Group], int]
    """Bytes of a group that go or come as a whole, if any do (:attr:`backend.core.records.Footprint.whole`). OSError
    where that is not known."""
    _waiting: dict[trio.CancelScope, tuple[float, Group]] = attrs.field(factory=dict)  # since when, for what
    _somebody: trio.Event = attrs.field(factory=trio.Event)  # waits

    @contextlib.contextmanager
    def deadline(self, group: Group) -> Iterator[trio.CancelScope]:
        """ETIMEDOUT where the body, which waits for levers of a group, takes too long."""
        with deadline(self.seconds) as scope:
            self._waiting[scope] = scope.deadline - self.seconds, group
            self._somebody.set()
            try:
                yield scope
            finally:
                del self._waiting[scope]

    async def run(self) -> None:
        """Gives them longer while they wait, until cancelled: how much there is may be known by then only, and one
        that has its answer at once, as nearly all, costs nothing."""
        while True:
            await self._somebody.wait()
            await trio.sleep(self.seconds / 2)
            for scope, (since, group) in self._waiting.items():
                try:
                    scope.deadline = max(scope.deadline, since + self.of(group))
                except OSError as error:  # it is gone, say
                    log.debug("GPU %d: how much of %s moves is not known: %s", group.gpu, group.node, error)
                except Exception:  # a bug here shall not end the mount: none has longer
                    log.exception("GPU %d: how much of %s moves", group.gpu, group.node)
            if not self._waiting:
                self._somebody = trio.Event()

    def of(self, group: Group) -> float:
        """Seconds for a lever of a group, as far as is known now."""
        return self.seconds * (1 + self._whole(group) / WHOLE_BYTES)
