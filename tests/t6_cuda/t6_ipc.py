"""Level 6: legacy IPC of memory that moves, between processes that know nothing of it (programs/ipc.c), and with false
exporters at the socket (exporter.py)."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from tests.t6_cuda.exporter import CHUNK, FIRST
from tests.t6_cuda.harness import SECONDS, command, environment, run

USER, OTHER = 1000, 65534
STRANGE = 1
"""Inode of no pid namespace: real ones are large."""


@pytest.mark.parametrize("sanitize", ["", "address,undefined", "thread"])
def test_one_exports_and_others_open(sanitize: str) -> None:
    run("ipc", sanitize=sanitize)


@attrs.define
class Exporter:
    """A running exporter.py."""

    process: subprocess.Popen[str]
    bytes: int
    handle: str = ""

    def says(self) -> str:
        """Return its next line."""
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def importer(self, good: bool, user: int | None = None) -> subprocess.Popen[str]:
        """Start a program that opens the handle, as `user`; it exits with 0 if the result is as expected."""
        words = command("ipc", self.handle, FIRST if good else "", self.bytes)
        return subprocess.Popen(words, env=environment(), user=user, text=True, stderr=subprocess.PIPE)

    def opened(self, good: bool, user: int | None = None) -> bool:
        """Run such a program; return whether the exporter was asked for memory."""
        ended(self.importer(good, user))
        return self.says() == "asked"


def ended(importer: subprocess.Popen[str]) -> None:
    """Wait for the end of a program, which must succeed."""
    _, errors = importer.communicate(timeout=SECONDS)
    assert importer.returncode == 0, errors


@contextlib.contextmanager
def exporting(
    kind: str = "honest", *, chunks: int = 2, user: int | None = None, pid: int = 0, namespace: int = 0
) -> Iterator[Exporter]:
    """Run an exporter with so much memory, whose handle names that process."""
    script = Path(__file__).with_name("exporter.py")
    words = [sys.executable, os.fspath(script), kind, *map(str, (chunks, pid, namespace))]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, user=user) as process:
        try:
            exporter = Exporter(process, chunks * CHUNK)
            exporter.handle = exporter.says()
            yield exporter
        finally:
            process.kill()


@pytest.mark.parametrize(("exporter", "importer"), [(None, None), (USER, USER), (None, USER), (USER, None)])
def test_memory_comes_from_the_same_user_or_root_and_root_takes_it_from_whom_it_knows(
    exporter: int | None, importer: int | None
) -> None:
    with exporting(user=exporter) as one:
        assert one.opened(True, importer)


def test_who_listens_is_the_process_that_the_handle_names() -> None:
    """An impostor is not even sent the secret."""
    with exporting(pid=os.getpid()) as impostor:
        assert not impostor.opened(False)


def test_who_listens_is_of_the_same_user() -> None:
    with exporting(user=OTHER) as impostor:
        assert not impostor.opened(False, USER)


def test_a_pid_of_another_namespace_says_nothing_and_the_user_all() -> None:
    with exporting(pid=os.getpid(), namespace=STRANGE) as exporter:
        assert exporter.opened(True)
    with exporting(user=OTHER, namespace=STRANGE) as impostor:
        assert not impostor.opened(False, USER)
        assert not impostor.opened(False), "root takes it from nobody whom it does not know"


def test_the_library_of_0_1_names_no_process_and_the_user_says_all() -> None:
    """A program that was started with it exports to one that is started with this version."""
    with exporting(pid=-1) as exporter:
        assert exporter.opened(True)
    with exporting(pid=-1, user=USER) as exporter:
        assert exporter.opened(True, USER)
        assert not exporter.opened(False), "root takes it from nobody whom it does not know"
    with exporting(pid=-1, user=OTHER) as impostor:
        assert not impostor.opened(False, USER)


@pytest.mark.parametrize(
    ("kind", "chunks"),
    [("no descriptor", 1), ("one too many", 1), ("one too many", 32), ("a longer message", 1)],
)
def test_what_comes_is_what_was_asked_for(kind: str, chunks: int) -> None:
    """32 descriptors leave no room for one more, which the kernel drops."""
    with exporting(kind, chunks=chunks) as exporter:
        assert exporter.opened(False)


def test_a_signal_does_not_make_it_fail() -> None:
    with exporting("interrupts") as exporter:
        assert exporter.opened(True)


def test_one_that_answers_slowly_or_never_is_waited_for_a_few_seconds() -> None:
    """Both run at the same time, since each takes seconds. The slow one's six messages take twice the time allowed."""
    with exporting("silent") as silent, exporting("slow", chunks=6) as slow:
        for importer in [one.importer(False) for one in (silent, slow)]:
            ended(importer)
        assert silent.says() == slow.says() == "asked"
