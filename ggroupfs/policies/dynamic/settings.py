"""The configuration of ``dynamic`` and ``cooperative``."""

from __future__ import annotations

import attrs

from ggroupfs.client import Group, Tree
from ggroupfs.policies.config import Table
from ggroupfs.policies.dynamic.core import GRANULE, Options
from ggroupfs.policies.dynamic.demand import Looking
from ggroupfs.text.names import is_number

MIB = 1 << 20


@attrs.frozen
class Manner:
    """The defaults in which the two policies differ."""

    early: bool
    """See :class:`Options`."""
    least: int
    """Smallest step, bytes."""
    most: int
    """Largest step, bytes."""


@attrs.frozen
class Settings:
    """The configuration; docs/policies/dynamic.md describes the keys."""

    high: Group
    """Group that is served first."""
    low: Group
    """Group that has what is left."""
    within: Group | None
    """Slice that contains both groups; its limit holds if the policy is too slow."""
    gpu: int
    """Index of the GPU."""
    budget: int | None
    """Bytes for both groups together; None: the limit of `within`, or else the memory of the GPU."""
    interval: float
    """Seconds between two looks."""
    least: int
    """Smallest step, bytes."""
    most: int
    """Largest step, bytes."""
    options: Options
    """Settings of the decision."""


def read(tree: Tree, config: Table, manner: Manner) -> Settings:
    """Read the configuration. UsageError if it contains a mistake."""
    gpu = config.whole("gpu", 0)

    def group(key: str) -> Group:
        name = config.text(key)
        if name.startswith("/"):
            return tree.slice(name, gpu)
        if is_number(name):
            return tree.process(int(name), gpu)
        raise config.wrong(key, "neither a pid nor the path of a slice, which begins with /")

    high, low = group("high"), group("low")
    if high == low:
        raise config.wrong("low", "is the same as high")
    headroom = config.size("headroom", 512 * MIB)
    most = config.size("step", manner.most)
    looking = Looking(
        headroom=headroom,
        headroom_most=max(headroom, config.size("headroom_most", 4 * headroom)),
        lead=config.seconds("lead", 0.5),
        hold=config.seconds("hold", 0.5),
        idle=config.seconds("idle", 0.2),
        expect=config.seconds("expect", 10.0),
    )
    if most < GRANULE:
        raise config.wrong("step", "is less than a piece of memory that can be moved, 2M")
    settings = Settings(
        high=high,
        low=low,
        within=group("within") if "within" in config else None,
        gpu=gpu,
        budget=config.size("budget") if "budget" in config else None,
        interval=config.seconds("interval", 0.02),
        least=min(manner.least, most),
        most=most,
        options=Options(looking, config.size("floor", 0), manner.early),
    )
    config.finish()
    return settings
