"""What an earlier process has left: its state and its numbering.

The state says what routers hold. The seq reservations say how far their streams have got. If the state may be older
than what was sent, it is a beginning and not the truth: kvbus clears the routers and sends them the state again, in
numbers that nobody has seen.
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
    """What a process begins with.

    Attributes:
        relay: with what an earlier process knew, or empty.
        restored: the relay goes on as if nothing had happened; else routers have to be cleared first.
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
        state: reads the state; None: it is not kept.
        reservations: of all streams.
        now: the time of the relay's clock.
        views: the outputs' views.
        readers: what the state depends on beside the sources and outputs: see :meth:`Views.identity`.
        runtime: what the daemon runs on.
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
    log.warning("the state may be older than what routers have got: they are cleared and get it again")
    relay.resume_at(reservations.first)
    state.distrust()
    return Beginning(relay, restored=False)


def identity(config: Config, streams: Mapping[int, SourceStream], slots: int, readers: Sequence[str] = ()) -> list[str]:
    """Return the names that a state belongs to: the sources with their slots, the outputs, and the views' readers.

    ``slots`` is how many slots the relay has: one more than the sources need if the last one was taken away.

    What was counted by another rule of ``duplicates`` may be dead: no engine would remove it any more.
    """
    sources = [f"{slot} {stream.label} {stream.duplicates}" for slot, stream in sorted(streams.items())]
    return [*sources, f"{slots} slots", *(output.name for output in config.outputs), *readers]
