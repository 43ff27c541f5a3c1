"""Scripts of ioctls, and of reads, writes and mappings of the same files: each call has an errno that the header names.

fuzz.c is for races and for the debug kernel, and never the same; these scripts can be kept, and run one process at a
time. A fresh GPU then shows that the module is sound, and so does the kernel's log, which the machine's runner reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import signal
import socket
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from backend.ledgers import abi
from tests.support.fuzzed import Target
from tests.t5_module.harness import DEVICE, NOBODY, File, errno_of, fresh_name, raw_ioctl, start_of

CALLS: tuple[tuple[int, type[ctypes.Structure]], ...] = (
    *((abi.IOC_HELLO, abi.Hello), (abi.IOC_JOIN, abi.Join), (abi.IOC_CHARGE, abi.Amount)),
    *((abi.IOC_UNCHARGE, abi.Amount), (abi.IOC_UNCHARGE_SWAP, abi.Amount), (abi.IOC_SWAP_OUT, abi.Amount)),
    *((abi.IOC_SWAP_IN, abi.Amount), (abi.IOC_USERMEM, abi.Fd), (abi.IOC_GET, abi.Books), (abi.IOC_ADD, abi.Group)),
    *((abi.IOC_FIND, abi.Group), (abi.IOC_NEXT, abi.Group), (abi.IOC_MOVE, abi.Move), (abi.IOC_REMOVE, abi.Id)),
    *((abi.IOC_SET, abi.Set), (abi.IOC_RESET_PEAK, abi.Reset), (abi.IOC_OBSERVE, abi.Amount), (abi.IOC_NOTE, abi.Note)),
    *((abi.IOC_PRESS, abi.Amount), (abi.IOC_PLAN, abi.Plan), (abi.IOC_SET_TIMESLICE, abi.Command)),
    *((abi.IOC_ATTACH_TSG, abi.Command), (abi.IOC_DETACH_TSG, abi.Command), (abi.IOC_RECLAIM, abi.Command)),
    *((abi.IOC_REGISTER, abi.Gpu), (abi.IOC_UNREGISTER, abi.Unregister), (abi.IOC_FORGET, abi.Gpu)),
    (abi.IOC_EVENTS, abi.Fd),
)
NUMBERS = [number for number, _ in CALLS]
NAMES = [f"GPU-script-{index}" for index in range(3)]
FILES = 4
TIMEOUT_MS = 10
EDGES = (
    *(1 << 12, 1 << 20, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32),
    *(abi.MAX - 1, abi.MAX, abi.MAX + 1, (1 << 64) - 1),
)
NAMED = {
    *(errno.EFAULT, errno.EINVAL, errno.ENODEV, errno.ENOTTY, errno.EPERM, errno.ENOMEM, errno.EMFILE, errno.ENOENT),
    *(errno.EEXIST, errno.EXDEV, errno.ESRCH, errno.ENOSPC, errno.EBUSY, errno.ERANGE, errno.EAGAIN, errno.ETIMEDOUT),
    *(errno.E2BIG, errno.EIO, errno.EACCES, errno.ESPIPE),
}
"""Errnos of the header; EIO, which the scripts' providers answer; and those of any file."""


