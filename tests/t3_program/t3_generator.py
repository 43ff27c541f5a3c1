"""The drop-ins that services with memory keys get, for trees of unit files as systemd reads them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from ggroupfs.units import generator
from ggroupfs.units.generator import DROP_IN, SOCKET, generate, main, socket_of

Make = Callable[..., Mapping[str, str]]
KEYS = "[X-GGroup]\nGMemHigh=1G\n"


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "lib" / "libggroup-cuda.so"
    path.parent.mkdir()
    path.touch()
    return path


@pytest.fixture
def make(tmp_path: Path, library: Path) -> Make:
    """Generate for files with these names, in directories by rank; return the drop-ins by unit name."""

    def run(files: Mapping[str, str | None], slices: str = "", defaults: str = "") -> Mapping[str, str]:
        load_path = [os.fspath(tmp_path / rank) for rank in ("etc", "run", "usr")]
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to("/dev/null") if text is None else path.write_text(text)
        slices_d, options, place = tmp_path / "slices.d", tmp_path / "default", tmp_path / "generator"
        options.write_text(defaults)
        if slices:
            slices_d.mkdir()
            (slices_d / "a.conf").write_text(slices)
        generate(place, load_path, slices_d, options, library)
        return {path.parent.name.removesuffix(".d"): path.read_text() for path in place.glob(f"*/{DROP_IN}")}

    return run


def environment(text: str) -> list[str]:
    """Return the environment that a drop-in sets."""
    return [line.removeprefix("Environment=") for line in text.splitlines() if line.startswith("Environment=")]


def test_a_service_with_a_memory_key(make: Make, library: Path) -> None:
    made = make({"etc/a.service": f"[Service]\nExecStart=/bin/a\n{KEYS}", "etc/b.service": "[Service]\n"})
    assert made.keys() == {"a.service"}
    assert made["a.service"].splitlines()[2:] == [
        "[Unit]",
        "After=ggroupfs.service",
        "[Service]",
        f'Environment="LD_PRELOAD={library}"',
        f'Environment="GGROUP_SOCKET={SOCKET}"',
    ]


@pytest.mark.parametrize(
    ("files", "names"),
    [
        ({"usr/a.service.d/gpu.conf": KEYS}, {"a.service"}),
        ({"usr/a@.service": KEYS}, {"a@.service"}),
        ({"usr/a-.service.d/gpu.conf": KEYS, "usr/a-b.service": ""}, {"a-.service"}),
        ({"usr/service.d/gpu.conf": KEYS, "usr/a.service": ""}, {"service"}),
        ({"etc/a.service": "[X-GGroup]\nGMemSwapMax=0\n"}, {"a.service"}),
        ({"etc/a.service": "[X-GGroup]\nGMemHigh=infinity\n"}, {"a.service"}),
        ({"etc/a.service": "[X-GGroup]\nComputeSpatial=yes\n"}, {"a.service"}),
        ({"etc/a.service": "[X-GGroup]\nComputeSMMax=50%\n"}, {"a.service"}),
        ({"etc/a.service": "[X-GGroup]\nComputeWeight=7\n"}, set()),
        ({"etc/a.service": "[Service]\nGMemHigh=1G\n"}, set()),
        ({"etc/a.service": "# [X-GGroup]\n#GMemHigh=1G\n"}, set()),
        ({"etc/a.slice": KEYS, "etc/a.scope": KEYS, "etc/a.timer": KEYS}, set()),
        ({"etc/a.service": f"{KEYS}GMemHigh=\n"}, set()),
        ({"usr/a.service": KEYS, "etc/a.service.d/z.conf": "[X-GGroup]\nGMemHigh=\n"}, set()),
        ({"usr/a.service": KEYS, "etc/a.service": "[Service]\n"}, set()),
        ({"usr/a.service": KEYS, "etc/a.service": None}, set()),
        ({"usr/a.service.d/gpu.conf": KEYS, "etc/a.service.d/gpu.conf": None}, set()),
        ({"usr/a.service.d/gpu.conf": KEYS, "run/a.service.d/gpu.conf": ""}, set()),
        ({"usr/a.service.d/README": KEYS}, set()),
    ],
)
def test_which_services_have_one(make: Make, files: Mapping[str, str | None], names: set[str]) -> None:
    """Of files with one name, that of the first directory counts, even if empty; of a key, the last assignment."""
    assert make(files).keys() == names


def test_another_name_of_a_unit_is_none_of_its_own(make: Make, tmp_path: Path) -> None:
    for name, target in (("alias.service", "a.service"), ("linked.service", tmp_path / "opt" / "linked.service")):
        (tmp_path / "etc").mkdir(exist_ok=True)
        (tmp_path / "etc" / name).symlink_to(target)
    assert make({"usr/a.service": KEYS, "opt/linked.service": KEYS}).keys() == {"a.service", "linked.service"}


@pytest.mark.parametrize(
    ("section", "names"),
    [
        ("[a.service]\nGMemHigh=1G", {"a.service"}),
        ("[a*.service]\nGMemHigh=1G", {"a.service", "ab.service"}),
        ("[t@*.service]\nGMemHigh=1G", {"t@.service"}),
        ("[new.service]\nGMemHigh=1G", {"new.service"}),
        ("[a.service]\nComputeWeight=2", set()),
        ("[a.slice]\nGMemHigh=1G", set()),
        ("[/system.slice/a.service]\nGMemHigh=1G", set()),
    ],
)
def test_sections_of_slices_d_that_are_names(make: Make, section: str, names: set[str]) -> None:
    files = {f"usr/{name}": "[Service]\n" for name in ("a.service", "ab.service", "c.service", "t@.service")}
    assert make(files, slices=f"{section}\n").keys() == names


@pytest.mark.parametrize(
    ("lines", "preload"),
    [
        ("Environment=LD_PRELOAD=/usr/lib/jemalloc.so", "LD_PRELOAD={}:/usr/lib/jemalloc.so"),
        ('Environment=A=1 "LD_PRELOAD=/a b.so" C=2', "LD_PRELOAD={}:/a b.so"),
        ("Environment=LD_PRELOAD=/a.so\nEnvironment=LD_PRELOAD=/b.so", "LD_PRELOAD={}:/b.so"),
        ("Environment=LD_PRELOAD=/a.so\nEnvironment=", "LD_PRELOAD={}"),
        ('Environment="LD_PRELOAD=/a', "LD_PRELOAD={}"),
    ],
)
def test_what_the_service_preloads_itself_goes_along(make: Make, library: Path, lines: str, preload: str) -> None:
    [text] = make({"etc/a.service": f"[Service]\n{lines}\n{KEYS}"}).values()
    assert environment(text)[0] == f'"{preload.format(library)}"'


def test_one_that_has_it_already_is_let_be(make: Make, library: Path) -> None:
    assert not make({"etc/a.service": f"[Service]\nEnvironment=LD_PRELOAD={library}\n{KEYS}"})


def test_one_with_its_own_environment_below_what_is_for_several(make: Make, library: Path) -> None:
    files = {"usr/service.d/gpu.conf": KEYS, "usr/a.service": "[Service]\nEnvironment=LD_PRELOAD=/a.so\n"}
    made = make({**files, "usr/b.service": ""})
    assert made.keys() == {"service", "a.service"}
    assert environment(made["a.service"])[0] == f'"LD_PRELOAD={library}:/a.so"'
    assert not any("After=" in text for text in made.values()), "the tree itself waits for some of them"


def test_a_socket_that_it_names_itself_stays(make: Make) -> None:
    [text] = make({"etc/a.service": f"[Service]\nEnvironment=GGROUP_SOCKET=/x\n{KEYS}"}).values()
    assert "GGROUP_SOCKET" not in text


@pytest.mark.parametrize("key", ["RootDirectory=/srv/a", "RootImage=/srv/a.raw"])
def test_one_with_another_root_sees_library_and_socket(make: Make, library: Path, key: str) -> None:
    [text] = make({"etc/a.service": f"[Service]\n{key}\n{KEYS}"}).values()
    assert f"BindReadOnlyPaths=-{library} -/run/ggroupfs\n" in text


def test_ours_does_not_wait_for_itself(make: Make) -> None:
    [text] = make({"etc/ggroupfs.service": KEYS}).values()
    assert "After=" not in text


@pytest.mark.parametrize(
    ("options", "socket"),
    [
        ("OPTIONS=\n", SOCKET),
        ("# OPTIONS=-o socket=/c\n", SOCKET),
        ("OPTIONS=-o units.wait=3,socket=/run/a.sock --gpu soft\n", "/run/a.sock"),
        ('OPTIONS="-o socket=/run/b.sock"\n', "/run/b.sock"),
    ],
)
def test_the_socket_is_that_of_the_service(make: Make, options: str, socket: str) -> None:
    [text] = make({"etc/a.service": KEYS}, defaults=options).values()
    assert f'"GGROUP_SOCKET={socket}"' in environment(text)


def test_without_that_file_it_is_the_unit_s(tmp_path: Path) -> None:
    assert socket_of(tmp_path / "none") == SOCKET
    unit = (Path(__file__).parents[2] / "systemd" / "ggroupfs.service").read_text()
    assert f"socket={SOCKET}," in unit


def test_without_a_library_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is generated: otherwise a service would complain of the missing library at each start."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "a.service").write_text(KEYS)
    monkeypatch.setattr(
        generator, "generate", lambda place: generate(place, [f"{tmp_path}/etc"], library=tmp_path / "no")
    )
    assert main([f"{tmp_path}/out", "", ""]) == 1
    assert capsys.readouterr().err == f"ggroupfs: {tmp_path}/no: there is no library for memory keys of services\n"
    assert not (tmp_path / "out").exists()


def test_a_fifo_among_unit_files_holds_up_no_boot(make: Make, tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    os.mkfifo(tmp_path / "etc" / "a.service")
    assert make({"usr/b.service": KEYS}).keys() == {"b.service"}


def test_nothing_is_imported_where_no_file_speaks_of_gpus() -> None:
    """Every daemon-reload waits for the generator."""
    code = """
import sys
from pathlib import Path
from ggroupfs.units.generator import generate
generate(Path("/nowhere"), [], Path("/nowhere"))
print(*sorted({"attr", "trio", "pyfuse3"} & sys.modules.keys()))
"""
    # Without site packages, since the hook of an editable installation has imports of its own.
    words = [sys.executable, "-S", "-c", code]
    place = Path(__file__).parents[2]
    done = subprocess.run(words, cwd=place, capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
