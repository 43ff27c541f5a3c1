"""Each paper's headlines, and what a record has of the same: the rows of docs/comparison.md.

A row is what a paper says, where, how it was measured there and here, and a function that makes ours of a record. Where
no record has it, the row says so; no figure of ours stands here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs

from tests.bench.core.record import Record
from tests.bench.core.spread import Spread
from tests.bench.page.tables import number
from tests.bench.papers import actions, flyt, pairs, salus, scale
from tests.bench.papers.page import figures_of, point

LATENCIES = ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")
OURS = "ggroupfs"
PRESSED = tuple(f"{OURS}, {how}" for how in ("static", "dynamic", "cooperative", "turns"))
"""Our ways with less memory than both programs hold."""
ABSENT = "not measured"


@attrs.frozen
class Headline:
    """A row."""

    paper: str
    what: str
    theirs: str
    """With its section or figure."""
    conditions: str
    """Theirs, and ours."""
    ours: Callable[[Record], str]
    """Of a record of the papers' pairs; empty where it has nothing of it."""
    replayed: Callable[[Record], str] = lambda record: ""
    """Of benchmarks/record.json, such as a replay in virtual time; likewise."""


def ratio(figures: Mapping[str, float], alone: Mapping[str, float], name: str) -> float | None:
    """A figure over that alone; None where one is missing, or is a bound."""
    if name not in figures or not alone.get(name) or (name.startswith("ttft") and figures.get("given_up")):
        return None
    return figures[name] / alone[name]


def alone_of(record: Record) -> Mapping[str, float]:
    """Figures of the server alone."""
    return figures_of(record, pairs.EXCLUSIVE, arrivals="gamma")


def _each(systems: Sequence[str], told: Callable[[str], str]) -> str:
    """What is told of systems, those of which nothing is left out."""
    found = [(told(system), system.removeprefix(f"{OURS}, ")) for system in systems]
    return ", ".join(f"{words} ({system})" if len(systems) > 1 else words for words, system in found if words)


def latencies(systems: Sequence[str], low: str, memory: int, names: Sequence[str]) -> Callable[[Record], str]:
    """Figures of the server beside another program, in times of those alone."""

    def told(record: Record) -> str:
        def one(system: str) -> str:
            figures = figures_of(record, system, low=low, memory=memory, arrivals="gamma")
            found = [ratio(figures, alone_of(record), name) for name in names]
            return "" if None in found else " / ".join(number(value) for value in found if value is not None)

        return _each(systems, one)

    return told


def traded(systems: Sequence[str], low: str, memory: int) -> Callable[[Record], str]:
    """SLO attainment, and the other program's throughput of that alone."""

    def told(record: Record) -> str:
        alone = figures_of(record, pairs.EXCLUSIVE, low=low).get("steps_per_s", 0.0)

        def one(system: str) -> str:
            found = point(figures_of(record, system, low=low, memory=memory, arrivals="gamma"), alone)
            return f"{number(found[1])} at {number(found[0])}" if found else ""

        return _each(systems, one)

    return told


def capped(record: Record) -> str:
    """The other program's throughput with a part of its memory, of that with all."""
    alone, words = figures_of(record, pairs.EXCLUSIVE, low="diffusion").get("steps_per_s", 0.0), []
    for percent in pairs.OWN:
        mine = figures_of(record, OURS, low="diffusion", own=percent).get("steps_per_s")
        if mine is not None and alone:
            words.append(f"{number(mine / alone)} with {percent} %")
    return ", ".join(words)


def ratios(scenario: str, system: str, figure: str, **case: object) -> Callable[[Record], list[float]]:
    """Medians of a figure's ratios to the reference, of all cases that have these values."""

    def found(record: Record) -> list[float]:
        run, made = record.runs.get(scenario), []
        for cell in run.cells if run else ():
            if cell.system == system and case.items() <= cell.case.items() and run is not None:
                mine = run.ratios(cell, figure)
                made += [Spread.of(mine).median] if mine else []
        return made

    return found


def ranged(found: Callable[[Record], list[float]], words: str = "{} of native") -> Callable[[Record], str]:
    """The least and the most of some ratios, in words."""

    def told(record: Record) -> str:
        values = found(record)
        if not values:
            return ""
        least, most = (f"{end(values):.4g}" for end in (min, max))
        return words.format(least if least == most else f"{least} to {most}")

    return told


def medians(scenario: str, system: str, figure: str, **case: object) -> Callable[[Record], list[float]]:
    """Medians of a figure, of all cases that have these values."""

    def found(record: Record) -> list[float]:
        run = record.runs.get(scenario)
        cells = [cell for cell in (run.cells if run else ()) if cell.system == system]
        values = [cell.values(figure) for cell in cells if case.items() <= cell.case.items()]
        return [Spread.of(one).median for one in values if one]

    return found


