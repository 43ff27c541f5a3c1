"""The hook that a container runtime runs before a container's program: turns a share into limits of its slice.

It receives the state of the container on standard input, as OCI's runtime specification has it, and fails if a limit
does not hold. Then the container does not start, and the reason is in the system log, and in the events of the pod if
the runtime passes it on, as runc does. The hook imports next to nothing, since every container waits for it.
"""

from __future__ import annotations

import argparse
import json
import sys
import syslog
from pathlib import Path

from backend.process.identity import cgroup_of
from ggroupfs.dra.slices import Failed, above, exists, place, settle
from ggroupfs.dra.store import Grants, Store, reference


def main(argv: list[str]) -> int:
    """Grant one share to the container whose state is on standard input; return the exit code."""
    parser = argparse.ArgumentParser(prog="ggroupfs-dra hook")
    parser.add_argument("--state", type=Path, required=True, help="directory of prepared claims")
    parser.add_argument("--tree", type=Path, required=True, help="mountpoint of the tree")
    parser.add_argument("uid", help="UID of the claim")
    parser.add_argument("number", type=int, help="which share of the claim")
    words = parser.parse_args(argv)
    try:
        grant(Store(words.state), words.tree, words.uid, words.number, json.load(sys.stdin)["pid"])
    except (Failed, OSError, ValueError, KeyError) as error:
        print(f"ggroupfs-dra: claim {words.uid}: {error}", file=sys.stderr)
        # crun, and so CRI-O, does not pass on the output of a hook.
        syslog.openlog("ggroupfs-dra")
        syslog.syslog(syslog.LOG_ERR, f"claim {words.uid}: {error}")
        return 1
    return 0


def grant(store: Store, tree: Path, uid: str, number: int, pid: int) -> None:
    """Make a share hold for the container of a process. Failed, with the reason; OSError, ValueError."""
    where = place(cgroup_of(pid).path)
    with store.locked():
        claim = store.claim(uid)
        if claim is None or not 0 <= number < len(claim.shares):
            raise Failed("it is not prepared on this node")
        name = reference(uid, number)
        grants = store.grants()
        for key, other in grants.items():
            if key != where.key and any(name in names for names in other.containers.values()) and exists(other.pod):
                raise Failed(f"{claim.namespace}/{claim.name} is held by another pod, {other.pod}: one pod a claim")
        own = grants.setdefault(where.key, Grants(where.pod, {}))
        names = own.containers.setdefault(where.container, [])
        if name not in names:
            names.append(name)
        # Stored before it is written to the tree: if the hook is killed in between, the driver either enforces the
        # grant or drops it.
        store.grant(where.key, own)
        others = [one for key, one in grants.items() if key == where.key or exists(one.pod)]
        failures = settle(store, tree, others, [where.container, where.pod, *above(where.pod)])
        if failures:
            names.remove(name)
            if not names:
                del own.containers[where.container]
            store.grant(where.key, own)
            raise failures[0]
