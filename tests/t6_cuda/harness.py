"""Programs in C under libggroup-cuda.so, on the double of libcuda.so.1 in fake/, with a daemon that grants all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import queue
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

import attrs
import pytest

from backend.cuda.page import CounterPage
from backend.door.wire import CUDA, SIZE, Feature, Message, Op

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
CUDA_INCLUDE = Path(os.environ.get("CUDA_INCLUDE", "/usr/local/cuda/include"))
SECONDS = 120.0
"""Seconds after which anything counts as hung, even on a machine that is busy with other things."""

SANITIZERS = {"": "", "thread": "libtsan.so", "address,undefined": "libasan.so"}
"""Sanitizers that the library can be built with, each with the runtime that has to be loaded before it."""

OPTIONS = {
    "TSAN_OPTIONS": "halt_on_error=1:abort_on_error=0:exitcode=66:second_deadlock_stack=1",
    "ASAN_OPTIONS": "detect_leaks=0:exitcode=66:abort_on_error=0",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
}


@functools.cache
def build(sanitize: str = "") -> Path:
    """Build the double, the library and the programs; return their directory."""
    if not (CUDA_INCLUDE / "cuda.h").exists():
        pytest.fail(f"no cuda.h in {CUDA_INCLUDE}: make cuda brings it")
    words = ["make", "-s", "-j2", "-C", str(HERE), f"SANITIZE={sanitize}", f"CUDA_INCLUDE={CUDA_INCLUDE}"]
    directory = ROOT / "build"
    directory.mkdir(exist_ok=True)
    # Two sessions of pytest may build at the same time.
    with open(directory / "cuda.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = subprocess.run(words, text=True, capture_output=True)
    assert made.returncode == 0, made.stdout + made.stderr
    return ROOT / "build" / ("cuda" + ("-" + sanitize.replace(",", "-") if sanitize else ""))


@functools.cache
def runtime(sanitize: str) -> str:
    """Return the path of a sanitizer's runtime."""
    words = ["gcc", f"-print-file-name={SANITIZERS[sanitize]}"]
    return str(Path(subprocess.check_output(words, text=True).strip()).resolve())


def preloaded(sanitize: str) -> str:
    """Return LD_PRELOAD. gcc links the runtime of a sanitizer to programs, but it has to come first."""
    ours = str(build(sanitize) / "libggroup-cuda.so")
    return f"{runtime(sanitize)}:{ours}" if sanitize else ours


def environment(sanitize: str = "", extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return a program's environment, without LD_PRELOAD."""
    return {
        **{
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("GGROUP_", "FAKE_", "CUDA_", "LD_"))
        },
        "LD_LIBRARY_PATH": str(build(sanitize) / "fake"),
        **OPTIONS,
        **(extra or {}),
    }


def command(program: str, *args: object, sanitize: str = "") -> list[str]:
    """Return a program's words. ThreadSanitizer of gcc 12 does not support addresses as random as recent kernels make
    them, and setarch itself does not start with it preloaded, so setarch comes before LD_PRELOAD is set."""
    words = ["env", f"LD_PRELOAD={preloaded(sanitize)}", str(build(sanitize) / "programs" / program), *map(str, args)]
    setarch = shutil.which("setarch")
    return [setarch, "-R", *words] if sanitize == "thread" and setarch else words


def run(program: str, *args: object, sanitize: str = "", status: int = 0, **extra: str) -> str:
    """Run a program to its end, which must have that status; return its output."""
    ran = subprocess.run(
        command(program, *args, sanitize=sanitize),
        env=environment(sanitize, extra),
        text=True,
        capture_output=True,
        timeout=SECONDS * 4,
    )
    assert ran.returncode == status, f"{program} {args}: {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout


