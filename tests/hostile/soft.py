"""Kinds about the software GPU."""

from __future__ import annotations

import contextlib
import random

from backend.door.wire import Op
from tests.hostile.messages import EDGES, say, word
from tests.hostile.registry import SOFT, Tenant, kind

MIB = 1 << 20


def gpu(random: random.Random) -> int:
    return random.choice((0, 0, 0, 1))


@kind("make contexts", SOFT)
def contexts(tenant: Tenant, random: random.Random) -> None:
    if len(tenant.tsgs) > 4 or random.random() < 0.3:
        say(tenant, Op.LEAVE, tenant.tsgs.pop() if tenant.tsgs and random.random() < 0.8 else word(random))
    else:
        tenant.tsgs.append(say(tenant, Op.JOIN, random.choice((1, 8, 128, 129, 0)), gpu=gpu(random)).args[0])


@kind("allocate", SOFT)
def allocate(tenant: Tenant, random: random.Random) -> None:
    """Allocate more than there is, nothing, and memory that another thread frees meanwhile."""
    if not tenant.tsgs:
        tenant.tsgs.append(say(tenant, Op.JOIN, 8).args[0])
    nbytes = random.choice((2, 64, 256, 1024, 3072)) * MIB if random.random() < 0.8 else random.choice(EDGES)
    tenant.allocated.append(say(tenant, Op.ALLOC, nbytes, gpu=gpu(random)).args[:2])


@kind("free", SOFT)
def free(tenant: Tenant, random: random.Random) -> None:
    """Free memory once, twice, by half, and memory that was never allocated."""
    if not tenant.allocated:
        allocate(tenant, random)
    first, count = random.choice(tenant.allocated)
    if random.random() < 0.7:
        with contextlib.suppress(ValueError):
            tenant.allocated.remove((first, count))
        say(tenant, Op.FREE, first, count)
    else:
        say(tenant, Op.FREE, *random.choice(((first, count - 1), (first + 1, count), (word(random), word(random)))))


@kind("touch pages", SOFT)
def touch(tenant: Tenant, random: random.Random) -> None:
    if not tenant.allocated:
        allocate(tenant, random)
    first, count = random.choice(tenant.allocated)
    if random.random() < 0.5:
        say(tenant, Op.WRITE, first, random.choice((count, 1, count + 1, word(random))), word(random), word(random))
    else:
        say(tenant, Op.READ, random.choice((first, word(random))), random.choice((1, 5, 6)))


@kind("launch", SOFT)
def launch(tenant: Tenant, random: random.Random) -> None:
    if not tenant.tsgs:
        tenant.tsgs.append(say(tenant, Op.JOIN, 8).args[0])
    first, count = random.choice(tenant.allocated) if tenant.allocated else (0, 0)
    kernels = random.choice((1, 100, 65536, 65537, word(random)))
    us = random.choice((1, 1000, 60_000_000, word(random)))
    say(tenant, Op.LAUNCH, random.choice(tenant.tsgs), kernels, us, first, count)
