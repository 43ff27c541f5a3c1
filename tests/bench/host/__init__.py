"""The scenarios that need no GPU, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs

from tests.bench.core.runner import Scenario
from tests.bench.host import files, flyt, salus, scale


@attrs.frozen
class Entry:
    """A scenario that can be selected."""

    make: Callable[[int], Scenario]
    """Make the scenario from a seed."""
    budget: float
    """Seconds that it may take by default."""
    repetitions: int
    """Largest number of repetitions."""


SCENARIOS: Mapping[str, Entry] = {
    "files": Entry(files.make, 240, 9),
    "scale": Entry(scale.make, 300, 3),
    "salus": Entry(salus.make, 240, 5),
    "flyt": Entry(flyt.make, 180, 3),
}
