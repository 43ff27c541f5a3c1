"""The configuration of the policy balance; docs/policies/balance.md describes every key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from ggroupfs.client.latencies import SOCKET
from ggroupfs.policies.balance.core import Pace
from ggroupfs.policies.balance.demand import LOOKS
from ggroupfs.policies.balance.eyes import Watched
from ggroupfs.policies.balance.mover import DEADLINE_S
from ggroupfs.policies.balance.picture import Bound
from ggroupfs.policies.config import Table
from ggroupfs.policies.slo.samples import Statistic
from ggroupfs.policies.slo.settings import place_of, statistic_of
from ggroupfs.text.names import is_number

REST_S = 60.0
"""Smallest rest that can be configured, seconds."""


@attrs.frozen
class Settings:
    """The configuration."""

    socket: Path
    """Socket to which programs report, if there are bounds of latencies."""
    interval: float
    """Seconds between two looks."""
    span: float
    """Seconds over which use is measured."""
    deadline: float
    """Seconds that a move may take."""
    pace: Pace
    """Window, rest and cool-down."""
    room: int | None
    """Bytes to keep free on each GPU; None for the default fraction."""
    processes: bool
    """Whether processes that are in none of the groups may be moved."""
    groups: Sequence[Watched]
    """Groups with a name."""
    statistics: Mapping[str, Statistic]
    """Statistics that summarize the latencies of groups with a bound on them, by name."""

    @classmethod
    def read(cls, config: Table) -> Settings:
        """Read the configuration. UsageError if it contains a mistake."""
        tables = config.tables("group")
        groups = [_group(table) for table in tables]
        statistics = {
            one.name: statistic_of(table)
            for one, table in zip(groups, tables, strict=True)
            if one.bound is not None and one.bound.upper is not None
        }
        interval = config.seconds("interval", 0.5)
        settings = cls(
            socket=Path(config.text("socket", SOCKET)),
            interval=interval,
            span=LOOKS * interval,
            deadline=config.seconds("deadline", DEADLINE_S),
            pace=Pace(
                window=config.whole("window", Pace().window, low=1, high=1000),
                silence=config.seconds("silence", Pace().silence),
                rest=config.seconds("rest", REST_S),
                cooldown=config.seconds("cooldown", Pace().cooldown),
                overload=config.number("overload", Pace().overload, low=1.0),
            ),
            room=config.size("room") if "room" in config else None,
            processes=config.flag("processes", True),
            groups=groups,
            statistics=statistics,
        )
        config.finish()
        if settings.pace.rest < REST_S:
            raise config.wrong("rest", "less than a minute")
        for key in ("name", "place"):
            seen = [getattr(one, key) for one in groups]
            if len(set(seen)) < len(seen):
                raise config.wrong("group", f"two of the same {'process or slice' if key == 'place' else key}")
        return settings


def _group(table: Table) -> Watched:
    place = place_of(table)
    found = place.cgroup.path if place.cgroup is not None else str(place.pid)
    name = table.text("name", found)
    if is_number(name) and name != found:
        raise table.wrong("name", "looks like the pid of another process")
    upper = table.seconds("upper") if "upper" in table else None
    least = table.number("least", low=0.01, high=1.0) if "least" in table else None
    bound = Bound(upper, least) if upper is not None or least is not None else None
    return Watched(name, place, bound, table.flag("move", True))
