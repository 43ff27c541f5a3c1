"""The metrics for Prometheus: the numbers of the control files, over HTTP, in a file and on standard output."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from ggroupfs.client import Branch
from ggroupfs.text.names import slice_directory
from ggroupfs.text.origins import WORDS, origin
from ggroupfs.view import collector, figures, sensors
from ggroupfs.view.collector import TreeCollector
from tests.support.cgroups import cgroup, enter, slice_path
from tests.support.command import complaint, ggroupfs, ok
from tests.support.mounted import SECONDS, Mounted, Tenant, eventually, mounted, mountpoint
from tests.support.proc import stat_of

MIB = 1 << 20

Samples = dict[str, list[tuple[dict[str, str], float]]]


def samples(families: Iterable[Metric]) -> Samples:
    """Return labels and value of every sample, by name."""
    found: Samples = {}
    for family in families:
        for sample in family.samples:
            found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return found


def parsed(text: str) -> Samples:
    """Return the same for the text format."""
    return samples(text_string_to_metric_families(text))


def told(mount: Mounted, *options: str) -> Samples:
    """Return what the command prints."""
    return parsed(ok("metrics", "--mount", mount.path, *options))


def one(found: Samples, name: str, /, **labels: object) -> float:
    """Return the value of the only sample of that name with those labels."""
    wanted = {key: str(value) for key, value in labels.items()}.items()
    (value,) = [value for has, value in found[name] if wanted <= has.items()]
    return value


@contextlib.contextmanager
def standing(mount: Mounted) -> Iterator[Tenant]:
    """A tenant with something in each of its files, none of which changes any more."""
    with Tenant(mount, "--gmem", "64M", "--report", "0.05") as tenant:
        tenant.write("gmem.limit.high", "32M")
        tenant.write("gmem.limit.low", "1M")
        tenant.write("gmem.reclaim", "4M")
        tenant.write("compute.timeslice", "4.5")
        tenant.write("compute.weight", 70)
        tenant.write("compute.priority", 3)
        tenant.write("compute.max", "60000 50000")  # which limits nothing, so its counts stay
        tenant.write("compute.freeze", 1)
        os.kill(tenant.pid, signal.SIGSTOP)
        eventually(lambda: stat_of(tenant.pid)[0] == "T", "it stands")
        yield tenant


BESIDES = (
    *("events_total", "frozen_seconds_total", "resident_byte_seconds_total", "since_seconds"),
    *("off_runlist", "off_runlist_gr"),
)
"""Metrics of a group with a further label, with values that go on, or made of several lines of a file."""


def test_a_process_has_the_numbers_of_its_files(mount: Mounted) -> None:
    with standing(mount) as tenant:
        found = told(mount)
        who = {"gpu": 0, "uuid": (mount / "gpus/0/uuid").read_text().strip(), "pid": tenant.pid}
        memory, work = tenant.flat("gmem.stat"), tenant.flat("gcgroup.stat")
        assert memory["swapout_bytes"] > 0
        expected = {
            "resident_bytes": tenant.number("gmem.current"),
            "swap_bytes": tenant.number("gmem.swap.current"),
            "peak_bytes": tenant.number("gmem.peak"),
            "swap_peak_bytes": tenant.number("gmem.swap.peak"),
            "limit_high_bytes": 32 * MIB,
            "limit_max_bytes": math.inf,
            "over_limit": tenant.flat("gmem.events")["over"],
            "past_library": tenant.flat("gmem.events")["past"],
            "limit_low_bytes": MIB,
            "swap_max_bytes": math.inf,
            "swapin_bytes_total": memory["swapin_bytes"],
            "swapout_bytes_total": memory["swapout_bytes"],
            "move_seconds_total": memory["move_usec"] / 1e6,
            "timeslice_seconds": 0.0045,
            "frozen": 1,
            "populated": 1,
            "migrations_total": 0,
            "undone_total": 0,
            "kernels_submitted_total": work["submitted"],
            "kernels_finished_total": work["finished"],
            "gpu_losses_total": 0,
            "weight": 70,
            "priority": 3,
            "quota_seconds": 0.06,
            "quota_period_seconds": 0.05,
            "sms_max": math.inf,
            "periods_total": work["nr_periods"],
            "gpu_seconds_total": work["gpu_usec"] / 1e6,
            "busy_seconds_total": work["busy_usec"] / 1e6,
            "busy_sampled_seconds_total": 0,
            "throttles_total": work["nr_throttled"],
            "throttled_seconds_total": work["throttled_usec"] / 1e6,
            "managed": 1,
        }
        assert {name: one(found, f"ggroup_process_{name}", **who) for name in expected} == expected
        events = tenant.flat("gmem.events")
        del events["over"], events["past"]  # states, not counts: over_limit, past_library
        assert events["reclaim"] > 0
        assert {e: one(found, "ggroup_process_events_total", event=e, **who) for e in events} == events
        reasons = {"freeze": 1, "turn": 0, "quota": 0, "busy": 0, "gang": 0, "migration": 0}
        assert {r: one(found, "ggroup_process_off_runlist", reason=r, **who) for r in reasons} == reasons
        assert one(found, "ggroup_process_off_runlist_gr", **who) == 0
        told_of_it = {name for name in found if name.startswith("ggroup_process_")}
        assert told_of_it == {f"ggroup_process_{name}" for name in (*expected, *BESIDES)}
        frozen = one(found, "ggroup_process_frozen_seconds_total", **who)
        assert 0 < frozen <= work["frozen_usec"] / 1e6, (
            "it was when that was told, and was for longer when the file was read"
        )
        (labels,) = [has for has, _ in found["ggroup_process_frozen"] if has["pid"] == str(tenant.pid)]
        assert labels["comm"] == Path(f"/proc/{tenant.pid}/comm").read_text().strip()
        assert set(labels) - {*WORDS} == {"gpu", "uuid", "pid", "slice", "comm"}


def test_who_is_kept_off_the_runlist(mount: Mounted) -> None:
    """Two programs fill what a third leaves: how often and how long each is off, in seconds; the third never is."""
    with (
        Tenant(mount, "--gmem", "1M") as first,
        Tenant(mount, "--gmem", "1M") as second,
        Tenant(mount, "--gmem", "1M") as third,
    ):
        first.write("compute.priority", 0)
        both = (second, third)

        def throttled() -> list[int]:
            return [tenant.flat("gcgroup.stat")["throttled_usec"] for tenant in both]

        eventually(lambda: all(throttled()), "each has waited for the other")
        before = throttled()
        found = told(mount)
        after = throttled()
        seconds = [one(found, "ggroup_process_throttled_seconds_total", pid=tenant.pid) for tenant in both]
        assert all(low <= round(1e6 * value) <= high for low, value, high in zip(before, seconds, after, strict=True))
        assert all(one(found, "ggroup_process_throttles_total", pid=tenant.pid) >= 1 for tenant in both)
        assert one(found, "ggroup_process_throttles_total", pid=first.pid) == 0


def test_a_slice_has_its_own_and_what_was_ever_done_in_it(mount: Mounted) -> None:
    """It is a counter, since it does not fall when a process leaves."""
    with cgroup("ggroupmetrics.slice") as place, standing(mount) as tenant:
        here = mount / slice_directory(slice_path(place)) / "0"
        enter(tenant.pid, place)
        eventually((here / "compute.events").exists, "its slice appears")
        (here / "gmem.limit.high").write_text("48M")
        path = f"/{slice_path(place)}"
        text = ok("metrics", "--mount", mount.path)
        found = parsed(text)
        assert one(found, "ggroup_slice_resident_bytes", slice=path) == int((here / "gmem.current").read_text())
        assert one(found, "ggroup_slice_limit_high_bytes", slice=path) == 48 * MIB
        assert one(found, "ggroup_slice_populated", slice=path) == 1
        finished = int(re.findall(r"^finished (\d+)$", (here / "gcgroup.stat").read_text(), re.MULTILINE)[0])
        assert one(found, "ggroup_slice_kernels_finished_total", slice=path) == finished
        assert path not in [has["slice"] for has, _ in found.get("ggroup_slice_timeslice_seconds", [])], "default"
        assert "# TYPE ggroup_slice_kernels_finished_total counter" in text
        assert "# TYPE ggroup_process_kernels_finished_total counter" in text
        assert one(found, "ggroup_process_frozen", pid=tenant.pid, slice=path) == 1
        assert one(found, "ggroup_slice_off_runlist", slice=path, reason="freeze") == 1, "the processes in it that are"
        assert "# TYPE ggroup_slice_off_runlist gauge" in text

        found = told(mount, "--no-processes")
        assert not [name for name in found if name.startswith("ggroup_process_")]
        assert one(found, "ggroup_slice_limit_high_bytes", slice=path) == 48 * MIB
        tenant.kill()
        eventually(lambda: "tsgs 0" in (here / "gcgroup.stat").read_text(), "its end is known")
        found = told(mount)
        assert one(found, "ggroup_slice_kernels_finished_total", slice=path) == finished, "of one that is gone"
    eventually(lambda: _removed(here.parent), "the slice can be removed")


CONTAINER = "0f6ad2a1c5c4d2f9" * 4
ORIGINS = (
    "/system.slice/slurmstepd.scope/job_123/step_0",
    f"/kubepods.slice/kubepods-pod6d1f0c7e_98f4_4a3c_8c43_0a3a0b9c1d2e.slice/cri-containerd-{CONTAINER}.scope",
    f"/system.slice/docker-{CONTAINER}.scope",
    f"/machine.slice/libpod-{CONTAINER}.scope",
    "/system.slice/trainer.service",
    "/user.slice/user-1000.slice/user@1000.service/app.slice/notebook.service",
)
"""A path of each meaningful kind."""


@contextlib.contextmanager
def made(mount: Mounted, paths: Iterable[str]) -> Iterator[None]:
    """Make slices for cgroups that do not exist, and the slices above them."""
    levels = {level for path in paths for level in (Path(path), *Path(path).parents[:-1])}
    directories = sorted(mount / slice_directory(str(level)) for level in levels)
    for directory in directories:
        directory.mkdir()
    yield
    for directory in reversed(directories):
        directory.rmdir()


def test_where_a_slice_comes_from(mount: Mounted) -> None:
    """As its path tells, with all labels, with some, and with none."""
    with made(mount, ORIGINS):
        text = ok("metrics", "--mount", mount.path)
        assert promtool("metrics", text).stdout == ""
        for words, found in (
            (WORDS, parsed(text)),
            (("job", "user"), told(mount, "--labels", "job,user")),
            ((), told(mount, "--labels", "none", "--no-processes")),
        ):
            for path in ORIGINS:
                (labels,) = [has for has, _ in found["ggroup_slice_populated"] if has["slice"] == path]
                expected = {word: value for word, value in origin(path).items() if word in words}
                assert {name: value for name, value in labels.items() if name in WORDS} == expected
                assert one(found, "ggroup_slice_events_total", event="oom", slice=path, **expected) == 0
    assert "'nonsense' is not a label" in ggroupfs("metrics", "--labels", "job,nonsense").stderr


def _removed(path: Path) -> bool:
    if path.exists():
        path.rmdir()
    return not path.exists()


def test_a_gpu_and_what_serves(mount: Mounted) -> None:
    with standing(mount):
        found = told(mount)
        gpu = mount / "gpus/0"
        uuid = (gpu / "uuid").read_text().strip()
        assert one(found, "ggroup_gpu_present", gpu=0, uuid=uuid) == 1
        assert one(found, "ggroup_gpu_losses_total", gpu=0, uuid=uuid) == 0
        assert one(found, "ggroup_gpu_capacity_bytes", gpu=0, uuid=uuid) == int((gpu / "gmem.capacity").read_text())
        assert one(found, "ggroup_gpu_resident_bytes", gpu=0, uuid=uuid) == int((gpu / "gmem.current").read_text())
        assert one(found, "ggroup_gpu_info", gpu=0, uuid=uuid, name="ggroupfs software GPU", pci="none") == 1
        facts = dict(line.split(" ", 1) for line in (mount / "ggroup.backend").read_text().splitlines())
        facts["backend"] = facts.pop("gpu")
        for name in [name for name in facts if "." in name]:  # no label has a dot
            facts[name.replace(".", "_")] = facts.pop(name)
        assert found["ggroup_info"] == [(facts, 1)]
        for line in (mount / "ggroup.capabilities").read_text().splitlines():
            control, verdict = line.split()
            assert one(found, "ggroup_capability_info", control=control) == 1
            assert one(found, "ggroup_capability_info", control=control, verdict=verdict) == 1
        assert one(found, "ggroup_up") == 1
        assert one(found, "ggroup_scrape_errors") == 0
        assert 0 < one(found, "ggroup_scrape_duration_seconds") < 60


# Ways of export


@contextlib.contextmanager
def served(mount: Path, address: str) -> Iterator[str]:
    """Run `metrics --listen`; yield the address that it prints."""
    words = [sys.executable, "-m", "ggroupfs", "metrics", "--mount", os.fspath(mount), "--listen", address]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stderr is not None
    try:
        yield server.stdout.readline().strip()
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(20) == 130
        assert server.stderr.read() == ""
        server.stdout.close()
        server.stderr.close()


def get(url: str) -> tuple[str, str]:
    """Return content type and text of a page."""
    with urllib.request.urlopen(url, timeout=SECONDS) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


@pytest.mark.parametrize(("address", "start"), [("127.0.0.1:0", "http://127.0.0.1:"), ("[::1]:0", "http://[::1]:")])
def test_over_http(mount: Mounted, address: str, start: str) -> None:
    """Each scrape reads the tree anew."""
    if "::" in address and not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("this machine has no IPv6")
    with served(mount.path, address) as url, Tenant(mount, "--gmem", "16M") as tenant:
        assert url.startswith(start)
        assert url.endswith("/metrics")
        kind, text = get(url)
        assert kind.startswith("text/plain; version=")
        assert one(parsed(text), "ggroup_process_limit_high_bytes", pid=tenant.pid) == math.inf
        assert not re.search("temperature|power", text), "a software GPU has no sensors"
        tenant.write("gmem.limit.high", "8M")
        assert one(parsed(get(url)[1]), "ggroup_process_limit_high_bytes", pid=tenant.pid) == 8 * MIB
        with pytest.raises(urllib.error.HTTPError, match="404") as missing:
            get(url.removesuffix("/metrics") + "/else")
        missing.value.close()


def test_a_client_that_hangs_up_is_no_news(mount: Mounted) -> None:
    """Nothing comes on standard error, which `served` checks, and the next client is answered."""
    with served(mount.path, "127.0.0.1:0") as url:
        host, _, port = url.removeprefix("http://").removesuffix("/metrics").partition(":")
        for said in (b"", b"GET /met", b"nonsense\r\n\r\n", b"GET /metrics HTTP/1.0\r\n\r\n"):
            client = socket.create_connection((host, int(port)))
            client.sendall(said)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close(2) sends a reset
            client.close()
        assert one(parsed(get(url)[1]), "ggroup_up") == 1


def test_over_http_while_the_tree_comes_and_goes(place: Path) -> None:
    """The exporter outlives the mount, and exports what is there."""
    with served(place, "127.0.0.1:0") as url:
        assert parsed(get(url)[1])["ggroup_up"] == [({}, 0)]
        with mounted(place):
            assert parsed(get(url)[1])["ggroup_up"] == [({}, 1)]
        text = get(url)[1]
        assert parsed(text)["ggroup_up"] == [({}, 0)]
        assert "ggroup_gpu" not in text


@pytest.fixture
def place() -> Iterator[Path]:
    """A mountpoint with nothing on it."""
    with mountpoint() as path:
        yield path


def counters(found: Samples) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return every counter, by its name and labels."""
    return {
        (name, frozenset(labels.items())): value
        for name, several in found.items()
        if name.endswith("_total")
        for labels, value in several
    }


