"""Every way to an entry point of the driver leads to our wrapper, and every answer of the driver to the program."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
from pathlib import Path

import pytest

from backend.door.wire import CUDA, SIZE, Message, Op

from .harness import CUDA_INCLUDE, GrantingDaemon, Row, build, command, entries, environment, monitored, run

LIBRARY = "libggroup-cuda.so"
PER_THREAD = 2


def base(name: str) -> str:
    """Return the name without _v2 and _ptsz, as cuGetProcAddress knows it."""
    return re.sub(r"(_v\d)?(_pt[sd][sz])?$", "", name)


def ways(way: str, names: list[str], *args: object, sanitize: str = "", **extra: str) -> dict[str, tuple[str, str]]:
    """Return where hook_ways found each name."""
    ran = subprocess.run(
        command("hook_ways", way, *args, sanitize=sanitize),
        input="\n".join(names),
        cwd=build(sanitize),
        env=environment(sanitize, extra),
        text=True,
        capture_output=True,
    )
    assert ran.returncode == 0, ran.stderr
    lines = [line.split() for line in ran.stdout.splitlines()]
    return {name: (file, symbol) for name, file, symbol in lines}


def test_everything_in_the_table_is_exported() -> None:
    """Nothing else is exported, except what is caught of NVML, the functions of libc that find all of these, and what
    CUDA_INJECTION64_PATH needs."""
    listing = subprocess.check_output(["nm", "-D", "--defined-only", build() / LIBRARY], text=True)
    exported = {line.split()[2] for line in listing.splitlines()}
    of_libc = {"dlsym", "dlvsym", "dlopen"}
    assert exported == {row.name for row in entries()} | monitored() | of_libc | {"InitializeInjection"}


def test_the_table_has_the_types_and_versions_of_nvidias_headers() -> None:
    """The compiler compares the parameters, as wrappers define what cuda.h declares; here the versions are compared."""
    text = (CUDA_INCLUDE / "cudaTypedefs.h").read_text(encoding="utf-8")
    known: dict[str, set[int]] = {}
    for name, version in re.findall(r"PFN_(cu\w+?)_v(\d{4,5})(?:_pt[sd][sz])?\)", text):
        known.setdefault(name, set()).add(int(version))
    assert {row.name for row in entries() if row.since not in known[base(row.name)]} == set()


QUESTIONS = re.compile(
    r"cuStream(Get|Set|Copy|Create)\w*|cuStream(IsCapturing|UpdateCaptureDependencies)|cuGreenCtxStreamCreate"
)
"""Names that take a stream, and bring no work."""

WITH_32_BITS = re.compile(r"cuMemcpy(HtoA|AtoH|HtoD|DtoH|DtoD|2D|3D)Async")
"""The forms of CUDA 2, which the table leaves out."""


def test_all_that_names_a_stream_is_caught_but_what_brings_no_work() -> None:
    """An entry point that is not caught bypasses the gates, and a later header may have more of them."""
    source = "#define __CUDA_API_VERSION_INTERNAL\n#include <cuda.h>\n"
    words = ["gcc", "-E", "-P", f"-I{CUDA_INCLUDE}", "-"]
    text = subprocess.run(words, input=source, text=True, check=True, capture_output=True).stdout
    found = {
        name
        for name, words in re.findall(r"CUresult\s+(cu\w+)\s*\(([^;{]*)\);", text)
        if re.search(r"\bCUstream\b", words)
    }
    assert len(found) > 150
    missed = {re.sub(r"(_v\d)?(_ptsz)?$", "", name) for name in found - {row.name for row in entries()}}
    assert {name for name in missed if not QUESTIONS.fullmatch(name) and not WITH_32_BITS.fullmatch(name)} == set()


@pytest.mark.parametrize("sanitize", ["", "address,undefined"])
@pytest.mark.parametrize("way", ["handle", "default", "next", "program", "libc-dlsym"])
def test_dlsym_finds_ours(way: str, sanitize: str) -> None:
    """For any handle."""
    names = [row.name for row in entries()]
    assert ways(way, names, sanitize=sanitize) == {name: (LIBRARY, name) for name in names}


@pytest.mark.parametrize("way", ["dlvsym", "libc-dlvsym", "deep-dlvsym"])
def test_dlvsym_finds_none(way: str) -> None:
    """The same as without the library: neither libcuda nor its double has versions, and dlvsym finds only symbols that
    have one."""
    names = [row.name for row in entries()]
    assert ways(way, names, 13000, 0, "libdeep.so") == dict.fromkeys(names, ("-", "-"))


@pytest.mark.parametrize("library", ["libdeep.so", "libdeep-now.so", "./fake/libdeep.so"])
@pytest.mark.parametrize("way", ["dlsym", "linked", "twice"])
def test_a_library_that_finds_others_first_finds_ours(way: str, library: str) -> None:
    """A library that is loaded with RTLD_DEEPBIND, by each of its own ways; and a library that such a library has
    loaded."""
    names = [row.name for row in entries()]
    own = "cuMemsetD8_v2"
    found = ways(f"deep-{way}", names, 13000, 0, library)
    expected = {name: (LIBRARY, name) for name in names}
    if way in ("linked", "twice"):
        expected[own] = ("libdeep-now.so" if way == "twice" else Path(library).name, own)
    assert found == expected


@pytest.mark.parametrize("library", ["libdeep.so", "libdeep-now.so"])
def test_it_is_given_ours_by_the_driver(library: str) -> None:
    """The library asks cuGetProcAddress, to which it links."""
    rows = entries()
    found = ways("deep-get", sorted({base(row.name) for row in rows}), 13000, PER_THREAD, library)
    assert found == {name: (LIBRARY, family(rows, name, 13000, per_thread=True)) for name in found}


def test_it_finds_our_nvml() -> None:
    names = sorted(monitored())
    found = ways("deep-nvml", [*names, "nvmlInit_v2"], 13000, 0, "libdeep.so")
    assert found == {
        **{name: (LIBRARY, name) for name in names},
        "nvmlInit_v2": ("libnvidia-ml.so.1", "nvmlInit_v2"),
    }


class Sizing(GrantingDaemon):
    """A daemon for which a GPU has 512 MiB."""

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while raw := connection.recv(SIZE):
                asked = Message.decode(raw)
                answers = {Op.HELLO: (1, 2 << 20, 2000, CUDA), Op.TOTAL: (512 << 20, 512 << 20, 0)}
                connection.send(asked.answer(*answers.get(Op(asked.op), ())).encode())


@pytest.mark.parametrize("library", ["libdeep.so", "libdeep-now.so"])
def test_its_calls_are_caught(tmp_path: Path, library: str) -> None:
    """Calls that the loader binds at the first call are caught, too."""
    daemon = Sizing(tmp_path / "socket")
    try:
        extra = {"GGROUP_SOCKET": str(daemon.path), "FAKE_MEMORY": str(1 << 30)}
        assert run("hook_escapes", "deep", library, **extra) == "512\n"
    finally:
        daemon.close()


def test_tables_of_the_driver_have_ours_and_others_keep_their_meaning() -> None:
    """Tables of cuGetExportTable, where their form can be told; and the answers of libc about all other names."""
    run("hook_escapes")


def test_linking_finds_ours() -> None:
    """A program with libcuda among its libraries."""
    lines = [line.split() for line in run("hook_linked").splitlines()]
    assert {tuple(line) for line in lines} == {(row.name, LIBRARY, row.name) for row in entries()}


def test_what_is_not_caught_is_the_drivers() -> None:
    """It is unchanged."""
    assert ways("handle", ["cuDriverGetVersion", "cuStreamCreate"]) == {
        "cuDriverGetVersion": ("libcuda.so.1", "cuDriverGetVersion"),
        "cuStreamCreate": ("libcuda.so.1", "cuStreamCreate"),
    }


def test_libcuda_is_not_there_before_it_is_loaded() -> None:
    """A program may check whether CUDA is there, and gets the same answer as without the library."""
    expected = {"cuDriverGetVersion": ("-", "-"), "cuLaunchKernel": ("-", "-")}
    assert ways("absent", ["cuDriverGetVersion", "cuLaunchKernel"]) == expected


def family(rows: list[Row], name: str, version: int, per_thread: bool) -> str | None:
    """Return the variant that cuGetProcAddress gives, by its documentation."""
    of = [row for row in rows if base(row.name) == name and row.since <= version]
    per = [row for row in of if re.search(r"_pt[sd][sz]$", row.name)]
    of = per if per_thread and per else [row for row in of if row not in per]
    return max(of, key=lambda row: row.since).name if of else None


VERSIONS = [3020, 7000, 10010, 11030, 12000, 12040, 13000]
ASKED = [
    (way, version) for way in ("v1", "v2", "cudart") for version in VERSIONS if way != "cudart" or version >= 12000
]
"""Ways to look up a symbol. cudart uses cuGetProcAddress_v2, which is of CUDA 12."""


@pytest.mark.parametrize("flags", [0, 1, PER_THREAD])
@pytest.mark.parametrize(("way", "version"), ASKED)
def test_get_proc_address_finds_ours(way: str, version: int, flags: int) -> None:
    """The variant fits the version that the program was compiled for, and the flag for the thread's default stream."""
    rows = entries()
    found = ways(way, sorted({base(row.name) for row in rows}), version, flags)
    for name, answer in found.items():
        expected = family(rows, name, version, flags == PER_THREAD)
        if expected:
            assert answer == (LIBRARY, expected), name
        else:
            assert answer[0] != LIBRARY, name


