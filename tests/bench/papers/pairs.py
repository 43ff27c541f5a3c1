"""Ghost's and GVM's pairs: an LLM server that comes first beside a diffusion model, and beside fine-tuning.

With memory for both (Ghost, section 6.3.2; GVM, 7.3.2), and with 70 % of what both hold (6.3.1; 7.3.1). Their server is
vLLM with Llama-3.1-8B, their others are Stable Diffusion 3.5 Medium and LoRA of Llama-3.2-3B by LLaMA-Factory, on an
A100; here it is transformers' continuous batching with the shape of Llama-3-8B, the UNet of SDXL, and all of a
Llama-3.2-3B with the moments of AdamW. Requests come as BurstGPT's do, by core.arrivals.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs

from tests.bench.core.arrivals import seed_of
from tests.bench.core.record import Case
from tests.bench.gpu.systems import Mps, Plain
from tests.bench.papers.cells import FIRST, LATER, SECOND, Cell, Measured
from tests.bench.papers.lab import Lab, Server, Steps
from tests.bench.papers.merging import Found
from tests.bench.papers.requests import Answer, figures, planned, slo_of
from tests.bench.papers.sharing import Alone, Driver, Ggroup, GgroupAlone, Sharing

NAME, EXCLUSIVE = "pairs", "exclusive"
LOWS: Mapping[str, Sequence[str]] = {
    "diffusion": ("diffusion", "--shape", "sdxl", "--batch", "16"),
    "finetune": ("finetune", "--shape", "llama-3.2-3b", "--batch", "4", "--tokens", "1024"),
}
"""The other program, and its options."""
RATE, SECONDS, AGAIN_S = 10.0, 24.0, 24.0
"""Requests a second; seconds in which they come; and after them, in which they may still be answered."""
SETTLE_S = 4.0
BEGIN_S, ALONE_S = 40.0, 10.0
"""Seconds that two programs take to start and end, for the plan; and in which the other one is measured alone."""
PRESSED = 70
DUTIES = (25, 50, 75)
"""Percent of the time that the other program may have: the points of the curve (figures 14 and 15)."""
OWN = (90, 40)
"""Percent of its memory that the other program has, alone: "10% of its working set", and the papers' breakdown."""
OWN_SETTLE_S = 8.0
"""Seconds after its limit was written: memory that is used most comes back."""
WAITED_MS = 1e3 * (SECONDS + AGAIN_S)


@attrs.frozen
class Size:
    """How much is asked of the server: less on a CPU."""

    rate: float = RATE
    seconds: float = SECONDS
    again: float = AGAIN_S
    settle: float = SETTLE_S
    scale: float = 1.0
    """Of the lengths of requests."""


def roomy() -> list[Sharing]:
    """Ways that are compared with memory for both."""
    return [
        Driver(Plain("time slicing")),
        Driver(Mps("MPS")),
        Driver(Mps("MPS, priorities", priority=lambda part: 0 if part.critical else 1)),
        Driver(Mps("MPS, the other at 30 %", percentage=lambda part: None if part.critical else 30)),
        Ggroup("ggroupfs"),
    ]


def pressed() -> list[Sharing]:
    """Ways that are compared with less."""
    return [
        Ggroup("ggroupfs, static"),
        Ggroup("ggroupfs, dynamic", "dynamic"),
        Ggroup("ggroupfs, cooperative", "cooperative"),
        Ggroup("ggroupfs, turns", "turns"),
        Driver(Plain("time slicing")),
        Driver(Mps("MPS, memory capped")),
    ]


def curve() -> list[tuple[str, int, Sharing]]:
    """More points of the curve under pressure: system, duty, and the way."""
    return [("ggroupfs, static", duty, Ggroup("ggroupfs, static", duty=duty)) for duty in DUTIES]


SPARED = frozenset({"MPS, priorities", "MPS, the other at 30 %"})
"""Systems that the first table can do without."""


def raw_of(answers: Sequence[Answer]) -> dict[str, object]:
    """What a cell keeps of a round, so that rounds are pooled and SLOs are found later."""
    return {"answers": [[one.ttft_ms, list(one.itl_ms)] for one in answers]}


