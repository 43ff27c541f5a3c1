"""`python -m tests.support.engines.on_ray MOUNT DIRECTORY`: three jobs on a Ray of one node, which has room for two.

Prints what the jobs were told, and what of the node was given away while two of them ran.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import ray

from tests.support.engines.held import PATIENCE_S, held

JOB_GIB = 3
"""GiB that each job asks the engine for."""
LIMIT = "64M"
"""Limit of each job."""
TAKEN_BYTES = 128 << 20
"""Bytes that each job takes."""


def main(mount: str, place: Path) -> None:
    """Run the jobs."""
    command = [sys.executable, "-m", "ggroupfs"]
    node = json.loads(subprocess.check_output([*command, "node", "--mount", mount, "--format", "ray"]))
    ray.init(num_cpus=4, resources=node, include_dashboard=False, _temp_dir=str(place / "ray"))
    interpreter = " ".join([*command, "run", "--mount", mount, "-p", f"gmem.limit.high={LIMIT}", "--", sys.executable])
    job = ray.remote(
        num_cpus=1,
        resources={"ggroup_gib": JOB_GIB, "ggroup_share": 25},
        runtime_env={"py_executable": interpreter, "env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}},
    )(held)
    jobs = [job.remote(mount, TAKEN_BYTES, str(place)) for _ in range(3)]
    end = time.monotonic() + PATIENCE_S
    while len(list(place.glob("pid-*"))) < 2:
        if time.monotonic() > end:
            raise TimeoutError("two jobs never ran")
        time.sleep(0.05)
    while ray.available_resources().get("ggroup_gib", 0) != node["ggroup_gib"] - 2 * JOB_GIB:
        if time.monotonic() > end:
            raise TimeoutError(f"never given away: {ray.available_resources()}")
        time.sleep(0.05)
    free, running = ray.available_resources(), len(list(place.glob("pid-*")))
    (place / "go").touch()
    told = ray.get(jobs, timeout=PATIENCE_S)
    print(json.dumps({"node": node, "free": free, "running": running, "told": told}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
