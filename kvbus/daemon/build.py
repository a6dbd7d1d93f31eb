"""Create the relay from the configuration, and find the seq reservations of its streams.

kvbus reserves the seqs of an outgoing stream on disk before it uses them, so that no seq goes back after a crash.
"""

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
from kvbus.daemon.views import AccessScope, AccessScopes, topic_of
from kvbus.state.reservations import SeqReservations, StreamKey

_NOBODY_IS_GONE: Final[Mapping[int, Worker]] = {}


def make_relay(
    config: Config,
    streams: Mapping[int, SourceStream],
    reservations: SeqReservations,
    gone: Mapping[int, Worker] = _NOBODY_IS_GONE,
    views: AccessScopes | None = None,
    runtime: Runtime = RUNTIME,
) -> Relay:
    """Create a relay with a source in each slot of ``streams``. All other slots have no source yet.

    Args:
        config: the configuration.
        streams: the stream that each source publishes, by the source's slot.
        reservations: the seq reservations, which contain the first seq of each outgoing stream.
        gone: the removed workers that keep their slots, by slot.
        views: the views of all outputs; None if no router has limited rights.
        runtime: the clocks, sockets and store of the daemon.
    """
    views = views or AccessScopes(config, {})
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
    """Return the relay's specification of the source that reads this stream of an engine."""
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
        max_owners=limits.max_owners,
        max_index_bytes=limits.max_index_bytes,
    )


def new_stream(
    config: Config, view: AccessScope, worker: Worker, first_seq: int, runtime: Runtime = RUNTIME
) -> NewStream:
    """Return the specification of the stream that an output or a view has for one worker.

    Args:
        config: the configuration.
        view: the output or view.
        worker: the worker whose batches the stream carries.
        first_seq: the seq of the stream's first batch.
        runtime: provides the random publisher id, which only the snapshot protocol uses.
    """
    output = config.outputs[view.output]
    topic = topic_of(config, output, worker)
    publisher_id = runtime.random_bytes(PUBLISHER_ID_BYTES) if output.snapshot_endpoint else b""
    return NewStream(topic, first_seq, publisher_id, hidden=not view.sees(config, worker))


def heartbeat_of(output: OutputConfig) -> float:
    """Return the seconds after which a silent stream of an output sends an empty batch.

    It is at most 1 s with the snapshot protocol, whose readers expect an empty batch each second.
    """
    return min(output.heartbeat or 1.0, 1.0) if output.snapshot_endpoint else output.heartbeat


def journal_bounds(config: Config, output: OutputConfig) -> tuple[int, int]:
    """Return the maximum number and the maximum size in bytes of the batches that each stream keeps for replays.

    If the output repeats the seqs of a log (``numbers: log``), the stream's journal holds the complete state. It may
    then be as large as the index: ``limits.max_blocks`` and ``limits.max_index_bytes`` apply.
    """
    if output.numbers == "log":
        return config.limits.max_blocks, config.limits.max_index_bytes
    return output.journal_batches, output.journal_bytes


def output_spec(
    config: Config,
    view: AccessScope,
    number: int,
    streams: Mapping[int, SourceStream],
    reservations: SeqReservations,
    gone: Mapping[int, Worker] = _NOBODY_IS_GONE,
    runtime: Runtime = RUNTIME,
) -> OutputSpec:
    """Return the relay's specification of an output or a view.

    Args:
        config: the configuration.
        view: the output or view.
        number: the number of the view. The outputs have the first numbers.
        streams: the stream that each source publishes, by the source's slot.
        reservations: the seq reservations, which contain the first seq of each outgoing stream.
        gone: the removed workers that keep their slots, by slot.
        runtime: the clocks, sockets and store of the daemon.
    """
    output, grant = config.outputs[view.output], view.grant
    merged = output.layout == "merged"
    workers = {slot: worker_of(config, stream) for slot, stream in streams.items()}
    if merged:
        first = workers[min(workers)] if workers else Worker("", 0)  # a placeholder until discovery has found a source
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
    reservations: SeqReservations, config: Config, placement: Placement, views: AccessScopes | None = None
) -> None:
    """Find or create the seq reservations of the outgoing streams of all outputs and views.

    Args:
        reservations: the seq reservations of the daemon.
        config: the configuration with the outputs.
        placement: the slots of the workers.
        views: the views of all outputs; None if no router has limited rights.
    """
    for number, view in enumerate((views or AccessScopes(config, {})).all):
        add_reservations(reservations, config, view, number, placement)


def add_reservations(
    reservations: SeqReservations, config: Config, view: AccessScope, number: int, placement: Placement
) -> None:
    """Find or create the seq reservations of all streams of one output or view."""
    layout = config.outputs[view.output].layout
    # A merged output has one stream, which needs a reservation even before discovery has found a source.
    if layout == "merged":
        reservations.add(number, 0, _stream_name(config, view, 0))
        return
    gone = set(placement.gone)
    for worker in placement.slots:
        if layout == "per_topic" or worker not in gone:
            add_reservation(reservations, config, view, number, placement, worker)


def add_reservation(
    reservations: SeqReservations, config: Config, view: AccessScope, number: int, placement: Placement, worker: Worker
) -> None:
    """Find or create the seq reservation of the stream that an output or view has for one worker.

    The key of the reservation consists of the output's name and endpoint. The stream's topic is added if several
    streams of the output share an endpoint.
    """
    output, slot = config.outputs[view.output], placement.slots[worker]
    name = _stream_name(config, view, slot)
    if output.layout == "per_source" and output.log is None:
        reservations.add(number, slot, name)
        return
    # All streams of this output have the same endpoint, so the topic is part of the key.
    topic = topic_of(config, output, worker) or b""
    least = placement.forgotten if output.layout == "per_topic" else 0
    reservations.add(number, slot, f"{name} {topic.decode()}", least)


def _stream_name(config: Config, view: AccessScope, slot: int) -> str:
    return f"{view.name(config)} {config.outputs[view.output].stream_endpoints(slot).endpoint}"


def next_seqs(relay: Relay) -> dict[StreamKey, int]:
    """Return the next seq of each outgoing stream that has ever been open.

    At a shutdown, these seqs are written to the seq reservations. A closed stream whose next seq is 0 has never been
    open in this process. It is left out, because 0 would replace the reservation that an earlier process has made.
    """
    return {
        (number, slot): stream.next_seq
        for number, output in enumerate(relay.outputs)
        for slot, stream in enumerate(output.streams)
        if stream.next_seq or not stream.closed
    }
