"""Experiment: what the library costs a training that the CPU limits, thread by thread and call by call.

    OUT=DIR PYTHONPATH=$PWD python3 tests/experiments/overhead.py [ROUNDS]     as root, on a GPU, after `make cuda`

Programs without the library, with it and no daemon, and with both take turns of five steps on the same CPUs. Each says
how long its threads ran in its steps, and waited for a CPU (schedstat of /proc), which tells work from waits and where
it is. One more program runs with a library that counts its calls. The same data is in $OUT/overhead.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[2]
sys.path.insert(0, os.fspath(HERE))

LIBRARY = HERE / "build" / "cuda" / "libggroup-cuda.so"
STEPS = 5
"""Steps of a turn."""
KINDS = ("plain", "library", "managed")
ORDER = (*KINDS, *reversed(KINDS)) * 2
"""Programs, in the order of their turns."""
ON = ("taskset", "--cpu-list", "2-5")
COUNTED = r"""
struct call_count { const char *name; unsigned long calls; struct call_count *next; };
extern struct call_count *call_counts;
static inline void call_counted(struct call_count *one)
{
	if (!__atomic_fetch_add(&one->calls, 1, __ATOMIC_RELAXED)) {
		struct call_count *next = __atomic_load_n(&call_counts, __ATOMIC_RELAXED);

		do
			one->next = next;
		while (!__atomic_compare_exchange_n(&call_counts, &next, one, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED));
	}
}
"""
"""What the counting library has in wrapper.h besides."""
TOLD = r"""
#include <stdio.h>
#include <stdlib.h>
#include "wrapper.h"
struct call_count *call_counts;
__attribute__((destructor)) static void tell_calls(void)
{
	FILE *file = getenv("CALLS") ? fopen(getenv("CALLS"), "w") : NULL;

	for (struct call_count *one = call_counts; file && one; one = one->next)
		fprintf(file, "%lu %s\n", one->calls, one->name);
	if (file)
		fclose(file);
}
"""
"""What it has in library.c."""


def threads() -> dict[str, tuple[str, int, int]]:
    """Return each thread of this process with its name, and the nanoseconds that it ran and waited for a CPU."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            ran, waited, _ = (task / "schedstat").read_text().split()
            found[task.name] = (task / "comm").read_text().strip(), int(ran), int(waited)
    return found


def work() -> None:
    """Do as many steps as each line of the input says, and tell what they took."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    from tests.t7_nvidia.workload import Train

    train, number = Train(), 0
    print("{}", flush=True)
    for line in sys.stdin:
        before, steps = threads(), []
        for _ in range(int(line)):
            begun = time.perf_counter()
            train.step(number)
            steps.append(time.perf_counter() - begun)
            number += 1
        ran: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        main = str(os.getpid())
        for tid, (name, ns, waited) in threads().items():
            was = before.get(tid, (name, 0, 0))
            one = ran["main" if tid == main else name]
            one[0] += ns - was[1]
            one[1] += waited - was[2]
        print(json.dumps({"steps": steps, "threads": ran}), flush=True)


class Program:
    """A running worker."""

    def __init__(self, before: Sequence[str], environment: Mapping[str, str]) -> None:
        words = [*ON, *before, sys.executable, os.fspath(Path(__file__).resolve()), "work"]
        there = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}"}
        self.process = subprocess.Popen(
            words, env={**there, **environment}, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.told: list[dict[str, Any]] = []

    def hear(self) -> dict[str, Any]:
        """Return what it says next."""
        assert self.process.stdout is not None
        return dict(json.loads(self.process.stdout.readline()))

    def turn(self, steps: int) -> dict[str, Any]:
        """Have it do some steps."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        return self.hear()

    def end(self) -> None:
        """End it, as its input does."""
        self.process.communicate(timeout=60)


@contextlib.contextmanager
def mounted(place: Path) -> Iterator[list[str]]:
    """Mount ggroupfs; yield the words before a program that it manages."""
    place.mkdir()
    daemon = subprocess.Popen([sys.executable, "-m", "ggroupfs", "mount", os.fspath(place)], cwd=HERE)
    try:
        while not (place / "slice").exists():
            assert daemon.poll() is None, "no mount"
            time.sleep(0.1)
        yield [sys.executable, "-m", "ggroupfs", "run", "--mount", os.fspath(place), "--"]
    finally:
        subprocess.run([sys.executable, "-m", "ggroupfs", "umount", os.fspath(place)], cwd=HERE, check=False)
        daemon.wait(30)


