"""The module under test as a program sees it: ioctls, a provider whose answers a test chooses, and other processes.

Nothing runs by itself. A test serves its own provider, in its own thread, while it waits for a process that needs it
(:meth:`Provider.serve`), so it always knows what was asked and answered, and in which order. Nothing sleeps either: a
test waits with poll, on the file through which the kernel reports the event.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs

from backend.ledgers import abi

DEVICE = "/dev/ggroup"
HERE = Path(__file__).parent
PROGRAMS = HERE.parents[1] / "build/t5_module"
PATIENCE_S = 60.0
"""Seconds that anything may take on an emulated machine that checks every access."""

NOBODY = 65534
MIB = 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)
T = TypeVar("T")
S = TypeVar("S", bound=ctypes.Structure)

ANSWERS = {abi.OP_ARRIVE, abi.OP_SET_TIMESLICE, abi.OP_ATTACH_TSG, abi.OP_DETACH_TSG, abi.OP_RECLAIM, abi.OP_SET_SM_MAX}


def raw_ioctl(fd: int, number: int, address: int) -> int:
    """Call ioctl(2) unchanged; return the errno, 0 for success."""
    ctypes.set_errno(0)
    result = _libc.ioctl(ctypes.c_int(fd), ctypes.c_ulong(number), ctypes.c_void_p(address))
    return 0 if result >= 0 else ctypes.get_errno()


def ioctl(fd: int, number: int, argument: S) -> S:
    """Make one call; return the arguments as they came back."""
    code = raw_ioctl(fd, number, ctypes.addressof(argument))
    if code:
        raise OSError(code, os.strerror(code))
    return argument


def errno_of(call: Callable[..., object], *args: Any, **words: Any) -> int:
    """Return the errno that a call raises, 0 for none."""
    try:
        call(*args, **words)
    except OSError as error:
        return error.errno or 0
    return 0


def start_of(pid: int) -> int:
    """Return field 22 of /proc/PID/stat."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def readable(fd: int, seconds: float = PATIENCE_S, events: int = select.POLLIN) -> int:
    """Wait until poll reports something of a file; return that, or 0 if nothing comes in time."""
    poller = select.poll()
    poller.register(fd, events)
    found = poller.poll(seconds * 1000)
    return found[0][1] if found else 0


