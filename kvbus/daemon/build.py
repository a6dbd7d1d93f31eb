"""From the configuration to the relay's specifications, and to the marks of its numbering."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

from msgspec import structs

from kvbus.config import Config, OutputConfig, SourceStream, render_topic
from kvbus.core.normalizing.normalizer import Rules
from kvbus.core.outputs.output import NewStream, OutputSpec
from kvbus.core.relay import Relay
from kvbus.core.sequencing.settings import Settings
from kvbus.core.source import NOBODY, SourceSpec
from kvbus.core.wire.frames import PUBLISHER_ID_BYTES, FrameLimits
from kvbus.core.wire.profiles import PROFILES
from kvbus.daemon.seq_reservation import SeqMarks


def make_relay(config: Config, streams: Mapping[int, SourceStream], marks: Marks) -> Relay:
    """A relay with a place for each slot; slots that are left out are free places."""
    places = range(max(streams) + 1)
    return Relay(
        [source_spec(config, streams[slot]) if slot in streams else NOBODY for slot in places],
        [_output_spec(config, number, streams, marks) for number in range(len(config.outputs))],
        FrameLimits(config.limits.max_frames, config.limits.max_frame_bytes, config.limits.max_events),
    )


def source_spec(config: Config, stream: SourceStream) -> SourceSpec:
    """What the relay has to know of one engine publisher."""
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
        max_blocks=config.limits.max_blocks,
    )
    return SourceSpec(stream.label, stream.rank, settings, rules, config.on_lost, config.source_timeout, stream.topic)


def new_stream(config: Config, output: OutputConfig, stream: SourceStream, first_seq: int) -> NewStream:
    """One output's stream of one source."""
    topic = None if output.topic is None else render_topic(output.topic, stream, config)
    publisher_id = secrets.token_bytes(PUBLISHER_ID_BYTES) if output.snapshot_endpoint else b""
    return NewStream(topic, first_seq, publisher_id)


def _output_spec(config: Config, number: int, streams: Mapping[int, SourceStream], marks: Marks) -> OutputSpec:
    output = config.outputs[number]
    merged = output.layout == "merged"
    if merged:
        new = [new_stream(config, output, streams[min(streams)], marks.first(number, 0))]
    else:
        new = [
            new_stream(config, output, streams[slot], marks.first(number, slot)) if slot in streams else NewStream()
            for slot in range(max(streams) + 1)
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
    )


class Marks:
    """The marks of all outgoing streams, by output and place.

    Args:
        config: says which outputs there are.
        streams: the sources' streams by slot.
        directory: where they are kept; None keeps them for this process only.

    Raises:
        InUseError: another process numbers one of these streams.
    """

    def __init__(self, config: Config, streams: Mapping[int, SourceStream], directory: Path | None) -> None:
        self._config = config
        self._marks = SeqMarks(directory, ())
        self._place: dict[tuple[int, int], int] = {}
        try:
            for number, output in enumerate(config.outputs):
                for at in (0,) if output.layout == "merged" else streams:
                    self.add(number, at)
        except BaseException:
            self.close(None)
            raise

    def add(self, number: int, at: int) -> None:
        """One more stream; one that was there before has its own mark again.

        Raises:
            InUseError: another process numbers it; nothing has changed.
        """
        if (number, at) not in self._place:
            output = self._config.outputs[number]
            self._place[number, at] = self._marks.add(f"{output.name} {output.stream_endpoints(at).endpoint}")

    def first(self, number: int, at: int) -> int:
        """The number a stream begins with."""
        return self._marks.first(self._place[number, at])

    def least(self, number: int, at: int) -> int:
        """The lowest number a stream may go on with."""
        return self._marks.least(self._place[number, at])

    def use(self, number: int, at: int, seq: int) -> None:
        """Called before ``seq`` is sent."""
        self._marks.use(self._place[number, at], seq)

    def close(self, relay: Relay | None) -> None:
        """An orderly end: the next process goes on where ``relay`` is; None: this one has used no number."""
        following = [self._marks.first(place) for place in self._place.values()]
        if relay is not None:
            for (number, at), place in self._place.items():
                streams = relay.outputs[number].streams
                # of a reload that was refused a stream may be left that was never opened
                if at < len(streams) and (streams[at].next_seq or not streams[at].closed):
                    following[place] = streams[at].next_seq
        self._marks.close(following if relay is not None else [])
