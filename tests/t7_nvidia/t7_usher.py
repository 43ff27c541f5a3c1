"""Programs that start in a frozen slice and launch as their first act run no kernel, with the library or without."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from backend.door.client import facts_of
from ggroupfs.text.names import is_number, slice_directory
from tests.support.cgroups import cgroup, slice_path
from tests.support.mounted import Mounted, mounted
from tests.t7_nvidia.conftest import WANT, Worker, wait_for
from tests.t7_nvidia.programs import program, run_in

ROUNDS, AT_ONCE = 10, 20
LATE_S = 0.5
"""Seconds within which a program that is not held has launched: it is in the tree 34 to 155 ms after its context."""


@pytest.fixture(scope="module")
def mount(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    with mounted(tmp_path_factory.mktemp("ggroup"), "usher=cuda", gpu="nvidia") as found:
        yield found


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """One cgroup for all of them: a slice that was made belongs to its cgroup, and not to a later one of that name."""
    with cgroup(f"ggroup-t7-usher-{os.getpid()}") as path:
        yield path


def freeze(mount: Mounted, place: Path, value: int) -> None:
    """Freeze or thaw on every GPU, by number: which one a program will use is unknown."""
    directory = mount / slice_directory(slice_path(place))
    directory.mkdir(parents=True, exist_ok=True)
    for gpu in filter(is_number, os.listdir(mount / "gpus")):
        (directory / gpu / "compute.freeze").write_text(f"{value}")


@pytest.mark.parametrize("library", [False, True])
def test_none_of_200_runs_a_kernel(mount: Mounted, place: Path, binary: Path, library: bool) -> None:
    enter = ["sh", "-c", f'echo $$ > {place}/cgroup.procs; exec "$@"', "sh"]
    words = [*enter, *(run_in(mount) if library else ()), os.fspath(binary), "PAGE", "200"]
    freeze(mount, place, 1)
    for _ in range(ROUNDS):
        with contextlib.ExitStack() as stack:
            runs = [stack.enter_context(program(*words)) for _ in range(AT_ONCE)]
            workers = [Worker(run.process, run.page) for run in runs]
            for worker in workers:
                worker.set(WANT, 1)
            wait_for(lambda: facts_of(mount.path)["usher.waiting"] == str(AT_ONCE), "all of them wait")
            time.sleep(LATE_S)
            assert [(worker.launched, worker.finished) for worker in workers] == [(0, 0)] * AT_ONCE
    freeze(mount, place, 0)


@pytest.mark.parametrize("library", [False, True])
def test_one_that_is_thawed_runs(mount: Mounted, place: Path, binary: Path, library: bool) -> None:
    enter = ["sh", "-c", f'echo $$ > {place}/cgroup.procs; exec "$@"', "sh"]
    words = [*enter, *(run_in(mount) if library else ()), os.fspath(binary), "PAGE", "200"]
    freeze(mount, place, 1)
    with program(*words) as run:
        worker = Worker(run.process, run.page)
        worker.set(WANT, 1)
        wait_for(lambda: facts_of(mount.path)["usher.waiting"] == "1", "it waits")
        freeze(mount, place, 0)
        worker.started()
        worker.drained()
