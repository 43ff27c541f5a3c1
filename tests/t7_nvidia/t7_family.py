"""A PyTorch program in a container that limits itself, with only the library and the daemon's socket."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import pytest

from ggroupfs.client import Member
from ggroupfs.commands.run import library
from tests.support.mounted import Mounted
from tests.t7_nvidia.conftest import ROOT, wait_for
from tests.t7_nvidia.programs import MIB, Program, current, nvml_used, program
from tests.t7_nvidia.trained import HEAD, MAY, STEP, outcome, torch

STEPS = 60
LIMIT = 1100 * MIB
"""Bytes of GPU memory that the program allows itself; unlimited, it takes nearly twice as many."""
MISSED = 64 * MIB
"""Bytes over the limit that are accepted: the driver's memory for a context is found by looking."""

FOUND_S = 1.0
"""Seconds until that is found, and as much is moved out; in this time any excess is accepted."""

CONTAINER = """
set -e
mount --make-rprivate /
mount -t tmpfs none "$1"
touch "$PRELOADED"
mount --bind "$LIBRARY" "$PRELOADED"
export LD_PRELOAD=$PRELOADED
shift
exec "$@"
"""
"""Script that makes the container as a runtime does: the tree is hidden, and the library is at another path."""


@attrs.frozen
class Look:
    """The findings of a look at the program."""

    at: float
    """Time in seconds."""
    nvml: int
    """Bytes that the driver counts."""
    current: int
    """Bytes in the books of its family."""
    step: int
    """Number of steps done."""


def over(looks: Sequence[Look]) -> list[tuple[int, int]]:
    """Return the first and the last look of each time that it was over its limit by more than is accepted."""
    found: list[tuple[int, int]] = []
    for number, look in enumerate(looks):
        if max(look.nvml, look.current) > LIMIT + MISSED:
            follows = found and found[-1][1] == number - 1
            found[-1:] = [(found[-1][0], number)] if follows else [*found[-1:], (number, number)]
    return found


@contextlib.contextmanager
def contained(mount: Mounted, **environment: str) -> Iterator[Program]:
    """Run the training program as process 1 of a pid namespace, in a mount namespace without the tree."""
    facts = dict(line.split(None, 1) for line in (mount / "ggroup.backend").read_text().splitlines())
    preloaded = f"/dev/shm/ggroup-t7-{os.getpid()}.so"
    words = [
        *("env", f"GGROUP_SOCKET={facts['socket']}", f"LIBRARY={library()}", f"PRELOADED={preloaded}"),
        *(f"{name}={value}" for name, value in environment.items()),
        *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
        *("sh", "-c", CONTAINER, "sh", os.fspath(mount.path)),
        *(sys.executable, os.fspath(ROOT / "tests" / "t7_nvidia" / "workload.py"), "train", "PAGE"),
    ]
    try:
        with program(*words, size=HEAD + STEP * STEPS) as run:
            run.set(MAY, STEPS)
            yield run
    finally:
        Path(preloaded).unlink(missing_ok=True)


def only_family(mount: Mounted) -> Member:
    """Return the control files of the family that the program made."""
    found: list[Path] = []

    def there() -> bool:
        found[:] = [
            place for place in (mount / "slice").rglob("family-*") if (place / "0" / "gmem.limit.high").exists()
        ]
        return bool(found)

    wait_for(there, "its family appears", seconds=60)
    (place,) = found
    return Member(0, 0, place / "0")


@pytest.mark.timeout(240)
def test_pytorch_in_a_container_limits_itself(gpu_mount: Mounted) -> None:
    """From its first allocation on it is held to the limit of its environment, except for FOUND_S in which the driver's
    own memory is found; and it computes the same to the bit."""
    with torch(None, "train", STEPS) as run:
        expected, plain_us = outcome(run)
    assert len(expected) == 8 * STEPS
    with contained(gpu_mount, GGROUP_GMEM_HIGH=str(LIMIT)) as run:
        ended = threading.Event()
        looks: list[Look] = []
        family = only_family(gpu_mount)
        assert int(family.read("gmem.limit.high")) == LIMIT
        wait_for(lambda: bool(gpu_mount.members()), "its directory appears")
        (pid,) = [one.pid for one in gpu_mount.members()]
        assert pid != 1, "the daemon's number of it, not its own"
        assert os.readlink(f"/proc/{pid}/ns/pid") != os.readlink("/proc/self/ns/pid")
        assert os.readlink(f"/proc/{pid}/ns/mnt") != os.readlink("/proc/self/ns/mnt")
        assert re.search(r"/dev/shm/ggroup-t7-\d+\.so", Path(f"/proc/{pid}/maps").read_text())

        def watch() -> None:
            while not ended.is_set():
                with contextlib.suppress(OSError):
                    looks.append(Look(time.monotonic(), nvml_used(pid), current(family), run.passes))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            wait_for(lambda: run.passes >= STEPS - 5, "it trains", seconds=150)
            most = family.flat("gmem.stat")["swapout_bytes"]
            shown = subprocess.run(["cat", family.path / "gmem.stat"], capture_output=True, text=True, check=True)
            losses, limited_us = outcome(run)
        finally:
            ended.set()
            watcher.join()
    print(f"plain {plain_us / 1e3:.0f} ms a step, limited {limited_us / 1e3:.0f}; {most >> 20} MiB moved out")
    seconds = [one.at - looks[0].at for one in looks]
    print(
        f"limit {LIMIT >> 20} MiB; in {len(looks)} looks of {seconds[-1]:.1f} s more than {MISSED >> 20} MiB over it:"
    )
    for first, last in over(looks):
        most_there = max(max(one.nvml, one.current) for one in looks[first : last + 1]) >> 20
        print(f"at {seconds[first]:.2f} to {seconds[last]:.2f} s, step {looks[first].step}: {most_there} MiB")
    print(shown.stdout)
    assert losses == expected
    assert most > 0, "it never was over its limit"
    assert len(looks) > 100
    assert all(looks[last].at - looks[first].at <= FOUND_S for first, last in over(looks))
