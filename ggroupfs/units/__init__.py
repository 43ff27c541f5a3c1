"""GPU properties of cgroups, read from unit files and from ``slices.d``: the policy of a mount.

:class:`~ggroupfs.units.policy.Units` is what a Controller asks; docs/units.md is what it does.
"""

from ggroupfs.units.policy import Units

__all__ = ["Units"]
