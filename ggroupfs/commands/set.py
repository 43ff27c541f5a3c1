"""``ggroupfs set``: sets limits of a process or a slice, by the name of the control file or of the property."""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import attrs

from backend.core.settings import APPLIED, BY_CONTROL, Setting
from backend.process.cgroups import ids
from backend.process.identity import Slice
from ggroupfs.client import content, numbers, require_tree
from ggroupfs.client.reading import require_our_pids
from ggroupfs.client.slices import make_ahead
from ggroupfs.commands.places import path_meant
from ggroupfs.errors import UsageError
from ggroupfs.mounts import DEFAULT_MOUNTPOINT
from ggroupfs.text import spans
from ggroupfs.text.names import is_number, slice_directory, unescape
from ggroupfs.text.properties import BY_NAME, text_of
from ggroupfs.text.refusals import OF_MKDIR, meaning
from ggroupfs.text.values import show_default

log = logging.getLogger(__name__)

USAGE = """%(prog)s [-h] [--gpu N] [--timeout SPAN] [--mount MOUNT] PATH KEY=VALUE ...
       %(prog)s [-h] [--gpu N] [--mount MOUNT] --reset PATH [KEY ...]"""

PATH_HELP = "a pid, a cgroup (/batch/gpu), a unit (batch-gpu.slice, trainer.service), or a directory of the tree"

RESETTABLE = (*APPLIED, *(one for one in BY_CONTROL.values() if one not in APPLIED))
"""Settings with a control file, in the order in which they are reset: first those that files apply, in that order."""


class Gone(RuntimeError):
    """Raised for a slice that has gone with its cgroup."""


