"""The generator of systemd (systemd.generator(7)): services with memory keys have the library without `ggroupfs run`.

systemd calls it as it boots and at each daemon-reload, before it loads units, and waits for it: so it reads unit files
itself, and imports what is for sections only where there is one. Each such service gets a drop-in with the environment
that :mod:`ggroupfs.commands.run` gives a program; docs/units.md says for which, and how one is kept out.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import NamedTuple

from backend.common.regular import read_regular
from ggroupfs.installed import CUDA_LIBRARY, SLICES_D

LOAD_PATH = (
    "/etc/systemd/system.control",
    "/run/systemd/system.control",
    "/run/systemd/transient",
    "/etc/systemd/system",
    "/etc/systemd/system.attached",
    "/run/systemd/system",
    "/run/systemd/system.attached",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
)
"""Directories of the system manager's unit files, the first one that has a name first (systemd.unit(5)), without those
that generators make."""

DEFAULTS = Path("/etc/default/ggroupfs")
"""Options of the service's mount."""

SOCKET = "/run/ggroupfs/ggroup.sock"
"""Socket of the service's mount, where its options name no other."""

DROP_IN = "zz-ggroupfs.conf"
"""Name of the drop-ins, which is after those that set up an environment."""

SERVICE, ANY = ".service", "service"
"""End of the names of services, and the name by which drop-ins are for all of them."""

MARK = b"X-GGroup"
"""Text that a file has which speaks of GPUs."""

OWN = re.compile(r"ggroupfs(-.*|@.*|)\.service")
"""Our own services, which must not wait for themselves."""

NAMED_SOCKET = re.compile(r"^\s*OPTIONS=.*\bsocket=([^,\s\"']+)", re.MULTILINE)


class Given(NamedTuple):
    """What a service is given."""

    preloaded: str
    """Libraries that it asked for itself, as LD_PRELOAD has them."""
    has_socket: bool
    """Whether it names the socket itself."""
    has_root: bool
    """Whether it has another root directory, in which neither the library nor the socket is."""
    waits: bool
    """Whether it is to start after the tree is there. What is for several has it not: the tree waits for some."""


class Files:
    """The unit files of services: fragments by their names, and drop-ins by what their directory is for."""

    def __init__(self, load_path: Sequence[str]) -> None:
        self.fragments: dict[str, str] = {}
        self.drop_ins: dict[str, dict[str, str]] = {}
        self._texts: dict[str, bytes] = {}
        for directory in load_path:
            for name in _listed(directory):
                path = f"{directory}/{name}"
                if name.endswith(SERVICE):
                    if not _is_alias(path, name):
                        self.fragments.setdefault(name, path)
                elif name.endswith(f"{SERVICE}.d") or name == f"{ANY}.d":
                    there = self.drop_ins.setdefault(name.removesuffix(".d"), {})
                    for file in _listed(path):
                        if file.endswith(".conf"):
                            there.setdefault(file, f"{path}/{file}")

    def of(self, name: str, *, own: bool = False) -> Iterator[str]:
        """The files of a service in the order in which they count; with `own`, without drop-ins for others, too."""
        if name in self.fragments:
            yield self.fragments[name]
        found: dict[str, str] = {}
        for level in (name,) if own else _levels(name):
            for file, path in self.drop_ins.get(level, {}).items():
                found.setdefault(file, path)
        for file in sorted(found):
            yield found[file]

    def text(self, path: str) -> bytes:
        """What a file says; nothing where it is masked, or cannot be read."""
        if path not in self._texts:
            try:
                self._texts[path] = read_regular(path)
            except OSError:
                self._texts[path] = b""
        return self._texts[path]

    def names(self) -> list[str]:
        """Services, and directories of drop-ins for several."""
        return sorted(self.fragments.keys() | self.drop_ins.keys())


