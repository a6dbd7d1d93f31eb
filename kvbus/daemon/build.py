"""From the configuration to the relay's specifications, and to the seq reservations of its streams."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

from msgspec import structs

from kvbus.config import Config, OutputConfig, SourceStream, render_topic
from kvbus.core import analytics
from kvbus.core.normalizing.rules import Rules
from kvbus.core.outputs.spec import NewStream, OutputSpec
from kvbus.core.relay import Relay
from kvbus.core.sequencing.settings import Settings
from kvbus.core.source_spec import NOBODY, SourceSpec
from kvbus.core.wire.frames import PUBLISHER_ID_BYTES, FrameLimits
from kvbus.core.wire.profiles import PROFILES
from kvbus.daemon.disk import Disk
from kvbus.daemon.seq_reservation import SeqReservations, StreamKey


def make_relay(config: Config, streams: Mapping[int, SourceStream], reservations: SeqReservations) -> Relay:
    """Make a relay with a source for each slot. Slots that the configuration leaves out are free."""
    return Relay(
        [source_spec(config, streams[slot]) if slot in streams else NOBODY for slot in range(max(streams) + 1)],
        [_output_spec(config, number, streams, reservations) for number in range(len(config.outputs))],
        FrameLimits(config.limits.max_frames, config.limits.max_frame_bytes, config.limits.max_events),
    )


def source_spec(config: Config, stream: SourceStream) -> SourceSpec:
    """Return what the relay has to know of one engine publisher."""
    settings = Settings(
        replay=stream.replay_endpoint is not None,
        snapshot=stream.snapshot_endpoint is not None,
        replay_timeout=config.replay_timeout,
        probe_interval=config.probe_interval,
        reorder_batches=config.reorder_batches,
        reorder_bytes=config.limits.max_held_bytes,
        trust_unverified=config.on_lost == "keep",
    )
    rules = Rules(
        block_size=None if config.block_size == "auto" else config.block_size,
        duplicates=config.duplicates,
        groups=config.groups,
        orphans=config.orphans,
        without_media=frozenset(config.without_media),
        clears=stream.clears,
        max_blocks=config.limits.max_blocks,
        max_groups=config.limits.max_groups,
        max_index_bytes=config.limits.max_index_bytes,
    )
    return SourceSpec(
        stream.label,
        stream.rank,
        settings,
        rules,
        config.on_lost,
        config.source_timeout,
        stream.topic,
        analytics=analytics.LIMIT if config.analytics else 0,
    )


def new_stream(config: Config, output: OutputConfig, stream: SourceStream, first_seq: int) -> NewStream:
    """Return the specification of one output's stream of one source."""
    topic = None if output.topic is None else render_topic(output.topic, stream, config)
    if PROFILES[output.profile].topics == "empty":
        topic = b""
    publisher_id = secrets.token_bytes(PUBLISHER_ID_BYTES) if output.snapshot_endpoint else b""
    return NewStream(topic, first_seq, publisher_id)


def _output_spec(
    config: Config, number: int, streams: Mapping[int, SourceStream], reservations: SeqReservations
) -> OutputSpec:
    output = config.outputs[number]
    merged = output.layout == "merged"
    slots = (0,) if merged else range(max(streams) + 1)
    if merged:
        new = [new_stream(config, output, streams[min(streams)], reservations.first(number, 0))]
    else:
        new = [
            new_stream(config, output, streams[slot], reservations.first(number, slot))
            if slot in streams
            else NewStream()
            for slot in slots
        ]
    return OutputSpec(
        output.name,
        structs.replace(PROFILES[output.profile], framing=output.framing),
        [each.topic for each in new],
        merged,
        # the snapshot protocol's consumers count on an empty batch a second
        min(output.heartbeat or 1.0, 1.0) if output.snapshot_endpoint else output.heartbeat,
        output.journal_batches,
        output.journal_bytes,
        [each.first_seq for each in new],
        [each.publisher_id for each in new] if output.snapshot_endpoint else (),
        reservations.slots(number) if merged else 0,
    )


def reserve_seqs(
    config: Config, streams: Mapping[int, SourceStream], directory: Path | None, disk: Disk | None = None
) -> SeqReservations:
    """Find the reservations of all streams.

    Args:
        config: says which outputs there are.
        streams: the sources' streams by slot.
        directory: where the files are; None keeps none.
        disk: the real one, or a test's.

    Raises:
        InUseError: another process numbers one of these streams.
    """
    reservations = SeqReservations(directory, disk, sync=config.state_sync == "batch")
    try:
        for number, output in enumerate(config.outputs):
            for slot in (0,) if output.layout == "merged" else streams:
                add_reservation(reservations, config, number, slot)
    except BaseException:
        reservations.release()
        raise
    return reservations


def add_reservation(reservations: SeqReservations, config: Config, number: int, slot: int) -> None:
    """Find the reservation of one stream. A stream is known by its output's name and its endpoint.

    Raises:
        InUseError: another process numbers it; nothing has changed.
    """
    output = config.outputs[number]
    reservations.add(number, slot, f"{output.name} {output.stream_endpoints(slot).endpoint}")


def next_seqs(relay: Relay) -> dict[StreamKey, int]:
    """Return the next number of each stream that was ever open.

    A stream that is closed at 0 was never open: its reservation must stay.
    """
    return {
        (number, slot): stream.next_seq
        for number, output in enumerate(relay.outputs)
        for slot, stream in enumerate(output.streams)
        if stream.next_seq or not stream.closed
    }
