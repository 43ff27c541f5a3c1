"""What a mounted tree says, as Prometheus metrics: one table, and a collector that reads the tree as any program does.

Processes and slices have metrics of different names: a slice counts what its processes do, so a sum over both would
count twice. Base units are bytes and seconds; a limit that is ``max`` is +Inf, so that a ratio to it is 0.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import attrs
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from backend.core.reasons import GR_ALONE
from backend.core.records import MAX
from backend.door.client import facts_of
from backend.process.identity import cgroup_of, is_hidden
from ggroupfs.client import GONE, Branch, Member, branches, content, flat, has_our_pids, members, numbers
from ggroupfs.text.origins import WORDS, origin
from ggroupfs.view.figures import Figures, figures_of, files_for

PATIENCE_S = 10.0
"""How long a scrape waits for the one before it. Prometheus waits as long for each, by default."""

Group = TypeVar("Group", Member, Branch)


@attrs.frozen
class Row:
    """One metric of every group."""

    name: str
    """Without ``ggroup_process_`` or ``ggroup_slice_`` before it, and without ``_total`` behind."""
    words: str
    """What it is."""
    figure: str
    """The figure that it is made of; no metric where the machine cannot tell that."""
    value: Callable[[Any], float | None] = float
    """From the figure to base units; None where that is nothing to tell."""
    counter: bool = False
    """Whether it only grows."""


def _limit(nbytes: int) -> float:
    return math.inf if nbytes >= MAX else nbytes


def _us(us: int) -> float:
    return us / 1e6


def _sms(count: int) -> float:
    return count or math.inf


def _quota(us: int) -> float:
    return math.inf if us >= MAX else us / 1e6


def _ms(ms: float) -> float | None:
    return ms / 1000 if ms else None  # the default of a slice is none by itself


ROWS = (
    Row("resident_bytes", "Memory on the GPU (gmem.current).", "current"),
    Row("swap_bytes", "GPU memory that is in the host (gmem.swap.current).", "swap"),
    Row("peak_bytes", "Highest memory on the GPU so far (gmem.peak).", "peak"),
    Row("swap_peak_bytes", "Highest GPU memory in the host so far (gmem.swap.peak).", "swap_peak"),
    Row("limit_high_bytes", "Limit of memory on the GPU (gmem.limit.high), +Inf for max.", "high", _limit),
    Row("limit_max_bytes", "Hard limit of memory on the GPU (gmem.limit.max), +Inf for max.", "limit_max", _limit),
    Row("limit_low_bytes", "Protected memory (gmem.limit.low), +Inf for max.", "low", _limit),
    Row("swap_max_bytes", "Limit of memory in the host (gmem.swap.max), +Inf for max.", "swap_max", _limit),
    Row("swapin_bytes", "Bytes moved back to the GPU.", "swapin_bytes", counter=True),
    Row("swapout_bytes", "Bytes moved to the host.", "swapout_bytes", counter=True),
    Row("exchanged_bytes", "Bytes that changed places with colder ones.", "exchanged_bytes", counter=True),
    Row("move_seconds", "Time that moves took.", "move_usec", _us, counter=True),
    Row("implicit_bytes", "Memory that the driver counts and no program charged.", "implicit"),
    Row("unmovable_bytes", "Memory that stays on the GPU whatever the limits say.", "unmovable"),
    Row("disputed_bytes", "Memory that was charged and the driver does not count.", "disputed"),
    Row("clean_bytes", "Copies in the host of memory that is on the GPU.", "clean"),
    Row("working_set_bytes", "Memory that its last turn used (gmem.stat).", "working_set"),
    Row("turn_missed_bytes", "Memory that its last turn used unexpectedly.", "turn_missed_bytes"),
    Row("turn_over_bytes", "Memory that was expected in its last turn in vain.", "turn_over_bytes"),
    Row("resident_byte_seconds", "Memory on the GPU times how long it was there.", "byte_seconds", counter=True),
    Row("timeslice_seconds", "Timeslice (compute.timeslice); none for the default of a slice.", "timeslice", _ms),
    Row("over_limit", "Whether it is over a limit, and reclaim has not changed that (gmem.events).", "over"),
    Row("past_library", "Whether a program in it holds much that its library did not see (gmem.events).", "past"),
    Row("frozen", "Whether it is frozen, and nothing of it runs (compute.events).", "frozen"),
    Row("populated", "Whether it has a context on the GPU (compute.events).", "populated"),
    Row("migrations", "Moves to another GPU; of a slice, to this one (compute.events).", "migrated", counter=True),
    Row("undone", "Times that a process undid its freeze or timeslice (compute.events).", "undone", counter=True),
    Row("gpu_losses", "Times that its GPU was lost while it was there (compute.events).", "lost", counter=True),
    Row("server_losses", "Times that the server of its space ended (compute.events).", "server_lost", counter=True),
    Row("weight", "Weight among groups of its priority (compute.weight).", "weight"),
    Row("priority", "Priority, 0 is served first (compute.priority).", "priority"),
    Row("quota_seconds", "Work on the GPU in each period (compute.max), +Inf for max.", "quota", _quota),
    Row("quota_period_seconds", "Period of compute.max.", "period", _us),
    Row("periods", "Periods of its quota in which it worked, or stood (gcgroup.stat).", "nr_periods", counter=True),
    Row("sms_max", "SMs that its kernels run on at most (compute.sm.max), +Inf for max.", "sm_max", _sms),
    Row("capped_launches", "Launches that ran on these SMs alone (gcgroup.stat).", "capped_launches", counter=True),
    Row("uncapped_launches", "Launches that ran on all SMs all the same.", "uncapped_launches", counter=True),
    Row("kernels_submitted", "Kernels submitted.", "submitted", counter=True),
    Row("kernels_finished", "Kernels finished.", "finished", counter=True),
    Row("gpu_seconds", "Time on the engine.", "gpu_usec", _us, counter=True),
    Row(
        "gpu_estimated_seconds",
        "About the time on the engine, where it cannot be measured.",
        "gpu_usec_estimate",
        _us,
        counter=True,
    ),
    Row("busy_seconds", "Time on the engine with work to do.", "busy_usec", _us, counter=True),
    Row(
        "busy_sampled_seconds",
        "What of the busy time comes from samples of the driver.",
        "busy_sampled_usec",
        _us,
        counter=True,
    ),
    Row("throttles", "Times that it was kept from running, for a turn or a quota.", "nr_throttled", counter=True),
    Row(
        "throttled_seconds",
        "Time for which it was kept from running.",
        "throttled_usec",
        _us,
        counter=True,
    ),
    Row("frozen_seconds", "Time for which it was to be frozen.", "frozen_usec", _us, counter=True),
    Row("since_seconds", "Time since which its counters count, of the Unix epoch.", "since"),
    Row("managed", "Whether its memory can be moved (gcgroup.stat).", "managed"),
)
"""In the order in which they are shown. The reasons to be off the runlist come besides, a label for each, and
``gmem.events``, a label for each event."""

FILES = files_for({"events", "off", *(row.figure for row in ROWS)})
"""What is read of a group."""


def label(text: str) -> str:
    """A name that holds any bytes, as Prometheus takes it: UTF-8, what is none spelt ``\\xff``."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


