"""Telling: what is written of turns for people, into the log, and into the trace (:mod:`backend.common.tracing`)."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

import trio

from backend.common.tracing import TRACE
from backend.process.identity import Process
from backend.scheduler.bucket import Bucket
from backend.scheduler.memory.claims import Name, Rates
from backend.scheduler.memory.planner import Plan, Program
from backend.scheduler.memory.sets import Set

log = logging.getLogger(__name__)
log.setLevel(logging.INFO)  # no error, and seldom: an operator is to see it in the journal, without -v

AGAIN_S = 3600.0
"""Seconds in which the log tells of one level once."""
LINES = 0.1, 32
"""Such lines a second, and at once: a user may make slices, and have them come to be short."""


class Beginnings:
    """Tells the log of levels at which turns begin."""

    def __init__(self) -> None:
        self._bucket = Bucket(*LINES)
        self._told: dict[str, float] = {}

    def tell(self, level: str, sets: int) -> None:
        """Say that there are turns at a level, in so many sets, if that was not said lately."""
        now = trio.current_time()
        self._told = {other: at for other, at in self._told.items() if now < at + AGAIN_S}
        if level not in self._told and self._bucket.take(now):
            self._told[level] = now
            what = "%s: programs use more memory than there is room for, and have turns, in %d sets (-o turns=off)"
            log.info(what, level, sets)


def said(name: Name) -> str:
    """A program, in the trace."""
    return str(name.pid if isinstance(name, Process) else name)


def lever(what: str, name: Name, began_us: int, **figures: object) -> None:
    """Writes that the turn of a program ended or began, which has taken since `began_us`."""
    if TRACE.path is not None:
        TRACE.note(what, name=said(name), us=round(trio.current_time() * 1e6) - began_us, **figures)


def phase(
    plan: Plan, programs: Mapping[Name, Program], runs: Set, rates: Rates, seconds: float, troubles: Collection[Name]
) -> None:
    """Writes what a turn came to, or the gap before the next one, with all that was added since the last time. Of the
    gap the set is that whose turn begins; `lacks` is what each program has in the host by then, bytes."""
    ends_us = 0 if plan.ends_us is None else plan.ends_us - round(trio.current_time() * 1e6)
    lacks = {said(name): sum(claim.missing for claim in one.claims.values()) for name, one in programs.items()}
    TRACE.flush(
        "gap" if plan.is_over else "turn",
        us=round(seconds * 1e6),
        left_us=ends_us,
        set=[said(name) for name in (plan.coming if plan.is_over else runs)],
        sets=len(plan.sets),
        lacks=lacks,
        rates=[rates.out, rates.into],
        troubles=[said(name) for name in troubles],
    )
