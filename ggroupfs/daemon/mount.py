"""The life of one mount: everything that is set up is torn down in reverse order, whatever happens in between."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from pathlib import Path

import attrs
import pyfuse3
import trio

from backend import choose
from backend.choose import Backend
from backend.common.lasting import lasting
from backend.common.threads import in_a_thread
from backend.core.controller import Controller
from backend.cuda import server as cuda_server
from backend.cuda.peers import Peers
from backend.door import tenants
from backend.door.client import pid_namespace
from backend.door.wire import CUDA, CUDA_ALL, SOFT, VERSION, names
from backend.ledgers.journal.file import Busy, Journal, default_path
from backend.nvidia.waiting import RELEASE, Waiting
from backend.process import fanotify, victims
from backend.process.usher import Usher
from backend.soft import server as soft_server
from backend.space import control as space_control
from backend.space.space import directory_for
from ggroupfs import serving
from ggroupfs.daemon import guard, successor, watchdog
from ggroupfs.daemon.options import MountOptions
from ggroupfs.fs import receiving
from ggroupfs.fs.connection import Connection, allow_background
from ggroupfs.fs.files import Events
from ggroupfs.fs.messenger import Messenger
from ggroupfs.fs.notify import Notifier
from ggroupfs.fs.operations import Operations
from ggroupfs.fs.tree import Tree
from ggroupfs.mounts import SYSTEMD, bind, device_number, mount_of, unbind
from ggroupfs.units import Units
from ggroupfs.units.manager import Manager

log = logging.getLogger(__name__)

SOCKETS = Path("/run/ggroupfs")

JOURNAL_AGAIN_S = 0.02
"""Seconds between two checks whether the journal is free."""

ENDS = (signal.SIGTERM, signal.SIGINT)
"""Signals that end the mount."""

RELOADS = (signal.SIGHUP,)
"""Signals that make the daemon read files with limits again."""

COLLECTED = (20_000, 50, 100)
"""Thresholds of garbage collection (:func:`gc.set_threshold`). With a thousand programs a full collection takes 0.1 s,
in which no call is answered, and by default one ran every 3 s for 400 objects.
"""

BASE_OPTIONS = frozenset(("fsname=ggroupfs", "subtype=ggroupfs", "allow_other", "default_permissions"))


@attrs.define
class Ending:
    """How a mount ended."""

    upgraded: bool = False
    """Whether another daemon is to continue in this process."""


class MountError(Exception):
    """The tree could not be mounted; the text gives the reason in one line."""


def run(options: MountOptions, ready: Callable[[], None]) -> None:
    """Mount, call `ready` once the tree answers, and serve it until it is unmounted or a signal ends it.

    MountError for a failure before `ready`.
    """
    early = successor.take_over_signals(ENDS)  # ignored before _run() takes these signals, and after
    for number in (*RELOADS, successor.SIGNAL):
        signal.signal(number, signal.SIG_IGN)
    try:
        socket = trio.run(_run, options, os.path.abspath(options.mountpoint), ready, early)
    except* MountError as group:
        raise _first(group) from None
    if socket is not None:
        successor.become_next(socket, ENDS)


async def _run(options: MountOptions, mountpoint: str, ready: Callable[[], None], early: Iterable[int]) -> Path | None:
    """Mount and serve; return the socket on which another daemon is to continue in this process, or None."""
    ending = Ending()
    gc.collect()
    # Until all that the journal holds is set up: 10,000 slices are not garbage, and took 0.3 s to go through.
    gc.disable()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(gc.enable)
        # Until the very end: a second signal must not end the daemon before all is thawed and unmounted, either.
        ends = stack.enter_context(trio.open_signal_receiver(*ENDS))
        reloads = stack.enter_context(trio.open_signal_receiver(*RELOADS))
        upgrades = stack.enter_context(trio.open_signal_receiver(successor.SIGNAL))
        for number in early:
            signal.raise_signal(number)
        if os.readlink("/proc/self") != str(os.getpid()):
            raise MountError("/proc is of another pid namespace: its numbers are other processes' here")
        _check(options)
        _discard_stale(mountpoint)  # before the self-test, which takes seconds of a GPU that others use
        if options.also is not None:
            _make_room(options.also)
        journal = await _journal(options, mountpoint)
        served = journal is not None and journal.state.is_empty  # otherwise a failed mount leaves it as it was
        if journal is not None:
            stack.callback(lambda: journal.close(ended=served and not ending.upgraded))
        path = options.socket or tenants.default_path(SOCKETS, mountpoint)
        controller, backend = await _controller(options, mountpoint, journal, path)
        stack.callback(_close, controller)
        await _free(path, options.deadline)
        tree, events = Tree(controller, backend.attributes), Events()
        messenger = Messenger()
        controller.lives.heard = partial(messenger.deliver, lambda: None)
        notifier = Notifier(tree, events, pyfuse3, messenger, mountpoint)
        operations = Operations(tree, events, notifier, poll=options.poll)
        unmounted = stack.enter_context(contextlib.ExitStack())
        try:
            pyfuse3.init(operations, mountpoint, set(BASE_OPTIONS | options.fuse))
        except RuntimeError as error:
            raise MountError(f"cannot mount on {mountpoint}: {error}") from None
        stack.callback(pyfuse3.close, unmount=True)
        connection = _connection(unmounted, _device(mountpoint), backend.waiting, journal)
        stack.callback(_hang_up, messenger, mountpoint, connection)
        if options.also is not None:
            try:
                await in_a_thread(os.fspath(options.also), partial(bind, mountpoint, options.also))
            except OSError as error:
                raise MountError(f"the tree cannot be at {options.also}, too: {error.strerror}") from None
            stack.callback(unbind, options.also)
        tree_number = _device(mountpoint)

        controller.facts["ledger.lacks"] = ",".join(backend.lacks) or "none"
        controller.facts["gpu"] = "soft" if backend.soft else "nvidia"
        controller.facts["pid"] = str(os.getpid())
        controller.facts["pidns"] = str(pid_namespace())
        try:
            listener = stack.enter_context(tenants.listening(path))
        except OSError as error:
            where = "" if error.filename in (None, os.fspath(path)) else f": {error.filename}"
            raise MountError(f"no socket at {path}: {error.strerror}{where}") from None
        controller.facts["socket"] = os.fspath(path)
        controller.facts["protocol"] = str(VERSION)
        offers = CUDA_ALL if options.turns else CUDA
        controller.facts["features"] = names(SOFT if backend.soft else offers)
        if journal is not None:
            controller.facts["journal"] = os.fspath(journal.path)
            journal.listener = partial(_tell_of_journal, controller.facts)
            journal.listener(not journal.broken)
        controller.facts["upgrade"] = successor.SIGNAL.name

        nursery = await stack.enter_async_context(trio.open_nursery())
        nursery.start_soon(_until_signal, ends, messenger, nursery.cancel_scope)
        nursery.start_soon(_until_upgrade, upgrades, ending, controller, backend, messenger, nursery.cancel_scope)
        if journal is not None:
            nursery.start_soon(lasting, "the journal", journal.run)
        served = True
        await nursery.start(controller.run)
        if options.usher:  # before a file freezes a slice
            usher = Usher(options.usher, controller.frozen.highest, controller.facts)
            controller.frozen.watcher, controller.announce = usher.changed, usher.told
            nursery.start_soon(lasting, "the usher", usher.run)
            await usher.begun()
        if options.units:  # before any program can connect
            units = Units(controller, options.slices_d, _manager(options), wait=options.units_wait)
            await nursery.start(units.run)
            nursery.start_soon(lasting, "reload", partial(_reload, reloads, units))
        else:
            controller.facts["units"] = "no"
        nursery.start_soon(lasting, "the watch for cgroups", controller.lives.run)  # units hold theirs by now
        if backend.soft:
            nursery.start_soon(soft_server.serve, listener, backend.soft, tree_number)
        else:
            peers = Peers(controller.facts, offers)
            await nursery.start(cuda_server.serve, listener, backend.cuda, tree_number, peers)
        nursery.start_soon(lasting, "telling watchers", notifier.run)
        nursery.start_soon(_serve, nursery.cancel_scope)
        first = f"{mountpoint}/ggroup.backend"
        try:
            await in_a_thread(first, partial(os.stat, first))
            await in_a_thread(first, partial(_let_closes_wait, mountpoint))
        except OSError as error:
            raise MountError(f"{first} does not answer: {error.strerror}") from None
        gc.freeze()  # objects that live as long as the mount need not be gone through again
        gc.set_threshold(*COLLECTED)
        gc.enable()
        if (seconds := watchdog.period(os.environ)) is not None:
            feed = partial(watchdog.feed, Path(mountpoint, "ggroup.backend"), seconds)
            nursery.start_soon(lasting, "the watchdog", feed)
        watchdog.notify("READY=1", f"STATUS={_status(controller, mountpoint)}")
        ready()
    log.debug("unmounted %s", mountpoint)
    return path if ending.upgraded else None


def _check(options: MountOptions) -> None:
    """Raise MountError if the kernel lacks something that is needed, or does not permit it; log what else is
    missing.
    """
    if not victims.may_kill_any():  # a daemon that was upgraded while it ran has the rights that its unit had before
        log.warning("no CAP_KILL: gmem.limit.max ends no process of another user (`systemctl restart ggroupfs`)")
    if options.usher:
        try:
            fanotify.check()
        except OSError as error:
            raise MountError(f"option usher: no opening of a file can be had wait: {error.strerror}") from None


async def _journal(options: MountOptions, mountpoint: str) -> Journal | None:
    """Return the journal of this mount, which this daemon continues. MountError if another daemon still has it."""
    if not options.keep_journal:
        return None
    path = options.journal or default_path(SOCKETS, mountpoint)
    words = ""
    # A daemon that was unmounted first gives everything back, and may need that long.
    with trio.move_on_after(options.deadline):
        while True:
            try:
                return Journal(path)
            except Busy as error:
                words = str(error.strerror)
            except OSError as error:
                raise MountError(error.strerror if error.filename is None else f"{path}: {error.strerror}") from None
            await trio.sleep(JOURNAL_AGAIN_S)
    raise MountError(words)


async def _free(path: Path, seconds: float) -> None:
    """Return once no other daemon listens on a socket, or after `seconds` in any case. A daemon that was unmounted
    listens until it has given everything back.
    """
    with trio.move_on_after(seconds):
        while tenants.is_served(path):  # noqa: ASYNC110 - nothing tells of it
            await trio.sleep(JOURNAL_AGAIN_S)


async def _controller(
    options: MountOptions, mountpoint: str, journal: Journal | None, socket: Path
) -> tuple[Controller, Backend]:
    """Return the controller, which the tree shows, and its backend. MountError if there is no GPU, or no ledger for
    it.
    """
    # Each mount has its own software GPUs; the next mount here has the same ones, with the books that were left.
    place = os.stat(mountpoint)  # two containers may have the same path
    identity = f"{place.st_dev}:{place.st_ino}:{mountpoint}"
    config = attrs.evolve(options.choice.soft_config, identity=identity)
    choice = attrs.evolve(options.choice, soft_config=config, proven=SOCKETS / "proven")
    try:
        gpus = await choose.gpus(choice)
    except OSError as error:
        raise MountError(f"no GPU: {error.strerror}") from None
    try:
        backend = choose.backend(choice, gpus, options.deadline, journal)
    except OSError as error:
        raise MountError(error.strerror) from None
    program = None if backend.soft else space_control.find()
    try:
        controller = Controller(
            *(backend.ledger, backend.gpus, options.deadline),
            scheduler=options.scheduler,
            hold_us=options.hold_us,
            moves=backend.moves,
            memory=backend.totals,
            lives=backend.lives,
            turn_wait_us=round(options.turns_wait * 1e6) if options.turns else None,
            servers=None if program is None else (program, directory_for(socket)),
        )
        return controller, backend
    except OSError as error:
        backend.ledger.close()
        raise MountError(error.strerror) from None


def _manager(options: MountOptions) -> Manager | None:
    """Return the manager of this machine's units, or None."""
    if options.bus is None and not SYSTEMD.is_dir():
        return None
    try:
        from ggroupfs.units.systemd import Systemd  # needs jeepney, which only this needs
    except ImportError as error:
        log.info("units of systemd are not read: %s", error)
        return None
    return Systemd(options.bus or "SYSTEM")


