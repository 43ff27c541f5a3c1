"""``ggroupfs replay``: simulate a policy on a trace of jobs, in virtual time, on one GPU or on a cluster."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from backend.scheduler.memory.turns import WAIT_US
from ggroupfs.errors import UsageError
from ggroupfs.policies.face import Policy
from ggroupfs.policies.lanes import Order
from ggroupfs.replay import workloads
from ggroupfs.replay.cluster import jobs as cluster_jobs
from ggroupfs.replay.cluster import published, report
from ggroupfs.replay.records import Outcome, Result, S
from ggroupfs.replay.simulator import Machine, Simulator
from ggroupfs.replay.trace import TraceJob, dump, parse
from ggroupfs.replay.turns import TurnsSimulator
from ggroupfs.text.values import size

KNOWN = {"lanes": "ggroupfs.policies.lanes:make"}
"""Short names of policies, and the MODULE:NAME of each."""
MOST_NODES, MOST_GPUS = 100_000, 64
"""Greatest number of nodes of a cluster, and of GPUs of a node."""
TURNS = "turns"
"""Name for `--policy` that selects turns of memory instead of a policy: all jobs run and take turns."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    machine = Machine()
    parser.add_argument(
        "trace", nargs="?", type=Path, metavar="TRACE", help="a job a line, see docs/policies/replay.md"
    )
    parser.add_argument("--policy", default="lanes", metavar="NAME|MODULE:NAME", help="what decides, or turns; lanes")
    parser.add_argument("--order", help="of lanes: " + ", ".join(Order))
    parser.add_argument("--lanes", metavar="NUMBER", help="of lanes: how many at most")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an option of the policy")
    parser.add_argument("--capacity", default=str(machine.capacity), metavar="BYTES", help="of GPU memory; 16G")
    parser.add_argument("--json", action="store_true", help="the figures, and each job, as an object")
    parser.add_argument("--plot", type=Path, metavar="DIRECTORY", help="draws what happened; needs matplotlib")
    parser.add_argument(
        "--generate", metavar="NAME", help="prints a trace: salus, day, cluster, or so many of one workload"
    )
    parser.add_argument("--nodes", type=_nodes, metavar="NUMBERxGPUS", help="a cluster, with its trace: 1000x8")
    parser.add_argument(
        "--place", default=",".join(report.POLICIES), metavar="NAME,...", help="placements to compare on a cluster; all"
    )
    parser.add_argument("--seed", type=int, default=1, help="of chance in --generate")
    parser.add_argument("--jobs", type=int, metavar="NUMBER", help="how many to generate: 100 of salus, 300 of another")


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand; return its exit status."""
    if arguments.generate is not None:
        if arguments.generate == "cluster":
            return _generate_cluster(arguments)
        comment = f"ggroupfs replay --generate {arguments.generate} --seed {arguments.seed}"
        sys.stdout.write(dump(_generated(arguments), comment))
        return 0
    if arguments.trace is None:
        raise UsageError("replay: a trace is needed, or --generate")
    if arguments.nodes is not None:
        return _cluster(arguments)
    with arguments.trace.open(encoding="utf-8", errors="replace") as lines:
        trace = parse(lines)
    machine = attrs.evolve(Machine(), capacity=_size(arguments.capacity))
    result = _result(arguments, trace, machine)
    print(json.dumps(as_json(result), indent=2) if arguments.json else as_text(result))
    if arguments.plot is not None:
        _plot(result, arguments.plot)
    return 0


def _result(arguments: argparse.Namespace, trace: Sequence[TraceJob], machine: Machine) -> Result:
    """Return the result of the policy on a trace; or of turns of memory, which the daemon schedules without a
    policy.
    """
    if arguments.policy != TURNS:
        return Simulator(trace, _policy(arguments, machine.capacity), machine).run()
    options = _options(arguments)
    try:
        wait_s, is_on = float(options.pop("wait", WAIT_US / 1e6)), ("off", "on").index(options.pop("turns", "on"))
        if options or not 0 < wait_s < float("inf"):
            raise ValueError
    except ValueError:
        raise UsageError("replay: --set of turns is wait=SECONDS, or turns=on or off") from None
    return TurnsSimulator(trace, machine, round(wait_s * 1e6), bool(is_on)).run()


def as_json(result: Result) -> dict[str, Any]:
    """Return figures and jobs, with times in seconds."""
    return {"summary": attrs.asdict(result.summary()), "jobs": [_job_as_json(outcome) for outcome in result.outcomes]}


def as_text(result: Result) -> str:
    """Return the figures as text."""
    summary = result.summary()
    rows = [
        ("makespan", f"{summary.makespan_s / 60:.1f} min"),
        ("mean queuing", f"{summary.queuing_mean_s / 60:.1f} min"),
        ("mean completion", f"{summary.completion_mean_s / 60:.1f} min"),
        ("95 % completion", f"{summary.completion_p95_s / 60:.1f} min"),
        ("GPU busy", f"{100 * summary.gpu_busy:.1f} %"),
        ("most memory", f"{summary.memory_peak / (1 << 20):.0f} of {result.capacity / (1 << 20):.0f} MiB"),
        ("switches", f"{summary.switches}"),
        ("withdrawals", f"{summary.withdrawals}"),
    ]
    refused = f", {summary.refused} refused" if summary.refused else ""
    return "\n".join([f"{summary.jobs} jobs{refused}", *(f"{name:<17}{value}" for name, value in rows)])


def _job_as_json(outcome: Outcome) -> dict[str, Any]:
    return {
        "job": outcome.trace.job,
        "arrived_s": outcome.arrived / S,
        "started_s": None if outcome.started is None else outcome.started / S,
        "finished_s": None if outcome.finished is None else outcome.finished / S,
        "service_s": outcome.service / S,
        "withdrawals": outcome.withdrawals,
    }


def _generated(arguments: argparse.Namespace) -> list[TraceJob]:
    name, jobs = arguments.generate, arguments.jobs
    if jobs is not None and jobs < 1:
        raise UsageError("replay: --jobs is 1 or more")
    if name == "salus":
        return workloads.salus(arguments.seed, jobs or 100)
    if name == "day":
        return workloads.day(arguments.seed)
    if name in workloads.WORKLOADS:
        return workloads.equal(name, jobs or 300)
    raise UsageError(f"replay: there is no workload {name!r}; there are salus, day, {', '.join(workloads.WORKLOADS)}")


def _generate_cluster(arguments: argparse.Namespace) -> int:
    if arguments.nodes is None:
        raise UsageError("replay: --generate cluster needs --nodes, such as 1000x8")
    if arguments.jobs is not None and arguments.jobs < 1:
        raise UsageError("replay: --jobs is 1 or more")
    nodes, per_node = arguments.nodes
    comment = f"ggroupfs replay --generate cluster --nodes {nodes}x{per_node} --seed {arguments.seed}"
    sys.stdout.writelines(cluster_jobs.dump(published.day(arguments.seed, nodes * per_node, arguments.jobs), comment))
    return 0


def _cluster(arguments: argparse.Namespace) -> int:
    """Print a line for each placement when it is done."""
    names = arguments.place.split(",")
    for name in names:
        if name not in report.POLICIES:
            raise UsageError(f"replay: there is no placement {name!r}; there are {', '.join(report.POLICIES)}")
    with arguments.trace.open(encoding="utf-8", errors="replace") as lines:
        try:
            trace = cluster_jobs.parse(lines)
        except ValueError as error:
            raise UsageError(f"replay: {arguments.trace}: {error}") from None
    if not trace:
        raise UsageError(f"replay: {arguments.trace} has no job")
    try:
        rows = [report.row(trace, name, *arguments.nodes) for name in names]
    except ValueError as error:
        raise UsageError(f"replay: {error}") from None
    print(json.dumps([attrs.asdict(row) for row in rows], indent=2) if arguments.json else report.as_text(rows))
    return 0


def _nodes(word: str) -> tuple[int, int]:
    """Return the number of nodes and the GPUs of each. argparse.ArgumentTypeError for a word that is not
    NUMBERxGPUS.
    """
    nodes, _, gpus = word.partition("x")
    if not (nodes.isascii() and nodes.isdigit() and gpus.isascii() and gpus.isdigit()):
        raise argparse.ArgumentTypeError(f"{word!r} is not NUMBERxGPUS")
    if not (1 <= int(nodes) <= MOST_NODES and 1 <= int(gpus) <= MOST_GPUS):
        raise argparse.ArgumentTypeError(f"{word!r}: 1 to {MOST_NODES} nodes of 1 to {MOST_GPUS} GPUs")
    return int(nodes), int(gpus)


def _options(arguments: argparse.Namespace) -> dict[str, str]:
    options: dict[str, str] = {}
    for word in arguments.set:
        key, equals, value = word.partition("=")
        if not (key and equals):
            raise UsageError(f"replay: --set {word!r} is not KEY=VALUE")
        options[key] = value
    return options | {key: value for key in ("order", "lanes") if (value := getattr(arguments, key)) is not None}


def _policy(arguments: argparse.Namespace, capacity: int) -> Policy:
    options = _options(arguments)
    try:
        return _factory(arguments.policy)(capacity, options)
    except ValueError as error:
        raise UsageError(f"replay: {error}") from None


def _factory(name: str) -> Callable[[int, Mapping[str, str]], Policy]:
    """Return the factory of a policy. UsageError if there is none of that name."""
    module, colon, attribute = KNOWN.get(name, name).partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute) if colon else None
    except (ImportError, AttributeError) as error:
        raise UsageError(f"replay: {name}: {error}") from None
    if not callable(found):
        raise UsageError(f"replay: there is no policy {name!r}")
    factory: Callable[[int, Mapping[str, str]], Policy] = found
    return factory


def _size(word: str) -> int:
    try:
        return size(word)
    except (OSError, ValueError):
        raise UsageError(f"replay: {word!r} is no size") from None


def _plot(result: Result, directory: Path) -> None:
    try:
        from ggroupfs.replay import plots
    except ImportError:
        raise UsageError("replay: --plot needs matplotlib (pip install 'ggroupfs[plots]')") from None
    directory.mkdir(parents=True, exist_ok=True)
    plots.draw(result, directory)
