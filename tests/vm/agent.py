"""Runs in the guest: takes commands from a port, one a line, and answers with what came of each."""

import json
import os
import signal
import subprocess
import sys
from typing import Any

MISSED = 124
"""The exit status of a command that took too long, as of timeout(1)."""


def run(command: str, seconds: float) -> dict[str, Any]:
    """By a shell. What it leaves running keeps neither of its outputs open, or we wait for that."""
    process = subprocess.Popen(
        ["/bin/sh", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=seconds)
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        code = MISSED
    return {"code": code, "out": out.decode(errors="replace"), "err": err.decode(errors="replace")}


def write(port: int, what: object) -> None:
    """One line."""
    data = json.dumps(what).encode() + b"\n"
    while data:
        data = data[os.write(port, data) :]


def main() -> None:
    port = os.open(sys.argv[1], os.O_RDWR | os.O_CLOEXEC)
    write(port, "hello")
    pending = b""
    while data := os.read(port, 65536):
        pending += data
        while b"\n" in pending:
            line, _, pending = pending.partition(b"\n")
            write(port, run(**json.loads(line)))


if __name__ == "__main__":
    main()
