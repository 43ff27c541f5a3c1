"""`ggroupfs policy slo` over a real mount: programs' reports become weights and priorities, until the policy's end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from backend.process.identity import Slice, cgroup_of
from ggroupfs.client import Latencies
from ggroupfs.errors import UsageError
from ggroupfs.policies.config import Table
from ggroupfs.policies.slo.core import Bounds
from ggroupfs.policies.slo.reports import Desk, Place
from ggroupfs.policies.slo.samples import Interval, Statistic
from ggroupfs.policies.slo.settings import Settings
from tests.support.cgroups import cgroup, enter, slice_path
from tests.support.command import complaint
from tests.support.mounted import BUSY, Mounted, Tenant, eventually, mounted
from tests.support.page import POLICIES, section
from tests.support.policy_program import PolicyProgram

CONFIG = """
socket = "{socket}"
interval = "20ms"
window = 3
cooldown = "100ms"

[[group]]
name = "a"
pid = {critical}
upper = "50ms"
lower = "20ms"
share = 0.8

[[best_effort]]
pid = {batch}
"""
OPTIONS = ("--gmem", "0", *BUSY)


class Reporter:
    """Reports the latency of a group again and again, until stopped."""

    def __init__(self, path: Path, group: str | None = "a") -> None:
        self.seconds = 0.03
        """Latency that it reports, in seconds."""
        self._latencies = Latencies(group, path)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._end.wait(0.005):
            self._latencies.report(self.seconds)

    def __enter__(self) -> Reporter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._latencies.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Path of the socket."""
    return tmp_path / "slo.sock"


@pytest.fixture
def pair(mount: Mounted) -> Iterator[tuple[Tenant, Tenant]]:
    with Tenant(mount, *OPTIONS) as critical, Tenant(mount, *OPTIONS) as batch:
        yield critical, batch


@pytest.fixture
def configured(pair: tuple[Tenant, Tenant], path: Path, tmp_path: Path) -> Path:
    """A configuration for both."""
    file = tmp_path / "slo.toml"
    file.write_text(CONFIG.format(socket=path, critical=pair[0].pid, batch=pair[1].pid))
    return file


def quota_of(mount: Mounted, tenant: Tenant) -> str:
    """Return the content of its compute.max."""
    return (mount.group(tenant.pid) / "compute.max").read_text().strip()


def places(pair: Sequence[Tenant]) -> list[tuple[int, int]]:
    """Return weights and priorities."""
    return [(one.number("compute.weight"), one.number("compute.priority")) for one in pair]


def test_shares_rise_and_fall_and_are_taken_back(
    mount: Mounted, pair: tuple[Tenant, Tenant], configured: Path, path: Path
) -> None:
    pair[0].write("compute.weight", 150)
    with policy_in(mount, configured) as policy, Reporter(path) as reporter:
        assert places(pair) == [(8000, 8), (2000, 8)]
        reporter.seconds = 0.09
        told = until(policy, "share", 0.9)
        assert (told["group"], told["gpu"], told["was"]) == ("a", 0, 0.8)
        assert told["latency_ms"] == pytest.approx(90, rel=0.5)
        until(policy, "share", 1.0)
        told = until(policy, "migrate", 1.0)
        assert (told["group"], told["gpu"], told["missing"], told["latency_ms"]) == ("a", 0, 0.8, 90.0)
        assert places(pair) == [(10_000, 7), (1, 8)], "it has all of it, and the other fills"
        reporter.seconds = 0.03
        assert until(policy, "stay") == {"event": "stay", "group": "a", "gpu": 0}
        reporter.seconds = 0.01
        until(policy, "share", 0.95)
        until(policy, "share", 0.9)
        policy.send_signal(signal.SIGTERM)
        _, errors = policy.communicate()
        words = "a: GPU 0 has no share left for it: it should migrate; 0.8 GPU is missing"
        assert (policy.returncode, errors) == (0, f"ggroupfs: {words}\n")
        assert places(pair) == [(150, 8), (100, 8)]
    assert not path.exists()


