"""Hazards between programs, one test for each: forks, deaths, hangs, lies, pids that are reused."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from backend.core.settings import REASONS
from backend.ledgers import abi
from tests.t5_module import harness
from tests.t5_module.harness import (
    MIB,
    NOBODY,
    Asked,
    Asker,
    Events,
    File,
    Provider,
    Remote,
    errno_of,
    fresh_name,
    ioctl,
    kept,
    raw_ioctl,
    read_pressure,
    readable,
    start_of,
    there_become,
    there_call,
    there_file,
    there_fork,
    there_join,
    there_open,
    there_unshare,
)

CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
PARAMETERS = Path("/sys/module/ggroup/parameters")
TRACING = Path("/sys/kernel/tracing")
OWNER, OTHER = 61000, 61001

Spawn = Callable[..., Remote]


def check_sums(admin: File, root: int) -> None:
    """Check that every group holds what those below it do."""
    groups = {one.id: one for one in admin.groups(root)}
    books = {id_: admin.books(id_) for id_ in groups}
    for id_, one in groups.items():
        below = [books[child] for child in groups if books[child].parent == id_]
        if one.kind != abi.KIND_PROCESS:
            assert books[id_].current_bytes == sum(child.current_bytes for child in below), one.path
            assert books[id_].swap == sum(child.swap for child in below), one.path


def open_files() -> list[str]:
    """Return the files of the module that this process has open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor that lists them
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(path for path in found if "ggroup" in path)


@pytest.fixture(autouse=True)
def nothing_is_left_open() -> Iterator[None]:
    before = open_files()
    yield
    assert open_files() == before


@pytest.fixture
def admin() -> Iterator[File]:
    with File() as file:
        yield file


@pytest.fixture
def gpu(admin: File) -> Iterator[Provider]:
    """A GPU of its own for a test; its sums are checked at the end."""
    with Provider(fresh_name()) as provider:
        yield provider
        with contextlib.suppress(OSError):
            provider.close()
    if errno_of(check_sums, admin, provider.root) not in (0, errno.ENODEV):
        check_sums(admin, provider.root)
    assert errno_of(admin.forget, provider.name) in (0, errno.ENODEV), "somebody still provides the GPU"


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """A function that makes other processes; they are ended after the test."""
    others: list[Remote] = []

    def start(**words: Any) -> Remote:
        others.append(Remote(**words))
        return others[-1]

    yield start
    for other in others:
        other.end()


def tenant_of(gpu: Provider, spawn: Spawn) -> tuple[Remote, int]:
    """Return a process that joined, and its group."""
    tenant = spawn()
    return tenant, tenant.do(there_join, gpu.name, provider=gpu)


def group_of(gpu: Provider, spawn: Spawn) -> tuple[Remote, int]:
    """Return a process with a group that did not join."""
    process = spawn()
    return process, gpu.add_process(gpu.root, process.pid)


def gone(admin: File, group: int) -> int:
    """Return a file that hangs up when the group is gone."""
    return admin.usermem(group)


def wait_until_gone(fd: int) -> None:
    assert readable(fd) & select.POLLHUP
    os.close(fd)


# Rights of a tenant


def own_calls() -> dict[str, int]:
    """Return the errno of everything that a tenant may do with the file that joined."""
    file = there_file()
    calls: dict[str, Callable[[], object]] = {
        "charge": lambda: file.charge(3),
        "uncharge": lambda: file.uncharge(1),
        "swap_out": lambda: file.swap_out(2),
        "swap_in": lambda: file.swap_in(1),
        "uncharge_swap": lambda: file.uncharge_swap(1),
        "get": lambda: file.books(),
        "usermem": lambda: os.close(file.usermem()),
        "mmap": lambda: harness.unmap(harness.map_page(file.fd)),
    }
    return {name: errno_of(call) for name, call in calls.items()}


def map_and_fork() -> tuple[bool, dict[str, int], bool]:
    """Return whether the page is mapped in a child, what the child can do, and whether it is still mapped here."""
    address = harness.map_page(there_file().fd)
    assert errno_of(harness.advise, address, harness.MADV_DOFORK) == errno.EINVAL
    mapped, errors = there_fork(lambda: (harness.is_mapped(address), own_calls()))
    return mapped, errors, harness.is_mapped(address)


def test_fork_after_join(gpu: Provider, spawn: Spawn, admin: File) -> None:
    tenant, group = tenant_of(gpu, spawn)
    tenant.do(there_call, "charge", 3)
    mapped, errors, stays = tenant.do(map_and_fork)
    assert not mapped
    assert stays
    assert set(errors.values()) == {errno.EPERM}, errors
    assert admin.books(group).current_bytes == 3
    assert set(tenant.do(own_calls).values()) == {0}


EXECED = """
import fcntl, os, struct, sys
fcntl.ioctl(int(sys.argv[1]), int(sys.argv[2]), struct.pack("QQQ", 0, 5, 0))
os.write(int(sys.argv[3]), b"!")
os.read(int(sys.argv[4]), 1)
"""


def exec_charging(told: int, hold: int) -> None:
    words = [str(word) for word in (there_file().fd, abi.IOC_CHARGE, told, hold)]
    for fd in (there_file().fd, told, hold):
        os.set_inheritable(fd, True)
    os.execv("/usr/bin/python3", ["python3", "-I", "-S", "-c", EXECED, *words])


def test_exec_after_join(gpu: Provider, spawn: Spawn, admin: File) -> None:
    told, tell = os.pipe()
    hold, release = os.pipe()
    tenant = spawn(keep=(tell, hold))
    group = tenant.do(there_join, gpu.name, provider=gpu)
    tenant.begin(exec_charging, tell, hold)
    assert readable(told)
    books = admin.books(group)
    assert (books.current_bytes, books.flags & (abi.BOOKS_DEAD | abi.BOOKS_JOINED)) == (5, abi.BOOKS_JOINED)
    for fd in (told, tell, hold, release):
        os.close(fd)


def send_file(end: int) -> None:
    with socket.socket(fileno=os.dup(end)) as to:
        socket.send_fds(to, [b"!"], [there_file().fd])


def receive_file(end: int) -> dict[str, int]:
    with socket.socket(fileno=os.dup(end)) as sender:
        kept["file"] = File()
        os.dup2(socket.recv_fds(sender, 1, 1)[1][0], there_file().fd)
    return own_calls()


def test_a_file_passed_over_a_unix_socket(gpu: Provider, spawn: Spawn, admin: File) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        tenant, thief = spawn(keep=(ours.fileno(),)), spawn(keep=(theirs.fileno(),))
        thief.do(there_become, NOBODY)
        group = tenant.do(there_join, gpu.name, provider=gpu)
        tenant.do(send_file, ours.fileno())
        assert set(thief.do(receive_file, theirs.fileno()).values()) == {errno.EPERM}
        assert thief.errno(there_call, "charge", 1, group) == errno.EPERM
    assert admin.books(group).current_bytes == 0


def join_in_a_thread(name: str) -> tuple[int, dict[str, int]]:
    kept["file"] = File()
    ids: list[int] = []
    thread = threading.Thread(target=lambda: ids.append(there_file().join(name)))
    thread.start()
    thread.join()
    return ids[0], own_calls()


def test_join_by_a_thread(gpu: Provider, spawn: Spawn) -> None:
    tenant = spawn()
    group, errors = tenant.do(join_in_a_thread, gpu.name, provider=gpu)
    assert set(errors.values()) == {0}, errors
    assert (gpu.seen[0].pid, gpu.seen[0].start) == (tenant.pid, tenant.start)
    assert gpu.find_process(gpu.root, tenant.pid) == group


def test_join_twice(gpu: Provider, spawn: Spawn, admin: File) -> None:
    tenant, group = tenant_of(gpu, spawn)
    assert tenant.errno(there_call, "join", gpu.name) == errno.EBUSY
    assert tenant.do(there_join, gpu.name) == group  # with another file, and no provider is asked
    assert errno_of(gpu.join, gpu.name) == errno.EBUSY  # a file that provides
    assert tenant.errno(there_join, fresh_name()) == errno.ENODEV
    assert tenant.do(there_fork, refused_register, gpu.name) == errno.EBUSY


def test_join_of_who_has_a_group_already(gpu: Provider, spawn: Spawn, admin: File) -> None:
    """An administrator made the group before the process came: the provider hears of the process all the same, once."""
    process, group = group_of(gpu, spawn)
    assert process.do(there_join, gpu.name, provider=gpu) == group
    assert [(one.op, one.pid, one.start) for one in gpu.seen] == [(abi.OP_ARRIVE, process.pid, process.start)]
    assert process.do(there_join_beside, gpu.name) == group  # the first file is still open
    gpu.answers[abi.OP_ARRIVE] = lambda *_: (-errno.EUSERS, 0)
    other, refused = group_of(gpu, spawn)
    assert other.errno(there_join, gpu.name, provider=gpu) == errno.EUSERS
    assert not admin.books(refused).flags & abi.BOOKS_JOINED
    gpu.unregister()
    assert other.errno(there_join, gpu.name) == errno.ENODEV


def there_join_beside(name: str) -> int:
    """Join with another file, which is closed again."""
    with File() as file:
        return file.join(name)


def refused_register(name: str) -> int:
    """Return the errnos of REGISTER, of another GPU and of a served one, by a bound file and an unbound one."""
    assert errno_of(there_file().register, fresh_name(), 1) in (0, errno.EBUSY)
    with File() as file:
        return errno_of(file.register, name, 1)


# Deaths


def charge_for_ever() -> None:
    file = there_file()
    for nbytes in itertools.cycle((7, 100, 3)):
        file.charge(nbytes)
        file.swap_out(2)
        file.uncharge(1)


