"""The capacity of a node, computed from a tree of plain files: what counts, and each engine's output form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ggroupfs.cli import FAILED, OK, USAGE, main

GIB = 1 << 30


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Three GPUs: one with 10 GiB in use, one empty, one lost."""
    (tmp_path / "ggroup.backend").write_text("gpu soft\n")
    (tmp_path / "ggroup.capabilities").write_text("gmem.limit.high enforced\ncompute.migrate unsupported\n")
    for index, (used, present) in enumerate(((10, 1), (0, 1), (0, 0))):
        gpu = tmp_path / "gpus" / str(index)
        gpu.mkdir(parents=True)
        (gpu / "name").write_text('H100 "80"\n')
        (gpu / "gmem.capacity").write_text(f"{80 * GIB}\n")
        (gpu / "gmem.current").write_text(f"{used * GIB}\n")
        (gpu / "gpu.events").write_text(f"present {present}\nlost {1 - present}\n")
    return tmp_path


def told(tree: Path, form: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["node", "--mount", str(tree), "--format", form]) == OK
    return capsys.readouterr().out


def test_a_lost_gpu_has_no_capacity(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(told(tree, "json", capsys)) == {
        "gpus": 2,
        "lost": [2],
        "models": ['H100 "80"'],
        "memory_bytes": 160 * GIB,
        "free_bytes": 150 * GIB,
        "free_most_bytes": 80 * GIB,
        "enforced": ["gmem.limit.high"],
        "share": 200,
        "healthy": False,
    }
    (tree / "gpus/2/gpu.events").write_text("present 1\nlost 1\n")
    back = json.loads(told(tree, "json", capsys))
    assert (back["gpus"], back["lost"], back["healthy"]) == (3, [], True)


def test_a_node_without_a_gpu_is_not_healthy(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for index in range(2):
        (tree / f"gpus/{index}/gpu.events").write_text("present 0\nlost 1\n")
    node = json.loads(told(tree, "json", capsys))
    assert (node["gpus"], node["healthy"], node["free_most_bytes"]) == (0, False, 0)


def test_ray_takes_an_object_of_numbers(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(told(tree, "ray", capsys)) == {"ggroup_gib": 160, "ggroup_share": 200}


def test_dask_takes_names_and_numbers(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = [word.split("=") for word in told(tree, "dask", capsys).split()]
    assert {name: float(value) for name, value in pairs} == {"GGROUP_GIB": 160, "GGROUP_SHARE": 200}


def test_condor_takes_attributes_and_a_dash(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    *lines, end = told(tree, "condor", capsys).splitlines()
    assert end == "-"
    found = dict(line.split(" = ", 1) for line in lines)
    assert found["GGroupHealthy"] == "false"
    assert found["GGroupFreeMostGiB"] == "80"
    assert found["GGroupModels"] == r'"H100 \"80\""'
    assert found["GGroupEnforced"] == '"gmem.limit.high"'


def test_where_no_tree_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["node", "--mount", str(tmp_path)]) == FAILED
    assert "no ggroup tree is mounted there" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["node", "--format", "slurm"])
    assert ended.value.code == USAGE