def test_shares_as_quotas(mount: Mounted, pair: tuple[Tenant, Tenant], configured: Path, path: Path) -> None:
    """Ceilings rise and fall, also that of a program alone; weights stay as they are."""
    critical, batch = pair
    critical.write("compute.max", "max 50000")
    configured.write_text(f'lever = "quota"\nperiod = "20ms"\n{configured.read_text()}')

    def quotas() -> list[str]:
        return [quota_of(mount, one) for one in pair]

    with policy_in(mount, configured) as policy, Reporter(path) as reporter:
        assert quotas() == ["16000 20000", "4000 20000"]
        reporter.seconds = 0.09
        until(policy, "share", 0.9)
        eventually(lambda: quotas()[0] != "16000 20000", "it has more")
        until(policy, "share", 1.0)
        until(policy, "migrate", 1.0)
        assert quotas() == ["max 20000", "1000 20000"]
        assert places(pair) == [(100, 7), (100, 8)]
        batch.kill()
        reporter.seconds = 0.01
        until(policy, "share", 0.9)
        assert quota_of(mount, critical) in ("19000 20000", "18000 20000")
        policy.send_signal(signal.SIGTERM)
        policy.communicate()
        assert policy.returncode == 0
        assert quota_of(mount, critical) == "max 50000"
        assert places(pair[:1]) == [(100, 8)]


SERVER = """
import sys
from backend.soft.client import Device
from ggroupfs.client import Latencies
from tests.support.stopwatch import Stopwatch
mount, path = sys.argv[1:]
latencies = Latencies(None, path)
with Device(mount) as device:
    tsg, done = device.join(), 0
    while True:
        watch, done = Stopwatch(), done + 1
        device.launch(tsg, 1, 20_000)
        while device.finished[tsg] < done:
            device.take_progress(1)
        took = watch.seconds
        latencies.report(took)
        print(took, flush=True)
"""


SERVED = """
socket = "{socket}"
interval = "100ms"
cooldown = "500ms"

[[group]]
name = "server"
pid = {critical}
upper = "35ms"
lower = "1ms"
statistic = "mean"
share = 0.2
scale_up = 0.2

[[best_effort]]
pid = {batch}
"""


def test_a_server_has_its_latency_kept(mount: Mounted, tmp_path: Path, path: Path) -> None:
    """It computes for 20 ms and is to answer within 35, beside a program that always has work. It reports by itself,
    without being told its group. With the initial fifth of the GPU it would take some 100 ms."""
    with ended("-c", SERVER, mount.path, path) as server, Tenant(mount, *OPTIONS) as batch:
        latency(server, 1)
        file = tmp_path / "slo.toml"
        file.write_text(SERVED.format(socket=path, critical=server.pid, batch=batch.pid))
        with PolicyProgram(mount.path, "slo", file) as policy:
            assert batch.number("compute.weight") == 8000
            told = policy.until("share", was=0.2)
            assert told["latency_ms"] > 35
            eventually(lambda: max(latency(server, 10), latency(server, 10)) <= 0.04, "its latency is within its bound")


MOVED = """
socket = "{socket}"
interval = "100ms"
cooldown = "300ms"
migrate = {migrate}

[[group]]
name = "server"
pid = {critical}
upper = "35ms"
lower = "1ms"
statistic = "mean"
share = 0.2
most = 0.3
"""


@pytest.fixture
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    """A mounted tree with two software GPUs."""
    with mounted(tmp_path_factory.mktemp("ggroup"), "soft.gpus=2", "soft.gmem=1G") as mount:
        yield mount


