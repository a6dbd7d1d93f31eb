"""The table of all metrics but the histograms: one row each, with its name, its help text, and what it reads.

A name that ends in ``_total`` is a counter, every other one a gauge. A row renders the reading of one source, of one
output or of the process.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Final

from kvbus.compiled import core
from kvbus.core.analytics import LIMIT, AnalyticsReading
from kvbus.core.remarks import Remark
from kvbus.core.sequencing.settings import State
from kvbus.core.stats import HttpRefusal, ProcessStats
from kvbus.core.types import DEVICE_MEDIUM, CacheReset, Filtered, Reason, Refused
from kvbus.telemetry.discovery import DiscoveryStats
from kvbus.telemetry.readings import OutputReading, SourceReading
from kvbus.telemetry.row import Row, by, counts, known, one

DROP_REASONS: Final = ("slow_router", "queue_full")
"""Those of the ZeroMQ driver, shown from the start; others show once a driver has counted them."""
WITHHELD: Final = ("rights", "unknown_parent")
"""Why a view leaves a store out."""
EVENT_REASONS: Final = (*DROP_REASONS, "other_group")
"""Of events, one more: the rest of their batch did leave."""
REPLAY_OUTCOMES: Final = (
    "complete",
    "compacted",
    "late",
    "subscription",
    "gone",
    "stalled",
    "refused",
    "malformed",
    "cut_off",
)
STATE_REASONS: Final = ("subscribed", "lost")
HTTP_REASONS: Final = ("too_many", "slow", "tls", "revoked")
QUERY_OUTCOMES: Final = ("answered", "invalid", "too_large", "slow", "busy", "building")
RELOAD_OUTCOMES: Final = ("applied", "refused")
DISCOVERY_CHANGES: Final = ("joined", "left", "moved")


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
        "New epochs of the engine's publisher that were proven by what it sent.",
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
        "source_fast_path_batches_total",
        "Batches decoded as a whole, and not event by event.",
        lambda s: s.stats.as_they_came + s.stats.encoded,
    ),
    by(
        "way",
        "source_blocks_by_way_total",
        "Blocks by how their batches left: as they came, encoded again, or with each event decoded alone.",
        lambda s: (
            ("as_it_came", s.stats.as_they_came_blocks),
            ("encoded", s.stats.encoded_blocks),
            ("by_event", s.stats.by_event_blocks),
        ),
    ),
    one(
        "source_rebuilds_total",
        "Times the live set was announced again in another block size.",
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
    by(
        "outcome",
        "source_cache_resets_total",
        "Times the engine was asked to reset its cache (on_partial: reset), by outcome.",
        lambda s: counts(s.stats.cache_resets, CacheReset),
    ),
    by("medium", "blocks", "Live blocks, as announced to routers.", lambda s: {DEVICE_MEDIUM: 0, **s.blocks}.items()),
)

ANALYTICS: Final[tuple[Row[AnalyticsReading], ...]] = (
    one("source_blocks_stored_total", "Blocks that no tier held and one does now.", lambda a: a.stored),
    one("source_blocks_removed_total", "Blocks that the last tier evicted; no clears.", lambda a: a.removed),
    one(
        "source_blocks_stored_again_total",
        "Blocks stored that a cache of twice the size would still have had.",
        lambda a: a.stored_again,
    ),
    one("source_live_blocks", "Live blocks, each once however many tiers hold it.", lambda a: a.live),
    one("source_shared_blocks_ratio", "Share of live blocks that another source holds too.", lambda a: a.shared),
    one("source_followed_blocks", "Live blocks in the sample.", lambda a: a.followed),
    one("source_followed_blocks_limit", "Limit of live blocks in the sample.", lambda _: LIMIT),
    one("source_followed_blocks_ratio", "Share of blocks that the sample follows.", lambda a: 1 / a.weight),
)
"""Of the sources whose blocks are followed; there are none without ``analytics``."""

OUTPUTS: Final[tuple[Row[OutputReading], ...]] = (
    one("output_batches_total", "Batches sent, heartbeats among them.", lambda o: o.stats.batches),
    one("output_events_total", "Events sent.", lambda o: o.stats.events),
    one("output_bytes_total", "Payload bytes sent.", lambda o: o.stats.bytes),
    one("output_heartbeats_total", "Empty batches sent on an idle stream.", lambda o: o.heartbeats),
    one(
        "replay_batches_total",
        "Messages of replay answers sent, END among them.",
        lambda o: o.stats.replay_batches,
    ),
    one("output_queue_depth", "Batches waiting for the transport.", lambda o: o.stats.queue_depth),
    one(
        "output_queue_limit",
        "Most batches waiting for the transport, all streams together.",
        lambda o: o.stats.queue_limit,
    ),
    one("output_subscribers", "Subscriptions of routers.", lambda o: o.stats.subscribers),
    one("output_routers", "Connected routers, whatever they subscribe to.", lambda o: o.stats.routers),
    one(
        "output_router_queue_limit",
        "Limit of batches that wait for one router.",
        lambda o: o.stats.router_queue_limit,
    ),
    one("replay_sessions", "Replay answers being sent.", lambda o: o.stats.replay_sessions),
    one("replay_sessions_limit", "Most replay answers being sent.", lambda o: o.stats.replay_sessions_limit),
    one("replay_waiting", "Replay requests that wait for their turn.", lambda o: o.stats.replay_waiting),
    one(
        "replay_waiting_limit",
        "Most replay requests that wait; more are refused.",
        lambda o: o.stats.replay_waiting_limit,
    ),
    by(
        "stream",
        "output_sequence",
        "Newest seq of each stream, -1 for none.",
        lambda o: ((str(slot), seq) for slot, seq in o.sequences.items()),
    ),
    one(
        "output_journal_batches",
        "Batches kept for replay.",
        lambda o: o.journal_batches,
    ),
    one(
        "output_journal_bytes",
        "Payload bytes kept for replay.",
        lambda o: o.journal_bytes,
    ),
    one(
        "output_journal_batches_limit",
        "Most batches kept for replay, all streams together.",
        lambda o: o.journal_batches_limit,
    ),
    one(
        "output_journal_bytes_limit",
        "Most payload bytes kept for replay, all streams together.",
        lambda o: o.journal_bytes_limit,
    ),
    one("output_views", "Different rights of the owners of keys, which have streams of their own.", lambda o: o.views),
    by(
        "reason",
        "output_withheld_events_total",
        "Stores that a view leaves out: not of its rights, or of nobody knows whom.",
        lambda o: known(o.withheld, WITHHELD),
    ),
    by(
        "reason",
        "output_dropped_batches_total",
        "Batches that a router did not get live, by reason: counted for each slow router, once if for everybody.",
        lambda o: known(o.stats.dropped_batches, DROP_REASONS),
    ),
    by(
        "reason",
        "output_dropped_events_total",
        "Events in those batches, and events that the profile leaves out (other_group).",
        lambda o: known(o.stats.dropped_events, EVENT_REASONS),
    ),
    by(
        "reason",
        "output_handshakes_failed_total",
        "Connections of routers that were refused or failed, by reason.",
        lambda o: known(o.stats.refused, Refused),
    ),
    by(
        "reason",
        "output_router_disconnects_total",
        "Connections of routers that ended, by reason.",
        lambda o: known(o.stats.router_disconnects, ()),
    ),
    by(
        "reason",
        "output_states_sent_total",
        "States that a router began to get, by reason: it had subscribed, or it had lost batches.",
        lambda o: known(o.stats.states_sent, STATE_REASONS),
    ),
    by(
        "outcome",
        "replay_requests_total",
        "Replay requests of routers, by outcome.",
        lambda o: counts(o.stats.replay_requests, REPLAY_OUTCOMES),
    ),
    one("output_router_queue_max", "The most batches that wait for one router.", lambda o: o.queue_max),
    one(
        "output_router_behind_seconds",
        "How long the oldest batch has been published that a connected router has not got.",
        lambda o: o.behind_seconds,
    ),
)

DISCOVERY: Final[tuple[Row[DiscoveryStats], ...]] = (
    one("discovery_engines", "Engines that a discovery lists.", lambda d: d.engines),
    one(
        "discovery_failing",
        "1 while a discovery cannot be asked: what it found before stays in force.",
        lambda d: float(bool(d.failing)),
    ),
    one("discovery_failures_total", "Attempts to ask a discovery that failed.", lambda d: d.failures),
    by(
        "change",
        "discovery_changes_total",
        "Sources (ranks) that a discovery has made join, leave or move to another address.",
        lambda d: counts(d.changes, DISCOVERY_CHANGES),
    ),
    by(
        "reason",
        "discovery_left_out",
        "Engines that a discovery lists and that are no sources, by reason.",
        lambda d: d.left_out.items(),
    ),
)

PROCESS: Final[tuple[Row[ProcessStats], ...]] = (
    Row(
        "build_info",
        "Version of this kvbus, and whether its core is compiled or pure Python.",
        ("version", "core"),
        lambda _: [((version("kvbus"), core()), 1.0)],
    ),
    one(
        "state_writing",
        "1 while kvbus writes its state to state_dir; 0 without one, and after writing failed.",
        lambda p: float(p.state_writing),
    ),
    one(
        "state_refused_total",
        "Files of a saved state that could not be used and were moved aside.",
        lambda p: p.state_refused,
    ),
    by(
        "state",
        "source_slots",
        "Sources, all ranks counted, that have a slot: present, or gone and remembered.",
        lambda p: [("present", p.slots_present), ("gone", p.slots_gone)],
    ),
    one("views_limit", "The most views of all outputs together: limits.max_views.", lambda p: p.views_limit),
    one("source_slots_limit", "The most of them: limits.max_sources.", lambda p: p.slots_limit),
    one(
        "source_slots_reused_total",
        "Slots of sources that are gone and that others needed.",
        lambda p: p.slots_reused,
    ),
    one("http_connections", "HTTP connections that are open.", lambda p: p.http_connections),
    one("http_listeners", "Clients that follow /events.", lambda p: p.http_listeners),
    one("http_dumps", "Answers of /blocks under way.", lambda p: p.http_dumps),
    one(
        "query_index_blocks",
        "Blocks in the tree that answers /query; 0 while nobody asks.",
        lambda p: p.query_index_blocks,
    ),
    by(
        "outcome",
        "query_requests_total",
        "Requests of /query, by outcome.",
        lambda p: counts(p.queries, QUERY_OUTCOMES),
    ),
    by(
        "reason",
        "http_connections_closed_total",
        "HTTP connections that kvbus closed, by reason.",
        lambda p: counts(p.http_closed, HTTP_REASONS),
    ),
    by(
        "reason",
        "http_refused_total",
        "HTTP requests that were refused, by reason.",
        lambda p: ((reason, p.http_refused[reason]) for reason in HttpRefusal),
    ),
    by(
        "outcome",
        "config_reloads_total",
        "Configurations read again at SIGHUP, by outcome.",
        lambda p: counts(p.config_reloads, RELOAD_OUTCOMES),
    ),
    by(
        "outcome",
        "key_reloads_total",
        "Key files, HTTP tokens and certificates found changed, without a SIGHUP, by outcome.",
        lambda p: counts(p.key_reloads, RELOAD_OUTCOMES),
    ),
)
