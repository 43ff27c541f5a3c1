"""kill -9 of a real daemon at random moments, and the next daemon: acknowledged settings are there."""

from __future__ import annotations

import contextlib
import os
import random
import re
import select
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from backend.door import tenants
from backend.door.client import facts_of
from backend.ledgers.journal.file import Journal, default_path
from backend.process.identity import identify
from backend.soft.client import socket_of
from ggroupfs.daemon import successor
from ggroupfs.daemon.mount import SOCKETS
from ggroupfs.mounts import mount_of
from tests.support.mounted import (
    BUSY,
    LEDGER,
    SECONDS,
    SLOW,
    Mounted,
    Tenant,
    daemons,
    eventually,
    kill,
    mounted,
    mountpoint,
)
from tests.support.proc import stat_of

SERVICE = Path(__file__).parents[2] / "systemd/ggroupfs.service"

POLL = "7"
"""Number of the system call poll(2) on x86-64."""


FILES = {
    "gmem.limit.high": ("max", ["1073741824", "2147483648", "max"]),
    "gmem.limit.low": ("0", ["4096", "0"]),
    "gmem.swap.max": ("max", ["0", "4096", "max"]),
    "compute.freeze": ("0", ["0", "1"]),
    "compute.priority": ("8", ["0", "8", "15"]),
    "compute.weight": ("100", ["1", "100", "10000"]),
    "gmem.limit.max": ("max", ["2147483648", "4294967296", "max"]),
    "gmem.oom.group": ("0", ["0", "1"]),
    "compute.max": ("max 100000", ["30000 100000", "1000 10000", "max 1000000"]),
    "compute.wait.max": ("default", ["100", "2500"]),
    "compute.sm.max": ("max", ["8", "64", "max"]),
}
"""Default content of each file, and the values that are written to it."""

SLICES = ("a", "a/b", "c", "a/b/d")

ACTIONS = 400
"""Number of actions, more than a daemon that is to be killed has time for."""


@attrs.define
class Model:
    """State that was acknowledged; an action under way when the daemon died may have happened or not."""

    slices: set[str] = attrs.field(factory=set)
    processes: dict[int, subprocess.Popen[bytes]] = attrs.field(factory=dict)
    values: dict[str, str] = attrs.field(factory=dict)
    owners: dict[str, tuple[int, int]] = attrs.field(factory=dict)
    """Uid and mode, by path."""
    doubtful: tuple[str, str, object] | None = None
    """Action under way: what it does, on what, and the state that it leads to."""

    def directories(self) -> list[str]:
        """Return the directories that have control files."""
        return [f"slice/{slice_}/0" for slice_ in sorted(self.slices)] + [f"{pid}/0" for pid in sorted(self.processes)]

    def drop(self, directory: str) -> None:
        """Forget a process or a slice that is gone."""
        for table in (self.values, self.owners):
            for path in [path for path in table if path == directory or path.startswith(f"{directory}/")]:
                del table[path]


