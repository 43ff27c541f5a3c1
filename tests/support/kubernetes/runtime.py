"""A double of a container runtime: containers are processes in cgroups of pods, edited as their CDI devices say.

The order is runc's: the process is in its cgroup and waits; createRuntime hooks run with its state on standard input,
and a hook that fails ends the container; then the program begins.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from backend.process.identity import cgroup_of
from tests.support.cgroups import cgroup2, enter

FIELDS: Mapping[str, Mapping[str, type]] = {
    "spec": {"cdiVersion": str, "kind": str, "devices": list, "containerEdits": dict},
    "device": {"name": str, "containerEdits": dict},
    "edits": {"env": list, "deviceNodes": list, "mounts": list, "hooks": list},
    "hook": {"hookName": str, "path": str, "args": list, "env": list, "timeout": int},
    "mount": {"hostPath": str, "containerPath": str, "options": list},
}
"""Fields of CDI 0.3.0, as its schema has them; others are refused."""
DEVICE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?")


class NotStarted(Exception):
    """A container that did not start, with the output of its hook."""


def _checked(kind: str, thing: Mapping[str, Any]) -> Mapping[str, Any]:
    for key, value in thing.items():
        assert isinstance(value, FIELDS[kind][key]), (kind, key, value)
    return thing


def resolve(directory: Path, ids: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """Yield the edits of CDI devices, the edits of a file once; KeyError for a device that no file has."""
    seen = set()
    for name in ids:
        kind, _, device = name.partition("=")
        for path in sorted(directory.glob("*.json")):
            spec = _checked("spec", json.loads(path.read_text()))
            assert spec["cdiVersion"] == "0.3.0"
            by_name = {one["name"]: _checked("device", one) for one in spec["devices"]}
            assert all(map(DEVICE.fullmatch, by_name)), by_name
            if spec["kind"] == kind and device in by_name:
                if path not in seen and "containerEdits" in spec:
                    yield _checked("edits", spec["containerEdits"])
                seen.add(path)
                yield _checked("edits", by_name[device]["containerEdits"])
                break
        else:
            raise KeyError(f"unresolvable CDI devices {name}")


@attrs.define
class Container:
    """A running container."""

    process: subprocess.Popen[str]
    """Process of its program."""
    cgroup: Path
    """Its cgroup."""

    @property
    def path(self) -> str:
        """Path of its cgroup in the hierarchy."""
        return "/" + str(self.cgroup.relative_to(cgroup2()))

    def end(self) -> None:
        """Kill the program and remove its cgroup."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        self.cgroup.rmdir()


class Runtime:
    """A runtime that starts containers below one cgroup."""

    def __init__(self, cdi: Path, top: Path) -> None:
        self._cdi = cdi
        self._top = top
        """Cgroup that holds ``kubepods.slice``."""
        self._count = 0

    def pod(self, uid: str, quality: str = "burstable") -> Path:
        """Return the cgroup of a pod, named as a kubelet with the systemd driver does; make it if it is missing."""
        slices = ["kubepods.slice", f"kubepods-{quality}.slice", f"kubepods-{quality}-pod{uid.replace('-', '_')}.slice"]
        path = self._top.joinpath(*slices)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def start(self, pod: Path, ids: Sequence[str], *command: str) -> Container:
        """Start a container; NotStarted if a hook fails, with nothing left of the container."""
        self._count += 1
        edits = list(resolve(self._cdi, ids))
        environment = dict(os.environ)
        for one in edits:
            environment.update(word.split("=", 1) for word in one.get("env", ()))
            for mount in map(lambda mount: _checked("mount", mount), one.get("mounts", ())):
                assert Path(mount["hostPath"]).exists(), mount
        environment.pop("LD_PRELOAD", None)
        cgroup = pod / f"cri-containerd-{self._count:064x}.scope"
        cgroup.mkdir()
        process = subprocess.Popen(
            ["sh", "-c", 'read go && exec "$@"', "container", *command],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        container = Container(process, cgroup)
        enter(process.pid, cgroup)
        state = json.dumps(
            {
                "ociVersion": "1.0.2",
                "id": f"{self._count:064x}",
                "status": "creating",
                "pid": process.pid,
                "bundle": str(self._cdi),
            }
        )
        for hook in (_checked("hook", hook) for one in edits for hook in one.get("hooks", ())):
            assert hook["hookName"] == "createRuntime"
            done = subprocess.run(
                hook["args"],
                executable=hook["path"],
                input=state,
                capture_output=True,
                text=True,
                env={},
                timeout=hook["timeout"] * 4,  # the test machine may be busy
                check=False,
            )
            if done.returncode:
                container.end()
                raise NotStarted(done.stderr.strip())
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        return container


@contextmanager
def top(name: str) -> Iterator[Path]:
    """Yield a cgroup below our own for the kubelet; it is removed at the end."""
    path = cgroup2() / cgroup_of(os.getpid()).path.lstrip("/") / name
    path.mkdir()
    try:
        yield path
    finally:
        for directory in sorted((one for one in path.rglob("*") if one.is_dir()), reverse=True):
            directory.rmdir()
        path.rmdir()
