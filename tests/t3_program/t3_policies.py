"""The programs of policies over the software GPU in virtual time, unchanged: dynamic, cooperative and slo.

Their files are the daemon's, reached through its handlers and not through a mount, since a thread takes real time. So
minutes of a policy take seconds, and two runs have the same output to the last digit.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import attrs
import pyfuse3
import pytest
import trio
import trio.testing

from backend.common.errors import fail
from backend.process.identity import Process
from backend.soft.config import SoftConfig
from backend.soft.gpu import SoftGpu
from ggroupfs.client import Group, Tree, flat
from ggroupfs.fs.files import RECORD
from ggroupfs.policies import cooperative, dynamic
from ggroupfs.policies.config import Table
from ggroupfs.policies.slo import program as slo
from tests.support.harness import MIB, Harness, Waker, but_time, running, settle, virtual
from tests.support.served import REQUEST_US, SETTLED_S, Load, service

Spawn = Callable[..., subprocess.Popen[bytes]]
Run = Callable[[Tree, Table], Awaitable[None]]

T = TypeVar("T")


# The client's Tree and Group, over the handlers


@contextlib.contextmanager
def as_files() -> Iterator[None]:
    """Raise a handler's error as a caller of open, read and write sees it."""
    try:
        yield
    except pyfuse3.FUSEError as error:
        raise fail(error.errno) from None


@attrs.frozen
class Handled(Group):
    """A directory of control files, through the handlers."""

    h: Harness = attrs.field(eq=False)

    async def read(self, name: str) -> str:
        with as_files():
            return (await self.h.read(f"{self.path}/{name}")).rstrip("\n")

    async def write(self, name: str, value: object) -> None:
        with as_files():
            await self.h.write(f"{self.path}/{name}", value)

    @contextlib.asynccontextmanager
    async def watch(self, name: str) -> AsyncIterator[Any]:
        with as_files():
            file = await self.h.open(f"{self.path}/{name}")
        watch = Watched(self.h, file)
        try:
            await watch.read()
            yield watch
        finally:
            with trio.CancelScope(shield=True):
                await self.h.operations.release(file)


class Woken(Waker):
    """A poll handle that a program can wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.event = trio.Event()

    def notify(self) -> None:
        super().notify()
        self.event.set()


@attrs.frozen
class Watched:
    """An open events file."""

    h: Harness
    file: int

    async def content(self, size: int = 1 << 14) -> bytes:
        with as_files():
            return await self.h.operations.read(self.file, 0, size)

    async def read(self) -> dict[str, int]:
        return flat((await self.content()).decode())

    async def changed(self) -> dict[str, int]:
        await self.ready(select.POLLPRI)
        return await self.read()

    async def ready(self, wanted: int) -> None:
        """Wait as poll(2) does."""
        while True:
            waker = Woken()
            if await self.h.operations.poll(0, self.file, waker, self.h.ctx) & wanted:
                return
            await waker.event.wait()


@attrs.frozen
class HandledTree(Tree):
    """The tree, as far as these policies use it."""

    h: Harness = attrs.field(eq=False)

    async def ready(self) -> None:
        await trio.lowlevel.checkpoint()

    def _at(self, *parts: str) -> Group:
        return Handled(self.mount.joinpath(*parts), self.h)


@contextlib.asynccontextmanager
async def at_work(h: Harness, run: Run, config: dict[str, Any]) -> AsyncIterator[None]:
    """Run a policy with a configuration; at the end it is cancelled, and must have taken back its settings."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run, HandledTree(Path("/"), h), Table(config, "here"))
        yield
        nursery.cancel_scope.cancel()


def run_virtually(play: Callable[[], Awaitable[T]]) -> T:
    """Run in virtual time. Tasks that are ready at the same moment run in trio's random order, here from a seed:
    nothing else is left to chance."""
    with mock.patch.object(trio._core._run, "_ALLOW_DETERMINISTIC_SCHEDULING", True):
        trio._core._run._r.seed(1)
        return trio.run(play, clock=trio.testing.MockClock(autojump_threshold=0))


def twice(play: Callable[[], Awaitable[T]], capsys: pytest.CaptureFixture[str]) -> tuple[T, list[dict[str, Any]]]:
    """Run twice in virtual time; return the result and the policy's events, which must be the same both times."""
    found = []
    for _ in range(2):
        result = run_virtually(play)
        found.append((result, [json.loads(line) for line in capsys.readouterr().out.splitlines()]))
    assert found[0] == found[1]
    return found[0]


# Memory


