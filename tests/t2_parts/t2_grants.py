"""Grants of host memory (backend/cuda/grants.py), on a host made of files."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from backend.core import hostroom
from backend.cuda.grants import GRANULE, LOOK_S, TELL_S, Demand, Grants, Pinned, share
from backend.process.identity import Process, Slice

MIB, GIB = 1 << 20, 1 << 30
ANY = (1 << 64) - 1
"""Amount that a hostile program requests, and reports to have."""

BYTES = st.integers(0, 64).map(lambda count: count * GRANULE)
DEMANDS = st.lists(st.builds(lambda used, more: Demand(used, used + more), BYTES, BYTES), max_size=6)


@given(st.integers(0, 300 * GRANULE), DEMANDS)
def test_a_share_is_even_above_what_serves(total: int, demands: list[Demand]) -> None:
    grants = share(total, demands)
    used = sum(one.used for one in demands)
    assert all(one.used <= grant <= one.wanted for one, grant in zip(demands, grants, strict=True))
    assert sum(grants) <= max(total, used)
    short = [grant for one, grant in zip(demands, grants, strict=True) if grant < one.wanted]
    above = [grant for one, grant in zip(demands, grants, strict=True) if grant > one.used]
    if short:
        assert min(short) >= max(above, default=0), "none has less than another that has more than serves it"
        assert total - sum(grants) < len(short) * GRANULE or sum(grants) == used, "nothing is left"


class Host:
    """A machine, its cgroups and its programs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "proc").mkdir()
        self.available(8 * GIB)
        self.grants = Grants(root)
        self.told: dict[str, list[int]] = {}
        self.slices: dict[int, Slice] = {}

    def available(self, nbytes: int) -> None:
        (self.root / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {nbytes // 1024} kB\n")

    def cgroup(self, path: str, limit: int | None, current: int) -> None:
        cgroup = self.root / "sys/fs/cgroup" / path
        cgroup.mkdir(parents=True, exist_ok=True)
        (cgroup / "memory.max").write_text("max\n" if limit is None else f"{limit}\n")
        (cgroup / "memory.current").write_text(f"{current}\n")

    def says(self, name: str, held: int, used: int, wanted: int, swapped: int = 0, slice_: str = "/") -> None:
        process = Process(sum(name.encode()), 1)
        self.slices[process.pid] = Slice(slice_)
        told = self.told.setdefault(name, [])
        self.grants.say(name, Pinned(process, told.append), (held, used, wanted), swapped)

    async def are(self, **grants: int) -> None:
        await trio.sleep(LOOK_S * 1.5)
        assert {name: told[-1] // MIB for name, told in self.told.items() if told} == grants


Test = Callable[[Host], Awaitable[None]]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Test], None]:
    host = Host(tmp_path)
    monkeypatch.setattr(hostroom, "cgroup_of", lambda pid: host.slices[pid])

    async def main(test: Test) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(host.grants.run)
            await test(host)
            nursery.cancel_scope.cancel()

    def run(test: Test) -> None:
        trio.run(partial(main, test), clock=trio.testing.MockClock(autojump_threshold=0))

    return run


def test_all_together_have_half_of_the_host(runs: Callable[[Test], None]) -> None:
    async def test(host: Host) -> None:
        host.says("a", 0, 0, 3 * GIB)
        await host.are(a=3072)
        host.says("b", 0, 0, 3 * GIB)
        await host.are(a=2048, b=2048)
        # Pinned memory is no longer available, and is counted all the same.
        host.says("a", 2 * GIB, 2 * GIB, 3 * GIB, 2 * GIB)
        host.available(6 * GIB)
        await host.are(a=2048, b=2048)
        host.says("b", 0, 0, 0)
        await host.are(a=3072, b=0)
        host.says("b", 0, 0, 3 * GIB)
        host.grants.end("a")
        host.available(8 * GIB)
        await host.are(a=3072, b=3072)
        assert host.grants.granted == 3 * GIB

    runs(test)


def test_none_has_more_before_another_has_let_go_of_it(runs: Callable[[Test], None]) -> None:
    """A grant may be pinned already, reported or not; and what a program reports to have still, it has."""

    async def test(host: Host) -> None:
        host.says("a", 0, 0, 9 * GIB)
        await host.are(a=4096)
        host.says("b", 0, 0, 9 * GIB)
        await trio.sleep(TELL_S * 1.5)
        assert host.told["a"][-1] == 2 * GIB
        assert host.told["b"] == [0], "the other may have pinned it all"
        host.says("a", 3 * GIB, 0, 9 * GIB)
        host.available(5 * GIB)
        await host.are(a=2048, b=1024)
        host.says("a", 2 * GIB, 0, 9 * GIB)
        host.available(6 * GIB)
        await host.are(a=2048, b=2048)

    runs(test)


def test_what_serves_is_granted_always(runs: Callable[[Test], None]) -> None:
    async def test(host: Host) -> None:
        host.says("a", 6 * GIB, 6 * GIB, 9 * GIB, swapped=6 * GIB)
        host.says("b", 0, 0, GIB)
        host.available(2 * GIB)
        await host.are(a=6144, b=0)
        host.says("a", 3 * GIB, 2 * GIB, 9 * GIB, swapped=2 * GIB)
        host.available(5 * GIB)
        await host.are(a=3072, b=1024)

    runs(test)


def test_a_cgroup_has_what_its_limit_leaves(runs: Callable[[Test], None]) -> None:
    """The grants of a pod are added up, and those of a slice of pods: pinned memory is not in memory.current."""

    async def test(host: Host) -> None:
        host.cgroup("pods", None, 0)
        host.cgroup("pods/one", 2 * GIB, GIB)
        host.cgroup("pods/other", 9 * GIB, GIB)
        host.says("a", 0, 0, 2 * GIB, slice_="/pods/one")
        host.says("b", 0, 0, 2 * GIB, slice_="/pods/one")
        host.says("c", 0, 0, 2 * GIB, slice_="/pods/other")
        host.says("d", 0, 0, GIB)
        await host.are(a=512, b=512, c=1024, d=1024)
        host.cgroup("pods", 3 * GIB, 2 * GIB)
        await host.are(a=340, b=340, c=340, d=1024)
        host.says("a", 512 * MIB, 512 * MIB, 2 * GIB, swapped=512 * MIB, slice_="/pods/one")
        host.cgroup("pods/one", 2 * GIB, 3 * GIB)  # it is over its limit by now
        await host.are(a=512, b=0, c=512, d=1024)

    runs(test)


def test_what_a_program_says_beyond_the_books_is_not_believed(runs: Callable[[Test], None]) -> None:
    async def test(host: Host) -> None:
        host.says("a", 0, 0, 2 * GIB)
        host.says("liar", ANY, ANY, ANY)
        await host.are(a=2048, liar=2048)
        for _ in range(20):
            host.says("liar", ANY, ANY, ANY)
            await trio.sleep(LOOK_S)
        assert host.told["a"] == [2 * GIB]
        assert host.told["liar"][-1] < 8 * GIB, "what the host has bounds it"

    runs(test)


def test_a_host_that_changes_a_little_is_not_told(runs: Callable[[Test], None]) -> None:
    async def test(host: Host) -> None:
        host.says("a", 0, 0, 9 * GIB)
        await host.are(a=4096)
        for change in range(1, 20):
            host.available(8 * GIB - (change % 2) * 100 * MIB)
            await host.are(a=4096)
        assert len(host.told["a"]) == 1
        host.available(6 * GIB)
        await host.are(a=3072)
        # It has more than it may, and is told so however small the excess is.
        host.says("a", 3 * GIB, 0, 9 * GIB)
        host.available(3 * GIB - 8 * MIB)
        await host.are(a=3068)

    runs(test)


def test_however_often_programs_speak_all_is_shared_some_times_a_second(
    runs: Callable[[Test], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []

    async def test(host: Host) -> None:
        look = host.grants._share

        def count() -> object:
            counted.append(1)
            return look()

        monkeypatch.setattr(host.grants, "_share", count)
        for turn in range(1000):
            host.says("a", 0, 0, turn * GRANULE)
            await trio.sleep(0.001)

    runs(test)
    assert len(counted) < 30
