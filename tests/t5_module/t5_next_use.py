"""GGROUP_IOC_NEXT_USE as a program calls it: refusals, rights, and the effect on plans."""

from __future__ import annotations

import ctypes
import errno
import time
from collections.abc import Iterator

import pytest

from backend.ledgers import abi
from tests.t5_module.harness import (
    MIB,
    NOBODY,
    File,
    Provider,
    Remote,
    errno_of,
    fresh_name,
    ioctl,
    start_of,
    there_become,
    there_call,
    there_open,
)


@pytest.fixture
def gpu() -> Iterator[Provider]:
    """A GPU of its own for a test."""
    with Provider(fresh_name(), capacity=64 * MIB) as provider:
        yield provider
        provider.unregister(abi.UNREGISTER_FORGET)


@pytest.fixture
def pair() -> Iterator[tuple[Remote, Remote]]:
    """Two other processes."""
    found = Remote(), Remote()
    yield found
    for one in found:
        one.end()


def test_plans_go_by_it_and_refusals_change_nothing(gpu: Provider, pair: tuple[Remote, Remote]) -> None:
    small, large = (gpu.add_process(gpu.root, one.pid) for one in pair)
    slice_ = gpu.add_slice(gpu.root, "/next")
    gpu.charge(10, small)
    gpu.charge(30, large)
    by_size, by_use = [(large, 15, 0)], [(small, 10, 0), (large, 5, 0)]
    assert gpu.plan(gpu.root, 15) == by_size
    for wrong in (
        *((small, abi.NEXT_USE_MOST + 1, 0), (small, 1 << 31, 0), (small, 1, 1)),
        *((slice_, 0, 0), (gpu.root, 0, 0)),
    ):
        assert errno_of(gpu.next_use, gpu.root, [(small, 4, 0), wrong]) == errno.EINVAL
        assert gpu.plan(gpu.root, 15) == by_size
    for root in (slice_, small):
        assert errno_of(gpu.next_use, root, [(small, 4, 0)]) == errno.EINVAL
    assert errno_of(gpu.next_use, 1 << 60, [(small, 4, 0)]) == errno.ENODEV
    many = [(small, 4, 0)] * (abi.USES_MOST + 1)
    assert errno_of(gpu.next_use, gpu.root, many) == errno.EINVAL
    assert errno_of(ioctl, gpu.fd, abi.IOC_NEXT_USE, abi.Uses(root=gpu.root, uses=8, count=1)) == errno.EFAULT
    assert errno_of(ioctl, gpu.fd, abi.IOC_NEXT_USE, abi.Uses(root=gpu.root, reserved=1)) == errno.EINVAL
    assert gpu.plan(gpu.root, 15) == by_size
    gpu.next_use(gpu.root, [])
    gpu.next_use(gpu.root, many[1:])
    assert gpu.plan(gpu.root, 15) == by_use
    gpu.next_use(gpu.root, [(1 << 60, 3, 0), (small, 2, 0), (large, 2, 0)])
    assert gpu.plan(gpu.root, 15) == by_size, "of one class, what is gone left out"
    gpu.next_use(gpu.root, [(large, 0, 0)])
    assert gpu.plan(gpu.root, 15) == by_use


def test_another_gpus_process_is_refused(gpu: Provider, pair: tuple[Remote, Remote]) -> None:
    group = gpu.add_process(gpu.root, pair[0].pid)
    with Provider(fresh_name()) as other:
        assert errno_of(other.next_use, other.root, [(group, 1, 0)]) == errno.EINVAL
        other.unregister(abi.UNREGISTER_FORGET)


def test_only_root_may(gpu: Provider, pair: tuple[Remote, Remote]) -> None:
    """Neither the process itself nor the owner of the slice above may, since others would give in its place."""
    slice_ = gpu.add_slice(gpu.root, "/mine")
    gpu.set(slice_, uid=NOBODY, gid=NOBODY)
    tenant = pair[0]
    group = gpu.add_process(gpu.root, tenant.pid, slice_, start_of(tenant.pid))
    tenant.do(there_become, NOBODY)
    tenant.do(there_open)
    for root in (gpu.root, slice_, group, 0):
        assert tenant.do(errno_there, root, group) == errno.EPERM


def errno_there(root: int, group: int) -> int:
    """Return the errno of the call in another process."""
    return errno_of(there_call, "next_use", root, [(group, 0, 0)])


def test_it_may_grow(gpu: Provider, pair: tuple[Remote, Remote]) -> None:
    """A longer structure with a zero tail is accepted."""
    group = gpu.add_process(gpu.root, pair[0].pid)
    use = abi.Use(id=group, next=1)
    raw = bytes(abi.Uses(root=gpu.root, uses=ctypes.addressof(use), count=1))
    with File() as file:
        for tail, code in ((bytes(8), 0), (bytes(7) + b"\1", errno.E2BIG)):
            longer = ctypes.create_string_buffer(raw + tail, len(raw) + len(tail))
            number = abi.IOC_NEXT_USE & ~(0x3FFF << 16) | len(longer) << 16
            kind = type("Longer", (ctypes.Structure,), {"_fields_": (("raw", ctypes.c_char * len(longer)),)})
            assert errno_of(ioctl, file.fd, number, kind.from_buffer(longer)) == code


def test_a_process_that_moves_keeps_it_and_one_that_comes_again_does_not(
    gpu: Provider, pair: tuple[Remote, Remote]
) -> None:
    small, large = (gpu.add_process(gpu.root, one.pid) for one in pair)
    slice_ = gpu.add_slice(gpu.root, "/there")
    gpu.charge(10, small)
    gpu.charge(30, large)
    gpu.next_use(gpu.root, [(small, 4, 0)])
    gpu.move(small, slice_)
    assert gpu.plan(gpu.root, 15) == [(small, 10, 0), (large, 5, 0)]
    gpu.remove(small)
    again = gpu.add_process(gpu.root, pair[0].pid, slice_)
    gpu.charge(10, again)
    gpu.next_use(gpu.root, [(small, 4, 0)])
    assert gpu.plan(gpu.root, 15) == [(large, 15, 0)]


def test_it_is_forgotten(gpu: Provider, pair: tuple[Remote, Remote]) -> None:
    """The daemon that reported it may be gone."""
    small, large = (gpu.add_process(gpu.root, one.pid) for one in pair)
    gpu.charge(10, small)
    gpu.charge(30, large)
    gpu.next_use(gpu.root, [(small, 4, 0)])
    time.sleep(abi.NEXT_USE_S - 10)
    assert gpu.plan(gpu.root, 15) == [(small, 10, 0), (large, 5, 0)]
    time.sleep(11)
    assert gpu.plan(gpu.root, 15) == [(large, 15, 0)]
