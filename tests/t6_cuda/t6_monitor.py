"""What NVML says to a program with the library: the limits, and not the whole GPU."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from backend.cuda.page import CounterPage
from backend.door.wire import CUDA, SIZE, Feature, Message, Op
from tests.t6_cuda.harness import GrantingDaemon, Program, build, environment, preloaded, running

MIB = 1 << 20
WHOLE = (1 << 64) - 1
CARD, USED = 1024, 256
"""MiB that the double of NVML has, and that processes hold of that; a quarter as much is reserved besides."""
HOLD = f"1:{200 * MIB},2,3:{56 * MIB}"
"""Three processes, of one of which the driver does not say what it holds."""


class Limiting(GrantingDaemon):
    """A daemon with limits."""

    features: Feature = CUDA
    view: tuple[int, int, int] | None = None
    """Total, free and used of GPU 0, MiB; None: it is under no limit."""

    def __init__(self, path: Path) -> None:
        self.said: list[list[Op]] = []
        """What was asked on each connection."""
        super().__init__(path)

    def _serve(self, connection: socket.socket) -> None:
        said = list[Op]()
        self.pages.append(CounterPage())
        self.said.append(said)
        with contextlib.suppress(OSError):
            while raw := connection.recv(SIZE):
                request = Message.decode(raw)
                said.append(Op(request.op))
                connection.send(self._answer(request).encode())

    def _answer(self, request: Message) -> Message:
        match request.op:
            case Op.HELLO:
                return request.answer(1, 2 << 20, 2000, self.features)
            case Op.LOCATE:
                return request.answer(request.args[1] >> 56)
            case Op.TOTAL if self.view is not None and not request.gpu:
                return request.answer(*(one if one == WHOLE else one * MIB for one in self.view))
            case Op.TOTAL:
                return request.answer(WHOLE, WHOLE, 0)
        return request.answer()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Limiting]:
    server = Limiting(tmp_path / "socket")
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def monitor(tmp_path: Path, *words: str, sanitize: str = "", **more: str) -> Iterator[Program]:
    extra = {
        "GGROUP_SOCKET": str(tmp_path / "socket"),
        "FAKE_DEVICES": "2",
        "FAKE_MEMORY": str(CARD * MIB),
        "FAKE_USED": str(USED * MIB),
        "FAKE_HOLD": HOLD,
        **more,
    }
    program = "monitor_linked" if words[:1] == ("linked",) else "monitor"
    with running(program, *words, tmp_path=tmp_path, sanitize=sanitize, extra=extra) as found:
        yield found


def figures(program: Program) -> tuple[int, int, int, int]:
    """Total, free and used, and what all processes hold together, MiB. The next ones are asked for as it goes on."""
    found = []
    for name in ("total", "free", "used", "sum"):
        if found:
            program.go()
        found.append(program.hears(name))
    return found[0], found[1], found[2], found[3]


REAL = (CARD, CARD - USED - USED // 4, USED, 256)
"""What NVML says itself."""


@pytest.mark.parametrize("sanitize", ["", "address,undefined", "thread"])
@pytest.mark.parametrize("way", ["handle", "default", "linked", "fork"])
def test_it_says_the_limit(tmp_path: Path, daemon: Limiting, way: str, sanitize: str) -> None:
    """However its entry points are found, by a program that is none of CUDA: nothing else is asked, and no thread is
    begun."""
    daemon.view = (512, 412, 100)
    with monitor(tmp_path, way, sanitize=sanitize) as program:
        assert figures(program) == (512, 412, 100, 256)
    assert {tuple(said) for said in daemon.said} == {(Op.HELLO, Op.LOCATE, Op.TOTAL)}


def test_what_is_free_and_used_follows_the_limits_and_the_size_stays(tmp_path: Path, daemon: Limiting) -> None:
    daemon.view = (512, 412, 100)
    with monitor(tmp_path, "handle") as program:
        assert figures(program) == (512, 412, 100, 256)
        for view, expected in (
            ((256, 156, 100), (512, 156, 100, 256)),
            ((256, 0, 300), (512, 0, 300, 256)),
            ((768, 700, 68), (512, 512, 0, 256)),
            ((WHOLE, WHOLE, 0), (512, 512, 0, 256)),
        ):
            daemon.view = view
            program.go()
            assert figures(program) == expected


def test_what_the_gpu_lacks_is_not_free(tmp_path: Path, daemon: Limiting) -> None:
    """The neighbours have it: it is reserved."""
    daemon.view = (768, 700, 68)
    with monitor(tmp_path, "handle", FAKE_USED=str(720 * MIB)) as program:
        assert figures(program) == (768, CARD - 900, 68, 256)


def test_no_list_has_more_than_there_is(tmp_path: Path, daemon: Limiting) -> None:
    """The processes of others are in it where they are seen, and the first have theirs."""
    daemon.view = (220, 120, 100)
    with monitor(tmp_path, "handle") as program:
        assert figures(program)[3] == 220


@pytest.mark.parametrize("view", [None, (WHOLE, WHOLE, 0)])
def test_without_a_limit_it_says_what_it_does(
    tmp_path: Path, daemon: Limiting, view: tuple[int, int, int] | None
) -> None:
    daemon.view = view
    with monitor(tmp_path, "handle") as program:
        assert figures(program) == REAL
        daemon.view = (256, 156, 100)
        program.go()
        assert figures(program) == (CARD, 156, 100, 256), "one that is set later is what is free"


def test_another_gpu_is_not_limited(tmp_path: Path, daemon: Limiting) -> None:
    daemon.view = (512, 412, 100)
    with monitor(tmp_path, "handle", "1") as program:
        assert figures(program) == REAL


def test_a_slice_of_mig_is_left_alone(tmp_path: Path, daemon: Limiting) -> None:
    daemon.view = (512, 412, 100)
    name = "MIG-46414b45-4641-4b45-4641-4b4546414b00"
    with monitor(tmp_path, "handle", FAKE_NAME=name) as program:
        assert figures(program) == REAL
    assert not daemon.said


@pytest.mark.parametrize("variable", ["0", "1"])
def test_it_may_be_left_alone(tmp_path: Path, daemon: Limiting, variable: str) -> None:
    """By GGROUP_NVML=0, which ggroupfs sets for itself."""
    daemon.view = (512, 412, 100)
    with monitor(tmp_path, "handle", GGROUP_NVML=variable) as program:
        assert figures(program) == (REAL if variable == "0" else (512, 412, 100, 256))
    assert bool(daemon.said) == (variable == "1")


@pytest.mark.parametrize("name", ["nv-hostengine", "dcgm-exporter", "some-program"])
def test_a_program_that_tells_others_sees_all(tmp_path: Path, daemon: Limiting, name: str) -> None:
    """DCGM's, for one: what it says of the GPU is for all of the machine."""
    daemon.view = (512, 412, 100)
    program = tmp_path / name
    shutil.copy(build() / "programs" / "monitor", program)
    extra = {"GGROUP_SOCKET": str(tmp_path / "socket"), "FAKE_MEMORY": str(CARD * MIB), "FAKE_USED": str(USED * MIB)}
    ran = subprocess.run(
        ["env", f"LD_PRELOAD={preloaded('')}", os.fspath(program), "handle"],
        env=environment("", extra),
        input="\n",
        text=True,
        capture_output=True,
    )
    assert ran.stdout.splitlines()[0] == f"total {512 if name == 'some-program' else CARD}", ran.stderr


@pytest.mark.parametrize("features", [Feature(0), CUDA & ~Feature.VIEW])
def test_an_older_daemon(tmp_path: Path, daemon: Limiting, features: Feature) -> None:
    """It is not asked for what it does not know."""
    daemon.features, daemon.view = features, (512, 412, 100)
    with monitor(tmp_path, "handle") as program:
        assert figures(program) == REAL
    assert {tuple(said) for said in daemon.said} == {(Op.HELLO,)}


def test_without_a_daemon(tmp_path: Path) -> None:
    with monitor(tmp_path, "handle") as program:
        assert figures(program) == REAL


def test_a_daemon_that_comes_later_and_goes(tmp_path: Path) -> None:
    with monitor(tmp_path, "handle") as program:
        assert figures(program) == REAL
        daemon = Limiting(tmp_path / "socket")
        daemon.view = (512, 412, 100)
        try:
            program.go()
            assert figures(program) == (512, 412, 100, 256)
        finally:
            daemon.close()
        program.go()
        assert figures(program) == (512, 512, 0, 256), "the size stays; what is free of it is NVML's"
