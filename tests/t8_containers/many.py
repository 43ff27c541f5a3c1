"""Runs in the guest: starts many containers with the runtime itself, two at a time, from a bundle that podman made.

    many.py RUNTIME CONFIG COUNT WITH|WITHOUT

Prints how long they took: elapsed and CPU seconds of each. The exit status is 1 if one of them failed.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

AT_ONCE = 2


def main() -> int:
    runtime, config, count, hooked = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "WITH"
    with open(config, encoding="utf-8") as file:
        spec = json.load(file)
    if not hooked:
        spec.pop("hooks", None)
    spec["process"]["terminal"] = False

    def one(number: int) -> int:
        name = f"many-{os.getpid()}-{number}"
        with tempfile.TemporaryDirectory() as bundle:
            own = {**spec, "linux": {**spec["linux"], "cgroupsPath": f"/many.slice/{name}"}}
            with open(f"{bundle}/config.json", "w", encoding="utf-8") as file:
                json.dump(own, file)
            words = [runtime, "--cgroup-manager=cgroupfs", "run", f"--bundle={bundle}", name]
            return subprocess.run(words, stdin=subprocess.DEVNULL, check=False).returncode

    began, before = time.monotonic(), os.times()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        failed = sum(code != 0 for code in pool.map(one, range(count)))
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    told = {"failed": failed, "seconds": (time.monotonic() - began) / count, "cpu": spent / count}
    print(json.dumps(told))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
