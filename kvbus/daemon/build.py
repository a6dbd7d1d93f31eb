"""Turn the configuration into the relay's specifications, and find the seq reservations of its streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import structs

from kvbus.config import Config, OutputConfig, SourceStream
from kvbus.core.outputs.spec import NewStream, OutputSpec, Rights
from kvbus.core.relay import Relay
from kvbus.core.source_spec import SourceSpec
from kvbus.core.wire.frames import PUBLISHER_ID_BYTES, FrameLimits
from kvbus.core.wire.profiles import PROFILES
from kvbus.daemon.placement import Placement, Worker, worker_of
from kvbus.daemon.runtime import RUNTIME, Runtime
from kvbus.daemon.views import View, Views, topic_of
from kvbus.state.reservations import SeqReservations, StreamKey

_NOBODY_IS_GONE: Final[Mapping[int, Worker]] = {}


def make_relay(
    config: Config,
    streams: Mapping[int, SourceStream],
    reservations: SeqReservations,
    gone: Mapping[int, Worker] = _NOBODY_IS_GONE,
    views: Views | None = None,
    runtime: Runtime = RUNTIME,
) -> Relay:
    """Create a relay with a source for each slot. A slot without a source or a worker in ``gone`` is free.

    Args:
        config: the configuration.
        streams: the sources' streams by slot.
        reservations: the reservations of all streams.
        gone: the removed workers that keep a slot, by slot.
        views: the outputs' views.
        runtime: the clocks, sockets and store of the daemon.
    """
    views = views or Views(config, {})
    specs = [
        SourceSpec(rank=gone[slot].rank if slot in gone else 0)
        for slot in range(max((*streams, *gone), default=-1) + 1)
    ]
    for slot, stream in streams.items():
        specs[slot] = source_spec(config, stream)
    return Relay(
        specs,
        [
            output_spec(config, view, number, streams, reservations, gone, runtime)
            for number, view in enumerate(views.all)
        ],
        FrameLimits(config.limits.max_frames, config.limits.max_frame_bytes, config.limits.max_events),
    )


def source_spec(config: Config, stream: SourceStream) -> SourceSpec:
    """Return the relay's specification of one engine publisher."""
    limits = config.limits
    return SourceSpec(
        stream.label,
        stream.rank,
        stream.topic,
        stream.shared,
        numbered=config.log_numbers,
        replay=stream.replay_endpoint is not None,
        snapshot=stream.snapshot_endpoint is not None,
        replay_timeout=config.replay_timeout,
        probe_interval=config.probe_interval,
        source_timeout=config.source_timeout,
        reorder_batches=config.reorder_batches,
        max_held_bytes=limits.max_held_bytes,
        on_lost=config.on_lost,
        block_size=None if config.block_size == "auto" else config.block_size,
        duplicates="ignore" if config.log_numbers else stream.duplicates,
        groups=config.groups,
        orphans=config.orphans,
        without_media=frozenset(config.without_media),
        expiring_media=frozenset(config.expiring_media),
        expire_after=config.expire_after,
        clears="all" if config.log_numbers else stream.clears,
        max_blocks=limits.max_blocks,
        max_groups=limits.max_groups,
        max_index_bytes=limits.max_index_bytes,
    )


def new_stream(config: Config, view: View, worker: Worker, first_seq: int, runtime: Runtime = RUNTIME) -> NewStream:
    """Return the specification of one source's stream on an output or a view."""
    output = config.outputs[view.output]
    topic = topic_of(config, output, worker)
    publisher_id = runtime.random_bytes(PUBLISHER_ID_BYTES) if output.snapshot_endpoint else b""
    return NewStream(topic, first_seq, publisher_id, hidden=not view.sees(config, worker))


def heartbeat_of(output: OutputConfig) -> float:
    """Return how long a stream may be silent, in seconds.

    Readers of the snapshot protocol expect an empty batch a second.
    """
    return min(output.heartbeat or 1.0, 1.0) if output.snapshot_endpoint else output.heartbeat


