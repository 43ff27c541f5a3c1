"""The unit policy of a mount: GPU properties of cgroups, read from unit files and from ``slices.d``.

A Controller asks :class:`~ggroupfs.units.policy.Units`; docs/units.md describes the behaviour. The class is imported on
first use, because a command that only looks up a name does not need the daemon's parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ggroupfs.units.policy import Units

__all__ = ["Units"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ggroupfs.units.policy import Units

    return Units