class File:
    """An open /dev/ggroup, with the ioctls as methods."""

    def __init__(self, flags: int = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC) -> None:
        self.fd = os.open(DEVICE, flags)

    def close(self) -> None:
        os.close(self.fd)

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # a test may have closed it already
            self.close()

    # Calls of every process, and of tenants

    def hello(self) -> abi.Hello:
        return ioctl(self.fd, abi.IOC_HELLO, abi.Hello())

    def join(self, name: str, timeout_ms: int = 0) -> int:
        return int(ioctl(self.fd, abi.IOC_JOIN, abi.Join(uuid=name.encode(), timeout_ms=timeout_ms)).id)

    def charge(self, nbytes: int, group: int = 0) -> None:
        ioctl(self.fd, abi.IOC_CHARGE, abi.Amount(id=group, nbytes=nbytes))

    def uncharge(self, nbytes: int, group: int = 0) -> None:
        ioctl(self.fd, abi.IOC_UNCHARGE, abi.Amount(id=group, nbytes=nbytes))

    def uncharge_swap(self, nbytes: int, group: int = 0) -> None:
        ioctl(self.fd, abi.IOC_UNCHARGE_SWAP, abi.Amount(id=group, nbytes=nbytes))

    def swap_out(self, nbytes: int, group: int = 0, usec: int = 0) -> None:
        ioctl(self.fd, abi.IOC_SWAP_OUT, abi.Amount(id=group, nbytes=nbytes, usec=usec))

    def swap_in(self, nbytes: int, group: int = 0, usec: int = 0) -> None:
        ioctl(self.fd, abi.IOC_SWAP_IN, abi.Amount(id=group, nbytes=nbytes, usec=usec))

    def usermem(self, group: int = 0, flags: int = os.O_NONBLOCK | os.O_CLOEXEC) -> int:
        return int(ioctl(self.fd, abi.IOC_USERMEM, abi.Fd(id=group, flags=flags)).fd)

    def books(self, group: int = 0) -> abi.Books:
        return ioctl(self.fd, abi.IOC_GET, abi.Books(id=group))

    # Calls of control

    def add_slice(self, root: int, path: str, parent: int | None = None) -> int:
        wanted = abi.Group(root=root, parent=root if parent is None else parent, kind=abi.KIND_SLICE)
        wanted.path = path.encode()
        return int(ioctl(self.fd, abi.IOC_ADD, wanted).id)

    def add_process(self, root: int, pid: int, parent: int | None = None, start: int | None = None) -> int:
        wanted = abi.Group(root=root, parent=root if parent is None else parent, kind=abi.KIND_PROCESS, pid=pid)
        wanted.start = start_of(pid) if start is None else start
        return int(ioctl(self.fd, abi.IOC_ADD, wanted).id)

    def find_slice(self, root: int, path: str) -> int:
        wanted = abi.Group(root=root, kind=abi.KIND_SLICE, path=path.encode())
        return int(ioctl(self.fd, abi.IOC_FIND, wanted).id)

    def find_process(self, root: int, pid: int, start: int | None = None) -> int:
        wanted = abi.Group(root=root, kind=abi.KIND_PROCESS, pid=pid)
        wanted.start = start_of(pid) if start is None else start
        return int(ioctl(self.fd, abi.IOC_FIND, wanted).id)

    def groups(self, root: int) -> list[abi.Group]:
        """Return every group of a GPU, by id."""
        found: list[abi.Group] = []
        last = 0
        while True:
            one = abi.Group(root=root, id=last)
            code = errno_of(ioctl, self.fd, abi.IOC_NEXT, one)
            if code == errno.ENOENT:
                return found
            if code:
                raise OSError(code, "NEXT")
            assert one.id > last
            last = one.id
            found.append(one)

    def move(self, group: int, parent: int) -> None:
        ioctl(self.fd, abi.IOC_MOVE, abi.Move(id=group, parent=parent))

    def remove(self, group: int) -> None:
        ioctl(self.fd, abi.IOC_REMOVE, abi.Id(id=group))

    def set(self, group: int, **values: int) -> None:
        mask = 0
        for name in values:
            mask |= abi.SET[name]
        ioctl(self.fd, abi.IOC_SET, abi.Set(id=group, mask=mask, **values))

    def reset_peak(self, group: int, what: int = abi.PEAK_GMEM) -> None:
        ioctl(self.fd, abi.IOC_RESET_PEAK, abi.Reset(id=group, what=what))

    def peaks(self, group: int) -> tuple[int, int, int, int]:
        """Return the peaks on the GPU and in the host, as this file knows them, and those since ever."""
        books = self.books(group)
        return books.peak, books.swap_peak, books.peak_ever, books.swap_peak_ever

    def observe(self, group: int, nbytes: int) -> None:
        ioctl(self.fd, abi.IOC_OBSERVE, abi.Amount(id=group, nbytes=nbytes))

    def note(self, group: int, event: int) -> None:
        ioctl(self.fd, abi.IOC_NOTE, abi.Note(id=group, event=event))

    def press(self, group: int, nbytes: int) -> None:
        ioctl(self.fd, abi.IOC_PRESS, abi.Amount(id=group, nbytes=nbytes))

    def plan(self, group: int, nbytes: int, capacity: int = 64) -> list[tuple[int, int, int]]:
        """Return (id, bytes, flags) of each target."""
        targets = (abi.Target * max(1, capacity))()
        wanted = abi.Plan(id=group, nbytes=nbytes, targets=ctypes.addressof(targets), capacity=capacity)
        ioctl(self.fd, abi.IOC_PLAN, wanted)
        return [(one.id, one.nbytes, one.flags) for one in targets[: wanted.count]]

    def lever(self, number: int, group: int, value: int = 0, timeout_ms: int = 0) -> int:
        """Call one of SET_TIMESLICE, ATTACH_TSG, DETACH_TSG, RECLAIM, and wait for the answer."""
        return int(ioctl(self.fd, number, abi.Command(id=group, value=value, timeout_ms=timeout_ms)).value)

    def reasons(self, group: int, off_all: int, off_gr: int = 0) -> None:
        ioctl(self.fd, abi.IOC_REASONS, abi.Reasons(id=group, off_all=off_all, off_gr=off_gr))

    def next_use(self, root: int, uses: Sequence[tuple[int, int, int]], count: int | None = None) -> None:
        """Report how soon processes use their memory again, as (id, class, reserved); or claim to report `count`."""
        found = (abi.Use * len(uses))(*(abi.Use(*use) for use in uses))
        count = len(uses) if count is None else count
        ioctl(self.fd, abi.IOC_NEXT_USE, abi.Uses(root=root, uses=ctypes.addressof(found), count=count))

    # Calls about GPUs

    def register(self, name: str, capacity: int, granule: int = 1, headroom: int = 0) -> abi.Gpu:
        wanted = abi.Gpu(uuid=name.encode(), capacity=capacity, granule=granule, headroom=headroom)
        return ioctl(self.fd, abi.IOC_REGISTER, wanted)

    def unregister(self, flags: int = 0) -> None:
        ioctl(self.fd, abi.IOC_UNREGISTER, abi.Unregister(flags=flags))

    def forget(self, name: str) -> None:
        ioctl(self.fd, abi.IOC_FORGET, abi.Gpu(uuid=name.encode()))

    def events(self, root: int, flags: int = os.O_NONBLOCK | os.O_CLOEXEC) -> int:
        return int(ioctl(self.fd, abi.IOC_EVENTS, abi.Fd(id=root, flags=flags)).fd)


