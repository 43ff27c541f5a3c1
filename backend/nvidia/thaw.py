"""Frees the programs of a GPU where no daemon is there to do it: channels that are off, timeslices that were set."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs

from backend.nvidia import levers
from backend.nvidia.tenant import Tenant
from backend.process.identity import Process

TRIES = levers.NESTED
"""Times that a program is freed before it is said that it cannot be."""


@attrs.frozen
class Freed:
    """What was done for one program on one GPU."""

    process: Process
    """Who."""
    channels: int
    """Of its channels, those that were off and are on the runlist again."""
    timeslices: int
    """Of its TSGs, those that have their own timeslice back."""
    asked: bool
    """Whether the driver says which channels are off. If not, all were put on the runlist."""
    failure: str = ""
    """Why it is not free, in words."""


async def free(processes: Iterable[Process], tenant_of: Callable[[Process], Tenant]) -> list[Freed]:
    """Frees each of them, one after the other. Who dies meanwhile is free."""
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
    enforcement.adopt_again()  # whatever is off, it was another daemon
    await tenant.look(force=True)
    channels, timeslices, asked = len(applied.off), len(applied.slices), not enforcement.unsure
    for _ in range(TRIES):
        await tenant.enforce()
        applied.off |= await tenant.left_off()
        if not applied.off:
            break
    failure = f"{len(applied.off)} channels are still off" if applied.off else ""
    return Freed(tenant.process, channels, timeslices, asked, failure)
