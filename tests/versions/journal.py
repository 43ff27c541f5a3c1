"""Handles a journal with the code of one revision: ``python journal.py write|read|keep PATH``, PYTHONPATH naming it.

`write` makes a journal with something of every kind that 0.1 knows. `read` prints the content of a journal as JSON, a
list of operations. `keep` does so too, and then rewrites the journal, like a daemon that starts and is killed. The
program runs in trees of other revisions, so it uses only what 0.1 had.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

try:  # 0.1's places come first: what 0.1 lacks would be imported from an editable install of this tree
    from backend.identity import ROOT, Process, Slice, identify
    from backend.journal import format, state
    from backend.journal.file import Journal
    from backend.journal.state import FIELDS, Lever, Moving, Owned
except ModuleNotFoundError:
    from backend.ledgers.journal import format, state
    from backend.ledgers.journal.file import Journal
    from backend.ledgers.journal.state import FIELDS, Lever, Moving, Owned
    from backend.process.identity import ROOT, Process, Slice, identify

BOOT = "5ca1ab1e-0000-4000-8000-000000000001"
GPUS = ("GPU-50f79900-0000-4000-8000-000000000000", "GPU-50f79900-0000-4000-8000-000000000001")


def write(path: Path, process: Process) -> None:
    """Write a journal with `process` in it, like a daemon that is then killed."""
    journal = Journal(path, boot=BOOT)
    one, other = GPUS
    job, part = Slice("/job.slice"), Slice("/job.slice/part\u00e4.scope")
    journal.commit(state.gpu(one))
    journal.commit(state.gpu(other), state.add((other, job), ROOT))
    for node, above in ((part, ROOT), (job, ROOT), (process, part), (Slice("/gone"), ROOT)):
        journal.commit(state.add((one, node), above))
    journal.commit(state.move((one, part), job))
    values = {name: number + 2 for number, name in enumerate(FIELDS_OF_0_1)}
    journal.commit(state.put((one, part), {**values, "frozen": 1, "kept": 1, "priority": 3, "weight": 250}))
    journal.commit(state.put((one, process), {"high": 1 << 30, "low": 1 << 20, "swap_max": 0, "peak": 12345}))
    journal.commit(state.put((other, job), {"timeslice_us": 5000, "uid": 1000, "gid": 1001}))
    journal.commit(state.remove((one, Slice("/gone"))))
    journal.commit(state.lever((one, process), Lever(True, 2000, False)))
    journal.commit(state.own((one, process), {"c1d00019:5c000003": 2000, "c1d00019:5c000004": 1000}))
    journal.commit(state.moving(process, Moving(one, other, {"high": 1 << 31})))
    journal.commit(state.give((one, process), "gmem.limit.high", Owned(1000, None, 0o640, None)))
    journal.commit(state.give(job, "", Owned(1000, 1001, None, 1000)))
    journal.commit(state.give("root", "ggroup.backend", Owned(None, None, 0o400, None)))
    journal.commit(state.give("gpus", "", Owned(0, 0, 0o700, None)))


FIELDS_OF_0_1 = (
    *("high", "low", "swap_max", "peak", "swapin_bytes", "swapout_bytes", "swapins", "swapouts", "move_usec"),
    *("events_low", "events_high", "events_max", "events_oom", "events_reclaim", "events_fail", "timeslice_us"),
    *("frozen", "priority", "weight", "pressure_bytes", "pressure_seq", "kept", "uid", "gid"),
)

if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    verb, place = sys.argv[1], Path(sys.argv[2])
    if verb == "write":
        assert set(FIELDS_OF_0_1) <= set(FIELDS)
        write(place, identify(int(sys.argv[3])))
    elif verb == "read":
        print(json.dumps([*format.read(place.read_bytes()).state.operations()]))
    else:
        print(json.dumps([*Journal(place, boot=BOOT).state.operations()]))
        os.kill(os.getpid(), 9)
