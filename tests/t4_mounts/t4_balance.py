"""`ggroupfs balance` over a real mount with two software GPUs: real programs move, and a slow one recovers."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from ggroupfs.client import Group, numbers
from ggroupfs.errors import UsageError
from ggroupfs.policies.balance.picture import Bound
from ggroupfs.policies.balance.settings import Settings
from ggroupfs.policies.config import Table
from tests.support.cgroups import cgroup, enter, slice_path
from tests.support.command import complaint
from tests.support.mounted import BUSY, SECONDS, SLOW, Mounted, Tenant, eventually, mounted
from tests.support.page import POLICIES, section
from tests.support.policy_program import PolicyProgram

MIB = 1 << 20
BALANCED_S = 10.0
"""Seconds, including the policy's start, within which the GPUs must be balanced."""
REQUEST_MS = 20
UPPER_MS = 60

SERVER = """
import json, sys, time
from backend.soft.client import Device
from ggroupfs.client import Latencies
from tests.support.stopwatch import Stopwatch
mount, path, us = sys.argv[1:]
latencies = Latencies(None, path)
with Device(mount) as device:
    tsg, done = device.join(), 0
    while True:
        watch, done = Stopwatch(), done + 1
        device.launch(tsg, 1, int(us))
        while device.finished[tsg] < done:
            device.take_progress(1)
        took = watch.seconds
        latencies.report(took)
        print(json.dumps(took), flush=True)
        time.sleep(0.02)
"""
"""A program that serves a request, rests a little, and so on. It does not count time spent waiting for a processor."""

CONFIG = """
socket = "{socket}"

[[group]]
name = "server"
pid = {pid}
upper = "{upper}ms"
statistic = "p99"
"""


@pytest.fixture
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    """A mounted tree with two software GPUs."""
    with mounted(tmp_path_factory.mktemp("ggroup"), "soft.gpus=2", "soft.gmem=1G") as mount:
        yield mount


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """An empty configuration."""
    file = tmp_path / "balance.toml"
    file.touch()
    return file


