"""Detection of programs that disturb a measurement on a GPU: those that open the driver and are not our own."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator

import attrs
import pytest

from tests.t7_nvidia.conftest import wait_for
from tests.t7_nvidia.strangers import Strangers, Visit

DEVICE, OTHER = "/dev/full", "/dev/null"
"""Files that stand in for the device and for another file: any that no other process opens will do."""
ORPHAN = "exec 3<&0; sh -c '{}' <&3 &"
"""Shell command that runs a script whose parent is none of our processes."""
SPAWNER = """
while read device; do
    sleep infinity 3<$device &
    echo $!
    read over
    kill $!
    wait $!
    echo gone
done
"""


@attrs.frozen
class Spawner:
    """A process that is not a child of ours, and starts programs."""

    pipes: subprocess.Popen[str]

    def tell(self, line: str) -> str:
        """Send a line; return the answer."""
        assert self.pipes.stdin is not None
        assert self.pipes.stdout is not None
        self.pipes.stdin.write(f"{line}\n")
        self.pipes.stdin.flush()
        return self.pipes.stdout.readline().rstrip()


@pytest.fixture
def spawner() -> Iterator[Spawner]:
    words = ["sh", "-c", ORPHAN.format(SPAWNER)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as pipes:
        assert pipes.wait() == 0
        yield Spawner(pipes)


def seen(strangers: Strangers, since: float) -> list[Visit]:
    return strangers.during(since, time.monotonic())


def test_a_stranger_with_the_device_is_seen_from_its_begin_to_its_end(spawner: Spawner) -> None:
    with Strangers(DEVICE) as strangers:
        begin = time.monotonic()
        assert seen(strangers, begin) == []
        before = time.monotonic()
        pid = int(spawner.tell(DEVICE))
        wait_for(lambda: [one.words for one in seen(strangers, begin)] == ["sleep infinity"], "it is seen")
        (there,) = seen(strangers, begin)
        assert there.pid == pid
        assert begin <= there.begin <= time.monotonic() < there.end
        assert there.begin < before + 1
        assert spawner.tell("over") == "gone"
        wait_for(lambda: not seen(strangers, time.monotonic()), "it is seen no more")
        (gone,) = seen(strangers, begin)
        assert gone == attrs.evolve(there, end=gone.end)
        assert there.begin < gone.end < time.monotonic()
        assert strangers.during(begin, begin) == []


def test_others_are_none(spawner: Spawner) -> None:
    """Strangers without the device, strangers from before, and our own children and grandchildren do not count."""
    spawner.tell(DEVICE)
    with Strangers(DEVICE) as strangers:
        begin = time.monotonic()
        spawner.tell("over")
        spawner.tell(OTHER)
        for words in ("exec cat", "cat <&4; exit 0"):
            command = ["sh", "-c", f"exec 3<{DEVICE} 4<&0; echo; {words}"]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
                assert child.stdout is not None
                assert child.stdout.readline() == b"\n"
                assert seen(strangers, begin) == []
                assert child.poll() is None
        spawner.tell("over")
        assert seen(strangers, begin) == []
