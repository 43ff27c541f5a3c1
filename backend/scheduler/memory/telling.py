"""Telling: what the switch writes into the trace (:mod:`backend.common.tracing`), for people."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import trio

from backend.common.tracing import TRACE
from backend.process.identity import Process
from backend.scheduler.memory.claims import Name, Rates
from backend.scheduler.memory.planner import Plan, Program
from backend.scheduler.memory.sets import Set


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
