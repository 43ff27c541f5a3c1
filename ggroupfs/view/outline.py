"""A snapshot as people think of it: GPUs, the slices on them, and in those their processes. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from backend.core.records import MAX
from ggroupfs.view.figures import Figures
from ggroupfs.view.rates import UNKNOWN, Rates, total
from ggroupfs.view.snapshot import GpuUse, ProcessUse, SliceUse, Snapshot

Use = GpuUse | SliceUse | ProcessUse


Identity = tuple[str, int]
"""Directory of a node, and of a process the inode of that."""

HISTORY_MOST = 8
"""Passes that a history is of, at most."""


@attrs.frozen
class Node:
    """A GPU, a slice on it or a process on it, and what is in it."""

    use: Use
    """What the tree says of it."""
    label: str
    """What it is called between its neighbours."""
    figures: Figures
    """Its figures; of a GPU, its memory."""
    rates: Rates
    """Its own, or the sum over the processes in it."""
    children: tuple[Node, ...] = ()
    """What is in it."""
    history: tuple[float | None, ...] = ()
    """Its share of the GPU in the last passes, the latest one last."""

    @property
    def key(self) -> str:
        """Its directory, which no other node has."""
        return self.use.directory

    @property
    def identity(self) -> Identity:
        """What it is told by between two passes: a process of a pid that was recycled is another one."""
        return self.key, self.use.inode if isinstance(self.use, ProcessUse) else 0


@attrs.frozen
class Line:
    """A line of the outline."""

    prefix: str
    """The branches that lead to it."""
    node: Node
    """What it is about."""
    folded: bool
    """Whether there is something in it that is not shown."""


def _descending(field: str) -> Callable[[Node], tuple[Any, ...]]:
    """By a figure or a rate, the largest first and what is not known last."""

    def key(node: Node) -> tuple[Any, ...]:
        value = getattr(node.rates if hasattr(node.rates, field) else node.figures, field)
        return (value is None, 0 if value is None else -value, *_by_name(node))

    return key


def _by_name(node: Node) -> tuple[Any, ...]:
    """Slices by path, then processes by pid: what is the same in two frames is in the same order in both."""
    use = node.use
    return (1, use.pid, use.gpu) if isinstance(use, ProcessUse) else (0, node.key)


def _by_priority(node: Node) -> tuple[Any, ...]:
    """The first to be served first: 0."""
    priority = node.figures.priority
    return (priority is None, priority or 0, *_by_name(node))


def _by_user(node: Node) -> tuple[Any, ...]:
    """By the name of the user; what is no process last."""
    user = node.use.user if isinstance(node.use, ProcessUse) else ""
    return (not user, user, *_by_name(node))


NO_PAST: Mapping[Identity, Sequence[float | None]] = {}
"""What is known before the first pass."""

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
"""What siblings can be sorted by."""


def build(
    snapshot: Snapshot,
    rates: Mapping[str, Rates],
    *,
    unused: bool = True,
    past: Mapping[Identity, Sequence[float | None]] = NO_PAST,
) -> tuple[Node, ...]:
    """A node for each GPU, unsorted, with everything that is on it. Without `unused`, a process is left out on GPUs
    that it does not use, where it uses another one. `past` has the shares before this pass."""
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
    """Those on GPUs that they use: `ggroupfs run` makes a directory for every GPU, and most programs use one."""
    every = list(processes)
    somewhere = {(one.pid, one.inode) for one in every if _uses(one)}
    yield from (one for one in every if _uses(one) or (one.pid, one.inode) not in somewhere)


def _uses(process: ProcessUse) -> bool:
    """Whether it has a context or memory there. What is not told counts as one."""
    figures = process.figures
    return figures.populated is not False or bool(figures.current or figures.swap)


def _with_history(top: Node, past: Mapping[Identity, Sequence[float | None]]) -> Node:
    """The node and all below, each with its shares up to now. A cgroup can be deeper than Python recurses."""
    ready: dict[str, Node] = {}
    for node in reversed([*_walk([top])]):  # what is in it before it
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
        # A process whose slice is not in the snapshot, as it moved while it was taken, is where that would be.
        inside[next((above for above in _upwards(path) if above in slices), "/")] += nodes
    for path, slice_ in reversed([*slices.items()]):  # what is in a slice comes after it
        children = tuple(inside[path])
        # It belongs to every GPU, but is shown where it matters; one that is empty everywhere was made for something.
        if children or path not in used or _is_set(slice_.figures):
            above = path.rpartition("/")[0] or "/"
            sum_ = total(child.rates for child in children)
            inside[above].append(Node(slice_, path.rpartition("/")[2], slice_.figures, sum_, children))
    return Node(
        gpu,
        f"GPU {gpu.index} {gpu.name}" + ("" if gpu.present else " (lost)"),
        Figures(current=gpu.current, swap=_sum(child.figures.swap for child in inside["/"])),
        total(child.rates for child in inside["/"]),
        tuple(inside["/"]),
    )


def _upwards(path: str) -> Iterator[str]:
    """The slice and those above it, the root of all left out."""
    while path.strip("/"):
        yield path
        path = path.rpartition("/")[0]


def _is_set(figures: Figures) -> bool:
    return figures.high not in (None, MAX) or bool(figures.low or figures.timeslice or figures.frozen)


def _sum(values: Iterable[int | None]) -> int | None:
    """A sum that is as unknown as its parts."""
    parts = list(values)
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def lines(
    nodes: Iterable[Node], order: str, folded: Collection[str] = (), pattern: str = "", *, flat: bool = False
) -> list[Line]:
    """The nodes from top to bottom, siblings sorted; only what `pattern` is in, and what is above or below of that.

    `flat` has the processes alone, in one order.
    """
    shown = [node for node in map(lambda node: _matching(node, pattern.casefold()), nodes) if node is not None]
    if flat:
        every = [node for node in _walk(shown) if isinstance(node.use, ProcessUse)]
        return [Line("", node, False) for node in sorted(every, key=ORDERS[order])]
    found = []
    # (node, the branches before it, the branches before what is in it), the next one last
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
    """The node with what matches in it; None where nothing does. A GPU is no match: its name would let all through."""
    if not isinstance(node.use, GpuUse) and pattern in node.label.casefold():
        return node
    children = tuple(child for child in (_matching(child, pattern) for child in node.children) if child is not None)
    return attrs.evolve(node, children=children) if children or isinstance(node.use, GpuUse) else None
