"""Tables made from the rows of backend/core/settings.py: `make tables` writes them, and a test compares them.

A place is the part of a file between two marks, ``settings: NAME`` and ``settings: end``, each in a comment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import wrap

import attrs

from backend.core.settings import APPLIED, BY_CONTROL, MAX, PERIOD, TIMESLICE, Kind, Setting
from ggroupfs.text import values

TOP = Path(__file__).resolve().parent.parent

IN_CONTROL_FILES = {
    Kind.SIZE: "bytes, with K, M, G or T; `max`",
    Kind.SPAN: "milliseconds, or with `us` or `ms`; `default`",
    Kind.SWITCH: "0 or 1",
    Kind.QUOTA: "`QUOTA PERIOD` in microseconds; `max`",
    Kind.SMS: "a number of SMs, or a percentage of the GPU's; `max`",
}
IN_UNIT_FILES = {
    Kind.SIZE: "bytes, with K, M, G, T or P; percent of the GPU's memory; `infinity`",
    Kind.SPAN: "milliseconds, or with `us`, `ms`, `s`; sums, as `1ms 500us`",
    Kind.SWITCH: "a boolean",
    Kind.QUOTA: "a percentage, and a time for the period behind, as `30% 1s`; `infinity`",
    Kind.SMS: "a number of SMs, or a percentage of the GPU's; `infinity`",
}
WORDS_IN_CONTROL_FILES = {
    Kind.SIZE: ("max",),
    Kind.SPAN: ("default",),
    Kind.SWITCH: ("0", "1"),
    Kind.QUOTA: ("max",),
    Kind.SMS: ("max",),
}
WORDS_IN_UNIT_FILES = {
    Kind.SIZE: ("infinity",),
    Kind.SWITCH: ("yes", "no"),
    Kind.QUOTA: ("infinity",),
    Kind.SMS: ("infinity",),
}
"""Words, besides numbers, that completions offer after the =."""
USAGE_WIDTH = 109
"""Columns of a literal in packaging/slurm/options.def: with a tab, quotes and a parenthesis it makes a line of 120."""


def _number(setting: Setting) -> str:
    return f"{setting.least} to {setting.most}"


def _default_in_unit_files(setting: Setting) -> str:
    if setting.kind is Kind.SPAN:
        return "the driver's" if setting is TIMESLICE else "the mount's"
    if setting.kind is Kind.SWITCH:
        return "`yes`" if setting.default else "`no`"
    return "`infinity`" if setting.default == MAX or setting.kind is Kind.SMS else f"`{setting.default}`"


def semantics() -> Iterator[str]:
    """Yield the settings, for docs/semantics.md."""
    yield "> | file | values | at first | in unit files | goes along with a migration |"
    yield "> |---|---|---|---|---|"
    for control, setting in BY_CONTROL.items():
        allowed = IN_CONTROL_FILES.get(setting.kind, _number(setting))
        key = f"`{setting.unit_key}=`" if setting.unit_key else ""
        follows = "yes" if setting.follows_migration else "no"
        yield f"> | {control} | {allowed} | `{values.show_default(setting)}` | {key} | {follows} |"


def units() -> Iterator[str]:
    """Yield the keys of unit files, for docs/units.md."""
    yield "| key | control file | values | default |"
    yield "|---|---|---|---|"
    for one in APPLIED:
        allowed = IN_UNIT_FILES.get(one.kind, one.summary)
        yield f"| `{one.unit_key}=` | {one.control} | {allowed} | {_default_in_unit_files(one)} |"
    gpus = "the GPUs of the other keys: `all`, or indices and UUIDs with blanks or commas"
    yield f"| `GPUs=` | | {gpus} | `all` |"


def _roff(text: str) -> str:
    return text.replace("`", "").replace("\\", "\\e").replace("-", "\\-")


def page_5() -> Iterator[str]:
    """Yield the settings, for ggroupfs(5)."""
    yield '.Bl -column "compute.timeslice" "default" "ComputeTimeSlice="'
    yield ".It Sy file Ta Sy at first Ta Sy in unit files"
    for control, setting in BY_CONTROL.items():
        key = f"Cm {setting.unit_key}=" if setting.unit_key else "none"
        yield f".It Pa {control} Ta {values.show_default(setting)} Ta {key}"
    yield ".El"


def page_8() -> Iterator[str]:
    """Yield the keys of unit files, for ggroupfs(8)."""
    for one in APPLIED:
        yield f".It Cm {one.unit_key}="
        yield f"{one.control}: {_roff(IN_UNIT_FILES.get(one.kind, one.summary))}"


def zsh_keys() -> Iterator[str]:
    """Yield the names that can be set, for zsh."""
    for control, setting in BY_CONTROL.items():
        yield f"        '{control}:{setting.summary}'"
    for one in APPLIED:
        yield f"        '{one.unit_key}:{one.control} as in a unit file'"


def annotations() -> Iterator[str]:
    """Yield the annotations of containers, for docs/containers.md."""
    for one in APPLIED:
        allowed, in_units = IN_CONTROL_FILES.get(one.kind, _number(one)), IN_UNIT_FILES.get(one.kind, "")
        yield f"- `ggroup.{one.control}`: {allowed};"
        yield f"  or `ggroup.{one.unit_key}`" + (f": {in_units}" if in_units else "")


def _words() -> Iterator[tuple[str, tuple[str, ...]]]:
    for control, setting in BY_CONTROL.items():
        yield control, WORDS_IN_CONTROL_FILES.get(setting.kind, ())
    for one in APPLIED:
        yield str(one.unit_key), WORDS_IN_UNIT_FILES.get(one.kind, ())


def zsh_words() -> Iterator[str]:
    """Yield the words that each setting takes, for zsh."""
    for name, words in _words():
        if words:
            yield f"            *{name}) compadd {' '.join(words)} ;;"


def bash() -> Iterator[str]:
    """Yield the names that can be set, and the words that each takes, for bash."""
    yield '_ggroupfs_settings="'
    for name, _ in _words():
        yield f"    {name}="
    yield '"'
    yield '_ggroupfs_words_of_settings="'
    for name, words in _words():
        for word in words:
            yield f"    {name}={word}"
    yield '"'


def jobs() -> Iterator[str]:
    """Yield the options of jobs, for docs/slurm.md."""
    yield "| option | control file | what it is |"
    yield "|---|---|---|"
    for one in APPLIED:
        if one.job_option is not None:
            yield f"| `--{one.job_option}=` | {one.control} | {one.summary} |"


def job_options() -> Iterator[str]:
    """Yield the options of jobs, for packaging/slurm/options.def."""
    for one in APPLIED:
        if one.job_option is not None:
            numbers = ", ".join("INT64_MAX" if number == MAX else str(number) for number in _range_and_default(one))
            allowed = IN_UNIT_FILES.get(one.kind)
            usage = f"{one.summary}: {allowed.replace('`', '')}" if allowed else one.summary
            row = f'{one.field}, {one.kind.name}, "{one.job_option}", "{one.control}", {numbers}'
            # Literals of C beside each other are one.
            literals = "\n\t".join(f'"{part}"' for part in wrap(usage, USAGE_WIDTH, drop_whitespace=False))
            yield f"GGROUP_OPTION({row},\n\t{literals})"
    yield f"GGROUP_PERIOD({', '.join(map(str, _range_and_default(PERIOD)))})"


def _range_and_default(setting: Setting) -> tuple[int, int, int]:
    return setting.least, setting.most, setting.default


@attrs.frozen
class Place:
    """A marked place in a file, and the content that belongs there."""

    path: Path
    name: str
    make: Callable[[], Iterator[str] | list[str]]

    def _parts(self) -> tuple[str, str, str]:
        """Return the text before, in and after the place. ValueError if it is not marked."""
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        begins = [
            number for number, line in enumerate(lines) if line.rstrip(" ->\n").endswith(f"settings: {self.name}")
        ]
        if len(begins) != 1:
            raise ValueError(f"{self.path.name} has no settings: {self.name}")
        begin = begins[0] + 1
        ends = [
            number for number in range(begin, len(lines)) if lines[number].rstrip(" ->\n").endswith("settings: end")
        ]
        if not ends:
            raise ValueError(f"{self.path.name}: settings: {self.name} has no end")
        return "".join(lines[:begin]), "".join(lines[begin : ends[0]]), "".join(lines[ends[0] :])

    def found(self) -> str:
        """Return the present content."""
        return self._parts()[1]

    def wanted(self) -> str:
        """Return the content that belongs there."""
        return "".join(f"{line}\n" for line in self.make())

    def write(self) -> None:
        """Replace the content by the one that belongs there."""
        before, _, behind = self._parts()
        self.path.write_text(before + self.wanted() + behind, encoding="utf-8")


PLACES = (
    Place(TOP / "docs/semantics.md", "table", semantics),
    Place(TOP / "docs/units.md", "keys", units),
    Place(TOP / "docs/containers.md", "annotations", annotations),
    Place(TOP / "docs/man/ggroupfs.5", "table", page_5),
    Place(TOP / "docs/man/ggroupfs.8", "keys", page_8),
    Place(TOP / "completions/_ggroupfs", "keys", zsh_keys),
    Place(TOP / "completions/_ggroupfs", "words", zsh_words),
    Place(TOP / "completions/ggroupfs.bash", "all", bash),
    Place(TOP / "docs/slurm.md", "jobs", jobs),
    Place(TOP / "packaging/slurm/options.def", "options", job_options),
)


if __name__ == "__main__":
    for place in PLACES:
        place.write()