CAPACITY, BASE, PEAK, PIECE = 1024 * MIB, 64 * MIB, 512 * MIB, 16 * MIB
HEADROOM = 64 * MIB
WANTS = 768 * MIB
"""Bytes that the second program would hold."""
PERIOD_S, PERIODS = 6.0, 2
"""Seconds and number of periods. In the first half the first program is idle; in the second it grows for 2.8 s, and
frees at the end."""
GIVES_S = 0.01
"""Seconds that the second program needs to free a piece: it can free five in the time that it has."""
GROWS_S = 0.1
"""Seconds from one allocation of the first program to the next."""


@attrs.define
class Memory:
    """Two programs that share the memory of a GPU, and their measurements."""

    h: Harness
    gpu: SoftGpu
    first: Process
    second: Process
    waited: list[float] = attrs.field(factory=list)
    """Seconds that each allocation of the first program took."""
    finished: int = 0
    """Kernels that the second program has finished."""
    pieces: list[range] = attrs.field(factory=list)
    """Allocations of the second program."""

    async def bursts(self) -> None:
        """Run the first program."""
        tsg = await self.gpu.open_context(self.first, 8, lambda finished: None)
        await self.gpu.allocate(self.first, BASE)
        await trio.sleep(0.0031)  # never at the same moment as another act
        for _ in range(PERIODS):
            until = trio.current_time() + PERIOD_S
            await trio.sleep(PERIOD_S / 2)
            held = []
            while trio.current_time() < until:
                if BASE + len(held) * PIECE < PEAK:
                    began = trio.current_time()
                    held.append(await self.gpu.allocate(self.first, PIECE))
                    self.waited.append(trio.current_time() - began)
                await self.gpu.launch(self.first, tsg, 1, 1000, held[-1])
                await trio.sleep(GROWS_S)
            for pages in held:
                self.gpu.free(self.first, pages)

    async def works(self) -> None:
        """Run the second program, which uses all that it has, all the time."""

        def finished(count: int) -> None:
            self.finished = count

        tsg = await self.gpu.open_context(self.second, 8, finished)
        queue = self.gpu._tenants[self.second].tsgs[tsg].queue
        while len(self.pieces) < WANTS // PIECE:
            self.pieces.append(await self.gpu.allocate(self.second, PIECE))
        while True:
            for pages in self.pieces:
                if len(queue) < 2 * len(self.pieces):
                    await self.gpu.launch(self.second, tsg, 1, 500, pages)
            await trio.sleep(0.0173)

    async def gives(self) -> None:
        """Have the second program free what it is asked for, and take it again once there is room."""
        group = Handled(Path(f"/{self.second.pid}/0"), self.h)
        usermem = Watched(self.h, await self.h.open(f"{self.second.pid}/0/usermemfd"))
        try:
            while True:
                with trio.move_on_after(0.251) as idle:
                    await usermem.ready(select.POLLIN)
                if not idle.cancelled_caught:
                    nbytes, _ = RECORD.unpack(await usermem.content(RECORD.size))
                    while nbytes > 0:
                        await trio.sleep(GIVES_S)
                        self.gpu.free(self.second, self.pieces.pop())
                        nbytes -= PIECE
                    continue
                limit, held = await group.number("gmem.limit.high"), await group.number("gmem.current")
                assert held is not None
                if limit is not None and held + 2 * PIECE <= min(limit, WANTS):
                    self.pieces.append(await self.gpu.allocate(self.second, PIECE))
        finally:
            with trio.CancelScope(shield=True):
                await self.h.operations.release(usermem.file)


def place(process: Process) -> str:
    return f"{process.pid}/0"


@attrs.frozen
class Shared:
    """Measurements of two programs that share memory."""

    waited: list[float]
    """Seconds that each allocation of the first program took."""
    finished: int
    """Kernels that the second program has finished."""
    taken_back: list[str]
    """Contents of the files that a policy writes, after its end."""
    moved: dict[str, int]
    """gmem.stat of the second program, in virtual time, without figures that grow with the clock."""


async def shared(spawn: Spawn, run: Run | None, *, gives: bool = False) -> Shared:
    """Run all periods, under a policy, or with a limit that leaves the first program its peak."""
    gpu = SoftGpu(0, SoftConfig(capacity=CAPACITY))
    async with running(gpu) as h, trio.open_nursery() as nursery:
        memory = Memory(h, gpu, *[await h.arrive(spawn().pid) for _ in range(2)])
        first, second = place(memory.first), place(memory.second)
        if run is None:
            await h.write(f"{second}/gmem.limit.high", CAPACITY - PEAK)
        nursery.start_soon(memory.works)
        await settle()
        if gives:
            nursery.start_soon(memory.gives)
        await trio.sleep(0.0007)
        config = {"high": str(memory.first.pid), "low": str(memory.second.pid), "headroom": HEADROOM}
        async with at_work(h, run, config) if run is not None else contextlib.nullcontext():
            await memory.bursts()
        files = f"{second}/gmem.limit.high", f"{first}/gmem.limit.low"
        stat = flat(but_time(await h.read(f"{second}/gmem.stat")))
        said = [await h.read(file) for file in files]
        assert await h.read(f"{first}/gmem.swap.current") == "0\n"
        nursery.cancel_scope.cancel()
    return Shared(memory.waited, memory.finished, said, stat)