@contextlib.contextmanager
def busy(mount: Mounted, *memory: str) -> Iterator[list[Tenant]]:
    """Yield tenants on GPU 0 that always have work."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Tenant(mount, "--gmem", size, *BUSY)) for size in memory]


@contextlib.contextmanager
def server(mount: Mounted, socket: Path) -> Iterator[subprocess.Popen[str]]:
    """Yield a program that serves requests and reports its latency; it is killed in the end."""
    words = [sys.executable, "-c", SERVER, mount.path, socket, 1000 * REQUEST_MS]
    with subprocess.Popen([*map(str, words)], stdout=subprocess.PIPE, text=True) as program:
        try:
            yield program
        finally:
            program.kill()


def served(program: subprocess.Popen[str], count: int) -> list[float]:
    """Return its next latencies in seconds, sorted."""
    assert program.stdout is not None
    return sorted(float(program.stdout.readline()) for _ in range(count))


def p99(latencies: list[float]) -> float:
    return latencies[int(0.99 * len(latencies))]


def gpus(mount: Mounted, pid: int) -> list[int]:
    """Return the GPUs that a process is on."""
    return numbers(mount / pid)


def test_four_programs_and_an_idle_gpu(two: Mounted, config: Path) -> None:
    """The two smaller ones move within 10 s, and nothing else happens. All keep their memory as it was."""
    with busy(two, "192M", "64M", "128M", "32M") as tenants:
        watch = two.watch()
        with PolicyProgram(two.path, "balance", config) as policy:
            watch.add(policy.pid)
            told = [policy.until("moved"), policy.until("moved")]
            assert watch.seconds <= BALANCED_S * SLOW
            assert [int(one["group"]) for one in told] == [tenants[3].pid, tenants[1].pid], policy.events
            assert [(one["gpu"], one["to"]) for one in told] == [(0, 1)] * 2
            assert all(one["seconds"] > 0 for one in told)
            assert [gpus(two, tenant.pid) for tenant in tenants] == [[0], [1], [0], [1]]
            before = [tenant.report()["finished"] for tenant in tenants]
            eventually(
                lambda: all(one.report()["finished"] > was + 100 for one, was in zip(tenants, before, strict=True)),
                "each has half of a GPU",
            )
            assert policy.end() == [], "nothing more was to be done, and nothing to be taken back"
        assert [gpus(two, tenant.pid) for tenant in tenants] == [[0], [1], [0], [1]]
        for tenant in tenants:
            tenant.stop()


def test_a_critical_program_has_its_latency_back(two: Mounted, config: Path, tmp_path: Path) -> None:
    """Requests of 20 ms beside four programs that always have work take five times as long; within 10 s they are
    within the bound again. The program itself is not moved, since it would stand still."""
    socket = tmp_path / "balance.sock"
    with busy(two, "32M", "64M", "96M", "128M") as tenants, server(two, socket) as critical:
        before = served(critical, 10)
        assert before[0] > UPPER_MS / 1000, "in the best case"
        config.write_text(CONFIG.format(socket=socket, pid=critical.pid, upper=UPPER_MS))
        watch = two.watch(critical.pid)
        with PolicyProgram(two.path, "balance", config) as policy:
            watch.add(policy.pid)
            first = policy.until("move")
            assert not first["critical"]
            moved = [int(policy.until("moved")["group"])]
            while p99(served(critical, 20)) > UPPER_MS / 1000:
                assert watch.seconds <= BALANCED_S * SLOW, policy.events
            assert watch.seconds <= BALANCED_S * SLOW
            policy.end()
            moved += [int(one["group"]) for one in policy.events[3:] if one["event"] == "moved"]
        assert gpus(two, critical.pid) == [0]
        assert len(moved) >= 2, "one neighbour less is not enough"
        assert len(moved) == len(set(moved))
        assert {tenant.pid for tenant in tenants if gpus(two, tenant.pid) == [1]} == set(moved)
        assert moved[0] == tenants[0].pid, "the smallest first"
        for tenant in tenants:
            tenant.stop()
    assert not socket.exists()


def test_who_is_not_to_be_moved_and_who_cannot_be(two: Mounted, config: Path) -> None:
    """One is excluded by the configuration, one has no room on the other GPU: no move is made or tried."""
    with busy(two, "32M", "600M") as tenants, Tenant(two, "--gpu", "1", "--gmem", "500M", *BUSY, "--depth", "0"):
        config.write_text(f"[[group]]\npid = {tenants[0].pid}\nmove = false\n")
        with PolicyProgram(two.path, "balance", config) as policy:
            for tenant in tenants:
                for _ in range(40):
                    tenant.report()
            assert policy.end() == []
        assert [gpus(two, tenant.pid) for tenant in tenants] == [[0], [0]]


def test_a_refusal_is_told_and_not_repeated(two: Mounted, config: Path) -> None:
    """The smallest one's slice has a limit on the other GPU: the next one is moved, and that settles it."""
    with cgroup("ggroupbalance.slice") as limited, busy(two, "32M", "64M") as tenants:
        there = put(two, tenants[0], limited, gpu=1)
        (there / "gmem.limit.high").write_text("16M\n")
        with PolicyProgram(two.path, "balance", config) as policy:
            told = policy.until("refused")
            assert (int(told["group"]), told["gpu"], told["to"], told["error"]) == (tenants[0].pid, 0, 1, "ENOSPC")
            assert int(policy.until("moved")["group"]) == tenants[1].pid
            assert policy.end() == []
        assert [gpus(two, tenant.pid) for tenant in tenants] == [[0], [1]]


