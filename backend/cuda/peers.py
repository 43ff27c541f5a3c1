"""What connected programs lack whose library is older than the daemon: logged once, and in ggroup.backend meanwhile.

A program keeps the library that it was started with, for weeks. docs/upgrades.md says how versions meet.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, MutableMapping
from functools import reduce
from operator import or_

from backend.door.wire import CUDA, Feature, names

log = logging.getLogger(__name__)

WITHOUT: Mapping[Feature, str] = {
    Feature.MEMORY: "its memory cannot be moved",
    Feature.COUNTERS: "its kernels are not counted, and it cannot be moved to another GPU",
    Feature.REPORT: "what of its memory cannot be moved is not known",
    Feature.DEPART: "it cannot be moved to another GPU",
    Feature.SETS: "where memory is short it has no turns of it",
    Feature.TURNS: "until its next turn it is without its copy engines, and none of its memory moves",
    Feature.BURSTS: "between requests of programs of better priority others run, and it runs between those of others",
    Feature.HOST: "it pins memory of the host by its own rule, whatever others have",
    Feature.MANAGED: "its managed memory is not limited",
    Feature.SPACE: "in a slice with compute.spatial it runs by itself",
    Feature.SMS: "its kernels run on all SMs",
    Feature.VIEW: "NVML in it tells of the whole GPU",
    Feature.TOTAL: "the size that its GPU looks to have is the limit of the moment, and before its first context all",
}
"""What does not work on a program whose library lacks a feature. That it cannot limit itself is not told: the program
would have to ask for that."""

TOLD = reduce(or_, WITHOUT)
"""Features whose lack is told."""


class Peers:
    """The programs at one door."""

    def __init__(self, facts: MutableMapping[str, str] | None = None, offers: Feature = CUDA) -> None:
        """`facts` are those of ggroup.backend; `offers` is what the daemon says that it can."""
        self.offers = offers
        """What a program's library lacks is of this."""
        self._facts = facts if facts is not None else {}
        self._lacks: Counter[Feature] = Counter()  # sets of features -> programs that lack exactly these
        self._told = Feature(0)
        self._say()

    def come(self, pid: int, lacks: Feature) -> None:
        """A program has greeted. Each :meth:`come` is followed by a :meth:`go`."""
        lacks &= TOLD
        self._lacks[lacks] += 1
        self._say()
        if lacks & ~self._told:
            self._told |= lacks
            without = "; ".join(words for feature, words in WITHOUT.items() if feature in lacks)
            words = "process %d: its library is older than this daemon and lacks %s, as that of each started then: %s"
            log.warning(words, pid, names(lacks), without)

    def go(self, lacks: Feature) -> None:
        """Its connection is closed."""
        self._lacks[lacks & TOLD] -= 1
        self._say()

    def _say(self) -> None:
        older = {lacks: count for lacks, count in self._lacks.items() if lacks and count}
        self._facts["programs.older"] = str(sum(older.values()))
        all_lacks = Feature(0)
        for lacks in older:
            all_lacks |= lacks
        self._facts["programs.lack"] = names(all_lacks)
