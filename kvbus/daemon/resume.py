"""What an earlier process has left, and what is made of it: its state, its numbering, and what they say of each other.

The state says what routers hold. The seq reservations say how far their streams have got. Where the state may be older
than that, it is a beginning and not the truth: routers are cleared, and get it again in seqs that nobody has seen.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kvbus.config import Config, SourceStream
from kvbus.core.relay import Relay
from kvbus.core.write_ahead_log import StateError
from kvbus.daemon.build import make_relay, next_seqs
from kvbus.daemon.disk import Disk
from kvbus.daemon.placement import Placement
from kvbus.daemon.seq_reservation import SeqReservations
from kvbus.daemon.state_keys import NO_KEYS, StateKeys
from kvbus.daemon.state_store import StateStore
from kvbus.daemon.views import Views

log = logging.getLogger("kvbus.daemon")


class Beginning(NamedTuple):
    """What a process begins with.

    Attributes:
        relay: with what an earlier process knew, or empty.
        store: where the state is kept from now on; None: nowhere.
        restored: the relay goes on as if nothing had happened; else routers have to be cleared first.
    """

    relay: Relay
    store: StateStore | None
    restored: bool


def resume(
    config: Config,
    placement: Placement,
    directory: Path | None,
    reservations: SeqReservations,
    disk: Disk,
    now: float,
    keys: StateKeys = NO_KEYS,
    views: Views | None = None,
    readers: Sequence[str] = (),
) -> Beginning:
    """Load the state of an earlier process. If it cannot be used, the relay begins empty.

    Args:
        config: the configuration.
        placement: the workers' slots.
        directory: where the state is; None: it is not kept.
        reservations: of all streams.
        disk: the real one, or a test's.
        now: the time of the relay's clock.
        keys: what seals the state.
        views: the outputs' views.
        readers: what the state depends on beside the sources and outputs: see :meth:`Views.identity`.

    Raises:
        OSError: the directory cannot be made.
        StateKeyError: the state that is there cannot be opened.
    """
    streams, gone = placement.streams(config), placement.gone_slots
    relay = make_relay(config, streams, reservations, gone, views)
    if directory is None:
        return Beginning(relay, None, restored=False)
    names = identity(config, streams, readers)
    store = StateStore(directory, names, disk, sync=config.state_sync == "batch", keys=keys)
    reservations.also = store.reserve
    try:
        restored = store.load(relay, now)
    except StateError:
        restored = False
    if not restored:
        store.reserved = reservations.skip(store.reserved, margin=store.may_be_older)
        return Beginning(make_relay(config, streams, reservations, gone, views), store, restored=False)
    if not store.may_be_older and not _behind(relay, reservations):
        return Beginning(relay, store, restored=True)
    log.warning("the state may be older than what routers have got: they are cleared and get it again")
    reached = max(store.reserved, *next_seqs(relay).values())
    store.reserved = reservations.skip(reached, margin=store.may_be_older)
    relay.resume_at(reservations.first)
    store.distrust()
    return Beginning(relay, store, restored=False)


def _behind(relay: Relay, reservations: SeqReservations) -> bool:
    """Return whether a reservation shows that routers have got more than the state knows."""
    return any(
        stream.next_seq < reservations.lowest(number, slot)
        for number, output in enumerate(relay.outputs)
        for slot, stream in output.served_streams.items()
    )


def identity(config: Config, streams: Mapping[int, SourceStream], readers: Sequence[str] = ()) -> list[str]:
    """Return the names that a state belongs to: the sources with their slots, the outputs, and the views' readers.

    What was counted by another rule of ``duplicates`` may be dead: no engine would remove it any more.
    """
    sources = [f"{slot} {stream.label} {stream.duplicates}" for slot, stream in sorted(streams.items())]
    return [*sources, *(output.name for output in config.outputs), *readers]
