"""The papers' programs at small shapes on the CPU, where torch and transformers are, as on machines with a GPU."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bench.papers.lab import GO, OVER, PROGRAMS, READY, SMALL, STOP, WRONG

torch = pytest.importorskip("torch", reason="the programs need torch")
READY_S = 300.0
LONGEST = 40
"""Offset of gang.py."""


class Running:
    """A program on the CPU, and its page."""

    def __init__(self, tmp_path: Path, name: str, *options: str) -> None:
        self.page = tmp_path / "page"
        self.page.write_bytes(bytes(4096))
        command = [sys.executable, os.fspath(PROGRAMS / f"{name}.py"), os.fspath(self.page), *options]
        self.log = tmp_path / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen([*command, "--device", "cpu"], stderr=log)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def word(self, offset: int, kind: str = "<Q") -> int:
        with self.page.open("rb") as file:
            file.seek(offset)
            return int(struct.unpack(kind, file.read(struct.calcsize(kind)))[0])

    def set(self, offset: int, value: int) -> None:
        with self.page.open("r+b") as file:
            file.seek(offset)
            file.write(struct.pack("<I", value))

    def until(self, offset: int, value: int, kind: str = "<Q") -> None:
        deadline = time.monotonic() + READY_S
        while self.word(offset, kind) < value:
            assert self.process.poll() is None, self.log.read_text()[-2000:]
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def end(self) -> None:
        """Told to stop, it ends well, and what it computed is right."""
        self.set(STOP, 1)
        assert self.process.wait(120) == 0, self.log.read_text()[-2000:]
        assert self.word(WRONG) == 0


@pytest.mark.parametrize("name", ["diffusion", "finetune"])
def test_a_loop(tmp_path: Path, name: str) -> None:
    with Running(tmp_path, name, *SMALL[name]) as run:
        run.until(READY, 1)
        run.until(0, 3)
        run.end()


@pytest.mark.parametrize("words", ["vae train --batch 4", "superres infer", "seq2seq train --batch 2"])
def test_a_model(tmp_path: Path, words: str) -> None:
    with Running(tmp_path, "zoo", *words.split(), "--iterations", "3") as run:
        assert run.process.wait(READY_S) == 0, run.log.read_text()[-2000:]
        assert (run.word(0), run.word(WRONG)) == (3, 0)


def test_a_server_answers_each_request_in_full(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the server is transformers'")
    pytest.importorskip("psutil", reason="transformers asks it how much memory a CPU has")
    requests = [{"at": 0.1 * n, "prompt": 10 + 40 * n, "output": 3 + n} for n in range(6)]
    (tmp_path / "1.json").write_text(json.dumps({"limit_s": 120.0, "requests": requests}))
    with Running(tmp_path, "llm", os.fspath(tmp_path), "--shape", "small", "--kv-mib", "4") as run:
        run.until(READY, 1)
        run.set(GO, 1)
        run.until(OVER, 1, "<I")
        run.end()
    answers = json.loads((tmp_path / "1.result.json").read_text())
    assert [len(one["itl_s"]) + 1 for one in answers] == [one["output"] for one in requests]
    assert all(one["ttft_s"] > 0 and min(one["itl_s"]) > 0 for one in answers)


def test_a_request_that_is_not_answered_in_full_has_the_tokens_that_it_had(tmp_path: Path) -> None:
    """At the end of a round, and the next round goes on without it."""
    pytest.importorskip("transformers", reason="the server is transformers'")
    pytest.importorskip("psutil", reason="transformers asks it how much memory a CPU has")
    long, brief = {"at": 0.0, "prompt": 10, "output": 60000}, {"at": 0.0, "prompt": 10, "output": 3}
    (tmp_path / "1.json").write_text(json.dumps({"limit_s": 3.0, "requests": [long]}))
    (tmp_path / "2.json").write_text(json.dumps({"limit_s": 120.0, "requests": [brief]}))
    with Running(tmp_path, "llm", os.fspath(tmp_path), "--shape", "small", "--kv-mib", "64") as run:
        run.until(READY, 1)
        for number in (1, 2):
            run.set(GO, number)
            run.until(OVER, number, "<I")
        run.end()
    (first,), (second,) = (json.loads((tmp_path / f"{number}.result.json").read_text()) for number in (1, 2))
    assert 0 < first["ttft_s"] < 3
    assert 0 < len(first["itl_s"]) < 60000 - 1
    assert len(second["itl_s"]) == 2


def test_a_gang_of_two(tmp_path: Path) -> None:
    """Its ranks do the same steps, and all end when the first is told to."""
    folders = [tmp_path / str(rank) for rank in (0, 1)]
    for folder in folders:
        folder.mkdir()
    words = ["2", os.fspath(tmp_path / "meet"), "--mib", "1"]
    with Running(folders[0], "gang", "0", *words) as first, Running(folders[1], "gang", "1", *words) as second:
        for run in (first, second):
            run.until(READY, 1)
            run.until(0, 2)
        first.set(STOP, 1)
        assert [run.process.wait(120) for run in (first, second)] == [0, 0], first.log.read_text()[-2000:]
        assert first.word(0) == second.word(0)
        assert [run.word(WRONG) for run in (first, second)] == [0, 0]
        assert min(run.word(LONGEST) for run in (first, second)) > 0


def test_a_nursery_does_jobs_and_tells_which_fail(tmp_path: Path) -> None:
    vae = {"at": 0.0, "model": "vae", "mode": "train", "batch": 2, "iterations": 2}
    rated = {"at": 0.0, "model": "superres", "mode": "infer", "batch": 1, "rate": 5.0, "seconds": 1.0, "seed": 1}
    for number, order in enumerate(
        (
            {"most": 2, "together": True, "jobs": [vae, rated]},
            {"most": 1, "together": False, "jobs": [{**vae, "at": 0.2}, {**vae, "model": "none_such"}]},
        ),
        1,
    ):
        (tmp_path / f"{number}.json").write_text(json.dumps(order))
    pytest.importorskip("torchvision", reason="the models are torchvision's")
    with Running(tmp_path, "nursery", os.fspath(tmp_path)) as run:
        run.until(READY, 1)
        for number in (1, 2):
            run.set(GO, number)
            run.until(OVER, number, "<I")
        run.end()
    first, second = (json.loads((tmp_path / f"{number}.result.json").read_text()) for number in (1, 2))
    assert [one["error"] for one in first] == [None, None]
    assert first[1]["latencies"]
    assert second[0]["error"] is None
    assert "none_such" in second[1]["error"]
    assert second[0]["began"] >= second[1]["ended"], "one at a time"


def test_the_shapes_are_those_that_were_published(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(os.fspath(PROGRAMS))
    from diffusion import SHAPES, UNet  # type: ignore[import-not-found]

    counts = {}
    for name in ("sd-1.5", "sdxl"):
        with torch.device("meta"):
            counts[name] = sum(one.numel() for one in UNet(SHAPES[name]).parameters())
    assert counts == {"sd-1.5": 859_520_964, "sdxl": 2_567_463_684}
    pytest.importorskip("transformers")
    from llm import SHAPES as MODELS  # type: ignore[import-not-found]
    from llm import config_of
    from transformers import LlamaForCausalLM

    for name, millions in (("llama-3-8b", 8030), ("llama-3.2-3b", 3213), ("llama-3.2-1b", 1236)):
        assert name in MODELS
        with torch.device("meta"):
            count = sum(one.numel() for one in LlamaForCausalLM(config_of(name)).parameters())
        assert round(count / 1e6) == millions


def test_an_image_that_is_not_the_first_one_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(os.fspath(PROGRAMS))
    from diffusion import SHAPES, STEPS, Loop  # type: ignore[import-not-found]

    loop = Loop(SHAPES["small"], 1, "cpu", 1)
    for number in range(2 * STEPS):
        loop.step(number)
    assert loop.wrong() == 0
    with torch.inference_mode():
        loop.last[0, 0, 0, :3] += 1
    assert loop.wrong() == 3