def test_tenant_killed_in_the_middle_of_charges(gpu: Provider, spawn: Spawn, admin: File) -> None:
    gpu.parent = gpu.add_slice(gpu.root, "/a", gpu.add_slice(gpu.root, "/top"))
    events = Events(admin, gpu.root)
    charged = 0
    for looks in range(8):
        tenant, group = tenant_of(gpu, spawn)
        tenant.begin(charge_for_ever)
        while admin.books(group).swapouts < 1:
            os.sched_yield()
        for _ in range(3 * looks):
            admin.books(gpu.root)
        tenant.end()
        assert events.until(lambda group=group: admin.books(group).flags & abi.BOOKS_DEAD)  # type: ignore[misc]
        check_sums(admin, gpu.root)
        charged += admin.books(group).current_bytes
        admin.remove(group)
    assert charged > 0
    books = admin.books(gpu.root)
    assert (books.current_bytes, books.swap, len(admin.groups(gpu.root))) == (0, 0, 3)
    events.close()


def test_exit_with_a_provider(gpu: Provider, spawn: Spawn, admin: File) -> None:
    process, group = group_of(gpu, spawn)
    admin.charge(9, group)
    events = Events(admin, gpu.root)
    process.end()
    events.until(lambda: (group, abi.CHANNEL_EXIT) in events.counts)
    assert events.counts == {(group, abi.CHANNEL_EXIT): 1}
    books = admin.books(group)
    assert (books.flags, books.current_bytes) == (abi.BOOKS_ONLINE | abi.BOOKS_DEAD, 9)
    assert errno_of(admin.lever, abi.IOC_DETACH_TSG, group) == errno.ESRCH
    assert admin.books(gpu.root).current_bytes == 9
    admin.remove(group)
    assert admin.books(gpu.root).current_bytes == 0
    events.close()


def test_exit_without_a_provider(gpu: Provider, spawn: Spawn, admin: File) -> None:
    process, group = group_of(gpu, spawn)
    admin.charge(9, group)
    gpu.unregister()
    last = gone(admin, group)
    process.end()
    wait_until_gone(last)
    assert errno_of(admin.books, group) == errno.ENODEV
    assert admin.books(gpu.root).current_bytes == 0


def test_who_is_dead_goes_when_the_provider_does(gpu: Provider, spawn: Spawn, admin: File) -> None:
    (process, group), (_, other) = group_of(gpu, spawn), group_of(gpu, spawn)
    admin.charge(9, group)
    admin.charge(4, other)
    events = Events(admin, gpu.root)
    process.end()
    events.until(lambda: (group, abi.CHANNEL_EXIT) in events.counts)
    gpu.close()
    assert errno_of(admin.books, group) == errno.ENODEV
    assert admin.books(other).current_bytes == 4
    assert admin.books(gpu.root).current_bytes == 4
    events.close()


def test_a_pid_that_was_somebody_elses(gpu: Provider, spawn: Spawn, admin: File) -> None:
    tenant, group = tenant_of(gpu, spawn)
    tenant.do(there_call, "charge", 7)
    events = Events(admin, gpu.root)
    pid, start = tenant.pid, tenant.start
    tenant.end()
    events.until(lambda: (group, abi.CHANNEL_EXIT) in events.counts)
    heir = spawn(pid=pid)
    assert heir.pid == pid
    assert errno_of(admin.find_process, gpu.root, pid, start) == errno.ENODEV
    assert errno_of(admin.find_process, gpu.root, pid) == errno.ENODEV
    mine = heir.do(there_join, gpu.name, provider=gpu)
    assert mine != group
    assert (admin.books(mine).current_bytes, admin.books(group).current_bytes) == (0, 7)
    assert not admin.books(mine).flags & abi.BOOKS_DEAD
    if heir.start != start:
        assert errno_of(admin.find_process, gpu.root, pid, start) == errno.ENODEV
    assert admin.find_process(gpu.root, pid) == mine
    events.close()


def test_add_of_who_does_not_live(gpu: Provider, spawn: Spawn) -> None:
    process = spawn()
    for start in (process.start - 1, process.start + 1, 0):
        assert errno_of(gpu.add_process, gpu.root, process.pid, gpu.root, start) == errno.ESRCH
    process.end()
    assert errno_of(gpu.add_process, gpu.root, process.pid, gpu.root, process.start) == errno.ESRCH


# Providers


def there_provide(name: str) -> int:
    kept["provider"] = Provider(name)
    return int(kept["provider"].root)


def there_take() -> Asked:
    provider: Provider = kept["provider"]
    return provider.await_command()


def there_answer(asked: Asked) -> None:
    provider: Provider = kept["provider"]
    provider.answer(asked)


def there_handle() -> list[int]:
    """Answer one command, whatever it is; return all ops so far."""
    provider: Provider = kept["provider"]
    provider.answer(provider.await_command())
    return [asked.op for asked in provider.seen]


@pytest.fixture
def served(admin: File, spawn: Spawn) -> Iterator[tuple[str, Remote, int, int]]:
    """A GPU that another process provides: its name, that process, the root, and the group of a process."""
    name = fresh_name()
    other = spawn()
    root = other.do(there_provide, name)
    yield name, other, root, admin.add_process(root, spawn().pid)
    other.end()
    admin.forget(name)


def test_provider_killed_in_the_middle_of_a_command(
    served: tuple[str, Remote, int, int], admin: File, spawn: Spawn
) -> None:
    name, other, _, group = served
    held = Asker(admin.lever, abi.IOC_SET_TIMESLICE, group, 500)
    other.do(there_handle)
    assert held.outcome() == 0
    asker = Asker(admin.lever, abi.IOC_DETACH_TSG, group, 0, 60_000)
    assert other.do(there_take).op == abi.OP_DETACH_TSG
    other.end()
    assert asker.outcome() == errno.ENODEV
    assert asker.took_s < 30
    books = admin.books(group)
    assert (books.flags, books.lever_timeslice_us) == (abi.BOOKS_DOUBTFUL, 500)
    assert errno_of(admin.lever, abi.IOC_DETACH_TSG, group) == errno.ENODEV
    with Provider(name) as gpu:
        assert gpu.gpu.flags == abi.GPU_INHERITED
        replayed = gpu.take()
        assert {(one.op, one.value) for one in replayed} == {(abi.OP_SET_TIMESLICE, 500), (abi.OP_ATTACH_TSG, 0)}
        assert admin.books(group).flags == abi.BOOKS_ONLINE | abi.BOOKS_DOUBTFUL
        for one in replayed:
            gpu.answer(one)
        assert admin.books(group).flags == abi.BOOKS_ONLINE


def test_daemon_killed_while_a_process_is_frozen(
    served: tuple[str, Remote, int, int], admin: File, spawn: Spawn
) -> None:
    name, other, _, group = served
    asker = Asker(admin.lever, abi.IOC_DETACH_TSG, group)
    other.do(there_handle)
    assert asker.outcome() == 0
    other.end()
    assert admin.books(group).flags == abi.BOOKS_DETACHED
    with Provider(name) as gpu:
        assert admin.books(group).flags == abi.BOOKS_ONLINE | abi.BOOKS_DETACHED
        (replayed,) = gpu.take()
        assert (replayed.op, replayed.group) == (abi.OP_DETACH_TSG, group)
        gpu.answer(replayed)
        assert admin.books(group).flags == abi.BOOKS_ONLINE | abi.BOOKS_DETACHED
        gpu.unregister(abi.UNREGISTER_RELEASED)
        assert admin.books(group).flags == 0
    with Provider(name) as gpu:  # nothing holds, but the request still stands
        assert [one.op for one in gpu.take()] == [abi.OP_DETACH_TSG]


def test_engines_of_a_detach(served: tuple[str, Remote, int, int], admin: File) -> None:
    """GR alone and all engines are two states of one lever, which outlive the provider; other engines do not exist."""
    name, other, _, group = served
    other.end()
    gr = abi.BOOKS_DETACHED | abi.BOOKS_DETACHED_GR
    with Provider(name) as gpu:
        for engines, held in ((abi.ENGINES_GR, gr), (abi.ENGINES_ALL, abi.BOOKS_DETACHED), (abi.ENGINES_GR, gr)):
            asker = Asker(admin.lever, abi.IOC_DETACH_TSG, group, engines)
            command = gpu.await_command()
            assert (command.op, command.group, command.value) == (abi.OP_DETACH_TSG, group, engines)
            gpu.answer(command)
            assert asker.outcome() == 0
            assert admin.books(group).flags == abi.BOOKS_ONLINE | held
            admin.lever(abi.IOC_DETACH_TSG, group, engines)  # holds already
            assert gpu.take() == []
        for engines in (2, 3, abi.MAX, 2**64 - 1):
            assert errno_of(admin.lever, abi.IOC_DETACH_TSG, group, engines) == errno.EINVAL
        assert errno_of(admin.lever, abi.IOC_ATTACH_TSG, group, 1) == errno.EINVAL
    assert admin.books(group).flags == gr
    with Provider(name) as gpu:
        (replayed,) = gpu.take()
        assert (replayed.op, replayed.group, replayed.value) == (abi.OP_DETACH_TSG, group, abi.ENGINES_GR)
        gpu.answer(replayed)
        asker = Asker(admin.lever, abi.IOC_ATTACH_TSG, group)
        gpu.answer(gpu.await_command())
        assert asker.outcome() == 0
        assert admin.books(group).flags == abi.BOOKS_ONLINE


def there_reasons(group: int) -> None:
    there_file().reasons(group, abi.REASON_GANG)


