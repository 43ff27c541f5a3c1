"""Runs in the container: reads commands from a socket, one on each line, and answers each with its result."""

import json
import os
import signal
import socket
import subprocess
import sys
from typing import Any

MISSED = 124
"""The exit status of a command that took too long, as that of timeout(1)."""


def run(command: str, seconds: float) -> dict[str, Any]:
    """Run a command with a shell. A process that it leaves behind must close its outputs: they are read to the end."""
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


def main() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as host:
        host.connect(sys.argv[1])
        host.sendall(json.dumps("hello").encode() + b"\n")
        for line in host.makefile("r", encoding="utf-8"):
            host.sendall(json.dumps(run(**json.loads(line))).encode() + b"\n")


if __name__ == "__main__":
    main()