def limits(events: list[dict[str, Any]]) -> list[int]:
    """Return the limits in the order in which they were set; never is more promised than there is."""
    found = [one for one in events if one["event"] == "limit"]
    assert found == events, "none was refused"
    assert all(one["limit"] + one["high"] <= CAPACITY for one in found)
    return [one["limit"] for one in found]


def test_dynamic(spawn: Spawn, capsys: pytest.CaptureFixture[str]) -> None:
    """From the second burst on, all of its memory is free at once; between bursts the other program has it."""
    found, events = twice(partial(shared, spawn, dynamic.run), capsys)
    static = run_virtually(partial(shared, spawn, None))
    assert max(found.waited) == 0
    assert found.finished >= 1.5 * static.finished
    ways = [later > earlier for earlier, later in itertools.pairwise(limits(events))]
    assert sum(one != other for one, other in itertools.pairwise(ways)) <= 2 * PERIODS, "it does not swing"
    for period in range(1, PERIODS):
        at = (period + 0.5) * PERIOD_S
        first = next(one for one in events if one["at"] >= at)
        assert first["at"] <= at + 0.3
        assert first["limit"] <= CAPACITY - PEAK
        assert first["high"] <= BASE + 2 * PIECE
    assert found.moved["swapout_bytes"] > 0
    assert found.taken_back == ["max\n", "0\n"]


def test_cooperative(spawn: Spawn, capsys: pytest.CaptureFixture[str]) -> None:
    """The second program gives by itself what it can give in time: hardly anything has to be moved."""
    found, events = twice(partial(shared, spawn, cooperative.run, gives=True), capsys)
    large_steps = run_virtually(partial(shared, spawn, dynamic.run, gives=True))
    assert max(found.waited) == 0
    assert min(limits(events)) <= CAPACITY - PEAK
    assert max(limits(events)[10:]) >= CAPACITY - BASE - 2 * HEADROOM, "it had it back"
    assert 10 * found.moved["swapout_bytes"] <= large_steps.moved["swapout_bytes"] > 0
    assert found.taken_back == ["max\n", "0\n"]


@virtual
async def test_an_event_of_the_slice_above_is_answered_at_once(spawn: Spawn) -> None:
    """Also if the next look would be in ten minutes."""
    gpu = SoftGpu(0, SoftConfig(capacity=2 * CAPACITY))
    async with running(gpu) as h:
        first, second = [await h.arrive(spawn().pid, "/both") for _ in range(2)]
        await h.write("slice/both/0/gmem.limit.high", CAPACITY)
        for process, nbytes in ((first, BASE), (second, WANTS)):
            await gpu.open_context(process, 8, lambda finished: None)
            await gpu.allocate(process, nbytes)
        config = {"high": str(first.pid), "low": str(second.pid), "within": "/both", "interval": "600s"}
        async with at_work(h, dynamic.run, config | {"headroom": HEADROOM}):
            await trio.sleep(1)
            assert await h.read(f"{place(second)}/gmem.limit.high") == f"{CAPACITY - BASE - HEADROOM}\n"
            await gpu.allocate(first, PEAK - BASE)
            await trio.sleep(1)
            assert int(await h.read(f"{place(second)}/gmem.limit.high")) <= CAPACITY - PEAK
            assert int(await h.read(f"{place(first)}/gmem.current")) == PEAK
        assert await h.read(f"{place(second)}/gmem.limit.high") == "max\n"


# Latencies


UPPER = 0.05
"""Upper bound of the latency, in seconds."""
STEP_S, BACK_S, END_S = 40.0, 90.0, 120.0
"""Times in seconds: the load rises from 0.1 to 0.5 of the GPU, it falls again, the run ends."""