def test_reasons(gpu: Provider, spawn: Spawn, admin: File) -> None:
    """A call sets all reasons; a refused call changes nothing; no lever moves; the listener hears of others' calls."""
    _, group = group_of(gpu, spawn)
    slice_ = gpu.add_slice(gpu.root, "/reasons")
    stream = gpu.events(gpu.root)

    def off() -> tuple[int, int]:
        books = admin.books(group)
        return books.off_all, books.off_gr

    assert off() == (0, 0)
    for masks in ((abi.REASON_FREEZE, abi.REASON_TURN), (0, abi.REASON_TURN), (REASONS, 0), (0, REASONS)):
        gpu.reasons(group, *masks)
        assert off() == masks
        for wrong in ((1, 1), (REASONS, REASONS), (REASONS + 1, 0), (0, REASONS + 1), (1 << 31, 0)):
            assert errno_of(gpu.reasons, group, *wrong) == errno.EINVAL
        for other in (slice_, gpu.root):
            assert errno_of(gpu.reasons, other, 1) == errno.EINVAL
        assert off() == masks
    assert gpu.take() == []
    assert admin.books(group).flags == abi.BOOKS_ONLINE
    gpu.reasons(group, 0)
    assert off() == (0, 0)
    assert errno_of(gpu.reasons, 1 << 60, 1) == errno.ENODEV
    with pytest.raises(BlockingIOError):  # the provider knows what it has set
        os.read(stream, ctypes.sizeof(abi.Event))
    stranger = spawn()
    stranger.do(there_open)
    stranger.do(there_reasons, group)
    assert off() == (abi.REASON_GANG, 0)
    event = abi.Event.from_buffer_copy(os.read(stream, ctypes.sizeof(abi.Event)))
    assert (event.id, event.channel, event.count) == (group, abi.CHANNEL_SET, 1)
    os.close(stream)


def test_provider_that_never_answers(gpu: Provider, spawn: Spawn, admin: File) -> None:
    _, group = group_of(gpu, spawn)
    asker = Asker(admin.lever, abi.IOC_DETACH_TSG, group, 0, 300)
    assert asker.outcome() == errno.ETIMEDOUT
    assert 0.28 <= asker.took_s < 5
    assert gpu.take() == []  # no caller wants it any more, so no provider is told
    assert admin.books(group).flags == abi.BOOKS_ONLINE
    tenant = spawn()
    assert tenant.errno(there_join, gpu.name, 100) == errno.ETIMEDOUT


def test_an_answer_after_the_timeout_counts(gpu: Provider, spawn: Spawn, admin: File) -> None:
    _, group = group_of(gpu, spawn)
    asker = Asker(admin.lever, abi.IOC_DETACH_TSG, group, 0, 400)
    late = gpu.await_command()
    assert asker.outcome() == errno.ETIMEDOUT
    gpu.answer(late)
    assert admin.books(group).flags == abi.BOOKS_ONLINE | abi.BOOKS_DETACHED
    admin.lever(abi.IOC_DETACH_TSG, group)  # holds already
    assert gpu.take() == []


def test_what_a_provider_refuses(gpu: Provider, spawn: Spawn, admin: File) -> None:
    _, group = group_of(gpu, spawn)
    asker = Asker(admin.lever, abi.IOC_DETACH_TSG, group)
    gpu.answer(gpu.await_command(), -errno.EIO)
    assert asker.outcome() == errno.EIO
    assert admin.books(group).flags == abi.BOOKS_ONLINE | abi.BOOKS_DOUBTFUL
    gpu.answers[abi.OP_ARRIVE] = lambda *_: (-errno.EUSERS, 0)
    assert spawn().errno(there_join, gpu.name, provider=gpu) == errno.EUSERS
    gpu.answers[abi.OP_ARRIVE] = lambda *_: (0, 0)  # it claims so, but there is no group
    assert spawn().errno(there_join, gpu.name, provider=gpu) == errno.ENODEV


def test_a_command_is_superseded_before_it_is_read(gpu: Provider, spawn: Spawn, admin: File) -> None:
    _, group = group_of(gpu, spawn)
    askers = [Asker(admin.lever, abi.IOC_SET_TIMESLICE, group, us).waits() for us in (100, 200, 300)]
    (command,) = gpu.take()
    assert (command.op, command.group, command.value) == (abi.OP_SET_TIMESLICE, group, 300)
    late = Asker(admin.lever, abi.IOC_SET_TIMESLICE, group, 400).waits()
    assert gpu.take() == []  # one after another
    gpu.answer(command)
    assert [asker.outcome() for asker in askers] == [0, 0, 0]
    assert admin.books(group).lever_timeslice_us == 300
    assert late.outcome(gpu) == 0
    assert admin.books(group).lever_timeslice_us == 400


def test_a_second_provider(gpu: Provider, admin: File) -> None:
    with File() as second:
        assert errno_of(second.register, gpu.name, 1) == errno.EBUSY
        assert errno_of(gpu.register, fresh_name(), 1) == errno.EBUSY
        assert errno_of(admin.forget, gpu.name) == errno.EBUSY
        assert errno_of(second.unregister) == errno.EINVAL
        gpu.unregister()
        assert second.register(gpu.name, 1).flags == abi.GPU_INHERITED
        assert errno_of(os.read, gpu.fd, 64) == errno.ENODEV
        assert readable(gpu.fd) & (select.POLLERR | select.POLLHUP)
        assert errno_of(gpu.unregister) == errno.EINVAL


def reply(**fields: int) -> bytes:
    message = abi.Message(**{name: value for name, value in fields.items() if name != "result"})
    return bytes(message)


def test_answers_to_nothing(gpu: Provider, spawn: Spawn, admin: File) -> None:
    _, group = group_of(gpu, spawn)
    asker = Asker(admin.lever, abi.IOC_DETACH_TSG, group)
    asked = gpu.await_command()
    right = {"op": asked.op | abi.MESSAGE_REPLY, "seq": asked.seq}
    wrong: list[dict[str, int]] = [
        {**right, "op": asked.op},
        {**right, "op": abi.OP_ATTACH_TSG | abi.MESSAGE_REPLY},
        {**right, "op": abi.OP_ARRIVE | abi.MESSAGE_REPLY},
        {**right, "op": 99 | abi.MESSAGE_REPLY},
        {**right, "seq": asked.seq + 1},
        {**right, "seq": asked.seq + 4},
        {**right, "seq": 0},
        {**right, "seq": (1 << 64) - 1},
        {**right, "status": 1},
        {**right, "status": -4096},
        {**right, "gpu": 1},
        {**right, "flags": 1},
    ]
    for fields in wrong:
        assert errno_of(os.write, gpu.fd, reply(**fields)) == errno.EINVAL, fields
    assert errno_of(os.write, gpu.fd, reply(**right)[:-1]) == errno.EINVAL
    assert errno_of(os.write, gpu.fd, b"") in (0, errno.EINVAL)
    with Provider(fresh_name()) as other:
        assert errno_of(os.write, other.fd, reply(**right)) == errno.EINVAL
        other.unregister(abi.UNREGISTER_FORGET)
    assert os.write(gpu.fd, reply(**right) * 2) == 64  # the second is an answer to nothing
    assert asker.outcome() == 0
    assert errno_of(os.write, gpu.fd, reply(**right)) == errno.EINVAL
    assert errno_of(os.write, admin.fd, reply(**right)) == errno.EINVAL
    assert errno_of(os.read, admin.fd, 64) == errno.EINVAL
    assert errno_of(os.read, gpu.fd, 63) == errno.EINVAL
    assert errno_of(os.read, gpu.fd, 64) == errno.EAGAIN


def test_two_providers(gpu: Provider, spawn: Spawn, admin: File) -> None:
    with Provider(fresh_name()) as other:
        tenant, group = tenant_of(gpu, spawn)
        there = tenant.do(there_join, other.name, provider=other)
        assert there != group
        asker = Asker(admin.lever, abi.IOC_SET_TIMESLICE, there, 77)
        assert other.await_command().group == there
        assert gpu.take() == []
        assert errno_of(admin.move, there, gpu.root) == errno.EINVAL
        assert errno_of(admin.add_slice, gpu.root, "/x", other.root) == errno.EXDEV
        other.unregister(abi.UNREGISTER_FORGET)
        assert asker.outcome() == errno.ENODEV
        assert tenant.errno(there_call, "charge", 1) == errno.ENODEV
    asker = Asker(admin.lever, abi.IOC_SET_TIMESLICE, group, 78)
    assert asker.outcome(gpu) == 0


def test_a_signal_during_a_lever(gpu: Provider, spawn: Spawn, admin: File) -> None:
    _, group = group_of(gpu, spawn)
    asker = spawn()
    asker.do(there_open)
    asker.do(there_catch)
    asker.begin(there_call, "lever", abi.IOC_DETACH_TSG, group, 0, 60_000)
    command = gpu.await_command()
    asker.signal(signal.SIGUSR1)
    assert errno_of(asker.result) == errno.EINTR
    gpu.answer(command)  # it got the command, so it may answer
    assert admin.books(group).flags == abi.BOOKS_ONLINE | abi.BOOKS_DETACHED
    asker.begin(there_join, gpu.name, 60_000)
    arrival = gpu.await_command()
    asker.signal(signal.SIGUSR1)
    assert errno_of(asker.result) == errno.EINTR
    assert errno_of(gpu.answer, arrival) == errno.EINVAL


def there_catch() -> None:
    signal.signal(signal.SIGUSR1, lambda *_: None)


