"""docs/semantics.md, executed: one test per promise."""

from __future__ import annotations

import errno
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from backend.soft.client import socket_of
from ggroupfs.fs.controls import CONTROLS, Control
from ggroupfs.fs.facts import GPU_FACTS, ROOT_FACTS
from tests.support import semantics
from tests.support.mounted import Mounted, eventually, mounted
from tests.support.semantics import DocumentError, Stage, Statement

PAGE = Path(__file__).parents[2] / "docs" / "semantics.md"
LOSSES = ("GPU 1 is lost", "GPU 1 is back")
"""Log lines of the daemon when an example has the second GPU fall off the bus."""
DOCUMENT = semantics.parse(PAGE.read_text())


@pytest.fixture(scope="module")
def module_stage() -> Iterator[Stage]:
    """A tree with two software GPUs that every user of the machine can reach."""
    with tempfile.TemporaryDirectory(prefix="ggroupfs-semantics-") as top:
        os.chmod(top, 0o755)
        place = Path(top, "ggroup")
        place.mkdir()
        faults = Path(top, "faults")
        faults.mkdir()
        options = ("soft.gpus=2", f"soft.faults={faults}")
        with mounted(place, *options, expect_errors=LOSSES) as mount, semantics.stage(mount, Path(top)) as stage:
            yield stage


@pytest.fixture
def stage(module_stage: Stage) -> Iterator[Stage]:
    """The tree, whose books and log are checked after each test, whatever its result."""
    yield module_stage
    module_stage.mount.check()


@pytest.mark.parametrize("statement", DOCUMENT.statements, ids=lambda statement: statement.name)
def test_semantics(stage: Stage, statement: Statement) -> None:
    assert statement.commands, f"{PAGE.name}:{statement.line} promises something that nothing executes"
    if stage.cgroups is None and any("$CG" in command.text for command in statement.commands):
        pytest.fail("this machine has no cgroup2 tree that groups can be made in")
    found = stage.run(statement)
    assert not found, f"{PAGE.name}:{statement.line}: {statement.text}\n{found}"


def test_every_statement_has_a_name_of_its_own() -> None:
    names = [statement.name for statement in DOCUMENT.statements]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("control", [*CONTROLS, *ROOT_FACTS, *GPU_FACTS], ids=lambda control: control.name)
def test_every_file_is_in_an_example(control: Control) -> None:
    lines = [line for s in DOCUMENT.statements for c in s.commands for line in (*c.text.splitlines(), *c.output)]
    assert any(control.name in line for line in lines)


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.name)
def test_every_control_has_a_section(control: Control) -> None:
    assert control.name in DOCUMENT.sections


@pytest.mark.parametrize("name", DOCUMENT.errors)
def test_every_error_of_the_table_is_in_an_example(name: str) -> None:
    words = os.strerror(getattr(errno, name))
    assert any(words in line for s in DOCUMENT.statements for c in s.commands for line in c.output)


# The runner itself, which must be able to fail


def only(example: str) -> Statement:
    (statement,) = semantics.parse(f"# Page\n\n## Section\n\nA promise.\n\n```console\n{example}\n```\n").statements
    return statement


def test_a_right_output_passes(stage: Stage) -> None:
    assert stage.run(only("$ cat gmem.current\n<N>\n$ echo one two\none <W>\n$ seq 3\n1\n...")) == ""


@pytest.mark.parametrize(
    "example",
    [
        "$ cat gmem.current\n<N>\n1",
        "$ cat gmem.current",
        "$ echo one two\n<W>",
        "$ echo 12a\n<N>",
        "$ false",
        "$ echo 1 > gmem.current",
        "$ echo 1 > gmem.current\necho: write error: Operation not permitted",
        "$ exit 0\n$ true",
    ],
)
def test_a_wrong_output_fails(stage: Stage, example: str) -> None:
    assert stage.run(only(example)) != ""


def test_what_the_daemon_complains_of_fails_one_test(stage: Stage) -> None:
    """It does not fail the tests after that one, nor the mount at its end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(os.fspath(socket_of(stage.mount.path)))
        connection.send(b"no message")
        eventually(lambda: any("not a message" in line for line in stage.mount.errors), "it complains")
    books = mock.patch.object(Mounted, "_adds_up", side_effect=AssertionError("the books are wrong as well"))
    with books, pytest.raises(AssertionError, match="not a message"):
        stage.mount.check()
    stage.mount.check()


def test_a_promise_without_an_example_fails() -> None:
    statements = semantics.parse("# Page\n\nWords.\n\n## S\n\nOne.\n\n```console\n$ true\n```\n\nTwo.\n").statements
    assert [bool(statement.commands) for statement in statements] == [True, False]


@pytest.mark.parametrize(
    "page",
    [
        "## S\n\n```console\n$ true\n```\n",
        "## S\n\nOne.\n\n```console\n$ true\n```\n\n```console\n$ true\n```\n",
        "## S\n\nOne.\n\n```console\nfalse\n```\n",
        "## S\n\nOne.\n\n```console\n```\n",
        "## S\n\nOne.\n\n```sh\n$ true\n```\n",
        "## S\n\nOne.\n\n```console\n$ true\n",
    ],
)
def test_a_page_that_is_not_in_the_notation_is_refused(page: str) -> None:
    with pytest.raises(DocumentError):
        semantics.parse(page)
