"""A policy at work in a process of its own: `ggroupfs policy`, and the events that it prints."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.support.mounted import SECONDS, SLOW


class PolicyProgram:
    """A running `ggroupfs policy`, which must be silent on standard error and exit cleanly at SIGTERM."""

    def __init__(self, mount: Path, name: str, config: Path, **environment: str) -> None:
        words = [sys.executable, "-m", "ggroupfs", "policy", name]
        self._process = subprocess.Popen(
            [*words, "--config", os.fspath(config), "--mount", os.fspath(mount)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | environment,
        )
        self._buffer = b""
        self.events: list[dict[str, Any]] = []
        """All events so far."""

    @property
    def pid(self) -> int:
        """Pid of the process."""
        return self._process.pid

    def __enter__(self) -> PolicyProgram:
        self.until("ready")
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if self._process.poll() is None:
                if kind is None:
                    self.end()
                else:
                    self._process.kill()
                    self._process.wait()
        finally:
            assert self._process.stdout is not None
            assert self._process.stderr is not None
            self._process.stdout.close()
            self._process.stderr.close()

    def until(self, event: str, seconds: float = SECONDS, **fields: object) -> dict[str, Any]:
        """Return its next event with that name and those fields; fail if the policy ends or stays silent too long."""
        deadline = time.monotonic() + seconds * SLOW
        while True:
            one = self._next(deadline - time.monotonic())
            if one is None:
                assert self._process.stderr is not None
                raise AssertionError(f"{event}, {fields}: {self.events}, then {self._process.stderr.read().decode()}")
            if one["event"] == event and fields.items() <= one.items():
                return one

    def during(self, seconds: float) -> list[tuple[float, dict[str, Any]]]:
        """Return the events that come within so many seconds, each with its time of the monotonic clock; earlier where
        the policy ends. With 0, those that have come."""
        found: list[tuple[float, dict[str, Any]]] = []
        until = time.monotonic() + seconds
        assert self._process.stdout is not None
        while True:
            left = max(0.0, until - time.monotonic())
            if b"\n" not in self._buffer and not select.select([self._process.stdout], [], [], left)[0]:
                return found
            one = self._next(SECONDS * SLOW)
            if one is None:
                return found
            found.append((time.monotonic(), one))

    def end(self, number: int = signal.SIGTERM) -> list[dict[str, Any]]:
        """End it by a signal; return the events that were not read before."""
        before = len(self.events)
        self._process.send_signal(number)
        while self._next(SECONDS * SLOW) is not None:
            pass
        assert self._process.stderr is not None
        errors = self._process.stderr.read().decode()
        ended = self._process.wait(SECONDS * SLOW), errors
        assert ended == (0, ""), ended
        return self.events[before:]

    def kill(self) -> None:
        """Kill it with SIGKILL, so that it takes nothing back."""
        self._process.kill()
        self._process.wait()

    def _next(self, seconds: float) -> dict[str, Any] | None:
        """Return the next event, None at the end of the output; fail if none comes in time."""
        assert self._process.stdout is not None
        while b"\n" not in self._buffer:
            readable, _, _ = select.select([self._process.stdout], [], [], max(seconds, 0))
            assert readable, f"nothing more than {self.events}"
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        self.events.append(json.loads(line))
        return self.events[-1]
