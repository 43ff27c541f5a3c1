"""A process of root's that is moved between two cgroups, to know when the daemon has looked where everybody is.

Nothing tells the daemon that a process was moved: it looks at each one in turn (:mod:`backend.core.membership`), which
takes as long as there are processes, and longer on a machine that is busy. When it has found the canary to be elsewhere
twice, it has looked at all others in between.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.hostile.patience import Patience
from tests.support.cgroups import enter, slice_path

NAME = "canary.service"


def everybody_is_looked_at(mount: Path, top: Path, patience: Patience, seconds: float) -> None:
    """Returns once that is so. `top` is a cgroup of ours; it takes so many `seconds`, and as many more, at most."""
    places = [top / NAME / name for name in ("a", "b", "c")]
    for place in places:
        place.mkdir(parents=True, exist_ok=True)
    with subprocess.Popen(["sleep", "infinity"], preexec_fn=lambda: enter(0, places[0])) as canary:
        try:
            directory = mount / str(canary.pid)
            directory.mkdir()  # the last one that is looked at: it came last
            for place in places[1:]:
                enter(canary.pid, place)
                there = mount / "slice" / slice_path(place)
                patience.until(there.exists, "the daemon sees where the canary is", seconds)
        finally:
            canary.kill()
    patience.until(lambda: not os.path.exists(directory), "the canary is gone", seconds)
