"""The keys of ``limits``: bounds of the memory and other resources that a peer can make kvbus use."""

from __future__ import annotations

from kvbus.config.values import Int, Section, Size, key


class Limits(Section):
    """Limits on the memory and other resources that an engine or a router can make kvbus use."""

    max_frame_bytes: Size = key(
        67_108_864,
        "Maximum size of a frame from an engine. A larger frame ends the connection, and kvbus connects again.",
        example=67_108_864,
        unit="bytes",
        ge=1024,
        le=2**31 - 1,
    )
    max_frames: Int = key(
        16, "Maximum number of frames in a message from an engine.", example=16, unit="frames", ge=5, le=1024
    )
    max_events: Int = key(65_536, "Maximum number of events in a batch.", example=65_536, unit="events", ge=1)
    max_sources: Int = key(
        1024,
        "Maximum number of sources. Each rank counts. A removed source counts too, because it keeps its slot "
        "until another source needs the slot. Further discovered engines are ignored.",
        example=1024,
        unit="sources",
        ge=1,
        le=65_536,
    )
    max_blocks: Int = key(
        20_000_000,
        "Maximum number of live blocks of a source, including blocks that kvbus filters out. At the limit, "
        "kvbus rejects stores.",
        example=20_000_000,
        unit="blocks",
        ge=1,
    )
    max_index_bytes: Size = key(
        4_294_967_296,
        "Maximum memory of a source's blocks, as kvbus estimates it. At the limit, kvbus rejects stores.",
        example=4_294_967_296,
        unit="bytes",
        ge=1,
    )
    max_groups: Int = key(
        64,
        "Maximum number of KV-cache groups of a source. kvbus rejects stores of further groups.",
        example=64,
        unit="groups",
        ge=1,
        le=4096,
    )
    max_owners: Int = key(
        64,
        "Maximum number of pairs of locality and owner that a source's stores name. kvbus rejects stores with further "
        "pairs, and stores with a name of more than 256 characters.",
        example=64,
        unit="pairs",
        ge=1,
        le=4096,
    )
    max_held_bytes: Size = key(
        268_435_456,
        "Maximum size of the batches of a source that wait in kvbus while earlier batches are missing. At the"
        " limit, kvbus drops the newest batches and requests them again.",
        example=268_435_456,
        unit="bytes",
        ge=1,
    )
    max_request_bytes: Size = key(
        65_536,
        "Maximum size of a frame from a router (subscriptions, replay and snapshot requests). A larger frame ends "
        "the connection.",
        example=65_536,
        unit="bytes",
        ge=1024,
        le=2**31 - 1,
    )
    max_unsent_bytes: Size = key(
        67_108_864,
        "Maximum size of the states and batches that wait in kvbus's memory for all routers together, because the "
        "routers read slowly. Above it, kvbus writes only to routers for which nothing waits, and one message at a "
        "time. The other routers get their states and batches later.",
        example=67_108_864,
        unit="bytes",
        ge=1,
    )
    max_views: Int = key(
        64,
        "Maximum number of views on all outputs. All router keys with the same rights share a view, and kvbus"
        " keeps streams and blocks for each view. kvbus refuses a list of keys that needs more views.",
        example=64,
        unit="views",
        ge=1,
        le=4096,
    )
    max_replay_sessions: Int = key(
        64, "Maximum number of replay answers that an output sends at the same time.", example=64, unit="sessions", ge=1
    )
