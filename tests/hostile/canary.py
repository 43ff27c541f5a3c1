"""A process of root's that is moved between two cgroups, to find out when the daemon has looked at every process.

Nothing tells the daemon that a process was moved: it looks at each one in turn (:mod:`backend.core.membership`), which
takes longer with more processes, and on a busy machine. When it has found the canary in a new place twice, it has
looked at all others in between.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.hostile.patience import Patience
from tests.support.cgroups import enter, slice_path

NAME = "canary.service"


def everybody_is_looked_at(mount: Path, top: Path, patience: Patience, seconds: float) -> None:
    """Wait, for twice `seconds` at most, until the daemon has looked at every process. `top` is a cgroup of ours."""
    places = [top / NAME / name for name in ("a", "b", "c")]
    for place in places:
        place.mkdir(parents=True, exist_ok=True)
    with subprocess.Popen(["sleep", "infinity"], preexec_fn=lambda: enter(0, places[0])) as canary:
        try:
            directory = mount / str(canary.pid)
            directory.mkdir()  # looked at last, since it came last
            for place in places[1:]:
                enter(canary.pid, place)
                there = mount / "slice" / slice_path(place)
                patience.until(there.exists, "the daemon sees where the canary is", seconds)
        finally:
            canary.kill()
    patience.until(lambda: not os.path.exists(directory), "the canary is gone", seconds)
