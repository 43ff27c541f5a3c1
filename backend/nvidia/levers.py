"""SetTimeslice, DetachTSG and AttachTSG, on TSGs that were found before.

A status of OK means that the driver accepted the request, not that it acts on it (on GSP the firmware does the work);
the self-test measures whether it does. Handles can be reused in principle, so each is checked again before it is
used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence, Set

import attrs

from backend.core.protocols import split_timeslice
from backend.nvidia import rm
from backend.nvidia.discover import Engine, Tsg
from backend.nvidia.waiting import Batch

log = logging.getLogger(__name__)

Controls = Mapping[int, rm.Control]
"""The files of a process by descriptor number; a request goes through the descriptor that its client belongs to."""

Key = tuple[int, int]
"""A channel or a TSG, as (client, handle)."""

ReadBack = Callable[[int, int], bool | None]
"""Returns whether a channel (client, handle) is enabled; None when that cannot be learnt."""

UNKNOWN = -1
"""Timeslice of a TSG that the driver was asked to change, without an acknowledgement."""

NESTED = 8
"""Times that a channel is enabled, at most, until it counts as enabled."""


def name(tsg: Tsg) -> Key:
    """Return the (client, handle) by which the driver knows a TSG."""
    return tsg.client, tsg.handle


def still_there(controls: Controls, tsgs: Sequence[Tsg], whole: Collection[Tsg]) -> Sequence[Tsg]:
    """Return those of `tsgs` whose handles still are TSGs. Those that are also in `whole` keep the channels that
    still exist; the others get no channels, since their channels are not acted on.
    """
    found = []
    for tsg in tsgs:
        control = controls.get(tsg.fd)
        if control is None or control.class_of(tsg.client, tsg.handle) != rm.CLASS_TSG:
            continue
        channels = tuple(rm.still_channels(control, tsg.client, tsg.channels)) if tsg in whole else ()
        found.append(attrs.evolve(tsg, channels=channels))
    return found


def shares(tsgs: Sequence[Tsg], us: int) -> Mapping[Tsg, int]:
    """Split `us` microseconds in a round over the GR TSGs; 0 gives each its default."""
    gr = [tsg for tsg in tsgs if tsg.engine is Engine.GR]
    return {tsg: split_timeslice(us, len(gr)) if us else tsg.default_us or rm.TIMESLICE_DEFAULT_US for tsg in gr}


def differing(tsgs: Sequence[Tsg], us: int, slices: Mapping[Key, int]) -> Iterator[tuple[Tsg, int]]:
    """Yield the GR TSGs whose timeslice is known to differ from their part of `us` microseconds, with that
    part. A TSG that was given none has its native timeslice, which may change, so it is yielded even where the
    two are equal.
    """
    for tsg, share in shares(tsgs, us).items():
        if slices.get(name(tsg), UNKNOWN if us else share) != share:
            yield tsg, share


def set_timeslice(controls: Controls, tsgs: Sequence[Tsg], us: int, slices: MutableMapping[Key, int]) -> None:
    """SetTimeslice of a process: split `us` microseconds over its GR TSGs; 0 gives back what each had when found.

    `slices` holds the timeslices that were set, and is kept up to date: the driver is not asked for what is known to
    hold.
    """
    for tsg, share in list(differing(tsgs, us, slices)):
        key = name(tsg)
        slices[key] = UNKNOWN
        try:
            controls[tsg.fd].query(tsg.client, tsg.handle, rm.SET_TIMESLICE, rm.TIMESLICE, share)
        except rm.RmError as error:
            if not error.gone or controls[tsg.fd].class_of(tsg.client, tsg.handle) == rm.CLASS_TSG:
                raise
            log.debug("TSG 0x%x went away: %s", tsg.handle, error)
        else:
            slices[key] = share
    there = {name(tsg) for tsg in tsgs} if us else set()
    for key in slices.keys() - there:
        del slices[key]


def timeslices(controls: Controls, tsgs: Collection[Tsg]) -> Mapping[Key, int]:
    """Return the current timeslices of TSGs, microseconds, one driver call each. TSGs that are gone are left out."""
    found = {}
    for tsg in tsgs:
        try:
            query = controls[tsg.fd].query
            found[name(tsg)] = query(tsg.client, tsg.handle, rm.GET_TIMESLICE, rm.TIMESLICE, 0)[0]
        except rm.RmError as error:
            if not error.gone:
                raise
    return found


def detach(controls: Controls, tsgs: Sequence[Tsg], off: set[Key], enabled: ReadBack) -> None:
    """DetachTSG: take all channels of these TSGs off the runlist; on return they do not run.

    `off` holds the channels that are off already, and gets the others. Those are left alone, since disabling nests.
    """
    for control, client, subdevice, channels in _batches(controls, tsgs, off):
        try:
            rm.switch(control, client, subdevice, channels, True)
        except rm.RmError as error:
            # A call that fails for one channel, say one freed a moment ago, has disabled the others (measured).
            states = {channel: enabled(client, channel) for channel in channels}
            off.update((client, channel) for channel, state in states.items() if state is not True)
            left = rm.still_channels(control, client, channels)
            # Without read-back, enable the channels: one enable too many does no harm, a second disable does, and to
            # believe a running channel off would report it as frozen.
            if unknown := [channel for channel in left if states[channel] is None]:
                rm.switch(control, client, subdevice, unknown, False)
                off.difference_update((client, channel) for channel in unknown)
            if not error.gone:
                raise
            if again := [channel for channel in left if states[channel] is not False]:
                rm.switch(control, client, subdevice, again, True)
            off.update((client, channel) for channel in left)
        else:
            off.update((client, channel) for channel in channels)


def attach(controls: Controls, tsgs: Sequence[Tsg], off: set[Key], enabled: ReadBack) -> None:
    """AttachTSG: put all channels of these TSGs back on the runlist, even if another process disabled
    them once more.
    """
    for control, client, subdevice, channels in _batches(controls, tsgs, frozenset()):
        for _ in range(NESTED):
            try:
                rm.switch(control, client, subdevice, channels, False)
            except rm.RmError as error:
                if not error.gone:
                    raise
                channels = rm.still_channels(control, client, channels)
                if channels:
                    rm.switch(control, client, subdevice, channels, False)
            if not channels or enabled(client, channels[0]) is not False:
                break
    gone = {(tsg.client, channel) for tsg in tsgs for channel in tsg.channels}
    off.difference_update(gone)


def attach_once(controls: Controls, tsgs: Sequence[Tsg], off: set[Key]) -> None:
    """Enable every channel once, before :func:`detach` disables all of them. What was disabled stays disabled
    as often as it was; what another process enabled is disabled once. Asking about each channel would take four
    times as long.
    """
    for control, client, subdevice, channels in _batches(controls, tsgs, frozenset()):
        off.difference_update((client, channel) for channel in channels)
        try:
            rm.switch(control, client, subdevice, channels, False)
        except rm.RmError as error:
            if not error.gone:  # the others of the call were served
                raise


def left_off(tsgs: Sequence[Tsg], enabled: ReadBack) -> set[Key]:
    """Return the channels that are disabled: an earlier daemon died before it enabled them."""
    keys = [(tsg.client, channel) for tsg in tsgs for channel in tsg.channels]
    return {key for key in keys if enabled(*key) is False}


def batches(tsgs: Iterable[Tsg], without: Set[Key] = frozenset()) -> Iterator[Batch]:
    """Yield the channels of TSGs, each once, as the calls name them that take these or put them back."""
    groups: dict[tuple[int, int, int], dict[int, None]] = {}
    for tsg in tsgs:
        channels = [channel for channel in tsg.channels if (tsg.client, channel) not in without]
        groups.setdefault((tsg.fd, tsg.client, tsg.subdevice), {}).update(dict.fromkeys(channels))
    for (fd, client, subdevice), found in groups.items():
        channels = [*found]
        for start in range(0, len(channels), rm.CHANNELS_A_CALL):
            yield Batch(fd, client, subdevice, tuple(channels[start : start + rm.CHANNELS_A_CALL]))


def _batches(
    controls: Controls, tsgs: Sequence[Tsg], without: Set[Key]
) -> Iterator[tuple[rm.Control, int, int, list[int]]]:
    """Yield (control, client, subdevice, channels) for each call that is needed, with up to 64 channels."""
    for batch in batches(tsgs, without):
        yield controls[batch.fd], batch.client, batch.subdevice, list(batch.channels)