@attrs.frozen
class Asked:
    """A command that a provider read."""

    op: int
    seq: int
    group: int
    pid: int
    start: int
    value: int


Answer = Callable[["Provider", Asked], "tuple[int, int] | None"]
"""Answer of a provider to a command: (status, result), or None for no answer."""


class Provider(File):
    """Serves one GPU: registers it, reads commands when a test says so, and answers them as the test chooses."""

    def __init__(self, name: str, capacity: int = 1 << 40, granule: int = 1, headroom: int = 0) -> None:
        super().__init__()
        self.name = name
        try:
            self.gpu = self.register(name, capacity, granule, headroom)
        except OSError:
            self.close()
            raise
        self.root = int(self.gpu.root)
        self.parent = self.root
        """Group in which arriving processes are put."""
        self.seen: list[Asked] = []
        """Every command that was read."""
        self.unanswered: list[Asked] = []
        """Commands that were read and are not answered yet."""
        self.answers: dict[int, Answer] = {abi.OP_ARRIVE: Provider.welcome, abi.OP_RECLAIM: Provider.give}
        """Answers by op; the other levers hold at once."""

    def welcome(self, asked: Asked) -> tuple[int, int]:
        """Make a group for a process that arrives, unless it has one."""
        code = errno_of(self.add_process, self.root, asked.pid, self.parent, asked.start)
        return 0 if code == errno.EEXIST else -code, 0

    def give(self, asked: Asked) -> tuple[int, int]:
        """Reclaim all that is asked for."""
        return -errno_of(self.swap_out, asked.value, asked.group), asked.value

    def take(self, most: int = 64) -> list[Asked]:
        """Return the commands that can be read."""
        size = ctypes.sizeof(abi.Message)
        try:
            raw = os.read(self.fd, size * most)
        except BlockingIOError:
            return []
        assert len(raw) % size == 0
        messages = [abi.Message.from_buffer_copy(raw, at) for at in range(0, len(raw), size)]
        assert all(m.op in ANSWERS and not (m.gpu or m.flags or m.status) for m in messages)
        new = [Asked(m.op, m.seq, *m.args[:4]) for m in messages]
        self.seen += new
        self.unanswered += new
        return new

    def answer(self, asked: Asked, status: int = 0, result: int = 0) -> None:
        if asked in self.unanswered:
            self.unanswered.remove(asked)
        reply = abi.Message(op=asked.op | abi.MESSAGE_REPLY, seq=asked.seq, status=status)
        reply.args[0] = result
        os.write(self.fd, bytes(reply))

    def handle(self) -> None:
        """Answer pending commands in order."""
        for asked in self.take():
            found = self.answers.get(asked.op, lambda *_: (0, 0))(self, asked)
            if found is not None:
                self.answer(asked, *found)

    def await_command(self) -> Asked:
        """Return the next command, without answering it."""
        give_up = time.monotonic() + PATIENCE_S
        while time.monotonic() < give_up:
            if new := self.take(1):
                return new[0]
            readable(self.fd, give_up - time.monotonic())
        raise AssertionError("no command came")

    def serve(self, done: int, seconds: float = PATIENCE_S) -> None:
        """Answer whatever comes until the file `done` is readable."""
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        poller.register(done, select.POLLIN)
        give_up = time.monotonic() + seconds
        while not any(fd == done for fd, _ in poller.poll(0)):
            assert time.monotonic() < give_up, "who was served did not finish"
            poller.poll(1000 * (give_up - time.monotonic()))
            self.handle()