@pytest.mark.parametrize("flags", [0, PER_THREAD])
@pytest.mark.parametrize("version", [7000, 11030, 12040, 13000])
def test_get_proc_address_with_pointers_of_its_own(version: int, flags: int) -> None:
    """The driver's cuGetProcAddress gives other pointers than dlsym: the wrapper is found by name and version."""
    rows = entries()
    found = ways("v2", sorted({base(row.name) for row in rows}), version, flags, FAKE_ALIASES="1")
    for name, answer in found.items():
        expected = family(rows, name, version, flags == PER_THREAD)
        if expected:
            assert answer == (LIBRARY, expected), name


@pytest.mark.parametrize("sanitize", ["", "address,undefined"])
def test_other_symbols_keep_their_meaning(sanitize: str) -> None:
    """dlsym works for all other libraries; and a program without CUDA gets no thread, and no libcuda."""
    run("hook_others", sanitize=sanitize)


def test_injection(tmp_path: Path) -> None:
    """CUDA_INJECTION64_PATH may name the library as well."""
    log = tmp_path / "log"
    run("hook_basic", CUDA_INJECTION64_PATH=str(build() / LIBRARY), FAKE_LOG=str(log))
    assert "cuInit" in log.read_text()


CODE = 719  # CUDA_ERROR_LAUNCH_FAILED: never an error of the double itself
PASSED_ON = [row.name for row in entries() if row.kind not in ("MEMORY", "HOOK")]


