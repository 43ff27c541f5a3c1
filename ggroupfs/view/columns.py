"""What is shown of a group: the columns, how each is spelt for people, and tables of them. Pure."""

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
    """A size as people read it: ``512.0M``."""
    for suffix in ("", "K", "M", "G"):
        if nbytes < 1024:
            return f"{nbytes:.0f}" if not suffix else f"{nbytes:.1f}{suffix}"
        nbytes /= 1024
    return f"{nbytes:.1f}T"


def limit(nbytes: int) -> str:
    """A limit: a size, or ``max``."""
    return "max" if nbytes >= MAX else human(nbytes)


def percent(share: float) -> str:
    """A share of the whole. More than that is the noise of two clocks, the GPU's and ours."""
    return f"{min(share, 1.0) * 100:.0f}%"


def parts(share: float) -> str:
    """Shares of the whole of several, added up: 250 % is that of two and a half."""
    return f"{share * 100:.0f}%"


def speed(rate: float) -> str:
    """Bytes a second, in MB/s."""
    return f"{rate / 1e6:.1f}" if rate < 99.95e6 else f"{rate / 1e6:.0f}"


def timeslice(ms: float) -> str:
    """A timeslice: milliseconds, or what the GPU gives."""
    return f"{ms:g} ms" if ms else "default"


def readable(name: str) -> str:
    """A name that a stranger chose, without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in name)


def off(processes: Mapping[str, int]) -> str:
    """Return why processes are off the runlist, in words: ``turn``, ``freeze,turn``, ``turn/gr`` with the GR engine
    alone; of a slice with how many, where several are: ``3 freeze,1 turn``.
    """
    reasons = {name: count for name, count in processes.items() if count and name != GR_ALONE}
    several = any(count > 1 for count in reasons.values())
    words = ",".join(f"{count} {name}" if several else name for name, count in reasons.items())
    if processes.get(GR_ALONE):
        words += f"/{processes[GR_ALONE]} gr" if several else "/gr"
    return words or NOT_TOLD


ORIGIN_MOST = 25
"""Characters of an origin, at most: those of a container in a pod."""
ID_SHORT, UID_SHORT = 12, 8
"""Characters of the ID of a container and of the UID of a pod that people go by, as `podman ps` shows them."""


def cut(text: str, most: int) -> str:
    """A text of so many characters at most."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def origin_words(path: str) -> str | None:
    """Return what a cgroup is of, by its path: ``pod 6d1f0c7e/0f6ad2a1c5c4``, ``job 123.0``, else the unit; None where
    the path does not tell.
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
    """The short name of a slice that is the one of a container or pod; None for any other."""
    here, above = origin(path), origin(path.rpartition("/")[0])
    if "container" in here and "container" not in above:
        return f"container {here['container'][:ID_SHORT]}"
    return f"pod {here['pod'][:UID_SHORT]}" if "pod" in here and "pod" not in above else None


LEVELS = "▁▂▃▄▅▆▇█"
"""Characters of a sparkline, from nothing to all."""


def sparkline(shares: Sequence[float | None]) -> str:
    """Shares of 0 to 1 as a line of bars; a blank for one that is not known."""
    last = len(LEVELS) - 1
    return "".join(" " if share is None else LEVELS[round(min(max(share, 0.0), 1.0) * last)] for share in shares)


@attrs.frozen
class Column:
    """A column of a table, and what it needs to be read."""

    name: str
    """What it is called in JSON; its heading, if it has no other."""
    heading: str
    """In tables."""
    value: Callable[[Node], Any]
    """What is in it; None: not told."""
    text: Callable[[Any], str]
    """The value for people."""
    field: str | None = None
    """The figure that it is made of, if it is one."""
    number: bool = True
    """Whether it stands at the right."""
    width: int = 7
    """Where the width cannot follow what is in it, on a screen that changes."""

    def cell(self, node: Node) -> str:
        """What stands in it."""
        value = self.value(node)
        return NOT_TOLD if value is None else self.text(value)

    def aligned(self, text: str, width: int) -> str:
        """Numbers to the right, words to the left."""
        return text.rjust(width) if self.number else text.ljust(width)


OVER = "!"
"""Mark behind the memory of a group that is over a limit."""


class _Memory(Column):
    """Memory on the GPU, marked where it is over a limit and reclaim does not change that."""

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
    """Whether it has its turn where memory is scheduled with time: of a process ``has`` or ``waits``, of others how
    many have it, of how many; None where there are no such turns now."""
    runs, waits = node.figures.memory_runs or 0, node.figures.memory_waits or 0
    if not runs + waits:
        return None
    if isinstance(node.use, ProcessUse):
        return "has" if runs else "waits"
    return f"{runs} of {runs + waits}"


def _resident(node: Node) -> float | None:
    """The share of its working set that is on the GPU."""
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
"""What ``show`` has."""
WATCHED = (
    *(CURRENT, HIGH, SWAP, SHARE, KERNELS, TIMESLICE, FROZEN),
    *(USER, WEIGHT, PRIORITY, OFF, SWAPIN, SWAPOUT, THROTTLED, ORIGIN, TURN, SET, RESIDENT),
)
"""What ``top`` tells of one moment."""
LIVE = (*WATCHED[: WATCHED.index(OFF)], HISTORY, *WATCHED[WATCHED.index(OFF) :])
"""What its screen has; where there is no room for all, the first of them."""
SORTED = {
    "memory": CURRENT,
    "swap": SWAP,
    "share": SHARE,
    "kernels": KERNELS,
    "weight": WEIGHT,
    "priority": PRIORITY,
    "user": USER,
}
"""The column of each order, which is shown wherever there is room for one; a pid stands in the name."""

LABEL_LEAST = 24
"""Characters that the names in a tree get before there are columns beside them."""
FULL_LEAST = 48
"""The same, for names that are full command lines."""
SIDE_BY_SIDE = 2
"""Blanks between two columns."""


def fields(columns: Iterable[Column]) -> frozenset[str]:
    """The figures that columns need."""
    return frozenset(column.field for column in columns if column.field is not None)


def fitting(
    width: int, columns: Sequence[Column] = WATCHED, wanted: Column | None = None, least: int = LABEL_LEAST
) -> Sequence[Column]:
    """As many columns, from the first, as fit beside names of `least` characters; `wanted` among them, in the place of
    the last ones if it has to be.
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
    """A line a node below the headings, as wide as what is in it."""
    return _aligned(
        [[column.heading for column in columns], *([column.cell(node) for column in columns] for node in nodes)],
        columns,
    )


