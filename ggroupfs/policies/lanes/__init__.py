"""The policy of Salus: jobs share a GPU in lanes, and in each lane one job runs at a time."""

from __future__ import annotations

from collections.abc import Mapping

from ggroupfs.policies.lanes.orders import Order
from ggroupfs.policies.lanes.policy import Lanes
from ggroupfs.policies.lanes.region import LaneView

__all__ = ["LaneView", "Lanes", "Order", "make"]


def make(capacity: int, options: Mapping[str, str]) -> Lanes:
    """Make the policy for a GPU of `capacity` bytes.

    Options: ``order``, and ``lanes``, the largest number of lanes. ValueError for any other option or a bad value.
    """
    unknown = set(options) - {"order", "lanes"}
    if unknown:
        raise ValueError(f"lanes has no option {sorted(unknown)[0]}")
    most = int(options["lanes"]) if "lanes" in options else None
    return Lanes(capacity, Order(options.get("order", Order.FIFO)), most)
