"""Grants of host memory: how many bytes each CUDA program may pin for memory that is not on its GPUs, across all GPUs.

Pinned memory can be neither swapped nor reclaimed, and the driver charges it to no memory cgroup (its GFP flags have no
__GFP_ACCOUNT: nv_compute_gfp_mask() of kernel-open/nvidia/nv-vm.c). A limit per program would therefore not protect the
host. Instead, all programs together get a part of the memory that the host has available, and the programs below a
cgroup with a memory.max or memory.high get what that has left. Bytes that already serve a program are always granted:
they are pinned, and reclaim would fail without them. The rest is shared evenly among memory pinned in advance and
copies that are kept.
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
"""Divisor of the host's available memory: all grants together are one part of so many. What is pinned already counts as
available here."""

GRANULE = 2 << 20
"""Size of the smallest chunk that the library pins, in bytes; grants are multiples of it."""

LOOK_S = 2.0
"""Interval at which the host's memory is read while any program has pinned some or wants some, in seconds."""

TELL_S = 0.05
"""Shortest time between two rounds of sharing, in seconds, however often programs report what they want."""

SETTLE_S = 0.5
"""Time that a program has to hear of a lower grant and to report what it still holds, in seconds."""

FLAP_BYTES, FLAP_PART = 64 << 20, 8
"""Least change of a grant that is told, in bytes and as a divisor of the grant told last; the larger one counts. It
applies to a program that neither gets all it wants nor holds more than it may. The host's available memory changes all
the time."""


@attrs.frozen
class Demand:
    """The host memory that a program uses, and the amount it wants."""

    used: int
    """Bytes that serve the program; always granted."""
    wanted: int
    """Bytes that the program wants, including `used`."""


def share(total: int, demands: Sequence[Demand]) -> list[int]:
    """Return the bytes of `total` granted to each demand, in their order: what serves it, then even shares up to what
    it wants. The sum exceeds `total` only if the bytes that serve the programs do."""

    def at(level: int) -> list[int]:
        return [max(one.used, min(one.wanted, level * GRANULE)) for one in demands]

    least, most = 0, -(-max((one.wanted for one in demands), default=0) // GRANULE)
    if sum(at(most)) <= total:
        return at(most)
    while least < most:  # find the highest level that fits
        middle = (least + most + 1) // 2
        if sum(at(middle)) <= total:
            least = middle
        else:
            most = middle - 1
    return at(least)


@attrs.define(eq=False)
class Pinned:
    """The host memory that one program has pinned for one GPU, and its demand."""

    process: Process
    tell: Callable[[int], None]
    """Tells the program its grant, in bytes."""
    path: list[Slice] = attrs.field(factory=list)
    """Cgroups of the program, as of the last look."""
    held: int = 0
    """Bytes that the program has pinned, whether they serve it or not, capped at what it may have."""
    demand: Demand = attrs.field(factory=lambda: Demand(0, 0))
    told: int | None = None
    """Grant told last, in bytes; None before the first."""

    before: int = 0
    """Grant told before that, in bytes, if it was higher."""
    lowered: float = -math.inf
    """Time at which the grant was last lowered, on trio's clock."""

    def reach(self) -> int:
        """Return the most bytes that the program may have pinned now. After a lower grant this stays high until it
        settles."""
        return max(self.held, self.told or 0, self._before)

    @property
    def _before(self) -> int:
        """The previous grant, in bytes, while the program may not have heard of the lower one; else 0."""
        return self.before if trio.current_time() < self.lowered + SETTLE_S else 0

    def grant(self, nbytes: int) -> None:
        """Set the program's grant to `nbytes`, and tell it."""
        if self.told is not None and nbytes < self.told:
            self.before, self.lowered = self.reach(), trio.current_time()
        self.told = nbytes
        self.tell(nbytes)

    def say(self, held: int, used: int, wanted: int, swapped: int) -> None:
        """Take a report of the program, in bytes: `held` in all, `used` of that, and `wanted`. Figures above its grant
        are capped, unless the books show as much `swapped` to the host."""
        believed = max(swapped, self.told or 0, self._before)
        self.held = min(held, believed)
        used = min(used, believed)
        self.demand = Demand(used, max(wanted, used))


class Grants:
    """The grants of all programs. The host's figures are read once per look."""

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
        """Take a program's report (`said`, as for :meth:`Pinned.say`); its grant is told soon after. `pinned` is the
        entry to add on the first report for `key`."""
        if key not in self._pinned:
            self._looked = -math.inf
        self._pinned.setdefault(key, pinned).say(*said, swapped)
        self._due.set()

    def end(self, key: Hashable) -> None:
        """Forget a program whose connection has ended. What it still has pinned shows in the host's available
        memory."""
        if self._pinned.pop(key, None) is not None:
            self._due.set()

    async def run(self) -> None:
        """Share the host's memory and tell programs their grants, until cancelled."""
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
        # Read both at the same time: what has been pinned since is no longer available.
        pinned = sum(one.held for one in self._pinned.values())
        self._total = (hostroom.available(self._root) + pinned) // PART
        for one in self._pinned.values():
            with contextlib.suppress(ProcessLookupError):  # the connection is about to end
                one.path = hostroom.path_of(one.process)
        paths = {slice_ for one in self._pinned.values() for slice_ in one.path}
        self._left = {slice_: hostroom.left(slice_, self._root) for slice_ in paths}

    def _share(self) -> dict[Hashable, int]:
        """Return what each program may have now, in bytes."""
        demands = {key: one.demand for key, one in self._pinned.items()}
        total = self._total
        grants = dict(zip(demands, share(total, list(demands.values())), strict=True))
        # Deepest cgroups first: a parent then shares out only what its children were granted.
        for slice_, left in sorted(self._left.items(), key=lambda item: -item[0].path.count("/")):
            keys = [key for key, one in self._pinned.items() if slice_ in one.path]
            if sum(grants[key] for key in keys) > left:
                lower = [Demand(demands[key].used, grants[key]) for key in keys]
                grants.update(zip(keys, share(left, lower), strict=True))
        return grants

    def _tell(self) -> None:
        """Tell the programs whose grant has changed enough to matter. Lower grants are told first; the bytes are
        granted to others once they have been freed."""
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
        """Return `grants` reduced by the bytes that other programs still hold."""
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
    """Return whether `grant` need not be told: it equals the one told, or is near it and covers part of the demand."""
    near = abs(grant - told) < max(FLAP_BYTES, told // FLAP_PART)
    return grant == told or (near and one.held <= grant < one.demand.wanted)
