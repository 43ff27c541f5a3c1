"""GR alone off the runlist, on a real GPU: kernels stop, copies go on, also after a thaw in another program's turn."""

from __future__ import annotations

import contextlib

import trio

from backend.core.reasons import Engines
from backend.core.records import Capability
from backend.nvidia.gpu import NvidiaGpu
from backend.nvidia.linux import LinuxSystem
from backend.nvidia.opening import open_gpus
from backend.nvidia.proven import GR_ALONE
from backend.nvidia.selftest import Child, prove

WINDOW_S = 0.5
"""Seconds for which progress is measured."""
SETTLE_S = 0.05
"""Seconds after a lever in which a running copy ends."""


async def progress(*children: Child) -> list[tuple[int, int]]:
    """Return the kernels and the copies that each child completes in a window."""
    await trio.sleep(SETTLE_S)
    before = [(child.finished, child.copied) for child in children]
    await trio.sleep(WINDOW_S)
    return [
        (child.finished - kernels, child.copied - copies)
        for child, (kernels, copies) in zip(children, before, strict=True)
    ]


async def first_gpu(stack: contextlib.ExitStack) -> NvidiaGpu:
    """Open the first GPU of this host; its files are closed with the stack."""
    system = LinuxSystem()
    system.begin()
    stack.callback(system.end)
    return (await open_gpus(system=system, selftest=False))[0]


def test_without_gr_kernels_stand_and_copies_go_on() -> None:
    """After each change of what is off, the progress of the program and of its neighbour is checked."""

    async def main() -> list[tuple[Engines, int, int, int]]:
        found = []
        with contextlib.ExitStack() as stack:
            gpu = await first_gpu(stack)
            children = []
            for _ in range(2):
                children.append(Child(gpu.info.uuid))
                stack.callback(children[-1].end)
            for child in children:
                await child.started()
            who = children[0].identity
            await children[0].copies()
            # A turn ends; a freeze comes and goes during the wait; the turn begins; a freeze; its thaw.
            for engines in (Engines.GR, Engines.ALL, Engines.GR, Engines.NONE, Engines.ALL, Engines.NONE):
                await gpu.take(who, engines)
                (kernels, copies), (beside, _) = await progress(*children)
                found.append((engines, kernels, copies, beside))
            gpu.forget(who)
        return found

    found = trio.run(main)
    print(found)
    for engines, kernels, copies, beside in found:
        assert (kernels > 0) == (engines is Engines.NONE), (engines, found)
        assert (copies > 0) == (engines is not Engines.ALL), (engines, found)
        assert beside > 0, (engines, found)


def test_the_self_test_proves_it() -> None:
    """It reports the figures, and no control of the tree is named after it."""

    async def main() -> None:
        with contextlib.ExitStack() as stack:
            gpu = await first_gpu(stack)
            (found,) = [one for one in await prove(gpu) if one.control == GR_ALONE]
        print(found.evidence)
        assert found.capability is Capability.ENFORCED, found.evidence

    trio.run(main)
