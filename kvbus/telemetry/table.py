"""The table of metrics: one row for each metric, with its name, its help text and the value that it shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import version
from operator import attrgetter
from typing import Any, Final, NamedTuple

from kvbus.core.sequencing.phases import State
from kvbus.core.stats import HttpRefusal
from kvbus.core.types import DEVICE_MEDIUM, Filtered, Reason, Refused

DROP_REASONS: Final = ("slow_router", "queue_full")
"""Reasons for which the ZeroMQ driver drops a batch. Other drivers' reasons are shown when they are first counted."""
EVENT_REASONS: Final = (*DROP_REASONS, "other_group")
WITHHELD: Final = ("rights", "unknown_parent")
REPLAY_OUTCOMES: Final = (
    *("complete", "compacted", "late", "subscription", "gone", "stalled", "refused", "malformed", "cut_off"),
)
STATE_REASONS: Final = ("subscribed", "lost", "asked", "refreshed", "trimmed")
HTTP_REASONS: Final = ("too_many", "too_large", "slow", "tls", "revoked")
RELOAD_OUTCOMES: Final = ("applied", "refused")
DISCOVERY_CHANGES: Final = ("joined", "left", "moved", "refused")
LOG_RECORDS: Final = (
    *("lost", "expired", "unusable", "late", "old_epoch", "double", "known", "clock_set_back", "malformed", "damaged"),
    *("other_schema", "unreadable_pointer", "unreadable_batch", "wrong_type", "foreign_id", "foreign_key", "same_name"),
)
FRONT_REASONS: Final = ("too_many", "slow")
CALL_OUTCOMES: Final = (
    *("passed", "answered", "unanswered", "engine_down", "engine_broke_off", "client_gone", "bad_request"),
)


class Row(NamedTuple):
    """A row of the table: one metric of the sources, the outputs, the discoveries, an API proxy (front) or the process.

    Attributes:
        name: the metric's name without ``kvbus_``. A name that ends in ``_total`` is a counter, every other one a
            gauge.
        text: the help text.
        read: function that returns the metric's value from an item, such as the reading of a source. If the metric has
            a label, the value is a dictionary. Otherwise it is a number, or an object that counts as 1 if it is true.
        label: the name of the label that distinguishes the values of a dictionary; empty for a single value.
        keys: label values that are shown with the value 0 until they are counted for the first time.
        part: a part of ``OutputStats.parts``, such as ``replay``. Only outputs with this part have the metric. If it is
            empty, all outputs have the metric.
    """

    name: str
    text: str
    read: Callable[[Any], Any]
    label: str
    keys: Iterable[str]
    part: str


def row(
    name: str,
    text: str,
    read: str | Callable[[Any], Any],
    label: str = "",
    keys: Iterable[str] = (),
    *,
    part: str = "",
) -> Row:
    """Return a row of the table; see :class:`Row` for the arguments.

    ``read`` may also be the dotted name of an item's attribute, in place of a function that returns its value.
    """
    return Row(name, text, attrgetter(read) if isinstance(read, str) else read, label, keys, part)


@cache  # without the cache, each scrape would read the version from a file
def kvbus_version() -> str:
    """Return the version of this kvbus."""
    return version("kvbus")


