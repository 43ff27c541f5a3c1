"""The experiment on space within a slice: its plan, what it makes of figures, and that a failure is of one cell."""

from __future__ import annotations

import contextlib
import mmap
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.experiments import space_gpu
from tests.experiments.spaced import cells, results
from tests.experiments.spaced.machine import Machine
from tests.experiments.spaced.measure import Measure, TooLong, limited
from tests.experiments.timed.cells import chosen, plan
from tests.experiments.timed.results import Found, Row, merged
from tests.t7_nvidia.conftest import Reporting
from tests.t7_nvidia.placing import AT, KEPT, LAST, RAN, SIZE, Kernel, acted, kernels, sms_of

EIGHT = ("eighth/slices-eighth", "eighth/mps-eighth", "eighth/space-eighth")
"""Sessions of the first kind of programs, in the order in which they are measured."""


def test_all_of_it_fits_into_its_time() -> None:
    assert len({one.name for one in cells.CELLS}) == len(cells.CELLS)
    assert {one.session for one in cells.CELLS} == cells.STARTS.keys()
    told = plan(cells.CELLS, cells.STARTS).splitlines()[-1]
    assert float(told.split()[1]) <= space_gpu.ALL_S
    assert [one.name for one in chosen(["sms/change"], cells.CELLS)] == [f"sms/change/{n}" for n in cells.STREAMS]


@pytest.fixture
def page() -> Iterator[Reporting]:
    """The page of a program that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process, mmap.mmap(-1, SIZE) as made:
        yield Reporting(process, made)


def done(page: Reporting, *those: Kernel) -> None:
    """Have the page tell of kernels."""
    for one in those:
        struct.pack_into("<Q", page.page, RAN + 8 * (one.number % KEPT), one.number + 1 << 16 | one.sms)
        struct.pack_into("<Q", page.page, AT + 8 * (one.number % KEPT), round(one.at * 1e9))
        struct.pack_into("<Q", page.page, 0, one.number + 1)


def test_kernels_are_those_that_the_page_tells_of(page: Reporting) -> None:
    each = [Kernel(number, 132, 1.0 + number) for number in range(3)]
    done(page, *each)
    assert kernels(page) == each
    assert kernels(page, 2) == each[2:]
    late = Kernel(KEPT, 64, 9.5)
    done(page, late)
    assert kernels(page) == [*each[1:], late], "it has the place of the first one"


def test_a_change_has_acted_with_the_first_kernel_on_the_new_sms() -> None:
    each = [
        Kernel(0, 32, 0.9),
        Kernel(1, 132, 1.001),
        Kernel(2, 130, 1.002),
        Kernel(3, 33, 1.004),
        Kernel(4, 32, 1.005),
    ]
    assert acted(each, 1.0, 132, 32) == pytest.approx(0.004)
    assert acted(reversed(each), 1.0, 132, 32) == pytest.approx(0.004)
    assert acted(each[:3], 1.0, 132, 32) is None
    assert acted(each, 1.0, 64, 132) == pytest.approx(0.001)


def test_sms_are_bits(page: Reporting) -> None:
    struct.pack_into("<3Q", page.page, LAST, 1 << 3, 1 << 63, 1 << 1)
    assert sms_of(page) == {3, 127, 129}


SAID = [
    ("eight", {"rates": [10.0, 12.5]}, "22.5/s in all, 10.0 to 12.5 each"),
    ("failed", {"why": "OSError: no"}, "FAILED: OSError: no"),
    (
        "share",
        {"share": 0.4851, "kept": 0.49},
        "0.4851 of the time; the slice does 0.490 of that alone; ok 0.5 within 3%",
    ),
    (
        "share",
        {"share": 0.4849, "kept": 0.49},
        "0.4849 of the time; the slice does 0.490 of that alone; NOT 0.5 within 3%",
    ),
    ("sms", {"done": 0.2519, "wanted": 0.24, "seen": 32}, "0.2519 on 32 of 0.2400 SMs; ok within 5%"),
    ("sms", {"done": 0.253, "wanted": 0.24, "seen": 32}, "0.2530 on 32 of 0.2400 SMs; NOT within 5%"),
    ("critical", {"rates": [50.0, 50.9]}, "50.0 50.9/s beside 0 to 1 others; ok varies by 2% at most"),
    ("critical", {"rates": [50.0, 51.1]}, "50.0 51.1/s beside 0 to 1 others; NOT varies by 2% at most"),
    (
        "change",
        {"ms": [5.0, 1.0, 1.5], "lost": 0},
        "3 changes, 1.50 ms, longest 5.00, 0 kernels lost; ok 5 ms, none lost",
    ),
    ("change", {"ms": [5.1], "lost": 0}, "1 changes, 5.10 ms, longest 5.10, 0 kernels lost; NOT 5 ms, none lost"),
    ("change", {"ms": [1.0], "lost": 1}, "1 changes, 1.00 ms, longest 1.00, 1 kernels lost; NOT 5 ms, none lost"),
]


@pytest.mark.parametrize(("kind", "row", "text"), SAID)
def test_a_line_says_what_is_asked(kind: str, row: Row, text: str) -> None:
    assert results.line(kind, "c", [row]) == f"c: {text}"


@pytest.mark.parametrize(("slow", "text"), [(11.5, "ok 1.15 at most"), (11.6, "NOT 1.15 at most")])
def test_tails_outside_are_judged_and_those_of_clients_are_not(slow: float, text: str) -> None:
    tail = cells.TAILS[0]
    row = {"ms": [[1.0] * 980 + [slow] * 20], "alone_ms": [[1.0] * 980 + [10.0] * 20]}
    assert results.line("tail", f"eighth/space-eighth/{tail}", [row]).endswith(f"; 1000 requests; {text}")
    assert results.line("tail", f"eighth/mps-eighth/{tail}", [row]).endswith(" of that alone; 1000 requests")


class Broken(Machine):
    """A machine on which little works, and nothing is measured."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.asked = list[str]()

    @contextlib.contextmanager
    def way(self, name: str) -> Iterator[Sequence[str]]:
        """Yield no words; MPS is not there."""
        self.asked.append(name)
        if name == "mps":
            raise OSError(2, "no MPS")
        yield []

    @contextlib.contextmanager
    def eight(self, before: Sequence[str], kind: str, count: int = cells.COUNT) -> Iterator[list[object]]:
        """Have none come up, and say so over several lines."""
        self.asked.append(kind)
        raise AssertionError("it ended\n  with 1")
        yield []

    @contextlib.contextmanager
    def tree(self) -> Iterator[object]:
        """Be refused."""
        self.asked.append("tree")
        raise OSError(19, "no GPU")
        yield None


