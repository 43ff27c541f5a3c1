"""The configuration of the policy slo; docs/policies/slo.md describes every key."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs

from backend.core.settings import PERIOD
from backend.process.identity import Slice, cgroup_of, slice_at
from ggroupfs.client import Group, Tree
from ggroupfs.client.latencies import SOCKET
from ggroupfs.policies.config import Table
from ggroupfs.policies.slo.core import WHOLE, Bounds, Pace
from ggroupfs.policies.slo.levers import By
from ggroupfs.policies.slo.reports import Place
from ggroupfs.policies.slo.samples import Statistic


@attrs.frozen
class Target:
    """A process or slice on a GPU, with its requirements."""

    name: str
    """Name in reports and events."""
    gpu: int
    """Index of the GPU."""
    place: Place
    """Processes of the group."""
    bounds: Bounds | None = None
    """Required bounds; None for a best-effort group, which gets what is left."""
    statistic: Statistic = attrs.field(factory=lambda: Statistic("p99"))
    """Statistic that summarizes its latencies."""

    def group(self, tree: Tree) -> Group:
        """Return the group's control files."""
        if self.place.cgroup is not None:
            return tree.slice(self.place.cgroup.path, self.gpu)
        assert self.place.pid is not None
        return tree.process(self.place.pid, self.gpu)

    async def is_spatial(self, tree: Tree) -> bool:
        """Return whether a slice that the group is in has its programs run at the same time (compute.spatial)."""
        try:
            above = self.place.cgroup.parent if self.place.cgroup is not None else cgroup_of(self.place.pid or 0)
        except OSError:  # the process is gone
            return False
        while above is not None:
            try:
                if await tree.slice(above.path, self.gpu).read("compute.spatial") == "1":
                    return True
            except OSError:  # no slice of the tree, or a daemon without it
                pass
            above = above.parent
        return False


@attrs.frozen
class Settings:
    """The configuration."""

    socket: Path
    """Socket to which programs report."""
    interval: float
    """Seconds between two samples."""
    pace: Pace
    """Window and cool-down."""
    reserve: int
    """Points that no group is given."""
    priority: int
    """Value of compute.priority for groups that have all of a GPU together."""
    by: By
    """Control files that carry the shares."""
    period_us: int
    """Period of quotas, microseconds."""
    migrate: bool
    """Whether groups are moved to other GPUs where there are any."""
    targets: Sequence[Target]
    """All groups, including those without bounds."""

    @classmethod
    def read(cls, config: Table) -> Settings:
        """Read the configuration. UsageError if it contains a mistake."""
        pace = Pace(
            window=config.whole("window", 5, low=1, high=1000),
            cooldown=config.seconds("cooldown", 5.0),
            silence=config.seconds("silence", 60.0),
        )
        settings = cls(
            socket=Path(config.text("socket", SOCKET)),
            interval=config.seconds("interval", 0.5),
            pace=pace,
            reserve=_points(config, "reserve", 0, low=0),
            priority=config.whole("priority", 7, high=15),
            by=By(config.choice("lever", [one.value for one in By], By.WEIGHT.value)),
            period_us=_period_us(config),
            migrate=config.flag("migrate", True),
            targets=[
                *[_critical(table) for table in config.tables("group")],
                *[_best_effort(table) for table in config.tables("best_effort")],
            ],
        )
        config.finish()
        if not any(one.bounds for one in settings.targets):
            raise config.wrong("group", "there is none")
        for key in ("name", "place"):
            seen = [(getattr(one, key), one.gpu if key == "place" else 0) for one in settings.targets]
            if len(set(seen)) < len(seen):
                raise config.wrong("group", f"two of the same {'process or slice' if key == 'place' else key}")
        return settings


def _period_us(config: Table) -> int:
    us = round(1e6 * config.seconds("period", PERIOD.default / 1e6))
    if us not in PERIOD.allowed:
        raise config.wrong("period", f"not from {PERIOD.least // 1000} to {PERIOD.most // 1000} ms")
    return us


def _critical(table: Table) -> Target:
    upper = table.seconds("upper")
    bounds = Bounds(
        upper=upper,
        lower=table.seconds("lower"),
        initial=_points(table, "share", 3_000),
        least=_points(table, "least", 500),
        most=_points(table, "most", WHOLE),
        up=_points(table, "scale_up", 1_000),
        down=_points(table, "scale_down", 500),
        rank=table.whole("rank", 0),
    )
    if not bounds.lower < upper:
        raise table.wrong("lower", "not below upper")
    if not bounds.least <= bounds.initial <= bounds.most:
        raise table.wrong("share", "not between least and most")
    return Target(table.text("name"), _gpu(table), place_of(table), bounds, statistic_of(table))


def _best_effort(table: Table) -> Target:
    place = place_of(table)
    name = place.cgroup.path if place.cgroup is not None else str(place.pid)
    return Target(f"best effort {name} on GPU {_gpu(table)}", _gpu(table), place)


def _gpu(table: Table) -> int:
    return table.whole("gpu", 0)


def statistic_of(table: Table) -> Statistic:
    """Read the key ``statistic``."""
    try:
        return Statistic(table.text("statistic", "p99"))
    except ValueError as error:
        raise table.wrong("statistic", str(error)) from None


def place_of(table: Table) -> Place:
    """Read the keys ``slice`` and ``pid``, exactly one of which is required."""
    if ("slice" in table) == ("pid" in table):
        raise table.wrong("slice", "one of slice and pid is needed")
    if "pid" in table:
        return Place(table.whole("pid", low=1), None)
    text = table.text("slice")
    slice_ = slice_at(text) if text.startswith("/") else None
    if slice_ is None or slice_ == Slice("/"):
        raise table.wrong("slice", "not a cgroup's path such as /batch.slice")
    return Place(None, slice_)


def _points(table: Table, key: str, default: int, low: int = 1) -> int:
    """Read a part of a GPU, in points."""
    return round(WHOLE * table.number(key, default / WHOLE, low=low / WHOLE, high=1.0))