def _close(controller: Controller) -> None:
    controller.ledger.close(released=controller.released, handed_over=controller.handed_over)


def _tell_of_journal(facts: dict[str, str], kept: bool) -> None:
    facts["journal.kept"] = "yes" if kept else "no"


def _let_closes_wait(mountpoint: str) -> None:
    try:
        allow_background(mountpoint)
    except OSError as error:
        log.info("%s: closes of files may lag behind: %s", mountpoint, error.strerror)


async def _serve(scope: trio.CancelScope) -> None:
    """Answer requests until the filesystem is unmounted, then end the other tasks."""
    await receiving.main()
    scope.cancel()


async def _until_signal(signals: AsyncIterator[int], messenger: Messenger, scope: trio.CancelScope) -> None:
    """End the mount at the first signal."""
    async for number in signals:
        log.debug("signal %d: unmounting", number)
        watchdog.notify("STOPPING=1", "STATUS=Thawing and unmounting")
        await _say_no_more(messenger)
        scope.cancel()


async def _until_upgrade(
    signals: AsyncIterator[int],
    ending: Ending,
    controller: Controller,
    backend: Backend,
    messenger: Messenger,
    scope: trio.CancelScope,
) -> None:
    """End the mount at the first signal so that another daemon can continue. If the state is journaled, it is left as
    it is.
    """
    async for _ in signals:
        watchdog.notify("RELOADING=1", "STATUS=Another daemon takes over")
        await _say_no_more(messenger)
        ending.upgraded = True
        if backend.lasting:
            controller.hand_over()
        scope.cancel()
        return


