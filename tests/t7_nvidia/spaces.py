"""Spatial slices on a real GPU, their programs, and the servers that the daemon started for them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence

import pynvml

from backend.door.tenants import default_path
from backend.process import procfs
from backend.space.space import Record, directory_for, read_records
from ggroupfs.client import Member
from ggroupfs.daemon.mount import SOCKETS
from tests.support.mounted import Mounted
from tests.t7_nvidia.conftest import wait_for
from tests.t7_nvidia.placing import SIZE
from tests.t7_nvidia.programs import Program, member, program, run_in, slice_of, write

BESIDE = 0.9
"""Least speed of a member beside the others, of that alone in its space; by turns it would be a quarter."""
SAID = (": its server ended", ": the control daemon ended, and is started again")
"""Words of what a daemon logs of servers that end."""
SMALL = ("200", "8")
"""Words of placed.cu for kernels of 8 blocks, each of which has an SM for 200 us."""


@contextlib.contextmanager
def spatial(mount: Mounted, name: str) -> Iterator[tuple[str, Member]]:
    """Yield the name that `ggroupfs run --slice` has for an empty spatial slice, and its control files.

    The context has to be left after the programs in it have ended.
    """
    with slice_of(mount, name) as (path, slice_):
        slice_.path.parent.mkdir(parents=True, exist_ok=True)
        write(slice_, "compute.spatial", 1)
        try:
            yield path, slice_
        finally:
            with contextlib.suppress(OSError):  # its daemon may have been killed
                write(slice_, "compute.spatial", 0)  # its server ends, then, and holds no memory of the GPU
                slice_.path.parent.rmdir()


@contextlib.contextmanager
def placed_in(mount: Mounted, binary: str, within: str | None, *words: str) -> Iterator[Program]:
    """Run placed.cu with the library, in a slice if one is named; it is in the tree, of the space of the slice if that
    has one, and works, on return."""
    with program(*run_in(mount, within=within), binary, "PAGE", *(words or SMALL), size=SIZE) as run:
        joined(mount, run)
        yield run


@contextlib.contextmanager
def several(mount: Mounted, binary: str, within: str | None, count: int, *words: str) -> Iterator[list[Program]]:
    """Run some of them, which are started at the same time."""
    each = [*run_in(mount, within=within), binary, "PAGE", *(words or SMALL)]
    with contextlib.ExitStack() as stack:
        runs = [stack.enter_context(program(*each, size=SIZE)) for _ in range(count)]
        for run in runs:
            joined(mount, run)
        yield runs


def joined(mount: Mounted, run: Program) -> Member:
    """Wait until a program is in the tree, and a member of its space if it was told one: it is so by the word of the
    driver, for which the daemon asks some times a second. Return it."""
    group = member(mount, run)
    if "CUDA_MPS_PIPE_DIRECTORY=" in run.log.read_text():
        wait_for(lambda: is_beside(group), "it is of its space")
    return group


def is_beside(group: Member) -> bool:
    """Return whether the daemon takes a program for a member of a space."""
    return "gpu_usec_estimate" in group.flat("gcgroup.stat")


def record_of(mount: Mounted, within: str) -> Record:
    """Return what outlives the daemon of the space of this user in a slice."""
    socket = default_path(SOCKETS, os.fspath(mount.path))
    (found,) = [
        one
        for one in read_records(directory_for(socket))
        if one.space.slice.path.strip("/") == within and one.space.uid == os.geteuid()
    ]
    return found


def servers(record: Record) -> list[int]:
    """Return the pids of the servers of a space, which are the children of its control daemon."""
    assert record.control is not None
    pid = record.control.pid
    return [int(word) for word in procfs.words(procfs.of_process(pid, f"task/{pid}/children"))]


def logs(mount: Mounted, within: str, most: int = 1500) -> str:
    """Return the end of what the control daemon and the server of a space have logged."""
    folder = directory_for(default_path(SOCKETS, os.fspath(mount.path))) / record_of(mount, within).space.name / "log"
    each = [(path.name, path.read_text(errors="replace")[-most:]) for path in sorted(folder.iterdir())]
    return "\n".join(f"{name}: {text}" for name, text in each)


def client_bytes(pid: int) -> int:
    """Return the bytes of GPU memory that the driver counts for a client of MPS. KeyError for one that is none."""
    pynvml.nvmlInit()
    try:
        found = pynvml.nvmlDeviceGetMPSComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(0))
        return {one.pid: int(one.usedGpuMemory or 0) for one in found}[pid]
    finally:
        pynvml.nvmlShutdown()


def go_on(runs: Sequence[Program], seconds: float) -> float:
    """Wait until each program has finished another kernel, or pass; return the seconds that this took."""
    before = [run.passes for run in runs]
    return wait_for(
        lambda: all(run.passes > was for run, was in zip(runs, before, strict=True)), "all go on", seconds=seconds
    )


def stand(runs: Sequence[Program], settled_s: float, seconds: float) -> list[int]:
    """Return the kernels that each finished in `seconds`, from `settled_s` on: what was under way has ended then."""
    time.sleep(settled_s)
    before = [run.passes for run in runs]
    time.sleep(seconds)
    return [run.passes - was for run, was in zip(runs, before, strict=True)]
