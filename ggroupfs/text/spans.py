"""Long time spans, read as systemd does: without a unit they are seconds (systemd.time(7))."""

from __future__ import annotations

import re
from decimal import Decimal

from backend.core.entries import FOREVER

SPAN = re.compile(r"(?P<number>[0-9]{1,30}(?:\.[0-9]{1,30})?)\s*(?P<unit>[a-zA-Zµμ]*)")

_MS = {
    Decimal("0.001"): "us usec µs μs",
    Decimal(1): "ms msec",
    Decimal(1000): "s sec second seconds",
    Decimal(60_000): "m min minute minutes",
    Decimal(3_600_000): "h hr hour hours",
    Decimal(86_400_000): "d day days",
    Decimal(7 * 86_400_000): "w week weeks",
    Decimal("30.44") * 86_400_000: "M month months",
    Decimal("365.25") * 86_400_000: "y year years",
}
UNITS = {"": Decimal(1000)} | {name: ms for ms, names in _MS.items() for name in names.split()}
"""Milliseconds per unit."""


def milliseconds(value: str) -> int:
    """Return a span in milliseconds, FOREVER for ``infinity``. ValueError with the reason."""
    rest = value.strip()
    if rest == "infinity":
        return FOREVER
    if not rest:
        raise ValueError("no time span")
    ms = Decimal(0)
    while rest:
        match = SPAN.match(rest)
        if match is None or match["unit"] not in UNITS:
            raise ValueError("not a time span: seconds, or as 10min, 1h 30min, 2d, infinity")
        ms += Decimal(match["number"]) * UNITS[match["unit"]]
        rest = rest[match.end() :].strip()
    if not 1 <= ms < FOREVER:
        raise ValueError("no time at all" if ms < 1 else "too long")
    return int(ms)


def shown(seconds: int) -> str:
    """Format seconds in at most two units, as in ``systemctl list-timers``: ``1h 30min``."""
    words: list[str] = []
    for name, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, seconds = divmod(seconds, size)
        if count and len(words) < 2:
            words.append(f"{count}{name}")
        elif words:
            break
    return " ".join(words) or "0s"
