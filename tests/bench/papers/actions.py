"""Flyt's table 7 on a real GPU: applications that come and go, each with a bound, and what a policy does about it.

The rows are the paper's, their times a HASTE'th, and the load of each is the part of its GPUs that was occupied then,
spread over the applications that there were: less work than its SMs could have done, on other programs. The paper
publishes neither programs' times nor bounds. Here an application answers requests (critical.cu), and its bound is
UPPER times what one takes alone; a program without a bound fills each GPU, so that the rest is used.

Its GPUs are two. On one the load of a GPU is the mean of both, nothing can migrate, and the policy says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import attrs

from tests.bench.core.arrivals import SHAPE, arrivals, seed_of
from tests.bench.core.runner import Unavailable
from tests.bench.core.spread import percentile
from tests.bench.papers.cells import SECOND, Cell, Measured

NAME, REFERENCE, OURS = "flyt-actions", "time slicing", "ggroupfs, slo"
PAPERS_GPUS = 2
HASTE = 50
LEAST_S, MOST_S = 4.0, 10.0
"""Seconds of a phase, however short or long it is in the paper: in the rest of a long one nothing happens."""
UPPER, LOWER = 4.0, 1.5
"""Bounds of an application's mean latency, in times of a request that is alone."""
SHARE, STEP = 0.08, 0.08
"""Part of a GPU that an application has when it comes, and steps of it: 4 SMs of the paper's 48."""
SECONDS = 90.0
"""A cell takes about so long."""


@attrs.frozen
class Row:
    """A row of table 7."""

    at_s: float
    action: str
    apps: int
    occupied: tuple[int, int]
    """Percent of the SMs of each GPU."""


TABLE = (
    Row(2, "Start App", 1, (8, 0)),
    Row(13, "App ++", 2, (17, 0)),
    Row(57, "App ++", 4, (25, 0)),
    Row(154, "Vertical ++", 4, (42, 19)),
    Row(398, "Vertical ++", 4, (75, 19)),
    Row(588, "Vertical ++", 4, (92, 19)),
    Row(868, "Migrate ++", 4, (83, 25)),
    Row(1178, "App --", 4, (8, 44)),
    Row(2636, "Vertical ++", 6, (58, 56)),
    Row(2950, "SM limit reached", 6, (92, 56)),
)
APPS = max(row.apps for row in TABLE)


@attrs.frozen
class Phase:
    """What is asked of the applications for a while."""

    row: Row
    seconds: float
    load: float
    """Part of a GPU that the requests of one application need."""


def phases(gpus: int) -> list[Phase]:
    """Those of the table, on so many GPUs."""
    ends = [*(row.at_s for row in TABLE[1:]), TABLE[-1].at_s + HASTE * MOST_S]
    made = []
    for row, end in zip(TABLE, ends, strict=True):
        seconds = min(MOST_S, max(LEAST_S, (end - row.at_s) / HASTE))
        made.append(Phase(row, seconds, sum(row.occupied) / 100 * gpus / PAPERS_GPUS / row.apps))
    return made


Event = tuple[float, Mapping[str, Any]]
"""What a policy told, and the seconds since the begin."""


class Apps(Protocol):
    """Applications that run, and a program on each GPU that fills it."""

    @property
    def services(self) -> Sequence[float]:
        """Seconds that a request of each takes, alone."""
        ...

    def now(self) -> float:
        """Seconds since the begin."""
        ...

    def serve(self, arrivals: Sequence[Sequence[float]], seconds: float) -> Sequence[Sequence[float]]:
        """Requests to the first applications, at their times of a phase; their latencies, once the phase is over. What
        has not begun by then is given up, and its latency is how long it has waited."""
        ...

    def events(self) -> Sequence[Event]:
        """What the policy told so far."""
        ...

    def filled(self) -> int:
        """Products of the programs that fill."""
        ...

    @property
    def said(self) -> Sequence[str]:
        """What the daemon and the policy have logged."""
        ...