SOURCES: Final = (
    row("source_batches_total", "Live batches received from the engine, valid or not.", "stats.batches"),
    row("source_bytes_total", "Payload bytes of live batches received from the engine.", "stats.bytes"),
    row(
        "source_gaps_total",
        "Gaps in the engine's batch numbers: places where one or more batches were missing.",
        "stats.gaps",
    ),
    row(
        "source_missing_batches_total",
        "Batches of the engine that were missing. They are the recovered, the lost and the pending batches together.",
        "stats.missing",
    ),
    row(
        "source_recovered_batches_total", "Missing batches that kvbus received late or in a replay.", "stats.recovered"
    ),
    row(
        "source_lost_batches_total",
        "Missing batches that kvbus gave up, because they came neither late nor in a replay.",
        "stats.lost",
    ),
    row(
        "source_duplicate_batches_total",
        "Batches that were received again and dropped. A few are normal while kvbus reads a replay.",
        "stats.duplicates",
    ),
    row(
        "source_restarts_total",
        "Restarts of the engine's publisher, as its batches show. For a stream of a log: new epochs of the writer.",
        "stats.restarts",
    ),
    row(
        "source_replays_total",
        "Replay requests sent to the engine, including probes of an idle engine.",
        "stats.replays",
    ),
    row(
        "source_replay_timeouts_total",
        "Replay requests that failed because the engine's answer made no progress.",
        "stats.replay_timeouts",
    ),
    row(
        "source_requests_failed_total",
        "Requests to the engine that kvbus could not send, because no file descriptor was free. kvbus tries again.",
        "stats.requests_failed",
    ),
    row(
        "source_requests_waited_total",
        "Requests to the engine that waited in kvbus, because file descriptors limit the number of open requests.",
        "stats.requests_waited",
    ),
    row(
        "source_stale_replies_total",
        "Messages of replay answers that came when kvbus had no open request for them.",
        "stats.stale_replies",
    ),
    row(
        "source_held_overflow_total",
        "Batches dropped because the reorder buffer was full. kvbus asks the engine for them again.",
        "stats.held_overflow",
    ),
    row(
        "source_rebuilds_total",
        "Times kvbus announced all live blocks again, because their block size changed.",
        "stats.rebuilds",
    ),
    row(
        "source_reannounced_total",
        "Stores of prefixes whose blocks were all live before. The engine announced cache hits, or further copies.",
        "stats.reannounced",
    ),
    row(
        "source_timeouts_total",
        "Times the engine was unreachable for source_timeout. kvbus then cleared its blocks at the routers.",
        "stats.timeouts",
    ),
    row(
        "source_state",
        "1 for the source's current state, 0 for all other states.",
        lambda s: {s.state: 1},
        "state",
        State,
    ),
    row(
        "source_partial",
        "1 while the engine may hold blocks that kvbus does not know, 0 otherwise. /sources says why.",
        "partial",
    ),
    row("source_epoch", "Epoch of the engine's publisher, counted from 0.", "epoch"),
    row(
        "source_last_sequence",
        "Seq of the engine's newest batch that kvbus passed on; -1 if there is none.",
        "last_seq",
    ),
    row(
        "source_last_batch_timestamp_seconds",
        "Timestamp that the engine wrote into its newest batch; 0 before the first batch.",
        "stats.last_batch",
    ),
    row("source_pending_batches", "Missing batches that kvbus still expects, and has not counted as lost.", "pending"),
    row("source_queue_depth", "Batches in the reorder buffer, which wait for earlier batches.", "queue_depth"),
    row("source_queue_limit", "Maximum number of batches in the reorder buffer (reorder_batches).", "queue_limit"),
    row("source_queue_bytes", "Payload bytes in the reorder buffer.", "queue_bytes"),
    row(
        "source_queue_bytes_limit",
        "Maximum payload bytes in the reorder buffer (limits.max_held_bytes).",
        "queue_bytes_limit",
    ),
    row(
        "source_index_entries",
        "Blocks in the index: live blocks, and blocks that kvbus does not announce, because they are smaller or larger "
        "than their group's blocks.",
        "index_entries",
    ),
    row("source_index_limit", "Maximum number of blocks in the index (limits.max_blocks).", "index_limit"),
    row("source_index_bytes", "Estimated memory of the index, in bytes.", "index_bytes"),
    row(
        "source_index_bytes_limit",
        "Maximum memory of the index, in bytes (limits.max_index_bytes).",
        "index_bytes_limit",
    ),
    row("source_groups", "KV-cache groups whose blocks the engine has stored since its last restart.", "groups"),
    row("source_groups_limit", "Maximum number of KV-cache groups (limits.max_groups).", "groups_limit"),
    row(
        "source_owners",
        "Pairs of locality and owner under which the engine has stored blocks since its last restart.",
        "owners",
    ),
    row("source_owners_limit", "Maximum number of pairs of locality and owner (limits.max_owners).", "owners_limit"),
    row(
        "source_events_total",
        "Events received from the engine, by type.",
        lambda s: {"BlockStored": s.stats.stored, "BlockRemoved": s.stats.removed, "AllBlocksCleared": s.stats.cleared},
        "type",
    ),
    row(
        "events_rejected_total", "Batches and events that kvbus refused, by reason.", "stats.rejected", "reason", Reason
    ),
    row(
        "events_filtered_total",
        "Valid batches, events and blocks that kvbus did not pass on, or passed on changed, by reason.",
        "stats.filtered",
        "reason",
        Filtered,
    ),
    row(
        "source_handshakes_failed_total",
        "Connections with the engine's publisher that failed, by reason.",
        "stats.refused",
        "reason",
        Refused,
    ),
    row(
        "blocks",
        "Live blocks of the source that kvbus has announced to routers, by medium.",
        "blocks",
        "medium",
        (DEVICE_MEDIUM,),
    ),
)