def journal_bounds(config: Config, output: OutputConfig) -> tuple[int, int]:
    """Return the maximum number of batches and bytes of each stream's journal.

    With a log's numbers the journal holds the complete state.
    """
    if output.numbers == "log":
        return config.limits.max_blocks, config.limits.max_index_bytes
    return output.journal_batches, output.journal_bytes


def output_spec(
    config: Config,
    view: View,
    number: int,
    streams: Mapping[int, SourceStream],
    reservations: SeqReservations,
    gone: Mapping[int, Worker] = _NOBODY_IS_GONE,
    runtime: Runtime = RUNTIME,
) -> OutputSpec:
    """Return the specification of an output or a view, by its number."""
    output, grant = config.outputs[view.output], view.grant
    merged = output.layout == "merged"
    workers = {slot: worker_of(config, stream) for slot, stream in streams.items()}
    if merged:
        first = workers[min(workers)] if workers else Worker("", 0)  # no source is found yet
        new = [new_stream(config, view, first, reservations.first(number, 0), runtime)]
    else:
        served = workers | (dict(gone) if output.layout == "per_topic" else {})
        new = [
            new_stream(config, view, served[slot], reservations.first(number, slot), runtime)
            if slot in served
            else NewStream()
            for slot in range(max((*streams, *gone), default=-1) + 1)
        ]
    profile = PROFILES[output.profile]
    if output.token_ids == "drop":
        profile = profile.without_tokens()
    some = view.closed or grant.limits_sources
    return OutputSpec(
        view.name(config),
        structs.replace(profile, framing=output.framing),
        [each.topic for each in new],
        merged,
        heartbeat_of(output),
        *journal_bounds(config, output),
        [each.first_seq for each in new],
        [each.publisher_id for each in new] if output.snapshot_endpoint else (),
        reservations.slots(number) if merged else 0,
        output.layout == "per_topic",
        Rights(grant.loras_expression, grant.salts),
        frozenset(slot for slot, worker in workers.items() if not view.sees(config, worker)) if some else None,
        view.output if number >= len(config.outputs) else None,
        view.closed,
        output.numbers == "log",
        runtime.state_batch_blocks,
    )


def reserve_seqs(
    reservations: SeqReservations, config: Config, placement: Placement, views: Views | None = None
) -> None:
    """Find or create the reservations of all streams.

    Args:
        reservations: all reservations.
        config: the configuration with the outputs.
        placement: the workers' slots.
        views: the outputs' views.
    """
    for number, view in enumerate((views or Views(config, {})).all):
        add_reservations(reservations, config, view, number, placement)


def add_reservations(
    reservations: SeqReservations, config: Config, view: View, number: int, placement: Placement
) -> None:
    """Find or create the reservations of all streams of one output or view."""
    layout = config.outputs[view.output].layout
    if layout == "merged":  # one stream, even while no source is found
        reservations.add(number, 0, _stream_name(config, view, 0))
        return
    gone = set(placement.gone)
    for worker in placement.slots:
        if layout == "per_topic" or worker not in gone:
            add_reservation(reservations, config, view, number, placement, worker)


def add_reservation(
    reservations: SeqReservations, config: Config, view: View, number: int, placement: Placement, worker: Worker
) -> None:
    """Find or create the reservation of one source's stream.

    A stream is identified by its output's name and endpoint, and by its topic.
    """
    output, slot = config.outputs[view.output], placement.slots[worker]
    name = _stream_name(config, view, slot)
    if output.layout == "per_source" and output.log is None:
        reservations.add(number, slot, name)
        return
    topic = topic_of(config, output, worker) or b""  # all streams of a log have the same endpoint
    least = placement.forgotten if output.layout == "per_topic" else 0
    reservations.add(number, slot, f"{name} {topic.decode()}", least)


def _stream_name(config: Config, view: View, slot: int) -> str:
    return f"{view.name(config)} {config.outputs[view.output].stream_endpoints(slot).endpoint}"


def next_seqs(relay: Relay) -> dict[StreamKey, int]:
    """Return the next number of each stream that was ever open.

    A closed stream at number 0 was never open, so its reservation must not change.
    """
    return {
        (number, slot): stream.next_seq
        for number, output in enumerate(relay.outputs)
        for slot, stream in enumerate(output.streams)
        if stream.next_seq or not stream.closed
    }