class Story(threading.Thread):
    """A client that makes one request after the other as long as it gets answers."""

    def __init__(self, mount: Path, model: Model, rng: random.Random) -> None:
        super().__init__()
        self._mount = mount
        self._model = model
        self._rng = rng
        self._answered = threading.Condition()
        self.count = 0
        """Number of acknowledged requests."""
        self.refused: OSError | None = None
        self.start()

    def run(self) -> None:
        for _ in range(ACTIONS):
            try:
                self._act()
            except OSError as error:
                self.refused = error
                return
            finally:
                with self._answered:
                    self.count += 1
                    self._answered.notify_all()
            self._model.doubtful = None

    def until(self, count: int) -> None:
        """Return in the middle of a request, after `count` answers."""
        with self._answered:
            assert self._answered.wait_for(lambda: self.count >= count or self.refused, SECONDS * SLOW)

    def _act(self) -> None:
        model, rng = self._model, self._rng
        what = rng.choice(("mkdir", "rmdir", "process", "end", "chown", *["write"] * 6))
        directories = model.directories()
        if what == "mkdir":
            free = [s for s in SLICES if s not in model.slices and (os.path.dirname(s) or "a") in {*model.slices, "a"}]
            free = [s for s in free if "/" not in s or os.path.dirname(s) in model.slices]
            if free:
                slice_ = rng.choice(free)
                model.doubtful = "slice", slice_, None
                (self._mount / "slice" / slice_).mkdir()
                model.slices.add(slice_)
        elif what == "rmdir":
            empty = [s for s in model.slices if not any(other.startswith(f"{s}/") for other in model.slices)]
            if empty:
                slice_ = rng.choice(sorted(empty))
                model.doubtful = "slice", slice_, None
                (self._mount / "slice" / slice_).rmdir()
                model.slices.discard(slice_)
                model.drop(f"slice/{slice_}")
        elif what == "process" and len(model.processes) < 4:
            process = subprocess.Popen(["sleep", "600"])
            model.processes[process.pid] = process
            model.doubtful = "process", str(process.pid), None
            (self._mount / str(process.pid)).mkdir()
        elif what == "end" and model.processes:
            pid = rng.choice(sorted(model.processes))
            process = model.processes.pop(pid)
            process.kill()
            process.wait()
            model.drop(str(pid))
        elif what == "chown" and directories:
            path = f"{rng.choice(directories)}/{rng.choice(list(FILES))}"
            uid, mode = rng.choice((0, 1000, 1001)), rng.choice((0o644, 0o600, 0o664))
            model.doubtful = "owner", path, (uid, mode)
            os.chown(self._mount / path, uid, -1)
            os.chmod(self._mount / path, mode)
            model.owners[path] = uid, mode
        elif what == "write" and directories:
            path = f"{rng.choice(directories)}/{rng.choice(list(FILES))}"
            value = rng.choice(FILES[os.path.basename(path)][1])
            model.doubtful = "value", path, value
            with open(self._mount / path, "w") as file:
                file.write(f"{value}\n")
            model.values[path] = value


def agrees(mount: Path, model: Model) -> None:
    """Check that the tree has the acknowledged state, with or without the action that was under way."""
    kind, where, becomes = model.doubtful or ("", "", None)
    found = {os.path.relpath(at, mount / "slice") for at, _, _ in os.walk(mount / "slice")} - {"."}
    slices = {path for path in found if not os.path.basename(path).isdigit()}
    assert slices ^ model.slices <= ({where} if kind == "slice" else set())
    pids = {int(name) for name in os.listdir(mount) if name.isdigit()}
    assert pids ^ set(model.processes) <= ({int(where)} if kind == "process" else set())
    for directory in model.directories():
        if not (mount / directory).exists():
            continue  # it was being made or removed: checked above
        for name, (default, _) in FILES.items():
            path = f"{directory}/{name}"
            allowed = {model.values.get(path, default)}
            if (kind, where) == ("value", path):
                allowed.add(str(becomes))
            if kind == "slice" and directory.startswith(f"slice/{where}/"):
                continue
            assert (mount / path).read_text().strip() in allowed, path
            status = (mount / path).stat()
            now, before = (status.st_uid, stat.S_IMODE(status.st_mode)), model.owners.get(path, (0, 0o644))
            if (kind, where) == ("owner", path):
                assert isinstance(becomes, tuple)
                assert all(one in both for one, both in zip(now, zip(before, becomes, strict=True), strict=True)), path
            else:
                assert now == before, path


def settle(mount: Path, model: Model) -> None:
    """Take the state that is found for the state of the doubtful action."""
    kind, where, _ = model.doubtful or ("", "", None)
    model.doubtful = None
    if kind == "slice":
        there = (mount / "slice" / where).exists()
        (model.slices.add if there else model.slices.discard)(where)
        if not there:
            model.drop(f"slice/{where}")
    elif kind == "process" and not (mount / where).exists():
        process = model.processes.pop(int(where))
        process.kill()
        process.wait()
    elif kind == "value":
        model.values[where] = (mount / where).read_text().strip()
    elif kind == "owner":
        status = (mount / where).stat()
        model.owners[where] = status.st_uid, stat.S_IMODE(status.st_mode)


