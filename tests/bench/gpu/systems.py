"""The ways to share a GPU that are compared. Each is set up anew each time, and nothing of it is left behind."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from backend.common.tracing import VARIABLE
from ggroupfs.client import Latencies
from ggroupfs.client.reading import flat
from tests.bench.core.runner import Unavailable
from tests.bench.gpu.faces import Part, Running
from tests.support.cgroups import cgroup, slice_path
from tests.support.mounted import Mounted, eventually, mounted, mountpoint
from tests.support.policy_program import PolicyProgram
from tests.t7_nvidia.programs import run_in

Programs = Sequence[tuple[Part, Running]]

LIMIT_S, LIMIT_AGAIN_S = 30.0, 0.6
"""Seconds for which a limit is written again that answers with one of AGAIN, and between two writes. A program that is
asked to move lets go where none of its kernels ends within 0.3 s, as beside others that read over the bus. A write
tries again for as long as it may take, and is told that less was moved after that."""
AGAIN = (errno.EAGAIN, errno.EBUSY, errno.ETIMEDOUT)
"""Errors of such a write: a program that runs did not give in time, or did not answer, as where four programs read most
of their memory over the bus; one that is off the GPU for its turn or its quota cannot."""
TRACES = Path(__file__).parent.parent.parent.parent / "build"
"""Where traces of turns are written."""
_begun = set[Path]()  # those of this run
_places = itertools.count()  # of cgroups: one that could not be removed is in the way of no other


class PlainStage:
    """Nothing but the driver."""

    def words(self, part: Part) -> list[str]:
        return []

    def share(self, programs: Programs) -> None:
        pass

    def present(self, program: Running) -> None:
        pass

    def write(self, program: Running, name: str, value: str) -> None:
        raise Unavailable(f"it has no {name}")

    def report(self, latency: float) -> None:
        pass


@attrs.frozen
class Plain:
    """The driver alone: exclusive where one program runs, time slicing where several do."""

    name: str

    @contextlib.contextmanager
    def enter(self) -> Iterator[PlainStage]:
        yield PlainStage()


# MPS


CONTROL = "nvidia-cuda-mps-control"
PLACES = "/usr/local/nvidia/bin"
"""Where it is in some containers, besides the PATH."""
START_S, QUIT_S = 10.0, 15.0


def control() -> str:
    """The program. Unavailable where it is not there."""
    found = shutil.which(CONTROL) or shutil.which(CONTROL, path=PLACES)
    if found is None:
        raise Unavailable(f"there is no {CONTROL}")
    return found


class MpsStage(PlainStage):
    """A control daemon that runs, and those that are to be its clients."""

    def __init__(
        self,
        environment: Mapping[str, str],
        percentage: Callable[[Part], int | None],
        priority: Callable[[Part], int | None] = lambda part: None,
    ) -> None:
        self.environment = environment
        """What makes a program a client of it."""
        self._percentage, self._priority = percentage, priority

    def words(self, part: Part) -> list[str]:
        percentage = self._percentage(part)
        more = {} if percentage is None else {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percentage)}
        if (priority := self._priority(part)) is not None:
            more["CUDA_MPS_CLIENT_PRIORITY"] = str(priority)
        if part.limit:
            more["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={part.limit}"
        return ["env", *(f"{key}={value}" for key, value in {**self.environment, **more}.items())]

    def share(self, programs: Programs) -> None:
        """All of them are clients. Unavailable where they are not: they would be on the GPU by themselves."""
        clients = sum(len(self.ask(f"get_client_list {server}").split()) for server in self.servers())
        if clients < len(programs):
            raise Unavailable(f"{len(programs)} programs run, and {clients} are clients of the MPS server")

    def servers(self) -> list[int]:
        """Pids."""
        return [int(word) for word in self.ask("get_server_list").split() if word.isdigit()]

    def ask(self, command: str) -> str:
        """What the daemon answers. Unavailable if it does not."""
        environment = {**os.environ, **self.environment}
        try:
            done = subprocess.run(
                [control()], input=f"{command}\n", capture_output=True, text=True, timeout=QUIT_S, env=environment
            )
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{CONTROL} does not answer to {command!r}") from None
        return done.stdout


@attrs.frozen
class Mps:
    """NVIDIA's Multi-Process Service, its daemon an ordinary process with directories of its own."""

    name: str = "MPS"
    percentage: Callable[[Part], int | None] = lambda part: None
    """CUDA_MPS_ACTIVE_THREAD_PERCENTAGE of a program; None for all."""
    priority: Callable[[Part], int | None] = lambda part: None
    """CUDA_MPS_CLIENT_PRIORITY of a program: 0 is normal, 1 below it; None for what the server has."""

    @contextlib.contextmanager
    def enter(self) -> Iterator[MpsStage]:
        control()
        top = Path(tempfile.mkdtemp(prefix="ggroupfs-mps-"))
        try:
            environment = {f"CUDA_MPS_{what.upper()}_DIRECTORY": os.fspath(top / what) for what in ("pipe", "log")}
            for path in environment.values():
                os.mkdir(path)
            # In the foreground: it stays a child, which is ended by its pid if it does not go by itself.
            with (top / "output").open("w") as output:
                daemon = subprocess.Popen(
                    [control(), "-f"],
                    env={**os.environ, **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )
            try:
                self._started(daemon, top)
                yield MpsStage(environment, self.percentage, self.priority)
            finally:
                _end(daemon, environment)
        finally:
            shutil.rmtree(top, ignore_errors=True)

    def _started(self, daemon: subprocess.Popen[bytes], top: Path) -> None:
        try:
            eventually(
                lambda: (top / "pipe" / "control").exists() or daemon.poll() is not None, "it listens", seconds=START_S
            )
        except AssertionError:
            raise Unavailable(f"{CONTROL} does not listen after {START_S:.0f} s") from None
        if daemon.poll() is not None:
            raise Unavailable(f"{CONTROL} ended: {(top / 'output').read_text().strip()[-200:]}")


def _end(daemon: subprocess.Popen[bytes], environment: Mapping[str, str]) -> None:
    """By its own command, else by its pid; its servers go with it."""
    if daemon.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [control()],
                input=b"quit -t 5\n",
                capture_output=True,
                timeout=QUIT_S,
                env={**os.environ, **environment},
            )
    for end in (None, daemon.terminate, daemon.kill):
        if daemon.poll() is None:
            if end is not None:
                end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(QUIT_S)


