"""Experiment: what stands after a kernel of one program has written to an illegal address, on the stock driver.

    OUT=DIR PYTHONPATH=$PWD python3 tests/experiments/faults.py     all cells that fit into LIMIT_S (150) seconds
    CELLS="mps tree" ...     the cells whose names begin with one of these

A cell has programs (tests/t7_nvidia/placed.cu) of which one has the fault: by themselves, as clients of MPS servers of
two control daemons, and in the tree, in two spatial slices or in none, with the scheduler and without. Each line has
the kernels of each program in each LOOK_S: before the fault, and after it; its error; and whether it came to its end.
The same is in $OUT/faults.json. As root; where there are several GPUs, within tests/t7_nvidia/one_gpu.sh.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[2]
sys.path.insert(0, os.fspath(HERE))

from tests.bench.gpu.systems import Mps, MpsStage  # noqa: E402
from tests.experiments.celled import Cells  # noqa: E402
from tests.support.mounted import Mounted, mounted  # noqa: E402
from tests.t7_nvidia.placing import FAULT, SIZE  # noqa: E402
from tests.t7_nvidia.programs import ERROR, STOP, Program, program, run_in  # noqa: E402
from tests.t7_nvidia.spaces import SAID, SMALL, placed_in, spatial  # noqa: E402

LOOK_S, LOOKS_BEFORE, LOOKS = 0.5, 4, 12
"""Seconds of a look, and how many there are before the fault and after it."""
STARTS_S, ENDS_S = 30.0, 10.0
"""Seconds for a program to come to its first kernel, and to its end once it is told to."""
CELL_S = 30.0
"""Seconds that a cell may take; with less left it is left out."""

Programs = Mapping[str, Program]


class Failed(Exception):
    """A program that was to run did not."""


@contextlib.contextmanager
def running(binary: str, each: Mapping[str, Sequence[str]]) -> Iterator[Programs]:
    """Run a program behind the words of each name, and yield them once all have had a kernel."""
    with contextlib.ExitStack() as stack:
        start = lambda words: stack.enter_context(program(*words, binary, "PAGE", *SMALL, size=SIZE))  # noqa: E731
        runs = {name: start(words) for name, words in each.items()}
        end = time.monotonic() + STARTS_S
        while not all(run.passes for run in runs.values()):
            if time.monotonic() > end or any(run.process.poll() is not None for run in runs.values()):
                raise Failed(f"no kernels: {[name for name, run in runs.items() if not run.passes]}")
            time.sleep(0.01)
        yield runs


def looked(runs: Programs, looks: int) -> Mapping[str, list[int]]:
    """Return the kernels that each program finished in each of some looks."""
    found = dict[str, list[int]]((name, []) for name in runs)
    for _ in range(looks):
        before = {name: run.passes for name, run in runs.items()}
        time.sleep(LOOK_S)
        for name, run in runs.items():
            found[name].append(run.passes - before[name])
    return found


def told(runs: Programs, which: str) -> Any:
    """Have the fault in one of the programs, and return what became of each."""
    before = looked(runs, LOOKS_BEFORE)
    runs[which].set(FAULT, 1)
    after = looked(runs, LOOKS)
    for run in runs.values():
        run.set(STOP, 1)
    end, found = time.monotonic() + ENDS_S, dict[str, Any]()
    for name, run in runs.items():
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.process.wait(max(0.01, end - time.monotonic()))
        ends = {"error": run.u32(ERROR), "wrong": run.u64(16), "code": run.process.poll()}
        found[name] = {"before": before[name], "after": after[name], **ends}
    return found


class Experiment(Cells):
    """The cells, and the program in them."""

    def __init__(self, out: Path) -> None:
        super().__init__(out / "faults.json")
        self._binary = os.fspath(out / "placed")
        source, include = HERE / "tests/t7_nvidia/placed.cu", HERE / "backend/cuda/library"
        subprocess.run(["nvcc", "-O2", "-I", include, "-o", self._binary, source, "-lcuda"], check=True)

    def plain(self) -> Any:
        """Programs by themselves."""
        with running(self._binary, {"faulty": [], "second": [], "third": []}) as runs:
            return told(runs, "faulty")

    def mps(self, *, of_one: bool) -> Any:
        """Clients of one control daemon or of two, and a program beside."""
        with contextlib.ExitStack() as stack:
            daemons = [stack.enter_context(Mps().enter()) for _ in range(1 if of_one else 2)]
            names = [["faulty", "beside it"], ["other", "beside other"]]
            words = {name: _client(daemon) for daemon, each in zip(daemons, names, strict=False) for name in each}
            return told(stack.enter_context(running(self._binary, {**words, "outside": []})), "faulty")

    def tree(self, options: Sequence[str], *, is_spatial: bool) -> Any:
        """Programs in the tree, in two spatial slices or in none, and one without the library."""
        with contextlib.ExitStack() as stack:
            place = stack.enter_context(tempfile.TemporaryDirectory(prefix="ggroupfs-faults-"))
            mount = stack.enter_context(mounted(Path(place), *options, gpu="nvidia", expect_errors=SAID))
            outside = stack.enter_context(running(self._binary, {"outside": []}))
            if not is_spatial:
                words = run_in(mount)
                beside = stack.enter_context(running(self._binary, {"faulty": words, "second": words, "third": words}))
            else:
                beside = self._spaces(stack, mount)
            return told({**beside, **outside}, "faulty")

    def _spaces(self, stack: contextlib.ExitStack, mount: Mounted) -> Programs:
        runs = {}
        for slice_, names in (("other", ["other", "beside other"]), ("fault", ["faulty", "beside it"])):
            name, _ = stack.enter_context(spatial(mount, slice_))
            runs |= {one: stack.enter_context(placed_in(mount, self._binary, name)) for one in names}
        return runs


def _client(stage: MpsStage) -> list[str]:
    return ["env", *(f"{key}={value}" for key, value in stage.environment.items())]


def main() -> None:
    """Run the cells that are asked for."""
    out = Path(os.environ.get("OUT") or "/tmp/faults")
    out.mkdir(parents=True, exist_ok=True)
    experiment = Experiment(out)
    experiment.cell("mps", CELL_S, lambda: experiment.mps(of_one=False))
    experiment.cell("tree", CELL_S, lambda: experiment.tree([], is_spatial=True))
    experiment.cell("one-mps", CELL_S, lambda: experiment.mps(of_one=True))
    experiment.cell("scheduler-off", CELL_S, lambda: experiment.tree(["scheduler=off"], is_spatial=True))
    experiment.cell("plain", CELL_S, experiment.plain)
    experiment.cell("no-spaces", CELL_S, lambda: experiment.tree([], is_spatial=False))


if __name__ == "__main__":
    main()