class Player:
    """A process that plays a script."""

    def __init__(self) -> None:
        self.files = [os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC) for _ in range(FILES)]
        self.ids: list[int] = []

    def word(self, code: int) -> int:
        """Return the word that a byte stands for."""
        if code < 128:
            return code
        if code < 144:
            kinds = (os.getpid() | abi.KIND_PROCESS << 32, abi.KIND_SLICE << 32)  # pid and kind are one word
            return (os.getpid(), start_of(os.getpid()), 1 << 32, *kinds)[code % 5]
        return EDGES[code % len(EDGES)] if code < 176 or not self.ids else self.ids[code % len(self.ids)]

    def play(self, script: bytes) -> None:
        """Play the whole script; beyond its end there are zeros."""
        rest = iter(script)
        for head in rest:
            file = head % FILES
            match head // FILES % 8:
                case 0 | 1 | 2 | 3:
                    self.call(file, rest)
                case 4:
                    self.answer(file, next(rest, 0))
                case 5:
                    self.named(lambda file=file: os.read(self.files[file], next(rest, 0) * 16))
                case 6:
                    self.map(file, next(rest, 0))
                case 7:
                    os.close(self.files[file])
                    self.files[file] = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def call(self, file: int, rest: Iterator[int]) -> None:
        """Make an ioctl: the script selects which one, its oddity, and some of the 64-bit words of its argument."""
        number, kind = CALLS[next(rest, 0) % len(CALLS)]
        odd, argument = next(rest, 0), kind()
        raw = ctypes.create_string_buffer(ctypes.sizeof(argument) + 64)
        for name, *_ in kind._fields_:
            if name == "uuid":
                argument.uuid = NAMES[odd % len(NAMES)].encode()
            elif name == "path":
                argument.path = f"/{odd % 4}/{odd % 3}".encode()[: 2 + odd % 3]
        words = ctypes.cast(ctypes.pointer(argument), ctypes.POINTER(ctypes.c_uint64))
        begin = abi.UUID_LEN // 8 if "uuid" in dir(kind) else 0
        for _ in range(next(rest, 0) % 10):
            at, code = next(rest, 0), next(rest, 0)
            words[begin + at % max(1, min(12, ctypes.sizeof(argument) // 8 - begin))] = self.word(code)
        if hasattr(argument, "timeout_ms"):
            argument.timeout_ms = TIMEOUT_MS
        if kind is abi.Fd:
            argument.flags |= os.O_NONBLOCK  # nothing would wake a waiting call
        if kind is abi.Plan:
            targets = (abi.Target * 16)()
            argument.targets, argument.capacity = ctypes.addressof(targets), argument.capacity % 17
        ctypes.memmove(raw, ctypes.addressof(argument), ctypes.sizeof(argument))
        address = ctypes.addressof(raw)
        if odd >= 0xF0:
            number += (odd & 7) << 16  # a longer structure, whose tail is zero or not
            raw[ctypes.sizeof(argument)] = odd & 8 and 1
        elif odd >= 0xE8:
            address = self.word(odd) if odd & 1 else 0
        elif odd >= 0xE0:
            number ^= 1 << odd % 16
        code = raw_ioctl(self.files[file], number, address)
        assert not code or code in NAMED, f"ioctl {number:#x}: {errno.errorcode.get(code, code)}"
        if not code and kind in (abi.Join, abi.Group, abi.Gpu, abi.Fd) and address == ctypes.addressof(raw):
            ctypes.memmove(ctypes.addressof(argument), raw, ctypes.sizeof(argument))
            self.learn(argument)

    def learn(self, argument: Any) -> None:
        """Keep results for further tries."""
        if isinstance(argument, abi.Fd):
            os.close(self.files[-1])
            self.files[-1] = argument.fd
        else:
            self.ids += [argument.root] if isinstance(argument, abi.Gpu) else [argument.root, argument.id]

    def answer(self, file: int, how: int) -> None:
        """Read commands and answer them, rightly or wrongly."""
        try:
            raw = os.read(self.files[file], ctypes.sizeof(abi.Message))
        except OSError as error:
            self.note(error)
            raw = bytes(ctypes.sizeof(abi.Message))
        message = abi.Message.from_buffer_copy(raw.ljust(ctypes.sizeof(abi.Message), b"\0"))
        message.op |= abi.MESSAGE_REPLY if how & 1 else 0
        message.status = -errno.EIO if how & 2 else 0
        message.seq += how >> 6
        message.args[0] = self.word(how)
        whole = bytes(message)[: 63 if how & 4 else 64] * (2 if how & 8 else 1)
        self.named(lambda: os.write(self.files[file], whole))

    def map(self, file: int, how: int) -> None:
        """Map a page, or an invalid range, and write there."""
        protection = (mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE, mmap.PROT_EXEC | mmap.PROT_READ)[how % 3]
        offset = mmap.PAGESIZE * (how >> 6)

        def write() -> None:
            with mmap.mmap(
                self.files[file], mmap.PAGESIZE * (1 + (how >> 4 & 1)), prot=protection, offset=offset
            ) as page:
                if protection & mmap.PROT_WRITE:
                    page[:16] = bytes([how]) * 16

        self.named(write)

    def named(self, call: Callable[[], object]) -> None:
        try:
            call()
        except OSError as error:
            self.note(error)

    @staticmethod
    def note(error: OSError) -> None:
        assert error.errno in NAMED, error


def check(script: bytes) -> None:
    """Play a script in a process of root or, if the first byte is odd, in one that becomes an unprivileged user."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(60)
            player = Player()
            if script[:1] and script[0] & 1:
                os.setgroups([])
                os.setresgid(NOBODY, NOBODY, NOBODY)
                os.setresuid(NOBODY, NOBODY, NOBODY)
            player.play(script[1:])
            code = 0
        except BaseException:
            theirs.sendall(traceback.format_exc().encode()[-4000:])
        finally:
            os._exit(code)
    theirs.close()
    with ours:
        said = b"".join(iter(lambda: ours.recv(4096), b"")).decode()
    _, status = os.waitpid(pid, 0)
    assert (said, status) == ("", 0)
    with File() as file:
        for name in NAMES:
            assert errno_of(file.forget, name) in (0, errno.ENODEV)
        sound(file)


def sound(file: File) -> None:
    """Check that a fresh GPU works, and that its figures are right."""
    name = fresh_name()
    with File() as provider:
        root = provider.register(name, 1 << 20).root
        group = file.add_process(root, os.getpid())
        file.charge(12345, group)
        file.uncharge(345, group)
        assert file.books(root).current_bytes == 12000
    with contextlib.suppress(OSError):
        file.forget(name)


# Scripts


def call(number: int, odd: int = 0, *words: tuple[int, int], file: int = 0) -> bytes:
    """Return an ioctl of a script."""
    return bytes([file, NUMBERS.index(number), odd, len(words), *(byte for word in words for byte in word)])


codes = st.one_of(st.integers(0, 3), st.integers(0, 255), st.integers(176, 255))
calls = st.builds(
    lambda number, odd, words, file: call(number, odd, *words, file=file),
    st.sampled_from(NUMBERS),
    st.one_of(*[st.integers(0, 8)] * 5, st.integers(0, 255)),
    st.lists(st.tuples(st.integers(0, 11), codes), max_size=5),
    st.integers(0, FILES - 1),
)
others = st.builds(
    lambda file, verb, how: bytes([file + FILES * verb, *([how] if verb < 7 else [])]),
    st.integers(0, FILES - 1),
    st.integers(4, 7),
    st.integers(0, 255),
)
registered = call(abi.IOC_REGISTER, 0, (0, 146), (1, 1))
added = call(abi.IOC_ADD, 0, (0, 176), (1, 176), (3, 131), (4, 133))
SCRIPTS = Target(
    "ioctls",
    check,
    st.builds(
        lambda who, begin, steps: bytes([who]) + begin + b"".join(steps),
        st.sampled_from([0, 0, 1]),
        st.sampled_from([b"", registered, registered + added]),
        st.lists(st.one_of(*[calls] * 4, others), max_size=14),
    ),
    examples=25,
)


@pytest.mark.parametrize("file", SCRIPTS.kept())
def test_kept(file: Path) -> None:
    SCRIPTS.replay(file)


def test_fresh() -> None:
    SCRIPTS.fuzz()
