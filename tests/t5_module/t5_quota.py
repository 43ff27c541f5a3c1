"""Bounds of what one user can take of shared resources: groups, depth, and figures that programs report themselves."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from backend.ledgers import abi
from tests.t5_module.harness import (
    MIB,
    Asked,
    Events,
    File,
    Provider,
    Remote,
    errno_of,
    fresh_name,
    lowered,
    raw_ioctl,
    there_become,
    there_call,
    there_join,
)

OWNER, OTHER = 61000, 61001
PARAMETERS = Path("/sys/module/ggroup/parameters")


@pytest.fixture
def gpu() -> Iterator[Provider]:
    with Provider(fresh_name(), capacity=64 * MIB) as provider:
        yield provider
        provider.unregister(abi.UNREGISTER_FORGET)


@contextlib.contextmanager
def tenant(gpu: Provider) -> Iterator[tuple[Remote, int]]:
    """A program of another user that joined, and its group."""
    remote = Remote()
    try:
        remote.do(there_become, OWNER)
        yield remote, remote.do(there_join, gpu.name, provider=gpu)
    finally:
        remote.end()


def given(gpu: Provider, path: str, uid: int) -> int:
    """Make a slice of root's below which a user is in control."""
    slice_ = gpu.add_slice(gpu.root, path)
    gpu.set(slice_, uid=uid)
    return slice_


def fill(gpu: Provider, parent: int, prefix: str, most: int) -> tuple[int, int]:
    """Make up to `most` slices; return how many were granted, and the errno of the refusal."""
    wanted = abi.Group(root=gpu.root, parent=parent, kind=abi.KIND_SLICE)
    address = ctypes.addressof(wanted)
    for made in range(most):
        wanted.path = f"{prefix}/{made}".encode()
        if code := raw_ioctl(gpu.fd, abi.IOC_ADD, address):
            return made, code
    return most, 0


def descend(gpu: Provider, parent: int, path: str, levels: int) -> tuple[int, int, int]:
    """Make slices one below another; return the lowest, how many there are, and the errno of the refusal."""
    for made in range(levels):
        path += "/d"
        code = errno_of(gpu.add_slice, gpu.root, path, parent)
        if code:
            return parent, made, code
        parent = gpu.find_slice(gpu.root, path)
    return parent, levels, 0


def test_the_slices_of_a_user_are_bounded(gpu: Provider) -> None:
    mine, others = given(gpu, "/mine", OWNER), given(gpu, "/others", OTHER)
    below = gpu.add_slice(gpu.root, "/mine/below", mine)
    assert fill(gpu, mine, "/mine", abi.MAX_SLICES_PER_USER) == (abi.MAX_SLICES_PER_USER - 1, errno.EAGAIN)
    # At any place that is the user's.
    assert errno_of(gpu.add_slice, gpu.root, "/mine/below/one", below) == errno.EAGAIN
    again = given(gpu, "/again", OWNER)
    assert errno_of(gpu.add_slice, gpu.root, "/again/one", again) == errno.EAGAIN
    # Not another user's, nor a process's, and least of all root's.
    assert fill(gpu, others, "/others", 3) == (3, 0)
    assert fill(gpu, gpu.root, "", 3) == (3, 0)
    with tenant(gpu):
        pass
    # One that goes makes room for one; one that is moved or given away does not.
    gpu.remove(gpu.find_slice(gpu.root, "/mine/7"))
    assert fill(gpu, again, "/again", 2) == (1, errno.EAGAIN)
    moved = gpu.find_slice(gpu.root, "/mine/8")
    gpu.move(moved, others)
    gpu.set(moved, uid=OTHER)
    assert errno_of(gpu.add_slice, gpu.root, "/again/two", again) == errno.EAGAIN
    gpu.remove(moved)
    assert fill(gpu, again, "/again/and", 2) == (1, errno.EAGAIN)


def test_what_root_has_the_books_of_is_not_bounded_by_a_user(gpu: Provider) -> None:
    """A slice that was given back to root, or to no user, is root's."""
    mine = given(gpu, "/mine", OWNER)
    taken = gpu.add_slice(gpu.root, "/mine/taken", mine)
    gpu.set(taken, uid=0)
    assert fill(gpu, taken, "/mine/taken", abi.MAX_SLICES_PER_USER + 1) == (abi.MAX_SLICES_PER_USER + 1, 0)


def test_the_processes_of_a_user_are_bounded(gpu: Provider) -> None:
    def another(uid: int) -> int:
        remote = Remote()
        stack.callback(remote.end)
        remote.do(there_become, uid)
        return remote.errno(there_join, gpu.name, provider=gpu)

    with lowered(PARAMETERS / "processes_per_user", "2"), contextlib.ExitStack() as stack:
        assert [another(OWNER) for _ in range(3)] == [0, 0, errno.EAGAIN]
        assert [another(OTHER) for _ in range(3)] == [0, 0, errno.EAGAIN]
        with contextlib.ExitStack() as roots:
            for _ in range(3):  # root's are not bounded
                remote = Remote()
                roots.callback(remote.end)
                remote.do(there_join, gpu.name, provider=gpu)
        # One that goes makes room for one.
        dead = next(one.id for one in gpu.groups(gpu.root) if one.kind == abi.KIND_PROCESS)
        gpu.remove(dead)
        assert [another(OWNER) for _ in range(2)] == [0, errno.EAGAIN]