class Stage(Protocol):
    """A way to run applications."""

    @property
    def name(self) -> str: ...

    def enter(self, count: int, gpus: int) -> AbstractContextManager[Apps]:
        """So many of them, ready, with the policy at work. Unavailable where that cannot be."""
        ...


WORDS = {"share": "Vertical", "moved": "Migrate", "migrate": "limit reached", "refused": "refused"}
"""Words of the paper for what a policy tells."""


def word(event: Mapping[str, Any]) -> str:
    """The paper's word for an event; empty for one that it has no word for."""
    told = WORDS.get(str(event.get("event")), "")
    if told == "Vertical":
        return "" if not event["was"] else f"Vertical {'++' if event['share'] > event['was'] else '--'}"
    return f"{told} ++" if told == "Migrate" else told


def timeline(begun: Sequence[tuple[float, Row]], events: Sequence[Event], gpus: int) -> list[dict[str, Any]]:
    """Rows as the paper's: the time, what happened, the applications, and the shares of each GPU that they have, in
    percent."""
    shares: dict[tuple[str, int], float] = {}
    told: list[dict[str, Any]] = []
    marks: list[tuple[float, Row | Mapping[str, Any]]] = [*begun, *events]
    apps = 0
    for at, what in sorted(marks, key=lambda one: one[0]):
        if isinstance(what, Row):
            name = "" if what.apps == apps else f"App {'++' if what.apps > apps else '--'}"
            apps = what.apps
        else:
            name = word(what)
            if what.get("event") == "share":
                shares[str(what["group"]), int(what["gpu"])] = float(what["share"])
            if what.get("event") == "moved":
                shares.pop((str(what["group"]), int(what["gpu"])), None)
        if name:
            parts = [round(100 * sum(share for (_, on), share in shares.items() if on == gpu)) for gpu in range(gpus)]
            told.append({"at_s": round(at, 1), "action": name, "apps": apps, "shares": parts})
    return told


def measured(stage: Stage, gpus: int, seed: int) -> Callable[[int], Measured]:
    """What comes of the table."""

    def measure(number: int) -> Measured:
        begun: list[tuple[float, Row]] = []
        met: list[bool] = []
        ratios: list[float] = []
        with stage.enter(APPS, gpus) as apps:
            filled, start = apps.filled(), apps.now()
            for order, phase in enumerate(phases(gpus)):
                begun.append((apps.now(), phase.row))
                due = [
                    arrivals(
                        max(phase.load / service, 1 / phase.seconds),
                        phase.seconds,
                        seed_of(seed, NAME, number, order, one),
                        SHAPE,
                    )
                    for one, service in enumerate(apps.services[: phase.row.apps])
                ]
                for service, latencies in zip(apps.services, apps.serve(due, phase.seconds), strict=False):
                    met += [latency <= UPPER * service for latency in latencies]
                    ratios += [latency / service for latency in latencies]
            rate = (apps.filled() - filled) / (apps.now() - start)
            events = list(apps.events())
        if not met:
            raise Unavailable("no application answered")
        moves = [1e3 * float(event["seconds"]) for _, event in events if event.get("event") == "moved"]
        found = {
            "attained": sum(met) / len(met),
            "latency_ratio": sum(ratios) / len(ratios),
            "batch_per_s": rate,
            "requests": float(len(met)),
            "actions": float(sum(bool(word(event)) for _, event in events)),
        }
        if moves:
            found["migrate_ms"] = percentile(moves, 0.5)
        return Measured(found, {"timeline": timeline(begun, events, gpus)}, apps.said)

    return measure


def cells(stages: Sequence[Stage], seed: int) -> Iterator[Cell]:
    """All of them, on one GPU and on the paper's two."""
    for count in (1, PAPERS_GPUS):
        for stage in stages:
            yield Cell(NAME, stage.name, {"gpus": count}, SECONDS, measured(stage, count, seed), count, SECOND)