@attrs.frozen
class Write:
    """A value for one control file."""

    group: Path
    """Directory of control files."""
    control: str
    """Name of the control file."""
    text: str
    """Text to write."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.usage = USAGE
    parser.add_argument("path", metavar="PATH", help=PATH_HELP)
    words = parser.add_argument("settings", nargs="+", metavar="KEY=VALUE", help="gmem.limit.high=8G, or GMemHigh=50%%")
    words.required = False  # not with --reset; nargs="*" would not allow them behind an option that follows PATH
    parser.add_argument("--reset", action="store_true", help="back to the defaults: all settings, or those of the KEYs")
    parser.add_argument("--gpu", type=int, default=None, metavar="N", help="the only GPU; else all that it is on")
    span = "make the slice, which goes unless its cgroup comes within that time: 10min, infinity"
    parser.add_argument("--timeout", default=None, metavar="SPAN", help=span)
    parser.add_argument("--mount", type=Path, default=DEFAULT_MOUNTPOINT)


def run(arguments: argparse.Namespace) -> int:
    """Run the command. All words are parsed before anything is written, in the given order."""
    mount, words = Path(os.path.abspath(arguments.mount)), arguments.settings or []
    require_tree(mount)
    try:
        if arguments.timeout is not None:
            if arguments.reset:
                raise UsageError("--timeout makes a slice, and --reset makes none")
            for key, _ in map(split, words):
                if key not in BY_NAME and key not in BY_CONTROL:
                    raise UsageError(f"{key}: there is no such control")
            make_awaited(mount, arguments.path, arguments.timeout)
        if arguments.reset:
            reset(mount, arguments.path, arguments.gpu, words)
        elif words or arguments.timeout is None:
            write(mount, arguments.path, arguments.gpu, words)
    except (RuntimeError, UsageError) as error:
        raise type(error)(f"set: {error}") from None
    return 0


def write(mount: Path, word: str, gpu: int | None, words: Sequence[str]) -> None:
    """Write the settings in `words`. Missing directories are made, and removed if nothing could be written.

    RuntimeError, UsageError.
    """
    if not words:
        raise UsageError("KEY=VALUE is missing")
    try:
        _write(mount, word, gpu, words)
    except Gone:  # it belonged to a cgroup that has gone, as the write found out
        _write(mount, word, gpu, words)


def _write(mount: Path, word: str, gpu: int | None, words: Sequence[str]) -> None:
    settings = [split(one) for one in words]
    directory, named = directory_of(mount, word)
    made = make(directory, word)
    written = False
    try:
        groups = groups_of(directory, word, gpu, named)
        for one in [understood(mount, group, *setting) for setting in settings for group in groups]:
            apply(mount, one)
            written = True
    finally:
        if not written:
            remove(made)
    if made and directory.is_relative_to(mount / "slice"):
        _say_if_ahead("/" + "/".join(unescape(part) for part in directory.relative_to(mount / "slice").parts))


def make(directory: Path, word: str) -> Sequence[Path]:
    """Make the missing directory of a process or slice, with those above it, and return what was made. RuntimeError."""
    made: list[Path] = []
    missing: list[Path] = []
    try:
        while not directory.is_dir():
            missing.append(directory)
            directory = directory.parent
        for place in reversed(missing):
            with contextlib.suppress(FileExistsError):  # a program came just now
                place.mkdir()
                made.append(place)
    except OSError as error:
        remove(made)
        raise RuntimeError(f"{word}: {meaning(error, OF_MKDIR)}") from None
    return made


def remove(made: Sequence[Path]) -> None:
    """Remove directories that were made, except those that are no longer empty."""
    for place in reversed(made):
        with contextlib.suppress(OSError):
            place.rmdir()


def _say_if_ahead(path: str) -> None:
    """Warn that a slice was made for a cgroup that does not exist yet, since its name may be misspelt."""
    if ids(Slice(path)) == ():
        log.warning("set: %s: made ahead: there is no such cgroup yet", path)


def reset(mount: Path, word: str, gpu: int | None, keys: Sequence[str]) -> None:
    """Write the defaults of some settings, or of all, where the values differ. RuntimeError, UsageError.

    With all settings, those are skipped that this machine cannot enforce, or that an older daemon does not have.
    """
    settings = [resettable(key) for key in keys]
    directory, named = directory_of(mount, word)
    groups = groups_of(directory, word, gpu, named)
    writes = []
    for setting in settings or RESETTABLE:
        assert setting.control is not None
        for group in groups:
            try:
                is_default = content(group / setting.control) == show_default(setting)
            except FileNotFoundError:
                if settings:
                    raise UsageError(f"{setting.control}: there is no such control") from None
                continue
            if not is_default:
                writes.append(Write(group, setting.control, show_default(setting)))
    for one in writes:
        apply(mount, one, () if settings else (errno.EOPNOTSUPP,))


def resettable(key: str) -> Setting:
    """Return the setting of a key, the name of a control file or a property. UsageError for one without a default."""
    one = BY_CONTROL.get(BY_NAME[key].control if key in BY_NAME else key)
    if one is None:
        raise UsageError(
            f"{key}: " + ("--reset takes the KEY alone" if "=" in key else "no setting that has a default")
        )
    return one


def split(word: str) -> tuple[str, str]:
    """Split a ``KEY=VALUE``. An empty value is the default of a property. UsageError."""
    key, equals, value = word.partition("=")
    if not (key and equals) or "/" in key:
        raise UsageError(f"{word}: not KEY=VALUE")
    return key, value.strip()


def make_awaited(mount: Path, word: str, timeout: str) -> None:
    """Make the slice that `word` means, for as long as its cgroup may take to come. RuntimeError, UsageError."""
    directory, _ = directory_of(mount, word)
    top, *parts = directory.relative_to(mount).parts
    if top != "slice" or not parts:
        raise UsageError(f"--timeout: {word} is no slice")
    try:
        ms = spans.milliseconds(timeout)
    except ValueError as error:
        raise UsageError(f"--timeout {timeout}: {error}") from None
    try:
        make_ahead(mount, "/" + "/".join(map(unescape, parts)), ms)
    except FileNotFoundError:
        raise RuntimeError(f"--timeout: the daemon of {mount} is older than that") from None
    except OSError as error:
        raise RuntimeError(f"{word}: {meaning(error)}") from None


def groups_of(directory: Path, word: str, gpu: int | None, named: int | None) -> Sequence[Path]:
    """Return the directories of control files that `word` means, on one GPU or on all. RuntimeError, UsageError."""
    if gpu is None:
        gpu = named
    elif named not in (None, gpu):
        raise UsageError(f"{word} is on GPU {named}, not on {gpu}")
    try:
        gpus: Iterable[int] = numbers(directory)
    except OSError as error:
        raise RuntimeError(f"{word}: {meaning(error)}") from None
    found = [directory / str(number) for number in gpus if gpu in (None, number)]
    if not found:
        raise RuntimeError(f"{word} " + ("has no control files" if gpu is None else f"is not on a GPU {gpu}"))
    return found


def directory_of(mount: Path, word: str) -> tuple[Path, int | None]:
    """Return the directory of a process or slice, and the GPU if `word` names one.

    UsageError for a word that means neither, or a cgroup that systemd never has; RuntimeError for a unit that cannot be
    found.
    """
    if is_number(word):
        require_our_pids(mount, f"{word}: name the directory in {mount}")
        return mount / word, None
    parts = [part for part in word.split("/") if part]
    inside = _inside(mount, word)
    if inside is not None:
        process_or_slice, last = is_number(inside.parts[0]) or inside.parts[0] == "slice", inside.parts[-1]
        if not process_or_slice:
            raise UsageError(f"{word} is no process and no slice")
        gpu = int(last) if len(inside.parts) > 1 and is_number(last) else None
        inside = inside if gpu is None else inside.parent
        if len(inside.parts) > 1:
            path_meant(mount, "".join(f"/{unescape(part)}" for part in inside.parts[1:]))
        return mount / inside, gpu
    if not parts or any(part in (".", "..") for part in parts):
        raise UsageError(f"{word!r} is no pid, no cgroup and no directory of {mount}")
    return mount / slice_directory(path_meant(mount, word)), None


def _inside(mount: Path, word: str) -> Path | None:
    """Return a directory of the tree relative to the mountpoint; None for a word that is none, and for the root."""
    place = Path(os.path.abspath(word))
    if not place.is_relative_to(mount) or place == mount:
        return None
    # A relative name may be a directory here or the path of a cgroup; an existing directory in the tree wins.
    return place.relative_to(mount) if word.startswith("/") or place.is_dir() else None


def understood(mount: Path, group: Path, key: str, value: str) -> Write:
    """Return the write of a setting on one GPU.

    UsageError for an unknown key, or a value that a property does not take.
    """
    try:
        control, text = text_of(key, value, int(content(mount / "gpus" / group.name / "gmem.capacity")))
    except ValueError as error:
        raise UsageError(f"{key}={value}: {error}") from None
    if group.is_dir() and not (group / control).exists():
        raise UsageError(f"{key}: there is no such control")
    return Write(group, control, text)


def apply(mount: Path, write: Write, ignored: Sequence[int] = ()) -> None:
    """Write a value, and return once it holds.

    RuntimeError with the group and the reason, except for ignored errnos.
    """
    try:
        (write.group / write.control).write_text(f"{write.text}\n")
    except OSError as error:
        if error.errno in ignored:
            return
        where = f"{write.group.parent.relative_to(mount)} on GPU {write.group.name}"
        gone = error.errno in (errno.ENODEV, errno.ENOENT)
        kind = Gone if gone and not is_number(write.group.parent.name) else RuntimeError
        raise kind(f"{where}: {write.control}={write.text}: {meaning(error)}") from None
