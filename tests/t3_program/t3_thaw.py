"""`ggroupfs doctor --thaw-all`: programs that a killed daemon left frozen run again, without another daemon."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from backend.ledgers.journal import state
from backend.ledgers.journal.file import Journal
from backend.nvidia import checkpoint, rm
from backend.nvidia.checkpoint.records import Action, Outcome, Request, State, Step
from backend.process.identity import ROOT, Slice
from ggroupfs.commands import thaw
from ggroupfs.commands.finding import Finding
from tests.support.fake_nvidia import FakeNvml, FakeSystem
from tests.support.journaled import let_go
from tests.support.killed import Life, Machine, a_machine
from tests.support.killed_life import again, is_released, live, own_timeslices, past, run, sleepers, timeslices

FREEZES = 44
"""Point of that life at which a program is frozen."""


@pytest.fixture
def machine() -> Iterator[Machine]:
    with sleepers() as spawn, a_machine(spawn) as found:
        yield found


@pytest.mark.parametrize("at", [FREEZES, 60, 75, 100, 120, 150])
def test_everybody_runs_as_before_any_daemon_came(machine: Machine, at: int) -> None:
    """At any point of the daemon's death; the settings are kept for the next daemon, which makes them hold again."""
    live(machine, Life(at), past)
    found = run(machine)
    is_released(machine)
    assert {one.verdict for one in found} <= {"thawed", "ok"}
    assert {one.subject for one in found} == {f"GPU 0 pid {program.pid}" for program in machine.programs.values()}
    assert {one.verdict for one in run(machine)} == {"ok"}, "there is nothing left to do"
    assert os.listdir(machine.path.parent) == [machine.path.name]
    again(machine, further=True)


def test_it_says_what_it_did(machine: Machine) -> None:
    live(machine, Life(FREEZES), past)
    a, b = machine.programs["a"], machine.programs["b"]
    assert (any(a.running()), all(b.running())) == (False, True)
    assert sorted(run(machine), key=lambda one: one.subject) == sorted(
        (
            Finding(f"GPU 0 pid {a.pid}", "thawed", "20 channels put back, 0 timeslices given back"),
            Finding(f"GPU 0 pid {b.pid}", "ok", "it was free"),
        ),
        key=lambda one: one.subject,
    )


def test_without_a_journal_timeslices_are_not_known(machine: Machine) -> None:
    """Channels are on the runlist again all the same: the driver reports which are off."""
    live(machine, Life(75), past)
    before = timeslices(machine.programs["a"])
    assert before != own_timeslices("a", 2)
    machine.path.unlink()
    run(machine, [])
    assert all(all(program.running()) for program in machine.programs.values())
    assert timeslices(machine.programs["a"]) == before


def test_channels_that_were_disabled_again_and_again(machine: Machine) -> None:
    live(machine, Life(FREEZES), past)
    program = machine.programs["a"]
    for number, channel in enumerate(program.channels()):
        program.objects[channel].disabled += number % 5
    assert {one.verdict for one in run(machine)} == {"thawed", "ok"}
    assert all(program.running())


def test_without_the_read_back_all_are_put_back() -> None:
    with sleepers() as spawn, a_machine(spawn, readback=False) as machine:
        live(machine, Life(FREEZES), past)
        found = run(machine)
        is_released(machine)
        assert all("none can be asked" in one.why for one in found)


def test_who_cannot_be_freed_is_named(machine: Machine) -> None:
    live(machine, Life(FREEZES), past)
    machine.fake.refuse = lambda cmd, client, handle: rm.Status.GENERIC if cmd == rm.FIFO_DISABLE_CHANNELS else 0
    pid = machine.programs["a"].pid
    (failed,) = [one for one in run(machine) if one.verdict == "failed"]
    assert failed.subject == f"GPU 0 pid {pid}"
    assert "GENERIC" in failed.why
    machine.fake.refuse = lambda cmd, client, handle: 0
    run(machine)
    assert all(machine.programs["a"].running())