class Events:
    """The events of one GPU, as they are read."""

    def __init__(self, file: File, root: int) -> None:
        self.fd = file.events(root)
        self.counts: dict[tuple[int, int], int] = {}
        """Counts by (group, channel)."""

    def close(self) -> None:
        os.close(self.fd)

    def read(self) -> list[tuple[int, int, int]]:
        """Return (group, channel, count) of each pending event."""
        size = ctypes.sizeof(abi.Event)
        try:
            raw = os.read(self.fd, 64 * size)
        except BlockingIOError:
            return []
        found = [abi.Event.from_buffer_copy(raw, at) for at in range(0, len(raw), size)]
        for one in found:
            self.counts[one.id, one.channel] = self.counts.get((one.id, one.channel), 0) + one.count
        return [(one.id, one.channel, one.count) for one in found]

    def until(self, condition: Callable[[], T], provider: Provider | None = None) -> T:
        """Wait for a condition that the kernel reports, and serve the provider meanwhile."""
        give_up = time.monotonic() + PATIENCE_S
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        if provider is not None:
            poller.register(provider.fd, select.POLLIN)
        while not (result := condition()):
            assert time.monotonic() < give_up, "never happened"
            poller.poll(1000 * (give_up - time.monotonic()))
            self.read()
            if provider is not None:
                provider.handle()
        return result


def read_pressure(fd: int) -> tuple[int, int]:
    """Return (bytes, seq) of the record that waits on a usermemfd."""
    record = abi.Pressure.from_buffer_copy(os.read(fd, ctypes.sizeof(abi.Pressure)))
    return record.nbytes, record.seq


class Remote:
    """Another process, which calls functions for a test. It is forked, so it has everything that the test module has.

    An OSError that a function raises is raised here. What a function leaves in `kept` is there for the next one.
    """

    def __init__(self, keep: Sequence[int] = (), pid: int = 0) -> None:
        """Inherit the files `keep` and no others; get the pid `pid`, if that is not 0."""
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = fork_as(pid) if pid else os.fork()
        if not self.pid:
            # Otherwise a provider would live as long as the last process that has its file.
            close_files({0, 1, 2, theirs.fileno(), *keep})
            _serve_calls(theirs)
        theirs.close()
        assert self._ours.recv(1) == b"!"
        self.pidfd = os.pidfd_open(self.pid)
        self.start = start_of(self.pid)
        self._ended = False

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is a result."""
        return self._ours.fileno()

    def begin(self, function: Callable[..., object], *args: Any) -> None:
        """Have a function called; result() returns what it returns."""
        self._ours.send(pickle.dumps((function, args)))

    def result(self) -> Any:
        assert readable(self._ours.fileno()), "the process does not answer"
        raw = self._ours.recv(1 << 20)
        assert raw, "the process is gone"
        value, error = pickle.loads(raw)
        if error is not None:
            raise error
        return value

    def do(self, function: Callable[..., T], *args: Any, provider: Provider | None = None) -> T:
        """Have a function called and wait for it, with a provider served meanwhile."""
        self.begin(function, *args)
        if provider is not None:
            provider.serve(self._ours.fileno())
        value: T = self.result()
        return value

    def errno(self, function: Callable[..., object], *args: Any, provider: Provider | None = None) -> int:
        return errno_of(self.do, function, *args, provider=provider)

    def signal(self, number: int) -> None:
        signal.pidfd_send_signal(self.pidfd, number)

    def end(self) -> None:
        """Kill it, and wait until the kernel has seen it exit."""
        if self._ended:
            return
        self._ended = True
        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)
        os.close(self.pidfd)
        self._ours.close()


kept: dict[str, Any] = {}
"""State that the functions of a :class:`Remote` keep between calls."""


def _serve_calls(end: socket.socket) -> None:
    code = 1
    try:
        kept.clear()
        end.send(b"!")  # it has closed everything that is not its own
        while raw := end.recv(1 << 20):
            function, args = pickle.loads(raw)
            try:
                reply: tuple[Any, BaseException | None] = (function(*args), None)
            except Exception as error:
                reply = (None, error)
            end.send(pickle.dumps(reply))
        code = 0
    finally:
        os._exit(code)


# Functions for a Remote


def there_open() -> None:
    """Open the device for further calls."""
    kept["file"] = File()


def there_become(uid: int) -> None:
    """Give up root for good."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def there_join(name: str, timeout_ms: int = 0) -> int:
    """Open the device and join; return the id of its group."""
    kept["file"] = File()
    return there_file().join(name, timeout_ms)