def eventually(condition: Callable[[], bool], what: Callable[[], str]) -> float:
    """Wait until a condition holds; return the seconds that took."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < SECONDS, what()
        time.sleep(0.0005)
    return time.monotonic() - begun


@attrs.frozen
class Row:
    """A row of entries.def."""

    name: str
    kind: str
    parameters: str
    arguments: str
    since: int


def entries() -> list[Row]:
    """Return the rows of the table."""
    text = (ROOT / "backend/cuda/library/entries.def").read_text(encoding="utf-8")
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    found = re.findall(r"ENTRY\((\w+),\s*(\w+),\s*\(([^)]*)\),\s*\(([^)]*)\),\s*(\d+)\)", text)
    rows = [Row(name, kind, " ".join(p.split()), " ".join(a.split()), int(since)) for name, kind, p, a, since in found]
    assert len(rows) == len(re.findall(r"^ENTRY\(", text, re.M))
    return rows


def monitored() -> set[str]:
    """Return the names of the entry points of NVML that are caught."""
    text = (ROOT / "backend/cuda/library/nvml.def").read_text(encoding="utf-8")
    return set(re.findall(r"^NVML\((\w+),", text, re.M))


class GrantingDaemon:
    """The daemon's side of the socket: grants everything, and has a page of counters for each connection that manages a
    GPU: by others a program asks for its space, or for what it is to see."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pages: list[CounterPage] = []
        """Pages of the connections, in the order in which they came."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen()
        self._connections: list[socket.socket] = []
        self._closed = False
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        page: CounterPage | None = None
        with contextlib.suppress(OSError):
            while raw := connection.recv(SIZE):
                request = Message.decode(raw)
                if request.reply or request.seq == 0:
                    continue
                if request.op == 5 and page is None:  # MANAGE
                    page = CounterPage()
                    self.pages.append(page)
                match request.op:
                    case Op.HELLO:
                        answer = request.answer(1, 2 << 20, 2000)
                    case 4:  # LOCATE: the last byte of the double's UUID is its number
                        answer = request.answer(request.args[1] >> 56)
                    case 9:  # LIMITS
                        answer = request.answer((1 << 64) - 1, 0, 0)
                    case _:
                        answer = request.answer()
                fds = [page.descriptor] if request.op == 5 and page else []
                socket.send_fds(connection, [answer.encode()], fds)

    def counts(self, gpu: int = 0) -> tuple[int, int]:
        """Return the launches submitted and finished, over all connections."""
        all_counts = [page.counts(gpu) for page in list(self.pages)]
        return sum(c[0] for c in all_counts), sum(c[1] for c in all_counts)

    def close(self) -> None:
        """Close everything; effective once."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for connection in self._connections:
            connection.close()
        for page in self.pages:
            page.close()
        self.path.unlink(missing_ok=True)


