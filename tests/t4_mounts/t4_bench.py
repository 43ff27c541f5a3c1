"""The parts of the benchmarks that use real processes, files and mounts, without a GPU."""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bench import __main__ as command
from tests.bench.core import record
from tests.bench.core.runner import Unavailable, run
from tests.bench.gpu import lab as real
from tests.bench.gpu import systems
from tests.bench.gpu.faces import Carried, Job, Part
from tests.bench.host import files, flyt, salus, scale
from tests.support.bench_program import REQUEST_NS
from tests.support.mounted import eventually

PROGRAM = Path(__file__).parents[1] / "support" / "bench_program.py"
PYTHON = [sys.executable]

BUDGET_S = 500.0
"""Longest time of a benchmark, seconds; it takes a few seconds on an idle processor."""

# Pages of programs


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> real.GpuLab:
    """A lab with stand-ins for the CUDA programs."""
    monkeypatch.setattr(real, "built", lambda source: os.fspath(PROGRAM))
    return real.GpuLab()


def test_a_burst_is_served(lab: real.GpuLab) -> None:
    """Latencies count from arrival: the second of two requests that come at once waits for the first."""
    heard: list[float] = []
    with lab.critical(PYTHON, "decode") as critical:
        for _ in range(2):
            served = critical.serve([0.0, 0.0, 0.02], 10.0, heard.append)
            assert served.given_up == 0
            first, second, third = served.latencies
            assert first >= REQUEST_NS / 1e9
            assert second >= 2 * REQUEST_NS / 1e9
            assert second - first >= REQUEST_NS / 1e9
            assert third >= REQUEST_NS / 1e9
            assert heard == served.latencies, "of this burst, and all of them"
            heard.clear()
    assert not os.path.exists(f"/proc/{critical.pid}")


def test_what_has_not_begun_in_time_is_given_up(lab: real.GpuLab) -> None:
    """It is not given up earlier, and a request that has begun is served to its end. A program that got no processor
    time at all begins none, and the test runs it again.
    """
    count, most = 100, 10
    limit, until = most * REQUEST_NS / 1e9, time.monotonic() + BUDGET_S
    with lab.critical(PYTHON, "decode") as critical:
        begun = 0
        while not begun:
            assert time.monotonic() < until, "it serves none"
            served = critical.serve([0.0] * count, limit)
            begun = count - served.given_up
            ends, waits = served.latencies[:begun], served.latencies[begun:]
            assert begun <= most
            assert all(end >= number * REQUEST_NS / 1e9 for number, end in enumerate(ends, 1)), "each takes its time"
            assert max(ends[:-1], default=0.0) < limit <= min(waits)
            took = statistics.median(after - before for before, after in itertools.pairwise(waits))
            assert took < REQUEST_NS / 1e9, "what is given up takes no time, whatever the machine does in between"
        with pytest.raises(ValueError, match="4097 requests"):
            critical.serve([0.0] * 4097, 1.0)


def test_batch_programs_work_when_they_are_told(lab: real.GpuLab) -> None:
    before = lab.now()
    with lab.products(PYTHON) as products:
        assert before <= products.created <= lab.now()
        products.work(True)
        done = products.done
        real.wait_for(lambda: products.done > done + 10, "it works")
        products.work(False)
        done = products.done
        assert products.done == done


def test_jobs_go_on_until_they_are_told(lab: real.GpuLab) -> None:
    with lab.jobs(PYTHON, [Job("decode", 8704, graph=True), Job("stencil", 8704), Job("gather", 64)]) as jobs:
        before = [one.passes for one in jobs]
        real.wait_for(lambda: all(one.passes > was for one, was in zip(jobs, before, strict=True)), "all go on")
        assert jobs[0].carried() == Carried(4 << 20, 3 << 20, 0.001)
        for one in jobs[:2]:
            one.finish()
        with pytest.raises(RuntimeError, match="wrong"):
            jobs[2].finish()
        with pytest.raises(Unavailable, match="the program ended"):
            _ = jobs[0].passes