def there_file() -> File:
    file: File = kept["file"]
    return file


def there_call(method: str, *args: Any, **words: Any) -> Any:
    """Call a method of the open file. Structures come back as dictionaries, since they cannot be pickled."""
    found = getattr(there_file(), method)(*args, **words)
    return as_dict(found) if isinstance(found, ctypes.Structure) else found


def as_dict(structure: ctypes.Structure) -> dict[str, Any]:
    return {name: getattr(structure, name) for name, *_ in structure._fields_}


_names = itertools.count()


def fresh_name() -> str:
    """Return a UUID that no other test has."""
    return f"GPU-test-{next(_names)}-{uuid.uuid4().hex[:16]}"


class Asker(threading.Thread):
    """Makes a call that waits in the kernel, in a thread of this process."""

    def __init__(self, call: Callable[..., object], *args: Any) -> None:
        super().__init__(daemon=True)
        self._call, self._args = call, args
        self._told, self._tell = os.pipe()
        self.code = -1
        """Errno of the call, 0 for success; -1 until then."""
        self.value: Any = None
        self.took_s = 0.0
        self.start()

    def run(self) -> None:
        begun = time.monotonic()
        try:
            self.value = self._call(*self._args)
            self.code = 0
        except OSError as error:
            self.code = error.errno or 0
        self.took_s = time.monotonic() - begun
        os.write(self._tell, b"!")

    def fileno(self) -> int:
        """Return a descriptor that is readable once the call has returned."""
        return self._told

    def waits(self) -> Asker:
        """Wait until it waits in the kernel, in an ioctl of the module."""
        give_up = time.monotonic() + PATIENCE_S
        while not self._in_ioctl():
            assert self.is_alive(), f"it came back with {self.code}"
            assert time.monotonic() < give_up, "it never asked"
            os.sched_yield()
        return self

    def _in_ioctl(self) -> bool:
        if self.native_id is None:
            return False
        try:
            words = Path(f"/proc/self/task/{self.native_id}/syscall").read_text().split()
        except OSError:
            return False
        return len(words) > 2 and int(words[2], 16) >> 8 & 0xFF == abi.IOC_MAGIC and int(words[2], 16) >> 30 != 0

    def outcome(self, provider: Provider | None = None) -> int:
        """Wait for the call; return its errno."""
        if provider is not None:
            provider.serve(self._told)
        self.join(PATIENCE_S)
        assert not self.is_alive(), "the call does not come back"
        os.close(self._told)
        os.close(self._tell)
        return self.code


@contextlib.contextmanager
def lowered(path: Path, value: str) -> Iterator[None]:
    """Change a kernel parameter meanwhile."""
    before = path.read_text()
    path.write_text(value)
    try:
        yield
    finally:
        path.write_text(before)


def close_files(but: set[int]) -> None:
    """Close all files of this process except some."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in but:
            with contextlib.suppress(OSError):  # the descriptor that listed them
                os.close(int(name))


class _CloneArgs(ctypes.Structure):
    """struct clone_args of linux/sched.h."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            *("flags", "pidfd", "child_tid", "parent_tid", "exit_signal", "stack", "stack_size", "tls"),
            *("set_tid", "set_tid_size", "cgroup"),
        )
    )