# ggroupfs


class GgroupfsStage(PlainStage):
    """A mounted tree."""

    def __init__(self, mount: Mounted, controls: Controls, stack: contextlib.ExitStack) -> None:
        self.mount, self._controls, self.stack = mount, controls, stack
        self.reports: Latencies | None = None

    def words(self, part: Part) -> list[str]:
        limits = [f"gmem.limit.high={part.limit}"] if part.limit else []
        return run_in(self.mount, *limits) if part.memory else []

    def present(self, program: Running) -> None:
        eventually((self.mount.group(program.pid) / "compute.freeze").exists, f"{program.pid} is in the tree")

    def write(self, program: Running, name: str, value: str) -> None:
        (self.mount.group(program.pid) / name).write_text(f"{value}\n")

    def share(self, programs: Programs) -> None:
        for _, program in programs:
            self.present(program)
        self._controls(self, programs)

    def report(self, latency: float) -> None:
        if self.reports is not None:
            self.reports.report(latency)

    def policy(self, name: str, config: str, directory: Path) -> None:
        """Starts a policy, which ends before the tree does."""
        path = directory / f"{name}.toml"
        path.write_text(config)
        self.stack.enter_context(PolicyProgram(self.mount.path, name, path))


Controls = Callable[[GgroupfsStage, Programs], None]


@attrs.frozen
class Ggroupfs:
    """A mounted tree, and what is written into it."""

    name: str
    controls: Controls
    options: Sequence[str] = ()
    """Of the mount."""
    expected: Sequence[str] = ()
    """Words of lines that the daemon may log."""

    @contextlib.contextmanager
    def enter(self) -> Iterator[GgroupfsStage]:
        with (
            mountpoint() as path,
            mounted(path, *self.options, gpu="nvidia", expect_errors=self.expected) as mount,
            contextlib.ExitStack() as stack,
        ):
            yield GgroupfsStage(mount, self.controls, stack)


class Everything:
    """No slice: the GPU."""

    def words(self, *properties: str) -> list[str]:
        return []

    def held(self) -> int:
        raise Unavailable("there is no slice")

    def limit(self, nbytes: int | None) -> None:
        if nbytes is not None:
            raise Unavailable("there is no slice")

    def wait(self, seconds: float) -> None:
        pass

    def figures(self) -> Mapping[str, int]:
        return {}


@attrs.frozen
class WholeGpu:
    """The driver's own time slicing, with room for all."""

    name: str

    @contextlib.contextmanager
    def enter(self) -> Iterator[Everything]:
        yield Everything()


