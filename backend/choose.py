"""Which ledger and which GPUs serve a mount, by the names that the command line knows."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import attrs

from backend.protocols import Gpu, Ledger
from backend.soft.gpu import SoftConfig, SoftGpu
from backend.soft.ledger import SoftLedger

log = logging.getLogger(__name__)

GPUS = ("auto", "soft", "nvidia")
LEDGERS = ("auto", "soft")


@attrs.frozen
class Choice:
    """What was asked for on the command line."""

    gpu: str = "auto"
    """One of :data:`GPUS`; auto takes NVIDIA GPUs where there are any, else the software GPU."""
    ledger: str = "auto"
    """One of :data:`LEDGERS`."""
    soft_gpus: int = 1
    """How many software GPUs."""
    soft_config: SoftConfig = attrs.field(factory=SoftConfig)
    """What they are like."""
    selftest: bool = True
    """Whether the levers of a real GPU are proven before the mount answers."""


async def gpus(choice: Choice) -> Sequence[Gpu]:
    """The GPUs. OSError(ENODEV) where `nvidia` was asked for and there is none."""
    if choice.gpu != "soft":
        from backend.nvidia.gpu import open_gpus  # needs NVML, which is not everywhere

        try:
            found = await open_gpus(selftest=choice.selftest)
        except OSError as error:
            if choice.gpu == "nvidia":
                raise
            log.info("no NVIDIA GPU (%s): the software GPU serves", error.strerror)
        else:
            return found
    return [SoftGpu(index, choice.soft_config) for index in range(choice.soft_gpus)]


def ledger(choice: Choice) -> Ledger:
    """The books."""
    return SoftLedger()