OUTPUTS: Final = (
    row("output_batches_total", "Batches that kvbus published, including heartbeats.", "stats.batches"),
    row("output_events_total", "Events in the batches that kvbus published.", "stats.events"),
    row("output_bytes_total", "Payload bytes of the batches that kvbus published.", "stats.bytes"),
    row("output_heartbeats_total", "Empty batches published because a stream was idle.", "heartbeats"),
    row(
        "replay_batches_total",
        "Messages sent in replay answers, including END.",
        "stats.replay_batches",
        part="replay",
    ),
    row(
        "output_queue_depth",
        "Batches waiting for the slowest router, or for a log's server.",
        lambda o: max(o.stats.queue_depth, o.queue_max),
    ),
    row(
        "output_queue_limit",
        "Maximum number of batches waiting in all streams together (queue_batches per stream).",
        "stats.queue_limit",
    ),
    row(
        "output_subscribers",
        "Subscriptions of the connected routers. A router with two topics counts twice.",
        "stats.subscribers",
    ),
    row("output_routers", "Connected routers, with or without a subscription.", "stats.routers"),
    row(
        "output_publishers",
        "Engines connected to the output's ports (interpose). More than one engine at a port is a conflict.",
        "stats.publishers",
        part="interpose",
    ),
    row(
        "output_publishers_limit",
        "Maximum number of engines connected to the output's ports (interpose): 16 per port.",
        "stats.publishers_limit",
        part="interpose",
    ),
    row(
        "output_publishers_accepted_total",
        "Connections of engines that the output's ports accepted.",
        "stats.publishers_accepted",
        part="interpose",
    ),
    row("output_streams_written", "Streams that kvbus writes to the log.", "stats.streams_written", part="log"),
    row(
        "output_states_overdue",
        "Streams whose newest state in the log is older than state_every plus 10 seconds.",
        "stats.states_overdue",
        part="log",
    ),
    row(
        "output_streams_fenced",
        "Streams that kvbus does not write to the log, because another writer took them or they were erased.",
        "stats.streams_fenced",
        part="log",
    ),
    row(
        "output_records_gone_total",
        "Records of kvbus in Dynamo's discovery that another process deleted or replaced. kvbus restores them.",
        "stats.records_gone",
        part="dynamo",
    ),
    row(
        "output_router_queue_limit",
        "Maximum number of batches that wait for one router (send_hwm).",
        "stats.router_queue_limit",
    ),
    row(
        "replay_sessions", "Replay and snapshot answers that kvbus is sending.", "stats.replay_sessions", part="replay"
    ),
    row(
        "replay_sessions_limit",
        "Maximum number of replay answers that kvbus sends at once (limits.max_replay_sessions).",
        "stats.replay_sessions_limit",
        part="replay",
    ),
    row(
        "replay_waiting",
        "Replay answers that wait for the end of earlier answers, or for a router that does not read.",
        "stats.replay_waiting",
        part="replay",
    ),
    row(
        "replay_waiting_limit",
        "Maximum number of waiting replay answers (10,000 per endpoint). kvbus refuses further requests.",
        "stats.replay_waiting_limit",
        part="replay",
    ),
    row(
        "output_sequence",
        "Seq of the newest batch of each stream; -1 if there is none. The label is the source's slot, or 0 if merged.",
        "sequences",
        "stream",
    ),
    row("output_journal_batches", "Batches kept for replays. Consecutive heartbeats count as one.", "journal_batches"),
    row("output_journal_bytes", "Payload bytes kept for replays.", "journal_bytes"),
    row(
        "output_journal_batches_limit",
        "Maximum number of batches kept for replays, of all streams together (journal_batches per stream).",
        "journal_batches_limit",
    ),
    row(
        "output_journal_bytes_limit",
        "Maximum payload bytes kept for replays, of all streams together (journal_bytes per stream).",
        "journal_bytes_limit",
    ),
    row(
        "output_states_outgrown_total",
        "Number of times a journal dropped a state that was read from a log, because the state and the batches after "
        "it exceeded the journal's limits. New routers wait for the next state.",
        "outgrown",
    ),
    row(
        "output_views",
        "Views: streams for router keys with the same rights. Keys with other rights have another view.",
        "views",
        part="keys",
    ),
    row(
        "output_withheld_events_total",
        "Stores that routers with limited rights do not get: without permission, or with an unknown parent.",
        "withheld",
        "reason",
        WITHHELD,
        part="keys",
    ),
    row(
        "output_dropped_batches_total",
        "Batches that routers did not get live, by reason. slow_router counts a batch once for each router.",
        "stats.dropped_batches",
        "reason",
        DROP_REASONS,
    ),
    row(
        "output_dropped_events_total",
        "Events in dropped batches, and events that the profile does not send (other_group), by reason.",
        "stats.dropped_events",
        "reason",
        EVENT_REASONS,
    ),
    row(
        "output_handshakes_failed_total",
        "Connections of routers, and connections to a log's servers, that failed or were refused, by reason.",
        "stats.refused",
        "reason",
    ),
    row(
        "output_router_disconnects_total",
        "Connections of routers that ended, by reason.",
        "stats.router_disconnects",
        "reason",
    ),
    row(
        "output_router_states_total",
        "Times that a router entered a state, such as live or stalled, on one of its streams, by state.",
        "stats.router_states",
        "state",
    ),
    row(
        "output_states_sent_total",
        "States that kvbus began to send to a router or to write to a log, by reason.",
        "stats.states_sent",
        "reason",
        STATE_REASONS,
    ),
    row(
        "output_state_bytes_total",
        "Bytes of states written to the log, in the log's encoding.",
        "stats.state_bytes",
        part="log",
    ),
    row(
        "replay_requests_total",
        "Replay requests of routers, by outcome.",
        "stats.replay_requests",
        "outcome",
        REPLAY_OUTCOMES,
        part="replay",
    ),
    row("output_router_queue_max", "Batches waiting for the router with the longest queue.", "queue_max"),
    row(
        "output_router_behind_seconds",
        "Age of the oldest batch that some connected router lacks; 0 if no router lacks a batch.",
        "behind_seconds",
    ),
    row(
        "router_queue_batches",
        "Batches waiting for a router whose CURVE key has a name. Only the 100 slowest routers are shown.",
        lambda o: {name: router.queued for name, router in o.named.items()},
        "router",
        part="keys",
    ),
    row(
        "router_behind_seconds",
        "Age of the oldest batch that a router lacks. Only routers whose CURVE key has a name are shown.",
        lambda o: {name: router.behind for name, router in o.named.items()},
        "router",
        part="keys",
    ),
    row(
        "router_dropped_batches",
        "Batches that a router's current connections did not get live. Only routers with a named CURVE key are shown.",
        lambda o: {name: router.dropped for name, router in o.named.items()},
        "router",
        part="keys",
    ),
)

