"""Open the NVIDIA GPUs of a host, each with the levers that were proven on it."""

from __future__ import annotations

import errno
import logging
from functools import partial

import attrs
import trio

from backend.nvidia import device, linux, rm
from backend.nvidia.deadline import Deadline
from backend.nvidia.discover import Census, ClientCounter
from backend.nvidia.gpu import LOOK_DEADLINE, NvidiaGpu
from backend.nvidia.mover import Mover
from backend.nvidia.nvml import Nvml
from backend.nvidia.proven import Proven
from backend.nvidia.readback import ChannelStates
from backend.nvidia.selftest import prove
from backend.nvidia.subdevice import Subdevice
from backend.nvidia.trace import Trace
from backend.nvidia.usage import Usage

log = logging.getLogger(__name__)

GRANULE = 2 << 20
"""Granule of moves, bytes: the unit of CUDA's virtual memory management, and so of the library in a program."""
CHUNK = 64 << 20
"""Largest chunk of the library, bytes; a chunk moves as a whole (`class_bytes` of ``library/memory/chunk.c``)."""


async def open_gpus(
    *, system: linux.System | None = None, nvml: Nvml | None = None, selftest: bool = True, proven: Proven | None = None
) -> list[NvidiaGpu]:
    """Return the NVIDIA GPUs of this host, each with its verdicts. Raises OSError: ENODEV where there is no driver or
    no GPU, else the reason why none can be used.

    The self-test takes some three seconds, for all GPUs at the same time; a GPU that is in `proven` is not tested.
    Without the self-test the levers are advisory.
    """
    if nvml is None:
        nvml = Nvml()
    await nvml.open()
    infos = await nvml.gpus()
    if system is None:
        system = linux.LinuxSystem()
        system.begin()
    deadline = Deadline("the driver", LOOK_DEADLINE)
    try:
        counter = await deadline.call(partial(ClientCounter, system))
    except FileNotFoundError:
        raise OSError(errno.ENODEV, f"no {device.CONTROL_DEVICE}") from None
    cards = {card.pci: card for card in await deadline.call(counter.cards)}
    census = Census(system, counter)
    gpus: list[NvidiaGpu] = []
    failed: OSError | None = None
    movers = {info.name: Mover(info.index) for info in reversed(infos)}
    for info in infos:
        card = cards.get(info.pci)
        if card is None:
            log.warning("GPU %d at %s is not in the driver's list", info.index, info.pci)
            continue
        try:  # with a deadline of its own: a GPU that hangs does not keep out the others
            states = await Deadline("the driver", LOOK_DEADLINE).call(partial(_states, system, card))
        except OSError as error:
            log.warning("GPU %d is left out: %s", info.index, error)
            failed = error
            continue
        usage = Usage(info.index, nvml, partial(Trace, system, card))
        info = attrs.evolve(info, granule=GRANULE, chunk=CHUNK)
        present = partial(_ask, system, card)
        gpus.append(NvidiaGpu(info, card.gpu_id, nvml, census, states, usage, movers[info.name], present))
    if not gpus:
        counter.close()
        if not infos:
            raise OSError(errno.ENODEV, "the driver has no GPU")
        # There are GPUs, and none can be served: that is not ENODEV.
        raise OSError(errno.EIO, str(failed) if failed is not None else "the driver knows no GPU that NVML does")
    async with trio.open_nursery() as nursery:
        for gpu in gpus:
            nursery.start_soon(_test, gpu, selftest, sum(one.mover is gpu.mover for one in gpus) > 1, proven)
    return gpus


def _states(system: linux.System, card: rm.Card) -> ChannelStates:
    """Return the channel states of a GPU. Raises OSError where the GPU is not there."""
    try:
        _ask(system, card)
    except rm.RmError as error:
        if error.lost:
            raise
    return ChannelStates(system, card)


def _ask(system: linux.System, card: rm.Card) -> None:
    """Ask a GPU for its time. Raises OSError where the GPU is not there."""
    own = Subdevice(system, card)
    try:
        own.time_ns()
    finally:
        own.close()


async def _test(gpu: NvidiaGpu, selftest: bool, movable: bool, proven: Proven | None) -> None:
    gpu.adopt(await prove(gpu, run=selftest, movable=movable, proven=proven))
