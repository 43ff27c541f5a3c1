"""A PyTorch training run that is stopped, resumed and sliced while it runs has exactly the same losses."""

from __future__ import annotations

import mmap
import os
import random
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs

from tests.support.mounted import Mounted
from tests.t7_nvidia.conftest import wait_for

STEPS = 300


@attrs.define
class Training:
    """One training run."""

    process: subprocess.Popen[bytes]
    page: mmap.mmap

    @property
    def done(self) -> int:
        """Number of steps that it finished."""
        return int(struct.unpack_from("<Q", self.page, 0)[0])

    def losses(self) -> bytes:
        """Return the loss of every step, to the bit, once it ended by itself."""
        assert self.process.wait(60) == 0
        assert self.done == STEPS
        return self.page[8:]


@contextmanager
def training() -> Iterator[Training]:
    """Yield a run, which is ended by pid."""
    path = Path(f"/dev/shm/ggroupfs-t7-training-{os.getpid()}")
    path.write_bytes(bytes(8 * (STEPS + 1)))
    with path.open("r+b") as file:
        page = mmap.mmap(file.fileno(), 8 * (STEPS + 1))
    words = [sys.executable, os.fspath(Path(__file__).with_name("training.py")), os.fspath(path), str(STEPS)]
    process = subprocess.Popen(words)
    try:
        yield Training(process, page)
    finally:
        process.kill()
        process.wait()
        path.unlink()


def test_training_does_not_notice(gpu_mount: Mounted) -> None:
    with training() as undisturbed:
        expected = undisturbed.losses()
    with training() as run:
        group = gpu_mount.group(run.process.pid)
        wait_for(lambda: run.done > 5, "it trains", seconds=60)
        stat = (group / "gcgroup.stat").read_text()
        rng, freezes, leaked = random.Random(3), 0, 0
        while run.done < STEPS - 20:
            (group / "compute.freeze").write_text("1\n")
            time.sleep(0.01)  # counts from before the freeze may still be on their way to the page
            before = run.done
            time.sleep(0.05)
            leaked += run.done - before
            (group / "compute.timeslice").write_text(f"{rng.choice((0.5, 2, 10))}\n")
            (group / "compute.freeze").write_text("0\n")
            time.sleep(0.02)
            freezes += 1
        assert run.losses() == expected
    first, last = struct.unpack_from("<d", expected)[0], struct.unpack_from("<d", expected, 8 * (STEPS - 1))[0]
    print(f"PyTorch: {stat.split()}, frozen {freezes} times, {leaked} steps while frozen, loss {first} -> {last}")
    assert freezes >= 10
    assert leaked == 0
    assert last < first
