"""A double of MPS's control daemon: a shell script that listens, has a server as a child, and takes commands.

It knows nothing of GPUs. Like the real one it listens in CUDA_MPS_PIPE_DIRECTORY, starts a server for `start_server`,
and ends for `quit` once the last client has gone, which here is a file.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from backend.space.control import PROGRAM

SERVER = "nvidia-cuda-mps-server"

SCRIPT = """#!/bin/sh
here=${{0%/*}} pipe=$CUDA_MPS_PIPE_DIRECTORY
if [ "$1" != -f ]; then
    read -r words
    {client}
    echo "$words" > "$pipe/control"
    exit
fi
test -d "$CUDA_MPS_LOG_DIRECTORY" || exit 3
echo started >> "$here/starts"
{first}
rm -f "$pipe/control.new"; mkfifo "$pipe/control.new" && mv "$pipe/control.new" "$pipe/control"
exec 3<> "$pipe/control"
while read -r command rest <&3; do
    echo "$command $rest" >> "$here/commands"
    case $command in
        start_server) "$here/{server}" 600 & ;;
        die) exit 1 ;;
        quit)
            while [ -e "$here/client" ]; do sleep 0.02; done
            {quit}
            exit 0 ;;
    esac
done
"""


class MpsDouble:
    """The script, in a directory of its own."""

    def __init__(self, directory: Path, *, first: str = ":", client: str = ":", quit: str = ":") -> None:
        """`first` is done before it listens, `client` by the client that passes a command on, and `quit` before it
        ends for that.
        """
        self.directory = directory
        directory.mkdir(exist_ok=True)
        directory.chmod(0o755)
        self.program = directory / PROGRAM
        self.program.write_text(SCRIPT.format(first=first, client=client, quit=quit, server=SERVER))
        self.program.chmod(0o755)
        sleep = shutil.which("sleep")
        assert sleep is not None
        if not (directory / SERVER).exists():
            shutil.copy(sleep, directory / SERVER)

    @property
    def starts(self) -> int:
        """How often it was started."""
        return len(self._lines("starts"))

    @property
    def commands(self) -> list[str]:
        """The commands that it was given, by all of its processes."""
        return [line.strip() for line in self._lines("commands")]

    def hold(self) -> None:
        """Have a client, so that it does not quit."""
        (self.directory / "client").touch()

    def release(self) -> None:
        """Have none any more."""
        (self.directory / "client").unlink()

    def _lines(self, name: str) -> list[str]:
        path = self.directory / name
        return path.read_text().splitlines() if path.exists() else []
