"""The metrics of sources: one row each."""

from __future__ import annotations

from typing import Final

from kvbus.core.remarks import Remark
from kvbus.core.sequencing.phases import State
from kvbus.core.types import DEVICE_MEDIUM, Filtered, Reason, Refused
from kvbus.telemetry.readings import SourceReading
from kvbus.telemetry.row import Row, by, counts, one

SOURCES: Final[tuple[Row[SourceReading], ...]] = (
    one("source_batches_total", "Live messages received, valid or not.", lambda s: s.stats.batches),
    one("source_bytes_total", "Payload bytes of live batches.", lambda s: s.stats.bytes),
    one("source_gaps_total", "Gaps found in the numbering.", lambda s: s.stats.gaps),
    one(
        "source_missing_batches_total",
        "Batches found missing: recovered + lost + pending, always.",
        lambda s: s.stats.missing,
    ),
    one(
        "source_recovered_batches_total",
        "Missing batches that arrived late or by replay.",
        lambda s: s.stats.recovered,
    ),
    one("source_lost_batches_total", "Missing batches that no replay brought.", lambda s: s.stats.lost),
    one("source_duplicate_batches_total", "Batches that came again and were dropped.", lambda s: s.stats.duplicates),
    one(
        "source_restarts_total",
        "New epochs of the engine's publisher that were proven by what it sent; of a log, new epochs of the writer.",
        lambda s: s.stats.restarts,
    ),
    one("source_replays_total", "Replay requests sent to the engine.", lambda s: s.stats.replays),
    one(
        "source_replay_timeouts_total",
        "Replay requests that failed for lack of progress.",
        lambda s: s.stats.replay_timeouts,
    ),
    one(
        "source_requests_failed_total",
        "Attempts to send the engine a request that failed in kvbus itself (no file descriptor); it is tried again.",
        lambda s: s.stats.requests_failed,
    ),
    one(
        "source_requests_waited_total",
        "Requests to the engine that waited in kvbus for others: file descriptors bound how many are under way.",
        lambda s: s.stats.requests_waited,
    ),
    one(
        "source_stale_replies_total",
        "Replay messages that answer no open request.",
        lambda s: s.stats.stale_replies,
    ),
    one(
        "source_held_overflow_total",
        "Batches dropped because the reorder buffer was full.",
        lambda s: s.stats.held_overflow,
    ),
    one(
        "source_rebuilds_total",
        "Times the live set was announced anew in another block size.",
        lambda s: s.stats.rebuilds,
    ),
    one(
        "source_reannounced_total",
        "Stores of several blocks from the root on that were all live: hits announced again, or real copies.",
        lambda s: s.stats.reannounced,
    ),
    by(
        "remark",
        "source_remark",
        "1 while something is wrong with the source or remarkable about it; /sources says it in words (reasons).",
        lambda s: ((remark, float(any(said.about == remark for said in s.reasons))) for remark in Remark),
    ),
    one(
        "source_timeouts_total",
        "Times the engine was gone for source_timeout, and its blocks were cleared downstream.",
        lambda s: s.stats.timeouts,
    ),
    by(
        "state",
        "source_state",
        "1 for the state the source is in.",
        lambda s: ((state, float(s.state is state)) for state in State),
    ),
    one(
        "source_partial",
        "1 while the engine may hold blocks that kvbus cannot know of (trimmed history, lost batches, full index).",
        lambda s: float(s.partial),
    ),
    one("source_epoch", "Epoch of the publisher, counted from 0.", lambda s: s.epoch),
    one(
        "source_last_sequence",
        "Seq of the newest batch delivered, -1 for none.",
        lambda s: s.last_seq,
    ),
    one(
        "source_last_batch_timestamp_seconds",
        "The engine's own time of the newest batch; 0 before the first.",
        lambda s: s.stats.last_batch,
    ),
    one(
        "source_pending_batches",
        "Missing batches that are neither recovered nor lost yet.",
        lambda s: s.pending,
    ),
    one(
        "source_queue_depth",
        "Batches that wait for their turn: in the reorder buffer, or in order and not handed on yet.",
        lambda s: s.queue_depth,
    ),
    one(
        "source_queue_limit",
        "Limit of batches in the reorder buffer.",
        lambda s: s.queue_limit,
    ),
    one("source_queue_bytes", "Payload bytes in the reorder buffer.", lambda s: s.queue_bytes),
    one(
        "source_queue_bytes_limit",
        "Limit of payload bytes in the reorder buffer.",
        lambda s: s.queue_bytes_limit,
    ),
    one(
        "source_index_entries",
        "Blocks remembered: the live ones, and coarse ones and tails that are left out.",
        lambda s: s.index_entries,
    ),
    one("source_index_limit", "Limit of blocks in the index.", lambda s: s.index_limit),
    one("source_index_bytes", "Memory that these blocks take, estimated.", lambda s: s.index_bytes),
    one("source_index_bytes_limit", "Limit of that memory.", lambda s: s.index_bytes_limit),
    one("source_groups", "KV cache groups that the epoch has stored blocks of.", lambda s: s.groups),
    one("source_groups_limit", "Limit of groups.", lambda s: s.groups_limit),
    by(
        "type",
        "source_events_total",
        "Events received, by type.",
        lambda s: (
            ("BlockStored", s.stats.stored),
            ("BlockRemoved", s.stats.removed),
            ("AllBlocksCleared", s.stats.cleared),
        ),
    ),
    by(
        "reason",
        "events_rejected_total",
        "Batches and events refused, by reason.",
        lambda s: counts(s.stats.rejected, Reason),
    ),
    by(
        "reason",
        "events_filtered_total",
        "Valid batches, events and blocks that do not leave as they came, by reason.",
        lambda s: counts(s.stats.filtered, Filtered),
    ),
    by(
        "reason",
        "source_handshakes_failed_total",
        "Connections with engines that failed, by reason.",
        lambda s: counts(s.stats.refused, Refused),
    ),
    by("medium", "blocks", "Live blocks, as announced to routers.", lambda s: {DEVICE_MEDIUM: 0, **s.blocks}.items()),
)
