"""Runner of a command in a virtual machine, with the kernel module loaded if one is given.

    python -m tests.vm.run [--kernel PATH] [--module FILE] [--cpus N] [--seconds S] [--counted] [--env NAME=VALUE]
                        -- COMMAND

The exit status is the command's, or 1 if something else is wrong: the guest died or hung, the module does not unload,
or the kernel's log has a forbidden line.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from tests.vm.machine import Machine, run


def newest_kernel(pattern: str = "vmlinuz-*-amd64") -> Path:
    """Return the kernel that linux-image-amd64 has installed."""
    kernels = sorted(Path("/boot").glob(pattern), key=lambda path: path.stat().st_mtime)
    if not kernels:
        sys.exit(f"no kernel: /boot/{pattern}")
    return kernels[-1]


def modules_of(kernel: Path) -> Path | None:
    """Return the modules of an installed kernel; None for one that was built without any."""
    path = Path("/lib/modules", kernel.name.removeprefix("vmlinuz-"))
    return path if path.is_dir() else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", type=Path, help="default: the newest of Debian's")
    parser.add_argument("--module", type=Path, help="loaded before, unloaded after")
    parser.add_argument("--cpus", type=int, default=1)
    parser.add_argument("--memory", default="2G")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--counted", action="store_true", help="a clock of instructions; with one processor")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--log", type=Path, help="where to leave the kernel's log")
    parser.add_argument("command", nargs="+")
    words = parser.parse_args()
    kernel = words.kernel or newest_kernel()
    machine = Machine(
        command=words.command,
        kernel=kernel,
        modules=modules_of(kernel),
        module=words.module,
        cpus=words.cpus,
        memory=words.memory,
        seconds=words.seconds,
        counted=words.counted,
        environment=dict(pair.split("=", 1) for pair in words.env),
    )

    def output(data: bytes) -> None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    # So that everything that was begun is also undone.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    outcome = run(machine, output)
    if words.log:
        words.log.write_text(outcome.log)
    for line in outcome.complaints():
        print(line, file=sys.stderr)
    return outcome.code()


if __name__ == "__main__":
    sys.exit(main())