def test_many_levers_at_once(gpu: Provider, spawn: Spawn, admin: File) -> None:
    groups = [group_of(gpu, spawn)[1] for _ in range(10)]
    askers: list[Asker] = []
    for number in range(200):
        group = groups[number % len(groups)]
        if number % 20 < 10:
            askers.append(Asker(admin.lever, abi.IOC_SET_TIMESLICE, group, 1000 + number))
        else:
            askers.append(Asker(admin.lever, abi.IOC_DETACH_TSG, group))
        if number % 3 == 0:
            gpu.handle()
    assert [asker.outcome(gpu) for asker in askers] == [0] * 200
    for group in groups:
        books = admin.books(group)
        assert books.flags == abi.BOOKS_ONLINE | abi.BOOKS_DETACHED
        # The value of the last caller that was not overtaken by one that called earlier and came later.
        assert books.lever_timeslice_us in range(1000, 1200)
        told = [one.value for one in gpu.seen if one.group == group and one.op == abi.OP_SET_TIMESLICE]
        assert books.lever_timeslice_us == told[-1]


# Rights


def nested_join(name: str) -> tuple[int, int, list[tuple[int, int]]]:
    """Return what a process in a pid namespace of its own sees: its pid, its group, and (pid, id) of all groups."""
    group = there_join(name)
    seen = [(one.pid, one.id) for one in there_file().groups(there_file().books(group).parent)]
    return os.getpid(), group, seen


def test_pid_namespaces(gpu: Provider, spawn: Spawn) -> None:
    outside, outer = group_of(gpu, spawn)
    tenant = spawn()
    tenant.do(there_unshare, CLONE_NEWPID)
    pid, group, seen = tenant.do(there_fork, nested_join, gpu.name, provider=gpu)
    assert pid == 1
    assert dict((id_, there) for there, id_ in seen) == {gpu.root: 0, outer: 0, group: 1}
    arrived = gpu.seen[-1]
    assert arrived.op == abi.OP_ARRIVE
    assert arrived.pid not in (1, tenant.pid, outside.pid)
    assert {one.id: one.pid for one in gpu.groups(gpu.root)}[group] == arrived.pid


def admin_calls(root: int, group: int) -> dict[str, int]:
    with File() as file:
        calls: dict[str, Callable[[], object]] = {
            "register": lambda: file.register(fresh_name(), 1),
            "forget": lambda: file.forget("GPU-nobody"),
            "events": lambda: file.events(root),
            "next": lambda: ioctl(file.fd, abi.IOC_NEXT, abi.Group(root=root)),
            "add": lambda: file.add_slice(root, "/mine"),
            "charge": lambda: file.charge(1, group),
            "observe": lambda: file.observe(group, 1),
            "reasons": lambda: file.reasons(group, 1),
            "next_use": lambda: file.next_use(root, [(group, 1, 0)]),
            "set": lambda: file.set(group, weight=1),
            "get": lambda: file.books(group),
        }
        return {name: errno_of(call) for name, call in calls.items()}


