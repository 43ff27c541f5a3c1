"""The messages: 64 bytes, with every field where the table in backend.door.wire says, and back again."""

from __future__ import annotations

import errno
import os
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.door.wire import ARGS, FORMAT, REPLY, SIZE, Message, Op
from backend.soft.client import Device

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)

MESSAGES = st.builds(
    Message,
    op=st.integers(0, REPLY - 1),
    seq=U64,
    gpu=U32,
    args=st.tuples(*[U64] * ARGS),
    status=st.integers(-(2**31), 2**31 - 1),
    reply=st.booleans(),
    flags=U32,
)


def test_layout() -> None:
    raw = Message(Op.ALLOC, seq=7, gpu=3, args=(1, 2, 3, 4, 5), status=-12, reply=True).encode()
    assert len(raw) == SIZE == FORMAT.size == 64
    assert struct.unpack_from("<I", raw, 0) == (Op.ALLOC | 1 << 31,)
    assert struct.unpack_from("<i", raw, 4) == (-12,)
    assert struct.unpack_from("<Q", raw, 8) == (7,)
    assert struct.unpack_from("<II", raw, 16) == (3, 0)
    assert struct.unpack_from("<5Q", raw, 24) == (1, 2, 3, 4, 5)


@given(MESSAGES)
def test_round_trip(message: Message) -> None:
    assert Message.decode(message.encode()) == message


@given(st.binary(max_size=200).filter(lambda raw: len(raw) != SIZE))
def test_only_whole_messages_are_decoded(raw: bytes) -> None:
    with pytest.raises(ValueError, match="64 bytes"):
        Message.decode(raw)


def test_a_refusal_is_raised_as_its_errno() -> None:
    with pytest.raises(OSError, match="Cannot allocate memory") as caught:
        Message(Op.ALLOC, seq=1).refuse(errno.ENOMEM).check()
    assert caught.value.errno == errno.ENOMEM


@pytest.mark.parametrize("status", [1, 2**31 - 1, -4096, -(2**31)])
def test_a_program_does_not_listen_to_a_gpu_that_talks_nonsense(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """The daemon treats such a program in the same way."""
    path = tmp_path / "socket"
    monkeypatch.setattr("backend.soft.client.socket_of", lambda mount: path)

    def answer(listener: socket.socket) -> None:
        with listener.accept()[0] as end:
            for wrong in (False, True):
                request = Message.decode(end.recv(SIZE))
                end.sendall(attrs.evolve(request.answer(1, 2, 3), status=status if wrong else 0).encode())
            assert end.recv(SIZE) == b"", "it is hung up on"

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.fspath(path))
        listener.listen()
        with ThreadPoolExecutor(1) as thread:
            done = thread.submit(answer, listener)
            device = Device(tmp_path)
            with pytest.raises(OSError, match="Protocol error"):
                device.join()
            done.result()


def test_the_numbers_are_for_good() -> None:
    assert {op.name: op.value for op in Op} == {
        "HELLO": 1,
        "JOIN": 2,
        "LEAVE": 3,
        "LOCATE": 4,
        "MANAGE": 5,
        "CHARGE": 6,
        "UNCHARGE": 7,
        "MOVE_IN": 8,
        "LIMITS": 9,
        "REPORT": 10,
        "TREE": 11,
        "WANT": 12,
        "FAMILY": 13,
        "TOTAL": 14,
        "HOST": 15,
        "ARRIVE": 16,
        "SET_TIMESLICE": 17,
        "ATTACH_TSG": 18,
        "DETACH_TSG": 19,
        "RECLAIM": 20,
        "DEPART": 21,
        "END_TURN": 22,
        "BEGIN_TURN": 23,
        "PREPARE": 24,
        "SPACE": 25,
        "SMS": 26,
        "SET_SM_MAX": 27,
        "ALLOC": 32,
        "FREE": 33,
        "WRITE": 34,
        "READ": 35,
        "LAUNCH": 36,
        "PROGRESS": 64,
        "ROOM": 66,
        "LEAD": 67,
        "FOLLOW": 68,
        "GRANT": 69,
    }
