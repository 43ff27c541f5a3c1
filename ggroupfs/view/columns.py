"""Columns of a group's figures, their text for people, and tables of them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from backend.core.reasons import GR_ALONE
from backend.core.records import MAX
from ggroupfs.text.origins import origin
from ggroupfs.view.outline import Line, Node
from ggroupfs.view.snapshot import GpuUse, ProcessUse, SliceUse

NOT_TOLD = "-"


def human(nbytes: float) -> str:
    """Return a size in short form: ``512.0M``."""
    for suffix in ("", "K", "M", "G"):
        if nbytes < 1024:
            return f"{nbytes:.0f}" if not suffix else f"{nbytes:.1f}{suffix}"
        nbytes /= 1024
    return f"{nbytes:.1f}T"


def limit(nbytes: int) -> str:
    """Return a limit: a size, or ``max``."""
    return "max" if nbytes >= MAX else human(nbytes)


def percent(share: float) -> str:
    """Return a share of the whole, at most 100 %. An excess is noise, because the GPU and the host have different
    clocks.
    """
    return f"{min(share, 1.0) * 100:.0f}%"


def parts(share: float) -> str:
    """Return a sum of shares: 250 % is two and a half wholes."""
    return f"{share * 100:.0f}%"


def speed(rate: float) -> str:
    """Return bytes a second as MB/s."""
    return f"{rate / 1e6:.1f}" if rate < 99.95e6 else f"{rate / 1e6:.0f}"


def timeslice(ms: float) -> str:
    """Return a timeslice: milliseconds, or ``default``."""
    return f"{ms:g} ms" if ms else "default"


def readable(name: str) -> str:
    """Return an untrusted name without control characters for the terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in name)


def off(processes: Mapping[str, int]) -> str:
    """Return why processes are off the runlist, in words: ``turn``, ``freeze,turn``, or ``turn/gr`` if only the GR
    engine is off. If a reason holds for several processes of a slice, with counts: ``3 freeze,1 turn``.
    """
    reasons = {name: count for name, count in processes.items() if count and name != GR_ALONE}
    several = any(count > 1 for count in reasons.values())
    words = ",".join(f"{count} {name}" if several else name for name, count in reasons.items())
    if processes.get(GR_ALONE):
        words += f"/{processes[GR_ALONE]} gr" if several else "/gr"
    return words or NOT_TOLD


ORIGIN_MOST = 25
"""Greatest length of an origin, in characters: that of a container in a pod."""
ID_SHORT, UID_SHORT = 12, 8
"""Length of the shortened ID of a container, as `podman ps` shows it, and of the UID of a pod, in characters."""


