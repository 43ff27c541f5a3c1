"""A daemon with software GPUs whose time a test sets by hand, and what is known of its programs."""

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
"""GPUs of a daemon."""
CAPACITY = 32
"""Pages of 1 MiB that each has."""
LONG_S = 600.0
"""Virtual seconds after which something hangs: more than everything together that can be queued."""


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
        """Ends it, with the checks that it makes then."""
        if self._thread.is_alive():
            self._token.run_sync_soon(lambda: self._over.set())
        self._thread.join(600)
        assert not self._thread.is_alive()
        self._check()

    def do(self, function: Callable[..., Awaitable[T]], *args: object) -> T:
        """Calls something in the daemon that takes no virtual time, and lets what can run do so."""

        async def call() -> T:
            result = await function(*args)
            await wait_all_tasks_blocked()
            return result

        return trio.from_thread.run(call, trio_token=self._token)

    def finish(self, function: Callable[..., Awaitable[T]], *args: object) -> T:
        """Calls something in the daemon that takes as long as it does."""
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
        """Time passes."""
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
    """What its kernels touch."""
    kernel_us: float = 0.0
    """Microseconds that one of them takes at most by itself."""
    is_answered: bool = False
    error: OSError | None = None
    """What it was refused with."""
    excuses: set[int] = attrs.field(factory=set)
    """Errnos that it may be answered, by what became of its program, or of its pages, meanwhile."""

    @property
    def is_excused(self) -> bool:
        """Whether it was not refused, or there is a reason for that."""
        return self.error is None or self.error.errno in self.excuses


@attrs.define
class Program:
    """What is known of one program."""

    process: Process
    tsg: int
    pages: dict[range, list[int]] = attrs.field(factory=dict)
    """Its allocations, and what stands in their pages."""
    requests: list[Request] = attrs.field(factory=list)
    """Its launches and copies."""
    looked: int = 0
    """Those of them, from the first on, that were answered before its queue was looked at last."""
    pending_us: float = 0.0
    """Microseconds of work that were queued then."""
    is_off: bool = False
    """Whether it has no turn."""
    ended: TurnEnd | None = None
    """How its last turn ended, while it has no other."""
    work: tuple[int | None, int | None] = (0, 0)
    """Kernels that it had launched and finished then."""
    frozen: bool = False
    gpu: int = 0
    """Index of the GPU that it is on."""
    dropped: int = 0
    """Kernels that were lost with a GPU."""

    @property
    def waits(self) -> list[Request]:
        """Its requests that are not answered."""
        return [request for request in self.requests if not request.is_answered]

    def excuse(self, errno: int, pages: range | None = None) -> None:
        """Those that are not answered may be refused from now on, of these pages where some are named."""
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
