"""Hostile tenants do every pair of things at the same time, beside an honest neighbour and root (see the package)."""

from __future__ import annotations

import os
import random

import pytest

from tests.hostile.registry import CUDA, SOFT, kinds_of
from tests.hostile.rounds import TENANTS, pairs_of, running
from tests.support.mounted import mountpoint

SEED = 1
"""Seed of the run in which every pair is met."""
FRESH = 6
"""Number of rounds with a fresh seed each time, outside CI."""
LONG = int(os.environ.get("GGROUP_FUZZ", "0"))
"""Number of times that all pairs are tried with a fresh seed instead of :data:`SEED`; 0 in `make test`."""

NAMES = {SOFT: "soft", CUDA: "nvidia"}


@pytest.mark.timeout(1800 * max(1, LONG))
@pytest.mark.parametrize("protocol", [SOFT, CUDA], ids=NAMES.values())
def test_every_pair_of_what_a_tenant_can_do(protocol: str, capsys: pytest.CaptureFixture[str]) -> None:
    """After each round: the sums of the books, the daemon's descriptors, threads and log, and the others' waits."""
    fresh, pairs = random.SystemRandom().randrange(1 << 32), pairs_of(protocol)
    seeds = [fresh] if LONG else [SEED] if os.environ.get("CI") else [SEED, fresh]
    for seed in seeds:
        with capsys.disabled():
            print(f"{NAMES[protocol]}: seed {seed}", flush=True)
        with mountpoint() as path, running(protocol, seed, path) as run:
            if LONG:
                for _ in range(LONG):
                    run.pairs(pairs, again=1)
            elif seed == SEED:
                run.pairs(pairs)
            else:
                run.pairs(random.Random(seed).sample(pairs, FRESH * TENANTS), again=1)
            outcome = run.outcome
        line = f"{outcome.rounds} rounds, {outcome.operations} operations, {len(outcome.met)} of {len(pairs)} pairs"
        with capsys.disabled():
            print(f"{NAMES[protocol]}: seed {seed}: {line} of {len(kinds_of(protocol))} kinds met", flush=True)
        if seed == SEED:
            assert not (missed := set(pairs) - outcome.met), missed