def test_a_daemon_that_lives_is_not_interfered_with(machine: Machine) -> None:
    """A live daemon holds its journal, mounted or not."""
    live(machine, Life(FREEZES), past)
    journal = Journal(machine.path, boot="b")
    with pytest.raises(RuntimeError, match="another daemon"):
        run(machine)
    let_go(journal)
    assert not any(machine.programs["a"].running())


def test_trees_that_answer(machine: Machine, tmp_path: Path) -> None:
    """A tree of NVIDIA GPUs thaws by itself; one of a software GPU is not concerned, and keeps its journal."""
    live(machine, Life(FREEZES), past)
    for name, text in (("real", "gpu nvidia\n"), ("soft", f"gpu soft\njournal {machine.path}\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "ggroup.backend").write_text(text)
    with pytest.raises(RuntimeError, match="umount"):
        run(machine, places=[os.fspath(tmp_path / "real")])
    journal = Journal(machine.path, boot="b")
    found = run(machine, places=[os.fspath(tmp_path / "soft"), os.fspath(tmp_path / "gone")])
    assert "thawed" in {one.verdict for one in found}
    let_go(journal)


def test_a_tree_that_hangs(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its daemon lives, and might continue what it was doing."""
    monkeypatch.setattr(thaw, "ANSWER_S", 0.1)
    os.mkfifo(tmp_path / "ggroup.backend", stat.S_IRUSR)
    writer = os.open(tmp_path / "ggroup.backend", os.O_RDWR)
    try:
        with pytest.raises(RuntimeError, match="hangs: kill it first"):
            run(machine, places=[os.fspath(tmp_path)])
    finally:
        os.close(writer)


def test_journals_that_are_none(machine: Machine, tmp_path: Path) -> None:
    """Such files are named, and keep no program frozen."""
    live(machine, Life(FREEZES), past)
    other = tmp_path / "other.journal"
    other.write_text("something else")
    other.chmod(0o600)
    found = run(machine, [machine.path, other, tmp_path / "nowhere.journal"])
    assert [one.subject for one in found if one.verdict == "failed"] == [str(other), str(tmp_path / "nowhere.journal")]
    assert all(machine.programs["a"].running())
    assert other.read_text() == "something else"
    assert not (tmp_path / "nowhere.journal").exists()


def test_no_driver(tmp_path: Path) -> None:
    """No program can be frozen; the limits in a journal stay."""
    path = tmp_path / "one.journal"
    journal = Journal(path, boot="b")
    journal.commit(state.gpu("GPU-a"), state.add(("GPU-a", Slice("/a")), ROOT))
    let_go(journal)
    with sleepers() as spawn, a_machine(spawn) as machine:
        machine.fake = FakeSystem()  # type: ignore[assignment]
        machine.nvml = FakeNvml(error=FakeNvml.NVML_ERROR_DRIVER_NOT_LOADED)
        machine.path = path
        (only,) = run(machine)
    assert (only.subject, only.verdict) == ("NVIDIA GPU", "ok")
    again = Journal(path, boot="b")
    assert ("GPU-a", Slice("/a")) in again.state.groups
    let_go(again)


def test_who_waits_in_the_host_runs_again(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or it is named, where that fails."""
    machine.start("a")
    machine.start("b")
    one, other = (machine.programs[name].identity for name in "ab")

    async def recover(process: object) -> checkpoint.Done:
        if process == other:
            raise checkpoint.CheckpointError(Outcome(State.LOCKED, "GPU-0", 5, Step.RESTORE, "restore: it failed"), ())
        return checkpoint.Done(State.RUNNING, "GPU-0", {}, None)

    def left() -> list[checkpoint.Left]:
        return [
            checkpoint.Left(Request(Action.SUSPEND, process, "GPU-0", "", 1, 1.0), Step.CHECKPOINT, "GPU-0", False)
            for process in (one, other)
        ]

    monkeypatch.setattr(checkpoint, "recover", recover)
    monkeypatch.setattr(checkpoint, "left", left)
    found = {finding.subject: finding.verdict for finding in run(machine, []) if finding.subject.startswith("pid")}
    assert found == {f"pid {one.pid}": "thawed", f"pid {other.pid}": "failed"}
