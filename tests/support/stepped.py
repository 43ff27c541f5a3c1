"""A daemon with software GPUs whose time a test sets by hand, and a record of its programs."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

import attrs
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from backend.core.turns import TurnEnd
from backend.process.identity import Member, Process
from backend.soft.config import SoftConfig
from backend.soft.gpu import SoftGpu
from backend.soft.machine import Machine
from tests.support.harness import MIB, looks_at_once, running

T = TypeVar("T")

GPUS = 2
"""Number of GPUs of a daemon."""
CAPACITY = 32
"""Pages of 1 MiB of each GPU."""
LONG_S = 600.0
"""Virtual seconds after which a call counts as hung: more than all that can be queued takes."""


class Daemon:
    """A daemon in virtual time, which stands still between calls."""

    def __init__(self) -> None:
        machine = Machine(GPUS)
        config = SoftConfig(CAPACITY * MIB, MIB, 1 << 30, 1 << 30, batch=4 * MIB, switch_us=20)
        self.gpus = [SoftGpu(index, config, machine) for index in range(GPUS)]
        self._clock = MockClock()
        self._started, self._failure = threading.Event(), list[BaseException]()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._started.wait(600)
        self._check()

    def _run(self) -> None:
        try:
            with looks_at_once():
                trio.run(self._main, clock=self._clock)
        except BaseException as error:
            self._failure.append(error)
        finally:
            self._started.set()

    async def _main(self) -> None:
        self._over = trio.Event()
        async with running(*self.gpus) as self.h, trio.open_nursery() as self.nursery:
            self._token = trio.lowlevel.current_trio_token()
            self._started.set()
            await self._over.wait()
            self.nursery.cancel_scope.cancel()

    def _check(self) -> None:
        if self._failure:
            raise self._failure[0]

    def end(self) -> None:
        """End the daemon, with the checks that it makes then."""
        if self._thread.is_alive():
            self._token.run_sync_soon(lambda: self._over.set())
        self._thread.join(600)
        assert not self._thread.is_alive()
        self._check()

    def do(self, function: Callable[..., Awaitable[T]], *args: object) -> T:
        """Call a function in the daemon that takes no virtual time, and let every task run that can."""

        async def call() -> T:
            result = await function(*args)
            await wait_all_tasks_blocked()
            return result

        return trio.from_thread.run(call, trio_token=self._token)

    def finish(self, function: Callable[..., Awaitable[T]], *args: object) -> T:
        """Call a function in the daemon, and let virtual time pass until it returns."""
        results: list[T] = []

        async def call() -> None:
            results.append(await function(*args))

        async def start() -> None:
            self.nursery.start_soon(call)
            await self._pass(LONG_S, lambda: bool(results))

        self.do(start)
        self._check()
        assert results, "it hangs"
        return results[0]

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass."""
        self.do(self._pass, seconds, lambda: False)

    async def _pass(self, seconds: float, enough: Callable[[], bool]) -> None:
        end = trio.current_time() + seconds
        while True:
            await wait_all_tasks_blocked()
            left = end - trio.current_time()
            if enough() or left <= 0:
                return
            until_next = trio.lowlevel.current_statistics().seconds_to_next_deadline
            self._clock.jump(min(max(until_next, 1e-7), left))


@attrs.define(eq=False)
class Request:
    """A launch or a copy of a program."""

    pages: range = range(0)
    """Pages that its kernels touch."""
    kernel_us: float = 0.0
    """Longest time that one of its kernels takes by itself, in microseconds."""
    is_answered: bool = False
    error: OSError | None = None
    """Error with which it was refused."""
    excuses: set[int] = attrs.field(factory=set)
    """Errnos that it may get because of what happened to its program, or to its pages, meanwhile."""

    @property
    def is_excused(self) -> bool:
        """Whether it was not refused, or was refused with reason."""
        return self.error is None or self.error.errno in self.excuses


@attrs.define
class Program:
    """A record of one program."""

    process: Process
    tsg: int
    pages: dict[range, list[int]] = attrs.field(factory=dict)
    """Its allocations, and the contents of their pages."""
    requests: list[Request] = attrs.field(factory=list)
    """Its launches and copies."""
    looked: int = 0
    """Number of its first requests that were answered before the last look at its queue."""
    pending_us: float = 0.0
    """Microseconds of work that were queued at that look."""
    is_off: bool = False
    """Whether it has no turn."""
    ended: TurnEnd | None = None
    """How its last turn ended; None while it has a turn."""
    work: tuple[int | None, int | None] = (0, 0)
    """Kernels that it had launched and finished at that end."""
    frozen: bool = False
    gpu: int = 0
    """Index of its GPU."""
    dropped: int = 0
    """Number of kernels that were lost with a GPU."""

    @property
    def waits(self) -> list[Request]:
        """Requests that are not answered."""
        return [request for request in self.requests if not request.is_answered]

    def excuse(self, errno: int, pages: range | None = None) -> None:
        """Allow requests that are not answered yet to fail with `errno`; with `pages`, only those for these pages."""
        for request in self.waits:
            if pages is None or request.pages == pages:
                request.excuses.add(errno)

    @property
    def member(self) -> Member:
        """Its group."""
        return Member(self.process, self.gpu)

    @property
    def path(self) -> str:
        """Its directory."""
        return f"{self.process.pid}/{self.gpu}"
