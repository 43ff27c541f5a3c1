"""How cgroups are called in the tree: a directory of digits there is a GPU, so one of a cgroup never is."""

from __future__ import annotations

import re

DIGITS = re.compile(r"_*[0-9]+")


def is_number(name: str) -> bool:
    """Whether it can be a pid or a GPU's index. Digits of other scripts are letters here: a cgroup may be called so."""
    return name.isascii() and name.isdigit()


def escape(component: str) -> str:
    """A cgroup's name in the tree: one that looks like a GPU index gets an underscore, as systemd escapes."""
    return f"_{component}" if DIGITS.fullmatch(component) else component


def unescape(name: str) -> str:
    """The cgroup's own name."""
    return name[1:] if name.startswith("_") and DIGITS.fullmatch(name) else name


def slice_directory(path: str) -> str:
    """Where the cgroup `path` is, seen from the mountpoint."""
    return "/".join(("slice", *(escape(part) for part in path.split("/") if part)))
