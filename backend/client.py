"""What a program finds out about a mounted tree before it connects to it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def facts_of(mount: str | os.PathLike[str]) -> Mapping[str, str]:
    """What its ``ggroup.backend`` says. FileNotFoundError where there is no tree."""
    facts = {}
    for line in Path(mount, "ggroup.backend").read_text().splitlines():
        key, _, value = line.partition(" ")
        facts[key] = value
    return facts
