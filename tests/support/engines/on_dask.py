"""`python -m tests.support.engines.on_dask SCHEDULER MOUNT DIRECTORY`: three jobs on a Dask of one worker, which has
room for two.

Prints what the jobs were told, and what of the worker was given away while two of them ran.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from distributed import Client

from tests.support.engines.held import PATIENCE_S, held

JOB_GIB = 3
"""GiB that each job asks the engine for."""
TAKEN_BYTES = 128 << 20
"""Bytes that each job takes."""


def main(scheduler: str, mount: str, place: Path) -> None:
    """Run the jobs."""
    with Client(scheduler_file=scheduler) as client:
        client.wait_for_workers(1, timeout=PATIENCE_S)
        asked = {"GGROUP_GIB": JOB_GIB, "GGROUP_SHARE": 25}
        jobs = [
            client.submit(held, mount, TAKEN_BYTES, str(place), pure=False, resources=asked, retries=0)
            for _ in range(3)
        ]
        end = time.monotonic() + PATIENCE_S
        while len(list(place.glob("pid-*"))) < 2:
            if time.monotonic() > end:
                raise TimeoutError("two jobs never ran")
            time.sleep(0.05)
        (worker,) = client.run(_books).values()
        running = len(list(place.glob("pid-*")))
        (place / "go").touch()
        told = client.gather(jobs)
    print(json.dumps({"worker": worker, "running": running, "told": told}))


def _books(dask_worker: object) -> dict[str, dict[str, float]]:
    """Return a worker's resources, total and free: the worker accepts all jobs, and starts those that fit."""
    state = dask_worker.state  # type: ignore[attr-defined]
    return {"has": dict(state.total_resources), "free": dict(state.available_resources)}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
