"""A spatial slice on a real GPU while the daemon is killed, and there is another one.

A GPU has one daemon here: the one that a module's tests share would act on the same programs.
"""

from __future__ import annotations

import random
import time

import pytest

from ggroupfs.client import Member
from tests.support.mounted import daemons, kill, mountpoint
from tests.t7_nvidia.conftest import built, wait_for
from tests.t7_nvidia.placing import together
from tests.t7_nvidia.programs import write
from tests.t7_nvidia.spaces import (
    BESIDE,
    SAID,
    go_on,
    is_beside,
    placed_in,
    record_of,
    servers,
    several,
    spatial,
    stand,
)

WINDOW_S, SETTLED_S = 1.5, 0.5
"""Seconds over which progress is measured, and those before that in which a change acts."""
FROZEN_S = 0.5
"""Seconds that a slice is frozen."""


@pytest.fixture(scope="session")
def placed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return built(tmp_path_factory, "placed")


def known(group: Member) -> bool:
    """Return whether a daemon that has just come has a program in its tree, as a member of a space."""
    try:
        return is_beside(group)
    except OSError:
        return False


@pytest.mark.timeout(240)
def test_a_daemon_that_is_killed(placed: str) -> None:
    """Members go on without it, by the same server, and the next one has them as one space: a freeze stops all."""
    rng = random.Random(50)
    with mountpoint() as place, daemons(place, gpu="nvidia", also=SAID) as start:
        mount = start()
        with spatial(mount, "daemon") as (name, slice_), several(mount, placed, name, 2) as runs:
            before = record_of(mount, name)
            (server,) = servers(before)
            for _ in range(3):
                time.sleep(rng.uniform(0.0, 0.5))
                kill(mount)
                go_on(runs, 1)
                mount = start()
                wait_for(slice_.path.exists, "the slice is there")
                assert slice_.read("compute.spatial").strip() == "1"
                groups = [Member(run.pid, 0, mount.group(run.pid)) for run in runs]
                wait_for(lambda groups=groups: all(map(known, groups)), "it knows the members")  # type: ignore[misc]
                assert (record_of(mount, name), servers(before)) == (before, [server])
                write(slice_, "compute.freeze", 1)
                assert stand(runs, 0.05, FROZEN_S) == [0, 0]
                write(slice_, "compute.freeze", 0)
                go_on(runs, 2)
            with placed_in(mount, placed, name) as third:
                time.sleep(SETTLED_S)
                each = together([*runs, third], WINDOW_S)
                assert servers(before) == [server]
                assert min(each) >= BESIDE * max(each)
                third.finish()
            for run in runs:
                run.finish()