def packed(record: Record) -> str:
    """Models on one GPU, and what their mean latency is above that alone."""
    words = []
    for system in (OURS, "MPS", "time slicing"):
        hosted, mine = (medians(salus.PACKING, system, name)(record) for name in ("hosted", "mean_ms"))
        alone = medians(salus.PACKING, salus.EXCLUSIVE, "mean_ms")(record)
        if hosted and mine and alone:
            words.append(f"{number(hosted[0])} with {number(mine[0] - alone[0])} ms more ({system})")
    return ", ".join(words)


def traced(record: Record) -> str:
    """Makespan and mean completion time of the trace, of FIFO's."""
    names = ("makespan_min", "completion_min")
    found = [ratios(salus.TRACE, OURS, name)(record) for name in names]
    return f"{number(found[0][0])} and {number(found[1][0])} of FIFO's" if all(found) else ""


def replayed(record: Record) -> str:
    """The same, replayed, by our policies."""
    words = []
    for system in ("PACK", "SRTF", "FAIR"):
        found = [ratios("salus", system, name, trace="table 2")(record) for name in ("makespan_min", "completion_min")]
        if all(found):
            words.append(f"{system} {number(found[0][0])} and {number(found[1][0])}")
    return ", ".join(words)


def acted(record: Record) -> str:
    """What the policy did, and how many requests kept their bounds."""
    words = []
    for gpus in (1, actions.PAPERS_GPUS):
        did, kept = (medians(actions.NAME, actions.OURS, name, gpus=gpus)(record) for name in ("actions", "attained"))
        sliced = medians(actions.NAME, actions.REFERENCE, "attained", gpus=gpus)(record)
        if did and kept:
            beside = f", {number(sliced[0])} by time slicing" if sliced else ""
            words.append(f"{gpus} GPUs: {number(did[0])} actions, {number(kept[0])} within bounds{beside}")
    return "; ".join(words)


def oversubscribed(record: Record) -> str:
    """What decode loops keep of their speed with less room than they hold."""
    words = []
    for percent in (150, 200, 300):
        found = medians("oversubscribed-decode", f"{OURS}, turns", "kept", percent=percent, programs=4)(record)
        words += [f"{number(max(found))} at {percent} %"] if found else []
    return ", ".join(words)