@pytest.mark.parametrize("who", ["neighbour", "itself", "none has room", "nobody"])
def test_where_no_share_helps_somebody_is_moved(two: Mounted, tmp_path: Path, path: Path, who: str) -> None:
    """The server may have three tenths, and misses its bound with that. So its best-effort neighbour is moved, or the
    server where there is no room for the neighbour. All settings are taken back, wherever they are."""
    memory = "600M" if who == "itself" else "64M"
    with (
        Tenant(two, "--gpu", "1", "--gmem", "1000M" if who == "none has room" else "500M", "--depth", "0"),
        ended("-c", SERVER, two.path, path) as server,
        Tenant(two, *OPTIONS, "--gmem", memory) as batch,
    ):
        latency(server, 1)
        file = tmp_path / "slo.toml"
        text = MOVED.format(socket=path, critical=server.pid, migrate=str(who != "nobody").lower())
        file.write_text(text + f"[[best_effort]]\npid = {batch.pid}\n")
        batch.write("compute.weight", 170)
        command = ("-m", "ggroupfs", "policy", "slo", "--config", file, "--mount", two.path)
        with ended(*command) as policy:
            until(policy, "migrate", 0.3)
            if who == "nobody":
                assert one_line(policy) == "server: GPU 0 has no share left for it: it should migrate"
            elif who == "none has room":
                assert one_line(policy) == "server: no move from GPU 0 would help it now"
            else:
                told = until(policy, "moved")
                assert (told["gpu"], told["to"]) == (0, 1)
                assert until(policy, "stay")["group"] == "server"
                if who == "itself":
                    told = until(policy, "share")
                    assert (told["gpu"], told["was"]) == (1, 0)
                else:
                    eventually(lambda: (two.group(batch.pid, 1) / "compute.weight").read_text() == "10000\n", "all")
                latency(server, 150)
                # The daemon, too, waits for a processor where others keep them busy: that may be in any 50.
                eventually(lambda: latency(server, 50) <= 0.035, "its latency is within its bound")
            policy.send_signal(signal.SIGTERM)
            assert policy.wait() == 0
        places = [os.listdir(two / pid) for pid in (server.pid, batch.pid)]
        assert places == {"neighbour": [["0"], ["1"]], "itself": [["1"], ["0"]]}.get(who, [["0"], ["0"]])
        for pid, (gpu,), weight in zip((server.pid, batch.pid), places, (100, 170), strict=True):
            assert (two.group(pid, int(gpu)) / "compute.weight").read_text() == f"{weight}\n"


def test_a_slice_that_was_moved_has_nothing_left_behind(two: Mounted, tmp_path: Path, path: Path) -> None:
    """On the GPU that it left, its own weight is back at once, and on the other one in the end."""
    with (
        cgroup("ggroupslo.slice") as batch,
        ended("-c", SERVER, two.path, path) as server,
        Tenant(two, *OPTIONS, "--gmem", "64M") as tenant,
    ):
        latency(server, 1)
        enter(tenant.pid, batch)
        here = two / "slice" / slice_path(batch)
        eventually(lambda: (here / "0" / "gmem.current").read_text() == f"{64 << 20}\n", "it is in its slice")
        (here / "0" / "compute.weight").write_text("170\n")
        file = tmp_path / "slo.toml"
        text = MOVED.format(socket=path, critical=server.pid, migrate="true")
        file.write_text(text + f'[[best_effort]]\nslice = "/{slice_path(batch)}"\n')
        with PolicyProgram(two.path, "slo", file) as policy:
            assert (here / "0" / "compute.weight").read_text() == "8000\n"
            policy.until("moved")
            eventually(lambda: (here / "1" / "compute.weight").read_text() == "10000\n", "it has all of the other")
            assert (here / "0" / "compute.weight").read_text() == "170\n"
        assert (here / "1" / "compute.weight").read_text() == "100\n"


def one_line(policy: subprocess.Popen[str]) -> str:
    """Return its output on standard error, up to a semicolon."""
    assert policy.stderr is not None
    return policy.stderr.readline().removeprefix("ggroupfs: ").strip().partition(";")[0]


