"""Looking: from the files of a mounted tree to what the core decides on. Every look reads all GPUs, in one thread."""

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
"""What is to stay free on a GPU, unless something else is said: one of so many parts."""


@attrs.frozen
class Watched:
    """A group that is known by a name of its own."""

    name: str
    """The name."""
    place: Place
    """Which processes are in it."""
    bound: Bound | None = None
    """None for one of best effort."""
    movable: bool = True
    """Whether it may be moved."""
    gpu: int | None = None
    """The only GPU on which it is that group; None for all."""


@attrs.frozen
class _Found:
    """What one look has found."""

    cards: Mapping[int, Card]
    seen: Sequence[Seen]
    fixed: frozenset[str]
    """Names of groups that are not to be moved."""


class Eyes:
    """Makes pictures. Processes that are in none of the watched groups are groups of best effort by their pid."""

    def __init__(
        self, tree: Tree, watched: Iterable[Watched], span: float, room: int | None = None, others: bool = True
    ) -> None:
        """`span` are the seconds over which use is measured, `room` the bytes that are to stay free on each GPU;
        `others` says whether processes that are in no watched group may be moved."""
        self._mount = tree.mount
        self._watched = {one.name: one for one in watched}
        self._room = room
        self._others = others
        self._demand = Demand(span)

    def moved(self, name: str, gpu: int) -> None:
        """A group that is one on a GPU only is that on another one now."""
        if name in self._watched and self._watched[name].gpu is not None:
            self._watched[name] = attrs.evolve(self._watched[name], gpu=gpu)

    def path(self, name: str, gpu: int) -> Path:
        """The control files of a group of a picture."""
        watched = self._watched.get(name)
        if watched is not None and watched.place.cgroup is not None:
            return self._mount / slice_directory(watched.place.cgroup.path) / str(gpu)
        pid = name if watched is None else str(watched.place.pid)
        return self._mount / pid / str(gpu)

    async def look(self) -> Picture:
        """What is there now. FileNotFoundError where there is no tree any more."""
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
                        continue  # gone, or counted there
                    name = str(pid)
                    if not self._others:
                        fixed.add(name)
                if len(paths) > 1:
                    fixed.add(name)  # it works on all of them together
                seen += _seen(name, gpu, path, () if cgroup is None else self._levels(cgroup, gpu))
        return _Found(cards, seen, frozenset(fixed))

    def _levels(self, slice_: Slice, gpu: int) -> Iterable[Path]:
        """The control files of a slice and of those above it, on a GPU; the root has none."""
        parts = [part for part in slice_.path.split("/") if part]
        for count in range(len(parts), 0, -1):
            yield self._mount / slice_directory("/".join(parts[:count])) / str(gpu)

    def _above(self, slice_: Slice, gpu: int) -> Iterable[Path]:
        return list(self._levels(slice_, gpu))[1:]

    def _slices(self, gpu: int) -> dict[str, Slice]:
        """The watched groups that are slices, on a GPU."""
        return {
            name: one.place.cgroup
            for name, one in self._watched.items()
            if one.place.cgroup is not None and one.gpu in (None, gpu)
        }

    def _name(self, pid: int, gpu: int) -> str | None:
        """The watched group that is a process, on a GPU."""
        return next((n for n, one in self._watched.items() if one.place.pid == pid and one.gpu in (None, gpu)), None)

    def _is_present(self, gpu: int) -> bool:
        """Whether a GPU is there. One that is lost is no place for a group, and what is on it cannot be moved."""
        return flat(content(self._mount / "gpus" / str(gpu) / "gpu.events"))["present"] == 1

    def _card(self, gpu: int) -> Card:
        path = self._mount / "gpus" / str(gpu)
        capacity = int(content(path / "gmem.capacity"))
        room = capacity // ROOM if self._room is None else self._room
        return Card(capacity - room, int(content(path / "gmem.current")))


def _cgroup(pid: int) -> Slice | None:
    """Where a process is; None for one that is gone."""
    try:
        return cgroup_of(pid)
    except OSError:
        return None


def _seen(name: str, gpu: int, path: Path, above: Iterable[Path]) -> Iterator[Seen]:
    """A group by its files, and by those of the slices above it; nothing where it is not there, or no process of it
    is."""
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
    """The part of the time that a group may work by its own quota; all where it has none, or is not there."""
    try:
        us, period_us = content(path / "compute.max").split()
    except OSError:  # also of a daemon of an earlier version
        return 1.0
    return 1.0 if us == "max" else min(1.0, int(us) / int(period_us))
