"""Cells of an experiment: those that are asked for and that there is time for, each with what came of it.

CELLS ("green mps-levers"): the cells whose names begin with one of these; all of them without. LIMIT_S (150): seconds
for all of them.
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

    def __init__(self, file: Path) -> None:
        """What came of them is written to `file` after each."""
        self._file, self._began = file, time.monotonic()
        self._limit_s = float(os.environ.get("LIMIT_S", "150"))
        self._names = os.environ.get("CELLS", "").split()
        self._found: dict[str, Any] = {}

    def cell(self, name: str, seconds: float, run: Callable[[], Any]) -> None:
        """Run a cell that takes so many seconds, if it is asked for and these are left, and tell what came of it."""
        if self._names and not any(name.startswith(one) for one in self._names):
            return
        if self._limit_s - (time.monotonic() - self._began) < seconds:
            print(f"== {name}: left out", flush=True)
            return
        start = time.monotonic()
        try:
            found = run()
        except Exception as error:  # a cell that fails is a finding, and the next one runs
            found = f"{type(error).__name__}: {error}"
        self._found[name] = found
        print(f"== {name} ({time.monotonic() - start:.1f} s): {json.dumps(found)}", flush=True)
        self._file.write_text(json.dumps(self._found, indent=1))
