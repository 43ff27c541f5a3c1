"""The part of the self-test that is about spaces: what is promised by what the levers did to two clients."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
import trio

from backend.core.reasons import Engines
from backend.core.records import Capability
from backend.nvidia.proven import SPATIAL, Proven, Verdict
from backend.nvidia.selftest import TESTED
from backend.nvidia.spatial import prove
from backend.process.identity import Process
from backend.space import control
from tests.support.mps import MpsDouble

WINDOW_S = 0.05


@attrs.define(eq=False)
class Child:
    """A program that completes a kernel each time that it is looked at, unless it stands."""

    pid: int
    environment: Mapping[str, str]
    stands: bool = False
    ended: bool = False
    count: int = 0

    @property
    def identity(self) -> Process:
        return Process(self.pid, 1)

    @property
    def finished(self) -> int:
        self.count += not self.stands
        return self.count

    async def started(self) -> None:
        assert (Path(self.environment["CUDA_MPS_PIPE_DIRECTORY"]) / "control").exists()

    def end(self) -> None:
        self.ended = True


@attrs.define
class Gpu:
    """A GPU whose lever, pulled on the first child, stops these."""

    stops: tuple[int, ...] = (0, 1)
    listed: tuple[int, ...] = (0, 1)
    thaws: bool = True
    info: SimpleNamespace = SimpleNamespace(index=0, uuid="GPU-0")  # noqa: RUF009 - it never changes
    children: list[Child] = attrs.field(factory=list)
    forgotten: list[Process] = attrs.field(factory=list)

    def start(self, environment: Mapping[str, str]) -> Child:
        self.children.append(Child(len(self.children), environment))
        return self.children[-1]

    async def take(self, process: Process, engines: Engines) -> None:
        assert process == self.children[0].identity, "the lever is pulled on one alone"
        for number in self.stops:
            self.children[number].stands = engines is not Engines.NONE or not self.thaws

    async def clients(self) -> frozenset[int]:
        return frozenset(self.listed)

    def forget(self, process: Process) -> None:
        self.forgotten.append(process)


@pytest.fixture
def double(tmp_path: Path) -> Iterator[Path]:
    yield MpsDouble(tmp_path / "bin").program
    assert not control._LEFT, "the server has ended"


def verdict(gpu: Gpu, program: Path | None, run: bool = True) -> Verdict:
    found = trio.run(prove, gpu, run, program, gpu.start, WINDOW_S)
    assert found.control == SPATIAL
    assert all(child.ended for child in gpu.children)
    assert gpu.forgotten == [child.identity for child in reversed(gpu.children)]
    return found


def test_what_stops_both_and_lets_both_go_on_is_enforced(double: Path) -> None:
    found = verdict(Gpu(), double)
    assert found.capability is Capability.ENFORCED
    assert "without the GR engine of the first" in found.evidence


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        (Gpu(stops=(0,)), "kernels of two clients"),
        (Gpu(stops=()), "kernels of two clients"),
        (Gpu(thaws=False), "kernels of two clients"),
        (Gpu(listed=(0,)), "does not say which programs are clients"),
    ],
    ids=["the first alone", "none", "for ever", "not told"],
)
def test_what_does_not_act_on_all_is_unsupported(double: Path, gpu: Gpu, words: str) -> None:
    """The scheduler would take the space for one, and it would not be."""
    found = verdict(gpu, double)
    assert found.capability is Capability.UNSUPPORTED
    assert words in found.evidence


def test_a_server_that_does_not_start(tmp_path: Path) -> None:
    found = verdict(Gpu(), MpsDouble(tmp_path / "bin", first="echo no; exit 1").program)
    assert (found.capability, found.evidence) == (Capability.UNSUPPORTED, "refused: it ended: no")


def test_without_the_program_or_without_a_test() -> None:
    gpu = Gpu()
    assert verdict(gpu, None).capability is Capability.UNSUPPORTED
    assert verdict(gpu, Path("/usr/bin/nvidia-cuda-mps-control"), run=False).capability is Capability.ADVISORY
    assert not gpu.children


def test_the_rest_is_kept_without_it(tmp_path: Path) -> None:
    """A machine without the program does not test its other levers at each start."""
    boot, driver = tmp_path / "boot", tmp_path / "driver"
    for path in (boot, driver):
        path.write_text("one\n")
    proven = Proven(tmp_path / "proven", boot, driver)
    rest = [Verdict(name, Capability.ENFORCED, "seen") for name in TESTED]
    proven.keep("GPU-0", [*rest, Verdict(SPATIAL, Capability.UNSUPPORTED, control.MISSING)])
    assert {one.control for one in proven.of("GPU-0")} == set(TESTED)
    proven.keep("GPU-0", [*rest, Verdict(SPATIAL, Capability.ENFORCED, "seen")])
    assert {one.control for one in proven.of("GPU-0")} == {*TESTED, SPATIAL}
    assert os.path.exists(tmp_path / "proven")