@pytest.mark.parametrize("turns", ["on", "off"])
def test_programs_in_a_slice_have_turns_where_they_have_less_room(turns: str) -> None:
    """The test runs them on the software GPU, in the way `oversubscribed` does on a real one."""
    with systems.Turned("slices", [f"turns={turns}"], gpu="soft").enter() as room:
        words = [*room.words(), sys.executable, "-m", "ggroupfs", "tenant", "--mount", os.fspath(room.mount.path)]
        words += ["--gmem", "256M", "--touch", "1000000", "--kernel", "5ms", "--depth", "2"]
        running = [subprocess.Popen(words, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL) for _ in range(3)]
        try:
            eventually(lambda: room.held() >= 3 << 28, "all have allocated")
            room.wait(0.4)
            room.limit(room.held() * 6 // 10)
            assert room.held() <= (3 << 28) * 6 // 10
            if turns == "on":
                eventually(lambda: room.figures().get("memory_turns", 0) > 6, "they have turns")
                found = room.figures()
                assert found["working_set"] > 0
                assert found["turn_fetched_bytes"] > 0
                assert "turn_missed_bytes" in found
            else:
                finished = room.figures()["finished"]
                eventually(lambda: room.figures()["finished"] > finished + 100, "they go on")
                assert "memory_turns" not in room.figures()
            room.limit(None)
        finally:
            for one in running:
                one.terminate()
                one.wait(BUDGET_S)


def test_a_program_that_dies_says_what_it_said_last(lab: real.GpuLab) -> None:
    with pytest.raises(Unavailable, match="out of memory"), lab.critical(PYTHON, "dies"):
        pass


def test_unified_memory_stays_far_below_what_the_card_has_free(
    lab: real.GpuLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real, "free_mib", lambda: 20_000)
    with pytest.raises(Unavailable, match="more than half"), lab.elastic([], 10_001, 64, "managed", "100", "faults"):
        pass


def test_no_nvcc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(real, "BUILD", tmp_path)
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    with pytest.raises(Unavailable, match="no nvcc"):
        real.built(real.SOURCES / "critical.cu")


@pytest.mark.parametrize("name", ["critical", "products", "copies"])
def test_the_programs_compile(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("there is no nvcc")
    monkeypatch.setattr(real, "BUILD", tmp_path)
    path = Path(real.built(real.SOURCES / f"{name}.cu"))
    when = path.stat().st_mtime_ns
    assert os.access(path, os.X_OK)
    real.built(real.SOURCES / f"{name}.cu")
    assert path.stat().st_mtime_ns == when, "not again"


# MPS, with a stand-in for its control daemon


DAEMON = """#!/bin/sh
# -f: listens until it is told to quit. Else: one command on standard input.
pipe="$CUDA_MPS_PIPE_DIRECTORY"
test -d "$CUDA_MPS_LOG_DIRECTORY" || exit 3
if [ "$1" = -f ]; then
    {first}
    mkfifo "$pipe/quit"
    echo $$ > "$pipe/control.new"
    mv "$pipe/control.new" "$pipe/control"
    read -r _ < "$pipe/quit"
    exit 0
fi
read -r words
case "$words" in
    quit*) {quit} ;;
    get_server_list) echo 77 ;;
    "get_client_list 77") printf '1\\n2\\n' ;;
esac
"""


def daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str = ":", quit: str = 'echo > "$pipe/quit"'
) -> None:
    path = tmp_path / systems.CONTROL
    path.write_text(DAEMON.format(first=first, quit=quit))
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


class Pid:
    """A program, as a system sees it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid


def test_mps_is_started_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon(tmp_path, monkeypatch)
    batch = Part(memory=True, limit="16G")
    with systems.Mps("MPS", lambda part: 30).enter() as stage:
        words = stage.words(batch)
        assert words[0] == "env"
        environment = dict(word.split("=", 1) for word in words[1:])
        pid = int(Path(environment["CUDA_MPS_PIPE_DIRECTORY"], "control").read_text())
        assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "30"
        assert environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=16G"
        assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT" not in " ".join(stage.words(Part()))
        stage.share([(batch, Pid(1)), (batch, Pid(2))])
        with pytest.raises(Unavailable, match="3 programs run, and 2 are clients"):
            stage.share([(batch, Pid(n)) for n in range(3)])
    assert not os.path.exists(f"/proc/{pid}")
    assert not os.path.exists(environment["CUDA_MPS_PIPE_DIRECTORY"])


def test_an_mps_that_does_not_quit_is_ended_by_its_pid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon(tmp_path, monkeypatch, quit=":")
    monkeypatch.setattr(systems, "QUIT_S", 0.3)
    with systems.Mps().enter() as stage:
        environment = dict(word.split("=", 1) for word in stage.words(Part())[1:])
        pid = int(Path(environment["CUDA_MPS_PIPE_DIRECTORY"], "control").read_text())
    assert not os.path.exists(f"/proc/{pid}")


def test_an_mps_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as other:
        other.setenv("PATH", os.fspath(tmp_path))
        with pytest.raises(Unavailable, match="there is no nvidia-cuda-mps-control"), systems.Mps().enter():
            pass
    daemon(tmp_path, monkeypatch, first='echo "Cannot find MPS server" >&2; exit 1')
    with pytest.raises(Unavailable, match="ended: Cannot find MPS server"), systems.Mps().enter():
        pass


# Without a GPU


def test_the_file_scenario() -> None:
    scenario = files.make(9, calls=20)
    found = run(scenario, {}, repetitions=1, budget=BUDGET_S)
    measured = {cell.system for cell in found.cells}
    assert {"a C libfuse server", "ggroupfs"} <= measured
    assert measured | {one.system for one in found.absences} == {one.name for one in scenario.subjects}
    for cell in found.cells:
        assert set(cell.samples[0].figures) == {f"{name}_us" for name in files.OPERATIONS}
        assert min(cell.samples[0].figures.values()) > 0
    assert os.sched_getaffinity(0) == os.sched_getaffinity(os.getppid())


def test_the_scale_scenario() -> None:
    found = run(scale.make(9, counts=(20,), idle_s=0.2), {}, repetitions=1, budget=BUDGET_S)
    (cell,) = [one for one in found.cells if one.system == "ggroupfs"]
    figures = cell.samples[0].figures
    assert set(figures) == {"mkdir_us", "list_ms", "memory_mb", "idle_percent"}
    assert figures["memory_mb"] > 5
    assert {one.system for one in (*found.cells, *found.absences)} == {"cgroup2", "ggroupfs"}


def test_the_traces_of_salus() -> None:
    found = run(salus.make(9, jobs=20), {}, repetitions=2, budget=BUDGET_S)
    fifo, srtf = (found.cell(name, {"trace": "table 2"}) for name in ("FIFO", "SRTF"))
    assert fifo is not None
    assert srtf is not None
    assert max(found.ratios(srtf, "completion_min")) < 1
    assert len(fifo.values("makespan_min")) == 2
    packed = found.cell("PACK", {"trace": "60 x superres_128"})
    assert packed is not None
    assert found.ratios(packed, "makespan_min") == [pytest.approx(1 / 2.33, rel=0.15)]
    assert found.cell("FAIR", {"trace": "60 x superres_128"}) is None


def test_table_6_of_flyt() -> None:
    found = run(flyt.make(9, seconds=30), {}, repetitions=1, budget=BUDGET_S)
    for others in flyt.OTHERS:
        kept, sliced = (found.cell(name, {"others": others}) for name in ("ggroupfs, slo", "time slicing"))
        assert kept is not None
        assert sliced is not None
        assert kept.values("latency_ratio")[0] < 1.1
        assert sliced.values("latency_ratio")[0] == pytest.approx(1 + others, rel=0.25)
        assert kept.values("others_part")[0] > 0.3


# The command


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PYTHON, "-m", "tests.bench", *words], capture_output=True, text=True, cwd=real.ROOT)


def test_what_is_measured_goes_into_a_file_with_what_it_was_measured_on(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    words = ["host", "--only", "flyt", "--out", os.fspath(out), "--repetitions", "1", "--budget", "0.5"]
    first = bench(*words)
    assert first.returncode == 0, first.stderr
    found = record.load(out.read_text())
    assert list(found.runs) == ["flyt"]
    on = found.runs["flyt"].on
    assert on["command"] == shlex.join([Path(sys.executable).name, "-m", "tests.bench", *words])
    assert {"cpu", "cpus", "kernel", "python", "date"} <= set(on)
    # For sources without their history the commit is unknown.
    assert ("commit" in on) == ((real.ROOT / ".git").exists() and shutil.which("git") is not None)
    assert str(on["date"])[:4] >= str(time.gmtime().tm_year)


def test_names_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="there is no scenario nonsense; there are files, scale, salus, flyt"):
        command.main(["host", "--only", "nonsense", "--out", os.fspath(tmp_path / "out")])


def test_keep_and_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.support.measured import measured, noisy, of

    committed, fresh = tmp_path / "benchmarks" / "record.json", tmp_path / "bench.json"
    monkeypatch.setattr(command, "COMMITTED", committed)
    command.write(fresh, of(measured(noisy(1, 0.02))))
    assert command.main(["keep", os.fspath(fresh)]) == 0
    assert committed.read_text() == fresh.read_text()
    assert command.main(["check", os.fspath(fresh)]) == 0
    command.write(fresh, of(measured(noisy(2, 0.02, 1.5))))
    capsys.readouterr()
    assert command.main(["check", os.fspath(fresh)]) == 1
    told = capsys.readouterr().out
    assert told.count("worse  latency-decode load=") == told.count("\nworse") + 1 == 2
    assert "8 ratios compared in latency-decode: 2 worse, 0 better, 0 gone" in told
    command.write(fresh, of(measured(noisy(2, 0.02), "pareto")))
    with pytest.raises(SystemExit, match="no scenario in common"):
        command.main(["check", os.fspath(fresh)])
    fresh.write_text("{}")
    with pytest.raises(SystemExit, match="no record of schema"):
        command.main(["keep", os.fspath(fresh)])
