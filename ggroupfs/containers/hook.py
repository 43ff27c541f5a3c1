"""The OCI hook: applies a container's annotations as limits of its cgroup, before its first process runs.

A runtime (crun, runc) calls it at ``createRuntime``, in its own namespaces, with the state of the container on standard
input (runtime-spec, "POSIX-platform Hooks"). By then the cgroup exists, with a waiting process in it. Any failure ends
the hook with status 1 and a message, and with it the container: no container runs without a limit that was requested.

An annotation is ``ggroup.`` and a key of `ggroupfs set`: a control file or a property (:mod:`backend.core.settings`).
The hook runs once per container, so it imports little; docs/containers.md gives its cost.
"""

from __future__ import annotations

import json
import os
import sys
import syslog
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from backend.core.settings import APPLIED, BY_ENVIRONMENT, Setting
from backend.process.identity import ROOT, Slice, cgroup_of
from ggroupfs.client.slices import make_ahead
from ggroupfs.text.names import is_number, slice_directory
from ggroupfs.text.properties import text_of
from ggroupfs.text.refusals import OF_MKDIR, meaning

PREFIX = "ggroup."
"""Prefix of the annotations that are handled."""

ANNOTATIONS, DEVICE = "annotations", "device"
"""First argument: how the runtime found the hook, either by hooks.d, which looks for annotations, or by a CDI device,
which also brings the library into the container."""

MOUNT = Path("/run/ggroup")
"""Mountpoint of the service."""

AHEAD_MS = 60_000
"""Milliseconds that the slice stays if its cgroup has already gone when it is made."""

KEYS: Mapping[str, Setting] = {key: one for one in APPLIED for key in (one.control, one.unit_key) if key is not None}
"""Keys that may follow the prefix, with their settings."""

LOADERS = "ld-linux"
"""Prefix of the name of glibc's loader; every dynamic glibc program refers to the loader by its path."""

MUSL = "ld-musl-"
"""Prefix of the name of musl's loader."""

STATE_MOST = 1 << 20
"""Largest state that is accepted, bytes."""


class Refused(RuntimeError):
    """Raised if the container cannot have what it asks for; the text says why."""


def main(words: Sequence[str]) -> int:
    """Do what the runtime asks for, and return the exit status."""
    try:
        kind = words[0] if words else ""
        mount = Path(words[1]) if len(words) > 1 else MOUNT
        if kind not in (ANNOTATIONS, DEVICE) or len(words) > 2:
            raise Refused(f"not {ANNOTATIONS} or {DEVICE}, and a mountpoint: {' '.join(words)}")
        work(kind, mount, json.loads(sys.stdin.buffer.read(STATE_MOST)))
    except Exception as error:
        said = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
        print(f"ggroupfs: {said}", file=sys.stderr)
        syslog.syslog(syslog.LOG_ERR, said)
        return 1
    return 0


def run(words: Sequence[str]) -> NoReturn:
    """Run as a program."""
    syslog.openlog("ggroupfs-hook", syslog.LOG_PID | syslog.LOG_NDELAY, syslog.LOG_DAEMON)  # before any chroot(2)
    sys.exit(main(words))


def work(kind: str, mount: Path, state: Mapping[str, Any]) -> None:
    """Set the limits of a container, given its state, and check that the library fits its image.

    Refused; OSError, ValueError, LookupError or TypeError for an invalid state or bundle.
    """
    bundle = Path(state["bundle"])
    config = json.loads((bundle / "config.json").read_bytes())
    asked = settings({**(state.get("annotations") or {}), **(config.get("annotations") or {})})
    if kind == ANNOTATIONS and not asked:
        raise Refused(f"the runtime found an annotation {PREFIX}*, and there is none in {bundle}")
    if asked:
        limit(mount, cgroup(int(state["pid"])), asked)
    if kind == DEVICE:
        limits = variables(config["process"].get("env") or ())
        require_library(bundle / config["root"]["path"], limits)


