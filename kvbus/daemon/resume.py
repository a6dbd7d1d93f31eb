"""Load the state and the numbering of an earlier process.

The state says which blocks routers hold. The seq reservations say which numbers may have been used. If the state may be
older than the batches that were sent, it is only a starting point. Then kvbus clears the routers and sends them the
state again, in numbers that no router has seen.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvbus.config import Config, SourceStream
from kvbus.core.relay import Relay
from kvbus.daemon.build import make_relay
from kvbus.daemon.placement import Placement
from kvbus.daemon.runtime import RUNTIME, Runtime
from kvbus.daemon.views import Views
from kvbus.state.contract import StoreError
from kvbus.state.reservations import SeqReservations
from kvbus.state.writer import StateWriter

log = logging.getLogger("kvbus.daemon")


class Beginning(NamedTuple):
    """The relay with which a process begins.

    Attributes:
        relay: the relay with the state of an earlier process, or an empty one.
        restored: whether the relay continues as if kvbus had not restarted. Otherwise routers must be cleared first.
    """

    relay: Relay
    restored: bool


def resume(
    config: Config,
    placement: Placement,
    state: StateWriter | None,
    reservations: SeqReservations,
    now: float,
    views: Views | None = None,
    readers: Sequence[str] = (),
    runtime: Runtime = RUNTIME,
) -> Beginning:
    """Load the state of an earlier process. If it cannot be used, the relay begins empty.

    Args:
        config: the configuration.
        placement: the workers' slots.
        state: reads the state; None if no state is kept.
        reservations: the reservations of all streams.
        now: the time of the relay's clock.
        views: the outputs' views.
        readers: what the state depends on besides the sources and outputs; see :meth:`Views.identity`.
        runtime: the clocks, sockets and store of the daemon.
    """
    streams, gone = placement.streams(config), placement.gone_slots
    relay = make_relay(config, streams, reservations, gone, views, runtime)
    if state is None:
        return Beginning(relay, restored=False)
    try:
        restored = state.load(relay, identity(config, streams, len(relay.sources), readers), now)
    except StoreError:
        restored = False
    if not restored:
        reservations.level()
        return Beginning(make_relay(config, streams, reservations, gone, views, runtime), restored=False)
    if not state.may_be_older:
        return Beginning(relay, restored=True)
    log.warning("the state may be older than the routers' views: routers get AllBlocksCleared and the state again")
    relay.resume_at(reservations.first)
    state.distrust()
    return Beginning(relay, restored=False)


def identity(config: Config, streams: Mapping[int, SourceStream], slots: int, readers: Sequence[str] = ()) -> list[str]:
    """Return the names that a state belongs to: the sources with their slots, the outputs, and the views' readers.

    ``slots`` is the relay's number of slots. It is larger than the sources need if the last one was removed.

    The names include the ``duplicates`` rule: blocks counted by another rule may be dead, and no engine would remove
    them.
    """
    sources = [f"{slot} {stream.label} {stream.duplicates}" for slot, stream in sorted(streams.items())]
    return [*sources, f"{slots} slots", *(output.name for output in config.outputs), *readers]