def test_what_somebody_else_wrote_stays(
    mount: Mounted, pair: tuple[Tenant, Tenant], configured: Path, path: Path
) -> None:
    with PolicyProgram(mount.path, "slo", configured):
        pair[1].write("compute.weight", 77)
    assert places(pair) == [(100, 8), (77, 8)]


def test_groups_that_come_and_go(mount: Mounted, pair: tuple[Tenant, Tenant], tmp_path: Path, path: Path) -> None:
    """A newcomer gets its share, one that goes leaves it to the others; the policy goes on."""
    file = tmp_path / "slo.toml"
    with Tenant(mount, *OPTIONS) as third:
        text = CONFIG.format(socket=path, critical=pair[0].pid, batch=pair[1].pid)
        text += f'[[group]]\nname = "b"\npid = {third.pid}\nupper = "1s"\nlower = "1ms"\nshare = 0.15\n'
        file.write_text(text)
        with PolicyProgram(mount.path, "slo", file) as policy, Reporter(path) as reporter:
            assert places(pair) == [(8000, 8), (500, 8)]
            assert third.number("compute.weight") == 1500
            reporter.seconds = 0.09
            told = policy.until("share", group="a", was=0.8)
            assert told["share"] == 0.85, "there is no more"
            third.kill()
            policy.until("share", group="a", share=0.95)
            pair[0].kill()
            eventually(lambda: pair[1].number("compute.weight") == 10_000, "all of it is for who is left")
    assert pair[1].number("compute.weight") == 100