def test_depth_is_bounded(gpu: Provider) -> None:
    mine = given(gpu, "/mine", OWNER)
    lowest, made, code = descend(gpu, mine, "/mine", abi.MAX_DEPTH)
    assert (1 + made, code) == (abi.MAX_DEPTH, errno.EAGAIN)
    lowest_of_root, made, code = descend(gpu, gpu.root, "", abi.MAX_DEPTH_ROOT + 1)
    assert (made, code) == (abi.MAX_DEPTH_ROOT, errno.EAGAIN)
    # Nor by moving it there, with what is below it.
    one = gpu.add_slice(gpu.root, "/one")
    gpu.add_slice(gpu.root, "/one/two", one)
    above = gpu.books(lowest).parent
    above_of_root = gpu.books(lowest_of_root).parent
    for parent in (above, lowest, above_of_root, lowest_of_root):
        assert errno_of(gpu.move, one, parent) == errno.EAGAIN
    gpu.move(one, gpu.books(above).parent)
    gpu.move(one, gpu.books(above_of_root).parent)
    assert errno_of(gpu.add_slice, gpu.root, "/one/two/three", gpu.find_slice(gpu.root, "/one/two")) == errno.EAGAIN
    gpu.move(one, gpu.root)
    gpu.add_slice(gpu.root, "/one/two/three", gpu.find_slice(gpu.root, "/one/two"))
    # A process is as deep as its slice.
    gpu.parent = lowest
    with tenant(gpu) as (remote, group):
        assert gpu.books(group).parent == lowest
        gpu.move(group, lowest_of_root)
        remote.do(there_call, "charge", MIB)
        assert gpu.books(gpu.root).current_bytes == MIB


def test_what_a_program_says_that_it_moved_is_bounded(gpu: Provider) -> None:
    """Its figures are added at every level above, so they may be at most what was possible since its start."""
    gpu.parent = gpu.add_slice(gpu.root, "/a")
    before = time.monotonic()
    with tenant(gpu) as (remote, group):
        for call in ("swap_out", "swap_in"):
            assert remote.errno(there_call, call, 0, 0, abi.MAX) == errno.EINVAL
        remote.do(there_call, "charge", MIB)
        for _ in range(3):
            remote.do(there_call, "swap_out", MIB, 0, 2**64 - 1)
            remote.do(there_call, "swap_in", MIB, 0, 2**64 - 1)
        lived = time.monotonic() - before
        for id_ in (group, gpu.parent, gpu.root):
            books = gpu.books(id_)
            assert 0 < books.move_usec <= lived * 1e6
            assert (books.swapouts, books.swapins) == (3, 3)
            assert (books.swapout_bytes, books.swapin_bytes) == (3 * MIB, 3 * MIB)
        # 2^40 bytes per second of the memory that it claims to have.
        remote.do(there_call, "uncharge", MIB)
        gpu.set(gpu.parent, high=abi.MAX)
        remote.do(there_call, "charge", abi.OVERCOMMIT * 60 * MIB)
        remote.do(swap_for_ever, abi.OVERCOMMIT * 60 * MIB)
        lived = time.monotonic() - before
        for id_ in (group, gpu.parent, gpu.root):
            books = gpu.books(id_)
            assert books.swapout_bytes + books.swapin_bytes <= lived * 1e9 * 1024
            assert books.swapouts == 3 + 1000


def swap_for_ever(nbytes: int) -> None:
    """Report a thousand times that all memory was moved out, and uncharge it there."""
    for _ in range(1000):
        there_call("swap_out", nbytes)
        there_call("uncharge_swap", nbytes)
        there_call("charge", nbytes)


def test_a_reclaim_that_brings_nothing_ends(gpu: Provider) -> None:
    """A program that falsely reports moves is asked again, but not for ever."""
    gpu.parent = gpu.add_slice(gpu.root, "/a")

    def lie(_: Provider, asked: Asked) -> tuple[int, int]:
        return 0, asked.value

    gpu.answers[abi.OP_RECLAIM] = lie
    with File() as file, tenant(gpu) as (remote, group):
        events = Events(file, gpu.root)
        gpu.set(gpu.parent, high=MIB)
        remote.do(there_call, "charge", 2 * MIB)
        events.until(lambda: file.books(gpu.parent).events_fail, gpu)
        asked = [one for one in gpu.seen if one.op == abi.OP_RECLAIM]
        assert 1 < len(asked) <= 32
        assert file.books(group).current_bytes == 2 * MIB
        events.close()


@pytest.mark.parametrize("result", [abi.MAX + 1, 2**64 - 1])
def test_an_answer_that_cannot_be_is_none(gpu: Provider, result: int) -> None:
    gpu.answers[abi.OP_RECLAIM] = lambda *_: (0, result)
    with File() as file, tenant(gpu) as (_, group):
        asker = Remote()
        try:
            code = asker.errno(reclaim_there, group, provider=gpu)
        finally:
            asker.end()
        assert code == errno.EINVAL
        assert file.books(group).current_bytes == 0


def reclaim_there(group: int) -> int:
    with File() as file:
        return file.lever(abi.IOC_RECLAIM, group, MIB)