def test_a_slice_is_moved_as_one(two: Mounted, config: Path) -> None:
    """Each of its processes is smaller than the program beside it, but they are not separated."""
    with cgroup("ggroupbalance.slice") as batch, busy(two, "32M", "32M", "96M") as tenants:
        for tenant in tenants[:2]:
            put(two, tenant, batch)
        path = f"/{slice_path(batch)}"
        config.write_text(f'[[group]]\nslice = "{path}"\n')
        with PolicyProgram(two.path, "balance", config) as policy:
            told = policy.until("moved")
            assert (told["group"], told["gpu"], told["to"]) == (path, 0, 1)
            assert policy.events[1]["bytes"] == 64 * MIB
            assert policy.end() == []
        assert [gpus(two, tenant.pid) for tenant in tenants] == [[1], [1], [0]]


def put(mount: Mounted, tenant: Tenant, path: Path, gpu: int = 0) -> Path:
    """Move a tenant to a cgroup; return its slice once the tenant is there and is counted there."""
    enter(tenant.pid, path)
    here = mount / "slice" / slice_path(path)
    held = tenant.number("gmem.current")
    eventually(lambda: int((here / "0" / "gmem.current").read_text()) >= held, "its slice has it")
    return here / str(gpu)


def test_a_move_that_takes_too_long_is_left_behind(tmp_path: Path) -> None:
    """Its output goes to a pipe that is not read yet."""
    os.mkfifo(tmp_path / "compute.migrate")
    with pytest.raises(TimeoutError):
        trio.run(Group(tmp_path).migrate, 1, 0.05)
    assert (tmp_path / "compute.migrate").read_text() == "1\n", "the thread that was left ends"


def test_who_is_ended_in_a_move_waits_for_it(tmp_path: Path) -> None:
    """A move cannot be taken back, and no other one is begun."""
    pipe, ended = tmp_path / "compute.migrate", []
    os.mkfifo(pipe)

    async def move(scope: trio.CancelScope) -> None:
        with scope:
            for gpu in (1, 2):
                await Group(tmp_path).migrate(gpu, SECONDS)
                ended.append(gpu)

    async def main() -> None:
        scope = trio.CancelScope()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(move, scope)
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
            await trio.testing.wait_all_tasks_blocked()
            assert not ended
            assert await trio.to_thread.run_sync(pipe.read_text) == "1\n"
        assert ended == [1]

    trio.run(main)


GROUP = '[[group]]\nslice = "/a.slice"\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('rest = "59s"', "rest: less than a minute"),
        ("overload = 0.5", "overload: less than 1"),
        ("[[group]]\n", "group 1: slice: one of slice and pid is needed"),
        (GROUP + 'name = "42"\n', "name: looks like the pid of another process"),
        (GROUP + GROUP, "group: two of the same name"),
        (GROUP + GROUP + 'name = "b"\n', "group: two of the same process or slice"),
        (GROUP + 'statistic = "mean"\n', "statistic: there is no such key"),
        (GROUP + 'upper = "1s"\nstatistic = "median"\n', "neither mean nor a percentile such as p99"),
        (GROUP + "least = 2\n", "least: more than 1"),
    ],
)
def test_what_is_no_configuration(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=f"^balance.toml: .*{re.escape(words)}$"):
        Settings.read(Table(tomllib.loads(text), "balance.toml"))


def test_the_example_of_the_page() -> None:
    example = section("Configuration", POLICIES / "balance.md").partition("```toml\n")[2].partition("```")[0]
    settings = Settings.read(Table(tomllib.loads(example), "the page"))
    assert [(one.name, one.bound, one.movable) for one in settings.groups] == [
        ("chat", Bound(upper=0.06), True),
        ("/render.slice", Bound(least=0.5), False),
        ("/batch.slice", None, True),
    ]
    assert list(settings.statistics) == ["chat"]


def test_where_there_is_one_gpu(mount: Mounted) -> None:
    words = "compute.migrate unsupported: is there another GPU?"
    assert complaint("balance", "--mount", mount.path, code=1) == f"{os.fspath(mount.path)}: {words}"