def settings(annotations: Mapping[str, str]) -> Mapping[str, tuple[str, str]]:
    """Return the keys and values from annotations, by control file, in the order in which they are applied.

    Refused for an unknown setting, and for one that is given twice.
    """
    found: dict[str, tuple[str, str]] = {}
    for name, value in annotations.items():
        if not name.startswith(PREFIX):
            continue
        setting = KEYS.get(key := name.removeprefix(PREFIX))
        if setting is None or setting.control is None:
            raise Refused(f"annotation {name}: no such setting: {', '.join(sorted(KEYS))}")
        if setting.control in found:
            raise Refused(f"annotation {name}: {PREFIX}{found[setting.control][0]} is the same setting")
        found[setting.control] = key, value
    return {one.control: found[one.control] for one in APPLIED if one.control is not None and one.control in found}


def cgroup(pid: int) -> Slice:
    """Return the cgroup of a container, from its process. Refused if it has none of its own. OSError."""
    theirs, ours = cgroup_of(pid), cgroup_of(os.getpid())
    if theirs == ROOT or theirs.contains(ours):
        raise Refused(f"the container has no cgroup of its own: it is in {theirs.path}, as its runtime is")
    return theirs


def limit(mount: Path, slice_: Slice, asked: Mapping[str, tuple[str, str]]) -> None:
    """Make a slice that lives as long as its cgroup, and apply settings on every GPU. Refused."""
    if not (mount / "ggroup.backend").exists():
        raise Refused(f"{mount}: no ggroup tree is mounted there")
    try:
        make_ahead(mount, slice_.path, AHEAD_MS)
        directory = mount / slice_directory(slice_.path)
        gpus = [name for name in os.listdir(directory) if is_number(name)]
    except OSError as error:
        raise Refused(f"{slice_.path}: {meaning(error, OF_MKDIR)}") from None
    if not gpus:
        raise Refused(f"{slice_.path}: there is no GPU")
    for gpu in gpus:
        capacity = int((mount / "gpus" / gpu / "gmem.capacity").read_text())
        for key, value in asked.values():
            try:
                control, text = text_of(key, value, capacity)
                write(directory / gpu / control, f"{text}\n".encode())
            except ValueError as error:
                raise Refused(f"annotation {PREFIX}{key}={value}: {error}") from None
            except OSError as error:
                raise Refused(f"annotation {PREFIX}{key}={value}: GPU {gpu}: {meaning(error)}") from None


def write(path: Path, value: bytes) -> None:
    """Write a value with one write(2), which returns once it holds. OSError."""
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(file, value)
    finally:
        os.close(file)


def variables(environment: Sequence[str]) -> Sequence[str]:
    """Return the variables in an environment with which programs limit themselves. Refused for an invalid value."""
    given = dict(entry.partition("=")[::2] for entry in environment)
    if not given.keys() & BY_ENVIRONMENT.keys():
        return ()
    from backend.door import environment as door  # its import takes a quarter as long as all the rest

    names = []
    for setting, text in door.asked(given):
        try:
            door.value_of(setting, text)
        except door.Refused as error:
            if not door.is_lenient(given):
                raise Refused(str(error)) from None
        names.append(f"{setting.environment}={text}")
    return names


def require_library(root: Path, limits: Sequence[str]) -> None:
    """Raise Refused if programs of an image cannot load the library. OSError.

    With musl they would not start. Without either libc, nothing would enforce the limits in their environment. This
    process is inside the image afterwards, so the hook does this last.
    """
    os.chroot(root)  # no link in the image leads out of it
    os.chdir("/")
    names = {name for place in ("/lib64", "/lib") for name in listed(place)}
    if any(name.startswith(LOADERS) for name in names):
        return
    musl = sorted(name for name in names if name.startswith(MUSL))
    if musl:
        raise Refused(f"the image has musl (/lib/{musl[0]}) and no glibc, for which libggroup-cuda.so is")
    if limits:
        raise Refused(f"{' '.join(limits)}: the image has no glibc, so nothing in it would obey that")


def listed(place: str) -> Sequence[str]:
    """Return the names in a directory of the image; none if there is no such directory."""
    try:
        return os.listdir(place)
    except (FileNotFoundError, NotADirectoryError):
        return ()
