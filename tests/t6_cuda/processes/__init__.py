"""A machine with GPUs, programs and neighbours in a file, for agents on this directory's double of libcuda.so.1."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import mmap
import os
import subprocess
import uuid
from pathlib import Path

import attrs

from backend.nvidia.checkpoint import State
from backend.nvidia.checkpoint.journal import VARIABLE as JOURNALS
from backend.nvidia.checkpoint.library import VARIABLE as LIBCUDA
from backend.process.identity import Process, is_alive, start_time
from tests.t6_cuda.harness import CUDA_INCLUDE, ROOT

HERE = Path(__file__).parent
GIB = 1 << 30
CAPACITY = 16 * GIB
CONTEXT = GIB // 2
GPUS = 4
HOLDS = 64
PROGRAMS = 4
FLAGS = ("-std=gnu11", "-D_GNU_SOURCE", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-fvisibility=hidden")


@functools.cache
def library() -> Path:
    """Build the double; return its path."""
    made = ROOT / "build" / "cuda" / "processes" / "libcuda.so.1"
    made.parent.mkdir(parents=True, exist_ok=True)
    with open(ROOT / "build" / "processes.lock", "w") as lock:  # two sessions of pytest may build at the same time
        fcntl.flock(lock, fcntl.LOCK_EX)
        new = made.with_suffix(".new")
        words = ["gcc", *FLAGS, f"-I{CUDA_INCLUDE}", "-shared", "-Wl,-soname,libcuda.so.1"]
        ran = subprocess.run([*words, str(HERE / "libcuda.c"), "-o", str(new)], text=True, capture_output=True)
        assert ran.returncode == 0, ran.stderr
        new.rename(made)
    return made


class Gpu(ctypes.Structure):
    """One GPU."""

    _fields_ = (
        ("uuid", ctypes.c_ubyte * 16),
        ("name", ctypes.c_char * 32),
        ("capacity", ctypes.c_uint64),
        ("neighbours", ctypes.c_uint64),
    )


class Program(ctypes.Structure):
    """A program that uses a GPU."""

    _fields_ = (
        ("pid", ctypes.c_int32),
        ("state", ctypes.c_int32),
        ("gpu", ctypes.c_int32),
        ("busy", ctypes.c_int32),
        ("bytes", ctypes.c_uint64),
    )


class Hold(ctypes.Structure):
    """Memory that an agent holds."""

    _fields_ = (
        ("pid", ctypes.c_int32),
        ("gpu", ctypes.c_int32),
        ("start", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
    )


class Table(ctypes.Structure):
    """struct machine of libcuda.c."""

    _fields_ = (
        ("size", ctypes.c_uint64),
        ("gpus", Gpu * GPUS),
        ("programs", Program * PROGRAMS),
        ("holds", Hold * HOLDS),
        ("logged", ctypes.c_uint64),
        ("log", ctypes.c_char * 4096),
    )


def name(gpu: int) -> str:
    """Return the UUID of a GPU in the usual form."""
    return f"GPU-{uuid.UUID(int=0x50F7990000004000800000000000 + gpu)}"


@attrs.define
class Machine:
    """The machine, as its mapped file."""

    directory: Path
    """Directory of the file, and of whatever else agents leave."""
    table: Table = attrs.field(init=False)
    """Content of the file."""

    def __attrs_post_init__(self) -> None:
        path = self.directory / "machine"
        path.write_bytes(bytes(ctypes.sizeof(Table)))
        with open(path, "r+b") as file:
            self.table = Table.from_buffer(mmap.mmap(file.fileno(), ctypes.sizeof(Table)))
        self.table.size = ctypes.sizeof(Table)
        for index in range(3):
            gpu = self.table.gpus[index]
            gpu.uuid[:] = uuid.UUID(name(index).removeprefix("GPU-")).bytes
            gpu.name = b"NVIDIA Fake" if index < 2 else b"NVIDIA Other"
            gpu.capacity = CAPACITY
        (self.directory / "spent").mkdir()
        os.mkfifo(self.directory / "hang")

    def environment(self, faults: str = "") -> dict[str, str]:
        """Return the environment of agents on this machine."""
        return {
            LIBCUDA: str(library()),
            JOURNALS: str(self.directory / "checkpoints"),
            "FAKE_MACHINE": str(self.directory / "machine"),
            "FAKE_FAULTS": faults,
            "FAKE_SPENT": str(self.directory / "spent"),
            "FAKE_HANG": str(self.directory / "hang"),
        }

    def program(self, process: Process, nbytes: int, gpu: int = 0) -> Program:
        """Put a program on a GPU."""
        program = self.table.programs[0]
        program.pid, program.gpu, program.bytes = process.pid, gpu, nbytes
        return program

    @property
    def state(self) -> State:
        """State of the program."""
        return State(self.table.programs[0].state)

    @property
    def place(self) -> str:
        """UUID of the GPU that it is, or was, on."""
        return name(self.table.programs[0].gpu)

    def held(self) -> list[tuple[int, int]]:
        """Return pid and bytes of what living processes hold."""
        return [
            (hold.pid, hold.bytes)
            for hold in self.table.holds
            if hold.pid and is_alive(Process(hold.pid, hold.start)) and start_time(hold.pid)
        ]

    def calls(self) -> list[str]:
        """Return every call that was about a program, in order."""
        return [line.removeprefix("cuCheckpointProcess") for line in bytes(self.table.log).decode().split()]