def counting(place: Path) -> Path:
    """Build a library that counts its calls, and return it."""
    source = place / "library"
    shutil.copytree(HERE / "backend" / "cuda" / "library", source)
    header, body = source / "entry" / "wrapper.h", source / "library.c"
    text = header.read_text().replace("/* The visibility of a wrapper", COUNTED + "\n/* The visibility of a wrapper", 1)
    first = "\tdo {\t\t\t\t\t\t\t\\\n\t\tlibrary_begin();"
    assert first in text
    count = "\tdo {\t\\\n\t\tstatic struct call_count count_ = { #name, 0, 0 };\t\\\n\t\tcall_counted(&count_);\t\\\n"
    header.write_text(text.replace(first, f"{count}\t\tlibrary_begin();", 1))
    body.write_text(body.read_text() + TOLD)
    subprocess.run(["make", "-s", "-j8", "-C", os.fspath(source), f"OUT={place}"], check=True)
    return place / LIBRARY.name


def calls(place: Path) -> dict[str, float]:
    """Return the calls of each entry point in a step."""
    library, told = counting(place / "counting"), place / "calls"
    environment = {"LD_PRELOAD": os.fspath(library), "GGROUP_SOCKET": "/nonexistent", "CALLS": os.fspath(told)}
    found = []
    for turns in (10, 30):
        program = Program([], environment)
        program.hear()
        for _ in range(turns):
            program.turn(STEPS)
        program.end()
        found.append({name: int(number) for number, name in map(str.split, told.read_text().splitlines())})
    few, many = found
    each = {name: (number - few.get(name, 0)) / (20 * STEPS) for name, number in many.items()}
    return dict(sorted(((name, one) for name, one in each.items() if one > 0.05), key=lambda pair: -pair[1]))


def per_step(told: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """Return, for each thread by its name, the microseconds that it ran and waited in a step."""
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for one in told:
        for name, (ran, waited) in one["threads"].items():
            found[name][0] += ran / 1e3 / STEPS / len(told)
            found[name][1] += waited / 1e3 / STEPS / len(told)
    return {name: (ran, waited) for name, (ran, waited) in found.items() if ran > 5}


def undisturbed(told: Sequence[Mapping[str, Any]]) -> float:
    """Return the duration of a step with the CPU for itself, in microseconds: a tenth of the steps are as fast."""
    return statistics.quantiles([step for one in told for step in one["steps"][1:]], n=10)[0] * 1e6


def measure(out: Path, rounds: int) -> dict[str, Any]:
    """Measure all."""
    alone = {"LD_PRELOAD": os.fspath(LIBRARY), "GGROUP_SOCKET": "/nonexistent"}
    with mounted(out / "mount") as managed:
        before = {"plain": ([], {}), "library": ([], alone), "managed": (managed, {})}
        programs = [(kind, Program(*before[kind])) for kind in ORDER]
        for _, one in programs:
            one.hear()
        for number in range(rounds + 2):
            for _, one in programs:
                told = one.turn(STEPS)
                if number >= 2:
                    one.told.append(told)
        for _, one in programs:
            one.end()
    found: dict[str, Any] = {"programs": [], "ratios": {}}
    for kind, one in programs:
        row = {"kind": kind, "undisturbed_us": undisturbed(one.told), "threads_us": per_step(one.told)}
        found["programs"].append(row)
        each = ", ".join(f"{name} {ran:.0f}+{waited:.0f}" for name, (ran, waited) in row["threads_us"].items())
        print(f"{kind:8} {row['undisturbed_us']:.0f} us a step; ran + waited, us: {each}", flush=True)
    for kind in KINDS[1:]:
        mine = [one for name, one in programs if name == kind]
        plain = [one for name, one in programs if name == "plain"]
        ratios = [
            sum(statistics.median(one.told[number]["steps"]) for one in mine)
            / sum(statistics.median(one.told[number]["steps"]) for one in plain)
            for number in range(rounds)
        ]
        best = sum(undisturbed(one.told) for one in mine) / sum(undisturbed(one.told) for one in plain)
        found["ratios"][kind] = {"undisturbed": best, "medians": statistics.median(ratios)}
        print(f"{kind}: {best:.4f} undisturbed, medians {statistics.median(ratios):.4f}", flush=True)
    return found


def main() -> None:
    if sys.argv[1:] == ["work"]:
        work()
        return
    out = Path(os.environ.get("OUT") or "/tmp/overhead")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        found = measure(Path(place), int(sys.argv[1]) if sys.argv[1:] else 40)
        found["calls"] = calls(Path(place))
    for name, number in found["calls"].items():
        print(f"{number:9.1f} a step: {name}")
    (out / "overhead.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
