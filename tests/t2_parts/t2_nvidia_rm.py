"""The ioctl edge of the NVIDIA driver: layouts, status codes, descriptors."""

from __future__ import annotations

import errno
import os
import struct
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.nvidia import device, linux, rm
from backend.process.identity import Process, identify
from tests.support.fake_nvidia import FakeSystem

U32 = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize(
    ("layout", "size"),
    [
        (rm.NVOS54, 32),
        (rm.NVOS21, 32),
        (rm.NVOS00, 16),
        (rm.HANDLE_INFO, 16),
        (rm.DATABASE_INFO, 16),
        (rm.ID_INFO, 32),
        (rm.CHANNEL_STATE, 16),
        (rm.GPU_ID, 4),
        (rm.TIMESLICE, 8),
        (rm.DISABLE_CHANNELS, 536),
        (rm.CARD, 72),
    ],
)
def test_sizes(layout: struct.Struct, size: int) -> None:
    assert layout.size == size


def test_ioctl_numbers_carry_the_sizes() -> None:
    for request, layout, count in (
        (rm.IOCTL_CONTROL, rm.NVOS54, 1),
        (rm.IOCTL_ALLOC, rm.NVOS21, 1),
        (rm.IOCTL_FREE, rm.NVOS00, 1),
        (rm.IOCTL_CARD_INFO, rm.CARD, rm.CARD_COUNT),
    ):
        assert request >> 30 == 3  # _IOWR
        assert request >> 8 & 0xFF == ord("F")
        assert request >> 16 & 0x3FFF == layout.size * count


@given(st.booleans(), st.lists(st.tuples(U32, U32), min_size=1, max_size=64))
def test_disable_channels_offsets(disable: bool, channels: list[tuple[int, int]]) -> None:
    data = rm.pack_disable(disable, channels)
    assert data[0] == disable
    assert struct.unpack_from("<I", data, 4)[0] == len(channels)
    assert data[8:24] == bytes(16)  # neither only-scheduling, nor rewind, nor an event
    clients = struct.unpack_from("<64I", data, 24)
    handles = struct.unpack_from("<64I", data, 280)
    assert list(zip(clients, handles, strict=True))[: len(channels)] == channels
    assert not any(clients[len(channels) :])
    assert not any(handles[len(channels) :])


@pytest.mark.parametrize("count", [0, 65])
def test_disable_channels_takes_1_to_64(count: int) -> None:
    with pytest.raises(ValueError, match="channels in one call"):
        rm.pack_disable(True, [(1, 2)] * count)


@given(U32, U32, U32, st.integers(0, 2**64 - 1), U32, U32)
def test_control_round_trip(client: int, target: int, cmd: int, pointer: int, size: int, status: int) -> None:
    data = rm.NVOS54.pack(client, target, cmd, 0, pointer, size, status)
    assert struct.unpack_from("<III", data) == (client, target, cmd)
    assert struct.unpack_from("<Q", data, 16) == (pointer,)
    assert struct.unpack_from("<II", data, 24) == (size, status)
    assert rm.NVOS54.unpack(data) == (client, target, cmd, 0, pointer, size, status)


@pytest.mark.parametrize(
    ("status", "code", "gone"),
    [
        (0x1B, errno.EPERM, False),
        (0x1F, errno.EINVAL, False),
        (0x21, errno.ENOENT, True),
        (0x23, errno.ENOENT, True),
        (0x33, errno.ENOENT, True),
        (0x40, errno.EIO, False),
        (0x51, errno.ENOMEM, False),
        (0x56, errno.EOPNOTSUPP, False),
        (0x57, errno.ENOENT, True),
        (0x63, errno.EBUSY, False),
        (0x65, errno.ETIMEDOUT, False),
        (0xFFFF, errno.EIO, False),
        (0x7777, errno.EIO, False),
    ],
)
def test_status_to_errno(status: int, code: int, gone: bool) -> None:
    with pytest.raises(OSError, match=f"0x{status:x}") as caught:
        rm.check(status, "control")
    error = caught.value
    assert isinstance(error, rm.RmError)
    assert (error.errno, error.gone, error.status) == (code, gone, status)


def test_ok_is_no_error() -> None:
    rm.check(0, "control")


def test_cards() -> None:
    fake = FakeSystem()
    cards = rm.Control(fake, fake.open_control()).cards()
    assert list(cards) == [rm.Card(0x100, "0000:01:00.0", 0), rm.Card(0x200, "0000:02:00.0", 1)]


def test_a_foreign_client_is_refused_on_a_file_of_our_own() -> None:
    fake = FakeSystem()
    program = fake.program(5, 0)
    tsg = next(iter(program.channels()))
    control = rm.Control(fake, fake.open_control())
    with pytest.raises(rm.RmError) as caught:
        control.query(program.client, tsg, rm.SET_TIMESLICE, rm.TIMESLICE, 1)
    assert caught.value.status == rm.Status.INVALID_CLIENT
    with rm.borrowed(fake, program.identity, [9]) as controls:
        assert controls[9].class_of(program.client, program.client) == rm.CLASS_ROOT


def test_descriptors_are_borrowed_for_one_operation_only() -> None:
    fake = FakeSystem()
    program = fake.program(5, 0)
    with rm.borrowed(fake, program.identity, [9, 30, 77]) as controls:
        assert sorted(controls) == [9, 30]  # 77 is closed
        assert len(fake.open) == 3
        fake.kill(5)
        assert controls[9].class_of(program.client, program.client) == rm.CLASS_ROOT  # the borrowed file keeps it alive
    assert not fake.open


def test_a_recycled_pid_is_not_the_process() -> None:
    fake = FakeSystem()
    program = fake.program(5, 0)
    with (
        pytest.raises(ProcessLookupError),
        rm.borrowed(fake, Process(5, program.start + 1), [9]),
    ):
        raise AssertionError("borrowed from another process")
    assert not fake.open


def test_only_files_of_the_control_device_are_borrowed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A program may give the number to any other file, between two looks as well."""
    monkeypatch.setattr(device, "CONTROL_NUMBER", os.stat("/dev/null").st_rdev)
    ours = tmp_path / "file"
    ours.touch()
    with ExitStack() as stack:
        right, wrong, plain = (
            stack.enter_context(open(path, "rb")).fileno() for path in ("/dev/null", "/dev/zero", ours)
        )
        nothing = os.open("/dev/null", os.O_PATH)
        stack.callback(os.close, nothing)
        system = linux.LinuxSystem()
        stack.callback(system.end)
        for _ in range(2):  # the first time, the program is found out
            before = os.listdir("/proc/self/fd")
            with rm.borrowed(system, identify(os.getpid()), [right, wrong, plain, nothing]) as controls:
                assert list(controls) == [right]
        assert os.listdir("/proc/self/fd") == before