def answers_of(raw: Mapping[str, object]) -> list[Answer]:
    """The same, read."""
    return [Answer(first, gaps) for first, gaps in raw.get("answers", [])]  # type: ignore[attr-defined]


@attrs.define
class Bench:
    """What all cells have in common."""

    lab: Lab
    seed: int
    size: Size = attrs.field(factory=Size)

    def round(self, server: Server, kind: str, number: int) -> list[Answer]:
        """The requests of a round, the same for every way."""
        seed = seed_of(self.seed, NAME, kind, number)
        requests = planned(kind, self.size.rate, self.size.seconds, seed, self.size.scale)
        return server.serve(requests, self.size.seconds + self.size.again, seed)

    def alone(self, kind: str) -> Callable[[int], Measured]:
        """The server with the GPU to itself."""

        def measure(number: int) -> Measured:
            with self.lab.server([]) as server:
                self.lab.sleep(self.size.settle)
                found = self.round(server, kind, number)
            return Measured(figures(found, WAITED_MS), raw_of(found))

        return measure

    def other(self, low: str) -> Callable[[int], Measured]:
        """The other program with the GPU to itself."""

        def measure(number: int) -> Measured:
            with self.lab.loops([([], LOWS[low])]) as (loop,):
                self.lab.sleep(self.size.settle)
                rate = self._rate(loop, lambda: self.lab.sleep(ALONE_S))
                loop.finish()
            return Measured({"steps_per_s": rate})

        return measure

    def own(self, alone: Alone, low: str, percent: int) -> Callable[[int], Measured]:
        """The other program alone with a part of its memory."""

        def measure(number: int) -> Measured:
            with alone.enter() as hold, hold.one(self.lab, LOWS[low], percent) as loop:
                self.lab.sleep(OWN_SETTLE_S)
                rate = self._rate(loop, lambda: self.lab.sleep(ALONE_S))
                loop.finish()
            return Measured({"steps_per_s": rate}, said=hold.said)

        return measure

    def beside(self, sharing: Sharing, low: str, kind: str, percent: int) -> Callable[[int], Measured]:
        """Both, by some way."""

        def measure(number: int) -> Measured:
            found: list[Answer] = []
            with sharing.enter(percent) as hold, hold.both(self.lab, LOWS[low]) as (server, loop):
                self.lab.sleep(self.size.settle)
                rate = self._rate(loop, lambda: found.extend(self.round(server, kind, number)))
                loop.finish()
            return Measured({**figures(found, WAITED_MS), "steps_per_s": rate}, raw_of(found), hold.said)

        return measure

    def _rate(self, loop: Steps, act: Callable[[], object]) -> float:
        """Steps a second of a program while something is done, from the end of a step to the end of another: steps may
        take as long as a second."""
        first, start = self._edge(loop)
        act()
        last, end = self._edge(loop)
        return (last - first) / (end - start)

    def _edge(self, loop: Steps) -> tuple[int, float]:
        """Steps, and the time, at the end of the next one; or where there is none for a while."""
        before, until = loop.passes, self.lab.now() + EDGE_S
        while loop.passes == before and self.lab.now() < until:
            self.lab.sleep(0.005)
        return loop.passes, self.lab.now()


EDGE_S = 5.0


def needed(system: str, low: str, kind: str, percent: int = 100) -> int:
    """Rank of a pair: the first table and the plots are of diffusion, with one kind of arrivals. Peers have no way to
    live with less memory, so what comes of that can wait."""
    peer = not system.startswith(("ggroupfs", EXCLUSIVE))
    if kind != "gamma" or system in SPARED or (peer and percent < 100):
        return LATER
    if low == "diffusion":
        return FIRST
    return SECOND if system in (EXCLUSIVE, "ggroupfs, static") else LATER