class Family:
    """The metrics of one kind of group: those of ROWS, and its events."""

    def __init__(self, kind: str, told: Collection[str] = WORDS) -> None:
        """`told` has those of the words of :mod:`ggroupfs.text.origins` that are labels, where a cgroup tells them."""
        self._told = frozenset(told)
        self._rows = [(row, self._metric(kind, row)) for row in ROWS]
        self._events = CounterMetricFamily(f"ggroup_{kind}_events", "What happened to it (gmem.events).", labels=())
        self._off = GaugeMetricFamily(
            f"ggroup_{kind}_off_runlist", "Processes off the runlist (gcgroup.stat).", labels=()
        )
        self._without_gr = GaugeMetricFamily(
            f"ggroup_{kind}_off_runlist_gr", "Those of them without the GR engine alone.", labels=()
        )

    def _metric(self, kind: str, row: Row) -> CounterMetricFamily | GaugeMetricFamily:
        if row.counter:
            return CounterMetricFamily(f"ggroup_{kind}_{row.name}", row.words, labels=())
        return GaugeMetricFamily(f"ggroup_{kind}_{row.name}", row.words, labels=())

    def add(self, names: Mapping[str, str], cgroup: str, figures: Figures) -> None:
        """One more group, which is in a cgroup: its path, or nothing where that is not known."""
        # One record for all samples. A word that is not told is left out: to Prometheus that is an empty label.
        labels = {name: label(text) for name, text in names.items()}
        labels |= {word: text for word, text in origin(cgroup).items() if word in self._told}
        for row, metric in self._rows:
            figure = getattr(figures, row.figure)
            if figure is not None and (value := row.value(figure)) is not None:
                metric.add_sample(metric.name + "_total" * row.counter, labels, value)
        for event, count in (figures.events or {}).items():
            self._events.add_sample(f"{self._events.name}_total", {**labels, "event": event}, count)
        for reason, processes in (figures.off or {}).items():
            if reason == GR_ALONE:
                self._without_gr.add_sample(self._without_gr.name, labels, processes)
            else:
                self._off.add_sample(self._off.name, {**labels, "reason": reason}, processes)

    def metrics(self) -> Iterator[Metric]:
        """All of them that have something to say."""
        for metric in (*(metric for _, metric in self._rows), self._off, self._without_gr, self._events):
            if metric.samples:
                yield metric


