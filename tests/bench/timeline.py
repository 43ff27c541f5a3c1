"""Where the time from one turn of memory to the next goes, from a trace of the daemon.

    python -m tests.bench.timeline build/turns-on.jsonl [--last N]

The daemon writes it where GGROUP_TURNS_TRACE names a file (:mod:`backend.common.tracing`); the scenario
`oversubscribed` of the benchmark has it do so. A line is one switch: the turn that ended, the gap, and the turn that
began; microseconds and MiB. Of what went and came: what it took as the daemon saw it, as the library says (`lib`), for
what ran to end (`wait`), with the gate closed (`shut`), for memory of the host that had to be made (`host`), and how
often nothing moved (`vain`). The last line is what docs/decisions/0030-memory-by-turns.md reckons with.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

MIB = 1 << 20
COLUMNS = (
    *("at s", "turn of", "turn", "ends", "late", "gap", "begin", "lacks", "steps", "decide"),
    *("out MiB", "us", "lib", "wait", "shut", "host", "vain", "in MiB", "us", "lib", "wait", "shut", "vain", "trouble"),
)
RECKONED = {"turn": "500000", "ends": "5000+", "gap": "25000", "begin": "3000", "lacks": "0", "wait": "0", "host": "0"}
"""What the turns of ``turns.py`` reckon with, by column."""

Line = Mapping[str, Any]


@attrs.define
class Switch:
    """From one turn to the next."""

    turn: Line
    """The turn that ended."""
    ends: list[Line] = attrs.field(factory=list)
    """The ends of its programs."""
    gap: Line | None = None
    """What was between the two."""
    begins: list[Line] = attrs.field(factory=list)
    """The begins of those that came."""


def parsed(lines: Iterable[str]) -> Iterator[Line]:
    """Yield the lines of a trace. One that was cut off by the end of its daemon is left out."""
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            continue


def switches(lines: Iterable[Line]) -> Iterator[Switch]:
    """Yield the switches of a trace, in their order."""
    last: Switch | None = None
    for line in lines:
        match line["what"]:
            case "turn":
                if last is not None:
                    yield last
                last = Switch(line)
            case "end" if last is not None:
                last.ends.append(line)
            case "begin" if last is not None:
                last.begins.append(line)
            case "gap" if last is not None:
                last.gap = line
    if last is not None:
        yield last


def summed(lines: Sequence[Line], prefix: str) -> Mapping[str, int]:
    """Return the sums of some lines under all names that begin so: those of all programs."""
    found: dict[str, int] = {}
    for line in lines:
        for name, sums in line.items():
            if name == prefix or name.startswith(f"{prefix} "):
                for key, value in sums.items():
                    found[key] = found.get(key, 0) + value
    return found


def row(one: Switch, since: int) -> list[str]:
    """Return the columns of a switch; `since` is when the trace began, microseconds."""
    phases = [one.turn, *([one.gap] if one.gap else [])]
    out, back = summed(phases, "out"), summed(phases, "in")
    gone, come = summed(phases, "reclaimed"), summed(phases, "prepared")
    decided = summed(phases, "decided")
    comes = one.gap["set"] if one.gap else []
    lacks = sum((one.gap or one.turn)["lacks"].get(name, 0) for name in comes)
    late = sum(not end.get("drained", False) for end in one.ends)
    cells: list[Any] = [
        *(f"{(one.turn['at'] - since) / 1e6:.3f}", "+".join(one.turn["set"]), one.turn["us"]),
        *(max((end["us"] for end in one.ends), default=""), late, one.gap["us"] if one.gap else ""),
        *(max((begin["us"] for begin in one.begins), default=""), lacks // MIB),
        *(decided.get("steps", 0), decided.get("us", 0)),
        *(out.get("bytes", 0) // MIB, out.get("us", 0), gone.get("us", 0), gone.get("waited", 0)),
        *(gone.get("closed", 0), gone.get("made", 0), out.get("vain", 0)),
        *(back.get("bytes", 0) // MIB, back.get("us", 0), come.get("us", 0), come.get("waited", 0)),
        *(come.get("closed", 0), back.get("vain", 0), "+".join(one.turn.get("troubles", []))),
    ]
    return [str(cell) for cell in cells]


def table(lines: Iterable[str], last: int | None = None) -> str:
    """Return the table of a trace, of its last switches alone where a number is given."""
    found = list(switches(parsed(lines)))
    if not found:
        return "no turn of memory in it"
    since = found[0].turn["at"]
    rows = [list(COLUMNS), *(row(one, since) for one in (found[-last:] if last else found))]
    rows.append([RECKONED.get(name, "") for name in COLUMNS])
    widths = [max(len(cells[number]) for cells in rows) for number in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)) for cells in rows)


def main(words: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.timeline", description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--last", type=int, default=None, metavar="N", help="the last N switches alone")
    options = parser.parse_args(words)
    with options.trace.open(encoding="utf-8", errors="replace") as file:
        print(table(file, options.last))
    return 0


if __name__ == "__main__":
    sys.exit(main())
