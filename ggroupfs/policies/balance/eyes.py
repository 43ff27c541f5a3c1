"""Makes the pictures for the core from the files of a mounted tree. Every look reads all GPUs, in one thread."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import trio

from backend.process.identity import Slice, cgroup_of
from ggroupfs.client import Tree, content, flat, members, numbers
from ggroupfs.policies.balance.demand import Demand, Seen
from ggroupfs.policies.balance.picture import Bound, Card, Picture
from ggroupfs.policies.slo.reports import Place
from ggroupfs.text.names import slice_directory

ROOM = 32
"""Default free space on a GPU, as a divisor of its capacity."""


@attrs.frozen
class Watched:
    """A group with a configured name."""

    name: str
    """Name of the group."""
    place: Place
    """Processes of the group."""
    bound: Bound | None = None
    """Required bounds; None for a best-effort group."""
    movable: bool = True
    """Whether the group may be moved."""
    gpu: int | None = None
    """The only GPU on which this is the group; None for all GPUs."""


@attrs.frozen
class _Found:
    """The result of one look."""

    cards: Mapping[int, Card]
    seen: Sequence[Seen]
    fixed: frozenset[str]
    """Names of groups that must not be moved."""


class Eyes:
    """Makes pictures of a tree. A process in none of the watched groups is a best-effort group named by its pid."""

    def __init__(
        self, tree: Tree, watched: Iterable[Watched], span: float, room: int | None = None, others: bool = True
    ) -> None:
        """`span` is the time over which use is measured, in seconds; `room` the bytes to keep free on each GPU.

        `others` says whether processes in no watched group may be moved.
        """
        self._mount = tree.mount
        self._watched = {one.name: one for one in watched}
        self._room = room
        self._others = others
        self._demand = Demand(span)

    def moved(self, name: str, gpu: int) -> None:
        """Note that a group was moved to a GPU, if it is watched on a single GPU."""
        if name in self._watched and self._watched[name].gpu is not None:
            self._watched[name] = attrs.evolve(self._watched[name], gpu=gpu)

    def path(self, name: str, gpu: int) -> Path:
        """Return the directory of a group in a picture."""
        watched = self._watched.get(name)
        if watched is not None and watched.place.cgroup is not None:
            return self._mount / slice_directory(watched.place.cgroup.path) / str(gpu)
        pid = name if watched is None else str(watched.place.pid)
        return self._mount / pid / str(gpu)

    async def look(self) -> Picture:
        """Return a picture of the present state. FileNotFoundError if the tree is gone."""
        found = await trio.to_thread.run_sync(self._look)
        loads = []
        for load in self._demand.look(trio.current_time(), list(found.seen)):
            watched = self._watched.get(load.name)
            loads.append(
                attrs.evolve(
                    load,
                    bound=watched.bound if watched is not None else None,
                    movable=load.name not in found.fixed,
                )
            )
        return Picture.of(found.cards, loads)

    def _look(self) -> _Found:
        processes: dict[int, dict[int, Path]] = {}
        for member in members(self._mount):
            processes.setdefault(member.pid, {})[member.gpu] = member.path
        cards = {gpu: self._card(gpu) for gpu in numbers(self._mount / "gpus") if self._is_present(gpu)}
        fixed = {name for name, one in self._watched.items() if not one.movable}
        seen = [
            one
            for gpu in cards
            for name, slice_ in self._slices(gpu).items()
            for one in _seen(name, gpu, self.path(name, gpu), self._above(slice_, gpu))
        ]
        for pid, paths in processes.items():
            cgroup = _cgroup(pid)
            for gpu, path in paths.items():
                if gpu not in cards:
                    continue
                name = self._name(pid, gpu)
                if name is None:
                    if cgroup is None or any(one.contains(cgroup) for one in self._slices(gpu).values()):
                        continue  # gone, or counted with its slice
                    name = str(pid)
                    if not self._others:
                        fixed.add(name)
                if len(paths) > 1:
                    fixed.add(name)  # the process uses all of these GPUs together
                seen += _seen(name, gpu, path, () if cgroup is None else self._levels(cgroup, gpu))
        return _Found(cards, seen, frozenset(fixed))

    def _levels(self, slice_: Slice, gpu: int) -> Iterable[Path]:
        """Directories of a slice and of the slices above it on a GPU; the root slice has none."""
        parts = [part for part in slice_.path.split("/") if part]
        for count in range(len(parts), 0, -1):
            yield self._mount / slice_directory("/".join(parts[:count])) / str(gpu)

    def _above(self, slice_: Slice, gpu: int) -> Iterable[Path]:
        return list(self._levels(slice_, gpu))[1:]

    def _slices(self, gpu: int) -> dict[str, Slice]:
        """The watched groups on a GPU that are slices, by name."""
        return {
            name: one.place.cgroup
            for name, one in self._watched.items()
            if one.place.cgroup is not None and one.gpu in (None, gpu)
        }

    def _name(self, pid: int, gpu: int) -> str | None:
        """Return the name of the watched group that is this process on a GPU; None if there is none."""
        return next((n for n, one in self._watched.items() if one.place.pid == pid and one.gpu in (None, gpu)), None)

    def _is_present(self, gpu: int) -> bool:
        """Whether a GPU is present. A lost GPU is no target for a move, and the groups on it cannot be moved."""
        return flat(content(self._mount / "gpus" / str(gpu) / "gpu.events"))["present"] == 1

    def _card(self, gpu: int) -> Card:
        path = self._mount / "gpus" / str(gpu)
        capacity = int(content(path / "gmem.capacity"))
        room = capacity // ROOM if self._room is None else self._room
        return Card(capacity - room, int(content(path / "gmem.current")))


def _cgroup(pid: int) -> Slice | None:
    """Return the cgroup of a process; None if the process is gone."""
    try:
        return cgroup_of(pid)
    except OSError:
        return None


def _seen(name: str, gpu: int, path: Path, above: Iterable[Path]) -> Iterator[Seen]:
    """Yield the figures of a group, with the quotas of the slices above; nothing if no process of it is there."""
    with contextlib.suppress(OSError):
        events = flat(content(path / "compute.events"))
        if not events["populated"]:
            return
        stat = flat(content(path / "gcgroup.stat"))
        yield Seen(
            name,
            gpu,
            used_us=stat.get("gpu_usec", stat.get("gpu_usec_estimate", 0)),
            waits=stat["pending"] > 0 if "pending" in stat else None,
            throttled_us=stat.get("throttled_usec", 0),
            frozen=bool(events["frozen"]),
            held=_number(path, "gmem.current"),
            swapped=_number(path, "gmem.swap.current"),
            weight=_number(path, "compute.weight"),
            priority=_number(path, "compute.priority"),
            ceiling=min([_ceiling(level) for level in (path, *above)]),
        )


def _number(path: Path, name: str) -> int:
    return int(content(os.fspath(path / name)))


def _ceiling(path: Path) -> float:
    """Fraction of the time that a group may work by its own quota; 1 if it has no quota or is not there."""
    try:
        us, period_us = content(path / "compute.max").split()
    except OSError:  # raised by a daemon of an earlier version, too
        return 1.0
    return 1.0 if us == "max" else min(1.0, int(us) / int(period_us))
