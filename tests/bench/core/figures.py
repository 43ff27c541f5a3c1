"""Kinds of figures: their units, and whether less or more of them is better."""

from __future__ import annotations

import attrs


@attrs.frozen
class Kind:
    """A kind of figure."""

    label: str
    """Name in tables and plots."""
    unit: str
    """Unit; empty for a fraction of 1, or a count."""
    lower: bool | None
    """Whether less is better; None for a figure that is only reported."""


KINDS = {
    "p50_ms": Kind("p50", "ms", True),
    "p99_ms": Kind("p99", "ms", True),
    "mean_ms": Kind("mean", "ms", True),
    "worst_ms": Kind("worst", "ms", None),
    "disturbed": Kind("beside strangers, left out", "", None),
    "requests": Kind("requests", "", None),
    "given_up": Kind("requests given up", "", None),
    "batch_per_s": Kind("batch", "1/s", False),
    "passes_per_s": Kind("passes", "1/s", False),
    "kept": Kind("of room for all", "", False),
    "least_kept": Kind("the slowest of them", "", None),
    "least_passes_per_s": Kind("passes a second of the slowest", "", None),
    "turns_per_s": Kind("turns", "1/s", None),
    "written_part": Kind("written out, of what came", "", True),
    "missed_part": Kind("used unexpectedly", "", True),
    "over_part": Kind("expected in vain", "", True),
    "settled_s": Kind("no faster after", "s", None),
    "others_ms": Kind("mean of the others", "ms", None),
    "actions": Kind("actions", "", None),
    "attained": Kind("requests within the SLO", "", False),
    "unfairness": Kind("farthest from its weight", "", True),
    "out_gb_s": Kind("to the host", "GB/s", False),
    "in_gb_s": Kind("to the GPU", "GB/s", False),
    "pread_us": Kind("pread", "us", True),
    "cat_us": Kind("cat", "us", True),
    "stat_us": Kind("stat", "us", True),
    "pwrite_us": Kind("pwrite", "us", True),
    "echo_us": Kind("echo", "us", True),
    "mkdir_us": Kind("mkdir of one", "us", True),
    "list_ms": Kind("ls -l of all", "ms", True),
    "memory_mb": Kind("daemon's memory", "MB", True),
    "idle_percent": Kind("daemon idle", "% of a CPU", None),
    "makespan_min": Kind("makespan", "min", True),
    "completion_min": Kind("mean completion", "min", True),
    "completion_p95_min": Kind("95 % complete in", "min", True),
    "latency_ratio": Kind("latency, of that alone", "", True),
    "ttft_p50_ms": Kind("TTFT p50", "ms", True),
    "ttft_p99_ms": Kind("TTFT p99", "ms", True),
    "itl_p50_ms": Kind("ITL p50", "ms", True),
    "itl_p99_ms": Kind("ITL p99", "ms", True),
    "steps_per_s": Kind("steps of the other", "1/s", False),
    "hosted": Kind("models on one GPU", "", False),
    "images_per_s": Kind("images", "1/s", False),
    "copy_in_us": Kind("cudaMemcpy of 4 MiB to the GPU", "us", True),
    "copy_out_us": Kind("cudaMemcpy of 4 MiB to the host", "us", True),
    "launch_us": Kind("cudaLaunchKernel", "us", True),
    "count_us": Kind("cudaGetDeviceCount", "us", True),
    "migrate_ms": Kind("a migration", "ms", True),
    "daemon_percent": Kind("daemon", "% of a CPU", True),
    "write_p50_us": Kind("write p50", "us", True),
    "write_p99_us": Kind("write p99", "us", True),
    "finished": Kind("jobs done", "", None),
    "others_part": Kind("the others' part of the GPU", "", False),
}
"""Kinds by the names that figures have in a record."""