def cells(
    lab: Lab,
    seed: int,
    size: Size | None = None,
    ways: tuple[Sequence[Sharing], Sequence[Sharing]] | None = None,
    points: Sequence[tuple[str, int, Sharing]] | None = None,
    alone: Alone | None = None,
) -> Iterator[Cell]:
    """All of them: those alone first, and peers only with the first kind of arrivals."""
    bench = Bench(lab, seed, size or Size())
    both, less = (roomy(), pressed()) if ways is None else ways
    serves = bench.size.seconds + bench.size.settle + 4
    for kind in ("gamma", "onoff"):
        rank = needed(EXCLUSIVE, "diffusion", kind)
        yield Cell(NAME, EXCLUSIVE, {"arrivals": kind}, BEGIN_S + serves, bench.alone(kind), rank=rank)
    for low in LOWS:
        rank = needed(EXCLUSIVE, low, "gamma")
        yield Cell(NAME, EXCLUSIVE, {"low": low}, BEGIN_S + ALONE_S, bench.other(low), rank=rank)
    for low, percent in itertools.product(LOWS, (100, PRESSED)):
        case: Case = {"low": low, "memory": percent}
        for way in both if percent == 100 else less:
            ours = way.name.startswith("ggroupfs")
            kinds = ("gamma", "onoff") if ours and low == "diffusion" else ("gamma",)
            for kind in kinds:
                seconds = BEGIN_S + serves + (0 if ours or percent == 100 else BEGIN_S)
                more: Case = {**case, "arrivals": kind}
                measure, rank = bench.beside(way, low, kind, percent), needed(way.name, low, kind, percent)
                yield Cell(NAME, way.name, more, seconds, measure, rank=rank)
    for name, duty, way in curve() if points is None else points:
        at: Case = {"low": "diffusion", "memory": PRESSED, "arrivals": "gamma", "duty": duty}
        yield Cell(NAME, name, at, BEGIN_S + serves, bench.beside(way, "diffusion", "gamma", PRESSED))
    for percent in OWN:
        measure = bench.own(alone or GgroupAlone(), "diffusion", percent)
        seconds, rank = BEGIN_S + OWN_SETTLE_S + ALONE_S, SECOND if percent == min(OWN) else LATER
        yield Cell(NAME, "ggroupfs", {"low": "diffusion", "own": percent}, seconds, measure, rank=rank)


def complete(found: Sequence[Found]) -> list[Found]:
    """Add what attains the SLO: that of the server alone with the same arrivals, over all rounds together."""
    alone: dict[str, list[Answer]] = {}
    for one in found:
        if one.system == EXCLUSIVE and "arrivals" in one.case and one.absent is None:
            alone.setdefault(str(one.case["arrivals"]), []).extend(answers_of(one.raw))
    slos = {kind: slo_of(answers) for kind, answers in alone.items()}
    made = []
    for one in found:
        slo, answers = slos.get(str(one.case.get("arrivals"))), answers_of(one.raw)
        if slo is not None and answers:
            met = sum(map(slo.attained, answers)) / len(answers)
            one = attrs.evolve(one, figures={**one.figures, "attained": met})
        made.append(one)
    return made


def pooled(found: Sequence[Found]) -> list[tuple[str, Mapping[str, object], dict[str, float]]]:
    """Of each system and case, the figures of the requests of all rounds together: percentiles of hundreds."""
    whole: dict[tuple[str, str], tuple[Mapping[str, object], list[Answer], list[float]]] = {}
    for one in found:
        if one.absent is None:
            key = (one.system, repr(sorted(one.case.items())))
            _, answers, rates = whole.setdefault(key, (one.case, [], []))
            answers += answers_of(one.raw)
            rates += [one.figures["steps_per_s"]] if "steps_per_s" in one.figures else []
    alone: dict[str, list[Answer]] = {
        str(case["arrivals"]): answers
        for (system, _), (case, answers, _) in whole.items()
        if system == EXCLUSIVE and "arrivals" in case
    }
    slos = {kind: slo_of(answers) for kind, answers in alone.items()}
    made = []
    for (system, _), (case, answers, rates) in whole.items():
        told = figures(answers, WAITED_MS, slos.get(str(case.get("arrivals")))) if answers else {}
        if rates:
            told["steps_per_s"] = sum(rates) / len(rates)
        made.append((system, case, told))
    return made
