"""Fuzzers: bytes against a property, and corpora of bytes that are worth trying again.

A :class:`Target` is a property of bytes. `make test` replays its corpus, the files of ``tests/corpus/<name>``, and
tries some more bytes, the same each time. `make fuzz` tries many more, different ones each time, and adds those that
break the property to the corpus, so that each finding is replayed for ever.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import logging
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import attrs
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

T = TypeVar("T")

NAMES: list[str] = []
"""Names of the targets of the loaded modules."""

CONNECTIONS = 4
"""Number of connections: two for each of two processes."""

CORPUS = Path(__file__).parents[1] / "corpus"
LONG = int(os.environ.get("GGROUP_FUZZ", "0"))
"""Factor by which `make fuzz` tries more examples than `make test`, with fresh ones each time; 0 in `make test`."""

EDGES = (b"\0", b"\n", b"\xff", b"\xff" * 4, bytes(8), b"\x7f", b"\x80", b"-1", b"0x", b"max", b"9" * 20, b"=", b"\\\n")
"""Byte strings that are inserted into others."""


@attrs.frozen
class Target:
    """A property of bytes, with its corpus; see the module."""

    name: str
    """Name of the corpus."""
    check: Callable[[bytes], None]
    """The property: raises AssertionError, or anything else, for bytes that break it."""
    shaped: st.SearchStrategy[bytes] = attrs.field(repr=False)
    """Strategy for bytes with a meaning."""
    examples: int = 200
    """Number of examples in `make test`."""

    def __attrs_post_init__(self) -> None:
        NAMES.append(self.name)

    def kept(self) -> Sequence[object]:
        """Return the corpus, as parameters of a test."""
        return [pytest.param(file, id=file.name) for file in self._files()]

    def replay(self, file: Path) -> None:
        """Try a file of the corpus."""
        self.check(file.read_bytes())

    def fuzz(self) -> None:
        """Try fresh bytes: shaped ones, changed ones of the corpus, and arbitrary ones."""
        seeds = [file.read_bytes() for file in self._files()]
        assert seeds, f"the corpus {self.name} is empty"
        broke: list[bytes] = []

        @settings(
            max_examples=self.examples * (LONG or 1),
            derandomize=not LONG,
            database=None,
            report_multiple_bugs=False,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        @given(st.one_of(self.shaped, self.shaped, changed(Seeds(seeds)), st.binary(max_size=256)))
        def attempt(raw: bytes) -> None:
            try:
                self.check(raw)
            except BaseException:
                broke.append(raw)
                raise

        try:
            attempt()
        except BaseException:
            if LONG and broke:  # the last failure is the smallest
                self.keep(broke[-1])
            raise

    def keep(self, raw: bytes) -> Path:
        """Add bytes to the corpus; return their file."""
        file = CORPUS / self.name / hashlib.sha1(raw).hexdigest()[:12]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(raw)
        return file

    def _files(self) -> Sequence[Path]:
        return sorted((CORPUS / self.name).glob("*"))


class Seeds(tuple[bytes, ...]):
    """A corpus whose repr leaves out its bytes."""

    def __repr__(self) -> str:
        return f"{len(self)} seeds"


@st.composite
def changed(draw: st.DrawFn, seeds: Seeds) -> bytes:
    """Draw one of the seeds, changed in one to four places."""
    any_seed = st.integers(0, len(seeds) - 1).map(seeds.__getitem__)
    raw = draw(any_seed)
    for _ in range(draw(st.integers(1, 4))):
        at, end = (min(draw(st.integers(0, len(raw))), draw(st.integers(0, len(raw)))) for _ in range(2))
        begin, end = min(at, end), min(max(at, end), at + 16)
        piece = draw(st.one_of(st.just(b""), st.binary(max_size=4), st.sampled_from(EDGES), any_seed))
        raw = raw[:begin] + piece + raw[end:]
    return raw


def outcome(call: Callable[[], T], complaint: type[Exception]) -> tuple[T | None, str]:
    """Return the result of a call and an empty string; or None and its complaint, which must not be empty."""
    try:
        return call(), ""
    except complaint as error:
        said = str(error)
    assert said, "a complaint without a word"
    return None, said


@contextlib.contextmanager
def expected(*patterns: str) -> Iterator[None]:
    """Allow log lines that may or may not come: where a program is hung up on, for example."""

    def pass_over(record: logging.LogRecord) -> bool:
        return not any(re.search(pattern, record.getMessage()) for pattern in patterns)

    names = [name for name in logging.root.manager.loggerDict if name.startswith(("backend", "ggroupfs"))]
    loggers = [logging.getLogger(name) for name in names]
    for logger in loggers:
        logger.addFilter(pass_over)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(pass_over)


@contextlib.contextmanager
def nothing_logged() -> Iterator[None]:
    """Have an error or a warning in the log break a property, as an exception does."""
    lines: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    handler = Collect(logging.WARNING)
    logging.root.addHandler(handler)
    try:
        yield
    finally:
        logging.root.removeHandler(handler)
    assert not lines, lines


@functools.cache
def sleepers() -> Sequence[int]:
    """Return the processes that connections belong to."""
    processes = [subprocess.Popen(["sleep", "3600"]) for _ in range(CONNECTIONS // 2)]
    for process in processes:
        atexit.register(process.wait)
        atexit.register(process.kill)
    return [process.pid for process in processes]
