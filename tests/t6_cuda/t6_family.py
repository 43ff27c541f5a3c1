"""Programs with the library that limit themselves by their environment: what the library reads, reports, and passes on
to their children."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import trio

from backend.core.settings import BY_ENVIRONMENT, SETTINGS, Kind
from backend.door.environment import FAMILY, Refused, families, levels_in
from backend.door.wire import CUDA, VERSION, Feature, Message, Op
from tests.t6_cuda.daemon import MIB, Daemon, serving
from tests.t6_cuda.harness import build
from tests.versions.ends import compile_library

ROOT = Path(__file__).parents[2]
VALUES = ROOT / "tests" / "support" / "environment.values"
OURS = {name: text for name, text in os.environ.items() if not name.startswith("GGROUP_")}
OUTER = "00000000000000aa:high=4096"

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture(scope="module")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_library(ROOT, tmp_path_factory.mktemp("library") / "library")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "daemon.sock"


@pytest.fixture
def start(binary: Path, path: Path) -> Iterator[Start]:
    """Yield a function that starts programs at the library's end of the socket, with no other variables of ours."""
    started: list[subprocess.Popen[str]] = []

    def start(**environment: str) -> subprocess.Popen[str]:
        pipe, whole = subprocess.PIPE, {**OURS, "GGROUP_SOCKET": os.fspath(path), **environment}
        started.append(subprocess.Popen([binary], stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=whole))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def ask(process: subprocess.Popen[str], line: str) -> str:
    """Return a program's answer to a line; nothing if it has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
    return process.stdout.readline().rstrip("\n")


def real(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        with trio.fail_after(60):
            await test()

    trio.run(main)


def test_the_library_has_the_same_settings(tmp_path: Path) -> None:
    """The rows of family.def are the settings of backend/core/settings.py that have a variable."""
    source, program = tmp_path / "rows.c", tmp_path / "rows"
    source.write_text(f"""
