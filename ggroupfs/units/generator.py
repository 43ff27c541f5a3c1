"""The systemd generator (systemd.generator(7)): loads the library into services that have memory keys.

systemd runs it during boot and at each daemon-reload, before it loads units, and waits for it. So this module reads
unit files itself, and imports the parser of sections only if there is a section. Each such service gets a drop-in with
the environment that :mod:`ggroupfs.commands.run` gives a program. docs/units.md says which services get one, and how to
exclude a service.
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
"""Directories of the system manager's unit files, highest precedence first (systemd.unit(5)), without those that
generators write."""

DEFAULTS = Path("/etc/default/ggroupfs")
"""File with the options of the service's mount."""

SOCKET = "/run/ggroupfs/ggroup.sock"
"""Socket of the service's mount, unless its options name another."""

DROP_IN = "zz-ggroupfs.conf"
"""Name of the drop-ins; it sorts after those that set an environment."""

SERVICE, ANY = ".service", "service"
"""Suffix of services, and the name under which drop-ins apply to all services."""

MARK = b"X-GGroup"
"""Text that is in every file with GPU settings."""

BY_LIBRARY = ("compute.spatial", "compute.sm.max")
"""Controls that need the library, besides those of memory."""

OWN = re.compile(r"ggroupfs(-.*|@.*|)\.service")
"""Services of this project, which must not wait for themselves."""

NAMED_SOCKET = re.compile(r"^\s*OPTIONS=.*\bsocket=([^,\s\"']+)", re.MULTILINE)


class Given(NamedTuple):
    """The contents of a service's drop-in."""

    preloaded: str
    """Libraries that the service preloads itself, in the syntax of LD_PRELOAD."""
    has_socket: bool
    """Whether the service names the socket itself."""
    has_root: bool
    """Whether the service has another root directory, which contains neither the library nor the socket."""
    waits: bool
    """Whether the service starts after the tree is mounted. False for several services at once, as the tree waits for
    some."""


class Files:
    """The unit files of services: fragments by name, and drop-ins by the name that their directory is for."""

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
        """Yield the files of a service, later ones overriding; with `own`, only those that are for it alone."""
        if name in self.fragments:
            yield self.fragments[name]
        found: dict[str, str] = {}
        for level in (name,) if own else _levels(name):
            for file, path in self.drop_ins.get(level, {}).items():
                found.setdefault(file, path)
        for file in sorted(found):
            yield found[file]

    def text(self, path: str) -> bytes:
        """Return the content of a file; empty if it is masked or cannot be read."""
        if path not in self._texts:
            try:
                self._texts[path] = read_regular(path)
            except OSError:
                self._texts[path] = b""
        return self._texts[path]

    def names(self) -> list[str]:
        """Return the names of services, and those of directories of drop-ins for several."""
        return sorted(self.fragments.keys() | self.drop_ins.keys())


def _listed(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _is_alias(path: str, name: str) -> bool:
    """Whether a file is another name of a unit. The drop-ins of the unit are under its main name."""
    try:
        return os.path.basename(os.readlink(path)) not in (name, "null")
    except OSError:
        return False


def _levels(name: str) -> Iterator[str]:
    """Yield the names of drop-ins for a service: its own, its template, its prefixes, and the one for all services."""
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
    """Finds the services that have memory keys."""

    def __init__(self, files: Files, slices_d: Path) -> None:
        # Imported only if there is a section: the import takes longer than the search for one.
        from ggroupfs.text.properties import PROPERTIES
        from ggroupfs.units.unitfile import Assignment, assignments

        self._files = files
        # What the library does: it moves memory, has the program be a client of the server of its space, and places its
        # kernels.
        self._keys = {one.name for one in PROPERTIES if one.control.startswith("gmem.") or one.control in BY_LIBRARY}
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
        """Return services and directories of drop-ins for several, including services that only `slices.d` names."""
        from ggroupfs.units.naming import PATTERN, ByName

        named = [one.name for one, _ in self._table.assignments if isinstance(one, ByName)] if self._table else []
        plain = {name.replace("@*.", "@.") for name in named if not PATTERN.search(name.replace("@*.", "@."))}
        return sorted({name for name in plain if name.endswith(SERVICE)} | set(self._files.names()))

    def given(self, name: str) -> Given | None:
        """Return the contents of a service's drop-in.

        None if the service has no memory key, or only those in drop-ins for several, which get a drop-in of their own.
        """
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
        if not (own or preloaded or socket or root):  # the drop-in for several already says the same
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
        """Whether a section of `slices.d` sets memory for this name. An instance stands for its template."""
        if self._table is None or name == ANY:
            return False
        asked = self._table.of_name(name.replace(f"@{SERVICE}", f"@x{SERVICE}"))
        return any(setting.value and key in self._keys for key, setting in asked.values.items())


def _words(value: str) -> list[str]:
    try:
        return shlex.split(value)
    except ValueError:  # a quote without an end, which systemd rejects as well
        return []


def drop_in(given: Given, library: Path, socket: str) -> str:
    """Return the text of a service's drop-in."""
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
    """Return the socket of the service's mount, from its options."""
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
    """Write the drop-ins below `place`. OSError."""
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
    """Run with the arguments of systemd: three directories, the first of which is for what files in /etc override."""
    if not arguments:
        print("ggroupfs: a generator of systemd: it is called with a directory to write to", file=sys.stderr)
        return 2
    try:
        generate(Path(arguments[0]))
    except OSError as error:
        print(f"ggroupfs: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    return 0
