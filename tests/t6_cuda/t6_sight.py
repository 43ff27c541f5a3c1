"""The GPU size that a program with the library sees: the same from its first question to its end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from backend.door.wire import CUDA, Feature, Op
from tests.t6_cuda.harness import MIB, Program, SizingDaemon, eventually, running

CARD = 1024
"""MiB of the double's GPU."""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[SizingDaemon]:
    server = SizingDaemon(tmp_path / "socket")
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def sees(tmp_path: Path, *words: str, sanitize: str = "", devices: int = 1) -> Iterator[Program]:
    extra = {"GGROUP_SOCKET": str(tmp_path / "socket"), "FAKE_DEVICES": str(devices), "FAKE_MEMORY": str(CARD * MIB)}
    with running("sees", *words, tmp_path=tmp_path, sanitize=sanitize, extra=extra) as program:
        yield program


def hear(program: Program, what: str) -> int:
    number = program.hears(what)
    program.go()
    return number


def threads(program: Program) -> list[str]:
    """Return the names of its threads; LD_PRELOAD is for the program that `env` becomes, with the same pid."""
    return [(task / "comm").read_text().strip() for task in Path(f"/proc/{program.process.pid}/task").iterdir()]


def amounts(program: Program) -> tuple[int, int]:
    """Return total and free, in MiB."""
    return hear(program, "total"), hear(program, "free")


def amounts_under(program: Program, daemon: SizingDaemon, *limits: tuple[int, int] | None) -> list[tuple[int, int]]:
    """Return total and free in MiB under each of some limits, which are in force before the program goes on."""
    found = []
    for one in limits:
        daemon.limits = one
        program.go()
        total = program.hears("total")
        program.go()
        found.append((total, program.hears("free")))
    program.go()
    return found


@pytest.mark.parametrize("sanitize", ["", "address,undefined"])
def test_it_is_what_it_was_at_the_first_question(tmp_path: Path, daemon: SizingDaemon, sanitize: str) -> None:
    """Before a context, in one, and whatever becomes of the limits; the free memory follows them within the total."""
    daemon.totals = {0: 512}
    with sees(tmp_path, sanitize=sanitize) as program:
        assert program.hears("total") == 512
        assert daemon.said == [[Op.HELLO, Op.LOCATE, Op.TOTAL]], "it is not managed by that"
        assert "ggroup" not in threads(program), "nor has it a thread of ours"
        daemon.totals = {0: 256}
        found = amounts_under(program, daemon, (512, 512), (256, 240), (768, 752))
        assert found == [(512, 512), (512, 240), (512, 512)]
        program.ends()
    assert [said.count(Op.TOTAL) for said in daemon.said] == [1, 0]


def test_without_a_limit_it_is_the_cards(tmp_path: Path, daemon: SizingDaemon) -> None:
    """For good: a later limit only bounds the free memory."""
    with sees(tmp_path) as program:
        assert program.hears("total") == CARD
        daemon.totals = {0: 256}
        found = amounts_under(program, daemon, None, (256, 240), (256, 0))
        assert found == [(CARD, CARD), (CARD, 240), (CARD, 0)]
        program.ends()


def test_each_gpu_has_its_own(tmp_path: Path, daemon: SizingDaemon) -> None:
    daemon.totals = {1: 256, 2: 0}
    with sees(tmp_path, devices=3) as program:
        assert [hear(program, "total"), hear(program, "total")] == [CARD, 256]
        assert program.hears("total") == 0, "a limit of nothing"
        found = amounts_under(program, daemon, None, None, None)
        assert [total for total, _ in found] == [CARD] * 3
        program.ends()


def test_threads_that_ask_at_once_hear_the_same(tmp_path: Path, daemon: SizingDaemon) -> None:
    daemon.totals = {0: 512}
    with sees(tmp_path, "threads", sanitize="thread") as program:
        assert hear(program, "total") == 512
        program.ends()
    assert len(daemon.said) == 1, "it is asked once"


def test_another_program_asks_anew(tmp_path: Path, daemon: SizingDaemon) -> None:
    """A child that executes another program asks; its parent keeps its own answer."""
    daemon.totals = {0: 512}
    with sees(tmp_path, "fork") as program:
        assert program.hears("total") == 512
        daemon.totals = {0: 256}
        program.go()
        assert hear(program, "total") == 256
        for _ in range(3):
            assert amounts(program)[0] == 256
        assert hear(program, "total") == 512
        program.ends()


@pytest.mark.parametrize("features", [Feature(0), CUDA & ~Feature.TOTAL])
def test_an_older_daemon(tmp_path: Path, daemon: SizingDaemon, features: Feature) -> None:
    """As before that feature: all of the GPU before the first context, then the limit of the moment."""
    daemon.features, daemon.totals = features, {0: 512}
    with sees(tmp_path) as program:
        assert program.hears("total") == CARD
        found = amounts_under(program, daemon, (512, 512), (256, 240), None)
        assert found == [(512, 512), (256, 240), (CARD, CARD - 16)]
        program.ends()
    assert not any(Op.TOTAL in said for said in daemon.said)


def test_a_daemon_that_comes_later(tmp_path: Path) -> None:
    """Or never: the total stays, and the free memory follows once there is a daemon."""
    with sees(tmp_path) as program:
        assert program.hears("total") == CARD
        program.go()
        assert program.hears("total") == CARD
        daemon = SizingDaemon(tmp_path / "socket")
        try:
            daemon.totals, daemon.limits = {0: 256}, (256, 240)
            eventually(lambda: any(Op.MANAGE in said for said in daemon.said), lambda: "it is managed")
            program.go()
            assert program.hears("free") == CARD, "that was asked before"
            found = amounts_under(program, daemon, (256, 240), (256, 240))
            assert found == [(CARD, 240)] * 2
            program.ends()
        finally:
            daemon.close()


def test_a_daemon_that_goes(tmp_path: Path, daemon: SizingDaemon) -> None:
    daemon.totals, daemon.limits = {0: 512}, (512, 512)
    with sees(tmp_path) as program:
        assert hear(program, "total") == 512
        assert hear(program, "total") == 512
        assert program.hears("free") == 512
        daemon.close()
        program.go()
        assert amounts(program) == (512, 512)
        assert amounts(program) == (512, 512)
        program.ends()
