"""Which memory of a program outlives a checkpoint of the driver: the basis for moving a program between GPUs.

    python -m tests.t7_nvidia.outlives [KIND]

Each kind is a program of its own (outlives.cu), which is suspended, restored and let run by the calls that
`backend/nvidia/checkpoint` makes. With two GPUs it is also restored on the other one. Prints a line for each: the time
of each step, and whether its data was right, or what failed.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from backend.nvidia.checkpoint.library import Library

KINDS = (
    "plain",
    "pinned",
    "registered",
    "pool",
    "reserved",
    "copied out",
    "unmapped",
    "host",
    "mapped",
    "mapped, exportable",
    "exported",
    "exported, kept by another",
    "of the other GPU",
)
"""Kinds of memory, each beside memory of cuMemAlloc. Made by cuMemCreate: mapped, or exportable; unmapped, with its
handle kept; copied out and released; exported as a descriptor and released, the descriptor being kept by the program or
by this process; in the host; on the other GPU. Only addresses: reserved."""
LOCK_MS = 5000
ANSWER_S = 30.0


class Outcome(Exception):
    """A program that did not pass."""


def answer(program: subprocess.Popen[str]) -> None:
    """Wait for its next line, which must be `ready`."""
    assert program.stdout is not None
    if not select.select([program.stdout], [], [], ANSWER_S)[0]:
        raise Outcome(f"no answer in {ANSWER_S:.0f} s")
    line = program.stdout.readline().strip()
    if line != "ready":
        raise Outcome(line or f"it ended: {program.wait()}")


def tell(program: subprocess.Popen[str], line: str) -> None:
    assert program.stdin is not None
    try:
        print(line, file=program.stdin, flush=True)
    except BrokenPipeError:
        raise Outcome(f"it ended: {program.wait()}") from None
    answer(program)


def once(binary: str, kind: str, library: Library, places: list[tuple[str, str]]) -> str:
    """Return the outcome of one program, in a line."""
    ours, theirs = socket.socketpair()
    words = [binary, kind, str(theirs.fileno())]
    program = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[theirs.fileno()]
    )
    theirs.close()
    done = []
    try:
        answer(program)
        tell(program, "prepare")
        kept = socket.recv_fds(ours, 1, 1)[1] if kind in ("exported, kept by another", "of the other GPU") else []
        steps: dict[str, Callable[[], object]] = {
            "lock": lambda: library.lock(program.pid, LOCK_MS),
            "checkpoint": lambda: library.checkpoint(program.pid),
            "restore": lambda: library.restore(program.pid, places),
            "unlock": lambda: library.unlock(program.pid),
        }
        for name, step in steps.items():
            began = time.monotonic()
            try:
                step()
            except OSError as error:
                raise Outcome(str(error)) from None
            done.append(f"{name} {(time.monotonic() - began) * 1e3:.0f} ms")
        for fd in kept:
            socket.send_fds(ours, [b"\0"], [fd])
            os.close(fd)
        tell(program, "check")
        return f"data right ({', '.join(done)})"
    except Outcome as error:
        return f"FAILED: {error} ({', '.join(done)})"
    finally:
        program.kill()
        program.communicate()
        ours.close()


def main() -> None:
    library = Library()
    library.open()
    gpus = list(library.gpus())
    with tempfile.TemporaryDirectory() as folder:
        binary = os.fspath(Path(folder) / "outlives")
        source = Path(__file__).with_name("outlives.cu")
        subprocess.run(["nvcc", "-O2", "-o", binary, source, "-lcuda"], check=True)
        for kind in sys.argv[1:] or KINDS:
            if kind != "of the other GPU":
                print(f"{kind}, here: {once(binary, kind, library, [])}", flush=True)
            if len(gpus) == 2:
                swap = [(gpus[0], gpus[1]), (gpus[1], gpus[0])]
                print(f"{kind}, on the other GPU: {once(binary, kind, library, swap)}", flush=True)


if __name__ == "__main__":
    main()
