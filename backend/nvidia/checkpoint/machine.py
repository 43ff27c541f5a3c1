"""The steps of one action on one program, and what follows when a step fails. Pure: driver, clock and pauses are
given.

A locked program stands still, and one that is restored without room for it is lost for good. Hence two rules. First,
a program is restored onto a GPU only from a reservation of ours, given up in the instant before; memory that another
program takes in that instant is the one race that remains. Second, every failure after the lock ends the same way:
look at the state of the program, and make it run from there (:meth:`Machine._conclude`), as for a program that a dead
agent has left.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import attrs

from backend.common.errors import errno_of
from backend.nvidia.checkpoint.records import Action, Driver, Outcome, Progress, Request, State, Step

TRIES = 5
"""Number of times that the state is asked for, or an unlock is tried, before a program is left as it is."""
PAUSE_S = 0.02
"""Seconds between the first two tries; the pause doubles each time, 0.3 s from the first try to the last."""


class Failed(Exception):
    """A step failed: the step and its error."""

    def __init__(self, step: Step, error: OSError) -> None:
        super().__init__(step, error)
        self.step = step
        self.error = error

    @property
    def words(self) -> str:
        """The message of the error."""
        return self.error.strerror or str(self.error)


@attrs.define
class Machine:
    """One action on one program; used once."""

    driver: Driver
    """The driver, through which everything is done."""
    check: Callable[[], None]
    """Raises ProcessLookupError once the program is gone; called before every call that names its pid."""
    report: Callable[[Progress], None]
    """Called with the progress of every step."""
    clock: Callable[[], float]
    """Returns the seconds of CLOCK_MONOTONIC."""
    pause: Callable[[float], None]
    """Waits for a number of seconds."""
    ready: Callable[[], None] = lambda: None
    """Returns once the program may be locked (:attr:`Request.asks`). Raises OSError if it may not."""
    stands: Callable[[], bool] = lambda: True
    """Returns whether a locked program still stands by. Raises OSError where that is not known."""

    _request: Request = attrs.field(init=False)
    _held: dict[str, int] = attrs.field(init=False, factory=dict)  # GPU -> reservation
    _place: str = attrs.field(init=False, default="")
    _locked: bool = attrs.field(init=False, default=False)  # by us, perhaps: then we have to unlock it
    _assumed: State | None = attrs.field(init=False, default=None)  # the state, where the driver does not tell

    def run(self, request: Request, place: str = "") -> Outcome:
        """Carry out a request and return its outcome. `place` is the GPU that the program is on, if on any, as far
        as is known. Raises only on a bug.
        """
        self._request = request
        self._place = place
        act = {
            Action.MOVE: self._move,
            Action.SUSPEND: self._suspend,
            Action.RESUME: self._resume,
            Action.RECOVER: self._recover,
            Action.STATE: self._state,
        }[request.action]
        try:
            self._open()
            act()
        except Failed as failed:
            return self._after(failed)
        finally:
            for gpu in list(self._held):
                with suppress(Failed, OSError):
                    self._release(gpu)
        return Outcome(self._assumed, self._where())

    # Actions

    def _move(self) -> None:
        source, target = self._request.source, self._request.target
        with self._step(Step.OPEN):
            self._known(source, target)
            if source == target:
                raise OSError(errno.EINVAL, "that is where it is")
            self.driver.prepare(target)
        self._must_be(State.RUNNING)
        self._reserve(Step.RESERVE, target, self._request.room)
        self._ask()
        self._lock()
        if self._request.asks and not self._stands():
            # It would be lost: the driver does not restore all that it has then.
            raise Failed(Step.READY, OSError(errno.EBUSY, "it does not stand by any more"))
        self._checkpoint()
        with suppress(Failed):  # without it the way back may be closed, which is no reason to stay
            self._reserve(Step.KEEP, source)
        self._release(target)
        self._restore(Step.RESTORE, target)
        self._unlock()

    def _suspend(self) -> None:
        self._ask()  # before the state, too: it is not documented how a frozen program answers that question
        self._must_be(State.RUNNING)
        self._lock()
        self._checkpoint()

    def _resume(self) -> None:
        with self._step(Step.OPEN):
            self._known(self._request.source, self._request.destination)
            self.driver.prepare(self._request.destination)
        self._must_be(State.CHECKPOINTED)
        self._place = ""
        self._reserve(Step.RESERVE, self._request.destination)
        self._release(self._request.destination)
        self._locked = True
        self._restore(Step.RESTORE, self._request.destination)
        self._unlock()

    def _recover(self) -> None:
        state = self._look()
        if state is State.FAILED:
            self._refuse("the driver has given it up", errno.EIO)
        self._to_running(state)

    def _state(self) -> None:
        self._look()

    # Steps of actions

    def _ask(self) -> None:
        if self._request.asks:
            with self._step(Step.READY):
                self.ready()

    def _open(self) -> None:
        with self._step(Step.OPEN):
            if self._request.action not in (Action.RECOVER, Action.STATE):
                self._room_is_known()
            self.driver.open()

    def _room_is_known(self) -> None:
        """Refuse to go on if the room that a program needs is unknown: a reservation of nothing would
        not protect it.
        """
        if self._request.room <= 0:
            raise OSError(errno.EINVAL, "how much room it needs is not known")

    def _known(self, *gpus: str) -> None:
        known = self.driver.gpus()
        for gpu in gpus:
            if gpu not in known:
                raise OSError(errno.ENODEV, f"no GPU {gpu or '(not named)'}")
        models = {self.driver.model(gpu) for gpu in gpus}
        if len(models) > 1:
            raise OSError(errno.EOPNOTSUPP, f"different GPUs: {', '.join(sorted(models))}")

    def _look(self) -> State:
        with self._step(Step.STATE):
            self.check()
            self._assumed = self.driver.state(self._pid)
            return self._assumed

    def _look_again(self) -> State:
        """Return the state after a failure: what the driver says, after several tries, else what is assumed."""
        assumed = self._assumed
        for seconds in self._tries():
            try:
                return self._look()
            except Failed as failed:
                if _gone(failed.error):
                    raise
                self.pause(seconds)
        assert assumed is not None, "only what was seen running is acted on"
        self._assumed = assumed
        return assumed

    def _must_be(self, wanted: State) -> None:
        state = self._look()
        if state is not wanted:
            code = errno.EIO if state is State.FAILED else errno.EBUSY
            self._refuse(f"it is {state.name.lower()}, not {wanted.name.lower()}", code)

    def _refuse(self, words: str, code: int) -> None:
        raise Failed(Step.STATE, OSError(code, words))

    def _reserve(self, step: Step, gpu: str, nbytes: int = 0) -> None:
        with self._step(step):
            self._held[gpu] = self.driver.reserve(gpu, nbytes or self._request.least)

    def _release(self, gpu: str) -> None:
        with self._step(Step.RELEASE):
            self.driver.release(self._held.pop(gpu))

    def _lock(self) -> None:
        with self._step(Step.LOCK):
            self.check()
            try:
                self.driver.lock(self._pid, self._request.lock_ms)
            except OSError as error:
                if error.errno == errno.EBUSY:
                    self._assumed = None  # another process was first, and has to unlock it
                else:
                    self._locked = True  # as far as we know
                raise
            self._locked = True
        self._assumed = State.LOCKED

    def _stands(self) -> bool:
        try:
            return self.stands()
        except OSError:
            return False

    def _checkpoint(self) -> None:
        with self._step(Step.CHECKPOINT):
            self.check()
            self.driver.checkpoint(self._pid)
        self._assumed = State.CHECKPOINTED

    def _restore(self, step: Step, gpu: str) -> None:
        with self._step(step):
            self.check()
            self.driver.restore(self._pid, self._map(gpu))
        self._assumed = State.LOCKED
        self._place = gpu

    def _map(self, gpu: str) -> Sequence[tuple[str, str]]:
        """Return pairs of old and new GPU for a restore, one for every GPU: source and target change places. Empty
        if the program returns to where it was.
        """
        source = self._request.source
        if gpu == source or not gpu:
            return ()
        swapped = {source: gpu, gpu: source}
        return [(old, swapped.get(old, old)) for old in self.driver.gpus()]

    def _unlock(self) -> None:
        """Unlock the program. A failure is tried again: nothing else helps a locked program."""
        last: Failed | None = None
        for seconds in self._tries():
            try:
                with self._step(Step.UNLOCK):
                    self.check()
                    self.driver.unlock(self._pid)
            except Failed as failed:
                if _gone(failed.error):
                    raise
                last = failed
                if self._look_again() is not State.LOCKED:
                    break
                self.pause(seconds)
            else:
                self._assumed = State.RUNNING
                return
        if self._assumed is not State.RUNNING and last is not None:
            raise last

    # What follows a failure

    def _after(self, failed: Failed) -> Outcome:
        """Make the program run again, if possible, and return the outcome of a request in which a step failed."""
        words = f"{failed.step.value}: {failed.words}"
        number = errno_of(failed.error)
        try:
            if _gone(failed.error):
                raise failed
            if self._locked:
                self._conclude(failed.step)
        except Failed as worse:
            if _gone(worse.error):
                return Outcome(None, "", errno.ESRCH, worse.step, "the program has ended")
            if worse is not failed:
                words += f"; then {worse.step.value}: {worse.words}"
        return Outcome(self._assumed, self._where(), number, failed.step, words)

    def _conclude(self, failed: Step) -> None:
        """Make the program run, whatever state it is in: where it was if there is room for it, else where it was
        to be, and never without room.
        """
        state = self._look_again()
        wanted = self._request.action
        if failed is Step.UNLOCK or (wanted is Action.RESUME and state is State.CHECKPOINTED):
            return  # unlocking was tried often enough; a suspended program stays as it was
        if failed is Step.RESTORE and state is State.LOCKED:
            self._place = self._request.destination  # the driver did it all the same
        self._to_running(state)

    def _to_running(self, state: State) -> None:
        if state is State.CHECKPOINTED:
            self._bring_back()
            state = State.LOCKED
        if state is State.LOCKED:
            self._unlock()

    def _bring_back(self) -> None:
        """Restore the program on the first GPU that has room. Raises ENOSPC where none has."""
        source, target = self._request.source, self._request.target
        try:
            self._room_is_known()
        except OSError as error:
            raise Failed(Step.RETURN, error) from None
        last: Failed | None = None
        for step, gpu in ((Step.RETURN, source), (Step.RESTORE, target)):
            if not source or not gpu or (gpu == source and step is Step.RESTORE):
                continue
            try:
                if gpu not in self._held:
                    self._reserve(Step.RESERVE, gpu)
                self._release(gpu)
                self._restore(step, gpu)
                return
            except Failed as failed:
                if _gone(failed.error):
                    raise
                last = failed if last is None or failed.step is step else last
                if failed.step is step and self._look_again() is not State.CHECKPOINTED:
                    if self._assumed is State.LOCKED:  # the driver did it all the same
                        self._place = gpu
                        return
                    break
        raise last or Failed(Step.RETURN, OSError(errno.ENODEV, "the GPU that it was on is not known"))

    # Helpers

    @property
    def _pid(self) -> int:
        return self._request.process.pid

    def _where(self) -> str:
        return self._place if self._assumed in (State.RUNNING, State.LOCKED) else ""

    def _tries(self) -> Iterator[float]:
        return (PAUSE_S * 2**count for count in range(TRIES))

    @contextmanager
    def _step(self, step: Step) -> Iterator[None]:
        begun = self.clock()
        self.report(Progress(step, begun))
        try:
            yield
        except OSError as error:
            failed = Failed(step, error)
            now = self.clock()
            self.report(Progress(step, now, (now - begun) * 1e3, errno_of(error), failed.words))
            raise failed from error
        now = self.clock()
        self.report(Progress(step, now, (now - begun) * 1e3))


def _gone(error: OSError) -> bool:
    return isinstance(error, ProcessLookupError)