@contextlib.contextmanager
def ended(*words: object) -> Iterator[subprocess.Popen[str]]:
    """Run a program, which is killed in the end."""
    command = [sys.executable, *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        try:
            yield program
        finally:
            program.kill()


def latency(server: subprocess.Popen[str], count: int) -> float:
    """Return the mean latency of the next requests of SERVER, in seconds."""
    assert server.stdout is not None
    return sum(float(server.stdout.readline()) for _ in range(count)) / count


@contextlib.contextmanager
def policy_in(mount: Mounted, config: Path) -> Iterator[subprocess.Popen[str]]:
    """Run the policy, which may write to standard error."""
    with ended("-m", "ggroupfs", "policy", "slo", "--config", config, "--mount", mount.path) as policy:
        assert policy.stdout is not None
        assert [json.loads(policy.stdout.readline())["event"] for _ in range(2)] == ["share", "ready"]
        yield policy


def until(policy: subprocess.Popen[str], event: str, share: float | None = None) -> dict[str, Any]:
    """Return its next event of that name, and with that share."""
    assert policy.stdout is not None
    for line in policy.stdout:
        told: dict[str, Any] = json.loads(line)
        if told["event"] == event and (share is None or told["share"] == share):
            return told
    raise AssertionError(f"it ended without {event}")


def reporting(path: str, user: str, seconds: float) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """Run a program of a user (by default ours) that reports a latency for group a."""
    return ended("-c", REPORT, path, user, seconds)


BAD = [
    b"",
    b"\0",
    b"hello",
    b"{}",
    b"[" * 4000,
    b'{"group": "a"}',
    b'{"group": "a", "latency_ms": "long"}',
    b'{"group": "a", "latency_ms": true}',
    b'{"group": "a", "latency_ms": [1, null]}',
    b'{"group": "a", "latency_ms": NaN}',
    b'{"group": "a", "latency_ms": Infinity}',
    b'{"group": "a", "latency_ms": -1}',
    b'{"group": "a", "latency_ms": 1e300}',
    b'{"group": "a", "latency_ms": ' + b"9" * 4000 + b"}",
    b'{"group": "nobody", "latency_ms": 1}',
    b'{"group": ["a"], "latency_ms": 1}',
    b'{"group": "a", "latency_ms": 1000, "share": 1}',
    b'{"latency_ms": 1000}',
    b'{"group": "a", "latency_ms": [' + b"1000," * 4000 + b"1000]}",
    b"\xff\xfe",
]


def test_bad_reports_do_nothing(mount: Mounted, pair: tuple[Tenant, Tenant], configured: Path, path: Path) -> None:
    """Each is dropped, and the next valid one is accepted. One line in the log says so."""
    with policy_in(mount, configured) as policy:
        assert policy.stdout is not None
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.connect(os.fspath(path))
            for _ in range(20):
                for raw in BAD:
                    sender.send(raw)
        assert places(pair) == [(8000, 8), (2000, 8)]
        with Reporter(path) as reporter:
            reporter.seconds = 0.09
            told = json.loads(policy.stdout.readline())
            assert (told["share"], told["latency_ms"]) == (0.9, 90.0)
        policy.send_signal(signal.SIGTERM)
        _, errors = policy.communicate()
        assert policy.returncode == 0
        assert errors.startswith("ggroupfs: dropped 1 reports, the last one: ")
        assert errors.count("\n") == 1


REPORT = """
import os, sys, time
from backend.process.identity import Slice, cgroup_of
from ggroupfs.client import Latencies
from ggroupfs.errors import UsageError
from ggroupfs.policies.config import Table
from ggroupfs.policies.slo.reports import Desk, Place
from ggroupfs.policies.slo.samples import Interval, Statistic
from ggroupfs.policies.slo.settings import Settings
path, user, seconds = sys.argv[1:]
if user:
    os.setgid(int(user))
    os.setuid(int(user))
latencies = Latencies("a", path)
while True:
    latencies.report(float(seconds))
    print("said", flush=True)
    time.sleep(0.002)
"""
NOBODY = 65534


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_speaks_for_nobody_but_himself(
    mount: Mounted, pair: tuple[Tenant, Tenant], configured: Path, public: Path
) -> None:
    """A user's report on another user's group is dropped, and the group's own user is heard."""
    path = f"{public}/slo.sock"
    configured.write_text(CONFIG.format(socket=path, critical=pair[0].pid, batch=pair[1].pid))
    with policy_in(mount, configured) as policy, contextlib.ExitStack() as stack:
        liar = stack.enter_context(reporting(path, str(NOBODY), 50.0))
        assert liar.stdout is not None
        assert liar.stdout.readline() == "said\n"
        stack.enter_context(reporting(path, "", 0.09))
        assert policy.stdout is not None
        for share in (0.9, 1.0):
            told = json.loads(policy.stdout.readline())
            assert (told["share"], told["latency_ms"]) == (share, 90.0)
        assert liar.poll() is None
        policy.send_signal(signal.SIGTERM)
        _, errors = policy.communicate()
        assert f"pid {liar.pid} of user {NOBODY} is not in that group" in errors


def test_a_group_is_known_by_who_is_in_it(tmp_path: Path, spawn: Callable[..., subprocess.Popen[bytes]]) -> None:
    """Without a name: by the pid, or by the cgroup, for any user; and never by a claim in the report."""
    me, other = os.getpid(), spawn().pid
    intervals = {name: Interval(Statistic("mean")) for name in ("process", "here", "elsewhere")}
    here = cgroup_of(me)
    desk = Desk(
        {
            "process": (Place(other, None), intervals["process"]),
            "here": (Place(None, here), intervals["here"]),
            "elsewhere": (Place(None, Slice("/somewhere/else")), intervals["elsewhere"]),
        },
        user=1000,
    )

    def heard(raw: str, pid: int, uid: int) -> list[str]:
        try:
            desk.take(raw.encode(), pid, uid)
        except ValueError:
            return []
        return [name for name, interval in intervals.items() if interval.take() is not None]

    assert heard('{"latency_ms": 1}', me, 2000) == ["here"]
    assert heard('{"latency_ms": [1, 2]}', other, 2000) == ["process", "here"]
    assert heard('{"latency_ms": 1, "group": "process"}', other, 2000) == ["process"]
    assert heard('{"latency_ms": 1, "group": "process"}', me, 2000) == []
    assert heard('{"latency_ms": 1, "group": "elsewhere"}', me, 2000) == []
    for user in (0, 1000):
        assert heard('{"latency_ms": 1, "group": "elsewhere"}', me, user) == ["elsewhere"]
    assert heard('{"latency_ms": 1, "group": "nobody"}', me, 0) == []
    assert heard('{"latency_ms": 1}', 1 << 30, 2000) == [], "who is gone"


def test_reports_need_no_policy(tmp_path: Path) -> None:
    """Where none listens, or one does not read: nothing is raised, and nothing waits."""
    latencies = Latencies("a", tmp_path / "slo.sock")
    for _ in range(1000):
        latencies.report(0.1)
    latencies.flush()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(os.fspath(tmp_path / "slo.sock"))
        latencies = Latencies("a", tmp_path / "slo.sock")
        for _ in range(100_000):
            latencies.report(0.1)
        first = json.loads(receiver.recv(4096))
        assert first == {"group": "a", "latency_ms": [100.0]}
        second = json.loads(receiver.recv(4096))
        assert second == {"group": "a", "latency_ms": [100.0] * 128}
    latencies.flush()
    latencies.close()


GROUP = '[[group]]\nname = "a"\nupper = "50ms"\nlower = "20ms"\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "group: there is none"),
        (GROUP, "group 1: slice: one of slice and pid is needed"),
        (GROUP + 'slice = "/a.slice"\npid = 1\n', "slice: one of slice and pid is needed"),
        (GROUP + 'slice = "/"\n', "slice: not a cgroup's path such as /batch.slice"),
        (GROUP + 'slice = "/../a"\n', "slice: not a cgroup's path such as /batch.slice"),
        (GROUP + 'pid = 1\nstatistic = "median"\n', "neither mean nor a percentile such as p99"),
        (GROUP.replace("20ms", "50ms") + "pid = 1\n", "lower: not below upper"),
        (GROUP + "pid = 1\nshare = 0.01\n", "share: not between least and most"),
        (GROUP + "pid = 1\nshare = 1.5\n", "share: more than 1"),
        (GROUP + "pid = 1\nsize = 3\n", "size: there is no such key"),
        (GROUP + "pid = 1\n" + GROUP + "pid = 2\n", "two of the same name"),
        (GROUP + "pid = 1\n[[best_effort]]\npid = 1\n", "two of the same process or slice"),
    ],
)
def test_what_is_no_configuration(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=f"^slo.toml: .*{re.escape(words)}$"):
        Settings.read(Table(tomllib.loads(text), "slo.toml"))


def test_the_example_of_the_page() -> None:
    example = section("Configuration", POLICIES / "slo.md").partition("```toml\n")[2].partition("```")[0]
    settings = Settings.read(Table(tomllib.loads(example), "the page"))
    assert [one.name for one in settings.targets] == [
        "chat",
        "search",
        "best effort /serving.slice/batch.slice on GPU 0",
    ]
    assert settings.targets[1].bounds == Bounds(0.2, 0.08, initial=2000, rank=1)


def test_what_is_complained_of(mount: Mounted, tmp_path: Path, path: Path) -> None:
    file = tmp_path / "slo.toml"
    group = f'socket = "{path}"\n{GROUP}pid = 1\n'

    def told() -> str:
        return complaint("policy", "slo", "--config", file, "--mount", mount.path, code=1)

    file.write_text(group + "gpu = 7\n")
    assert told().endswith("gpus/7/gmem.capacity: No such file or directory")
    file.write_text(group)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(os.fspath(path))
        assert told() == f"{path}: Address already in use"
    assert path.exists(), "what another one left is removed by who comes next"