def test_no_counter_goes_back_over_an_upgrade(place: Path, tmp_path: Path) -> None:
    """Counters of GPUs, slices and processes, after kernels, moves of memory and a program, a freeze and a lost GPU."""
    with (
        mounted(place, "soft.gpus=2", f"soft.faults={tmp_path}", expect_errors=["GPU 0 is lost"]) as mount,
        subprocess.Popen(["sleep", "600"]) as still,
        contextlib.ExitStack() as stack,
        cgroup("ggroupcounters.slice") as group,
    ):
        stack.callback(still.kill)
        here = mount / slice_directory(slice_path(group))
        here.mkdir(parents=True)
        (place / str(still.pid)).mkdir()
        (place / f"{still.pid}/0/compute.freeze").write_text("1")
        with Tenant(mount, "--gmem", "64M", "--kernel", "1ms", "--report", "0.05") as tenant:
            enter(tenant.pid, group)
            eventually(lambda: int((here / "0/gmem.current").read_text()), "it is in the slice")
            tenant.write("gmem.limit.high", "32M")
            done = tenant.flat("gcgroup.stat")["finished"]
            eventually(lambda: tenant.flat("gcgroup.stat")["finished"] > done, "it has done something there")
            tenant.write("compute.migrate", 1)
        (tmp_path / "0").touch()
        eventually(lambda: "present 0" in (place / "gpus/0/gpu.events").read_text(), "it is lost")
        eventually(lambda: not [member for member in mount.members() if member.pid == tenant.pid], "it has ended")
        before = counters(told(mount))
        grown = {name for (name, _), value in before.items() if value}
        assert grown >= {f"ggroup_slice_{name}_total" for name in ("migrations", "gpu_losses", "kernels_finished")}
        assert grown >= {"ggroup_gpu_losses_total", "ggroup_process_gpu_losses_total"}
        assert grown >= {"ggroup_process_frozen_seconds_total", "ggroup_slice_events_total"}
        ok("upgrade", place)
        after = counters(told(mount))
        assert before.keys() <= after.keys()
        assert {key: (value, after[key]) for key, value in before.items() if after[key] < value} == {}


