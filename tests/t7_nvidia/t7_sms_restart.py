"""compute.sm.max on a real GPU while the daemon is killed, and there is another one.

A GPU has one daemon here: the one that a module's tests share would act on the same programs.
"""

from __future__ import annotations

import time

import pytest

from tests.support.mounted import daemons, kill, mountpoint
from tests.t7_nvidia.conftest import built, wait_for
from tests.t7_nvidia.placing import SIZE, limit, sms_of
from tests.t7_nvidia.programs import member, program, run_in
from tests.t7_nvidia.spaces import go_on

QUICK = ("50", "264")
"""Words of placed.cu: kernels of 0.1 ms on an H200."""
SETTLED_S = 0.1
"""Seconds in which a change acts."""


@pytest.fixture(scope="session")
def placed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return built(tmp_path_factory, "placed")


@pytest.mark.timeout(180)
def test_it_holds_without_a_daemon(placed: str) -> None:
    """Kernels stay on their SMs while there is none, and the next one knows of the limit."""
    with mountpoint() as place, daemons(place, gpu="nvidia") as start:
        mount = start()
        with program(*run_in(mount), placed, "PAGE", *QUICK, size=SIZE) as run:
            group = member(mount, run)
            sms = limit(run, group, "50%")
            time.sleep(SETTLED_S)
            kill(mount)
            go_on([run], 1)
            assert len(sms_of(run)) == sms
            mount = start()
            wait_for(group.path.exists, "it is in the tree")
            assert int(group.read("compute.sm.max")) == sms
            time.sleep(SETTLED_S)
            go_on([run], 1)
            assert len(sms_of(run)) == sms
            other = limit(run, group, "25%")
            time.sleep(SETTLED_S)
            go_on([run], 1)
            assert len(sms_of(run)) == other
            run.finish()