def fork_as(pid: int) -> int:
    """Fork a process with a given free pid; return as fork() does."""
    wanted = ctypes.c_int32(pid)
    arguments = _CloneArgs(exit_signal=signal.SIGCHLD, set_tid=ctypes.addressof(wanted), set_tid_size=1)
    found = int(_libc.syscall(435, ctypes.byref(arguments), ctypes.sizeof(arguments)))  # clone3, on every architecture
    if found < 0:
        raise OSError(ctypes.get_errno(), "clone3")
    return found


def unshare(flags: int) -> None:
    if _libc.unshare(flags):
        raise OSError(ctypes.get_errno(), "unshare")


def there_unshare(flags: int) -> None:
    unshare(flags)


def there_fork(function: Callable[..., object], *args: Any) -> Any:
    """Call a function in a child; return or raise what it did."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            try:
                reply: tuple[Any, BaseException | None] = (function(*args), None)
            except Exception as error:
                reply = (None, error)
            os.write(theirs, pickle.dumps(reply))
            code = 0
        finally:
            os._exit(code)
    os.close(theirs)
    with os.fdopen(ours, "rb") as end:
        raw = end.read()
    os.waitpid(pid, 0)
    value, error = pickle.loads(raw)
    if error is not None:
        raise error
    return value


# The page of counters, mapped in ways that no library would

PROT_READ, PROT_WRITE, PROT_EXEC = 1, 2, 4
MAP_SHARED, MAP_PRIVATE = 1, 2
MADV_DOFORK = 11
PAGE = os.sysconf("SC_PAGESIZE")

_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_long,
)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_page(
    fd: int, length: int = PAGE, prot: int = PROT_READ | PROT_WRITE, flags: int = MAP_SHARED, offset: int = 0
) -> int:
    """Call mmap(2); return the address."""
    address = _libc.mmap(None, length, prot, flags, fd, offset)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")
    return int(address)


def protect(address: int, prot: int) -> None:
    if _libc.mprotect(address, PAGE, prot):
        raise OSError(ctypes.get_errno(), "mprotect")


def unmap(address: int) -> None:
    if _libc.munmap(address, PAGE):
        raise OSError(ctypes.get_errno(), "munmap")


def advise(address: int, advice: int) -> None:
    if _libc.madvise(address, PAGE, advice):
        raise OSError(ctypes.get_errno(), "madvise")


def is_mapped(address: int) -> bool:
    """Return whether anything is mapped there in this process."""
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(low, 16) <= address < int(high, 16) for low, high in ranges)


def program(name: str) -> Path:
    """Return one of the C programs, compiled if necessary: make does so before the virtual machine boots."""
    path = PROGRAMS / name
    subprocess.run(["make", "-s", "-C", HERE, f"OUT={PROGRAMS}", path], check=True)
    return path


def run_program(name: str, *words: str, seconds: float = 60.0) -> dict[str, Any]:
    """Run a program; return its figures. A failure shows its complaint, and if it hangs, what each task waits for."""
    with subprocess.Popen([program(name), *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            said, complained = child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired as error:
            # Read no further: descendants of the program may hold its end of the pipes for as long as it hangs.
            heard = b"".join((error.stderr or b"", error.stdout or b"")).decode(errors="replace")
            raise AssertionError(f"{name} did not end in {seconds:g} s: {heard}\n{tasks()}") from None
        finally:
            child.kill()
    assert child.returncode == 0, f"{name} exited with {child.returncode}: {complained}{said}"
    found: dict[str, Any] = json.loads(said)
    return found


def tasks() -> str:
    """Return a line for every task on the machine that is not the kernel's own: its name, its state and, for root,
    where in the kernel it is."""
    lines = []
    for task in sorted(Path("/proc").glob("[0-9]*/task/[0-9]*"), key=lambda path: int(path.name)):
        try:
            fields = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
            if "VmSize" not in fields and "Z" not in fields["State"]:
                continue
            keys = ("Name", "Tgid", "PPid", "Uid", "State", "SigPnd", "ShdPnd")
            words = [" ".join(fields[key].split()) for key in keys]
            stack = [line.split()[-1] for line in (task / "stack").read_text().splitlines()]
        except OSError:
            continue
        lines.append(" ".join([task.name, *words, *stack]))
    return "\n".join(lines)
