"""The panels of the dashboard, with their PromQL expressions and units."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

CHOSEN = 'instance=~"$instance",gpu=~"$gpu"'
"""Selector by the variables of the dashboard: nodes and GPUs."""
INTERVAL = "$__rate_interval"
"""Time over which rates are taken; Grafana fits it to the scrape interval."""


@attrs.frozen
class Curve:
    """One expression of a panel."""

    expression: str
    """PromQL expression, with the variables of the dashboard."""
    legend: str
    """Name of a series, with its labels in double braces."""


@attrs.frozen
class Panel:
    """One panel."""

    title: str
    words: str
    """Meaning of the panel, and advice."""
    unit: str
    """Grafana's name of the unit: `bytes`, `percentunit`, `s`, `short`."""
    curves: Sequence[Curve]


def _slices(metric: str) -> str:
    """Return the metric of all slices."""
    return f"ggroup_slice_{metric}{{{CHOSEN}}}"


def _top(metric: str) -> str:
    """Return the metric of the top-level slices, which cover all of a GPU but processes in the root cgroup.

    Unlike a sum over programs, these counters keep counting when a program ends.
    """
    return f'ggroup_slice_{metric}{{{CHOSEN},slice=~"/[^/]+"}}'


def _processes(metric: str) -> str:
    return f"ggroup_process_{metric}{{{CHOSEN}}}"


def _gpu(metric: str) -> str:
    return f"ggroup_gpu_{metric}{{{CHOSEN}}}"


SLICE, PROCESS, GPU = "{{slice}} on GPU {{gpu}}", "{{comm}} {{pid}} on GPU {{gpu}}", "{{instance}} GPU {{gpu}}"

PANELS: Sequence[Panel] = (
    Panel(
        "GPUs at work",
        "Time on the engine of all programs of a GPU. Well below 1 beside waits: look at freezes and quotas.",
        "percentunit",
        [Curve(f"sum by (instance, gpu) (rate({_top('busy_seconds_total')}[{INTERVAL}]))", GPU)],
    ),
    Panel(
        "Memory of GPUs",
        "Part of the capacity that is taken. At 1 the next allocation moves memory of others to the host.",
        "percentunit",
        [Curve(f"{_gpu('resident_bytes')} / {_gpu('capacity_bytes')}", GPU)],
    ),
    Panel(
        "GPUs there, and trees that answer",
        "1 each. A GPU at 0 is lost (gpu.events); a tree at 0 has no daemon, and nothing else is told of its node.",
        "short",
        [
            Curve(_gpu("present"), GPU),
            Curve('ggroup_up{instance=~"$instance"}', "{{instance}} tree"),
        ],
    ),
    Panel(
        "Time by slice",
        "Part of a GPU's time that each slice has. Beside others that want it, that goes by weight and priority.",
        "percentunit",
        [Curve(f"topk(10, rate({_slices('busy_seconds_total')}[{INTERVAL}]))", SLICE)],
    ),
    Panel(
        "Memory by slice",
        "GPU memory of the ten largest slices. Slices in each other count the same bytes.",
        "bytes",
        [Curve(f"topk(10, {_slices('resident_bytes')})", SLICE)],
    ),
    Panel(
        "Memory in the host by slice",
        "GPU memory that is swapped out. Raise the limit of a slice that needs it at each turn.",
        "bytes",
        [Curve(f"topk(10, {_slices('swap_bytes')} > 0)", SLICE)],
    ),
    Panel(
        "Nearest to their limit",
        "Memory over gmem.limit.high. At 1 the slice is reclaimed; slices without a limit are at 0.",
        "percentunit",
        [Curve(f"topk(10, {_slices('resident_bytes')} / {_slices('limit_high_bytes')})", SLICE)],
    ),
    Panel(
        "Moved between GPU and host",
        "Bytes a second that reclaim and turns of memory move. Both for minutes: more is used than there is room for.",
        "Bps",
        [
            Curve(f"sum by (instance, gpu) (rate({_top('swapin_bytes_total')}[{INTERVAL}]))", GPU + " to the GPU"),
            Curve(f"sum by (instance, gpu) (rate({_top('swapout_bytes_total')}[{INTERVAL}]))", GPU + " to the host"),
        ],
    ),
    Panel(
        "Kept off the runlist by the scheduler",
        "Part of the time for which a program waits for those that go before it, or for its quota.",
        "percentunit",
        [Curve(f"topk(10, rate({_processes('throttled_seconds_total')}[{INTERVAL}]))", PROCESS)],
    ),
    Panel(
        "Programs off the runlist, by reason",
        "Programs that do not run now. `freeze` is compute.freeze; `turn` ends by itself.",
        "short",
        [Curve(f"sum by (instance, gpu, reason) ({_top('off_runlist')})", GPU + ": {{reason}}")],
    ),
    Panel(
        "Events of memory",
        "Events a second of gmem.events. `oom` and `max`: programs are refused; `low`: protection was broken.",
        "short",
        [Curve(f"sum by (instance, gpu, event) (rate({_top('events_total')}[{INTERVAL}]))", GPU + ": {{event}}")],
    ),
    Panel(
        "Programs, and scrapes that lacked some",
        "Programs with a context on a GPU; groups that the last scrape could not read.",
        "short",
        [
            Curve(f"count by (instance, gpu) ({_processes('resident_bytes')})", GPU),
            Curve('ggroup_scrape_errors{instance=~"$instance"}', "{{instance}} not read"),
        ],
    ),
)
"""All panels, in the order of the dashboard."""
