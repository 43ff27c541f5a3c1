"""GPU properties of cgroups, read from unit files and from ``slices.d``: the policy of a mount.

:class:`~ggroupfs.units.policy.Units` is what a Controller asks; docs/units.md is what it does. It is imported when
it is asked for: a command that only looks up a name has no use for the daemon's parts.
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
