"""How long somebody waits for levers: longer where programs go into the host, or come back, only as a whole."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from backend.identity import ROOT, Group
from backend.population import Population
from backend.protocols import Gpu

WHOLE_BYTES = 2 << 30
"""What goes into the host, or comes back, within the time that a lever has. 4.5 GiB take 2.6 and 1.5 s of the usual 5 s
on an H200 (``tests/t7_nvidia/t7_whole.py``); other hosts are told to be half as fast
(:const:`backend.nvidia.checkpoint.client.BYTES_A_SECOND`)."""


def patience(seconds: float, whole: int) -> float:
    """Seconds that a lever may take which has so many bytes go or come (:attr:`backend.records.Footprint.whole`), where
    one that moves no memory has `seconds`."""
    return seconds * (1 + whole / WHOLE_BYTES)


@attrs.frozen
class Patience:
    """That of a mount."""

    seconds: float
    """For what moves no memory."""
    _gpus: Mapping[int, Gpu]
    _population: Population

    def of(self, group: Group) -> float:
        """Seconds for what can have memory of a group move, or waits for memory of it that does."""
        gpu = self._gpus[group.gpu]
        whole = sum(gpu.footprint(resident.process).whole for resident in self._population.below(group))
        return patience(self.seconds, whole)

    def of_gpu(self, group: Group) -> float:
        """The same for what can have memory of others on the GPU of a group move, too."""
        return self.of(Group(group.gpu, ROOT))