def become_root_of_a_namespace() -> int:
    unshared = os.getuid(), os.getgid()
    harness.unshare(CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {unshared[0]} 1")
    Path("/proc/self/gid_map").write_text(f"0 {unshared[1]} 1")
    return os.getuid()


def test_root_of_a_user_namespace_is_no_admin(gpu: Provider, spawn: Spawn) -> None:
    _, group = group_of(gpu, spawn)
    stranger = spawn()
    assert stranger.do(become_root_of_a_namespace) == 0
    errors = stranger.do(admin_calls, gpu.root, group)
    assert set(errors.values()) == {errno.EPERM}, errors
    assert stranger.do(there_join, gpu.name, provider=gpu) > 0


@attrs.frozen
class Scene:
    """A GPU whose /s is OWNER's, and every role that may call."""

    gpu: Provider
    slice: int
    below: int
    target: int
    roles: dict[str, Remote]


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with Provider(fresh_name()) as gpu:
        slice_ = gpu.add_slice(gpu.root, "/s")
        gpu.set(slice_, uid=OWNER, gid=OWNER)
        gpu.parent = slice_
        roles = {name: Remote() for name in ("self", "owner", "other", "admin")}
        roles["self"].do(there_become, NOBODY)
        target = roles["self"].do(there_join, gpu.name, provider=gpu)
        gpu.charge(20, target)
        gpu.swap_out(10, target)
        for name, uid in (("owner", OWNER), ("other", OTHER)):
            roles[name].do(there_become, uid)
        for name in ("owner", "other", "admin"):
            roles[name].do(there_open)
        yield Scene(gpu, slice_, gpu.add_slice(gpu.root, "/s/t", slice_), target, roles)
        for role in roles.values():
            role.end()
        gpu.unregister(abi.UNREGISTER_FORGET)


ADMIN = {"admin"}
CONTROL = ADMIN | {"owner"}
TENANT = ADMIN | {"self"}
READER = CONTROL | {"self"}

RIGHTS: dict[str, tuple[set[str], str, Callable[[Scene], tuple[Any, ...]]]] = {
    "charge": (TENANT, "charge", lambda s: (0, s.target)),
    "uncharge": (TENANT, "uncharge", lambda s: (0, s.target)),
    "uncharge_swap": (TENANT, "uncharge_swap", lambda s: (0, s.target)),
    "swap_out": (TENANT, "swap_out", lambda s: (1, s.target)),
    "swap_in": (TENANT, "swap_in", lambda s: (1, s.target)),
    "usermem": (READER, "usermem", lambda s: (s.target,)),
    "usermem of the slice": (ADMIN, "usermem", lambda s: (s.slice,)),
    "get": (READER, "books", lambda s: (s.target,)),
    "get of a slice below": (CONTROL, "books", lambda s: (s.below,)),
    "get of the slice": (ADMIN, "books", lambda s: (s.slice,)),
    "get of the root": (ADMIN, "books", lambda s: (s.gpu.root,)),
    "add below the slice": (ADMIN, "add_slice", lambda s: (s.gpu.root, fresh_path("/s/"), s.slice)),
    "add below the root": (ADMIN, "add_slice", lambda s: (s.gpu.root, fresh_path("/"), s.gpu.root)),
    "find": (CONTROL, "find_slice", lambda s: (s.gpu.root, "/s/t")),
    "find of the slice": (ADMIN, "find_slice", lambda s: (s.gpu.root, "/s")),
    "next": (ADMIN, "next", lambda s: (s.gpu.root,)),
    "move within": (ADMIN, "move", lambda s: (s.target, s.slice)),
    "move out": (ADMIN, "move", lambda s: (s.target, s.gpu.root)),
    "move back": (ADMIN, "move", lambda s: (s.target, s.slice)),
    "remove of the slice": (ADMIN, "remove", lambda s: (s.slice,)),
    "remove": (ADMIN, "remove", lambda s: (removable(s),)),
    "reset_peak": (CONTROL, "reset_peak", lambda s: (s.target,)),
    "observe": (ADMIN, "observe", lambda s: (s.target, 0)),
    "note": (ADMIN, "note", lambda s: (s.target, abi.EVENT_LOW)),
    "press": (CONTROL, "press", lambda s: (s.target, 1)),
    "plan": (CONTROL, "plan", lambda s: (s.target, 1)),
    "set_timeslice": (ADMIN, "lever", lambda s: (abi.IOC_SET_TIMESLICE, s.target, 0)),
    "attach_tsg": (ADMIN, "lever", lambda s: (abi.IOC_ATTACH_TSG, s.target)),
    "detach_tsg": (ADMIN, "lever", lambda s: (abi.IOC_DETACH_TSG, s.target)),
    "reasons": (ADMIN, "reasons", lambda s: (s.target, 0)),
    "next_use": (ADMIN, "next_use", lambda s: (s.gpu.root, [(s.target, 0, 0)])),
    "next_use of nothing": (ADMIN, "next_use", lambda s: (s.gpu.root, [])),
    "reclaim": (CONTROL, "lever", lambda s: (abi.IOC_RECLAIM, s.target, 0)),
    "reclaim of the slice": (ADMIN, "lever", lambda s: (abi.IOC_RECLAIM, s.slice, 0)),
    "register": (ADMIN, "register", lambda s: (s.gpu.name, 1)),
    "unregister": (set(), "unregister", lambda s: ()),
    "forget": (ADMIN, "forget", lambda s: (s.gpu.name,)),
    "events": (ADMIN, "events", lambda s: (s.gpu.root,)),
    "hello": ({"self", "owner", "other", "admin"}, "hello", lambda s: ()),
}
"""Calls, each with the roles that may make it. A role that may never gets EPERM; any other gets only EPERM."""

_numbers = itertools.count()


def fresh_path(above: str) -> str:
    return f"{above}{next(_numbers)}"


def removable(scene: Scene) -> int:
    return scene.gpu.add_slice(scene.gpu.root, fresh_path("/s/"), scene.slice)


def there_right(method: str, args: tuple[Any, ...]) -> int:
    """Make a call, keep nothing of its result, and return the errno."""
    file = there_file()
    if method == "next":
        return errno_of(ioctl, file.fd, abi.IOC_NEXT, abi.Group(root=args[0]))
    try:
        fd = getattr(file, method)(*args)
    except OSError as error:
        return error.errno or 0
    if method in ("usermem", "events"):
        os.close(fd)
    return 0


def test_a_stranger_does_not_learn_which_names_there_are(scene: Scene) -> None:
    calls: list[tuple[Any, ...]] = [
        ("find_slice", scene.gpu.root, "/nowhere"),
        ("find_slice", scene.gpu.root, "/s/nowhere"),
        ("find_slice", scene.target, "/s"),
        ("find_slice", 1 << 60, "/s"),
        ("find_process", scene.gpu.root, os.getpid(), start_of(os.getpid())),
        ("find_process", scene.gpu.root, (1 << 22) - 1, 1),
    ]
    for name, role in scene.roles.items():
        for call in calls:
            expected = errno.ENODEV if name in ADMIN else errno.EPERM
            assert role.errno(there_call, *call) == expected, f"{name}: {call}"


@pytest.mark.parametrize("call", RIGHTS)
def test_rights(scene: Scene, call: str) -> None:
    allowed, method, args = RIGHTS[call]
    for name, role in scene.roles.items():
        code = role.do(there_right, method, args(scene), provider=scene.gpu)
        if name in allowed:
            assert code in (0, errno.EBUSY), f"{name}: {errno.errorcode.get(code)}"
        elif method == "unregister":
            assert code == errno.EINVAL
        else:
            assert code == errno.EPERM, f"{name}: {errno.errorcode.get(code)}"


def test_what_an_owner_may_set(scene: Scene) -> None:
    owner, other = scene.roles["owner"], scene.roles["other"]
    for group in (scene.target, scene.below):
        assert owner.do(there_set, group, {"high": 1 << 30}) == 0
        assert other.do(there_set, group, {"high": 1}) == errno.EPERM
    assert owner.do(there_set, scene.slice, {"high": 1}) == errno.EPERM
    assert owner.do(there_set, scene.below, {"uid": OTHER, "gid": OTHER}) == errno.EPERM
    assert owner.do(there_set, scene.below, {"kept": 1}) == 0
    assert scene.gpu.books(scene.below).kept == 1


def test_the_next_owner_above_counts(scene: Scene) -> None:
    """A slice given on, or back to root, no longer belongs to the owner above, but does once it has no owner itself."""
    group = scene.gpu.add_slice(scene.gpu.root, fresh_path("/s/t/"), scene.below)
    owner, other = scene.roles["owner"], scene.roles["other"]
    assert scene.gpu.books(scene.below).uid == abi.NOBODY
    assert owner.do(there_set, group, {"high": 1}) == 0
    scene.gpu.set(scene.below, uid=OTHER)
    assert scene.gpu.books(scene.below).gid == abi.NOBODY
    assert (owner.do(there_set, group, {"high": 1}), other.do(there_set, group, {"high": 1})) == (errno.EPERM, 0)
    scene.gpu.set(scene.below, uid=0)
    for role in (owner, other):
        assert role.do(there_set, group, {"high": 1}) == errno.EPERM
    assert errno_of(scene.gpu.set, scene.below, uid=abi.NOBODY) == errno.ERANGE
    scene.gpu.set(scene.below, uid=OWNER)
    scene.gpu.remove(group)


def there_set(group: int, values: dict[str, int]) -> int:
    return errno_of(there_file().set, group, **values)


# usermemfd


def test_usermemfd(gpu: Provider, spawn: Spawn, admin: File) -> None:
    tenant, group = tenant_of(gpu, spawn)
    admin.press(group, 99)  # before there is a reader, and so not seen
    one, two = admin.usermem(group), admin.usermem(group)
    assert errno_of(os.read, one, 16) == errno.EAGAIN
    assert not readable(one, 0)
    for nbytes in range(1, 1001):  # there is no reader, and the writer does not wait
        admin.press(group, nbytes)
    assert readable(one, 0) == select.POLLIN
    assert errno_of(os.read, one, 15) == errno.EINVAL
    assert read_pressure(one) == (1000, 1001)
    assert errno_of(os.read, one, 16) == errno.EAGAIN
    assert not readable(one, 0)
    assert read_pressure(two) == (1000, 1001)
    books = admin.books(group)
    assert (books.pressure_bytes, books.pressure_seq) == (1000, 1001)
    assert errno_of(admin.usermem, group, os.O_APPEND) == errno.EINVAL
    assert tenant.do(there_pressure, 5, group) is None
    admin.press(group, 5)
    assert tenant.do(there_read_pressure) == (5, 1002)
    gpu.remove(group)
    for fd in (one, two):
        assert readable(fd, 0) & select.POLLHUP
        assert errno_of(os.read, fd, 16) == errno.ENODEV
        os.close(fd)
    assert errno_of(admin.press, group, 1) == errno.ENODEV


def there_pressure(_nbytes: int, group: int) -> None:
    assert there_file().books().id == group
    kept["usermem"] = there_file().usermem(flags=os.O_CLOEXEC)


def there_read_pressure() -> tuple[int, int]:
    return read_pressure(kept["usermem"])


def test_a_usermemfd_that_waits_is_woken(gpu: Provider, spawn: Spawn, admin: File) -> None:
    tenant, group = tenant_of(gpu, spawn)
    tenant.do(there_pressure, 0, group)
    tenant.begin(there_read_pressure)
    admin.press(group, 12)
    assert tenant.result() == (12, 1)
    tenant.begin(there_read_pressure)
    admin.remove(group)
    assert errno_of(tenant.result) == errno.ENODEV


# Events


def test_events_are_counted_until_they_are_read(gpu: Provider, spawn: Spawn, admin: File) -> None:
    parent = gpu.add_slice(gpu.root, "/s")
    _, group = group_of(gpu, spawn)
    gpu.move(group, parent)
    admin.note(group, abi.EVENT_HIGH)  # without a listener
    events = Events(admin, gpu.root)
    assert errno_of(admin.events, gpu.root) == errno.EBUSY
    assert errno_of(admin.events, parent) == errno.EINVAL
    assert events.read() == []
    for _ in range(5):
        admin.note(group, abi.EVENT_HIGH)
    admin.note(parent, abi.EVENT_LOW)
    admin.press(group, 1)
    assert readable(events.fd, 0) == select.POLLIN
    assert errno_of(os.read, events.fd, 15) == errno.EINVAL
    assert len(os.read(events.fd, 31)) == 16  # one at a time, in the order in which they came
    assert set(events.read()) == {
        (parent, abi.CHANNEL_GMEM, 6),
        (gpu.root, abi.CHANNEL_GMEM, 6),
        (group, abi.CHANNEL_USERMEM, 1),
    }
    assert not readable(events.fd, 0)
    admin.note(group, abi.EVENT_HIGH)
    admin.remove(group)
    assert {id_ for id_, *_ in events.read()} == {parent, gpu.root}
    events.close()
    admin.note(parent, abi.EVENT_HIGH)
    events = Events(admin, gpu.root)  # events between two listeners go to neither
    assert events.read() == []
    gpu.unregister(abi.UNREGISTER_FORGET)
    assert readable(events.fd, 0) & select.POLLHUP
    assert errno_of(os.read, events.fd, 64) == errno.ENODEV
    events.close()


def there_note(group: int, count: int) -> None:
    for _ in range(count):
        there_file().note(group, abi.EVENT_FAIL)


def test_no_event_is_lost_under_load(gpu: Provider, spawn: Spawn, admin: File) -> None:
    groups = [group_of(gpu, spawn)[1] for _ in range(2)]
    events = Events(admin, gpu.root)
    noisy = [spawn() for _ in groups]
    for other, group in zip(noisy, groups, strict=True):
        other.do(there_open)
        other.begin(there_note, group, 1500)
    total = (gpu.root, abi.CHANNEL_GMEM)
    events.until(lambda: events.counts.get(total, 0) >= 3000)
    for other in noisy:
        other.result()
    assert events.read() == []
    assert events.counts == {total: 3000, **{(group, abi.CHANNEL_GMEM): 1500 for group in groups}}
    assert admin.books(gpu.root).events_fail == 3000
    events.close()


# The page of counters


def there_map(**words: Any) -> None:
    kept["page"] = harness.map_page(there_file().fd, **words)


def there_count(submitted: int, finished: int) -> None:
    page = abi.Counters.from_address(kept["page"])
    page.submitted, page.finished = submitted, finished


def there_map_errors() -> dict[str, int]:
    fd = there_file().fd
    ways: dict[str, dict[str, int]] = {
        "two pages": {"length": 2 * harness.PAGE},
        "another page": {"offset": harness.PAGE},
        "private": {"flags": harness.MAP_PRIVATE},
        "exec": {"prot": harness.PROT_READ | harness.PROT_EXEC},
    }
    errors = {name: errno_of(harness.map_page, fd, **words) for name, words in ways.items()}
    errors["made exec"] = errno_of(harness.protect, kept["page"], harness.PROT_READ | harness.PROT_EXEC)
    return errors


def test_the_page_of_counters(gpu: Provider, spawn: Spawn, admin: File) -> None:
    tenant, group = tenant_of(gpu, spawn)
    assert (admin.books(group).submitted, admin.books(group).finished) == (0, 0)
    tenant.do(there_map)
    tenant.do(there_count, 5, 3)
    assert (admin.books(group).submitted, admin.books(group).finished) == (5, 3)
    tenant.do(there_count, 2**64 - 1, 2**63)
    assert (admin.books(group).submitted, admin.books(group).finished) == (2**64 - 1, 2**63)
    assert tenant.do(there_map_errors) == {
        "two pages": errno.EINVAL,
        "another page": errno.EINVAL,
        "private": errno.EINVAL,
        "exec": errno.EPERM,
        "made exec": errno.EACCES,
    }
    assert errno_of(harness.map_page, admin.fd) == errno.ENODEV
    gpu.remove(group)
    tenant.do(there_count, 6, 6)  # still a page, although of no group
    assert errno_of(admin.books, group) == errno.ENODEV


# Peaks


def test_a_reset_of_a_peak_is_of_one_file(gpu: Provider, spawn: Spawn, admin: File) -> None:
    """As memory.peak and memory.swap.peak since Linux 6.12: a reset by one file does not affect others."""
    _, group = group_of(gpu, spawn)
    gpu.charge(70, group)
    gpu.swap_out(50, group)
    gpu.uncharge_swap(40, group)
    with contextlib.closing(File()) as other, contextlib.closing(File()) as third:
        for id_ in (group, gpu.root):
            assert admin.peaks(id_) == other.peaks(id_) == (70, 50, 70, 50)
            admin.reset_peak(id_)
            assert admin.peaks(id_) == (20, 50, 70, 50), "of one figure"
            admin.reset_peak(id_, abi.PEAK_SWAP)
            assert admin.peaks(id_) == (20, 10, 70, 50)
            assert other.peaks(id_) == (70, 50, 70, 50)
        gpu.charge(10, group)
        gpu.swap_out(15, group)
        other.reset_peak(group)
        assert (admin.peaks(group), other.peaks(group)) == ((30, 25, 70, 50), (15, 50, 70, 50))
        third.reset_peak(group, abi.PEAK_SWAP)
        gpu.swap_in(25, group)
        assert admin.peaks(group) == (40, 25, 70, 50)
        assert other.peaks(group) == (40, 50, 70, 50)
        assert third.peaks(group) == (70, 25, 70, 50)
    assert admin.peaks(group) == (40, 25, 70, 50), "the others are closed"
    with contextlib.closing(File()) as late:
        assert late.peaks(group) == (70, 50, 70, 50)
    for what in (2, 1 << 31):
        assert errno_of(admin.reset_peak, group, what) == errno.EINVAL
    reserved = abi.Reset(id=group, reserved=1)
    assert errno_of(ioctl, admin.fd, abi.IOC_RESET_PEAK, reserved) == errno.EINVAL
    gpu.remove(group)  # while an open file has a mark
    assert errno_of(admin.reset_peak, group) == errno.ENODEV


def there_reset(group: int, files: int) -> list[int]:
    """Return the errnos of a reset by each of so many more files."""
    there_files.extend(File() for _ in range(files))
    return [errno_of(file.reset_peak, group) for file in there_files]


there_files: list[File] = []


def test_files_that_have_reset_a_peak_are_bounded(gpu: Provider, spawn: Spawn, admin: File) -> None:
    """Root's files are not, so that no user keeps root from a reset."""
    slice_ = admin.add_slice(gpu.root, "/s")
    below = admin.add_slice(gpu.root, "/s/t", slice_)
    admin.set(slice_, uid=NOBODY)
    owner = spawn()
    owner.do(there_become, NOBODY)
    assert owner.do(there_reset, below, abi.RESETS_MOST) == [0] * abi.RESETS_MOST
    assert owner.do(there_reset, below, 2) == [0] * abi.RESETS_MOST + [errno.EMFILE] * 2
    admin.reset_peak(below)
    owner.end()
    other = spawn()
    other.do(there_become, NOBODY)
    assert other.do(there_reset, below, abi.RESETS_MOST) == [0] * abi.RESETS_MOST


# Growth


@attrs.frozen
class Padded:
    """Arguments of a call, followed by `tail`, right before unmapped memory."""

    number: int
    argument: ctypes.Structure

    def call(self, fd: int, tail: bytes, less: int = 0) -> int:
        raw = bytes(self.argument) + tail
        size = len(raw) - less
        buffer = ctypes.create_string_buffer(raw, len(raw))
        number = self.number & ~(0x3FFF << 16) | size << 16
        return raw_ioctl(fd, number, ctypes.addressof(buffer))


def test_growth(gpu: Provider, spawn: Spawn, admin: File) -> None:
    _, group = group_of(gpu, spawn)
    own = abi.Group(root=gpu.root, kind=abi.KIND_PROCESS, pid=os.getpid(), start=start_of(os.getpid()))
    of_version_1 = abi.Set.gid.offset + abi.Set.gid.size
    calls = [
        Padded(abi.IOC_CHARGE, abi.Amount(id=group)),
        Padded(abi.IOC_REASONS, abi.Reasons(id=group, off_all=1)),
        Padded(abi.IOC_NEXT_USE, abi.Uses(root=gpu.root)),
        Padded(abi.IOC_PRESS, abi.Amount(id=group)),
        Padded(abi.IOC_PLAN, abi.Plan(id=group, nbytes=1)),
        Padded(abi.IOC_NEXT, abi.Group(root=gpu.root)),
        Padded(abi.IOC_FIND, abi.Group(root=gpu.root, kind=abi.KIND_SLICE, path=b"/")),
    ]
    grown = [
        (Padded(abi.IOC_GET, abi.Books(id=group)), abi.Books.swap_peak.offset),
        (Padded(abi.IOC_RESET_PEAK, abi.Reset(id=group)), abi.Reset.what.offset),
        (Padded(abi.IOC_SET, abi.Set(id=group, mask=abi.SET["weight"], weight=7)), of_version_1),
    ]
    for one, first in grown:  # version 1's size is enough, and nothing is written behind it
        size = ctypes.sizeof(one.argument)
        assert one.call(admin.fd, b"", size - first) == 0, one
        assert one.call(admin.fd, b"", size - first + 1) == errno.EINVAL, one
        assert one.call(admin.fd, bytes(4000)) == 0, one
        assert one.call(admin.fd, bytes(7) + b"\1") == errno.E2BIG, one
    for one in calls:
        assert one.call(admin.fd, bytes(8)) == 0, one
        assert one.call(admin.fd, bytes(4000)) == 0, one
        assert one.call(admin.fd, bytes(7) + b"\1") == errno.E2BIG, one
        assert one.call(admin.fd, b"\1" + bytes(4000)) == errno.E2BIG, one
        assert one.call(admin.fd, b"", 1) == errno.EINVAL, one
        assert one.call(admin.fd, b"", ctypes.sizeof(one.argument)) == errno.EINVAL, one
    assert Padded(abi.IOC_ADD, own).call(admin.fd, bytes(7) + b"\1") == errno.E2BIG
    assert errno_of(admin.find_process, gpu.root, os.getpid()) == errno.ENODEV
    assert Padded(abi.IOC_HELLO, abi.Hello()).call(admin.fd, bytes(64)) == 0
    assert raw_ioctl(admin.fd, abi.IOC_HELLO, 0) == errno.EFAULT
    for number in (abi.IOC_HELLO ^ 1 << 31, abi.IOC_CHARGE ^ 1 << 30, abi.IOC_MAGIC << 8 | 255, abi.IOC_GET ^ 1 << 8):
        assert raw_ioctl(admin.fd, number, 0) == errno.ENOTTY
    hello = admin.hello()
    assert (hello.version, hello.features, hello.reserved) == (abi.ABI_VERSION, 0x1FF, 0)


def own_amounts(own: int, tail: bytes) -> list[int]:
    """Return the errnos of charges and uncharges, with arguments of our size, or longer."""
    fd, codes = there_file().fd, []
    for id_, nbytes, usec in (
        *((0, 10, 0), (own, 10, 0), (own + 1, 10, 0), (1 << 60, 10, 0), (0, 10, 1), (own, 10, 2**63)),
        *((0, 1 << 50, 0), (0, abi.MAX, 0), (0, abi.MAX + 1, 0), (0, 2**64 - 1, 0)),
    ):
        argument = abi.Amount(id=id_, nbytes=nbytes, usec=usec)
        for number in (abi.IOC_CHARGE, abi.IOC_UNCHARGE, abi.IOC_UNCHARGE):
            codes.append(Padded(number, argument).call(fd, tail))
    for address in (0, 8, 1 << 47, 2**64 - 8):
        codes.append(raw_ioctl(fd, abi.IOC_CHARGE + (len(tail) << 16), address))
    return codes


def test_a_tenant_is_answered_the_same_whatever_the_size(gpu: Provider, spawn: Spawn, admin: File) -> None:
    """Its most frequent calls take a shortcut, except with longer arguments."""
    tenant, group = tenant_of(gpu, spawn)
    stranger = spawn()
    for other in (tenant, stranger):
        other.do(there_become, NOBODY)
    stranger.do(there_open)
    assert tenant.do(own_amounts, group, b"") == tenant.do(own_amounts, group, bytes(8))
    assert stranger.do(own_amounts, group, b"") == stranger.do(own_amounts, group, bytes(8))
    inherited = tenant.do(there_fork, own_amounts, group, b"")
    assert inherited == tenant.do(there_fork, own_amounts, group, bytes(8))
    assert 0 not in inherited
    assert admin.books(group).current_bytes == 0


def test_no_group_holds_more_than_max(admin: File, spawn: Spawn) -> None:
    """A charge that would wrap around counts as over the limit, also in the fast path."""
    with Provider(fresh_name(), capacity=abi.MAX) as gpu:
        _, group = group_of(gpu, spawn)
        admin.charge(abi.MAX, group)
        for nbytes in (1, 1 << 46, (1 << 46) + 1, abi.MAX):
            assert errno_of(admin.charge, nbytes, group) == errno.ENOMEM, nbytes
        for id_ in (group, gpu.root):
            books = admin.books(id_)
            assert (books.current_bytes, books.peak, books.events_oom) == (abi.MAX, abi.MAX, 4)
        assert errno_of(admin.charge, abi.MAX + 1, group) == errno.EINVAL
        admin.uncharge(abi.MAX, group)
        gpu.unregister(abi.UNREGISTER_FORGET)


def test_what_a_program_says_it_has_is_bounded(admin: File, spawn: Spawn) -> None:
    """On the GPU or in the host: otherwise neighbours could charge nothing until the driver's figure corrects it."""
    capacity = 64 * MIB
    with Provider(fresh_name(), capacity=capacity) as gpu:
        liar, group = tenant_of(gpu, spawn)
        other, neighbour = tenant_of(gpu, spawn)
        for nbytes in (abi.MAX, 1 << 62, 1 << 46, abi.OVERCOMMIT * capacity + 1):
            assert liar.errno(there_call, "charge", nbytes) == errno.ENOMEM, nbytes
        assert admin.books(gpu.root).current_bytes == 0
        liar.do(there_call, "charge", abi.OVERCOMMIT * capacity)
        assert liar.errno(there_call, "charge", 1) == errno.ENOMEM
        liar.do(there_call, "swap_out", admin.books(group).current_bytes)
        assert liar.errno(there_call, "charge", 1) == errno.ENOMEM
        other.do(there_call, "charge", capacity)
        assert admin.books(neighbour).current_bytes == capacity
        liar.do(there_call, "uncharge_swap", MIB)
        liar.do(there_call, "charge", MIB)
        assert liar.errno(there_call, "charge", 1) == errno.ENOMEM
        check_sums(admin, gpu.root)


# Bounds


def open_until_refused(most: int) -> tuple[int, int]:
    """Open files until refused; return their number, and the errno."""
    kept["files"] = []
    for count in range(most):
        try:
            kept["files"].append(File())
        except OSError as error:
            return count, error.errno or 0
    return most, 0


def open_after_one_was_closed(name: str) -> tuple[int, int, int]:
    kept["files"].pop().close()
    kept["files"].pop().close()
    kept["file"] = File()
    there_file().join(name)
    with_usermem = errno_of(lambda: kept.setdefault("usermem", there_file().usermem()))
    return with_usermem, errno_of(File), errno_of(there_file().usermem)


def test_what_a_user_can_have_open_is_bounded(gpu: Provider, spawn: Spawn) -> None:
    greedy, other = spawn(), spawn()
    greedy.do(there_become, 62000)
    other.do(there_become, 62001)
    with harness.lowered(PARAMETERS / "files_per_user", "5"):
        assert greedy.do(open_until_refused, 10) == (5, errno.EMFILE)
        assert other.do(open_until_refused, 3) == (3, 0)
        assert len([File().close() for _ in range(6)]) == 6  # the admin
        assert greedy.do(open_after_one_was_closed, gpu.name, provider=gpu) == (0, errno.EMFILE, errno.EMFILE)
    assert greedy.do(open_until_refused, 8) == (8, 0)


def test_gpus_are_bounded(admin: File) -> None:
    already = len(roots(admin))
    gpus: list[Provider] = []
    with contextlib.ExitStack() as stack:
        for _ in range(64 - already):
            gpus.append(stack.enter_context(Provider(fresh_name())))
        assert errno_of(Provider, fresh_name()) == errno.ENOSPC
        assert set(roots(admin)) >= {gpu.root for gpu in gpus}
        gpus[0].unregister(abi.UNREGISTER_FORGET)
        with Provider(fresh_name()) as again:
            again.unregister(abi.UNREGISTER_FORGET)
        for gpu in gpus[1:]:
            gpu.unregister(abi.UNREGISTER_FORGET)
    assert len(roots(admin)) == already


def roots(admin: File) -> list[int]:
    """Return the roots of all GPUs."""
    return [one.id for one in _next_roots(admin)]


def _next_roots(admin: File) -> Iterator[abi.Group]:
    last = 0
    while True:
        one = abi.Group(id=last)
        if errno_of(ioctl, admin.fd, abi.IOC_NEXT, one):
            return
        last = one.id
        yield one


def test_groups_are_bounded(gpu: Provider) -> None:
    wanted = abi.Group(root=gpu.root, parent=gpu.root, kind=abi.KIND_SLICE)
    address = ctypes.addressof(wanted)
    made, code = 0, 0
    while not code and made < 70_000:
        wanted.path = b"/%d" % made
        code = raw_ioctl(gpu.fd, abi.IOC_ADD, address)
        made += not code
    assert (made, code) == (65535, errno.ENOSPC)  # in addition to the root
    gpu.remove(gpu.find_slice(gpu.root, "/77"))
    gpu.add_slice(gpu.root, "/again")
    gpu.unregister(abi.UNREGISTER_FORGET)


# Reclaim by the kernel


def test_a_tenant_over_its_high_is_brought_back(gpu: Provider, spawn: Spawn, admin: File) -> None:
    tenant, group = tenant_of(gpu, spawn)
    admin.set(group, high=10 * MIB)
    events = Events(admin, gpu.root)
    tenant.do(there_call, "charge", 14 * MIB)
    events.until(lambda: admin.books(group).events_reclaim, gpu)
    books = admin.books(group)
    assert (books.current_bytes, books.swap) == (10 * MIB, 4 * MIB)
    assert (books.events_high, books.events_reclaim, books.events_low, books.events_fail) == (1, 1, 0, 0)
    assert (books.pressure_bytes, books.pressure_seq) == (4 * MIB, 1)
    assert [(one.op, one.group, one.value) for one in gpu.seen[1:]] == [(abi.OP_RECLAIM, group, 4 * MIB)]
    assert admin.books(gpu.root).events_high == 1
    events.close()


def test_reclaim_that_fails_is_counted(gpu: Provider, spawn: Spawn, admin: File) -> None:
    tenant, group = tenant_of(gpu, spawn)
    admin.set(group, high=10 * MIB)
    gpu.answers[abi.OP_RECLAIM] = lambda *_: (-errno.EIO, 0)
    events = Events(admin, gpu.root)
    tenant.do(there_call, "charge", 14 * MIB)
    events.until(lambda: admin.books(group).events_fail, gpu)
    books = admin.books(group)
    assert (books.current_bytes, books.events_high, books.events_fail, books.events_reclaim) == (14 * MIB, 1, 1, 0)
    events.close()


def test_reclaim_begins_a_headroom_below_the_limit(admin: File, spawn: Spawn) -> None:
    with Provider(fresh_name(), headroom=MIB) as gpu:
        tenant, group = tenant_of(gpu, spawn)
        admin.set(group, high=10 * MIB)
        events = Events(admin, gpu.root)
        tenant.do(there_call, "charge", 9 * MIB)
        assert gpu.take() == []
        tenant.do(there_call, "charge", MIB // 2)
        events.until(lambda: admin.books(group).events_reclaim, gpu)
        assert admin.books(group).current_bytes == 9 * MIB
        events.close()
        gpu.unregister(abi.UNREGISTER_FORGET)


def test_a_headroom_does_not_empty_a_small_group(admin: File, spawn: Spawn) -> None:
    """The headroom is at most an eighth of the group."""
    with Provider(fresh_name(), headroom=2 * MIB) as gpu:
        tenant, group = tenant_of(gpu, spawn)
        admin.set(group, high=MIB)
        events = Events(admin, gpu.root)
        tenant.do(there_call, "charge", 7 * MIB // 8)
        assert gpu.take() == []
        tenant.do(there_call, "charge", MIB // 8)
        events.until(lambda: admin.books(group).events_reclaim, gpu)
        assert admin.books(group).current_bytes == 7 * MIB // 8
        admin.set(group, high=0)  # nothing may stay on the GPU
        tenant.do(there_call, "charge", 1)
        events.until(lambda: admin.books(group).events_reclaim == 2, gpu)
        assert admin.books(group).current_bytes == 0
        events.close()
        gpu.unregister(abi.UNREGISTER_FORGET)


def test_a_full_gpu_takes_from_who_is_not_protected(admin: File, spawn: Spawn) -> None:
    with Provider(fresh_name(), capacity=20 * MIB) as gpu:
        safe, other = gpu.add_slice(gpu.root, "/safe"), gpu.add_slice(gpu.root, "/other")
        admin.set(safe, low=10 * MIB)
        gpu.parent = safe
        protected, first = tenant_of(gpu, spawn)
        gpu.parent = other
        greedy, second = tenant_of(gpu, spawn)
        events = Events(admin, gpu.root)
        protected.do(there_call, "charge", 10 * MIB)
        greedy.do(there_call, "charge", 16 * MIB)
        events.until(lambda: admin.books(gpu.root).events_reclaim, gpu)
        assert (admin.books(first).current_bytes, admin.books(second).current_bytes) == (10 * MIB, 10 * MIB)
        root = admin.books(gpu.root)
        assert (root.current_bytes, root.swap, root.events_low, root.events_high) == (20 * MIB, 6 * MIB, 0, 1)
        # Only the protected one has anything left to give: that is counted.
        admin.set(other, swap_max=6 * MIB)
        greedy.do(there_call, "charge", 3 * MIB)
        events.until(lambda: admin.books(first).events_reclaim, gpu)
        assert admin.books(first).current_bytes == 7 * MIB
        assert admin.books(first).events_low == 1
        events.close()
        gpu.unregister(abi.UNREGISTER_FORGET)


def test_reclaim_of_a_slice(gpu: Provider, spawn: Spawn, admin: File) -> None:
    gpu.parent = gpu.add_slice(gpu.root, "/s")
    (_, one), (_, two) = (tenant_of(gpu, spawn) for _ in range(2))
    admin.charge(6 * MIB, one)
    admin.charge(2 * MIB, two)
    assert admin.plan(gpu.parent, 4 * MIB) == [(one, 4 * MIB, 0)]
    asker = Asker(admin.lever, abi.IOC_RECLAIM, gpu.parent, 5 * MIB)
    assert asker.outcome(gpu) == 0
    assert asker.value == 5 * MIB
    assert admin.books(gpu.parent).current_bytes == 3 * MIB
    assert {admin.books(id_).current_bytes for id_ in (one, two)} == {3 * MIB // 2}
    # Two at once do not take the same bytes twice, and the rest cannot be had.
    askers = [Asker(admin.lever, abi.IOC_RECLAIM, gpu.parent, 100 * MIB) for _ in range(1)]
    assert [asker.outcome(gpu) for asker in askers] == [0]
    assert admin.books(gpu.parent).current_bytes == 0
    assert askers[0].value == 3 * MIB


def test_a_reclaim_goes_on_past_one_that_cannot_give(gpu: Provider, spawn: Spawn, admin: File) -> None:
    """The error is reported only if none has given."""
    gpu.parent = gpu.add_slice(gpu.root, "/s")
    (_, one), (_, two) = (tenant_of(gpu, spawn) for _ in range(2))
    admin.charge(6 * MIB, one)
    admin.charge(6 * MIB, two)
    first, last = (id_ for id_, _, _ in admin.plan(gpu.parent, 4 * MIB))
    refusing = {first}
    gpu.answers[abi.OP_RECLAIM] = lambda provider, asked: (
        (-errno.EOPNOTSUPP, 0) if asked.group in refusing else Provider.give(provider, asked)
    )
    asker = Asker(admin.lever, abi.IOC_RECLAIM, gpu.parent, 4 * MIB)
    assert (asker.outcome(gpu), asker.value) == (0, 2 * MIB)
    assert [admin.books(id_).current_bytes for id_ in (first, last)] == [6 * MIB, 4 * MIB]
    refusing.add(last)
    assert Asker(admin.lever, abi.IOC_RECLAIM, gpu.parent, 4 * MIB).outcome(gpu) == errno.EOPNOTSUPP


def protected_pair(admin: File, slice_: int, groups: Sequence[int]) -> tuple[int, int]:
    """Have two processes of a slice hold 6 MiB each, protected; return them in the order of a plan for both."""
    for group in groups:
        admin.charge(6 * MIB, group)
        admin.set(group, low=8 * MIB)
    admin.set(slice_, low=16 * MIB)
    (first, _, one), (last, _, other) = admin.plan(slice_, 4 * MIB)
    assert one == other == abi.TARGET_BELOW_LOW
    return first, last


def told(admin: File, *groups: int) -> list[tuple[int, int]]:
    """Return how often each was told to give, and was taken from although protected."""
    return [(books.pressure_seq, books.events_low) for books in map(admin.books, groups)]


def test_a_reclaim_ends_with_its_caller(gpu: Provider, spawn: Spawn, admin: File) -> None:
    """Programs after the one that it waited for are neither asked nor pressed."""
    gpu.parent = gpu.add_slice(gpu.root, "/s")
    tenants = [tenant_of(gpu, spawn) for _ in range(2)]
    first, last = protected_pair(admin, gpu.parent, [group for _, group in tenants])
    asker = spawn()
    asker.do(there_open)
    asker.do(there_catch)
    asker.begin(there_call, "lever", abi.IOC_RECLAIM, gpu.parent, 4 * MIB, 60_000)
    command = gpu.await_command()
    assert (command.op, command.group) == (abi.OP_RECLAIM, first)
    asker.signal(signal.SIGUSR1)
    assert errno_of(asker.result) == errno.EINTR
    assert gpu.take() == []
    assert told(admin, first, last) == [(1, 1), (0, 0)]
    gpu.answer(command)


def test_a_reclaim_ends_with_its_provider(served: tuple[str, Remote, int, int], admin: File, spawn: Spawn) -> None:
    _, other, root, _ = served
    slice_ = admin.add_slice(root, "/s")
    members = [spawn() for _ in range(2)]
    first, last = protected_pair(admin, slice_, [admin.add_process(root, one.pid, slice_) for one in members])
    asker = Asker(admin.lever, abi.IOC_RECLAIM, slice_, 4 * MIB, 60_000)
    assert other.do(there_take).group == first
    other.end()
    assert asker.outcome() == errno.ENODEV
    assert told(admin, first, last) == [(1, 1), (0, 0)]


def test_a_reclaim_that_was_asked_of_who_died(gpu: Provider, spawn: Spawn, admin: File) -> None:
    gpu.parent = gpu.add_slice(gpu.root, "/s")
    (doomed, one), (_, two) = (tenant_of(gpu, spawn) for _ in range(2))
    admin.charge(6 * MIB, one)
    admin.charge(6 * MIB, two)
    asker = Asker(admin.lever, abi.IOC_RECLAIM, gpu.parent, 4 * MIB)
    asked = gpu.await_command()
    events = Events(admin, gpu.root)
    victim = {one: doomed}.get(asked.group)
    if victim is not None:
        victim.end()
        events.until(lambda: admin.books(one).flags & abi.BOOKS_DEAD)
    gpu.remove(asked.group)
    assert asker.outcome(gpu) == 0
    assert asker.value == 2 * MIB
    events.close()


# Strangers that flood

STRANGERS, CHARGES, LEVERS = 4, 1000, 6
SLOWER = 4.0
"""Factor by which a call may be slower beside many programs that flood the module than beside as many that only
compute: a flood may take only its share of the processor."""
WORST_S = 5.0
"""Seconds that no call may exceed, on an emulated processor."""
TRIES = 4
"""Number of comparisons: both sides run beside whatever the host does then, which may begin between them."""


def there_flood() -> None:
    """Make all calls that a program may make, and others, as fast as possible."""
    file = there_file()
    while True:
        file.charge(3)
        file.swap_out(1)
        file.books()
        file.uncharge_swap(1)
        file.uncharge(2)
        errno_of(file.uncharge, abi.MAX)
        errno_of(file.lever, abi.IOC_RECLAIM, 0, 1)
        os.close(file.usermem())
        with File() as other:
            errno_of(other.register, "nothing", 1)


def there_spin() -> None:
    """Only compute."""
    while True:
        pass


def there_charge(count: int) -> tuple[float, float]:
    """Return the seconds of so many charges, and of the slowest."""
    file, took = there_file(), []
    for _ in range(count):
        begun = time.monotonic()
        file.charge(2)
        took.append(time.monotonic() - begun)
        file.uncharge(2)
    return sum(took), max(took)


def beside(
    what: Callable[[], None], gpu: Provider, spawn: Spawn, admin: File, victim: tuple[Remote, int]
) -> tuple[float, float]:
    """Return the seconds of charges of one program, and of levers of a daemon, while strangers do something."""
    strangers = [tenant_of(gpu, spawn)[0] for _ in range(STRANGERS)]
    for stranger in strangers:
        stranger.do(there_become, NOBODY)
        stranger.begin(what)
    tenant, group = victim
    rounds = [tenant.do(there_charge, CHARGES, provider=gpu) for _ in range(3)]
    levers = []
    for number in range(LEVERS):
        asker = Asker(admin.lever, (abi.IOC_DETACH_TSG, abi.IOC_ATTACH_TSG)[number % 2], group)
        assert asker.outcome(gpu) == 0
        levers.append(asker.took_s)
    assert max(slowest for _, slowest in rounds) < WORST_S
    assert max(levers) < WORST_S
    for stranger in strangers:
        stranger.end()
    return min(took for took, _ in rounds), sorted(levers)[LEVERS // 2]


def test_who_floods_takes_his_part_of_the_processor_and_nothing_else(gpu: Provider, spawn: Spawn, admin: File) -> None:
    """A neighbour's charges and the daemon's levers are as fast as beside programs that only compute."""
    victim = tenant_of(gpu, spawn)
    seen = []
    for _ in range(TRIES):
        quiet = beside(there_spin, gpu, spawn, admin, victim)
        flooded = beside(there_flood, gpu, spawn, admin, victim)
        seen.append((flooded, quiet))
        if holds := all(one <= SLOWER * other for one, other in zip(flooded, quiet, strict=True)):
            break
    assert holds, seen
    check_sums(admin, gpu.root)


# Files that can be polled


def test_tracepoints(gpu: Provider, spawn: Spawn, admin: File) -> None:
    if not (TRACING / "trace").exists():
        subprocess.run(["mount", "-t", "tracefs", "tracefs", TRACING], check=True)
    tenant, group = tenant_of(gpu, spawn)
    with harness.lowered(TRACING / "events/ggroup/enable", "1"), harness.lowered(TRACING / "tracing_on", "1"):
        (TRACING / "trace").write_text("")
        admin.set(group, high=4)
        tenant.do(there_call, "charge", 3)
        assert tenant.errno(there_call, "charge", abi.MAX) == errno.ENOMEM
        assert Asker(admin.lever, abi.IOC_SET_TIMESLICE, group, 55).outcome(gpu) == 0
        admin.charge(3, group)
        assert Asker(admin.lever, abi.IOC_RECLAIM, gpu.root, 2).outcome(gpu) == 0
        admin.press(group, 7)
        text = (TRACING / "trace").read_text()
    for line in (
        f"ggroup_ioctl: set id={group} status=0",
        f"ggroup_charge: id={group} nbytes=3 status=0",
        f"ggroup_charge: id={group} nbytes={abi.MAX} status=-{errno.ENOMEM}",
        f"ggroup_over_high: id={group} current=6 high=4",
        f"ggroup_tsg: id={group} set_timeslice value=55 status=0",
        f"ggroup_reclaim: id={group} nbytes=2 moved=2 status=0",
        f"ggroup_event: id={group} gmem",
        f"ggroup_event: id={group} usermem",
        f"ggroup_ioctl: press id={group} status=0",
    ):
        assert line in text, line


# The module


def rmmod() -> tuple[int, str]:
    found = subprocess.run(["rmmod", "ggroup"], capture_output=True, text=True)
    return found.returncode, found.stderr


def test_unload_while_anything_is_open(spawn: Spawn) -> None:
    """Each kind of open file by itself, and a mapping, keeps the module loaded."""
    name = fresh_name()
    with Provider(name) as gpu:
        group = gpu.add_process(gpu.root, spawn().pid)
        usermem, events = gpu.usermem(group), gpu.events(gpu.root)
        tenant = spawn()
        tenant.do(there_join, name, provider=gpu)
        tenant.do(there_map)
        code, said = rmmod()
        assert code
        assert "in use" in said
    tenant.do(there_close)
    files = {"usermem": usermem, "events": events}
    for name_, fd in files.items():
        assert rmmod()[0], name_
        os.close(fd)
    assert rmmod()[0]  # the mapping alone
    with File() as admin:
        admin.forget(name)


def there_close() -> None:
    there_file().close()
