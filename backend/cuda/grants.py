"""Grants of host memory: how much of it each CUDA program may pin for memory that is not on its GPUs, over all of them.

What is pinned can be neither swapped nor reclaimed, and the driver has it charged to no memory cgroup (its GFP flags
have no __GFP_ACCOUNT: nv_compute_gfp_mask() of kernel-open/nvidia/nv-vm.c). So the host is not asked program by
program: all of them together have a part of what it has available, and those below a cgroup with a memory.max, or a
memory.high, what that has left. What serves a program already is granted always: it is there, or reclaim would not
hold. What is made ahead, and copies that are kept, have the rest, shared evenly.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path

import attrs
import trio

from backend.core import hostroom
from backend.process.identity import Process, Slice

PART = 2
"""Of what the host has available, what is pinned of it counted, one of so many parts is granted."""

GRANULE = 2 << 20
"""Bytes in the smallest chunk that the library pins: grants are multiples of it."""

LOOK_S = 2.0
"""Seconds between two looks at the host, while a program has something of it, or wants it."""

TELL_S = 0.05
"""Seconds between two times that all is shared anew, at least, however often programs say what they want."""

SETTLE_S = 0.5
"""Seconds after which a program that may have less than before has heard of it, and has said what it has still."""

FLAP_BYTES, FLAP_PART = 64 << 20, 8
"""What a program is told again differs by so many bytes, and by one of so many parts of what it was told before, where
it neither gets all that it wants nor has more than it may: what the host has available changes all the time."""


@attrs.frozen
class Demand:
    """What a program has of the host, and wants."""

    used: int
    """Bytes that serve it: granted always."""
    wanted: int
    """Bytes that it would have, those included."""


def share(total: int, demands: Sequence[Demand]) -> list[int]:
    """Return the bytes that each is granted of `total`: what serves it, and as much as any other, up to what it wants.
    More than `total` where what serves them is more."""

    def at(level: int) -> list[int]:
        return [max(one.used, min(one.wanted, level * GRANULE)) for one in demands]

    least, most = 0, -(-max((one.wanted for one in demands), default=0) // GRANULE)
    if sum(at(most)) <= total:
        return at(most)
    while least < most:  # the highest level that fits
        middle = (least + most + 1) // 2
        if sum(at(middle)) <= total:
            least = middle
        else:
            most = middle - 1
    return at(least)


@attrs.define(eq=False)
class Pinned:
    """What one program has of the host for one GPU, and wants of it."""

    process: Process
    tell: Callable[[int], None]
    """Tells it of a grant, bytes."""
    path: list[Slice] = attrs.field(factory=list)
    """Cgroups that it is in, as of the last look."""
    held: int = 0
    """Bytes that it has pinned, those that serve it and those that do not: no more than it may."""
    demand: Demand = attrs.field(factory=lambda: Demand(0, 0))
    told: int | None = None
    """Bytes that it was granted last."""

    before: int = 0
    """Bytes that it was granted before that, where they were more."""
    lowered: float = -math.inf
    """When it was told of less, by trio's clock."""

    def reach(self) -> int:
        """Return the bytes that it may have pinned now: one that may have less lets go of the rest soon."""
        return max(self.held, self.told or 0, self._before)

    @property
    def _before(self) -> int:
        """What it was granted before, while it may not have heard of less."""
        return self.before if trio.current_time() < self.lowered + SETTLE_S else 0

    def grant(self, nbytes: int) -> None:
        """It may have so many bytes from now on."""
        if self.told is not None and nbytes < self.told:
            self.before, self.lowered = self.reach(), trio.current_time()
        self.told = nbytes
        self.tell(nbytes)

    def say(self, held: int, used: int, wanted: int, swapped: int) -> None:
        """It says what it has, how much of that serves it, and how much it wants. What it has beyond what it was
        granted, and beyond `swapped`, which it has in the host by the books, is not believed."""
        believed = max(swapped, self.told or 0, self._before)
        self.held = min(held, believed)
        used = min(used, believed)
        self.demand = Demand(used, max(wanted, used))