@pytest.fixture
def place() -> Iterator[Path]:
    with mountpoint() as path:
        yield path


@pytest.mark.parametrize("seed", range(3))
def test_killed_while_somebody_is_at_it(place: Path, seed: int) -> None:
    """An acknowledged write is never lost; the one under way is there or not; and nothing else is ever there."""
    rng, model = random.Random(seed), Model()
    try:
        with daemons(place) as start:
            for _ in range(5):
                mount = start()
                agrees(place, model)
                settle(place, model)
                mount.check()
                story = Story(place, model, rng)
                story.until(rng.randrange(1, ACTIONS // 4))
                kill(mount)
                story.join(SECONDS * SLOW)
                assert not story.is_alive()
                assert story.refused is not None, "it was killed in the middle"
            start()
            agrees(place, model)
    finally:
        for process in model.processes.values():
            process.kill()
            process.wait()
    assert not default_path(SOCKETS, os.fspath(place)).exists(), "a clean end of a software GPU leaves nothing"


def test_who_died_meanwhile_is_gone_and_whoever_bears_his_pid_has_nothing_of_it(place: Path) -> None:
    with daemons(place) as start, contextlib.ExitStack() as stack:
        mount = start()
        first = stack.enter_context(subprocess.Popen(["sleep", "600"]))
        began = identify(first.pid)
        (place / str(first.pid)).mkdir()
        (place / f"{first.pid}/0/compute.freeze").write_text("1\n")
        os.chown(place / f"{first.pid}/0/compute.freeze", 1000, 1000)
        kill(mount)
        first.kill()
        first.wait()
        for _ in range(1000):
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(first.pid - 1))
            second = stack.enter_context(subprocess.Popen(["sleep", "600"]))
            stack.callback(second.kill)
            if second.pid == first.pid:
                if identify(second.pid) != began:
                    break
                second.kill()  # started in the same hundredth of a second, so indistinguishable from the first
                second.wait()
        assert second.pid == first.pid, "the pid never came back"
        start()
        assert not (place / str(first.pid)).exists()
        (place / str(second.pid)).mkdir()
        assert (place / f"{second.pid}/0/compute.freeze").read_text() == "0\n"
        assert (place / f"{second.pid}/0/compute.freeze").stat().st_uid == 0


@pytest.mark.skipif(LEDGER == "kmod", reason="the module's books keep what was charged until the process ends")
def test_what_was_counted_is_counted_on(place: Path) -> None:
    """Peaks and events of a slice survive the daemon, and the programs that die with it."""
    with daemons(place) as start:
        mount = start()
        with Tenant(mount, "--gmem", "64M", "--report", "0.05") as tenant:
            tenant.write("gmem.limit.high", "16M")
            events = tenant.flat("gmem.events")
            assert events["reclaim"] == 1
            os.kill(tenant.pid, signal.SIGSTOP)  # it would end with its GPU, and take its figures along
            kill(mount)
            second = start()
            assert tenant.number("gmem.peak") == 64 << 20
            assert tenant.flat("gmem.events") == events
            assert tenant.number("gmem.current") == 0, "its contexts were on a GPU that is gone"
            second.check()


@pytest.mark.parametrize("how", ["kill", "upgrade"])
def test_a_quota_holds_on_and_its_periods_are_counted_on(place: Path, how: str) -> None:
    """With the next daemon, both continue for the process and its slice."""
    with daemons(place) as start:
        mount = start()
        with Tenant(mount, *BUSY) as tenant:
            (place / "slice" / SLICES[0]).mkdir(exist_ok=True)
            there = place / "slice" / SLICES[0] / "0" / "compute.max"
            there.write_text("400000 500000\n")
            tenant.write("compute.max", "20000 50000")
            eventually(lambda: tenant.flat("gcgroup.stat")["nr_periods"] > 40, "it works")
            os.kill(tenant.pid, signal.SIGSTOP)  # it would end with its GPU, and take its figures along
            before = tenant.flat("gcgroup.stat")["nr_periods"]
            time.sleep(5 * SLOW)  # counts are saved each second, or more rarely on a busy machine
            if how == "kill":
                kill(mount)
                mount = start()
            else:
                assert upgraded(place).returncode == 0
            assert (tenant.group / "compute.max").read_text() == "20000 50000\n"
            assert there.read_text() == "400000 500000\n"
            assert tenant.flat("gcgroup.stat")["nr_periods"] >= before
        with Tenant(mount, *BUSY) as other:
            other.write("compute.max", "10000 100000")
            time.sleep(0.5)
            began = time.monotonic()
            used = other.flat("gcgroup.stat")["gpu_usec"]
            time.sleep(3)
            used = other.flat("gcgroup.stat")["gpu_usec"] - used
            assert used <= 0.1 * (time.monotonic() - began) * 1e6 * 1.5
        mount.check()


def files_of(place: Path) -> set[str]:
    """Return the files that daemons of one place have, without those of other tests."""
    socket = tenants.default_path(SOCKETS, os.fspath(place)).name  # for a long path its name is another one
    return {name for name in os.listdir(SOCKETS) if place.name in name or name == socket}


def test_nothing_is_left_open_and_no_file_is_left_over(place: Path) -> None:
    """A daemon that took over has as many descriptors as a new one, and one more for each process."""
    with daemons(place) as start, subprocess.Popen(["sleep", "600"]) as sleeper:
        try:
            mount = start()
            fresh = len(os.listdir(f"/proc/{mount.daemon.pid}/fd"))
            before = files_of(place)
            (place / str(sleeper.pid)).mkdir()
            for _ in range(3):
                kill(mount)
                mount = start()
            eventually(lambda: len(os.listdir(f"/proc/{mount.daemon.pid}/fd")) <= fresh + 1, "as many as at first")
            assert files_of(place) == before
        finally:
            sleeper.kill()
            sleeper.wait()
            eventually(lambda: not (place / str(sleeper.pid)).exists(), "it is gone")


def test_the_next_one_is_there_within_two_seconds(place: Path) -> None:
    """The time is from the death of one daemon to an answer of the next, plus the wait of systemd before it starts that
    (RestartSec=).
    """
    with daemons(place) as start:
        mount = start()
        for name in range(200):
            (place / f"slice/{name}x").mkdir()
        kill(mount)
        (rest,) = re.findall(r"^RestartSec=(\d+)ms$", SERVICE.read_text(), re.MULTILINE)
        seconds = processor_s(start())
        assert int(rest) / 1000 + seconds / SLOW < 2
        assert len(os.listdir(place / "slice")) == 200


def processor_s(mount: Mounted) -> float:
    """Return the processor time of the daemon with its threads, seconds, which does not depend on other load
    (proc_pid_stat(5)).
    """
    ticks = stat_of(mount.daemon.pid)[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def upgraded(place: Path, *options: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "ggroupfs", "upgrade", *options, os.fspath(place)]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=3 * SECONDS * SLOW)


def test_the_next_version_is_there_within_two_seconds(place: Path) -> None:
    """The time is from the signal to an answer by the same process."""
    with daemons(place) as start:
        mount = start()
        for name in range(200):
            (place / f"slice/{name}x").mkdir()
        before = processor_s(mount)
        done = upgraded(place)
        assert (done.returncode, done.stderr) == (0, "")
        assert processor_s(mount) - before < 2 * SLOW
        assert len(os.listdir(place / "slice")) == 200
        assert mount.daemon.poll() is None


def test_a_tree_has_the_same_socket_after_an_upgrade_and_a_kill_and_no_other_tree_has_it(tmp_path: Path) -> None:
    """Its device number changes, and its former number belongs to another tree."""
    spare, first, second = (tmp_path / name for name in ("spare", "a", "b"))
    for directory in (spare, first, second):
        directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", spare], check=True)  # takes a number that becomes free then
    with daemons(first) as start, daemons(second) as start_other:
        mount = start()
        ours = socket_of(first)
        subprocess.run(["umount", spare], check=True)
        assert upgraded(first).returncode == 0
        other = start_other()
        assert socket_of(first) == ours != socket_of(second)
        with Tenant(mount, "--gmem", "4M"):
            assert (len(mount.members()), len(other.members())) == (1, 0)
        kill(mount)
        mount = start()
        assert socket_of(first) == ours
        with Tenant(mount, "--gmem", "4M"):
            assert (len(mount.members()), len(other.members())) == (1, 0)


def test_a_socket_where_another_daemon_listens_is_not_taken(tmp_path: Path) -> None:
    """There are two mounts with the same socket: the second one fails."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    option = f"socket={SOCKETS}/{os.getpid()}.sock"
    with mounted(one, option) as mount:
        words = [
            sys.executable,
            "-m",
            "ggroupfs",
            "mount",
            "--gpu",
            "soft",
            "-o",
            f"{option},deadline=0.1",
            os.fspath(two),
        ]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=SECONDS * SLOW)
        assert (done.returncode, done.stderr) == (
            1,
            f"ggroupfs: mount: no socket at {socket_of(one)}: another daemon listens there\n",
        )
        assert mount_of(os.fspath(two)) is None
        with Tenant(mount, "--gmem", "4M"):
            mount.check()


CONTAINER = """
mount --rbind {shared} {inside}; mount --bind {shared}/tree {bound}
echo; while read -r _; do
  for tree in {inside}/tree {bound}; do head -n 1 $tree/ggroup.backend 2>&1 || :; done | sed 's/.*: //' | paste -s -d ,
done
"""
"""Shell script that mounts the directory above a tree with rslave, like `podman -v DIRECTORY:DIRECTORY:rslave`, and the
tree itself, and then reads both.
"""


def test_a_container_has_the_next_daemons_tree_by_the_directory_above(tmp_path: Path) -> None:
    """This is after an upgrade and after a kill. A bind mount of the tree itself is dead with its daemon."""
    directories = place, shared, inside, bound = [tmp_path / name for name in ("place", "shared", "inside", "bound")]
    for directory in directories:
        directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", shared], check=True)
    subprocess.run(["mount", "--make-shared", shared], check=True)  # as systemd does for all of /run
    try:
        with daemons(place, f"also={shared}/tree") as start, contextlib.ExitStack() as stack:
            mount = start()
            assert os.listdir(shared / "tree") == os.listdir(place)
            script = CONTAINER.format(shared=shared, inside=inside, bound=bound)
            words = ["unshare", "--mount", "--propagation", "slave", "sh", "-ec", script]
            container = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
            stack.callback(container.communicate)
            assert container.stdin is not None
            assert container.stdout is not None
            said, asked = container.stdout, container.stdin
            assert said.readline() == "\n"

            def look() -> str:
                asked.write("\n")
                return said.readline().strip()

            assert look() == "ledger soft,ledger soft"
            assert upgraded(place).returncode == 0
            assert look() == "ledger soft,Transport endpoint is not connected"
            kill(mount)
            assert look() == "Transport endpoint is not connected,Transport endpoint is not connected"
            start()
            assert look() == "ledger soft,Transport endpoint is not connected"
        assert mount_of(f"{shared}/tree") is None
        assert os.listdir(shared / "tree") == []
    finally:
        subprocess.run(["umount", "--recursive", shared], check=True)


def test_a_tree_that_cannot_be_there_too(tmp_path: Path) -> None:
    """A tree that cannot be bound to its second place is not mounted at all."""
    file, place = tmp_path / "file", tmp_path / "place"
    file.touch()
    place.mkdir()
    for also, why in ((file, f"{file} is not a directory"), (file / "x", f"{file}/x: Not a directory")):
        words = [sys.executable, "-m", "ggroupfs", "mount", "--gpu", "soft", "-o", f"also={also}", os.fspath(place)]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=SECONDS * SLOW)
        assert (done.returncode, done.stderr) == (1, f"ggroupfs: mount: {why}\n")
        assert mount_of(os.fspath(place)) is None


def test_who_waits_in_poll_is_woken_by_an_upgrade(place: Path) -> None:
    """They wake up with POLLERR long before they otherwise would; open files are useless from then on, and can be
    opened again.
    """
    with daemons(place) as start:
        start()
        (place / "slice/a").mkdir()
        path = place / "slice/a/0/compute.events"
        found: list[tuple[int, int]] = []
        with path.open() as file:
            poller = select.poll()
            poller.register(file, select.POLLPRI)
            file.read()
            waiter = threading.Thread(target=lambda: found.extend(poller.poll(10 * SECONDS * SLOW * 1000)))
            waiter.start()
            syscall = Path(f"/proc/self/task/{waiter.native_id}/syscall")
            eventually(lambda: syscall.read_text().split()[0] == POLL, "it waits")
            assert upgraded(place).returncode == 0
            waiter.join(SECONDS * SLOW)
            assert found == [(file.fileno(), select.POLLERR)]
            with pytest.raises(OSError, match="not connected"):
                os.pread(file.fileno(), 1, 0)
        assert "frozen 0" in path.read_text()


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a link by which daemons are started; the file that it leads to is what is installed."""
    link = tmp_path / "python"
    link.symlink_to(os.path.realpath(sys.executable))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [os.getcwd(), *sys.path])))
    monkeypatch.setattr(sys, "executable", os.fspath(link))
    return link


