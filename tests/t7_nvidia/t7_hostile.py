"""CUDA programs that undo their settings, on a real driver: these hold again within a second, and that is counted.

The test acts in place of the program (inside.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest

from backend.nvidia import levers
from backend.nvidia.timeslices import OWN_S
from ggroupfs.client import flat
from tests.support.mounted import Mounted, mounted
from tests.t7_nvidia.conftest import Worker, rates, wait_for
from tests.t7_nvidia.inside import Inside, insides

TIMES = 5
SECONDS = 1.0
"""Seconds within which docs/security.md promises that one of a few such programs is found."""
OWN_US, SET_US, OTHERS_US = 60_000, 2000, 6000

Start = Callable[..., Worker]


@pytest.fixture(scope="module")
def mount(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    with mounted(tmp_path_factory.mktemp("ggroup"), gpu="nvidia", expect_errors=[": set again"]) as mount:
        yield mount


@attrs.define
class Hostile:
    """A program that undoes its settings."""

    worker: Worker
    group: Path
    """Its control files."""
    inside: Inside
    """Its access to the driver."""

    @property
    def undone(self) -> int:
        return flat((self.group / "compute.events").read_text())["undone"]

    def thaws(self) -> None:
        """Thaw itself: FIFO_DISABLE_CHANNELS with bDisable 0, for all its channels."""
        with self.inside.own() as (controls, tsgs):
            levers.attach_once(controls, tsgs, set())

    def stretches(self) -> None:
        """Lengthen its timeslices: SET_TIMESLICE of its GR TSGs."""
        with self.inside.own() as (controls, tsgs):
            levers.set_timeslice(controls, tsgs, OWN_US, {})


@pytest.fixture
def hostile(mount: Mounted, worker: Start) -> Iterator[Hostile]:
    with insides() as inside:
        one = worker()
        one.started()
        wait_for(mount.group(one.pid).exists, "it is in the tree")
        yield Hostile(one, mount.group(one.pid), inside(one.pid))


def test_who_undoes_its_freeze(hostile: Hostile) -> None:
    took, ran, worker = [], [], hostile.worker
    (hostile.group / "compute.freeze").write_text("1")
    for _ in range(TIMES):
        stood, undone = worker.finished, hostile.undone
        hostile.thaws()
        took.append(wait_for(lambda undone=undone: hostile.undone > undone, "it is counted"))  # type: ignore[misc]
        ran.append(worker.finished - stood)
        assert rates(worker, seconds=0.3) == [0], "it is frozen again"
    print(f"a freeze undone {TIMES} times: holds again after {min(took):.3f} to {max(took):.3f} s; kernels run {ran}")
    assert max(took) < SECONDS
    assert max(ran) > 0, "it had undone it"
    assert flat((hostile.group / "compute.events").read_text())["frozen"] == 1
    stood = worker.finished
    (hostile.group / "compute.freeze").write_text("0")
    wait_for(lambda: worker.finished > stood, "it goes on where it stood")
    worker.drained()


def test_who_undoes_its_timeslice(mount: Mounted, hostile: Hostile, worker: Start) -> None:
    other = worker()
    other.started()
    wait_for(mount.group(other.pid).exists, "it is in the tree")
    (mount.group(other.pid) / "compute.timeslice").write_text(f"{OTHERS_US}us")
    (hostile.group / "compute.timeslice").write_text(f"{SET_US}us")
    rates(other, hostile.worker, seconds=2 * OWN_S)  # a program that has not had the engine for a while is not blamed
    took, ours = [], hostile.inside.timeslices()
    assert sum(ours) == SET_US
    for _ in range(TIMES):
        undone = hostile.undone
        hostile.stretches()
        took.append(wait_for(lambda undone=undone: hostile.undone > undone, "it is counted"))  # type: ignore[misc]
        assert hostile.inside.timeslices() == ours, "it is as it was set"
    shares = rates(other, hostile.worker)
    print(f"a timeslice undone {TIMES} times: holds again after {min(took):.3f} to {max(took):.3f} s; shares {shares}")
    assert max(took) < SECONDS
    assert shares[0] / shares[1] == pytest.approx(OTHERS_US / SET_US, rel=0.15)
    for one in (hostile.worker, other):
        one.drained()
