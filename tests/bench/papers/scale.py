"""How far one daemon goes: 200 programs on one GPU, 1000 slices, and `ggroupfs balance` on the GPUs of one host.

What the daemon takes of a CPU, and a write of a control file beside it, are compared with a tree of few; the throughput
of programs that `balance` spreads with that of the same number that were put on their GPUs by hand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from tests.bench.core.spread import percentile
from tests.bench.papers.cells import SECOND, Cell, Measured

NAME, FEW, MANY = "scale-gpu", "few", "many"
SPREAD, HAND, BALANCE, LEFT = "scale-balance", "placed by hand", "ggroupfs balance", "left on one GPU"
PROGRAMS, SLICES, BESIDE = 200, 1000, 8
"""Programs, or slices; and the programs that there are with few, or in slices."""
EACH = 2
"""Programs for each GPU that `balance` spreads."""
WRITES, WINDOW_S, SETTLE_S, BALANCE_S = 1000, 10.0, 5.0, 60.0
"""Writes that are timed; seconds for which the daemon is looked at; before; and for programs to be spread."""


class Counted(Protocol):
    """A program that works."""

    @property
    def done(self) -> int: ...


class Tree(Protocol):
    """A mounted tree."""

    def programs(self, count: int, gpus: Sequence[int] | None = None) -> Sequence[Counted]:
        """Start so many programs, each on its GPU of `gpus` by turns or on the first; those of before go on. On return
        all are in the tree, and every tenth works, or all with `gpus`."""
        ...

    def slices(self, count: int) -> None:
        """Make so many, with no program in them."""
        ...

    def cpu_s(self) -> float:
        """CPU seconds that the daemon took so far."""
        ...

    def write_us(self, count: int) -> Sequence[float]:
        """Write a control file of one program so often; microseconds of each."""
        ...

    def balance(self) -> contextlib.AbstractContextManager[Callable[[], Sequence[float]]]:
        """Run the policy; a call returns milliseconds of each of its moves so far."""
        ...

    def places(self) -> Sequence[int]:
        """The GPU that each program is on, by the driver."""
        ...

    @property
    def said(self) -> Sequence[str]:
        """What the daemon and policies have logged."""
        ...


class Site(Protocol):
    """Where trees are mounted."""

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...

    def tree(self) -> contextlib.AbstractContextManager[Tree]:
        """One over all GPUs. Unavailable where that cannot be."""
        ...


def looked(site: Site, tree: Tree) -> dict[str, float]:
    """What the daemon takes with nothing to do, and then what writes take."""
    site.sleep(SETTLE_S)
    cpu, start = tree.cpu_s(), site.now()
    site.sleep(WINDOW_S)
    part = 100 * (tree.cpu_s() - cpu) / (site.now() - start)
    writes = tree.write_us(WRITES)
    return {"daemon_percent": part, "write_p50_us": percentile(writes, 0.5), "write_p99_us": percentile(writes, 0.99)}


def cells(site: Site, gpus: int = 1) -> Iterator[Cell]:
    """All of them; those of several GPUs say so."""

    def beside(programs: int, slices: int) -> Callable[[int], Measured]:
        def measure(number: int) -> Measured:
            with site.tree() as tree:
                tree.programs(programs)
                if slices:
                    tree.slices(slices)
                found = looked(site, tree)
            return Measured(found, said=tree.said)

        return measure

    def spread(how: str) -> Callable[[int], Measured]:
        def measure(number: int) -> Measured:
            with site.tree() as tree, contextlib.ExitStack() as stack:
                every = list(range(gpus)) if how == HAND else [0]
                programs = tree.programs(EACH * gpus, every)
                moves = stack.enter_context(tree.balance()) if how == BALANCE else list
                start = site.now()
                while how == BALANCE and len(set(tree.places())) < gpus and site.now() - start < BALANCE_S:
                    site.sleep(0.5)
                settled = site.now() - start
                site.sleep(SETTLE_S)
                before, begun = [one.done for one in programs], site.now()
                site.sleep(WINDOW_S)
                rates = [(one.done - done) / (site.now() - begun) for one, done in zip(programs, before, strict=True)]
                found = {"batch_per_s": sum(rates)}
                took = list(moves())
                if how == BALANCE:
                    found["settled_s"] = settled
                    if took:
                        found["migrate_ms"] = percentile(took, 0.5)
                places = tree.places()
            return Measured(found, {"places": list(places), "moves_ms": took}, tree.said)

        return measure

    yield Cell(NAME, FEW, {}, 40.0, beside(BESIDE, 0), rank=SECOND)
    yield Cell(NAME, MANY, {"programs": PROGRAMS}, 150.0, beside(PROGRAMS, 0), rank=SECOND)
    yield Cell(NAME, MANY, {"slices": SLICES}, 60.0, beside(BESIDE, SLICES), rank=SECOND)
    for how, seconds in ((HAND, 60.0), (LEFT, 60.0), (BALANCE, 120.0)):
        yield Cell(SPREAD, how, {"gpus": gpus}, seconds, spread(how), max(2, gpus), SECOND)
