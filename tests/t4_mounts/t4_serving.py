"""The daemon of a tree is the process that the kernel names; root's commands never trust a file on that."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from backend.door import peers
from backend.door.wire import SIZE, Message, Op
from backend.soft.client import socket_of
from ggroupfs import serving
from ggroupfs.commands import thaw
from ggroupfs.commands.umount import unmount
from ggroupfs.mounts import device_number, mount_of, trees
from tests.support.command import complaint
from tests.support.mounted import SECONDS, SLOW, Mounted, mounted

DEVICE = "0:99999"
"""Device number of no mount."""

AS_NOBODY = "import socket, sys, time; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n" + (
    "s.bind(sys.argv[1]); s.listen(); print(flush=True); time.sleep(600)"
)


@contextlib.contextmanager
def fuse_of(user: int, path: Path) -> Iterator[None]:
    """Yield a FUSE file system of our type that a user mounted, as fusermount3 does it, and that never answers."""
    libc = ctypes.CDLL(None, use_errno=True)
    server = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    try:
        options = f"fd={server},rootmode=40000,user_id={user},group_id={user}".encode()
        assert libc.mount(b"ggroupfs", os.fsencode(path), b"fuse.ggroupfs", 6, options) == 0, ctypes.get_errno()
        try:
            yield
        finally:
            assert libc.umount2(os.fsencode(path), 2) == 0
    finally:
        os.close(server)


def test_a_tree_that_a_user_mounted_is_not_even_asked(tmp_path: Path) -> None:
    """It would keep its reader waiting, or report the pid of another process and the journal of another tree."""
    with fuse_of(1000, tmp_path):
        assert os.fspath(tmp_path) in trees()
        assert os.fspath(tmp_path) not in thaw.roots(trees())
        with pytest.raises(RuntimeError, match="user 1000 mounted it"):
            unmount(tmp_path)
        for words in (
            ["upgrade", tmp_path],
            ["run", "--mount", tmp_path, "--", "true"],
            ["tenant", "--mount", tmp_path],
        ):
            assert "user 1000 mounted it" in complaint(*words, code=1)
        assert mount_of(os.fspath(tmp_path)) is not None


def test_the_trees_of_root(mount: Mounted) -> None:
    assert os.fspath(mount.path) in thaw.roots(trees())
    (device, _) = mount_of(os.fspath(mount.path)) or ("", "")
    with serving.daemon_of(os.fspath(mount.path), device) as daemon:
        assert daemon is not None
        assert daemon.pid == mount.daemon.pid
        assert not daemon.has_ended


@contextlib.contextmanager
def says(monkeypatch: pytest.MonkeyPatch, facts: Mapping[str, object]) -> Iterator[None]:
    """Have a tree of root's report these facts."""
    with monkeypatch.context() as patch:
        patch.setattr(serving, "facts_of", lambda mountpoint: {key: str(value) for key, value in facts.items()})
        patch.setattr(serving, "is_trusted", lambda device: True)
        yield


def why(device: str = DEVICE) -> str:
    """Return why no process is taken for the daemon of a tree."""
    with pytest.raises(serving.Unknown) as caught, serving.daemon_of("/nowhere", device):
        pass
    return str(caught.value)


def test_the_socket_of_another_tree(mount: Mounted, monkeypatch: pytest.MonkeyPatch) -> None:
    with says(monkeypatch, {"pid": mount.daemon.pid, "socket": socket_of(mount.path)}):
        assert why().endswith("and serves another tree")


def test_a_socket_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (tmp_path / "none", tmp_path, tmp_path / ("x" * 200), ""):
        with says(monkeypatch, {"pid": os.getpid(), "socket": path}):
            assert why().startswith(f"its socket {path}: ")
    with says(monkeypatch, {"pid": os.getpid()}):
        assert why().startswith("its socket ")


def test_another_user_who_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as directory:  # of that user, since /tmp need not be for everyone
        os.chown(directory, 65534, 65534)
        path = f"{directory}/socket"
        words = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", sys.executable, "-c", AS_NOBODY, path]
        with subprocess.Popen(words, stdout=subprocess.PIPE, cwd="/") as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == b"\n"
                with says(monkeypatch, {"pid": process.pid, "socket": path}):
                    assert why() == f"user 65534 listens at {path}"
            finally:
                process.kill()


