"""Free the programs of a GPU when no daemon does: channels that are off the runlist, timeslices that were set."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs

from backend.nvidia import levers
from backend.nvidia.tenant import Tenant
from backend.process.identity import Process

TRIES = levers.NESTED
"""Times that freeing a program is tried before it is reported as failed."""


@attrs.frozen
class Freed:
    """The result of freeing one program on one GPU."""

    process: Process
    """The process."""
    channels: int
    """Number of its channels that were off and are on the runlist again."""
    timeslices: int
    """Number of its TSGs that have their native timeslice back."""
    asked: bool
    """Whether the driver says which channels are off. If not, all were put on the runlist."""
    failure: str = ""
    """The reason why it is not free, in words; empty if it is."""


async def free(processes: Iterable[Process], tenant_of: Callable[[Process], Tenant]) -> list[Freed]:
    """Free the processes one after the other; a process that ends meanwhile is left out."""
    freed = []
    for process in processes:
        try:
            freed.append(await _free_one(tenant_of(process)))
        except ProcessLookupError:
            continue
        except OSError as error:
            freed.append(Freed(process, 0, 0, True, error.strerror or str(error)))
    return freed


async def _free_one(tenant: Tenant) -> Freed:
    applied, enforcement = tenant.applied, tenant.enforcement
    enforcement.adopt_again()  # whatever is off was taken off by another daemon
    await tenant.look(force=True)
    channels, timeslices, asked = len(applied.off), len(applied.slices), not enforcement.unsure
    for _ in range(TRIES):
        await tenant.enforce()
        applied.off |= await tenant.left_off()
        if not applied.off:
            break
    failure = f"{len(applied.off)} channels are still off" if applied.off else ""
    return Freed(tenant.process, channels, timeslices, asked, failure)