async def _say_no_more(messenger: Messenger) -> None:
    """Stop the messenger first, while the tree still answers, since a message under way may wait for an answer of this
    daemon.
    """
    try:
        await in_a_thread("the messenger", messenger.end)
    except OSError as error:  # EAGAIN
        log.debug("%s", error)
        messenger.end()


def _connection(
    unmounted: contextlib.ExitStack, device: int, waiting: Waiting | None, journal: Journal | None
) -> Connection | None:
    """Return the connection of the mount, by which it can be aborted; None if the kernel gives no control of it.

    If this daemon is killed before the mount is unmounted, a guard aborts it, and puts back what is noted in `waiting`
    until the next daemon has the journal.
    """
    found = None
    try:
        found = Connection(device)
    except OSError as error:
        log.info("the connection cannot be aborted, by a guard neither: %s", error)
    else:
        unmounted.callback(found.close)
    left = None if waiting is None else guard.Left(RELEASE, waiting.fileno(), None if journal is None else journal.path)
    if found is not None or left is not None:
        unmounted.enter_context(guard.beside(None if found is None else found.fileno(), left))
    return found


def _hang_up(messenger: Messenger, mountpoint: str, connection: Connection | None) -> None:
    """Stop the messenger when no requests are answered any more. A message may wait for a directory that is locked by a
    program which waits for an answer of this daemon. That would keep the connection open, and with it this process and
    that program, for ever, even after SIGKILL. In that case the connection is aborted.
    """
    if messenger.end():
        return
    log.warning("a message to the kernel does not come to its end: whatever waits for the tree ends with ECONNABORTED")
    if connection is None:
        log.warning("the connection cannot be aborted: the kernel has no control of it here")
        return
    device = _device(mountpoint)
    connection.abort()
    messenger.end()
    if device and _device(mountpoint) == device:  # libfuse takes an aborted mount to be unmounted
        unbind(Path(mountpoint))