@contextlib.contextmanager
def daemon(path: Path, answer: Message | bytes | None) -> Iterator[None]:
    """Have this process listen there, and give that answer to the first question."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.fspath(path))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                asked = Message.decode(connection.recv(SIZE))
                assert (asked.op, asked.reply) == (Op.TREE, False)
                if answer is not None:
                    connection.sendall(answer if isinstance(answer, bytes) else answer.encode())
                connection.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            thread.join(SECONDS)
            path.unlink()


NONE = 9999
"""A socket option that does not exist."""

ASKED = Message(Op.TREE, 1)
ANSWERS = [
    ("ours", ASKED.answer(device_number(DEVICE)), True, True),
    ("of another", ASKED.answer(device_number(DEVICE) + 1), False, False),
    ("none", None, True, False),
    ("that it does not know the question", ASKED.refuse(71), True, False),
    ("another error", ASKED.refuse(5), False, False),
    ("no message", b"x", True, False),
    ("a question", ASKED, True, False),
]
"""Answers, and whether each is accepted from the daemon where the tree says the same pid, and where it says another."""


@pytest.mark.parametrize("case", ANSWERS, ids=[name for name, *_ in ANSWERS])
def test_what_it_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: tuple[object, ...]) -> None:
    """A daemon that is too old for the question is accepted if tree and kernel name the same process of root's."""
    _, answer, same, other = case
    if answer is None:
        monkeypatch.setattr(serving, "ANSWER_S", 0.05)
    path = tmp_path / "s"
    for pid, good in ((os.getpid(), same), (1, other)):
        with says(monkeypatch, {"pid": pid, "socket": path}), daemon(path, answer):  # type: ignore[arg-type]
            if good:
                with serving.daemon_of("/nowhere", DEVICE) as found:
                    assert found is not None
                    assert found.pid == os.getpid()
                    assert not found.has_ended
            else:
                assert f"process {os.getpid()} listens at {path}" in why()


@pytest.mark.parametrize("option", [peers.SO_PEERPIDFD, NONE], ids=["SO_PEERPIDFD", "before Linux 6.5"])
def test_a_pidfd_of_who_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: int) -> None:
    """Once the listener is gone there is none, even if another process has the socket open."""
    monkeypatch.setattr(peers, "SO_PEERPIDFD", option)
    path = tmp_path / "s"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(os.fspath(path))
    child = os.fork()
    if not child:
        listener.listen()
        signal.pause()
    with listener, contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        while connection.connect_ex(os.fspath(path)):  # wait until it listens
            select.select([], [], [], 0.001)
        pidfd = peers.pidfd_of_peer(connection)
        stack.callback(os.close, pidfd)
        assert not select.select([pidfd], [], [], 0)[0]
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert select.select([pidfd], [], [], SECONDS)[0]
        with contextlib.suppress(ProcessLookupError):
            late = peers.pidfd_of_peer(connection)
            stack.callback(os.close, late)
            assert option != NONE, "by its number nobody is found"
            assert select.select([late], [], [], 0)[0], "Linux 6.16 hands out one of a process that was reaped"


IN_THERE = """
set -e
mount -t tmpfs none {place}; mount --make-shared {place}; mkdir {place}/tree; mkfifo {place}/ready
exec 3<>{place}/ready
unshare --pid --fork --kill-child --mount --propagation unchanged sh -c '
  mount --make-rprivate /proc; mount -t proc proc /proc; exec {python} -m ggroupfs mount -f --gpu soft {place}/tree
' >&3 &
read -r line <&3
cd {place}/tree; grep '^pid ' ggroup.backend; cd /
{python} -m ggroupfs run --mount {place}/tree -p gmem.limit.high=1M -- true || echo "run $?"
{python} -m ggroupfs upgrade {place}/tree >/dev/null; grep '^pid ' {place}/tree/ggroup.backend
{python} -m ggroupfs umount {place}/tree; echo "umount $?"; mountpoint -q {place}/tree || echo gone
"""


def test_a_daemon_of_another_pid_namespace(tmp_path: Path) -> None:
    """It says 1, which is another process here, and still the daemon itself is upgraded and ended. (In a pid namespace
    of its own, since process 1 of ours ignores signals.) A daemon that is not visible is addressed by no number."""
    script = IN_THERE.format(python=sys.executable, place=tmp_path)
    words = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=6 * SECONDS * SLOW)
    assert done.stdout == "pid 1\nrun 1\npid 1\numount 0\ngone\n", done.stderr
    assert done.stderr == (
        f"ggroupfs: run: the daemon of {tmp_path}/tree does not see this process: it is in another pid namespace,"
        " not below its own\n"
    )


def test_a_dead_daemon_is_no_other_process(tmp_path: Path) -> None:
    """Its tree is unmounted, and no process is signalled for it."""
    with mounted(tmp_path, expect_errors=["(killed)"]) as mount:
        mount.daemon.kill()
        mount.daemon.wait()
        (device, _) = mount_of(os.fspath(tmp_path)) or ("", "")
        with serving.daemon_of(os.fspath(tmp_path), device) as daemon:
            assert daemon is None
        unmount(tmp_path)
        assert mount_of(os.fspath(tmp_path)) is None
