"""Sections of the page, one per scenario: title, sentence, figures of the table, and plot."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

WAITS = ("p50_ms", "p99_ms", "batch_per_s", "given_up")


@attrs.frozen
class Section:
    """One section of the page."""

    title: str
    text: str
    """What was measured, without results."""
    figures: Sequence[str]
    """Columns of its table, as far as the record has them."""
    plot: str = ""
    """Name of a function of `plots`; empty for no plot."""


LATENCY = (
    "Requests come in bursts (gamma-distributed gaps, shape {shape}, seed {seed}), of which the program alone would be "
    "busy for the load's part of the time; latency counts from arrival. Alone a request takes {service_ms:.2f} ms. "
    "{kind} The batch programs multiply matrices back to back; all data is zeros, which takes "
    "the least power. What was not begun {twice:g} s after the first request "
    "is given up, and makes the p99 a lower bound (≥). `x`: of the figure alone."
)

TURNED = (
    "{what} of 8.5 GiB each in a slice that has room for a part of what they hold, contexts counted: 150 % is two "
    "thirds. Turns are of half a second at most, or of one where it says so. `of room for all`: the part of its own "
    "speed that a program keeps, in the mean, of the same programs just before. The bus carries {{bus_out_gb_s:.1f}} "
    "GB/s to the host and {{bus_in_gb_s:.1f}} to the GPU, one way at a time, and {{bus_both_out_gb_s:.1f}} and "
    "{{bus_both_in_gb_s:.1f}} both at once, as what the library moves for turns."
)
KEPT = ("kept", "least_kept", "passes_per_s", "in_gb_s", "out_gb_s", "written_part", "missed_part", "over_part")

SECTIONS = {
    "latency-decode": Section(
        "Latency-critical requests beside batch programs: decoding",
        LATENCY.replace("{kind}", "A request is many short kernels, bound by memory."),
        WAITS,
        "latency",
    ),
    "latency-convolution": Section(
        "Latency-critical requests beside batch programs: convolutions",
        LATENCY.replace("{kind}", "A request is some medium kernels, bound by arithmetic."),
        WAITS,
        "latency",
    ),
    "pressure": Section(
        "Memory pressure",
        "A program that holds more than a budget of 16 GiB, and uses half of it in one pass of eight only. The card is "
        "never oversubscribed with unified memory, which can hang it: that has the budget as a rule that the program "
        "keeps by itself, and far less than the card has free. What has a limit is measured once it gets no faster "
        "from one 6 s to the next.",
        ("passes_per_s", "settled_s"),
        "pressure",
    ),
    "pareto": Section(
        "SLO attainment against batch throughput",
        "The axes are those of figure 14 of Ghost: the SLO is the p99 alone ({slo_ms:.2f} ms, with 2 % of slack), at a "
        "load of 35 %. The programs are others: there they contend for memory too, and here both fit on the card, so "
        "that they contend for its time alone. Each point is a timeslice, or a limit of the batch program's memory.",
        ("attained", "passes_per_s", "p99_ms"),
        "pareto",
    ),
    "policies": Section(
        "Memory that follows the load",
        "A server of bursts and a batch program, 16 GiB in a budget of 14: a static split, and two policies.",
        ("p50_ms", "p99_ms", "batch_per_s"),
    ),
    "levers": Section(
        "Levers",
        "From the begin of a write to its return, when it holds; and from a program's first context until it is in the "
        "tree, which it is at the next of the daemon's looks, one each 200 ms: a dozen programs, each begun in another "
        "part of that. The reference is a write that moves nothing. What was beside strangers, such as a monitor, is "
        "left out.",
        ("p50_ms", "p99_ms", "worst_ms", "disturbed"),
    ),
    "fairness": Section(
        "Shares by weight",
        "Three batch programs of weights 100, 200 and 400. MPS has no weights: it has percentages of threads in their "
        "ratio.",
        ("unfairness", "batch_per_s"),
    ),
    "bandwidth": Section(
        "Moving memory",
        "8 GiB, half of it out and in, next to what the bus gives.",
        ("out_gb_s", "in_gb_s"),
    ),
    "oversubscribed-decode": Section(
        "More memory than there is: decode loops",
        TURNED.format(
            what="Four programs, or eight, that read all of their memory in each step, as one CUDA graph or not,"
        ),
        KEPT,
        "kept",
    ),
    "oversubscribed-inference": Section(
        "More memory than there is: inference",
        TURNED.format(what="ResNet-152, VGG-19, Inception-v3 and DenseNet-201 with batches"),
        KEPT,
        "kept",
    ),
    "oversubscribed-mixed": Section(
        "More memory than there is: inference and a decode loop",
        TURNED.format(what="The same, and a decode loop,"),
        KEPT,
        "kept",
    ),
    "oversubscribed-science": Section(
        "More memory than there is: scientific programs",
        TURNED.format(
            what="A wavelet transform, a stencil, an unstructured gather and a scan for the nearest neighbour"
        ),
        KEPT,
        "kept",
    ),
    "oversubscribed-critical": Section(
        "More memory than there is: requests beside it",
        "A latency-critical program of best priority (convolutions, {load:.0%} load, bursts as above) beside three "
        "decode loops of 8.5 GiB, in a slice with room for all and with room for two thirds.",
        (*WAITS[:2], "passes_per_s", "given_up"),
    ),
    "files": Section(
        "One access to a file",
        "Client and server on one CPU, {calls} calls each; medians.",
        ("pread_us", "cat_us", "stat_us", "pwrite_us", "echo_us"),
        "files",
    ),
    "scale": Section(
        "A thousand and ten thousand processes",
        "Directories of processes in a tree, next to as many empty cgroups.",
        ("mkdir_us", "list_ms", "memory_mb", "idle_percent"),
    ),
    "salus": Section(
        "Traces of Salus, in virtual time",
        "The trace of its table 2 and its searches, replayed by `ggroupfs replay`; repetitions are other seeds. What "
        "was published of it, and the paper's figures: [replay](../docs/policies/replay.md#the-papers-workloads).",
        ("makespan_min", "completion_min", "completion_p95_min"),
    ),
    "flyt": Section(
        "Table 6 of Flyt, in virtual time",
        "A critical program that computes half of the time, beside some of best effort. The paper publishes no trace, "
        "and of the programs of its table 7 neither times nor bounds; table 6 is what there is to replay. The paper: "
        "2.02 s alone, 2.01 to 2.04 beside one to four.",
        ("mean_ms", "others_part"),
    ),
}
"""Sections by scenario, in the order of the page."""
