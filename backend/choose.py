"""Choose the ledger and the GPUs that serve a mount, by the names on the command line."""

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
from backend.nvidia.waiting import Waiting
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
    """The programs on it whose memory can be moved."""


@runtime_checkable
class Forgetful(Protocol):
    """A GPU whose native timeslices have to outlive the daemon (:class:`backend.nvidia.gpu.NvidiaGpu`)."""

    notes: Timeslices
    """The record of the native timeslices."""


@runtime_checkable
class Outlived(Protocol):
    """A GPU that programs stay off when the daemon is killed (:class:`backend.nvidia.gpu.NvidiaGpu`)."""

    waiting: Waiting | None
    """The memory for what is to be put back on then."""


@attrs.frozen
class Choice:
    """The options of the command line that choose a backend."""

    gpu: str = "auto"
    """One of :data:`GPUS`; auto takes NVIDIA GPUs where there are any, else the software GPU."""
    ledger: str = "auto"
    """One of :data:`LEDGERS`; auto takes the kernel module's books where it is loaded, else the daemon's own."""
    soft_gpus: int = 1
    """Number of software GPUs."""
    soft_config: SoftConfig = attrs.field(factory=SoftConfig)
    """Properties of the software GPUs."""
    selftest: bool = True
    """Whether the levers of a real GPU are proven before the mount answers."""
    proven: Path | None = None
    """File that records which levers were proven, for the next daemon."""


@attrs.frozen
class Backend:
    """The parts that serve a mount."""

    ledger: Ledger
    """The books."""
    gpus: Sequence[Gpu]
    """The GPUs, as the Controller takes them."""
    soft: Mapping[int, SoftGpu]
    """The software GPUs among them, by index: programs connect to these by a socket."""
    cuda: Mapping[int, Managed]
    """For each of the other GPUs, by index, the programs whose memory can be moved: they connect by a socket, too."""
    moves: WrittenMoves | None = None
    """Programs on the way to another GPU; None where that does not outlive the daemon."""
    attributes: Attributes | None = None
    """Owners of files; None where they do not outlive the daemon."""
    lacks: Sequence[str] = ()
    """Features that the daemon knows and the kernel module lacks, where the module keeps the books."""
    lasting: bool = True
    """Whether books and settings are known to the next daemon."""
    totals: WrittenTotals | None = None
    """Totals of each group; None where they do not outlive the daemon."""
    lives: WrittenLives | None = None
    """Lifetimes of slices that were made; None where they do not outlive the daemon."""
    waiting: Waiting | None = None
    """What is to be put back on the runlist if the daemon is killed; None where programs are off no GPU then, or that
    cannot be noted."""


async def gpus(choice: Choice) -> Sequence[Gpu]:
    """Return the GPUs. Raises OSError(ENODEV) where `nvidia` was asked for and there is none."""
    if choice.gpu != "soft":
        from backend.nvidia.opening import open_gpus  # needs NVML, which is not everywhere
        from backend.nvidia.proven import Proven

        try:
            proven = Proven(choice.proven) if choice.proven is not None else None
            found = await open_gpus(selftest=choice.selftest, proven=proven)
        except OSError as error:
            if choice.gpu == "nvidia" or error.errno != errno.ENODEV:
                raise  # there are GPUs that cannot be used: a software GPU would hide that
            log.info("no NVIDIA GPU (%s): the software GPU serves", error.strerror)
        else:
            return found
    machine = Machine(choice.soft_gpus)
    return [SoftGpu(index, choice.soft_config, machine) for index in range(choice.soft_gpus)]


def backend(choice: Choice, found: Sequence[Gpu], seconds: float, journal: Journal | None = None) -> Backend:
    """Return the books for these GPUs, and the objects that pull their levers, which may take `seconds`.

    A `journal` keeps what only the daemon knows. Raises OSError, with an explanation, where `kmod` was asked for and
    cannot be had.
    """
    outlived = [gpu for gpu in found if isinstance(gpu, Outlived)]
    waiting = _waiting() if outlived else None
    for gpu in outlived:
        gpu.waiting = waiting
    return attrs.evolve(_backend(choice, found, seconds, journal), waiting=waiting)


def _waiting() -> Waiting | None:
    try:
        return Waiting()
    except OSError as error:
        log.warning("programs that wait stand still if the daemon is killed: no memory: %s", error.strerror)
        return None


def _backend(choice: Choice, found: Sequence[Gpu], seconds: float, journal: Journal | None) -> Backend:
    soft = {gpu.info.index: gpu for gpu in found if isinstance(gpu, SoftGpu)}
    cuda = {gpu.info.index: gpu.managed for gpu in found if isinstance(gpu, Cuda)}
    names = {gpu.info.index: gpu.info.uuid for gpu in found}
    attributes = Attributes(journal, names) if journal is not None else None
    moves = WrittenMoves(journal, names) if journal is not None else None
    totals = WrittenTotals(journal, names) if journal is not None else None
    lives = WrittenLives(journal) if journal is not None else None
    # A software GPU and its books are gone with its mount; the books of a real one are there for the next mount.
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
    """Return the features of the kernel module if it keeps the books; None if the daemon keeps them."""
    if choice.ledger == "soft":
        return None
    try:
        return kernel.features()
    except OSError as error:
        if choice.ledger == "kmod":
            raise
        log.info("%s: the daemon keeps the books", error.strerror)
        return None
