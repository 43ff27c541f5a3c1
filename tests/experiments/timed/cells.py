"""The cells of `time_gpu.py`, and the seconds of a GPU that each takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs

CHUNK = 5_000
"""Requests that are served in one go, at most: requests.cu takes 8,192."""
OVERLOADED = 2.0
"""Times as long as its arrivals that a system takes for requests which it cannot keep up with, about."""
HOLDS: Sequence[int | None] = (None, 50, 100, 200, 500)
"""Values of the knob, microseconds; None: hold=no."""
HOLD = 200
"""The default."""
KNOB_CELLS = ("1.55ms-gamma-60", "1.55ms-bursts-35")
"""Cells in which the knob is turned."""
SYSTEMS = ("mps-priority", "mps-cap", "slices")
"""What is compared: client priorities of MPS; these, and 60 % of the SMs for what fills; time slicing by the driver."""
COMPARED = 2_000
"""Requests of each cell beside those."""
BUILD_S, MOUNT_S, START_S, FILL_S = 15.0, 2.0, 2.5, 5.0
"""Seconds that a run needs before its first cell; a mount; a program; and what fills, with its speed."""
TURN_S = 1.0
"""Seconds until a daemon goes by another value of the knob, and what its trace tells of is not of that before."""
QUOTAS, PERIODS = (0.1, 0.3, 0.5, 0.8), (100_000, 1_000_000)
"""Parts of the time, and microseconds."""
SECONDS = 10.0
"""Seconds over which a quota is to hold."""
SETTLED = {"library": 1.5, "levers": 2.0}
"""Seconds after another quota was set to a program that has one."""
SETTLED_BESIDE, SETTLED_FIRST, SETTLED_FOUR = 4.0, 4.0, {"library": 6.0, "levers": 12.0}
"""The same beside another; of the first quota; and of four below one."""
NEAR = {100_000: 0.03, 1_000_000: 0.05}
"""Part by which a quota may be off, by period."""
TWO_LOADS, TWO_MOST = (0.2, 0.21), 1.15
"""Loads of two that serve, and the tail of each beside what fills, by that of both together, at most."""


@attrs.frozen
class Tail:
    """Requests of one length, how they arrive, how many there are to be, and what is asked of them."""

    service_us: int
    load: float
    bursts: bool
    requests: int
    ratio: float
    """p99 by that alone, at most."""
    share: float
    """Speed of what fills, of what they leave, at least."""

    def __str__(self) -> str:
        return f"{self.service_us / 1000:g}ms-{'bursts' if self.bursts else 'gamma'}-{self.load * 100:.0f}"

    def seconds(self, requests: int | None = None) -> float:
        """Return how long so many of them arrive."""
        return (requests or self.requests) * self.service_us / 1e6 / self.load


TAILS = [
    Tail(us, load, bursts, requests, ratio, share)
    for us in (1550, 6500)
    for load, bursts, requests, ratio, share in (
        (0.35, False, 2_000, 1.05, 0.88),
        (0.6, False, 2_000, 1.08, 0.81),
        (0.8, False, 10_000, 1.12, 0.78),
        (0.35, True, 2_000, 1.05, 0.88),
    )
]
TWO_REQUESTS = 2_000
"""Requests of each of the two."""


@attrs.frozen
class Cell:
    """What is measured in one go."""

    piece: str
    """The run that it is in."""
    session: str
    """What it shares a mount and programs with; in words."""
    what: str
    seconds: float

    @property
    def name(self) -> str:
        """How it is named on a command line."""
        return f"{self.piece}/{self.session}/{self.what}"


def hold_text(hold_us: int | None) -> str:
    """Return a value of the knob as it is written."""
    return "no" if hold_us is None else str(hold_us)


def tails(piece: str, service_us: int) -> Iterator[Cell]:
    """Yield the cells of requests of one length: alone and beside what fills; of short ones those of other values of
    the knob, of two that serve, and of other systems."""
    mine = [one for one in TAILS if one.service_us == service_us]
    for one in mine:
        yield Cell(piece, "ggroupfs", f"{one} hold={HOLD}", 2 * one.seconds())
    if piece != "short":
        return
    for one in (one for one in mine if str(one) in KNOB_CELLS):
        for hold_us in HOLDS:
            if hold_us != HOLD:
                yield Cell(piece, "ggroupfs", f"{one} hold={hold_text(hold_us)}", one.seconds() + TURN_S)
    yield Cell(piece, "two", "two", 2 * TWO_REQUESTS * service_us / 1e6 / TWO_LOADS[0])
    for system in SYSTEMS:
        for one in mine:
            seconds = one.seconds(COMPARED) * (OVERLOADED if one.load >= 0.5 else 1)
            yield Cell(piece, system, f"{one} {system}", seconds)


def quota_text(share: float, period_us: int) -> str:
    """Return a quota as cells are named by it."""
    return f"{share * 100:.0f}%-{period_us // 1000}ms"


def alone() -> Iterator[Cell]:
    """Yield the quotas of one program that is alone on the GPU."""
    for way in ("library", "levers"):
        for kind in ("busy", "idle"):
            for number, (period_us, share) in enumerate((p, s) for p in PERIODS for s in QUOTAS):
                settle_s = SETTLED[way] if number else SETTLED_FIRST
                yield Cell("quotas", f"{way}-{kind}", quota_text(share, period_us), SECONDS + settle_s)


PAIRS = ((0.1, 0.8), (0.3, 0.5), (0.5, 0.3), (0.8, 0.1))
"""Quotas of two programs beside a third that has none: of the one without the library, and of the one with it."""


def beside() -> Iterator[Cell]:
    """Yield quotas of two programs beside each other and a third: without the library, and with it."""
    for kind in ("busy", "idle"):
        for period_us in PERIODS:
            for levers, library in PAIRS:
                what = f"{quota_text(levers, period_us)}+{quota_text(library, period_us)}"
                yield Cell("beside", kind, what, SECONDS + SETTLED_BESIDE)


def forks() -> Iterator[Cell]:
    """Yield a quota of a slice of four, one of which ends each second, and another begins."""
    for way in ("library", "levers"):
        yield Cell("beside", f"forks-{way}", quota_text(0.3, 100_000), SECONDS + SETTLED_FOUR[way])


CELLS = [*tails("short", 1550), *tails("long", 6500), *alone(), *beside(), *forks()]
STARTS = {
    "ggroupfs": MOUNT_S + START_S + FILL_S,
    "two": 2 * START_S + FILL_S,
    **dict.fromkeys(SYSTEMS, START_S + FILL_S + 2),
    **dict.fromkeys(("busy", "idle"), 3 * START_S + FILL_S),
    **dict.fromkeys(("forks-library", "forks-levers"), 4 * START_S + FILL_S),
}
"""Seconds that a session needs before its first cell."""


def chosen(words: Sequence[str], cells: Sequence[Cell] = CELLS) -> list[Cell]:
    """Return the cells whose names begin with one of these; all, where there are none."""
    return [one for one in cells if not words or any(one.name.startswith(word) for word in words)]


def plan(cells: Sequence[Cell], starts: Mapping[str, float] = STARTS) -> str:
    """Return how long these take, by piece and session; `starts` has the seconds that sessions need to begin."""
    lines, whole = list[str](), 0.0
    for piece in dict.fromkeys(one.piece for one in cells):
        mine = [one for one in cells if one.piece == piece]
        total = BUILD_S + MOUNT_S
        for session in dict.fromkeys(one.session for one in mine):
            each = [one for one in mine if one.session == session]
            start_s, seconds = starts.get(session, START_S + FILL_S), sum(one.seconds for one in each)
            total += start_s + seconds
            lines.append(f"  {session}: {len(each)} cells, {seconds:.0f} s and {start_s:.0f} s to begin")
            lines += [f"    {one.name}: {one.seconds:.1f} s" for one in each]
        lines.append(f"{piece}: {total:.0f} s")
        whole += total
    return "\n".join([*lines, f"all: {whole:.0f} s"])