def test_a_textfile_is_replaced_and_never_half_there(mount: Mounted, tmp_path: Path) -> None:
    """A reader of the old file reads all of it; nothing else is left in the directory."""
    file = tmp_path / "ggroup.prom"
    assert ok("metrics", "--mount", mount.path, "--textfile", file) == ""
    old = file.read_bytes()
    with file.open("rb", buffering=0) as reader, Tenant(mount, "--gmem", "16M") as tenant:
        start = reader.read(10)
        assert ok("metrics", "--mount", mount.path, "--textfile", file) == ""
        assert start + reader.read() == old
        assert os.fstat(reader.fileno()).st_nlink == 0, "the old one was written into"
        assert one(parsed(file.read_text()), "ggroup_process_resident_bytes", pid=tenant.pid) == 16 * MIB
    assert os.listdir(tmp_path) == ["ggroup.prom"]
    (tmp_path / "taken").mkdir()
    assert "Is a directory" in complaint("metrics", "--mount", mount.path, "--textfile", tmp_path / "taken", code=1)
    assert sorted(os.listdir(tmp_path)) == ["ggroup.prom", "taken"], "it left its temporary file behind"


def test_no_tree(place: Path, tmp_path: Path) -> None:
    """The output is written all the same, and says that nothing is up; so does the exit code."""
    result = ggroupfs("metrics", "--mount", place)
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert parsed(result.stdout)["ggroup_up"] == [({}, 0)]
    assert "no ggroup tree" in complaint("metrics", "--mount", place, "--textfile", tmp_path / "f.prom", code=1)
    assert parsed((tmp_path / "f.prom").read_text())["ggroup_up"] == [({}, 0)]