class Grants:
    """See the module. Figures of the host are read once a look."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._pinned: dict[Hashable, Pinned] = {}
        self._due = trio.Event()
        self._looked = -math.inf
        self._total = 0
        self._left: dict[Slice, int] = {}
        self._again_s = LOOK_S

    @property
    def granted(self) -> int:
        """Bytes that all programs together may have pinned."""
        return sum(one.told or 0 for one in self._pinned.values())

    def say(self, key: Hashable, pinned: Pinned, said: tuple[int, int, int], swapped: int) -> None:
        """A program says what :meth:`Pinned.say` takes; what it is granted it is told soon. `pinned` is what is known
        of one that says so for the first time."""
        if key not in self._pinned:
            self._looked = -math.inf
        self._pinned.setdefault(key, pinned).say(*said, swapped)
        self._due.set()

    def end(self, key: Hashable) -> None:
        """It speaks no more: what it has is seen in what the host has available."""
        if self._pinned.pop(key, None) is not None:
            self._due.set()

    async def run(self) -> None:
        """Tells programs of what they may have from now on."""
        while True:
            with trio.move_on_after(self._again_s if self._pinned else math.inf):
                await self._due.wait()
            self._due = trio.Event()
            self._look()
            self._tell()
            await trio.sleep(TELL_S)

    def _look(self) -> None:
        now = trio.current_time()
        if not self._pinned or now - self._looked < LOOK_S:
            return
        self._looked = now
        # Both at one time: what is pinned since then is available no more.
        pinned = sum(one.held for one in self._pinned.values())
        self._total = (hostroom.available(self._root) + pinned) // PART
        for one in self._pinned.values():
            with contextlib.suppress(ProcessLookupError):  # its connection is about to end
                one.path = hostroom.path_of(one.process)
        paths = {slice_ for one in self._pinned.values() for slice_ in one.path}
        self._left = {slice_: hostroom.left(slice_, self._root) for slice_ in paths}

    def _share(self) -> dict[Hashable, int]:
        """What each may have now, bytes."""
        demands = {key: one.demand for key, one in self._pinned.items()}
        total = self._total
        grants = dict(zip(demands, share(total, list(demands.values())), strict=True))
        # The lowest first: what it leaves its own those above have left.
        for slice_, left in sorted(self._left.items(), key=lambda item: -item[0].path.count("/")):
            keys = [key for key, one in self._pinned.items() if slice_ in one.path]
            if sum(grants[key] for key in keys) > left:
                lower = [Demand(demands[key].used, grants[key]) for key in keys]
                grants.update(zip(keys, share(left, lower), strict=True))
        return grants

    def _tell(self) -> None:
        """Tells those whose grant is another than they know, by enough to matter. What one is to let go of another may
        have once it has."""
        shares = self._share()
        for more in (False, True):
            grants = self._free(shares) if more else shares
            self._again_s = LOOK_S if grants == shares else SETTLE_S
            for key, grant in grants.items():
                one = self._pinned[key]
                is_more = one.told is None or grant > one.told
                if is_more is more and (one.told is None or not _flaps(one, one.told, grant)):
                    one.grant(grant)

    def _free(self, grants: Mapping[Hashable, int]) -> Mapping[Hashable, int]:
        """Return these grants, without what others have still."""
        total = self._total
        limits = [(total, list(grants))]
        limits += [(left, [k for k in grants if slice_ in self._pinned[k].path]) for slice_, left in self._left.items()]
        found = dict(grants)
        for limit, keys in limits:
            over = sum(max(found[key], self._pinned[key].reach()) for key in keys) - limit
            for key in keys:
                least = max(self._pinned[key].reach(), self._pinned[key].demand.used)
                if over > 0 and found[key] > least:
                    less = min(over, found[key] - least)
                    found[key], over = found[key] - less, over - less
        return found


def _flaps(one: Pinned, told: int, grant: int) -> bool:
    """Whether a grant is as good as the one that was told: it gets what it wants, or a bit more or less of it."""
    near = abs(grant - told) < max(FLAP_BYTES, told // FLAP_PART)
    return grant == told or (near and one.held <= grant < one.demand.wanted)
