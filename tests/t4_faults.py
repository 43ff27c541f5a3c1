"""A GPU that falls off the bus, on a real mount: what programs, pollers and tools see of it."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mounted import Mounted, Tenant, eventually, mounted, mountpoint

EXPECTED = ("GPU 0 is lost", "GPU 0 is back")


@pytest.fixture
def faults(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def mount(faults: Path) -> Iterator[Mounted]:
    with mountpoint() as path, mounted(path, "soft.gpus=2", f"soft.faults={faults}", expect_errors=EXPECTED) as mount:
        yield mount


def told(mount: Mounted, *words: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "ggroupfs", *words, "--mount", mount.path], check=True, text=True, capture_output=True
    ).stdout


def events(mount: Mounted, gpu: int = 0) -> str:
    return (mount / f"gpus/{gpu}/gpu.events").read_text()


def test_lost_and_back(mount: Mounted, faults: Path) -> None:
    with Tenant(mount, "--gpu", "0", "--gmem", "64M") as lost, Tenant(mount, "--gpu", "1", "--gmem", "64M") as other:
        lost.write("compute.weight", 200)
        with open(mount / "gpus/0/gpu.events") as file, open(lost.group / "compute.events") as own:
            poll = select.poll()
            for one in (file, own):
                one.read()
                poll.register(one, select.POLLPRI)
            (faults / "0").touch()
            woken = set()
            while len(woken) < 2:
                found = poll.poll(20_000)
                assert found, "nobody was told"
                for fd, _ in found:
                    woken.add(fd)
                    (file if fd == file.fileno() else own).seek(0)
                    (file if fd == file.fileno() else own).read()
        assert events(mount) == "present 0\nlost 1\n"
        assert events(mount, 1) == "present 1\nlost 0\n"
        # The program got ENODEV and ended, as CUDA programs do; who only read its files was not disturbed.
        eventually(lambda: not lost.group.exists(), "the program ends")
        words = [sys.executable, "-m", "ggroupfs", "tenant", "--mount", mount.path, "--gpu", "0"]
        refused = subprocess.run(words, check=False, text=True, capture_output=True)
        assert (refused.returncode, refused.stderr) == (1, "ggroupfs: No such device\n")
        there = mount.group(other.pid, 1)
        (there / "compute.weight").write_text("50\n")
        assert (there / "compute.weight").read_text() == "50\n"
        with pytest.raises(OSError, match="No such device"):
            (there / "compute.migrate").write_text("0\n")
        assert "GPU 0 ggroupfs software GPU (lost)" in told(mount, "show", "--tree")
        top = json.loads(told(mount, "top", "--json"))
        assert [gpu["present"] for gpu in top["gpus"]] == [False, True]
        metrics = told(mount, "metrics")
        assert 'ggroup_gpu_present{gpu="0"' in metrics
        (faults / "0").unlink()
        eventually(lambda: events(mount) == "present 1\nlost 1\n", "it is back")
        with Tenant(mount, "--gpu", "0", "--gmem", "64M") as again:
            again.write("compute.freeze", 1)
            assert again.flat("compute.events") == {"populated": 1, "frozen": 1, "migrated": 0, "undone": 0, "lost": 0}
            again.write("compute.freeze", 0)