@attrs.define
class Server:
    """A program that serves requests of 8.6 ms as they arrive, and reports how long each took."""

    gpu: SoftGpu
    process: Process
    socket: Path
    latencies: list[tuple[float, float]] = attrs.field(factory=list)
    """Time at which each request was done, and its latency, in seconds."""

    async def serve(self, load: Load) -> None:
        waiting: list[float] = []

        def finished(count: int) -> None:
            now = trio.current_time()
            fresh = [(now, now - arrived) for arrived in waiting[len(self.latencies) : count]]
            self.latencies.extend(fresh)
            said = {"group": "a", "latency_ms": [1e3 * latency for _, latency in fresh]}
            if fresh:
                reports.sendto(json.dumps(said).encode(), os.fspath(self.socket))

        began = trio.current_time()
        number = await self.gpu.open_context(self.process, 8, finished)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as reports:
            for arrival in service(self.process.pid, load, END_S, 1).arrivals:
                await trio.sleep_until(began + arrival / 1e9)
                waiting.append(trio.current_time())
                await self.gpu.launch(self.process, number, 1, REQUEST_US, range(0))
            await trio.sleep_forever()


async def batch(gpu: SoftGpu, process: Process) -> None:
    """Run a program that always has work."""
    number = await gpu.open_context(process, 8, lambda finished: None)
    queue = gpu._tenants[process].tsgs[number].queue
    while True:
        if len(queue) < 10:
            await gpu.launch(process, number, 10, 20_000, range(0))
        await trio.sleep(0.0531)


async def served(
    spawn: Spawn, path: Path, lever: str = "weight", file: str = "compute.weight"
) -> tuple[list[tuple[float, float]], list[str], list[str]]:
    """Run a server beside two batch programs, under the policy. Return its latencies, and the weights or quotas of all
    at the end and after it."""
    gpu = SoftGpu(0, SoftConfig(capacity=64 * MIB))
    async with running(gpu, scheduler=True) as h, trio.open_nursery() as nursery:
        server = Server(gpu, await h.arrive(spawn().pid), path)
        others = [await h.arrive(spawn().pid) for _ in range(2)]
        config = {
            **{"socket": str(path), "interval": "1s", "lever": lever},
            "group": [
                {"name": "a", "pid": server.process.pid, "statistic": "p90", "upper": f"{UPPER}s", "lower": "20ms"}
            ],
            "best_effort": [{"pid": process.pid} for process in others],
        }
        files = [f"{place(process)}/{file}" for process in (server.process, *others)]
        for process in others:
            nursery.start_soon(batch, gpu, process)
        async with at_work(h, slo.run, config):
            await trio.sleep(0.0007)
            nursery.start_soon(server.serve, lambda t: 0.5 if STEP_S <= t < BACK_S else 0.1)
            await trio.sleep(END_S)
            found = [await h.read(file) for file in files]
        after = [await h.read(file) for file in files]
        nursery.cancel_scope.cancel()
    return server.latencies, found, after


def test_slo(spawn: Spawn, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The share rises and falls only with the load; the latency is within its bound 30 s after each step."""
    (latencies, weights, after), events = twice(partial(served, spawn, tmp_path / "slo.sock"), capsys)
    assert {one["event"] for one in events} == {"share"}
    rises = [one["share"] > one["was"] for one in events]
    assert sum(one != other for one, other in itertools.pairwise(rises)) == 1
    assert rises[0]
    for begin, end in ((STEP_S + SETTLED_S, BACK_S), (BACK_S, END_S)):
        found = sorted(latency for at, latency in latencies if begin <= at < end)
        assert len(found) > 100
        assert found[len(found) * 9 // 10] <= UPPER
    share = round(10_000 * events[-1]["share"])
    assert [int(weight) for weight in weights] == [share, (10_000 - share) // 2, (10_000 - share) // 2]
    assert after == ["100\n"] * 3


@pytest.mark.parametrize("lever", ["quota", "both"])
def test_slo_by_quotas(spawn: Spawn, capsys: pytest.CaptureFixture[str], tmp_path: Path, lever: str) -> None:
    """Ceilings, too, keep latencies within their bounds, and all ceilings are gone in the end."""
    run = partial(served, spawn, tmp_path / "slo.sock", lever, "compute.max")
    (latencies, quotas, after), events = twice(run, capsys)
    for begin, end in ((STEP_S + SETTLED_S, BACK_S), (BACK_S, END_S)):
        found = sorted(latency for at, latency in latencies if begin <= at < end)
        assert len(found) > 100
        assert found[len(found) * 9 // 10] <= UPPER
    share = round(10_000 * events[-1]["share"])
    rest = f"{(10_000 - share) // 2 * 10} 100000\n" if lever == "quota" else "max 100000\n"
    assert quotas == [f"{10 * share} 100000\n" if share < 10_000 else "max 100000\n", rest, rest]
    assert after == ["max 100000\n"] * 3
