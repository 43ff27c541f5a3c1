#!/usr/bin/env python3
"""What is to be shown of time on a GPU: tails of short requests, what fills keeps, and quotas.

    python3 tests/experiments/time_gpu.py --plan [CELL...]     the cells and the seconds that they take, without a GPU
    python3 tests/experiments/time_gpu.py [CELL...]            measure them, as root; OUT: a folder for the results
    python3 tests/experiments/time_gpu.py --merge [FILE...]    the results in these files, or in OUT, and the plot
    python3 tests/experiments/time_gpu.py --self-test          without a GPU: the plan, and what comes of several files;
                                                               and tails by programs that only pretend, as root

CELL: names of cells, or what they begin with. short, long, quotas and beside are pieces, each of which is one run.
Results of one product are pooled, whichever runs they are of; each is written down as it comes.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, os.fspath(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([os.fspath(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

from tests.experiments.timed import cells, results  # noqa: E402

OUT = Path(os.environ.get("OUT") or "/tmp/time-gpu")
PIECE_S, ALL_S = 500.0, 1_500.0
"""Seconds of a piece, and of all of them, at most."""


def measure(words: Sequence[str]) -> None:
    """Measure cells, one piece after the other."""
    from tests.experiments.timed.ceilings import Ceilings
    from tests.experiments.timed.tails import Tails, build

    mine, found, began = cells.chosen(words), results.Found(OUT), time.monotonic()
    print(cells.plan(mine).splitlines()[-1], flush=True)
    for piece, service_us in (("short", 1550), ("long", 6500)):
        if each := [one for one in mine if one.piece == piece]:
            Tails(found, build(), service_us).run(each)
    if each := [one for one in mine if one.piece in ("quotas", "beside")]:
        Ceilings(found, OUT).run(each)
    print(f"{time.monotonic() - began:.0f} s", flush=True)


def merge(words: Sequence[str]) -> None:
    """Tell of the results in files together, and draw the plot."""
    paths = [Path(word) for word in words] or sorted(OUT.rglob("time-*.json"))
    each = results.merged(paths)
    print(results.told(each))
    if results.plot(each, cells.KNOB_CELLS, OUT / "knob.svg"):
        print(OUT / "knob.svg")


def self_test() -> None:
    """The plan keeps to its time, and results of one product are pooled."""
    assert len({one.name for one in cells.CELLS}) == len(cells.CELLS)
    total = 0.0
    for piece in dict.fromkeys(one.piece for one in cells.CELLS):
        seconds = float(cells.plan(cells.chosen([f"{piece}/"])).split("all: ")[1].split()[0])
        assert seconds <= PIECE_S, (piece, seconds)
        total += seconds
    assert total <= ALL_S, total
    for tail in cells.TAILS:
        assert tail.requests >= (10_000 if tail.load == 0.8 else 2_000)
    with tempfile.TemporaryDirectory() as name:
        for number in range(2):
            found = results.Found(Path(name) / str(number))
            name_of = f"{cells.TAILS[0]} hold={cells.HOLD}"
            alone = [1.0] * 980 + [10.0] * 20
            beside = [1.0] * 980 + [11.0 + number] * 20
            figures = {"passes": 400.0, "full": 1000.0, "took_s": 1.0, "service_s": 0.0005}
            found.add("tail", name_of, ms=[beside], alone_ms=[alone], **figures)
            found.add("quota", "x", done=0.3 + 0.01 * number, wanted=0.3, period_us=100_000)
        other = results.Found(Path(name) / "2")
        other._digest = "another"
        other.add("quota", "y", done=1.0, wanted=0.3, period_us=100_000)
        each = results.merged(Path(name).rglob("time-*.json"), results.digest())
        assert set(each) == {("tail", name_of), ("quota", "x")}
        assert results.ratios(each["tail", name_of]) == [1.2]
        assert abs(results.left(each["tail", name_of]) - 0.8) < 1e-9
        text = results.told(each)
        print(text)
        assert "2000 requests; OVER 1.05, UNDER 0.88" in text
        assert "0.3000 0.3100 of 0.3; NOT WITHIN 3%" in text
    dry()
    print("ok")


def dry() -> None:
    """Short requests by ggroupfs and by time slicing, of programs that only pretend, beside a software GPU."""
    import tests.t7_nvidia.programs as programs
    from tests.experiments.bursts import FAKE
    from tests.experiments.timed import tails

    with tempfile.TemporaryDirectory() as name:
        binary = Path(name) / "requests"
        binary.write_text(FAKE.replace("{python}", sys.executable))
        binary.chmod(0o755)
        tails.GPU, tails.FULL_S = "soft", 0.2
        programs.run_in = lambda mount: []  # type: ignore
        programs.member = lambda mount, run: None  # type: ignore
        programs.write = lambda *words: None  # type: ignore
        mine = [one for one in cells.CELLS if one.piece == "short" and not one.session.startswith("mps")]
        tails.Tails(results.Found(Path(name)), os.fspath(binary), 1550).run(mine)
        each = results.merged(Path(name).glob("time-*.json"))
        assert len(each) == len(mine)
        assert len(results.knob(each, cells.KNOB_CELLS[0])) == len(cells.HOLDS)


if __name__ == "__main__":
    option, *rest = sys.argv[1:] or [""]
    if option == "--plan":
        print(cells.plan(cells.chosen(rest)))
    elif option == "--merge":
        merge(rest)
    elif option == "--self-test":
        self_test()
    else:
        measure(sys.argv[1:])