@pytest.mark.parametrize("sanitize", ["", "address,undefined"])
def test_return_codes_reach_the_program(sanitize: str) -> None:
    """Every call that is passed on fails in the driver, and the program sees the same number."""
    wrong = {}
    for name in PASSED_ON:
        ran = subprocess.run(
            command("hook_faults", name, sanitize=sanitize),
            env=environment(sanitize, {"FAKE_FAIL": f"{name}:0:{CODE}"}),
            text=True,
            capture_output=True,
        )
        if ran.returncode or ran.stdout.strip() != str(CODE):
            wrong[name] = (ran.returncode, ran.stdout, ran.stderr[-2000:])
    assert wrong == {}


@pytest.mark.parametrize("sanitize", ["", "thread", "address,undefined"])
def test_fork_before_cuda(sanitize: str) -> None:
    """A child of a process that has not used CUDA yet uses it, as with multiprocessing; so does the parent."""
    run("hook_fork", "before", sanitize=sanitize)


@pytest.mark.parametrize(
    ("when", "sanitize"),
    # Not ("after", "address,undefined"): a child that allocates hangs in gcc 12's own allocator if another thread of
    # its parent was in there.
    [("after", ""), ("exec", ""), ("exec", "address,undefined")],
)
def test_fork_after_cuda(when: str, sanitize: str) -> None:
    """A child of a process that has used CUDA gets CUDA_ERROR_NOT_INITIALIZED, as ever, and may execute another
    program."""
    run("hook_fork", when, sanitize=sanitize)


def test_contexts_come_and_go() -> None:
    """The library's own calls are made in a live context; otherwise the double ends the program."""
    run("hook_contexts")