def cut(text: str, most: int) -> str:
    """Return a text shortened to at most `most` characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def origin_words(path: str) -> str | None:
    """Return what a cgroup belongs to, by its path: ``pod 6d1f0c7e/0f6ad2a1c5c4``, ``job 123.0``, otherwise its unit;
    None if the path does not tell.
    """
    told = origin(path)
    container = told.get("container", "")[:ID_SHORT]
    if "pod" in told:
        return f"pod {told['pod'][:UID_SHORT]}" + (f"/{container}" if container else "")
    if "job" in told:
        return f"job {told['job']}" + (f".{told['step']}" if "step" in told else "")
    return f"container {container}" if container else told.get("unit")


def _origin(node: Node) -> str | None:
    if isinstance(node.use, ProcessUse):
        return origin_words(node.use.slice)
    return origin_words(node.use.path) if isinstance(node.use, SliceUse) else None


def _container(path: str) -> str | None:
    """Return the short name of the slice of a container or pod; None for any other slice."""
    here, above = origin(path), origin(path.rpartition("/")[0])
    if "container" in here and "container" not in above:
        return f"container {here['container'][:ID_SHORT]}"
    return f"pod {here['pod'][:UID_SHORT]}" if "pod" in here and "pod" not in above else None


LEVELS = "▁▂▃▄▅▆▇█"
"""Characters of a sparkline, from zero to one."""


def sparkline(shares: Sequence[float | None]) -> str:
    """Return shares from 0 to 1 as a line of bars, with a blank for an unknown share."""
    last = len(LEVELS) - 1
    return "".join(" " if share is None else LEVELS[round(min(max(share, 0.0), 1.0) * last)] for share in shares)


@attrs.frozen
class Column:
    """A column of a table, and the figure that it needs."""

    name: str
    """Name in JSON; also the heading, if there is no other."""
    heading: str
    """Heading in tables."""
    value: Callable[[Node], Any]
    """Returns the value for a node; None if unknown."""
    text: Callable[[Any], str]
    """Returns a value as text for people."""
    field: str | None = None
    """Field of the figures that it shows, if it shows one."""
    number: bool = True
    """Whether it is aligned to the right."""
    width: int = 7
    """Width on a screen that changes, where the width cannot follow the content, in characters."""

    def cell(self, node: Node) -> str:
        """Return the text for a node."""
        value = self.value(node)
        return NOT_TOLD if value is None else self.text(value)

    def aligned(self, text: str, width: int) -> str:
        """Return a text padded to `width` characters: numbers to the right, words to the left."""
        return text.rjust(width) if self.number else text.ljust(width)


OVER = "!"
"""Mark after the memory of a group that is over a limit."""


class _Memory(Column):
    """Memory on the GPU, marked if it is over a limit and reclaim cannot change that."""

    def cell(self, node: Node) -> str:
        return super().cell(node) + (OVER if node.figures.over else "")


def _figure(
    name: str, text: Callable[[Any], str], *, field: str | None = None, heading: str | None = None, width: int = 7
) -> Column:
    source = field or name
    return Column(name, heading or name.upper(), lambda node: getattr(node.figures, source), text, source, width=width)


def _rate(name: str, heading: str, text: Callable[[Any], str], width: int = 7) -> Column:
    return Column(name, heading, lambda node: getattr(node.rates, name), text, width=width)


def _of_process(name: str, *, number: bool) -> Column:
    def value(node: Node) -> Any:
        found = getattr(node.use, name) if isinstance(node.use, ProcessUse) else None
        return None if found == "" else found

    return Column(name, name.upper(), value, lambda value: readable(str(value)), number=number)


def _turn(node: Node) -> str | None:
    """Return the state of memory turns: for a process ``has`` or ``waits``; for other groups how many processes have
    their turn, out of how many; None if there are no such turns now.
    """
    runs, waits = node.figures.memory_runs or 0, node.figures.memory_waits or 0
    if not runs + waits:
        return None
    if isinstance(node.use, ProcessUse):
        return "has" if runs else "waits"
    return f"{runs} of {runs + waits}"


def _resident(node: Node) -> float | None:
    """Return the fraction of the working set that is on the GPU."""
    used, there = node.figures.working_set, node.figures.working_set_resident
    return there / used if used and there is not None else None


PID = _of_process("pid", number=True)
GPU = _of_process("gpu", number=True)
COMMAND = _of_process("command", number=False)
SLICE = _of_process("slice", number=False)
CURRENT = _Memory("current", "CURRENT", lambda node: node.figures.current, human, "current")
HIGH = _figure("high", limit)
SWAP = _figure("swap", human)
TIMESLICE = _figure("timeslice", timeslice, width=9)
FROZEN = attrs.evolve(_figure("frozen", lambda frozen: "frozen" if frozen else NOT_TOLD, width=6), number=False)
OFF = attrs.evolve(_figure("off", off, width=16), number=False)
FINISHED = _figure("finished", str)
SHARE = _rate("share", "SHARE", percent, 5)
KERNELS = _rate("kernels", "KERN/S", lambda rate: f"{rate:.0f}")
TURN = Column("turn", "TURN", _turn, str, "memory_runs", number=False, width=7)
SET = _figure("working_set", human, heading="SET")
RESIDENT = Column("resident", "RESID", _resident, percent, "working_set_resident", width=5)
SWAPIN = _rate("swapin", "IN MB/S", speed)
SWAPOUT = _rate("swapout", "OUT MB/S", speed, 9)

USER = attrs.evolve(_of_process("user", number=False), width=8)
WEIGHT = _figure("weight", str, width=6)
PRIORITY = _figure("priority", str, heading="PRIO", width=4)
THROTTLED = _rate("throttled", "THROT", parts, 5)
ORIGIN = Column("origin", "ORIGIN", _origin, lambda text: cut(readable(text), ORIGIN_MOST), number=False, width=25)
HISTORY = Column("history", "HISTORY", lambda node: node.history or None, sparkline, number=False, width=8)

SHOWN = (PID, GPU, COMMAND, SLICE, CURRENT, HIGH, SWAP, TIMESLICE, FROZEN, OFF, FINISHED)
"""Columns of ``show``."""
WATCHED = (
    *(CURRENT, HIGH, SWAP, SHARE, KERNELS, TIMESLICE, FROZEN),
    *(USER, WEIGHT, PRIORITY, OFF, SWAPIN, SWAPOUT, THROTTLED, ORIGIN, TURN, SET, RESIDENT),
)
"""Columns of one reading of ``top``."""
LIVE = (*WATCHED[: WATCHED.index(OFF)], HISTORY, *WATCHED[WATCHED.index(OFF) :])
"""Columns of the screen of ``top``; the first ones if there is no room for all."""
SORTED = {
    "memory": CURRENT,
    "swap": SWAP,
    "share": SHARE,
    "kernels": KERNELS,
    "weight": WEIGHT,
    "priority": PRIORITY,
    "user": USER,
}
"""Column of each sort order, which is shown if there is room for one column; a pid is part of the name."""

LABEL_LEAST = 24
"""Characters that names in a tree have before columns are shown beside them."""
FULL_LEAST = 48
"""The same for names that are full command lines."""
SIDE_BY_SIDE = 2
"""Number of blanks between two columns."""


def fields(columns: Iterable[Column]) -> frozenset[str]:
    """Return the fields of the figures that columns need."""
    return frozenset(column.field for column in columns if column.field is not None)


def fitting(
    width: int, columns: Sequence[Column] = WATCHED, wanted: Column | None = None, least: int = LABEL_LEAST
) -> Sequence[Column]:
    """Return as many of the first columns as fit beside names of `least` characters, with `wanted` among them; it
    replaces the last ones if necessary.
    """
    room = width - least
    kept = _first(room, columns)
    if wanted is None or wanted in kept or wanted not in columns or wanted.width + 1 > room:
        return kept
    return (*_first(room - wanted.width - 1, columns), wanted)


def _first(room: int, columns: Sequence[Column]) -> Sequence[Column]:
    for count, column in enumerate(columns):
        room -= column.width + 1
        if room < 0:
            return columns[:count]
    return columns


def table(nodes: Iterable[Node], columns: Sequence[Column] = SHOWN) -> str:
    """Return a table with a heading and a line for each node, as wide as its content."""
    return _aligned(
        [[column.heading for column in columns], *([column.cell(node) for column in columns] for node in nodes)],
        columns,
    )


NAME = Column("name", "", lambda node: node.label, str, number=False)


def tree(lines: Iterable[Line], columns: Sequence[Column]) -> str:
    """Return a table with the lines of an outline at the left."""
    rows = [["", *(column.heading for column in columns)]]
    for line in lines:
        rows.append([label(line), *(column.cell(line.node) for column in columns)])
    return _aligned(rows, (NAME, *columns))


def label(line: Line) -> str:
    """Return the label of a line of an outline: a GPU with its capacity, a folded node with the number of its
    children.
    """
    use, text = line.node.use, line.prefix + readable(line.node.label)
    if isinstance(use, GpuUse):
        text += f", {human(use.capacity)}"
    elif isinstance(use, SliceUse) and (name := _container(use.path)):
        text = line.prefix + name
    return f"{text} [+{len(line.node.children)}]" if line.folded else text


def _aligned(rows: Sequence[Sequence[str]], columns: Sequence[Column]) -> str:
    widths = [max(len(row[place]) for row in rows) for place in range(len(columns))]
    return "\n".join(
        (" " * SIDE_BY_SIDE)
        .join(column.aligned(text, width) for column, text, width in zip(columns, row, widths, strict=True))
        .rstrip()
        for row in rows
    )


def bar(part: float, width: int) -> str:
    """Return a fraction as a bar, to an eighth of a character."""
    eighths = round(min(max(part, 0.0), 1.0) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")).ljust(width, "░")


ASCII = str.maketrans(
    {"├": "|", "└": "`", "│": "|", "─": "-", "█": "#", "░": ".", **dict.fromkeys("▏▎▍▌▋▊▉", "#"), "…": "~"}
)


def printable(text: str, encoding: str | None) -> str:
    """Return a text for a terminal without Unicode: branches and bars in ASCII."""
    if (encoding or "").lower().replace("-", "").startswith("utf"):
        return text
    return text.translate(ASCII).encode("ascii", "replace").decode()


def as_json(node: Node, columns: Iterable[Column]) -> Mapping[str, Any]:
    """Return values for programs: bytes, milliseconds; None for ``max`` and for unknown values."""
    found = {}
    for column in columns:
        value = column.value(node)
        found[column.name] = None if value is not None and column.text is limit and value >= MAX else value
    return found