class SliceRoom(Everything):
    """A slice of a mounted tree."""

    def __init__(self, mount: Mounted, path: str) -> None:
        self.mount, self._path = mount, path

    @property
    def within(self) -> str:
        """The path of the slice."""
        return self._path

    @property
    def _files(self) -> Path:
        return self.mount / "slice" / self._path / "0"

    def words(self, *properties: str) -> list[str]:
        return run_in(self.mount, *properties, within=self._path)

    def held(self) -> int:
        eventually(self._files.exists, "its programs are in the tree")
        return int((self._files / "gmem.current").read_text())

    def limit(self, nbytes: int | None) -> None:
        until = time.monotonic() + LIMIT_S
        while True:
            try:
                return self._write("gmem.limit.high", "max" if nbytes is None else str(nbytes))
            except OSError as error:
                if error.errno not in AGAIN or time.monotonic() > until:
                    raise
            time.sleep(LIMIT_AGAIN_S)

    def wait(self, seconds: float) -> None:
        """Bound how long a program waits for a turn of memory. Where the mount has none, none waits."""
        text = (self.mount / "ggroup.capabilities").read_text()
        if "compute.wait.max unsupported" not in text.splitlines():
            self._write("compute.wait.max", f"{seconds * 1000:g}")

    def figures(self) -> Mapping[str, int]:
        eventually(self._files.exists, "its programs are in the tree")
        texts = [(self._files / name).read_text() for name in ("gmem.stat", "gcgroup.stat")]
        return {key: value for text in texts for key, value in flat(text).items()}

    def _write(self, name: str, value: str) -> None:
        file = os.open(self._files / name, os.O_WRONLY | os.O_TRUNC)
        try:
            os.write(file, f"{value}\n".encode())
        finally:
            os.close(file)


@contextlib.contextmanager
def _traced(name: str) -> Iterator[None]:
    """Daemons that are started write what their turns of memory take into build/turns-NAME.jsonl
    (`python -m tests.bench.timeline`): all of one run, one behind the other."""
    path = TRACES / f"turns-{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    before = os.environ.get(VARIABLE)
    if path not in _begun:
        _begun.add(path)
        path.unlink(missing_ok=True)
    os.environ[VARIABLE] = os.fspath(path) if before is None else before
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]


@attrs.frozen
class Turned:
    """A mounted tree, with turns of memory or without, and a cgroup that the programs are in."""

    name: str
    options: Sequence[str]
    """Of the mount."""
    gpu: str = "nvidia"
    """The GPUs."""
    expected: Sequence[str] = ()
    """Words of lines that the daemon may log."""

    @contextlib.contextmanager
    def enter(self) -> Iterator[SliceRoom]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_traced("-".join(option.partition("=")[2] or option for option in self.options)))
            path = stack.enter_context(mountpoint())
            mount = stack.enter_context(mounted(path, *self.options, gpu=self.gpu, expect_errors=self.expected))
            place = stack.enter_context(cgroup(f"ggroup-bench-{os.getpid()}-{next(_places)}"))
            yield SliceRoom(mount, slice_path(place))


def nothing(stage: GgroupfsStage, programs: Programs) -> None:
    """What is written is the scenario's matter."""


def priority(stage: GgroupfsStage, programs: Programs) -> None:
    """The critical program comes first; the scheduler does the rest."""
    for part, program in programs:
        if part.critical:
            stage.write(program, "compute.priority", "0")


def weights(stage: GgroupfsStage, programs: Programs) -> None:
    """By the weight of each."""
    for part, program in programs:
        stage.write(program, "compute.weight", str(part.weight))


def timeslices(critical_ms: float, batch_ms: float) -> Controls:
    """Those, and no scheduler."""

    def write(stage: GgroupfsStage, programs: Programs) -> None:
        for part, program in programs:
            stage.write(program, "compute.timeslice", f"{critical_ms if part.critical else batch_ms:g}")

    return write


SLO = """
socket = "{socket}"
interval = "200ms"
cooldown = "500ms"

[[group]]
name = "critical"
pid = {pid}
upper = "{upper}us"
lower = "{lower}us"
statistic = "p99"
share = 0.5
scale_up = 0.5
"""


def slo(upper_s: Callable[[], float]) -> Controls:
    """The policy slo keeps the p99 of the critical program below that; a batch program has no bounds."""

    def write(stage: GgroupfsStage, programs: Programs) -> None:
        if stage.reports is not None:
            return
        directory = Path(stage.stack.enter_context(tempfile.TemporaryDirectory(prefix="ggroupfs-slo-")))
        path = directory / "slo.sock"
        (critical,) = (program for part, program in programs if part.critical)
        config = SLO.format(socket=path, pid=critical.pid, upper=int(1e6 * upper_s()), lower=int(5e5 * upper_s()))
        config += "".join(f"[[best_effort]]\npid = {program.pid}\n" for part, program in programs if not part.critical)
        stage.policy("slo", config, directory)
        stage.reports = Latencies("critical", os.fspath(path))

    return write