DISCOVERY: Final = (
    row("discovery_engines", "Engines that the discovery currently lists.", "engines"),
    row(
        "discovery_failing",
        "1 while kvbus's requests for the list of engines fail. Engines found before stay in use.",
        "failing",
    ),
    row("discovery_failures_total", "Failed requests of kvbus for the list of engines.", "failures"),
    row(
        "discovery_changes_total",
        "Sources that joined, left or moved to another address, and changes that kvbus refused.",
        "changes",
        "change",
        DISCOVERY_CHANGES,
    ),
    row(
        "discovery_records_total",
        "Records of a log that kvbus read but did not use, by reason.",
        "records",
        "reason",
        LOG_RECORDS,
    ),
    row(
        "discovery_lag_seconds",
        "Time since kvbus last reached the end of the log: about 1 if kvbus keeps up, because it looks once a second; "
        "0 without a log.",
        "lag",
    ),
    row(
        "discovery_left_out",
        "Engines that the discovery lists but that are not sources, by reason.",
        "left_out",
        "reason",
    ),
)

FRONT: Final = (
    row("front_connections", "Open client connections to the API proxy (front).", "http_connections"),
    row(
        "front_connections_limit",
        "Maximum number of client connections to the API proxy (front.max_connections).",
        "limit",
    ),
    row(
        "front_connections_closed_total",
        "Client connections that the API proxy closed, by reason.",
        "http_closed",
        "reason",
        FRONT_REASONS,
    ),
    row(
        "front_requests_total",
        "Requests to the API proxy, by outcome.",
        "requests",
        "outcome",
        (*CALL_OUTCOMES, "upgrade"),
    ),
)

