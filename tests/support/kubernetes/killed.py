"""`python -m tests.support.kubernetes.killed N OPTION...`: run the driver, killed at its Nth step; never for N = 0.

A step is a call that changes a file of a claim: it begins to write the file, gives it its name, or removes it. The kill
replaces the call, so N and N + 1 are a kill before and a kill after each step. Calls before the driver listens do not
count.
"""

from __future__ import annotations

import os
import pathlib
import signal
import sys
from collections.abc import Callable
from typing import Any

from ggroupfs.dra import plugin
from ggroupfs.dra.cli import main

SUFFIXES = (".json", ".json.new")
"""Suffixes of the files of claims."""


class Steps:
    """Counts calls, and kills the process at one of them."""

    def __init__(self, at: int) -> None:
        self._at = at
        self._count = 0
        self._begun = False

    def begin(self, serve: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `serve` so that steps count once the driver listens."""

        def listening(*words: Any, **options: Any) -> Any:
            self._begun = True
            return serve(*words, **options)

        return listening

    def counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call, which is a step if its first argument is a file of a claim."""

        def step(path: Any, *words: Any, **options: Any) -> Any:
            if self._begun and os.fspath(path).endswith(SUFFIXES):
                self._count += 1
                if self._count == self._at:
                    os.kill(os.getpid(), signal.SIGKILL)
            return call(path, *words, **options)

        return step


if __name__ == "__main__":
    steps = Steps(int(sys.argv[1]))
    os.rename = steps.counted(os.rename)
    for name in ("write_text", "unlink"):
        setattr(pathlib.Path, name, steps.counted(getattr(pathlib.Path, name)))
    from ggroupfs.dra import driver

    driver.serve = steps.begin(plugin.serve)  # type: ignore[attr-defined]
    sys.exit(main(sys.argv[2:]))
