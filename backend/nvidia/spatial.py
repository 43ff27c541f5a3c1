"""Part of the self-test: whether programs of a space run beside each other, and the levers act on all of them.

Two children are clients of an MPS server of their own for a second. The levers are pulled on the first alone: they have
to stop the second, too, and let both go on.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol

import trio

from backend.core.reasons import Engines
from backend.core.records import Capability, GpuInfo
from backend.nvidia.proven import SPATIAL, Verdict
from backend.process.identity import ROOT, Process
from backend.space import control
from backend.space.space import Space

log = logging.getLogger(__name__)

UNPROVEN = "programs of a space are clients of an MPS server; not tested"
QUIT_S = 2.0
"""Seconds that the server has to end after its children have."""


class Levers(Protocol):
    """The levers that are tested."""

    info: GpuInfo

    async def take(self, process: Process, engines: Engines) -> None:
        """See :class:`backend.nvidia.gpu.NvidiaGpu`."""

    async def clients(self) -> frozenset[int]:
        """See :class:`backend.nvidia.gpu.NvidiaGpu`."""

    def forget(self, process: Process) -> None:
        """See :class:`backend.core.protocols.Gpu`."""


class Child(Protocol):
    """A program of our own that keeps the GPU busy (:class:`backend.nvidia.selftest.Child`)."""

    identity: Process

    @property
    def finished(self) -> int:
        """Kernels that the GPU completed for it."""

    async def started(self) -> None:
        """Wait for its first kernels. OSError."""

    def end(self) -> None:
        """End it."""


async def prove(
    gpu: Levers, run: bool, program: Path | None, start: Callable[[Mapping[str, str]], Child], window_s: float
) -> Verdict:
    """Return the verdict on compute.spatial. `start` starts a child with an environment, and `window_s` is the time
    over which progress is measured, seconds.
    """
    if program is None:
        return Verdict(SPATIAL, Capability.UNSUPPORTED, control.MISSING)
    if not run:
        return Verdict(SPATIAL, Capability.ADVISORY, UNPROVEN)
    directory = tempfile.mkdtemp(prefix="ggroupfs-")
    try:
        os.chmod(directory, 0o755)
        server = control.Control(program, Path(directory), Space(ROOT, os.geteuid(), 1))
        async with AsyncExitStack() as stack:
            stack.push_async_callback(_end_server, server)
            await server.start()
            children = []
            for _ in range(2):
                children.append(child := start(server.environment()))
                stack.callback(gpu.forget, child.identity)
                stack.callback(child.end)
            for child in children:
                await child.started()
            return await _levers(gpu, children, window_s)
    except OSError as error:
        return Verdict(SPATIAL, Capability.UNSUPPORTED, f"refused: {error.strerror}")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


async def _levers(gpu: Levers, children: list[Child], window_s: float) -> Verdict:
    async def rates() -> list[float]:
        before, began = [child.finished for child in children], trio.current_time()
        await trio.sleep(window_s)
        took = trio.current_time() - began
        return [(child.finished - count) / took for child, count in zip(children, before, strict=True)]

    first = children[0]
    if not {child.identity.pid for child in children} <= await gpu.clients():
        raise OSError(errno.EOPNOTSUPP, "the driver does not say which programs are clients of MPS")
    beside = await rates()
    await gpu.take(first.identity, Engines.GR)
    stopped = await rates()
    await gpu.take(first.identity, Engines.NONE)
    thawed = await rates()
    works = min(beside) > 0 and not any(stopped) and min(thawed) > 0
    words = ", then ".join(f"{one[0]:.0f}/s and {one[1]:.0f}/s" for one in (beside, stopped, thawed))
    return Verdict(
        SPATIAL,
        Capability.ENFORCED if works else Capability.UNSUPPORTED,
        f"kernels of two clients of one server, beside each other, without the GR engine of the first, and with it"
        f" again: {words}",
    )


async def _end_server(server: control.Control) -> None:
    """End the server, which has no client any more."""
    with trio.CancelScope(shield=True):
        if not server.has_ended():
            await server.ask("quit")
            with trio.move_on_after(QUIT_S):
                await server.ended()
            server.kill()
            await server.ended()
        server.close()
