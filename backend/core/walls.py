"""gmem.limit.max of slices as dmem.max of their cgroups, where the driver has registered its memory with the kernel.

The kernel's limit is an outer wall: it refuses what a program without the library, or past it, would allocate beyond,
where ggroupfs alone can only end that program afterwards. It is lowered once ours holds, and raised with it. It is set
where the cgroup has that file, as its parent's ``cgroup.subtree_control`` decides. What was set is taken away once the
slice has no gmem.limit.max any more, and at the end; what others set where there is none is left alone.

What holds is looked at again once in a while: a cgroup may be made anew, and anything may write to its files.
"""

from __future__ import annotations

import errno
import itertools
import logging
from collections.abc import Iterator, Mapping, MutableMapping

import trio

from backend.core.population import Population
from backend.core.protocols import Gpu, Ledger
from backend.core.settings import MAX
from backend.process import dmem
from backend.process.identity import ROOT, SliceOn

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two looks at some of the slices."""

LOOK_MOST = 64
"""Slices looked at each time, on every GPU; two files of a cgroup are read and written in some 20 us."""


class OuterWalls:
    """See the module."""

    def __init__(
        self, ledger: Ledger, gpus: Mapping[int, Gpu], population: Population, facts: MutableMapping[str, str]
    ) -> None:
        """`facts` are those of ggroup.backend: which regions there are, and how many limits."""
        self.files: dmem.Walls = dmem.Files()
        """The limits that the kernel has."""
        self._facts = facts
        self._ledger = ledger
        self._gpus = gpus
        self._population = population
        self._regions: dict[int, str] = {}  # by GPU
        self._set: dict[SliceOn, None] = {}  # where it is ours
        self._missing: set[SliceOn] = set()  # cgroups without the file
        self._queue: list[SliceOn] = []
        self._told: set[int] = set()  # errors that were told of

    def begin(self) -> None:
        """Find out which GPUs have a region; then go on from what another daemon may have left."""
        try:
            known = self.files.regions()
        except OSError as error:
            self._complain("dmem.capacity", error)
            known = {}
        for index, gpu in self._gpus.items():
            region = dmem.region_of(gpu.info.pci, known)
            if region is not None:
                self._regions[index] = region
        for group in self._limited():
            self.hold(group)
        self._say()

    async def run(self) -> None:
        """Look at slices, some at a time, until cancelled."""
        while True:
            await trio.sleep(LOOK_S)
            if not self._regions:
                continue
            if not self._queue:
                self._queue = list(dict.fromkeys(itertools.chain(self._set, self._limited())))
            for group in self._queue[:LOOK_MOST]:
                self.hold(group)
            del self._queue[:LOOK_MOST]
            self._say()

    def hold(self, group: SliceOn) -> None:
        """Have the kernel's limit of a slice be what its books say."""
        region = self._regions.get(group.gpu)
        if region is None or group.slice == ROOT:
            return
        wanted = self._wanted(group)
        if wanted is None and group not in self._set:
            return
        try:
            if self.files.limit(group.slice, region) != wanted:
                self.files.set_limit(group.slice, region, wanted)
        except OSError as error:
            self._set.pop(group, None)
            if error.errno in (errno.ENOENT, errno.ENODEV, errno.ENOTDIR):  # no cgroup, or not with that controller
                self._missing.add(group)
            else:
                self._complain(f"{group.slice.path}/{dmem.LIMIT}", error)
            return
        except KeyError:  # the driver has unregistered it
            self._set.pop(group, None)
            return
        self._missing.discard(group)
        if wanted is None:
            self._set.pop(group, None)
        else:
            self._set[group] = None

    def release(self) -> None:
        """Take away what was set: nothing is asked for any more."""
        for group in list(self._set):
            region = self._regions[group.gpu]
            try:
                self.files.set_limit(group.slice, region, None)
            except OSError as error:
                log.debug("%s: its dmem.max stays: %s", group.slice.path, error)
            self._set.pop(group, None)

    def _wanted(self, group: SliceOn) -> int | None:
        if not self._population.holds(group):
            return None
        try:
            limit = self._ledger.books(group).limit_max
        except OSError:  # it has gone by the kernel's books, and not yet by ours
            return None
        return None if limit == MAX else limit

    def _limited(self) -> Iterator[SliceOn]:
        """The slices that have a limit, on each GPU that has a region."""
        for slice_ in list(self._population.slices()):
            for gpu in self._regions:
                group = SliceOn(slice_, gpu)
                if self._wanted(group) is not None:
                    yield group

    def _say(self) -> None:
        self._missing = {group for group in self._missing if self._wanted(group) is not None}
        if self._regions:
            self._facts["dmem"] = ",".join(self._regions[gpu] for gpu in sorted(self._regions))
            self._facts["dmem.limits"] = str(len(self._set))
            self._facts["dmem.missing"] = str(len(self._missing))

    def _complain(self, what: str, error: OSError) -> None:
        if error.errno not in self._told:
            self._told.add(error.errno or 0)
            log.warning("%s: %s: limits of memory are not the kernel's, too", what, error.strerror)