NAME = Column("name", "", lambda node: node.label, str, number=False)


def tree(lines: Iterable[Line], columns: Sequence[Column]) -> str:
    """The same, with the lines of an outline in front."""
    rows = [["", *(column.heading for column in columns)]]
    for line in lines:
        rows.append([label(line), *(column.cell(line.node) for column in columns)])
    return _aligned(rows, (NAME, *columns))


def label(line: Line) -> str:
    """What a line of an outline is called: of a GPU with the memory that it has, of what is folded with how many."""
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
    """A fraction as a bar, to an eighth of a character."""
    eighths = round(min(max(part, 0.0), 1.0) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")).ljust(width, "░")


ASCII = str.maketrans(
    {"├": "|", "└": "`", "│": "|", "─": "-", "█": "#", "░": ".", **dict.fromkeys("▏▎▍▌▋▊▉", "#"), "…": "~"}
)


def printable(text: str, encoding: str | None) -> str:
    """What can be said where there is no Unicode: branches and bars of ASCII."""
    if (encoding or "").lower().replace("-", "").startswith("utf"):
        return text
    return text.translate(ASCII).encode("ascii", "replace").decode()


def as_json(node: Node, columns: Iterable[Column]) -> Mapping[str, Any]:
    """The values for programs: bytes, milliseconds; None for ``max`` and for what is not told."""
    found = {}
    for column in columns:
        value = column.value(node)
        found[column.name] = None if value is not None and column.text is limit and value >= MAX else value
    return found
