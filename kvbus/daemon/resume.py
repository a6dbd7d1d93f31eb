"""Load the state and the numbering that an earlier process has written to disk.

The state contains the blocks that routers hold. The seq reservations contain the seqs that may have been used. If the
state may be older than the newest batches that kvbus has sent, routers may hold other blocks. Then kvbus clears the
routers and sends them the state again, under seqs that no router has seen.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from kvbus.config import Config, SourceStream
from kvbus.core.relay import Relay
from kvbus.daemon.build import make_relay
from kvbus.daemon.placement import Placement
from kvbus.daemon.runtime import RUNTIME, Runtime
from kvbus.daemon.views import AccessScopes
from kvbus.state.contract import StoreError
from kvbus.state.reservations import SeqReservations
from kvbus.state.writer import StateWriter

log = logging.getLogger("kvbus.daemon")

RULES: Final = ("block_size", "groups", "without_media", "orphans", "on_lost")
"""Configuration keys that decide which of an engine's blocks kvbus keeps. They apply to all sources."""


class Beginning(NamedTuple):
    """The relay with which a process begins.

    Attributes:
        relay: the relay with the state of an earlier process, or an empty relay.
        restored: whether the relay continues as if kvbus had not restarted. If not, kvbus must clear the routers first.
    """

    relay: Relay
    restored: bool


def resume(
    config: Config,
    placement: Placement,
    state: StateWriter | None,
    reservations: SeqReservations,
    now: float,
    views: AccessScopes | None = None,
    readers: Sequence[str] = (),
    runtime: Runtime = RUNTIME,
) -> Beginning:
    """Create the relay and load the state of an earlier process. If the state is not usable, the relay is empty.

    Args:
        config: the configuration.
        placement: the slots of the workers (ranks of engines).
        state: reads the state on disk; None if kvbus keeps no state.
        reservations: the seq reservations of all outgoing streams.
        now: the current time of the relay's clock.
        views: the views of all outputs; None if no router has limited rights.
        readers: names for the views and their keys. The state is loaded only if it was written for the same views and
            keys. See :meth:`Views.identity`.
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
    text = "the state on disk may be older than what routers have: they get AllBlocksCleared and the state again"
    log.warning(text)
    relay.resume_at(reservations.first)
    state.distrust()
    return Beginning(relay, restored=False)


def identity(config: Config, streams: Mapping[int, SourceStream], slots: int, readers: Sequence[str] = ()) -> list[str]:
    """Return the names of everything that a state on disk depends on. A state with other names is not loaded.

    These are the sources with their slots, the outputs, the readers of the views, and the rules that decide which
    blocks kvbus keeps (``duplicates``, ``clears`` and :data:`RULES`). After a change of a rule, the state may hold
    blocks that the new rule excludes, and the write-ahead log would give other blocks than routers have. The names
    always contain ``duplicates``. They contain another rule only if it does not have its default value.

    Args:
        config: the configuration.
        streams: the stream that each source publishes, by the source's slot.
        slots: the relay's number of slots. It may be higher than the highest slot of a source, if sources were removed.
        readers: names for the views and their keys. See :meth:`Views.identity`.
    """
    sources = [
        f"{slot} {stream.label} {stream.duplicates}" + ("" if stream.clears == "auto" else f" {stream.clears}")
        for slot, stream in sorted(streams.items())
    ]
    rules = [
        f"{name} {value}"
        for name in RULES
        if (value := getattr(config, name)) != Config.model_fields[name].get_default(call_default_factory=True)
    ]
    return [*sources, f"{slots} slots", *rules, *(output.name for output in config.outputs), *readers]