#include <stdint.h>
#include <stdio.h>
#define FAMILY_SETTING(variable, place, field, kind, least, most) \\
    printf("%s %d %s %s %lld %lld\\n", #variable, place, #field, #kind, (long long)(least), (long long)(most));
int main(void)
{{
#include "{ROOT}/backend/cuda/library/daemon/family.def"
}}
""")
    subprocess.run(["gcc", "-Wall", "-Werror", "-o", program, source], check=True)
    said = subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()
    assert said == [
        f"{one.environment} {SETTINGS.index(one)} {one.field} {one.kind.name} {one.least} {one.most}"
        for one in BY_ENVIRONMENT.values()
    ]
    assert {one.kind for one in BY_ENVIRONMENT.values()} <= {Kind.SIZE, Kind.NUMBER, Kind.SMS}


def test_values_mean_what_they_mean_elsewhere(start: Start) -> None:
    """Each line of the corpus, which the Python side reads as well, with the same words for a refusal."""
    for line in VALUES.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        words, _, meaning = line.partition(" = ")
        name, _, value = words.partition(" ")
        process = start(**{name: value})
        if meaning != "refused":
            field, number = meaning.split()
            (level,) = levels_in(ask(process, "family"))
            assert level.values == {field: int(number)}, line
        else:
            assert ask(process, "family") == "none"
            assert ask(process, "use 0") == ""
            with pytest.raises(Refused) as refused:
                families({name: value})
            assert process.communicate()[1] == f"ggroupfs: {refused.value}\n"
            assert process.returncode == 1


def test_what_is_refused_is_left_out_where_that_is_asked_for(start: Start) -> None:
    process = start(GGROUP_GMEM_HIGH="lots", GGROUP_WEIGHT="7", GGROUP_LENIENT="1")
    assert [level.values for level in levels_in(ask(process, "family"))] == [{"weight": 7}]
    assert ask(process, "use 0") == "-1"
    assert process.communicate()[1] == (
        "ggroupfs: GGROUP_GMEM_HIGH=lots: not a size: bytes, or with K, M, G or T, or max: ignored\n"
    )


@pytest.mark.parametrize(
    ("before", "environment", "after"),
    [
        ("", {}, "none"),
        (OUTER, {}, OUTER),
        (OUTER, {"GGROUP_GMEM_HIGH": "4K"}, OUTER),
        (OUTER, {"GGROUP_GMEM_HIGH": "1K"}, f"{OUTER},NEW:high=1024"),
        (OUTER, {"GGROUP_GMEM_HIGH": "4K", "GGROUP_WEIGHT": "9"}, f"{OUTER},NEW:high=4096:weight=9"),
        (f"{OUTER}:later=3", {"GGROUP_GMEM_HIGH": "4K"}, f"{OUTER}:later=3,NEW:high=4096"),
        ("", {"GGROUP_PRIORITY": "12", "GGROUP_GMEM_SWAP_MAX": "0"}, "NEW:swap_max=0:priority=12"),
    ],
)
def test_what_children_read(start: Start, before: str, environment: dict[str, str], after: str) -> None:
    """As in backend/door/environment.py, to the letter."""
    said = ask(start(**environment, **({FAMILY: before} if before else {})), "family")
    assert re.fullmatch(after.replace("NEW", "[0-9a-f]{16}"), said), said
    ours = {**environment, **({FAMILY: before} if before else {})}
    families(ours)
    assert re.fullmatch(after.replace("NEW", "[0-9a-f]{16}"), ours.get(FAMILY, "none"))


@pytest.mark.parametrize("text", ["x", f"{OUTER},", f",{OUTER}", f"{OUTER}:", "0" * 16, ",".join([OUTER] * 9)])
def test_a_family_that_nothing_of_ours_wrote(start: Start, text: str) -> None:
    process = start(**{FAMILY: text})
    assert ask(process, "use 0") == ""
    assert process.communicate()[1] == f"ggroupfs: {FAMILY}={text[:100]}: not what ggroupfs puts there: unset it\n"


def test_a_shell_and_its_children_are_one_family() -> None:
    """With the real library, which acts as it is loaded, in programs that never use a GPU."""
    preload = os.fspath(build() / "libggroup-cuda.so")
    script = "echo $GGROUP_FAMILY; env | sed -n s/^GGROUP_FAMILY=//p; GGROUP_WEIGHT=5 sh -c 'echo $GGROUP_FAMILY'"
    for shell in ("bash", "sh"):
        words = ["env", f"LD_PRELOAD={preload}", "GGROUP_GMEM_HIGH=1G", shell, "-c", script]
        said = subprocess.run(words, env=OURS, capture_output=True, text=True, check=True)
        mine, child, nested = said.stdout.splitlines()
        assert mine == child, said
        assert [level.values for level in levels_in(mine)] == [{"high": 1 << 30}]
        assert nested.startswith(f"{mine},")
        assert said.stderr == ""
    plain = subprocess.run(
        ["env", f"LD_PRELOAD={preload}", "env"], env=OURS, capture_output=True, text=True, check=True
    )
    assert FAMILY not in plain.stdout


def test_programs_are_limited_together(start: Start, path: Path) -> None:
    async def do(process: subprocess.Popen[str], line: str) -> str:
        return await trio.to_thread.run_sync(partial(ask, process, line))

    async def test() -> None:
        first = start(GGROUP_GMEM_HIGH="512M", GGROUP_GMEM_SWAP_MAX="10G")
        family = await do(first, "family")
        second = start(GGROUP_GMEM_HIGH="512M", GGROUP_GMEM_SWAP_MAX="10G", GGROUP_FAMILY=family)
        async with serving(path) as daemon:
            for process in (first, second):
                assert await do(process, "use 0") == "0"
                assert await do(process, "charge 384") == "0"
            (level,) = levels_in(family)
            here = f"slice/family-{os.geteuid()}-{level.id:016x}/0"
            assert await daemon.h.read(f"{here}/gmem.limit.high") == f"{512 * MIB}\n"
            assert await daemon.h.read(f"{here}/gmem.current") == f"{512 * MIB}\n"
            assert await daemon.h.read(f"{here}/gmem.swap.max") == f"{10 << 30}\n"
            assert await do(first, "limits") == "1 512 0", "it sees the limit as its GPU"

    real(test)


def test_a_program_sees_its_limit_before_it_uses_a_gpu(start: Start, path: Path) -> None:
    """Its question names its families."""

    async def test() -> None:
        process, refused = start(GGROUP_GMEM_HIGH="512M"), start(GGROUP_GMEM_HIGH="512M")
        async with serving(path) as daemon:
            assert await trio.to_thread.run_sync(partial(ask, process, "sight 0")) == "1 512"
            assert len(daemon.h.controller.population) == 0
            assert await trio.to_thread.run_sync(partial(ask, process, "use 0")) == "0"
            assert await trio.to_thread.run_sync(partial(ask, process, "limits")) == "1 512 512"
            daemon.gpu.unsupported.add("gmem.limit.high")
            assert await trio.to_thread.run_sync(partial(ask, refused, "sight 0")) == ""
        said = (await trio.to_thread.run_sync(refused.communicate))[1]
        assert said == "ggroupfs: GGROUP_GMEM_HIGH=536870912: Operation not supported\n"

    real(test)


def test_what_the_daemon_refuses_ends_the_program_at_its_first_answer(start: Start, path: Path) -> None:
    async def use(daemon: Daemon, **environment: str) -> tuple[str, str]:
        process = start(GGROUP_GMEM_HIGH="512M", **environment)
        said = await trio.to_thread.run_sync(partial(ask, process, "use 0"))
        return said, (await trio.to_thread.run_sync(process.communicate))[1]

    async def test() -> None:
        async with serving(path) as daemon:
            daemon.gpu.unsupported.add("gmem.limit.high")
            line = "ggroupfs: GGROUP_GMEM_HIGH=536870912: Operation not supported"
            assert await use(daemon) == ("", f"{line}\n")
            assert await use(daemon, GGROUP_LENIENT="1") == ("0", f"{line}: ignored\n")

    real(test)


def test_a_child_of_fork_is_told_as_any_other_program(start: Start, path: Path) -> None:
    """Its parent's limit does not bind it: no daemon has answered it yet."""

    async def test() -> None:
        async with serving(path) as daemon:
            process = start(GGROUP_GMEM_HIGH="512M")
            assert await trio.to_thread.run_sync(partial(ask, process, "use 0")) == "0"
            daemon.gpu.unsupported.add("gmem.limit.high")
            assert await trio.to_thread.run_sync(partial(ask, process, "fork 10")) == "1", "it ends"
            assert await trio.to_thread.run_sync(partial(ask, process, "charge 2")) == "0"
            said = (await trio.to_thread.run_sync(process.communicate))[1]
            assert said == "ggroupfs: GGROUP_GMEM_HIGH=536870912: Operation not supported\n"

    real(test)


def test_a_daemon_that_comes_later_ends_nothing(start: Start, path: Path) -> None:
    async def test() -> None:
        process = start(GGROUP_GMEM_HIGH="512M")
        async with serving(path) as daemon:
            assert await trio.to_thread.run_sync(partial(ask, process, "use 0")) == "0"
            await daemon.until(lambda: daemon.h.controller.population.families == 1, "it is in its family")
        async with serving(path) as daemon:
            daemon.gpu.unsupported.add("gmem.limit.high")
            await daemon.until(lambda: len(daemon.h.controller.population) == 1, "it is there again")
            assert daemon.h.controller.population.families == 0
            assert await trio.to_thread.run_sync(partial(ask, process, "status")) == "0 0 0"

    real(test)


def test_what_an_earlier_library_does_not_say(path: Path) -> None:
    """It is served as before, and its connection knows of no families."""

    async def test() -> None:
        async with serving(path):
            with trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_SEQPACKET) as connection:
                await connection.connect(os.fspath(path))
                answers = []
                for op, args in ((Op.HELLO, (VERSION, CUDA & ~Feature.FAMILY)), (Op.WANT, (0, 1)), (Op.FAMILY, (1,))):
                    await connection.send(Message(op, 1, 0, args).encode())
                    answers.append(Message.decode(await connection.recv(64)).status)
                assert answers == [0, -errno.ENOSYS, -errno.ENOSYS]

    real(test)
