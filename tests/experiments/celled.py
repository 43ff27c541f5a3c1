"""Cells of an experiment: those that are asked for and that there is time for, each with what came of it.

CELLS ("green mps-levers"): the cells whose names begin with one of these; all of them without. LIMIT_S (150): seconds
for all of them, where the experiment says nothing else.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Cells:
    """The cells that are run one after the other, and the time that is left."""

    def __init__(self, file: Path, limit_s: int = 150) -> None:
        """What came of them is written to `file` after each. `limit_s` is LIMIT_S where that is not set."""
        self._file, self._began = file, time.monotonic()
        self._limit_s = float(os.environ.get("LIMIT_S", limit_s))
        self._names = os.environ.get("CELLS", "").split()
        self._found: dict[str, Any] = {}

    def wants(self, name: str, seconds: float) -> bool:
        """Return whether a cell that takes so many seconds is asked for, and these are left."""
        if self._names and not any(name.startswith(one) for one in self._names):
            return False
        left = self._limit_s - (time.monotonic() - self._began)
        if left < seconds:
            print(f"== {name}: left out, {left:.0f} s are left of LIMIT_S", flush=True)
        return left >= seconds

    def note(self, name: str, found: Any) -> None:
        """Write down what came of a cell."""
        self._found[name] = found
        self._file.write_text(json.dumps(self._found, indent=1))

    def cell(self, name: str, seconds: float, run: Callable[[], Any]) -> None:
        """Run a cell if it is wanted, and tell what came of it."""
        if not self.wants(name, seconds):
            return
        start = time.monotonic()
        try:
            found = run()
        except Exception as error:  # a cell that fails is a finding, and the next one runs
            found = f"{type(error).__name__}: {error}"
        print(f"== {name} ({time.monotonic() - start:.1f} s): {json.dumps(found)}", flush=True)
        self.note(name, found)
