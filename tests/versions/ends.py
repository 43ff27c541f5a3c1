"""Both ends of the socket, each of any revision: the library's, compiled from its sources, and the daemon's door."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

HERE = Path(__file__).parent
CUDA_INCLUDE = Path(os.environ.get("CUDA_INCLUDE", "/usr/local/cuda/include"))
PARTS = ("daemon", "memory", "move", "count", "driver")


def compile_library(tree: Path, out: Path) -> Path:
    """Compile the library's end of one revision, with its tests/t6_cuda/socket/daemon_main.c around it."""
    library = tree / "backend" / "cuda" / "library"
    if not library.exists():  # its place in 0.1
        library = tree / "backend" / "cuda"
    names = ("daemon", "session", "listener", "contact", "command", "link", "family", "sight", "space")
    files = [library / "daemon" / f"{name}.c" for name in names]
    sources = [file for file in files if file.exists()]  # some are new since 0.1
    includes = [f"-I{place}" for place in (CUDA_INCLUDE, library, *(library / part for part in PARTS))]
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-O1", "-g", "-pthread", *includes]
    main = tree / "tests" / "t6_cuda" / "socket" / "daemon_main.c"
    subprocess.run(["gcc", *flags, main, *sources, "-o", out], check=True)
    return out


class End:
    """A program that answers each line with a line."""

    def __init__(self, words: list[str], environment: dict[str, str]) -> None:
        pipe = subprocess.PIPE
        self.popen = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, env={**os.environ, **environment})

    def ask(self, *words: object) -> str:
        """Send a line and return the answer."""
        self.say(" ".join(map(str, words)))
        return self.listen()

    def say(self, line: str) -> None:
        """Send a line without waiting for the answer."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(line + "\n")
        self.popen.stdin.flush()

    def listen(self) -> str:
        """The next line of the program. EOFError if it has ended."""
        assert self.popen.stdout is not None
        if not (line := self.popen.stdout.readline()):
            raise EOFError(f"{self.popen.args!r} has ended")
        return line.rstrip("\n")

    def end(self) -> None:
        """Kill the program."""
        self.popen.kill()
        self.popen.wait()
        for stream in (self.popen.stdin, self.popen.stdout):
            assert isinstance(stream, IO) or stream is not None
            stream.close()


@contextlib.contextmanager
def library(binary: Path, socket: Path) -> Iterator[End]:
    """Run a program with the library's end, whose environment names the socket."""
    end = End([os.fspath(binary)], {"GGROUP_SOCKET": os.fspath(socket), "GGROUP_CUDA_LOG": "1"})
    try:
        yield end
    finally:
        end.end()


class Door(End):
    """The door of a daemon of one revision."""

    def __init__(self, tree: Path, socket: Path) -> None:
        socket.unlink(missing_ok=True)
        super().__init__(
            [sys.executable, os.fspath(HERE / "door.py"), os.fspath(socket)], {"PYTHONPATH": os.fspath(tree)}
        )
        assert json.loads(self.listen()) == "ready"

    def read(self, file: str) -> str:
        """The content of a file in the daemon's tree."""
        return str(json.loads(self.ask("read", file)))

    def write(self, file: str, text: str) -> None:
        """Write a text to a file in the daemon's tree."""
        assert json.loads(self.ask("write", file, text)) == "written"


@contextlib.contextmanager
def door(tree: Path, socket: Path) -> Iterator[Door]:
    """Run a daemon's door until the end of the `with` block."""
    end = Door(tree, socket)
    try:
        yield end
    finally:
        end.end()
