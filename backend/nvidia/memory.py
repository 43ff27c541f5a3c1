"""Move the memory of the programs of one GPU: in parts through the library in them, whole through cuCheckpoint."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable

from backend.core.records import Footprint, GpuInfo
from backend.cuda.managed import Managed
from backend.nvidia.listed import ProcessList
from backend.nvidia.mover import Mover
from backend.nvidia.nvml import Nvml
from backend.nvidia.swapped import SwappedPrograms
from backend.nvidia.tenant import Tenant
from backend.process.identity import Process
from backend.process.inside import has_library


class ProgramMemory:
    """The memory of the programs of one GPU."""

    def __init__(
        self,
        info: GpuInfo,
        nvml: Nvml,
        listed: ProcessList,
        mover: Mover,
        managed: Managed,
        swapped: SwappedPrograms,
        standing: Callable[[Process], Tenant | None],
    ) -> None:
        """`standing` returns the tenant of a program that has all its work off the GPU until something else is
        asked for; None for any other program.
        """
        self._info = info
        self._nvml = nvml
        self._listed = listed
        self._mover = mover
        self._managed = managed
        self._swapped = swapped
        self._standing = standing
        self._leaves = Counter[Process]()  # reclaims under way

    def manages(self, process: Process) -> bool:
        """As :meth:`backend.core.protocols.Gpu.manages`."""
        if self._speaks(process) or process in self._swapped or self._goes(process) > 0:
            return True
        return self._swapped.is_silent(process) and self._standing(process) is not None

    def footprint(self, process: Process) -> Footprint:
        """As :meth:`backend.core.protocols.Gpu.footprint`."""
        if self._speaks(process):
            return self._managed.footprint(process)
        held, movable = self._listed.held(process), self._goes(process)
        whole = self._swapped.nbytes(process) or movable
        silent = held if self._swapped.was_silent(process) else 0
        return Footprint(movable, implicit=held, unmovable=held - movable, disputed=0, whole=whole, silent=silent)

    def is_leaving(self, process: Process) -> bool:
        """As :meth:`backend.core.protocols.Gpu.is_leaving`."""
        return self._leaves[process] > 0

    async def reclaim(self, process: Process, nbytes: int) -> int:
        """As :meth:`backend.core.protocols.Gpu.reclaim`."""
        self._leaves[process] += 1
        try:
            return await self._reclaim(process, nbytes)
        finally:
            self._leaves[process] -= 1
            if not self._leaves[process]:
                del self._leaves[process]

    async def _reclaim(self, process: Process, nbytes: int) -> int:
        if process in self._managed or not self._goes(process):
            return await self._managed.reclaim(process, nbytes)

        async def held() -> int:
            if (tenant := self._standing(process)) is not None:
                await tenant.look()
            if not self._goes(process):
                return 0
            now = await self._nvml.held(self._info.index, process.pid)  # the last look may be too old
            return now if self._swapped.can(process, now) else 0

        return await self._swapped.out(process, held)

    async def migrate(self, process: Process, target: ProgramMemory) -> None:
        """As :meth:`backend.core.protocols.Gpu.migrate`."""
        await self._managed.returned(process)
        held = await self._nvml.held(self._info.index, process.pid)
        if not held:
            raise OSError(errno.EOPNOTSUPP, "the driver does not say how much memory it has")
        if process not in self._managed:
            if await has_library(process.pid):  # what that has in the host the driver does not restore
                raise OSError(errno.EBUSY, "the library in this program does not speak to us")
            await self._mover.move(process, self._info, target._info, held)
            return
        near = await self._nvml.are_near(self._info.index, target._info.index)
        placed, standby = self._managed.placed(process), self._managed.standby(process, target._managed, near)
        try:
            carried = max(0, held - self._managed.follows(process)) if near else held
            await self._mover.move(process, self._info, target._info, held, carried, standby)
        except BaseException:
            self._managed.stay(process, placed)
            raise
        finally:
            os.close(standby.page)
        target._managed.expect(process, placed)

    def _speaks(self, process: Process) -> bool:
        """Return whether the library in a process moves what it is asked to, or is about to."""
        return process in self._managed or self._managed.expects(process)

    def _goes(self, process: Process) -> int:
        """Return the bytes of a program without the library, if they may go into the host; else 0."""
        if process in self._managed or self._standing(process) is None:
            return 0
        held = self._listed.held(process)
        return held if self._swapped.can(process, held) else 0
