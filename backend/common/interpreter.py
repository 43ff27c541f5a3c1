"""How modules of ours run in a process of their own."""

from __future__ import annotations

import os
import sys


def environment() -> dict[str, str]:
    """Ours, with the places that we import from: an installed package is where no interpreter looks by itself.

    For our own modules alone. Programs of users are to import their own.
    """
    return os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
