"""What is done on a bare machine before a cell of tests/bench/papers is measured, and what is told of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.core.runner import Unavailable
from tests.bench.machine import ROOT
from tests.bench.papers import prepare
from tests.bench.papers.__main__ import SCENARIOS
from tests.bench.papers.lab import PROGRAMS


def test_all_programs_of_a_scenario_are_compiled_once_and_what_fails_is_told() -> None:
    made: list[str] = []

    def compile_(source: Path) -> str:
        if source.stem == "calls":
            raise Unavailable("there is no nvcc")
        made.append(source.name)
        return source.stem

    lines = list(prepare.compiled(SCENARIOS, compile_))
    assert lines[0] == "calls.cu is not compiled: there is no nvcc"
    assert lines[1].startswith(f"{len(made) + 1} CUDA programs, ")
    assert len(lines) == 2
    assert sorted(made) == sorted(set(made))
    assert {path.name for path in PROGRAMS.glob("*.cu")} - {"calls.cu"} <= set(made)
    assert next(iter(prepare.compiled(["salus"], compile_))).startswith("0 CUDA programs")


def test_every_scenario_says_what_it_compiles() -> None:
    assert set(prepare.COMPILED) == set(SCENARIOS)
    sources = [path for several in prepare.COMPILED.values() for path in several]
    assert all(path.exists() for path in sources)
    texts = {path: path.read_text() for path in (ROOT / "tests/bench/papers").glob("*.py")}
    named = {path.name for path in sources}
    for path, text in texts.items():
        assert {word for word in ("calls.cu", "ballast.cu", "products.cu") if f'"{word}"' in text} <= named, path


def test_torch_that_does_not_come_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "WARM", "import sys; sys.exit('no torch, %s')")
    assert prepare.warmed("cuda") == "torch: no torch, cuda"
    monkeypatch.setattr(prepare, "WARM", "import time; time.sleep(600) # %r")
    monkeypatch.setattr(prepare, "WARM_S", 0.1)
    assert prepare.warmed("cuda") == "torch: not imported after 0 s"
    monkeypatch.setattr(prepare, "WARM", "import os; print(os.environ['HF_HUB_OFFLINE'], %r)")
    monkeypatch.setattr(prepare, "WARM_S", 60.0)
    assert prepare.warmed("cuda").startswith("torch and transformers 1 cuda, ")


def test_host_memory_is_used_once(tmp_path: Path) -> None:
    assert prepare.grown(1).startswith("host memory ")
    (tmp_path / "meminfo").write_text("MemTotal:       1024 kB\nMemFree: 1 kB\n")
    assert prepare.meminfo("MemTotal", tmp_path / "meminfo") == 1 << 20
    assert prepare.meminfo("MemGone", tmp_path / "meminfo") == 0


def test_what_a_machine_lacks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare.shutil, "which", lambda *words, **more: None)
    monkeypatch.setattr(prepare.importlib.util, "find_spec", lambda name: None)
    lines = list(prepare.lacking("cpu"))
    assert "there is no fusermount3" in lines
    assert "there is no transformers" in lines
    assert any(line.endswith("nothing is measured with MPS") for line in lines)
    assert "attrs" in prepare.versions(["attrs", "no-such-package"])
