"""The OCI hook: annotations of a container are limits of its cgroup before its first process runs.

A runtime (crun, runc) calls it at ``createRuntime``, in its own namespaces, with the state of the container on standard
input (runtime-spec, "POSIX-platform Hooks"). The cgroup is there by then, with a process in it that waits. Whatever is
wrong ends the hook with status 1 and a line, and with it the container: none runs without a limit that was asked for.

An annotation is ``ggroup.`` and a key of `ggroupfs set`: a control file or a property (:mod:`backend.core.settings`).
It runs once a container, so it imports little; docs/containers.md has what it costs.
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
"""Beginning of the annotations that are ours."""

ANNOTATIONS, DEVICE = "annotations", "device"
"""Words that say by what the runtime was told of the hook: by hooks.d, which looks for annotations, or by a CDI
device, with which the library goes into the container."""

MOUNT = Path("/run/ggroup")
"""Mountpoint of the service."""

AHEAD_MS = 60_000
"""Milliseconds that the slice stays where the cgroup is gone by the time that it is made."""

KEYS: Mapping[str, Setting] = {key: one for one in APPLIED for key in (one.control, one.unit_key) if key is not None}
"""What may stand behind the prefix, with its setting."""

LOADERS = "ld-linux"
"""Beginning of the name of glibc's loader, which every program that is linked with it names by this path."""

MUSL = "ld-musl-"
"""Beginning of the name of musl's."""

STATE_MOST = 1 << 20
"""Bytes of a state at most."""


class Refused(RuntimeError):
    """The container cannot have what it asks for; the text says why."""


def main(words: Sequence[str]) -> int:
    """Does what the runtime calls for, and returns the exit status."""
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
    """The program."""
    syslog.openlog("ggroupfs-hook", syslog.LOG_PID | syslog.LOG_NDELAY, syslog.LOG_DAEMON)  # before any chroot(2)
    sys.exit(main(words))


def work(kind: str, mount: Path, state: Mapping[str, Any]) -> None:
    """Sets the limits of the container that a state is of, and looks whether the library fits. Refused; OSError,
    ValueError, LookupError, TypeError for a state or a bundle that is none."""
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
    """The keys and values that annotations ask for, by control file, in the order in which they are applied. Refused
    for what is no setting, and for one that is asked for twice."""
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
    """The cgroup of a container, whose process that is. Refused where it has none of its own. OSError."""
    theirs, ours = cgroup_of(pid), cgroup_of(os.getpid())
    if theirs == ROOT or theirs.contains(ours):
        raise Refused(f"the container has no cgroup of its own: it is in {theirs.path}, as its runtime is")
    return theirs


def limit(mount: Path, slice_: Slice, asked: Mapping[str, tuple[str, str]]) -> None:
    """Has a slice be there as long as its cgroup, with settings on every GPU. Refused."""
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
    """One write(2), which returns once it holds. OSError."""
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(file, value)
    finally:
        os.close(file)


def variables(environment: Sequence[str]) -> Sequence[str]:
    """The variables of an environment by which its programs limit themselves. Refused for a value that is none."""
    given = dict(entry.partition("=")[::2] for entry in environment)
    if not given.keys() & BY_ENVIRONMENT.keys():
        return ()
    from backend.door import environment as door  # a quarter of what all else here takes to import

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
    """Refused where programs of an image cannot have the library: they would not start with musl, and would run
    without the limits that their environment asks for where there is neither. This process is in the image then, so it
    is the last that is done here. OSError."""
    os.chroot(root)  # a link in the image leads nowhere else
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
    """The names in a directory of the image; none where there is no such directory."""
    try:
        return os.listdir(place)
    except (FileNotFoundError, NotADirectoryError):
        return ()
