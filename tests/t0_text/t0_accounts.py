"""The accounts of slices in each format: which figures are added up, the order of slices, and any bytes in names."""

from __future__ import annotations

import csv
import datetime
import io
import json
from typing import Any

import pytest

from ggroupfs.commands.account import outermost
from ggroupfs.view.accounts import FORMATS, ORDERS, Account, arranged, as_csv, as_json, as_text
from ggroupfs.view.figures import Figures

MIB = 1 << 20
JOB = "/system.slice/slurmstepd.scope/job_7"


def account(path: str, gpu: int = 0, *, outermost: bool = False, **figures: Any) -> Account:
    return Account(path, gpu, Figures(**figures), outermost)


HELD = {"byte_seconds": 6 * MIB, "since": 1_800_000_000}
SOME = (
    account("/batch.slice", outermost=True, busy_usec=3_500_000, gpu_usec=5_000_000, peak=3 * MIB, swap_peak=0, **HELD),
    account("/batch.slice/a.service", busy_usec=3_000_000, gpu_usec=4_000_000, peak=2 * MIB, swap_peak=0),
    account("/batch.slice/b.service", busy_usec=500_000, gpu_usec=1_000_000, peak=2 * MIB, swap_peak=0),
    account(JOB, 1, outermost=True, busy_usec=1_000_000, peak=MIB, swap_peak=5 * MIB),
)
"""A slice with two slices below it, and a job of which fewer figures are known."""


def test_a_table() -> None:
    """Times are shown in the local time zone."""
    since = f"{datetime.datetime.fromtimestamp(1_800_000_000):%Y-%m-%d %H:%M}"
    assert as_text(SOME) == (
        "SLICE                                 GPU             SINCE  BUSY s  GPU s  BYTE-s  PEAK  SWAP PEAK\n"
        f"/batch.slice                            0  {since}     3.5    5.0    6.0M  3.0M          0\n"
        "/batch.slice/a.service                  0                 -     3.0    4.0       -  2.0M          0\n"
        "/batch.slice/b.service                  0                 -     0.5    1.0       -  2.0M          0\n"
        "/system.slice/slurmstepd.scope/job_7    1                 -     1.0      -       -  1.0M       5.0M\n"
        "total                                                           4.5    5.0    6.0M     -          -\n"
    )


def test_json() -> None:
    found = json.loads(as_json(SOME))
    assert found["total"] == {
        "busy_seconds": 4.5,
        "gpu_seconds": 5.0,
        "gpu_estimated_seconds": None,
        "resident_byte_seconds": 6 * MIB,
    }
    assert found["slices"][3] == {
        "slice": JOB,
        "gpu": 1,
        "outermost": True,
        "job": "7",
        "unit": "slurmstepd.scope",
        "busy_seconds": 1.0,
        "gpu_seconds": None,
        "gpu_estimated_seconds": None,
        "resident_byte_seconds": None,
        "since": None,
        "peak_bytes": MIB,
        "swap_peak_bytes": 5 * MIB,
    }
    assert found["slices"][0]["since"] == "2027-01-15T08:00:00Z"
    counted = [one["busy_seconds"] for one in found["slices"] if one["outermost"]]
    assert sum(counted) == found["total"]["busy_seconds"]


def test_csv() -> None:
    rows = list(csv.DictReader(io.StringIO(as_csv(SOME))))
    assert [row["slice"] for row in rows] == [*(one.slice for one in SOME), "total"]
    assert (rows[3]["job"], rows[3]["pod"], rows[3]["gpu_seconds"], rows[3]["peak_bytes"]) == ("7", "", "", str(MIB))
    assert [row["outermost"] for row in rows] == ["1", "0", "0", "1", ""]
    assert sum(float(row["busy_seconds"]) for row in rows if row["outermost"] == "1") == 4.5
    assert (rows[-1]["busy_seconds"], rows[-1]["peak_bytes"], rows[-1]["gpu"]) == ("4.5", "", "")


def test_of_no_slice() -> None:
    assert as_text([]) == "SLICE  GPU  SINCE\ntotal\n"
    assert json.loads(as_json([]))["slices"] == []
    assert len(as_csv([]).splitlines()) == 2


@pytest.mark.parametrize("name", ['/q"uo\\te,', "/a\nb", "/\udcff", "/\x1b[31m", "/=1+1"])
def test_names_of_any_bytes(name: str) -> None:
    """In a table each slice is one line. The other formats give the name back, with invalid UTF-8 as \\xNN."""
    found = [account(name, outermost=True, busy_usec=1)]
    for tell in FORMATS.values():
        tell(found).encode()
    told = name.replace("\udcff", "\\xff")
    assert next(csv.DictReader(io.StringIO(as_csv(found), newline="")))["slice"] == told
    assert json.loads(as_json(found))["slices"][0]["slice"] == told
    assert len(as_text(found).splitlines()) == 3
    assert "\x1b" not in as_text(found)


@pytest.mark.parametrize(("order", "names"), [("busy", "bacd"), ("gpu", "cabd"), ("peak", "acbd"), ("name", "abcd")])
def test_orders(order: str, names: str) -> None:
    """The largest figure comes first and an unknown one last; slices with equal figures are sorted by name."""
    some = [
        account("/d"),
        account("/c", busy_usec=1, gpu_usec=9, peak=2),
        account("/b", busy_usec=3, peak=1),
        account("/a", busy_usec=2, peak=3),
    ]
    assert order in ORDERS
    assert "".join(one.slice[1] for one in arranged(some, order)) == names


@pytest.mark.parametrize(
    ("paths", "found"),
    [
        ((), []),
        (("/a", "/a/b", "/a-b", "/ab"), ["/a-b", "/a", "/ab"]),
        (("/a/b", "/a/b", "/a/c/d"), ["/a/b", "/a/c/d"]),
        (("/a/b", "/"), ["/"]),
    ],
)
def test_what_is_in_another_is_told_once(paths: tuple[str, ...], found: list[str]) -> None:
    assert outermost(iter(paths)) == found


def test_idle() -> None:
    assert account("/a", busy_usec=0, peak=0).is_idle
    assert not account("/a", peak=1).is_idle
