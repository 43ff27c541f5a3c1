"""The door of the software GPU: real processes come in over a unix socket and get contexts, memory and an engine.

Who they are is what the kernel says (SO_PEERCRED), never what they say; what they can name is only their own.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import trio

from backend.errors import fail
from backend.identity import Process, peer_of, user_of
from backend.soft.gpu import PAGES_AT_ONCE, SoftGpu
from backend.wire import ARGS, SIZE, VERSION, WORD, Message, Op

log = logging.getLogger(__name__)

ACCEPT_AGAIN = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED)
"""What accept(2) may say without the listener being broken."""

ACCEPT_AGAIN_S = 0.1

CONNECTIONS = 4096
"""Connections that one user may have: nobody can use up the daemon's descriptors for all others."""

CONTEXTS = 64
"""Contexts that one connection may have open."""


@contextlib.contextmanager
def listening(path: Path) -> Iterator[trio.socket.SocketType]:
    """A SEQPACKET socket at `path`, for everybody on the machine, removed at the end.

    What lies there already is a leftover: the path carries the mount's device number, which is ours alone. Once our
    tree is unmounted it may be another's, and what then lies there is left to it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(os.fspath(path))
        stack.callback(_remove, path, os.stat(path).st_ino)
        path.chmod(0o666)
        listener.listen(128)
        yield stack.enter_context(contextlib.closing(trio.socket.from_stdlib_socket(listener)))


def _remove(path: Path, inode: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        if os.stat(path).st_ino == inode:
            path.unlink()


async def serve(listener: trio.socket.SocketType, gpus: Mapping[int, SoftGpu]) -> None:
    """Serves every program that connects, until cancelled."""
    connections: Counter[int] = Counter()
    async with trio.open_nursery() as nursery:
        while True:
            try:
                connection, _ = await listener.accept()
            except OSError as error:
                if error.errno not in ACCEPT_AGAIN:
                    raise
                log.warning("no room for another program: %s", error.strerror)
                await trio.sleep(ACCEPT_AGAIN_S)
                continue
            nursery.start_soon(_serve_one, connection, gpus, connections)


async def _serve_one(
    connection: trio.socket.SocketType, gpus: Mapping[int, SoftGpu], connections: Counter[int]
) -> None:
    with contextlib.closing(connection), contextlib.ExitStack() as stack:
        uid = user_of(connection)  # type: ignore[arg-type]
        connections[uid] += 1
        stack.callback(connections.subtract, [uid])
        if connections[uid] > CONNECTIONS:
            log.warning("user %d: more than %d connections: dropped", uid, CONNECTIONS)
            return
        try:
            session = Session(connection, gpus)
        except ProcessLookupError:
            return  # it connected and died
        except OSError as error:
            log.warning("a program cannot be served: %s", error.strerror)
            return
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(session.report)
                await session.answer()
                nursery.cancel_scope.cancel()
        except* (BrokenPipeError, ConnectionResetError):
            pass  # it died, or closed its end
        except* Exception:
            log.exception("process %d: connection dropped", session.process.pid)
        finally:
            session.close()


class Session:
    """One connection, and what it opened."""

    def __init__(self, connection: trio.socket.SocketType, gpus: Mapping[int, SoftGpu]) -> None:
        self.process: Process = peer_of(connection)  # type: ignore[arg-type]
        """Who is at the other end."""
        self._connection = connection
        self._gpus = gpus
        self._contexts: dict[int, SoftGpu] = {}
        self._pages: dict[tuple[SoftGpu, int], int] = {}  # first page -> pages, per allocation
        self._finished: dict[tuple[int, int], int] = {}  # (gpu, tsg) -> kernels, not yet told
        self._news = trio.Event()
        self._sending = trio.Lock()  # replies and progress go out by two tasks
        self._greeted = False

    async def answer(self) -> None:
        """Answers requests, one after the other, until the other end is closed."""
        while raw := await self._connection.recv(SIZE + 1):
            try:
                request = Message.decode(raw)
            except ValueError:
                log.warning("process %d: not a message (%d bytes): dropped", self.process.pid, len(raw))
                return
            try:
                reply = request.answer(*await self._do(request))
            except OSError as error:
                reply = request.refuse(error.errno or errno.EIO)
            await self._send(reply)

    async def report(self) -> None:
        """Sends progress. What the program is too slow to take is summed up, not queued."""
        while True:
            await self._news.wait()
            self._news = trio.Event()
            news, self._finished = self._finished, {}
            for (gpu, tsg), finished in news.items():
                await self._send(Message(Op.PROGRESS, gpu=gpu, args=(tsg, finished)))

    def close(self) -> None:
        """Closes its contexts and frees its memory. A process that died has neither left."""
        for tsg, gpu in list(self._contexts.items()):
            with contextlib.suppress(OSError):
                gpu.close_context(self.process, tsg)
        for (gpu, first), count in list(self._pages.items()):
            with contextlib.suppress(OSError):
                gpu.free(self.process, range(first, first + count))

    async def _send(self, message: Message) -> None:
        async with self._sending:
            await self._connection.send(message.encode())

    async def _do(self, request: Message) -> tuple[int, ...]:
        op, args = request.op, request.args
        if request.flags or request.status or request.reply or not (self._greeted or op == Op.HELLO):
            raise fail(errno.EPROTO)
        gpu = self._gpus.get(request.gpu)
        if gpu is None:
            raise fail(errno.ENODEV)
        match op:
            case Op.HELLO:
                if args[0] != VERSION:
                    raise fail(errno.EPROTO)
                self._greeted = True
                return VERSION, gpu.config.page, gpu.config.timeslice_us
            case Op.JOIN:
                return (await self._join(gpu, args[0]),)
            case Op.LEAVE:
                if self._contexts.get(args[0]) is not gpu:
                    raise fail(errno.ENOENT)
                gpu.close_context(self.process, args[0])
                del self._contexts[args[0]]
            case Op.ALLOC:
                if gpu not in self._contexts.values():
                    raise fail(errno.EBADF)
                pages = await gpu.allocate(self.process, args[0])
                self._pages[gpu, pages.start] = len(pages)
                return pages.start, len(pages)
            case Op.FREE:
                if self._pages.get((gpu, args[0])) != args[1]:
                    raise fail(errno.EINVAL)  # as cuMemFree: what was allocated, whole
                del self._pages[gpu, args[0]]
                gpu.free(self.process, range(args[0], args[0] + args[1]))
            case Op.WRITE:
                for offset in range(self._bounded(gpu, args[0], args[1])):
                    if offset % PAGES_AT_ONCE == PAGES_AT_ONCE - 1:
                        await trio.lowlevel.checkpoint()
                    gpu.write(self.process, args[0] + offset, (args[2] + offset * args[3]) % WORD)
            case Op.READ:
                if args[1] > ARGS:
                    raise fail(errno.EINVAL)
                return tuple(gpu.read(self.process, args[0] + i) for i in range(args[1]))
            case Op.LAUNCH:
                if self._contexts.get(args[0]) is not gpu:
                    raise fail(errno.ENOENT)
                touched = range(args[3], args[3] + (self._bounded(gpu, args[3], args[4]) if args[4] else 0))
                await gpu.launch(self.process, args[0], args[1], args[2], touched)
            case _:
                raise fail(errno.ENOSYS)
        return ()

    async def _join(self, gpu: SoftGpu, channels: int) -> int:
        if len(self._contexts) >= CONTEXTS or not 0 < channels <= 128:
            raise fail(errno.EINVAL)
        told: list[int] = []  # the TSG's number, known only once it is open

        def progress(finished: int) -> None:
            self._finished[gpu.info.index, told[0]] = finished
            self._news.set()

        tsg = await gpu.open_context(self.process, channels, progress)
        told.append(tsg)
        self._contexts[tsg] = gpu
        return tsg

    def _bounded(self, gpu: SoftGpu, first: int, count: int) -> int:
        """`count`, if one allocation of this connection holds all those pages; EFAULT otherwise."""
        for (owner, start), length in self._pages.items():
            if owner is gpu and start <= first and first + count <= start + length:
                return count
        raise fail(errno.EFAULT)
