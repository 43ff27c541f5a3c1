"""Turns a snapshot into an outline for people: GPUs, the slices on them, and the processes in those. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from backend.core.families import NAME
from backend.core.records import MAX
from ggroupfs.view.figures import Figures
from ggroupfs.view.rates import UNKNOWN, Rates, total
from ggroupfs.view.snapshot import GpuUse, ProcessUse, SliceUse, Snapshot

Use = GpuUse | SliceUse | ProcessUse


Identity = tuple[str, int]
"""Directory of a node, and for a process the inode of that directory (0 for other nodes)."""

HISTORY_MOST = 8
"""Largest number of passes in a history."""


@attrs.frozen
class Node:
    """A GPU, or a slice or process on it, with its children."""

    use: Use
    """Record of the node in the snapshot."""
    label: str
    """Name among its siblings."""
    figures: Figures
    """Figures of the node; for a GPU, those of its memory."""
    rates: Rates
    """Rates of the node, or their sum over the processes in it."""
    children: tuple[Node, ...] = ()
    """Nodes in this one."""
    history: tuple[float | None, ...] = ()
    """Shares of the GPU in the last passes, oldest first."""

    @property
    def key(self) -> str:
        """Directory of the node, which is unique."""
        return self.use.directory

    @property
    def identity(self) -> Identity:
        """Identity of the node across passes: a process with a recycled pid is another one."""
        return self.key, self.use.inode if isinstance(self.use, ProcessUse) else 0


@attrs.frozen
class Line:
    """A line of the outline."""

    prefix: str
    """Branches drawn before the label."""
    node: Node
    """Node of the line."""
    folded: bool
    """Whether the node has children that are hidden."""


def _descending(field: str) -> Callable[[Node], tuple[Any, ...]]:
    """Return a sort key by a figure or a rate, largest first and unknown last."""

    def key(node: Node) -> tuple[Any, ...]:
        value = getattr(node.rates if hasattr(node.rates, field) else node.figures, field)
        return (value is None, 0 if value is None else -value, *_by_name(node))

    return key


def _by_name(node: Node) -> tuple[Any, ...]:
    """Sort key: slices by path, then processes by pid, so that the order is the same in every frame."""
    use = node.use
    return (1, use.pid, use.gpu) if isinstance(use, ProcessUse) else (0, node.key)


def _by_priority(node: Node) -> tuple[Any, ...]:
    """Sort key: the highest priority, 0, first."""
    priority = node.figures.priority
    return (priority is None, priority or 0, *_by_name(node))


def _by_user(node: Node) -> tuple[Any, ...]:
    """Sort key: the name of the user, with nodes other than processes last."""
    user = node.use.user if isinstance(node.use, ProcessUse) else ""
    return (not user, user, *_by_name(node))


NO_PAST: Mapping[Identity, Sequence[float | None]] = {}
"""The past before the first pass."""

ORDERS: Mapping[str, Callable[[Node], tuple[Any, ...]]] = {
    "pid": _by_name,
    "memory": _descending("current"),
    "swap": _descending("swap"),
    "share": _descending("share"),
    "kernels": _descending("kernels"),
    "weight": _descending("weight"),
    "priority": _by_priority,
    "user": _by_user,
}
"""Sort orders of siblings."""


def build(
    snapshot: Snapshot,
    rates: Mapping[str, Rates],
    *,
    unused: bool = True,
    past: Mapping[Identity, Sequence[float | None]] = NO_PAST,
) -> tuple[Node, ...]:
    """Return a node for each GPU, unsorted, with everything on that GPU.

    Without `unused`, a process that uses some GPU is left out on the GPUs that it does not use. `past` holds the shares
    of earlier passes.
    """
    slices: dict[int, dict[str, SliceUse]] = defaultdict(dict)
    for slice_ in snapshot.slices:
        slices[slice_.gpu][slice_.path] = slice_
    processes: dict[int, dict[str, list[Node]]] = defaultdict(lambda: defaultdict(list))
    for process in snapshot.processes if unused else _using(snapshot.processes):
        node = Node(process, f"{process.pid} {process.command}", process.figures, rates.get(process.directory, UNKNOWN))
        processes[process.gpu][process.slice].append(node)
    used = {above for process in snapshot.processes for above in _upwards(process.slice)}
    found = tuple(_gpu(gpu, slices[gpu.index], processes[gpu.index], used) for gpu in snapshot.gpus)
    return tuple(_with_history(node, past) for node in found)


def _using(processes: Iterable[ProcessUse]) -> Iterator[ProcessUse]:
    """Processes on GPUs that they use: `ggroupfs run` makes a directory for every GPU, and most programs use one."""
    every = list(processes)
    somewhere = {(one.pid, one.inode) for one in every if _uses(one)}
    yield from (one for one in every if _uses(one) or (one.pid, one.inode) not in somewhere)


def _uses(process: ProcessUse) -> bool:
    """Whether a process has a context or memory on the GPU. An unknown figure counts as a context."""
    figures = process.figures
    return figures.populated is not False or bool(figures.current or figures.swap)


def _with_history(top: Node, past: Mapping[Identity, Sequence[float | None]]) -> Node:
    """Add the shares up to now to a node and all below.

    Iterative, as cgroups can be nested deeper than Python recurses.
    """
    ready: dict[str, Node] = {}
    for node in reversed([*_walk([top])]):  # children before their parent
        shares = (*past.get(node.identity, ()), node.rates.share)[-HISTORY_MOST:]
        children = tuple(ready.pop(child.key) for child in node.children)
        ready[node.key] = attrs.evolve(node, history=shares, children=children)
    return ready[top.key]


def histories(nodes: Iterable[Node]) -> Mapping[Identity, Sequence[float | None]]:
    """Return the history of every node, for the next pass."""
    return {node.identity: node.history for node in _walk(nodes)}


def _gpu(
    gpu: GpuUse, slices: Mapping[str, SliceUse], processes: Mapping[str, list[Node]], used: Collection[str]
) -> Node:
    inside: dict[str, list[Node]] = defaultdict(list)
    for path, nodes in processes.items():
        # The slice may be missing, if the process moved during the pass; then the next slice above takes its place.
        inside[next((above for above in _upwards(path) if above in slices), "/")] += nodes
    for path, slice_ in reversed([*slices.items()]):  # a slice comes before the slices in it
        children = tuple(inside[path])
        # Every slice is on every GPU. Show it where it holds something or has settings, or if it is empty everywhere.
        if children or path not in used or _is_set(slice_.figures):
            above = path.rpartition("/")[0] or "/"
            sum_ = total(child.rates for child in children)
            inside[above].append(Node(slice_, path.rpartition("/")[2], slice_.figures, sum_, children))
    return Node(
        gpu,
        f"GPU {gpu.index} {gpu.name}" + ("" if gpu.present else " (lost)"),
        Figures(current=gpu.current, swap=_sum(child.figures.swap for child in inside["/"] if not _is_beside(child))),
        total(child.rates for child in inside["/"]),
        tuple(inside["/"]),
    )


def _is_beside(node: Node) -> bool:
    """Return whether a node is the slice of a family: its members are shown in their cgroup, beside it."""
    is_slice = isinstance(node.use, SliceUse) and not node.children
    return is_slice and NAME.fullmatch(node.label) is not None


def _upwards(path: str) -> Iterator[str]:
    """Yield a slice and those above it, without the root."""
    while path.strip("/"):
        yield path
        path = path.rpartition("/")[0]


def _is_set(figures: Figures) -> bool:
    return figures.high not in (None, MAX) or bool(figures.low or figures.timeslice or figures.frozen)


def _sum(values: Iterable[int | None]) -> int | None:
    """Return a sum; None if any part is unknown."""
    parts = list(values)
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def lines(
    nodes: Iterable[Node], order: str, folded: Collection[str] = (), pattern: str = "", *, flat: bool = False
) -> list[Line]:
    """Return the nodes from top to bottom, siblings sorted: those that match `pattern`, and all above and below.

    `flat` returns only the processes, in one order.
    """
    shown = [node for node in map(lambda node: _matching(node, pattern.casefold()), nodes) if node is not None]
    if flat:
        every = [node for node in _walk(shown) if isinstance(node.use, ProcessUse)]
        return [Line("", node, False) for node in sorted(every, key=ORDERS[order])]
    found = []
    # (node, branches before it, branches before its children); the last entry is next
    waiting = [(node, "", "") for node in reversed(shown)]
    while waiting:
        node, prefix, below = waiting.pop()
        hidden = bool(node.children) and node.key in folded
        found.append(Line(prefix, node, hidden))
        children = () if hidden else sorted(node.children, key=ORDERS[order])
        last = len(children) - 1
        waiting += reversed(
            [
                (child, below + ("├─" if i < last else "└─"), below + ("│ " if i < last else "  "))
                for i, child in enumerate(children)
            ]
        )
    return found


def _walk(nodes: Iterable[Node]) -> Iterator[Node]:
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.children


def _matching(node: Node, pattern: str) -> Node | None:
    """Return a node reduced to what matches; None if nothing does. GPUs are not matched: all would."""
    if not isinstance(node.use, GpuUse) and pattern in node.label.casefold():
        return node
    children = tuple(child for child in (_matching(child, pattern) for child in node.children) if child is not None)
    return attrs.evolve(node, children=children) if children or isinstance(node.use, GpuUse) else None