@pytest.mark.parametrize("address", ["9740", ":9740", "::1:9740", "[::1]", "host:", "host:65536", "host:+1", "a:b"])
def test_no_address(address: str) -> None:
    result = ggroupfs("metrics", "--listen", address)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


def test_a_port_that_is_taken(mount: Mounted) -> None:
    with served(mount.path, "127.0.0.1:0") as url:
        port = url.removesuffix("/metrics").rpartition(":")[2]
        assert "in use" in complaint("metrics", "--mount", mount.path, "--listen", f"127.0.0.1:{port}", code=1)


def promtool(what: str, text: str) -> subprocess.CompletedProcess[str]:
    """Run `promtool check WHAT` on a text. It comes with Debian's package prometheus, which only this needs."""
    program = shutil.which("promtool", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert program is not None, "promtool is not installed: it is in Debian's package prometheus"
    words = [program, "check", what, *(["/dev/stdin"] if what == "rules" else [])]
    return subprocess.run(words, input=text, capture_output=True, text=True, check=False)


def test_it_needs_no_rights(mount: Mounted) -> None:
    """Except to reach the program itself, which a test cannot ask for: so the test runs as an unprivileged user."""
    with Tenant(mount, "--gmem", "16M") as tenant:
        child = os.fork()
        if not child:
            try:
                os.setgid(65534)
                os.setuid(65534)
                found = samples(TreeCollector(mount.path).collect())
                os._exit(int(one(found, "ggroup_process_resident_bytes", pid=tenant.pid) != 16 * MIB))
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0


def test_in_another_pid_namespace(mount: Mounted) -> None:
    """/proc there is about other processes: the pids are the tree's, and no names of other processes are reported."""
    with Tenant(mount, "--gmem", "16M") as tenant:
        words = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-m", "ggroupfs", "metrics"]
        result = subprocess.run(
            [*words, "--mount", mount.path], capture_output=True, text=True, timeout=60, check=False
        )
        assert (result.returncode, result.stderr) == (0, "")
        found = parsed(result.stdout)
        assert one(found, "ggroup_process_resident_bytes", pid=tenant.pid, slice="", comm="") == 16 * MIB
        assert one(found, "ggroup_scrape_errors") == 0


def test_promtool_has_nothing_to_say(mount: Mounted) -> None:
    """Names, units and types follow Prometheus's conventions."""
    with cgroup("ggroupmetrics.slice") as place, Tenant(mount, "--gmem", "16M") as tenant:
        enter(tenant.pid, place)
        here = mount / slice_directory(slice_path(place))
        eventually(here.exists, "its slice appears")
        text = ok("metrics", "--mount", mount.path)
        assert "ggroup_slice_resident_bytes{" in text
        result = promtool("metrics", text)
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_the_operators_guide_names_metrics_that_there_are(mount: Mounted) -> None:
    """The guide's alert rules are valid, and are about metrics that exist."""
    guide = (Path(__file__).resolve().parents[2] / "docs" / "operators.md").read_text()
    (rules,) = re.findall(r"^```\n(groups:\n.*?)^```", guide, re.DOTALL | re.MULTILINE)
    result = promtool("rules", rules)
    assert result.returncode == 0, result
    assert re.search(r"SUCCESS: [6-9] rules found", result.stdout), result.stdout
    with cgroup("ggroupmetrics.slice") as place, Tenant(mount, "--gmem", "16M") as tenant:
        enter(tenant.pid, place)
        eventually((mount / slice_directory(slice_path(place))).exists, "its slice appears")
        found = set(told(mount))
    there_are = {row.name + "_total" * row.counter for row in collector.ROWS} | {*BESIDES}  # other GPUs export more
    found |= {sensors.TEMPERATURE, sensors.POWER}  # so do NVIDIA GPUs, over HTTP
    named = set(re.findall(r"\bggroup_[a-z_]+[a-z]\b", guide)) - {"ggroup_process", "ggroup_slice"}
    assert "ggroup_up" in named
    assert named <= found | {f"ggroup_process_{name}" for name in there_are}
    listed = guide.partition("| `ggroup_process_*`, `ggroup_slice_*`")[2].partition("\n\n")[0]
    cells = " ".join(line.split("|")[1] for line in listed.splitlines()[1:])
    short = set(re.findall(r"`([a-z][a-z_]+)(?:\{(?:event|reason)\})?`", cells))
    assert short == there_are
    assert {name.removeprefix("ggroup_process_") for name in found if name.startswith("ggroup_process_")} < short


# Failures during a scrape


def test_a_process_that_exits_while_it_is_read_is_left_out(mount: Mounted, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is no error; none of its metrics is exported, and those of the others are."""
    with Tenant(mount, "--gmem", "16M") as leaving, Tenant(mount, "--gmem", "16M") as staying:
        path = leaving.group
        content, half_way = figures.content, collector.FILES[len(collector.FILES) // 2]

        def leave(file: str) -> str:
            if file == f"{path}/{half_way}":
                leaving.kill()
                eventually(lambda: not path.exists(), "it is gone")
            return content(file)

        monkeypatch.setattr(figures, "content", leave)
        found = samples(TreeCollector(mount.path).collect())
        assert leaving._process.returncode == -signal.SIGKILL, "the scrape did not get that far"
        assert {has["pid"] for has, _ in found["ggroup_process_populated"]} == {str(staying.pid)}
        assert str(leaving.pid) not in [has.get("pid") for values in found.values() for has, _ in values]
        assert one(found, "ggroup_scrape_errors") == 0
        assert one(found, "ggroup_up") == 1


def test_a_group_that_cannot_be_read_is_counted(mount: Mounted, monkeypatch: pytest.MonkeyPatch) -> None:
    with Tenant(mount, "--gmem", "16M") as broken, Tenant(mount, "--gmem", "16M") as whole:
        figures_of = collector.figures_of

        def fail(group: Path, files: Iterable[str]) -> figures.Figures:
            if group == broken.group:
                raise OSError(errno.EIO, "broken")
            return figures_of(group, files)

        monkeypatch.setattr(collector, "figures_of", fail)
        found = samples(TreeCollector(mount.path).collect())
        assert one(found, "ggroup_scrape_errors") == 1
        assert {has["pid"] for has, _ in found["ggroup_process_populated"]} == {str(whole.pid)}


def test_a_tree_that_goes_while_it_is_read(mount: Mounted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of what was read before is exported: half a tree would look as if everything had stopped."""

    def gone(_: Path) -> Iterator[Branch]:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    monkeypatch.setattr(collector, "branches", gone)
    found = samples(TreeCollector(mount.path).collect())
    assert found["ggroup_up"] == [({}, 0)]
    assert set(found) == {"ggroup_up", "ggroup_scrape_duration_seconds", "ggroup_scrape_errors"}


def test_one_scrape_at_a_time(mount: Mounted, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stuck scrape keeps the next ones from the tree; they wait, report that it is not up, and end."""
    monkeypatch.setattr(collector, "PATIENCE_S", 0.01)
    here = TreeCollector(mount.path)
    assert one(samples(here.collect()), "ggroup_up") == 1
    with here._turn:
        found = samples(here.collect())
    assert found["ggroup_up"] == [({}, 0)]
    assert "ggroup_gpu_info" not in found
    assert one(samples(here.collect()), "ggroup_up") == 1


NAMED = """
import sys
from backend.soft.client import Device
with open("/proc/self/comm", "wb") as file: file.write(b'a"b\\\\\\xff{}')
with Device(sys.argv[1]) as device:
    device.join()
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_names_of_any_bytes(mount: Mounted) -> None:
    """Quotes, backslashes and invalid UTF-8 in names of programs and cgroups break nothing, and stay distinct."""
    with contextlib.ExitStack() as stack:
        above = stack.enter_context(cgroup("ggroupmetrics.slice"))
        names = [b'q"uo\\te', b"\xfe", b"\xff", b"7"]
        for name in names:
            os.mkdir(os.fsencode(above) + b"/" + name)
        pids = []
        for name in names:
            words = [sys.executable, "-c", NAMED, os.fspath(mount.path)]
            process = stack.enter_context(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            enter(process.pid, Path(os.fsdecode(os.fsencode(above) + b"/" + name)))
            pids.append(process.pid)
        tree = os.fsencode(mount / slice_directory(slice_path(above)))
        eventually(lambda: set(os.listdir(tree)) == {b"0", *names[:-1], b"_7"}, "all slices are there")
        found = told(mount)
        start = f"/{slice_path(above)}"
        shown = [f'{start}/q"uo\\te', f"{start}/\\xfe", f"{start}/\\xff", f"{start}/7"]
        assert {has["slice"] for has, _ in found["ggroup_slice_populated"]} >= {start, *shown}
        rows = json.loads(ok("show", "--json", "--mount", mount.path))
        assert set(pids) <= {row["pid"] for row in rows}, "a name stopped it"
        for pid, path in zip(pids, shown, strict=True):
            raw = Path(f"/proc/{pid}/comm").read_bytes()  # the kernel escapes backslashes there
            assert b"\xff{}" in raw
            comm = raw.decode(errors="backslashreplace").strip()
            assert one(found, "ggroup_process_populated", pid=pid, slice=path, comm=comm) == 1