SERVER = "theirs: vLLM, Llama-3.1-8B, A100-40G; ours: transformers, the shape of Llama-3-8B"
PRESSURE = f"{SERVER}, 70 % of what both hold"
ROWS = (
    Headline(
        *("Ghost", "P99 of the times between tokens beside diffusion, memory scarce", "1.03 of that alone (AC, 6.3.1)"),
        f"{PRESSURE}; SD 3.5 Medium there, the UNet of SDXL here",
        latencies(PRESSED, "diffusion", pairs.PRESSED, ["itl_p99_ms"]),
    ),
    Headline(
        *("Ghost", "SLO attainment, at a part of the throughput of diffusion alone, memory scarce"),
        "1.0 at no more than 0.35; above 0.93 at 0.48 (AC); no peer above 0.8 (6.4, figure 14)",
        f"{PRESSURE}; the SLO is the P99 alone",
        traded(PRESSED, "diffusion", pairs.PRESSED),
    ),
    Headline(
        *("Ghost", "latency beside fine-tuning, memory scarce: P50 and P99 to the first token and between tokens"),
        "within 1.16 of those alone (AC, 6.3.1)",
        "theirs: vLLM and LoRA of Llama-3.2-3B, A100-40G; ours: a server of the shape of Llama-3-8B, all weights and "
        "moments of a Llama-3.2-3B, 70 % of what both hold",
        latencies(PRESSED, "finetune", pairs.PRESSED, LATENCIES),
    ),
    Headline(
        *("GVM", "latency beside diffusion, memory scarce: P50 and P99 to the first token and between tokens"),
        "within 1.15 of those alone (7.3.1)",
        PRESSURE,
        latencies(PRESSED, "diffusion", pairs.PRESSED, LATENCIES),
    ),
    Headline(
        *("GVM", "SLO attainment of a memory limit that follows the load", "above 0.9 (GVM-DYN, 7.4, figure 15)"),
        f"{PRESSURE}; at a part of the throughput of diffusion alone",
        traded(PRESSED[1:2], "diffusion", pairs.PRESSED),
    ),
    Headline(
        *("Ghost", "latency beside diffusion, memory for both: P50 and P99 to the first token and between tokens"),
        "up to 480, 184, 2.75 and 2.0 times below MIG's, at 0.88 of its throughput (6.3.2)",
        f"{SERVER}, in times of those alone; theirs on an A100-80G; MIG was not measured here",
        latencies((OURS,), "diffusion", 100, LATENCIES),
    ),
    Headline(
        *("Ghost, GVM", "SLO attainment, and throughput of diffusion, memory for both", "in a figure (12; 13)"),
        SERVER,
        traded((OURS,), "diffusion", 100),
    ),
    Headline(
        *("Ghost, GVM", "diffusion alone with 40 % of its memory on the GPU", "half of its throughput (6.5; 7.5)"),
        "theirs: SD 3.5 Medium, A100-40G; ours: the UNet of SDXL, 16 images at once",
        capped,
    ),
    Headline(
        *("Salus", "42 models on one GPU", "42 with less than 5 ms more; MPS takes 6 GPUs (5.3, figure 13)"),
        "theirs: P100, TensorFlow; ours: 14 models of table 3, three times each, a process each",
        packed,
    ),
    Headline(
        *("Salus", "a trace of 100 jobs: makespan, and mean completion time, of FIFO's"),
        "0.947 and 0.853 (PACK), 1.009 and 0.313 (SRTF), 0.994 and 0.566 (FAIR) (table 2)",
        "theirs: P100; ours: iterations a thirtieth, eight jobs at once, no order; replays in virtual time",
        traced,
        replayed,
    ),
    Headline(
        *("Salus", "300 jobs of superres_128: makespan, of FIFO's", "1 / 2.38 (5.2, figure 12)"),
        "theirs: P100; ours in virtual time",
        lambda record: "",
        ranged(ratios("salus", "PACK", "makespan_min", trace="300 x superres_128"), "{}"),
    ),
    Headline(
        *("Flyt", "speed of programs that compute, of that without it", "0.68 to 0.89 (table 4, shared memory)"),
        "theirs: Rodinia, A5000 or A4000, in virtual machines; ours: four like them, on the host",
        ranged(ratios(flyt.NAME, OURS, "passes_per_s", table=4)),
    ),
    Headline(
        *("Flyt", "cudaLaunchKernel, of the native time", "22 (table 5, shared memory)"),
        "the median of 2,000 launches of an empty kernel",
        ranged(ratios(flyt.NAME, OURS, "launch_us", table=5)),
    ),
    Headline(
        *("Flyt", "a critical program beside one to four others, of its time alone", "within 1.02 (table 6)"),
        "theirs: 8 of 16 SMs for it in each row; ours: back to back with compute.priority 0, all of the GPU alone",
        ranged(ratios(flyt.NAME, OURS, "mean_ms", table=6), "{}"),
        ranged(ratios("flyt", "ggroupfs, slo", "mean_ms"), "{}"),
    ),
    Headline(
        *("Flyt", "applications that come and go: what is done", "10 rows, the GPUs' SMs from 8 to 92 % (table 7)"),
        "theirs: eight of Rodinia; ours: six servers, the policy slo, times a fiftieth, a program that fills each GPU",
        acted,
    ),
    Headline(
        *("Flyt", "images a second of four networks, of native", "0.026 to 0.19 (table 8a, shared memory)"),
        "theirs: TorchServe, 8 SMs each; ours: batches of 30, one after the other",
        ranged(ratios(flyt.NAME, OURS, "images_per_s", table=8)),
    ),
    Headline(
        *("Flyt", "migration to another GPU", "about 300 ms (4.3)"),
        "theirs: state saved and restored between machines; ours: compute.migrate of busy programs on one host",
        ranged(medians(scale.SPREAD, scale.BALANCE, "migrate_ms"), "{} ms"),
    ),
    Headline(
        *("MSched", "decode loops that hold more than there is, of their speed with room for all"),
        "at 150, 200, 300 %: 57.88, 44.79, 33.60 times demand paging, which keeps 0.0129 in the mean (7.2, D)",
        "theirs: llama.cpp, Llama3-8B in int8, RTX 5080; ours: four loops of 8.5 GiB, turns of half a second",
        lambda record: "",
        oversubscribed,
    ),
)


def told(rows: Sequence[Headline], records: Sequence[Record], bench: Record) -> Iterator[tuple[Headline, str]]:
    """Each row, and ours of all records: those of the papers' pairs each with its GPU."""
    for row in rows:
        words = []
        for record in records:
            if mine := row.ours(record):
                words.append(f"{gpu_of(record)}: {mine}")
        if mine := row.replayed(bench):
            words.append(f"replayed: {mine}" if words or row.paper != "MSched" else mine)
        yield row, "; ".join(words) or ABSENT


def gpu_of(record: Record) -> str:
    """The GPU of a record. ValueError for one of several, or none."""
    names = {str(run.on.get("gpu", "none")) for run in record.runs.values()}
    if len(names) != 1:
        raise ValueError(f"this is a record of {', '.join(sorted(names)) or 'nothing'}")
    return names.pop()