def test_what_fails_is_a_finding_and_the_next_is_measured(tmp_path: Path) -> None:
    machine, mine = Broken(tmp_path), chosen(["eighth/"], cells.CELLS)
    Measure(Found(tmp_path, "space", results.line), machine, 1_000).run(mine)
    assert machine.asked == ["slices", "eighth", "mps", "tree"]
    each = merged(tmp_path.glob("space-*.json"))
    assert [cell for _, cell in each] == [one.name for one in mine]
    whys = {cell.rpartition("/")[0]: rows[0]["why"] for (kind, cell), rows in each.items() if kind == "failed"}
    assert [whys[session] for session in EIGHT] == [
        "AssertionError: it ended with 1",
        "FileNotFoundError: [Errno 2] no MPS",
        "OSError: [Errno 19] no GPU",
    ]


def test_a_session_without_time_is_left_out(tmp_path: Path) -> None:
    machine, found = Broken(tmp_path), Found(tmp_path, "space", results.line)
    Measure(found, machine, 1.0).run(chosen(["eighth/slices"], cells.CELLS))
    assert not machine.asked
    ((rows,),) = merged(tmp_path.glob("space-*.json")).values()
    assert "left out" in rows["why"]


def test_what_takes_too_long_is_given_up() -> None:
    with pytest.raises(TooLong), limited(0.01):
        signal.pause()


def test_runs_are_compared_by_kind(tmp_path: Path) -> None:
    """Of several runs of one product the mean, and what is asked is said."""
    for number, rate in enumerate((94.0, 98.0)):
        found = Found(tmp_path / f"{number}", "space", results.line)
        for name, each in (("space", rate), ("mps", 100.0), ("slices", 33.0)):
            found.add("eight", f"loop/{name}-loop/rate", rates=[each / 8] * 8)
    rows = merged(tmp_path.rglob("space-*.json"))
    (text,) = results.compared(rows)
    assert text == "loop: eight in a spatial slice do 0.960 of mps, ok 0.95 at least; 2.909 of slices, NOT 3 at least"
    assert results.told(rows).splitlines()[-1] == text
