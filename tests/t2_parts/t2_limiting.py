"""How a process asks for its limits before it becomes another program; its listener may be no daemon."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from backend.door import limiting
from backend.door.environment import Level
from backend.door.limiting import limit_self
from backend.door.wire import CUDA_ALL, SIZE, SOFT, VERSION, Feature, Message, Op

LEVELS = [Level(7, {"high": 4096})]

Answer = Callable[[socket.socket, Message], object]


@contextlib.contextmanager
def daemon(path: Path, answer: Answer) -> Iterator[list[Message]]:
    """Listen at a path and answer one connection; yield the requests that came."""
    asked: list[Message] = []

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while raw := connection.recv(SIZE):
                asked.append(Message.decode(raw))
                answer(connection, asked[-1])

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.fspath(path))
        listener.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield asked
        finally:
            thread.join(30)
            assert not thread.is_alive()


def grant(connection: socket.socket, request: Message, features: Feature = SOFT) -> None:
    """Answer as a daemon does."""
    words = (VERSION, 4096, 2048, features) if request.op == Op.HELLO else ()
    connection.sendall(request.answer(*words).encode())


def test_it_asks_and_is_answered(tmp_path: Path) -> None:
    with daemon(tmp_path / "s", grant) as asked:
        assert limit_self(tmp_path / "s", LEVELS)
    said = Feature(asked[0].args[1])
    assert not (CUDA_ALL | SOFT) & ~said, "no daemon takes it for an older program"
    assert [(one.op, one.args[:2]) for one in asked[1:]] == [(Op.WANT, (0, 4096)), (Op.FAMILY, (7, 1))]
    with daemon(tmp_path / "t", lambda line, request: grant(line, request, Feature.ENGINE)) as asked:
        assert not limit_self(tmp_path / "t", LEVELS)
    assert len(asked) == 1


@pytest.mark.parametrize(
    "raw",
    [
        b"x",
        bytes(SIZE + 1),
        Message(Op.HELLO, 1, status=5, reply=True).encode(),
        Message(Op.HELLO, 1, status=-5000, reply=True).encode(),
    ],
    ids=["short", "long", "positive", "no errno"],
)
def test_what_is_no_answer_is_an_error_with_a_number(tmp_path: Path, raw: bytes) -> None:
    with (
        daemon(tmp_path / "s", lambda line, _: line.sendall(raw)),
        pytest.raises(OSError, match="Protocol error") as refused,
    ):
        limit_self(tmp_path / "s", LEVELS)
    assert refused.value.errno == errno.EPROTO


def test_all_answers_have_one_deadline(tmp_path: Path) -> None:
    """Neither silence, nor events, nor slow answers make it wait longer."""

    def dribble(connection: socket.socket, request: Message) -> None:
        if request.op == Op.HELLO:
            time.sleep(0.3)
            grant(connection, request)
        for _ in range(100 if request.op != Op.HELLO else 0):
            connection.sendall(Message(Op.PROGRESS).encode())
            time.sleep(0.05)

    answers: list[Answer] = [dribble, lambda _, __: None]
    for number, answer in enumerate(answers):
        path, began = tmp_path / str(number), time.monotonic()
        with mock.patch.object(limiting, "ANSWER_S", 0.5), daemon(path, answer):
            with pytest.raises(TimeoutError) as late:
                limit_self(path, LEVELS)
            assert 0.4 < time.monotonic() - began < 4
        assert late.value.errno == errno.ETIMEDOUT


@pytest.mark.parametrize(("uid", "unnamed", "asks"), [(0, False, True), (4242, False, False), (65534, True, True)])
def test_nothing_is_said_to_a_listener_of_another_user(tmp_path: Path, uid: int, unnamed: bool, asks: bool) -> None:
    """The rule is the library's, in a container with a user namespace as well."""
    maps = b"         0     100000      65536\n" if unnamed else b"         0          0 4294967295\n"
    with (
        mock.patch.object(limiting, "user_of", return_value=uid),
        mock.patch.object(limiting.procfs, "of_process", return_value=maps),
        daemon(tmp_path / "s", grant) as asked,
    ):
        if asks:
            assert limit_self(tmp_path / "s", LEVELS)
        else:
            with pytest.raises(PermissionError):
                limit_self(tmp_path / "s", LEVELS)
    assert bool(asked) is asks
    with mock.patch.object(limiting.procfs, "of_process", return_value=b"0 0 4294967295\n"):
        assert not limiting._may_be_daemon(65534)
