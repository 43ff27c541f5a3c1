"""The trace of turns of memory, and the table of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trio.testing

from backend.common.tracing import MOST, Trace
from tests.bench import timeline


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace"


def traced(path: Path) -> list[dict[str, object]]:
    """The lines of a trace of one switch."""

    async def main() -> None:
        trace = Trace(str(path))
        trace.add("out 1", pieces=2, us=300, bytes=64 << 20)
        trace.add("out 1", pieces=1, us=200, bytes=32 << 20)
        trace.add("reclaimed 1", us=400, waited=10, closed=350, made=20)
        phase = {"us": 500_000, "set": ["2"], "lacks": {"1": 0, "3": 0}, "troubles": []}
        trace.flush("turn", **phase)
        trace.note("end", name="2", us=7000, drained=False)
        trace.flush("gap", **phase | {"us": 9000, "set": ["3"], "lacks": {"3": 128 << 20}})
        trace.note("begin", name="3", us=1500)
        trace.close()
        trace.note("end", name="3", us=1)

    trio.run(main, clock=trio.testing.MockClock())
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_happens_often_is_one_line_a_phase(path: Path) -> None:
    turn, end, gap, begin = traced(path)
    assert turn["what"] == "turn"
    assert turn["out 1"] == {"pieces": 3, "us": 500, "bytes": 96 << 20}
    assert "out 1" not in gap
    assert (end["drained"], begin["us"]) == (False, 1500)


def test_the_table_has_a_line_a_switch(path: Path) -> None:
    traced(path)
    names, cells, _ = timeline.table([*path.read_text().splitlines(), '{"cut'], None).splitlines()
    assert names.split()[0] == "at"
    assert cells.split()[:9] == ["0.000", "2", "500000", "7000", "1", "9000", "1500", "128", "0"]
    assert cells.split()[10:16] == ["96", "500", "400", "10", "350", "20"]
    assert timeline.table([]) == "no turn of memory in it"


def test_a_trace_is_bounded_and_without_a_file_nothing_is_done(path: Path) -> None:
    async def main() -> None:
        trace = Trace(str(path))
        for _ in range(40):
            trace.note("end", name="x" * (MOST // 32), us=1)
        trace.close()
        nothing = Trace(None)
        nothing.add("out", us=1)
        nothing.flush("turn")

    trio.run(main, clock=trio.testing.MockClock())
    assert MOST // 2 < path.stat().st_size <= MOST


@pytest.mark.logs("turns are not traced")
def test_a_file_that_cannot_be_written_costs_no_turn(path: Path) -> None:
    async def main() -> None:
        trace = Trace(str(path / "nowhere"))
        trace.note("end", name="1", us=1)
        assert trace.path is None

    trio.run(main, clock=trio.testing.MockClock())
