"""The self-test, which judges by the progress of programs and not by the driver's answers."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import attrs
import pytest
import trio
from trio.testing import MockClock

from backend.core.reasons import Engines
from backend.core.records import Capability, GpuInfo
from backend.nvidia import selftest
from backend.nvidia.proven import GR_ALONE, SPATIAL, Proven, Verdict
from backend.nvidia.selftest import prove
from backend.process.identity import Process
from backend.space import control

RATE = 9000.0


@attrs.define(eq=False)
class Machine:
    """Two programs and a GPU that shares its time by their timeslices, or does not."""

    obeys_timeslice: bool = True
    obeys_freeze: bool = True
    thaws: bool = True
    refuses: bool = False
    starts: bool = True
    info: GpuInfo = attrs.field(factory=lambda: GpuInfo(0, "GPU-0", "fake", "none", 1, 2048))
    slices: dict[Process, int] = attrs.field(factory=dict)
    obeys_gr: bool = True
    copies_go_on: bool = True
    frozen: set[Process] = attrs.field(factory=set)
    progress: dict[Process, float] = attrs.field(factory=dict)
    at: float = 0.0
    ended: int = 0
    forgotten: int = 0

    def advance(self) -> None:
        now = trio.current_time()
        weights = {p: 0.0 if p in self.frozen else float(self.slices.get(p) or 2048) for p in self.progress}
        for process, weight in weights.items():
            if weight:
                self.progress[process] += (now - self.at) * RATE * weight / sum(weights.values())
        self.at = now

    async def set_timeslice(self, process: Process, us: int) -> None:
        if self.refuses:
            raise OSError(errno.EPERM, "control 0xa06c0103: INSUFFICIENT_PERMISSIONS 0x1b")
        self.advance()
        if self.obeys_timeslice:
            self.slices[process] = us

    async def detach(self, process: Process) -> None:
        self.advance()
        if self.obeys_freeze:
            self.frozen.add(process)

    async def take(self, process: Process, engines: Engines) -> None:
        assert engines is Engines.GR
        self.advance()
        if self.obeys_gr:
            self.frozen.add(process)

    async def attach(self, process: Process) -> None:
        self.advance()
        if self.thaws:
            self.frozen.discard(process)

    def forget(self, process: Process) -> None:
        self.forgotten += 1


def verdicts(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, proven: Proven | None = None, tested: bool = True
) -> dict[str, Verdict]:
    class Child:
        def __init__(self, uuid: str) -> None:
            assert uuid == "GPU-0"
            self.identity = Process(len(machine.progress) + 1, 1)
            machine.progress[self.identity] = 0.0

        @property
        def finished(self) -> int:
            machine.advance()
            return int(machine.progress[self.identity])

        @property
        def copied(self) -> int:
            return int(trio.current_time() * 1000) if machine.copies_go_on or not machine.frozen else 0

        async def copies(self) -> None:
            pass

        async def started(self) -> None:
            if not machine.starts:
                raise OSError(errno.EIO, "the probe could not run kernels (CUDA error 100)")

        def end(self) -> None:
            machine.ended += 1

    monkeypatch.setattr(selftest, "Child", Child)

    async def main() -> list[Verdict]:
        machine.at = trio.current_time()
        return await prove(machine, proven=proven)

    found = trio.run(main, clock=MockClock(autojump_threshold=0))
    assert (machine.ended, machine.forgotten) == ((2, 2) if tested else (0, 0)) if machine.starts else machine.ended
    assert "compute.migrate" in {v.control for v in found}
    assert len(found) == len({v.control for v in found})
    return {v.control: v for v in found}


def test_levers_that_act(monkeypatch: pytest.MonkeyPatch) -> None:
    found = verdicts(Machine(), monkeypatch)
    assert found["compute.timeslice"].capability is Capability.ENFORCED
    assert "asked for 3.00 to 1, kernels completed moved by 3.0" in found["compute.timeslice"].evidence
    assert found["compute.freeze"].capability is Capability.ENFORCED
    assert found["gmem.limit.high"].capability is Capability.ADVISORY
    for name in ("compute.priority", "compute.weight"):
        assert found[name].capability is Capability.ENFORCED


def test_a_timeslice_that_is_taken_and_not_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = verdicts(Machine(obeys_timeslice=False), monkeypatch)
    assert found["compute.timeslice"].capability is Capability.ADVISORY
    assert found["compute.freeze"].capability is Capability.ENFORCED


def test_a_freeze_that_is_taken_and_not_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = verdicts(Machine(obeys_freeze=False), monkeypatch)
    assert found["compute.freeze"].capability is Capability.ADVISORY
    assert found["compute.priority"].capability is Capability.ADVISORY, "it is no better than what it is made of"


def test_a_freeze_that_cannot_be_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdicts(Machine(thaws=False), monkeypatch)["compute.freeze"].capability is Capability.UNSUPPORTED


@pytest.mark.parametrize("machine", [{"obeys_gr": False}, {"copies_go_on": False}, {"thaws": False}], ids=str)
def test_gr_alone_is_proven_by_what_stands_and_what_goes_on(
    monkeypatch: pytest.MonkeyPatch, machine: dict[str, bool]
) -> None:
    """Kernels must stop while copies go on, and go on afterwards; otherwise all engines are taken."""
    assert verdicts(Machine(), monkeypatch)[GR_ALONE].capability is Capability.ENFORCED
    found = verdicts(Machine(**machine), monkeypatch)
    assert found[GR_ALONE].capability is Capability.ADVISORY
    if "thaws" not in machine:
        for name in ("compute.freeze", "compute.weight"):
            assert found[name].capability is Capability.ENFORCED, "no control depends on it"


def test_gr_alone_is_noted_where_it_was_proven(monkeypatch: pytest.MonkeyPatch, proven: Proven) -> None:
    """Proven controls are not tested again for it, and unproven ones are not believed."""
    verdicts(Machine(obeys_gr=False), monkeypatch, proven)
    found = verdicts(Machine(), monkeypatch, proven, tested=False)
    assert GR_ALONE not in found
    assert found["compute.freeze"].capability is Capability.ENFORCED


def test_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = verdicts(Machine(refuses=True), monkeypatch)
    assert everything["compute.weight"].capability is Capability.UNSUPPORTED
    found = everything["compute.timeslice"]
    assert found.capability is Capability.UNSUPPORTED
    assert "INSUFFICIENT_PERMISSIONS" in found.evidence


def test_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    found = verdicts(Machine(starts=False), monkeypatch)
    assert found["compute.freeze"].capability is Capability.ADVISORY
    assert "CUDA error 100" in found["compute.freeze"].evidence


@pytest.fixture
def proven(tmp_path: Path) -> Proven:
    (tmp_path / "boot").write_text("b\n")
    (tmp_path / "driver").write_text("580\n")
    return Proven(tmp_path / "run" / "proven", tmp_path / "boot", tmp_path / "driver")


def test_what_was_proven_is_not_tested_again(monkeypatch: pytest.MonkeyPatch, proven: Proven) -> None:
    found = verdicts(Machine(), monkeypatch, proven)
    assert verdicts(Machine(), monkeypatch, proven, tested=False) == found
    assert stat.S_IMODE(proven.path.stat().st_mode) == 0o600
    assert os.listdir(proven.path.parent) == ["proven"]


@pytest.mark.parametrize("first", [Capability.ENFORCED, Capability.UNSUPPORTED], ids=str)
def test_spaces_are_promised_where_they_are_proven_and_possible(
    monkeypatch: pytest.MonkeyPatch, proven: Proven, first: Capability
) -> None:
    """A refusal is no promise of the next daemon, nor is a proof one once the program is gone."""
    outcome, runs = [first], list[bool]()

    async def prove_it(gpu: object, run: bool, program: Path | None, *others: object) -> Verdict:
        if program is None:
            return Verdict(SPATIAL, Capability.UNSUPPORTED, control.MISSING)
        runs.append(run)
        return Verdict(SPATIAL, outcome[0] if run else Capability.ADVISORY, "seen")

    monkeypatch.setattr(selftest.spatial, "prove", prove_it)
    monkeypatch.setattr(control, "find", lambda: Path("/usr/bin/nvidia-cuda-mps-control"))
    assert verdicts(Machine(), monkeypatch, proven)[SPATIAL].capability is first
    assert verdicts(Machine(), monkeypatch, proven, tested=False)[SPATIAL].capability is first
    outcome[0] = Capability.ENFORCED
    for _ in range(2):
        assert verdicts(Machine(), monkeypatch, proven, tested=False)[SPATIAL].capability is Capability.ENFORCED
    assert runs == [True] * (1 if first is Capability.ENFORCED else 3), "what is proven is kept"
    monkeypatch.setattr(control, "find", lambda: None)
    found = verdicts(Machine(), monkeypatch, proven, tested=False)
    assert (found[SPATIAL].capability, found[SPATIAL].evidence) == (Capability.UNSUPPORTED, control.MISSING)
    assert found["compute.freeze"].capability is Capability.ENFORCED


@pytest.mark.parametrize(
    "machine", [{"obeys_timeslice": False}, {"obeys_freeze": False}, {"refuses": True}, {"starts": False}], ids=str
)
def test_what_was_not_proven_is_tested_again(
    monkeypatch: pytest.MonkeyPatch, proven: Proven, machine: dict[str, bool]
) -> None:
    verdicts(Machine(**machine), monkeypatch, proven)
    assert verdicts(Machine(), monkeypatch, proven)["compute.freeze"].capability is Capability.ENFORCED


@pytest.mark.parametrize("change", ["boot", "driver", "edition", "other GPU", "mode", "link", "nonsense", "shape"])
def test_it_counts_here_and_now(monkeypatch: pytest.MonkeyPatch, proven: Proven, change: str) -> None:
    verdicts(Machine(), monkeypatch, proven)
    text = proven.path.read_text()
    match change:
        case "boot" | "driver":
            (proven.boot if change == "boot" else proven.driver).write_text("another")
        case "edition":
            proven.path.write_text(text.replace('"edition": 2', '"edition": 0'))
        case "other GPU":
            proven.path.write_text(text.replace("GPU-0", "GPU-1"))
        case "mode":
            proven.path.chmod(0o622)
        case "link":
            proven.path.rename(proven.path.with_name("elsewhere"))
            proven.path.symlink_to("elsewhere")
        case "nonsense":
            proven.path.write_text("{")
        case "shape":
            proven.path.write_text("[[]]")
    verdicts(Machine(), monkeypatch, proven)


def test_a_place_that_cannot_be_written_to_is_none(monkeypatch: pytest.MonkeyPatch, proven: Proven) -> None:
    proven.path.parent.write_text("a file")
    for _ in range(2):
        assert verdicts(Machine(), monkeypatch, proven)["compute.freeze"].capability is Capability.ENFORCED