GONE, BROKEN, WORSE = "", "echo it is broken >&2; exit 3", 'case "$*" in *--help) ;; *) exit 3; esac'
"""Next versions: a missing one, one that does not start, and one that only seems to."""


def install(interpreter: Path, script: str) -> None:
    interpreter.unlink()
    if script:
        interpreter.write_text(f"#!/bin/sh\n{script}\n")
        interpreter.chmod(0o755)


@pytest.mark.parametrize(("script", "words"), [(GONE, "No such file"), (BROKEN, "it is broken")])
def test_a_next_version_that_does_not_start_is_not_begun_with(
    place: Path, interpreter: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str
) -> None:
    """The running daemon continues to serve the tree."""
    with daemons(place) as start:
        mount = start()
        (place / "slice/a").mkdir()
        root = os.open(place, os.O_RDONLY)
        install(interpreter, script)
        monkeypatch.undo()
        done = upgraded(place)
        assert (done.returncode, done.stdout) == (1, "")
        assert f"{place} is served as before" in done.stderr
        assert words in done.stderr
        os.fstatvfs(root)
        os.close(root)
        assert os.listdir(place / "slice") == ["a"]
        assert mount.daemon.poll() is None


def test_what_the_journal_does_not_know_is_not_forgotten_unasked(place: Path, tmp_path: Path) -> None:
    """While the disk is full the running daemon continues; with --force, or with room, the next one takes over."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "none", disk], check=True)
    try:
        also = ("No space left on device", "is kept again", "is out of date")
        with daemons(place, f"journal={disk}/one.journal", also=also) as start:
            mount = start()
            (place / "slice/a").mkdir()
            high = place / "slice/a/0/gmem.limit.high"
            with open(disk / "else", "wb", buffering=0) as other:
                with contextlib.suppress(OSError):
                    while True:
                        other.write(bytes(512))
                mib = 1
                while facts_of(os.fspath(place))["journal.kept"] == "yes":
                    high.write_text(f"{mib}M\n")
                    mib += 1
                done = upgraded(place)
                assert (done.returncode, done.stdout) == (os.EX_TEMPFAIL, "")
                assert f"{disk}/one.journal cannot be written" in done.stderr
                assert mount.daemon.poll() is None
                assert int(high.read_text()) == (mib - 1) << 20
                assert upgraded(place, "--force").returncode == 0
                assert int(high.read_text()) == (mib - 2) << 20, "as the journal had it"
                other.truncate(0)
            eventually(lambda: facts_of(os.fspath(place))["journal.kept"] == "yes", "it is kept again")
            assert upgraded(place).returncode == 0
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("script", [GONE, WORSE])
def test_a_next_version_that_fails_leaves_all_to_the_next_mount(
    place: Path, interpreter: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    """The process ends with an error, for which systemd starts another one (Restart=on-failure); frozen processes stay
    frozen.
    """
    with daemons(place) as start, subprocess.Popen(["sleep", "600"]) as sleeper:
        try:
            mount = start()
            (place / str(sleeper.pid)).mkdir()
            frozen = place / f"{sleeper.pid}/0/compute.freeze"
            frozen.write_text("1\n")
            install(interpreter, script)
            monkeypatch.undo()
            if script == GONE:
                mount.daemon.send_signal(successor.SIGNAL)
                eventually(lambda: "left for the next mount" in "".join(mount.errors), "it says so")
                mount.errors.clear()
            else:
                done = upgraded(place)
                assert (done.returncode, done.stdout) == (1, "")
                assert "has ended: see its log" in done.stderr
            assert mount.daemon.wait(SECONDS * SLOW) == (1 if script == GONE else 3)
            assert mount_of(os.fspath(place)) is None, "nobody meets what cannot answer"
            start()
            assert frozen.read_text() == "1\n"
        finally:
            sleeper.kill()
            sleeper.wait()


def test_two_daemons_never_share_a_journal(place: Path, tmp_path: Path) -> None:
    path = tmp_path / "shared.journal"
    with mounted(place, f"journal={path}"), mountpoint() as other:
        words = ["-m", "ggroupfs", "mount", "-f", "--gpu", "soft", "-o", f"journal={path},deadline=0.2", str(other)]
        result = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
        assert (result.returncode, result.stdout) == (1, "")
        assert result.stderr == f"ggroupfs: mount: another daemon keeps its journal in {path}\n"
    assert os.listdir(tmp_path) == []


def test_without_a_journal(place: Path) -> None:
    """Restarts work as they did before there were journals."""
    with daemons(place, "nojournal") as start:
        mount = start()
        assert "journal" not in (place / "ggroup.backend").read_text()
        (place / "slice/a").mkdir()
        assert not default_path(SOCKETS, os.fspath(place)).exists()
        kill(mount)
        start()
        if LEDGER != "kmod":
            assert os.listdir(place / "slice") == []


def test_one_that_is_no_journal_is_not_touched(place: Path, tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("text\n")
    path.chmod(0o600)
    words = ["-m", "ggroupfs", "mount", "-f", "--gpu", "soft", "-o", f"journal={path}", str(place)]
    result = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert (result.returncode, path.read_text()) == (1, "text\n")
    assert "is no journal, and stays as it is" in result.stderr


def test_a_journal_that_was_cut_off_is_read_up_to_there(place: Path) -> None:
    with daemons(place) as start:
        mount = start()
        path = default_path(SOCKETS, os.fspath(place))
        (place / "slice/a").mkdir()
        size = path.stat().st_size
        (place / "slice/b").mkdir()
        kill(mount)
        os.truncate(path, size + 30)
        start()
        if LEDGER != "kmod":
            assert os.listdir(place / "slice") == ["a"]


def test_thaw_all_where_no_driver_is(place: Path) -> None:
    """No program can be frozen: the daemon of a software GPU is not affected, and keeps its journal."""
    words = [sys.executable, "-m", "ggroupfs", "doctor", "--thaw-all"]
    with daemons(place) as start:
        start()
        result = subprocess.run(words, capture_output=True, text=True, check=False)
        assert (result.returncode, result.stderr) == (0, "")
        assert "no program can be frozen" in result.stdout
        result = subprocess.run(words, capture_output=True, text=True, check=False, user=65534)
        assert (result.returncode, result.stderr.startswith("ggroupfs: doctor: only root may")) == (1, True)
        with pytest.raises(OSError, match="another daemon"):
            Journal(default_path(SOCKETS, os.fspath(place)))
