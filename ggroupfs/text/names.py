"""Names of cgroups in the tree.

A directory of digits there is a GPU, so a cgroup's name never consists of digits alone.
"""

from __future__ import annotations

import re

DIGITS = re.compile(r"_*[0-9]+")


def is_number(name: str) -> bool:
    """Whether a name can be a pid or a GPU's index.

    Digits of other scripts count as letters: a cgroup may have them.
    """
    return name.isascii() and name.isdigit()


def escape(component: str) -> str:
    """Return a cgroup's name in the tree.

    One that looks like a GPU index gets an underscore, as systemd escapes names.
    """
    return f"_{component}" if DIGITS.fullmatch(component) else component


def unescape(name: str) -> str:
    """Return the original name of a cgroup from that in the tree."""
    return name[1:] if name.startswith("_") and DIGITS.fullmatch(name) else name


def slice_directory(path: str) -> str:
    """Return the directory of the cgroup `path`, relative to the mountpoint."""
    return "/".join(("slice", *(escape(part) for part in path.split("/") if part)))