def _listed(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _is_alias(path: str, name: str) -> bool:
    """Whether a file is another name of a unit, which has its drop-ins under that one."""
    try:
        return os.path.basename(os.readlink(path)) not in (name, "null")
    except OSError:
        return False


def _levels(name: str) -> Iterator[str]:
    """The names by which drop-ins are for a service, its own first: its template, its prefixes, and all services."""
    yield name
    if name == ANY:
        return
    stem = name.removesuffix(SERVICE)
    prefix, at, instance = stem.partition("@")
    if at and instance:
        yield f"{prefix}@{SERVICE}"
    while "-" in prefix.rstrip("-"):
        prefix = prefix.rstrip("-").rpartition("-")[0] + "-"
        yield f"{prefix}{SERVICE}"
    yield ANY


class Wanted:
    """Which services have memory keys."""

    def __init__(self, files: Files, slices_d: Path) -> None:
        # Here, where there is a section: an import takes longer than to see that there is none.
        from ggroupfs.text.properties import PROPERTIES
        from ggroupfs.units.unitfile import Assignment, assignments

        self._files = files
        self._keys = {one.name for one in PROPERTIES if one.control.startswith("gmem.")}
        self._assignments: Mapping[str, list[Assignment]] = {
            path: list(assignments(files.text(path).decode("utf-8", "backslashreplace"), Path(path)))
            for name in files.names()
            for path in files.of(name)
        }
        self._table = None
        if any(name.endswith(".conf") for name in _listed(os.fspath(slices_d))):
            from ggroupfs.units.files import of_directory

            self._table = of_directory(slices_d)

    def names(self) -> list[str]:
        """Services, and directories of drop-ins for several, that `slices.d` names besides."""
        from ggroupfs.units.naming import PATTERN, ByName

        named = [one.name for one, _ in self._table.assignments if isinstance(one, ByName)] if self._table else []
        plain = {name.replace("@*.", "@.") for name in named if not PATTERN.search(name.replace("@*.", "@."))}
        return sorted({name for name in plain if name.endswith(SERVICE)} | set(self._files.names()))

    def given(self, name: str) -> Given | None:
        """What a service is given; None where it has no memory key, or has it from drop-ins for several alone."""
        own = self._has_keys(name, own=True) or self._is_named(name)
        if not own and not self._has_keys(name):
            return None
        preloaded, socket, root = "", False, False
        for path in self._files.of(name):
            for one in self._assignments[path]:
                if one.section != "Service" or one.value is None:
                    continue
                if one.key in ("RootDirectory", "RootImage"):
                    root = bool(one.value)
                elif one.key == "Environment" and not one.value:
                    preloaded, socket = "", False
                elif one.key == "Environment":
                    for word in _words(one.value):
                        variable, _, value = word.partition("=")
                        preloaded = value if variable == "LD_PRELOAD" else preloaded
                        socket = socket or variable == "GGROUP_SOCKET"
        if not (own or preloaded or socket or root):  # it has what is for several, which says the same
            return None
        is_one = name != ANY and not name.endswith(f"-{SERVICE}")
        return Given(preloaded, socket, root, own and is_one and not OWN.fullmatch(name))

    def _has_keys(self, name: str, *, own: bool = False) -> bool:
        last: MutableMapping[str, str] = {}
        for path in self._files.of(name, own=own):
            for one in self._assignments[path]:
                if one.section == MARK.decode() and one.key in self._keys:
                    last[one.key] = one.value or ""
        return any(last.values())

    def _is_named(self, name: str) -> bool:
        """Whether a section of `slices.d` for a name asks for memory. An instance stands for its template."""
        if self._table is None or name == ANY:
            return False
        asked = self._table.of_name(name.replace(f"@{SERVICE}", f"@x{SERVICE}"))
        return any(setting.value and key in self._keys for key, setting in asked.values.items())


def _words(value: str) -> list[str]:
    try:
        return shlex.split(value)
    except ValueError:  # a quote that has no end: systemd does not take it, either
        return []


def drop_in(given: Given, library: Path, socket: str) -> str:
    """The text of the drop-in of a service."""
    preload = ":".join([os.fspath(library), *([given.preloaded] if given.preloaded else [])])
    lines = [
        "# Made by ggroupfs of the memory keys in [X-GGroup]: the library in the program moves its memory.",
        "# A file of this name in /etc/systemd/system/<UNIT>.d, be it empty, is there instead.",
        *(("[Unit]", "After=ggroupfs.service") if given.waits else ()),
        "[Service]",
        f"Environment={_quoted(f'LD_PRELOAD={preload}')}",
    ]
    if not given.has_socket:
        lines.append(f"Environment={_quoted(f'GGROUP_SOCKET={socket}')}")
    if given.has_root:
        lines.append(f"BindReadOnlyPaths=-{library} -{os.path.dirname(socket)}")
    return "".join(f"{line}\n" for line in lines)


def _quoted(word: str) -> str:
    escaped = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def socket_of(defaults: Path) -> str:
    """The socket of the service's mount, as its options say."""
    try:
        text = read_regular(defaults).decode("utf-8", "backslashreplace")
    except OSError:
        return SOCKET
    named = NAMED_SOCKET.findall(text)
    return named[-1] if named else SOCKET


def generate(
    place: Path,
    load_path: Sequence[str] = LOAD_PATH,
    slices_d: Path = SLICES_D,
    defaults: Path = DEFAULTS,
    library: Path = CUDA_LIBRARY,
) -> None:
    """Makes drop-ins below `place`. OSError."""
    files = Files(load_path)
    is_said = any(MARK in files.text(path) for name in files.names() for path in files.of(name))
    if not is_said and not any(name.endswith(".conf") for name in _listed(os.fspath(slices_d))):
        return
    if not library.is_file():
        raise FileNotFoundError(2, "there is no library for memory keys of services", os.fspath(library))
    wanted, socket = Wanted(files, slices_d), socket_of(defaults)
    for name in wanted.names():
        given = wanted.given(name)
        if given is not None and os.fspath(library) not in given.preloaded.replace(":", " ").split():
            directory = place / f"{name}.d"
            directory.mkdir(parents=True, exist_ok=True)
            (directory / DROP_IN).write_text(drop_in(given, library, socket))


def main(arguments: Sequence[str]) -> int:
    """What systemd calls, with three directories for three priorities: the first is for what files in /etc override."""
    if not arguments:
        print("ggroupfs: a generator of systemd: it is called with a directory to write to", file=sys.stderr)
        return 2
    try:
        generate(Path(arguments[0]))
    except OSError as error:
        print(f"ggroupfs: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    return 0
