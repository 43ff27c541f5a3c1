"""Which ledger and which GPUs serve a mount, by the names that the command line knows."""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import attrs

from backend.core.protocols import Gpu, Ledger
from backend.cuda.managed import Managed
from backend.ledgers import kernel
from backend.ledgers.journal.attributes import Attributes
from backend.ledgers.journal.file import Journal
from backend.ledgers.journal.ledger import JournaledLedger
from backend.ledgers.journal.levers import JournaledGpu, Timeslices
from backend.ledgers.journal.lives import WrittenLives
from backend.ledgers.journal.moves import WrittenMoves
from backend.ledgers.journal.totals import WrittenTotals
from backend.ledgers.provider import ProviderGpu
from backend.ledgers.soft import SoftLedger
from backend.soft.config import SoftConfig
from backend.soft.gpu import SoftGpu
from backend.soft.machine import Machine

log = logging.getLogger(__name__)

GPUS = ("auto", "soft", "nvidia")
LEDGERS = ("auto", "soft", "kmod")


@runtime_checkable
class Cuda(Protocol):
    """A GPU that runs CUDA programs (:class:`backend.nvidia.gpu.NvidiaGpu`, which needs NVML to be imported)."""

    managed: Managed
    """Those of them whose memory can be moved."""


@runtime_checkable
class Forgetful(Protocol):
    """A GPU that has to be told what its TSGs had of their own (:class:`backend.nvidia.gpu.NvidiaGpu`)."""

    notes: Timeslices
    """What remembers it."""


@attrs.frozen
class Choice:
    """What was asked for on the command line."""

    gpu: str = "auto"
    """One of :data:`GPUS`; auto takes NVIDIA GPUs where there are any, else the software GPU."""
    ledger: str = "auto"
    """One of :data:`LEDGERS`; auto takes the kernel module's books where it is loaded, else the daemon's own."""
    soft_gpus: int = 1
    """How many software GPUs."""
    soft_config: SoftConfig = attrs.field(factory=SoftConfig)
    """What they are like."""
    selftest: bool = True
    """Whether the levers of a real GPU are proven before the mount answers."""
    proven: Path | None = None
    """Where it is kept that they were, for the next daemon."""


@attrs.frozen
class Backend:
    """What serves a mount."""

    ledger: Ledger
    """The books."""
    gpus: Sequence[Gpu]
    """The GPUs, as the Controller takes them."""
    soft: Mapping[int, SoftGpu]
    """Those of them that are software, by index: programs come to these by a socket."""
    cuda: Mapping[int, Managed]
    """The programs whose memory can be moved, of each of the others: they come by a socket, too."""
    moves: WrittenMoves | None = None
    """Programs on the way to another GPU, where that is to outlive the daemon."""
    attributes: Attributes | None = None
    """Whose files are, where that is to outlive the daemon."""
    lacks: Sequence[str] = ()
    """What the kernel module lacks that the daemon knows of, where it keeps the books."""
    lasting: bool = True
    """Whether the books, and what holds, are known to another daemon afterwards."""
    totals: WrittenTotals | None = None
    """What was done in each group, where that is to outlive the daemon."""
    lives: WrittenLives | None = None
    """How long slices stay that were made, where that is to outlive the daemon."""


async def gpus(choice: Choice) -> Sequence[Gpu]:
    """The GPUs. OSError(ENODEV) where `nvidia` was asked for and there is none."""
    if choice.gpu != "soft":
        from backend.nvidia.opening import open_gpus  # needs NVML, which is not everywhere
        from backend.nvidia.proven import Proven

        try:
            proven = Proven(choice.proven) if choice.proven is not None else None
            found = await open_gpus(selftest=choice.selftest, proven=proven)
        except OSError as error:
            if choice.gpu == "nvidia" or error.errno != errno.ENODEV:
                raise  # there are GPUs, and something keeps us from them: no time to play with others
            log.info("no NVIDIA GPU (%s): the software GPU serves", error.strerror)
        else:
            return found
    machine = Machine(choice.soft_gpus)
    return [SoftGpu(index, choice.soft_config, machine) for index in range(choice.soft_gpus)]


def backend(choice: Choice, found: Sequence[Gpu], seconds: float, journal: Journal | None = None) -> Backend:
    """The books for these GPUs, and what pulls their levers, which may take `seconds`.

    A `journal` keeps what the daemon knows alone. OSError, in words, where `kmod` was asked for and cannot be had.
    """
    soft = {gpu.info.index: gpu for gpu in found if isinstance(gpu, SoftGpu)}
    cuda = {gpu.info.index: gpu.managed for gpu in found if isinstance(gpu, Cuda)}
    names = {gpu.info.index: gpu.info.uuid for gpu in found}
    attributes = Attributes(journal, names) if journal is not None else None
    moves = WrittenMoves(journal, names) if journal is not None else None
    totals = WrittenTotals(journal, names) if journal is not None else None
    lives = WrittenLives(journal) if journal is not None else None
    # A software GPU is gone with its mount, and so are its books; those of a real one are there for the next mount.
    if journal is not None:
        journal.temporary = {gpu.info.uuid for gpu in soft.values()}
        for gpu in found:
            if isinstance(gpu, Forgetful):
                gpu.notes = Timeslices(journal, gpu.info.uuid)
    if (features := _kernel_features(choice)) is not None:
        lacks = kernel.lacking(features)
        for name, words in lacks.items():
            log.warning("the kernel module ggroup is older than this daemon and lacks %s: %s", name, words)
        ledger = kernel.KernelLedger(names, temporary=soft.keys())
        provided = [ProviderGpu(gpu, ledger, seconds) for gpu in found]
        return Backend(ledger, provided, soft, cuda, moves, attributes, list(lacks), totals=totals, lives=lives)
    if journal is None:
        return Backend(SoftLedger(), found, soft, cuda, lasting=False)
    noted = [JournaledGpu(gpu, journal) for gpu in found]
    return Backend(JournaledLedger(journal, names), noted, soft, cuda, moves, attributes, totals=totals, lives=lives)


def _kernel_features(choice: Choice) -> kernel.Module | None:
    """What the kernel module can that is to keep the books; None where the daemon is to keep them."""
    if choice.ledger == "soft":
        return None
    try:
        return kernel.features()
    except OSError as error:
        if choice.ledger == "kmod":
            raise
        log.info("%s: the daemon keeps the books", error.strerror)
        return None
