"""The space of a program with the library: which server it is a client of, as the daemon says before cuInit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from backend.door.wire import CUDA, Feature, Message, Op
from tests.t6_cuda.harness import Program, SizingDaemon, eventually, running


class SpacingDaemon(SizingDaemon):
    """A daemon that has programs be in a space."""

    space = 0
    """The number of it."""
    given: list[int]
    """What programs said that they had been told before."""

    def __init__(self, path: Path) -> None:
        self.given = []
        super().__init__(path)

    def _answer(self, request: Message) -> Message:
        if request.op == Op.SPACE:
            self.given.append(request.args[0])
            return request.answer(request.args[0] or self.space)
        return super()._answer(request)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[SpacingDaemon]:
    server = SpacingDaemon(tmp_path / "ggroup.sock")
    try:
        yield server
    finally:
        server.close()


def pipe(program: Program) -> str:
    """Return where it says that its server is."""
    assert program.process.stdout is not None
    words = program.process.stdout.readline().split()
    assert words[:1] == ["pipe"], program.stderr()
    return words[1]


def again(program: Program) -> str:
    program.go()
    return pipe(program)


def space(tmp_path: Path, *words: str, sanitize: str = "", **extra: str) -> list[str]:
    """Run the program, and return what it says: of its child, then of itself, twice."""
    with running(
        "space",
        *words,
        tmp_path=tmp_path,
        sanitize=sanitize,
        extra={"GGROUP_SOCKET": str(tmp_path / "ggroup.sock"), **extra},
    ) as program:
        return [pipe(program) for _ in range(1 + len(words))] + [again(program)]


@pytest.mark.parametrize("sanitize", ["", "address,undefined"])
def test_a_program_is_a_client_of_the_server_of_its_space(tmp_path: Path, daemon: SpacingDaemon, sanitize: str) -> None:
    """It asks once, before the driver is initialised."""
    daemon.space = 0xAB12
    assert space(tmp_path, sanitize=sanitize) == [f"{tmp_path}/ggroup.mps/0000ab12/pipe"] * 2
    assert daemon.spaced == [[Op.HELLO, Op.SPACE]]
    assert not daemon.said


def test_a_child_asks_for_itself(tmp_path: Path, daemon: SpacingDaemon) -> None:
    daemon.space = 7
    assert space(tmp_path, "fork") == [f"{tmp_path}/ggroup.mps/00000007/pipe"] * 3
    assert daemon.given == [0, 0], "neither has been in one before"


def test_one_that_is_in_no_space_has_no_server(tmp_path: Path, daemon: SpacingDaemon) -> None:
    """It may have been started by one that is in one, and been moved."""
    assert space(tmp_path) == ["none", "none"]
    inherited = f"{tmp_path}/ggroup.mps/00000007/pipe"
    assert space(tmp_path, CUDA_MPS_PIPE_DIRECTORY=inherited) == ["none", "none"]


def test_a_server_of_the_users_own_is_left_alone(tmp_path: Path, daemon: SpacingDaemon) -> None:
    daemon.space = 7
    assert space(tmp_path, CUDA_MPS_PIPE_DIRECTORY="/tmp/mine") == ["/tmp/mine", "/tmp/mine"]


@pytest.mark.parametrize("features", [Feature(0), CUDA & ~Feature.SPACE])
def test_an_older_daemon_is_not_asked(tmp_path: Path, daemon: SpacingDaemon, features: Feature) -> None:
    daemon.space, daemon.features = 7, features
    assert space(tmp_path) == ["none", "none"]
    assert daemon.said == [[Op.HELLO]]


def test_without_a_daemon(tmp_path: Path) -> None:
    assert not (tmp_path / "ggroup.sock").exists()
    assert space(tmp_path) == ["none", "none"]


def test_it_tells_a_later_daemon(tmp_path: Path, daemon: SpacingDaemon) -> None:
    """The connection that its memory is managed by says which space the program is in."""
    daemon.space = 0x55
    extra = {"GGROUP_SOCKET": str(tmp_path / "ggroup.sock"), "FAKE_MEMORY": str(1 << 30)}
    with running("turns", tmp_path=tmp_path, extra=extra):
        eventually(lambda: 0x55 in daemon.given, "it says where it is")
