"""A PyTorch program in a container that has the library and the daemon's socket, and limits itself."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ggroupfs.client import Member
from ggroupfs.commands.run import library
from tests.support.mounted import Mounted
from tests.t7_nvidia.conftest import ROOT, wait_for
from tests.t7_nvidia.programs import MIB, Program, current, nvml_used, program
from tests.t7_nvidia.trained import HEAD, MAY, STEP, outcome, torch

STEPS = 60
LIMIT = 1100 * MIB
"""Bytes of GPU memory that the program gives itself; plain, it takes nearly twice as many."""
MISSED = 64 * MIB
"""Bytes over the limit that there may be: what the driver takes for a context is found by looking."""

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
"""What makes the container, as a runtime does from its description: the tree covered, the library at another path."""


@contextlib.contextmanager
def contained(mount: Mounted, **environment: str) -> Iterator[Program]:
    """The training program as process 1 of a pid namespace, in a mount namespace without the tree."""
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
    """The control files of the family that the program made."""
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
    """Never over what its environment says from its first allocation on, and it computes the same to the bit."""
    with torch(None, "train", STEPS) as run:
        expected, plain_us = outcome(run)
    assert len(expected) == 8 * STEPS
    with contained(gpu_mount, GGROUP_GMEM_HIGH=str(LIMIT)) as run:
        ended, peaks = threading.Event(), {"nvml": 0, "current": 0, "looks": 0}
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
                    peaks["nvml"] = max(peaks["nvml"], nvml_used(pid))
                    peaks["current"] = max(peaks["current"], current(family))
                    peaks["looks"] += 1

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
    mebibytes = {name: peak >> 20 for name, peak in peaks.items() if name != "looks"}
    print(f"limit {LIMIT >> 20} MiB, most of {peaks['looks']} looks {mebibytes}")
    print(shown.stdout)
    assert losses == expected
    assert most > 0, "it never was over its limit"
    assert peaks["looks"] > 100
    assert peaks["current"] <= LIMIT + MISSED
    assert peaks["nvml"] <= LIMIT + MISSED
