"""Daemons that are killed, and replaced, while CUDA programs run: no program is lost, and all is as before."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.mounted import Mounted, mountpoint
from tests.t4_restart import daemons, kill
from tests.t7_nvidia.conftest import Worker, rates, wait_for

TIMES = 20
FILES = ("compute.freeze", "compute.timeslice", "compute.weight", "compute.priority", "gmem.limit.high", "gcgroup.stat")
BACK_S = 2.0

Start = Callable[..., Worker]


@pytest.fixture
def place() -> Iterator[Path]:
    with mountpoint() as path:
        yield path


class Crowd:
    """Three programs that run, and one that is frozen."""

    def __init__(self, worker: Start) -> None:
        self.running: Sequence[Worker] = [worker() for _ in range(3)]
        self.frozen = worker()
        for one in (*self.running, self.frozen):
            one.started()

    def ask(self, mount: Mounted) -> None:
        """Something of everybody."""
        for one in (*self.running, self.frozen):
            wait_for(mount.group(one.pid).exists, "it is in the tree")
        for one, us in zip(self.running, (6000, 2000, 2000), strict=True):
            (mount.group(one.pid) / "compute.timeslice").write_text(f"{us}us")
        (mount.group(self.running[1].pid) / "compute.weight").write_text("300")
        os.chown(mount.group(self.running[2].pid) / "compute.weight", 1000, 1000)
        (mount.group(self.frozen.pid) / "compute.freeze").write_text("1")

    def state(self, mount: Mounted) -> Mapping[str, object]:
        """What the files say, and whose they are; of what is measured, what does not move."""
        found: dict[str, object] = {}
        for one in (*self.running, self.frozen):
            for name in FILES:
                path = mount.group(one.pid) / name
                lines = path.read_text().splitlines()
                keep = ("timeslice_usec", "tsgs", "channels", "attached") if name == "gcgroup.stat" else None
                found[f"{one.pid}/{name}"] = [line for line in lines if keep is None or line.split()[0] in keep]
                found[f"{one.pid}/{name} of"] = path.stat().st_uid
        return found

    def lives(self) -> None:
        """Who runs goes on, who is frozen does not."""
        counts = [one.finished for one in self.running]
        wait_for(lambda: all(one.finished > n for one, n in zip(self.running, counts, strict=True)), "they go on")


def until_as_before(crowd: Crowd, mount: Mounted, before: Mapping[str, object]) -> None:
    """Programs are found within a second of the mount's first answer."""

    def same() -> bool:
        try:
            return crowd.state(mount) == before
        except FileNotFoundError:
            return False

    wait_for(same, "all is as before")


@pytest.mark.timeout(400)
def test_killed_twenty_times(worker: Start, place: Path) -> None:
    crowd, took = Crowd(worker), []
    with daemons(place, gpu="nvidia") as start:
        mount = start()
        crowd.ask(mount)
        before, stood = crowd.state(mount), crowd.frozen.finished
        for _ in range(TIMES):
            kill(mount)
            crowd.lives()
            began = time.monotonic()
            mount = start()
            took.append(time.monotonic() - began)
            until_as_before(crowd, mount, before)
            crowd.lives()
            assert crowd.frozen.finished == stood, "nobody ran who was frozen"
        shares = rates(*crowd.running, seconds=2.0)
        (mount.group(crowd.frozen.pid) / "compute.freeze").write_text("0")
        wait_for(lambda: crowd.frozen.finished > stood, "it goes on where it stood")
        print(f"killed {TIMES} times: answers after {min(took):.2f} to {max(took):.2f} s; shares {shares}")
        assert max(took) < BACK_S
        assert shares[0] / shares[1] == pytest.approx(3, rel=0.15)
    for one in (*crowd.running, crowd.frozen):
        assert one.process.poll() is None
        one.drained()


@pytest.mark.timeout(200)
def test_replaced_five_times(worker: Start, place: Path) -> None:
    """`ggroupfs upgrade`: timeslices hold, and nobody is thawed, in no moment."""
    crowd = Crowd(worker)
    with daemons(place, gpu="nvidia") as start:
        mount = start()
        crowd.ask(mount)
        before, stood = crowd.state(mount), crowd.frozen.finished
        for _ in range(5):
            began = time.monotonic()
            words = [sys.executable, "-m", "ggroupfs", "upgrade", os.fspath(place)]
            said = subprocess.run(words, check=True, capture_output=True, text=True).stdout
            assert time.monotonic() - began < BACK_S
            print(said.strip())
            until_as_before(crowd, mount, before)
            crowd.lives()
            assert crowd.frozen.finished == stood
    for one in (*crowd.running, crowd.frozen):
        assert one.process.poll() is None
        one.drained()
