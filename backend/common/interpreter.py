"""Run modules of ggroupfs in processes of their own."""

from __future__ import annotations

import os
import sys


def environment() -> dict[str, str]:
    """Return this process's environment, extended by the folders that it imports from: the interpreter does not
    search the folder of an installed package by itself.

    Use it only for modules of ggroupfs. Programs of users have to import their own.
    """
    return os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
