"""The keys of ``limits``."""

from __future__ import annotations

from kvbus.config.section import Section, key
from kvbus.config.values import Int


class Limits(Section):
    """Limits of what an engine or a router may make kvbus hold."""

    max_frame_bytes: Int = key(
        67_108_864,
        "Largest frame accepted from an engine; a larger one costs the connection, which is made again.",
        example=67_108_864,
        unit="bytes",
        ge=1024,
        le=2**31 - 1,
    )
    max_frames: Int = key(16, "Most frames in one message.", example=16, unit="frames", ge=5, le=1024)
    max_events: Int = key(65_536, "Most events in one batch.", example=65_536, unit="events", ge=1)
    max_sources: Int = key(
        1024,
        "Most sources, all ranks counted, those that are gone among them: each keeps its number (its rank on a merged "
        "output, its seq under its topic) until another one needs the place. Further ones that are found are left out.",
        example=1024,
        unit="sources",
        ge=1,
        le=65_536,
    )
    max_blocks: Int = key(
        20_000_000,
        "Most live blocks of one source, coarse ones and tails that are left out among them; at the limit stores are "
        "refused.",
        example=20_000_000,
        unit="blocks",
        ge=1,
    )
    max_index_bytes: Int = key(
        4_294_967_296,
        "Most memory that the blocks of one source may take, as kvbus estimates it; at the limit stores are refused.",
        example=4_294_967_296,
        unit="bytes",
        ge=1,
    )
    max_groups: Int = key(
        64,
        "Most KV cache groups of one source (hybrid models have a handful); stores of further ones are refused.",
        example=64,
        unit="groups",
        ge=1,
        le=4096,
    )
    max_held_bytes: Int = key(
        268_435_456,
        "Payload in the reorder buffer of each source; at the limit the newest are dropped, and asked for again.",
        example=268_435_456,
        unit="bytes",
        ge=1,
    )
    max_request_bytes: Int = key(
        65_536,
        "Largest frame accepted from a router (subscriptions, replay and snapshot requests); a larger one costs the "
        "connection.",
        example=65_536,
        unit="bytes",
        ge=1024,
        le=2**31 - 1,
    )
    max_views: Int = key(
        64,
        "Most different rights of the owners of keys, on all outputs together: for each kvbus keeps streams, and the "
        "blocks that may be read. A list with more is refused.",
        example=64,
        unit="views",
        ge=1,
        le=4096,
    )
    max_replay_sessions: Int = key(
        64, "Replay answers being sent at once, per output.", example=64, unit="sessions", ge=1
    )