class TreeCollector(Collector):
    """Reads the tree anew for each scrape; one at a time, so that impatient scrapers do not add up on the daemon."""

    def __init__(self, mount: Path, *, processes: bool = True, labels: Collection[str] = WORDS) -> None:
        """`labels` has the words of :mod:`ggroupfs.text.origins` that are told."""
        self._mount, self._processes, self._labels = mount, processes, labels
        self._turn = threading.Lock()

    def collect(self) -> Iterator[Metric]:
        """Every metric. Where no tree answers, ``ggroup_up`` is 0 and nothing else is told."""
        began = time.monotonic()
        metrics: list[Metric] = []
        errors = 0
        up = self._turn.acquire(timeout=PATIENCE_S)
        if up:
            try:
                errors = self._scrape(metrics)
            except OSError:
                metrics, up = [], False
            finally:
                self._turn.release()
        yield GaugeMetricFamily("ggroup_up", "Whether the tree answers.", value=int(up))
        yield GaugeMetricFamily(
            "ggroup_scrape_duration_seconds", "Time that this scrape took.", value=time.monotonic() - began
        )
        yield GaugeMetricFamily("ggroup_scrape_errors", "Groups that this scrape could not read.", value=errors)
        yield from metrics

    def _scrape(self, metrics: list[Metric]) -> int:
        """Reads everything; how many groups could not be read. OSError where there is no tree."""
        metrics.extend(self._facts())
        uuids: dict[int, str] = {}
        metrics.extend(self._gpus(uuids))
        errors = 0
        if self._processes:
            processes = Family("process", self._labels)
            add = _process if has_our_pids(self._mount) else _stranger
            errors += sum(_failed(add, processes, member, uuids) for member in members(self._mount))
            metrics.extend(processes.metrics())
        slices = Family("slice", self._labels)
        errors += sum(_failed(_slice, slices, branch, uuids) for branch in branches(self._mount))
        metrics.extend(slices.metrics())
        return errors

    def _facts(self) -> Iterator[Metric]:
        facts = {"backend" if key == "gpu" else key: label(value) for key, value in facts_of(self._mount).items()}
        yield InfoMetricFamily("ggroup", "What serves the tree (ggroup.backend).", value=facts)
        controls = InfoMetricFamily(
            "ggroup_capability", "What each control does here (ggroup.capabilities).", labels=("control", "verdict")
        )
        for line in content(self._mount / "ggroup.capabilities").splitlines():
            controls.add_metric(line.split(), {})
        yield controls

    def _gpus(self, uuids: dict[int, str]) -> Iterator[Metric]:
        """Those of the GPUs, whose names are put into `uuids`."""
        names = ("gpu", "uuid")
        info = InfoMetricFamily("ggroup_gpu", "The GPU.", labels=names)
        capacity = GaugeMetricFamily("ggroup_gpu_capacity_bytes", "Memory of the GPU.", labels=names)
        resident = GaugeMetricFamily("ggroup_gpu_resident_bytes", "Memory of all processes on the GPU.", labels=names)
        present = GaugeMetricFamily("ggroup_gpu_present", "Whether the GPU is there (gpu.events).", labels=names)
        losses = CounterMetricFamily("ggroup_gpu_losses", "Times that the GPU was lost (gpu.events).", labels=names)
        for index in numbers(self._mount / "gpus"):
            gpu = self._mount / "gpus" / str(index)
            facts = {name: content(gpu / name) for name in ("uuid", "name", "pci")}
            uuids[index] = facts["uuid"]
            labels = (str(index), facts.pop("uuid"))
            info.add_metric(labels, facts)
            capacity.add_metric(labels, int(content(gpu / "gmem.capacity")))
            resident.add_metric(labels, int(content(gpu / "gmem.current")))
            events = flat(content(gpu / "gpu.events"))
            present.add_metric(labels, events["present"])
            losses.add_metric(labels, events["lost"])
        yield from (info, capacity, resident, present, losses)


def _process(family: Family, member: Member, uuids: Mapping[int, str]) -> None:
    # Its name first: when its files can still be read after that, the pid was its own all the time.
    try:
        cgroup, command = cgroup_of(member.pid).path, member.command()
    except OSError:
        if not is_hidden(member.pid):
            raise
        return _stranger(family, member, uuids)
    family.add(_names(member, uuids, cgroup, command), cgroup, figures_of(member.path, FILES))


def _stranger(family: Family, member: Member, uuids: Mapping[int, str]) -> None:
    """A process of which nothing is known but its pid in the tree."""
    family.add(_names(member, uuids), "", figures_of(member.path, FILES))


def _names(member: Member, uuids: Mapping[int, str], cgroup: str = "", command: str = "") -> Mapping[str, str]:
    names = {"gpu": str(member.gpu), "uuid": uuids.get(member.gpu, ""), "pid": str(member.pid)}
    return {**names, "slice": cgroup, "comm": command}


def _slice(family: Family, branch: Branch, uuids: Mapping[int, str]) -> None:
    names = {"gpu": str(branch.gpu), "uuid": uuids.get(branch.gpu, ""), "slice": branch.slice}
    family.add(names, branch.slice, figures_of(branch.path, FILES))


def _failed(
    add: Callable[[Family, Group, Mapping[int, str]], None], family: Family, group: Group, uuids: Mapping[int, str]
) -> bool:
    """Whether a group could not be added. One that ended while it was read is left out, and is no failure."""
    try:
        add(family, group, uuids)
    except OSError as error:
        return error.errno not in GONE
    return False
