"""The fleet: nodes of GPUs, and the search for the GPU on which a job is placed.

A job of one GPU goes to the fullest GPU with jobs on which it fits, and only otherwise to an empty one. A job of
several goes to empty ones of one node. Of the nodes with empty GPUs the one with the fewest is taken, so empty GPUs
stay together, whatever the policy.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator, Sequence

import attrs

from ggroupfs.replay.cluster.jobs import WHOLE, ClusterJob
from ggroupfs.replay.cluster.placement import Placement, State


@attrs.frozen
class Spot:
    """The place of a job."""

    gpus: Sequence[int]
    """Numbers of its GPUs, counted through all nodes."""
    place: int
    """Place on each GPU; see :class:`~ggroupfs.replay.cluster.placement.Taken`."""


class Fleet:
    """The GPUs of all nodes, and the jobs on them."""

    def __init__(self, placement: Placement, nodes: int, per_node: int, grows: bool = False) -> None:
        """`grows` adds a node whenever no GPU has room, so that no job waits."""
        self._placement = placement
        self._per_node = per_node
        self._grows = grows
        self._states: list[State] = []
        self._free: list[list[int]] = []  # for each node, a heap of its empty GPUs
        self._by_free: list[list[int]] = [[] for _ in range(per_node + 1)]  # nodes; an entry may be out of date
        self._by_state: dict[State, list[int]] = {}  # GPUs with jobs; an entry may be out of date
        self._order: list[tuple[int, State]] = []  # the keys of _by_state, fullest first
        self.in_use = 0
        for _ in range(nodes):
            self._add_node()

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return len(self._states)

    def holds(self, job: ClusterJob) -> bool:
        """Return whether the job fits on an empty fleet."""
        return job.gpus <= self._per_node and self._placement.take(self._placement.empty, job) is not None

    def place(self, job: ClusterJob) -> Spot | None:
        """Place a job where it fits, or return None."""
        if job.gpus == 1:
            for state, gpu in self._shared(job):
                taken = self._placement.take(state, job)
                assert taken is not None
                self._become(gpu, taken.state)
                return Spot((gpu,), taken.place)
        node = self._node(job.gpus)
        if node is None:
            return None
        taken = self._placement.take(self._placement.empty, job)
        assert taken is not None
        gpus = [heapq.heappop(self._free[node]) for _ in range(job.gpus)]
        heapq.heappush(self._by_free[len(self._free[node])], node)
        self.in_use += job.gpus
        for gpu in gpus:
            self._become(gpu, taken.state)
        return Spot(gpus, taken.place)

    def room(self, job: ClusterJob, gpu: int) -> bool:
        """Return whether the job fits on that GPU, or if it needs several, on its node."""
        if job.gpus > 1:
            return len(self._free[gpu // self._per_node]) >= job.gpus
        return self._placement.take(self._states[gpu], job) is not None

    def leave(self, job: ClusterJob, spot: Spot) -> None:
        """Remove a job from its place."""
        for gpu in spot.gpus:
            state = self._placement.give(self._states[gpu], job, spot.place)
            if state != self._placement.empty:
                self._become(gpu, state)
                continue
            self._states[gpu] = state
            self.in_use -= 1
            node = gpu // self._per_node
            heapq.heappush(self._free[node], gpu)
            heapq.heappush(self._by_free[len(self._free[node])], node)

    def _shared(self, job: ClusterJob) -> Iterator[tuple[State, int]]:
        """Yield the fullest GPU with jobs on which one more fits, if there is one."""
        vacant = None
        first = bisect.bisect_left(self._order, self._placement.need(job) - WHOLE, key=lambda entry: entry[0])
        for index in range(first, len(self._order)):
            entry = self._order[index]
            state = entry[1]
            if self._placement.take(state, job) is None:
                continue
            heap = self._by_state[state]
            while heap and self._states[heap[0]] != state:
                heapq.heappop(heap)
            if heap:
                yield state, heap[0]
                return
            vacant = entry
        if vacant is not None:  # one at a time, as the loop iterates over the list
            self._order.remove(vacant)
            del self._by_state[vacant[1]]

    def _node(self, count: int) -> int | None:
        for free in range(count, self._per_node + 1):
            heap = self._by_free[free]
            while heap and len(self._free[heap[0]]) != free:
                heapq.heappop(heap)
            if heap:
                return heap[0]
        return self._add_node() if self._grows else None

    def _add_node(self) -> int:
        node, first = len(self._free), len(self._states)
        self._free.append(list(range(first, first + self._per_node)))
        self._states += [self._placement.empty] * self._per_node
        heapq.heappush(self._by_free[self._per_node], node)
        return node

    def _become(self, gpu: int, state: State) -> None:
        self._states[gpu] = state
        if state not in self._by_state:
            self._by_state[state] = []
            bisect.insort(self._order, (-self._placement.full(state), state))
        heapq.heappush(self._by_state[state], gpu)