@attrs.define
class Program:
    """A running program that waits for an answer after each of its lines."""

    process: subprocess.Popen[str]
    errors: IO[bytes]

    def hears(self, what: str) -> int:
        """Return the number in its next line, which begins with `what`."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
        assert line.startswith(what + " "), f"{line!r}, not {what}\n{self.stderr()}"
        return int(line.split()[1])

    def go(self) -> None:
        """Let it go on."""
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def stderr(self) -> str:
        """Standard error so far."""
        self.errors.seek(0)
        return self.errors.read().decode()

    def ends(self, status: int = 0) -> str:
        """Wait for its end; return its standard error."""
        assert self.process.wait(SECONDS * 4) == status, self.stderr()
        return self.stderr()


@contextlib.contextmanager
def running(
    program: str, *args: object, tmp_path: Path, sanitize: str = "", extra: Mapping[str, str] | None = None
) -> Iterator[Program]:
    """Run a program, which is killed at the end of the block if it still runs."""
    with open(tmp_path / "stderr", "w+b") as errors:
        process = subprocess.Popen(
            command(program, *args, sanitize=sanitize),
            env=environment(sanitize, extra),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        with process:
            try:
                yield Program(process, errors)
            finally:
                process.kill()


@contextlib.contextmanager
def daemon(tmp_path: Path) -> Iterator[GrantingDaemon]:
    """A daemon on a socket of its own."""
    server = GrantingDaemon(tmp_path / "socket")
    try:
        yield server
    finally:
        server.close()


MIB = 1 << 20
WHOLE = (1 << 64) - 1
"""Answer to TOTAL for a GPU that looks as large as it is."""


class SizingDaemon(GrantingDaemon):
    """A daemon with limits, which announces what it supports."""

    features: Feature = CUDA
    totals: dict[int, int]
    """Answers to TOTAL in MiB, by GPU; other GPUs are whole."""
    limits: tuple[int, int] | None = None
    """Answer to LIMITS in MiB: the lowest limit, and what is free; None without a limit."""

    def __init__(self, path: Path) -> None:
        self.totals = {}
        self.said: list[list[Op]] = []
        """Requests of each connection, but for those about spaces."""
        self.spaced: list[list[Op]] = []
        """Requests of each connection by which a program asks for its space, as all do before they ask for anything."""
        super().__init__(path)

    def _serve(self, connection: socket.socket) -> None:
        page, said = CounterPage(), list[Op]()
        self.pages.append(page)
        self.said.append(said)
        with contextlib.suppress(OSError):
            while raw := connection.recv(SIZE):
                request = Message.decode(raw)
                said.append(Op(request.op))
                if request.op == Op.SPACE and len(said) == 2:
                    self.said = [other for other in self.said if other is not said]
                    self.spaced.append(said)
                if request.seq == 0:
                    continue
                fds = [page.descriptor] if request.op == Op.MANAGE else []
                socket.send_fds(connection, [self._answer(request).encode()], fds)

    def _answer(self, request: Message) -> Message:
        match request.op:
            case Op.HELLO:
                return request.answer(1, 2 << 20, 2000, self.features)
            case Op.LOCATE:
                return request.answer(request.args[1] >> 56)
            case Op.TOTAL:
                return request.answer(self.totals[request.gpu] * MIB if request.gpu in self.totals else WHOLE)
            case Op.LIMITS if self.limits is not None:
                return request.answer(self.limits[0] * MIB, self.limits[1] * MIB, 0)
            case Op.LIMITS:
                return request.answer(WHOLE, 0, 0)
        return request.answer()


class BookingDaemon(GrantingDaemon):
    """A daemon that asks for memory, lets it back when told to, and keeps the books from messages."""

    resident = 0
    swapped = 0
    room = False
    """Whether MOVE_IN is granted."""
    reported: tuple[int, ...] = (0, 0, 0, 0, 0)
    """Arguments of the last REPORT."""

    def _serve(self, connection: socket.socket) -> None:
        page = CounterPage()
        self.pages.append(page)
        self.answers: queue.Queue[Message] = queue.Queue()
        with contextlib.suppress(OSError):
            while raw := connection.recv(SIZE):
                self._hear(connection, Message.decode(raw), page)

    def _hear(self, connection: socket.socket, heard: Message, page: CounterPage) -> None:
        if heard.reply:
            self.resident -= heard.args[0]
            self.swapped += heard.args[0]
            self.answers.put(heard)
            return
        answer = heard.answer()
        match heard.op:
            case Op.HELLO:
                answer = heard.answer(1, 2 << 20, 2000)
            case 4:  # LOCATE
                answer = heard.answer(heard.args[1] >> 56)
            case 6:  # CHARGE
                self.resident += heard.args[0]
            case 7:  # UNCHARGE
                self.resident -= heard.args[0]
                self.swapped -= heard.args[1]
            case 8 if not self.room:  # MOVE_IN
                answer = heard.refuse(errno.EAGAIN)
            case 8:
                self.resident += heard.args[0]
                self.swapped -= heard.args[0]
            case 9:  # LIMITS
                answer = heard.answer(64 << 20, 1 << 20, self.swapped)
            case Op.REPORT:
                self.reported = heard.args
        if heard.seq:
            fds = [page.descriptor] if heard.op == 5 else []
            socket.send_fds(connection, [answer.encode()], fds)

    def reclaim(self, nbytes: int, gpu: int = 0) -> int:
        """Ask the program to move so much out; return what it reports as moved."""
        self._connections[-1].send(Message(Op.RECLAIM, 77, gpu, (0, 0, 0, nbytes)).encode())
        return self.answers.get(timeout=SECONDS).check().args[0]