FRONT_GRPC: Final = (
    row("front_grpc_calls", "Open calls at the gRPC proxy (front_grpc).", "open"),
    row("front_grpc_calls_limit", "Maximum number of open calls at the gRPC proxy (front_grpc.max_calls).", "limit"),
    row(
        "front_grpc_calls_total",
        "Calls at the gRPC proxy, by outcome.",
        "calls",
        "outcome",
        (*CALL_OUTCOMES, "too_many"),
    ),
)

PROCESS: Final = (
    row("build_info", "Always 1. The label is the version of this kvbus.", lambda _: {kvbus_version(): 1}, "version"),
    row(
        "state_writing",
        "1 while kvbus writes its state to state_dir; 0 without state_dir, and after a write failed.",
        "state_writing",
    ),
    row("state_refused_total", "Files of a saved state that kvbus could not use and moved aside.", "state_refused"),
    row(
        "source_slots",
        "Slots of sources (ranks), present or remembered. A remembered source continues its numbering when it returns.",
        lambda p: {"present": p.slots_present, "gone": p.slots_gone},
        "state",
    ),
    row("unsent_bytes", "Bytes that wait in kvbus for all routers together, because they read slowly.", "unsent_bytes"),
    row("unsent_bytes_limit", "Bytes above which routers have to wait (limits.max_unsent_bytes).", "unsent_limit"),
    row("views_limit", "Maximum number of views of all outputs together (limits.max_views).", "views_limit"),
    row("source_slots_limit", "Maximum number of source slots (limits.max_sources).", "slots_limit"),
    row(
        "source_slots_reused_total",
        "Slots of absent sources that kvbus gave to other sources. A router that was away may keep the old blocks.",
        "slots_reused",
    ),
    row("http_connections", "Open HTTP connections (maximum 128).", "http_connections"),
    row("http_listeners", "Clients that follow /events (maximum 16).", "http_listeners"),
    row("http_dumps", "Answers of /blocks being sent (maximum 4).", "http_dumps"),
    row(
        "http_connections_closed_total",
        "HTTP connections that kvbus closed, by reason.",
        "http_closed",
        "reason",
        HTTP_REASONS,
    ),
    row("http_refused_total", "HTTP requests that kvbus refused, by reason.", "http_refused", "reason", HttpRefusal),
    row(
        "config_reloads_total",
        "Times kvbus read the configuration again, after a change of the file or SIGHUP, by outcome.",
        "config_reloads",
        "outcome",
        RELOAD_OUTCOMES,
    ),
    row(
        "config_refused",
        "1 while kvbus refuses the newest configuration on disk. /overview names the refused keys.",
        "config_refused",
    ),
    row(
        "key_reloads_total",
        "Times kvbus read a changed file with CURVE keys, HTTP tokens or certificates again, by outcome.",
        "key_reloads",
        "outcome",
        RELOAD_OUTCOMES,
    ),
)

HISTOGRAMS: Final = (
    row(
        "relay_latency_seconds",
        "Time from the receipt of batches until kvbus hands them to the transport, once for each read of a socket.",
        "relay_latency",
    ),
    row(
        "batch_age_seconds",
        "Time from an engine's timestamp until kvbus sends the batch: the newest batch of each read of a socket. Needs "
        "synchronized clocks.",
        "batch_age",
    ),
    row(
        "event_loop_lag_seconds",
        "Delay with which kvbus's event loop runs a timer. It rises if the CPU is overloaded.",
        "loop_lag",
    ),
)
"""Rows of the metrics that are histograms.

They are of the bus as a whole, and have no label of a source or an output.
"""