async def _reload(signals: AsyncIterator[int], units: Units) -> None:
    """Read files with limits again at each signal. systemd reads its own again by itself, and reports it."""
    async for _ in signals:
        log.info("limits are read again")
        units.reload()


def _discard_stale(mountpoint: str) -> None:
    """Unmount what a killed daemon left behind. MountError if a live tree is there, or the directory does not exist."""
    try:
        serving.asked(mountpoint, os.statvfs)  # not stat(): the kernel may answer that from its cache for a dead daemon
    except serving.Silent as error:
        found = mount_of(mountpoint)
        hint = "; `ggroupfs umount --force` aborts it" if found is not None and found[1] == serving.TYPE else ""
        raise MountError(f"{mountpoint}: {error}{hint}") from None
    except FileNotFoundError:
        raise MountError(f"{mountpoint} does not exist") from None
    except OSError as error:
        log.warning("%s: %s: unmounting what is left of another daemon", mountpoint, error.strerror)
        os.spawnlp(os.P_WAIT, "fusermount3", "fusermount3", "-u", "-z", mountpoint)
    if not os.path.isdir(mountpoint):
        raise MountError(f"{mountpoint} is not a directory")
    if mount_of(mountpoint) is not None:
        raise MountError(f"{mountpoint} is mounted already")


def _make_room(also: Path) -> None:
    """Create an empty directory. MountError if that is not possible."""
    try:
        os.makedirs(also)
    except FileExistsError:  # of whatever type
        pass
    except OSError as error:
        raise MountError(f"{also}: {error.strerror}") from None
    _discard_stale(os.fspath(also))


def _device(mountpoint: str) -> int:
    """Return the device number of the mount at a path; 0 if none is visible."""
    found = mount_of(mountpoint)
    return device_number(found[0]) if found is not None else 0


def _status(controller: Controller, mountpoint: str) -> str:
    """Return the status line for systemd, which `systemctl status` shows."""
    number, facts = len(controller.gpus), controller.facts
    return f"{mountpoint}: {number} {facts['gpu']} GPU{'' if number == 1 else 's'}, ledger {facts['ledger']}"


def _first(group: BaseExceptionGroup[MountError]) -> MountError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, MountError)
    return error
