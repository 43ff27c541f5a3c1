"""Engines that manage many machines, as released on PyPI: they place jobs by the output of `ggroupfs node`, and each
job is held to its limit."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import classad2
import pytest

from tests.support.command import ok
from tests.support.mounted import Mounted, eventually, mounted, mountpoint

MIB = 1 << 20
PAGE = 2 * MIB
"""Bytes by which a process may exceed its limit while memory is taken for its allocation."""
LIMIT = "64M"
ROOT = Path(__file__).resolve().parents[2]
ENDS_S = 600
"""Seconds within which a program that does not hang has ended, however busy the machine is."""


@pytest.fixture(scope="module")
def tree() -> Iterator[Mounted]:
    with mountpoint() as path, mounted(path, "soft.gmem=8G") as mount:
        yield mount


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a short name, since Ray has sockets in it."""
    path = Path(tempfile.mkdtemp(prefix="gg-"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def environment(home: Path) -> dict[str, str]:
    """Return the environment of an engine that uses no network and keeps nothing at home."""
    own = {"HOME": str(home), "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    return os.environ | own | {"PYTHONWARNINGS": "ignore"}


def run(name: str, *words: object, home: Path) -> dict:
    """Run a program of tests/support/engines to its end; return its last output."""
    command = [sys.executable, "-m", f"tests.support.engines.{name}", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(home), timeout=ENDS_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_ray_places_what_fits_and_each_task_has_its_limit(tree: Mounted, place: Path) -> None:
    """The example of docs/clusters.md, where a task's interpreter is `ggroupfs run`."""
    found = run("on_ray", tree.path, place, home=place)
    assert found["node"] == {"ggroup_gib": 8, "ggroup_share": 100}
    assert (found["running"], found["free"]["ggroup_gib"], found["free"]["ggroup_share"]) == (2, 2, 50)
    assert len(found["told"]) == 3
    for _, limit, held in found["told"]:
        assert limit == 64 * MIB
        assert 0 < held <= limit + PAGE


@contextlib.contextmanager
def started(words: list[str], home: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program of Dask's."""
    with (home / "log").open("ab") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, env=environment(home))
    try:
        yield process
    finally:
        process.terminate()
        process.wait(ENDS_S)


def test_dask_places_what_fits_and_all_tasks_of_a_worker_have_its_limit(tree: Mounted, place: Path) -> None:
    """The example of docs/clusters.md, where a worker is one process, started by `ggroupfs run`."""
    dask, file = [sys.executable, "-m", "dask"], place / "scheduler.json"
    scheduler = ["scheduler", "--host", "127.0.0.1", "--port", "0", "--scheduler-file", str(file), "--no-dashboard"]
    limited = [sys.executable, "-m", "ggroupfs", "run", "--mount", str(tree.path), "-p", f"gmem.limit.high={LIMIT}"]
    resources = ok("node", "--mount", tree.path, "--format", "dask").strip()
    worker = ["worker", "--scheduler-file", str(file), "--nthreads", "3", "--no-nanny", "--no-dashboard"]
    with started([*dask, *scheduler], place):
        eventually(file.exists, "a scheduler")
        with started([*limited, "--", *dask, *worker, "--resources", resources], place) as process:
            found = run("on_dask", file, tree.path, place, home=place)
    assert found["worker"]["has"] == {"GGROUP_GIB": 8, "GGROUP_SHARE": 100}
    assert (found["running"], found["worker"]["free"]) == (2, {"GGROUP_GIB": 2, "GGROUP_SHARE": 50})
    assert [pid for pid, _, _ in found["told"]] == [process.pid] * 3
    for _, limit, held in found["told"]:
        assert limit == 64 * MIB
        assert 0 < held <= limit + PAGE


def test_htcondor_matches_a_job_with_a_node_that_has_room(tree: Mounted) -> None:
    """The example of docs/clusters.md: the hook's output and the job's requirements, judged by HTCondor's library."""
    machine = classad2.parseOne(ok("node", "--mount", tree.path, "--format", "condor").removesuffix("-\n"))
    assert machine["GGroupHealthy"] is True
    page = (ROOT / "docs" / "clusters.md").read_text()
    (requirements,) = re.findall(r"^requirements = (.*)$", page, re.MULTILINE)
    large, small = (
        classad2.ClassAd({"Requirements": classad2.ExprTree(text)})
        for text in (requirements, requirements.replace("20", "8"))
    )
    assert machine["GGroupFreeMostGiB"] == 8
    assert (machine.matches(large), machine.matches(small)) == (False, True)
    machine["GGroupHealthy"] = False
    assert not machine.matches(small)
