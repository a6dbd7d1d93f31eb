"""The table of metrics: one row for each metric, except histograms."""

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
"""Reasons of the ZeroMQ driver. Other drivers' reasons appear when a driver counts them."""
EVENT_REASONS: Final = (*DROP_REASONS, "other_group")
WITHHELD: Final = ("rights", "unknown_parent")
REPLAY_OUTCOMES: Final = (
    *("complete", "compacted", "late", "subscription", "gone", "stalled", "refused", "malformed", "cut_off"),
)
STATE_REASONS: Final = ("subscribed", "lost", "refreshed", "trimmed")
HTTP_REASONS: Final = ("too_many", "too_large", "slow", "tls", "revoked")
RELOAD_OUTCOMES: Final = ("applied", "refused")
DISCOVERY_CHANGES: Final = ("joined", "left", "moved", "refused")
LOG_RECORDS: Final = (
    *("lost", "expired", "unusable", "late", "old_epoch", "double", "known", "clock_set_back", "malformed", "damaged"),
    *("other_schema", "unreadable_pointer", "unreadable_batch", "wrong_type", "foreign_key", "same_name"),
)
FRONT_REASONS: Final = ("too_many", "slow")
CALL_OUTCOMES: Final = (
    *("passed", "answered", "unanswered", "engine_down", "engine_broke_off", "client_gone", "bad_request"),
)


class Row(NamedTuple):
    """One metric of a source, an output, a discovery, a front, or the process.

    Attributes:
        name: the metric's name without ``kvbus_``. A name that ends in ``_total`` is a counter, every other one a
            gauge.
        text: the help text.
        read: returns the value. With a label the value is a dictionary. Without one it is a number, or an object that
            counts as 1 if it is true.
        label: the name of the label that distinguishes the values of a dictionary.
        keys: label values that are shown from the start, as 0.
        part: an optional part of ``OutputStats.parts``. The row is absent for outputs without it.
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
    """Return a row. ``read`` is the name of the attribute with the value, or a function."""
    return Row(name, text, attrgetter(read) if isinstance(read, str) else read, label, keys, part)


@cache  # the version is read from a file
def kvbus_version() -> str:
    """Return the version of this kvbus."""
    return version("kvbus")


SOURCES: Final = (
    row("source_batches_total", "Live messages received, valid or not.", "stats.batches"),
    row("source_bytes_total", "Payload bytes of live batches.", "stats.bytes"),
    row("source_gaps_total", "Gaps found in the numbering.", "stats.gaps"),
    row("source_missing_batches_total", "Batches found missing: recovered + lost + pending, always.", "stats.missing"),
    row("source_recovered_batches_total", "Missing batches that arrived late or by replay.", "stats.recovered"),
    row("source_lost_batches_total", "Missing batches that no replay brought.", "stats.lost"),
    row("source_duplicate_batches_total", "Batches that came again and were dropped.", "stats.duplicates"),
    row(
        "source_restarts_total",
        "New epochs of the engine's publisher that were proven by what it sent; of a log, new epochs of the writer.",
        "stats.restarts",
    ),
    row("source_replays_total", "Replay requests sent to the engine.", "stats.replays"),
    row("source_replay_timeouts_total", "Replay requests that failed for lack of progress.", "stats.replay_timeouts"),
    row(
        "source_requests_failed_total",
        "Attempts to send the engine a request that failed in kvbus itself (no file descriptor); it is tried again.",
        "stats.requests_failed",
    ),
    row(
        "source_requests_waited_total",
        "Requests to the engine that waited in kvbus for others: file descriptors bound how many are under way.",
        "stats.requests_waited",
    ),
    row("source_stale_replies_total", "Replay messages that answer no open request.", "stats.stale_replies"),
    row("source_held_overflow_total", "Batches dropped because the reorder buffer was full.", "stats.held_overflow"),
    row("source_rebuilds_total", "Times the live set was announced anew in another block size.", "stats.rebuilds"),
    row(
        "source_reannounced_total",
        "Stores of several blocks from the root on that were all live: hits announced again, or real copies.",
        "stats.reannounced",
    ),
    row(
        "source_finding",
        "1 while something is wrong with the source; /sources says it in words (findings).",
        lambda s: {each.id: 1 for each in s.findings},
        "finding",
    ),
    row(
        "source_timeouts_total",
        "Times the engine was gone for source_timeout, and its blocks were cleared downstream.",
        "stats.timeouts",
    ),
    row("source_state", "1 for the state the source is in.", lambda s: {s.state: 1}, "state", State),
    row(
        "source_partial",
        "1 while the engine may hold blocks that kvbus cannot know of (trimmed history, lost batches, full index).",
        "partial",
    ),
    row("source_epoch", "Epoch of the publisher, counted from 0.", "epoch"),
    row("source_last_sequence", "Seq of the newest batch delivered, -1 for none.", "last_seq"),
    row(
        "source_last_batch_timestamp_seconds",
        "The engine's own time of the newest batch; 0 before the first.",
        "stats.last_batch",
    ),
    row("source_pending_batches", "Missing batches that are neither recovered nor lost yet.", "pending"),
    row(
        "source_queue_depth",
        "Batches that wait: in the reorder buffer, or in order and not handed on yet.",
        "queue_depth",
    ),
    row("source_queue_limit", "Limit of batches in the reorder buffer.", "queue_limit"),
    row("source_queue_bytes", "Payload bytes in the reorder buffer.", "queue_bytes"),
    row("source_queue_bytes_limit", "Limit of payload bytes in the reorder buffer.", "queue_bytes_limit"),
    row(
        "source_index_entries",
        "Blocks remembered: live ones, and coarse ones and tails that kvbus does not announce.",
        "index_entries",
    ),
    row("source_index_limit", "Limit of blocks in the index.", "index_limit"),
    row("source_index_bytes", "Estimated memory of the blocks remembered.", "index_bytes"),
    row("source_index_bytes_limit", "Limit of this memory.", "index_bytes_limit"),
    row("source_groups", "KV cache groups that the epoch has stored blocks of.", "groups"),
    row("source_groups_limit", "Limit of groups.", "groups_limit"),
    row(
        "source_events_total",
        "Events received, by type.",
        lambda s: {"BlockStored": s.stats.stored, "BlockRemoved": s.stats.removed, "AllBlocksCleared": s.stats.cleared},
        "type",
    ),
    row("events_rejected_total", "Batches and events refused, by reason.", "stats.rejected", "reason", Reason),
    row(
        "events_filtered_total",
        "Valid batches, events and blocks that do not leave as they came, by reason.",
        "stats.filtered",
        "reason",
        Filtered,
    ),
    row(
        "source_handshakes_failed_total",
        "Connections with engines that failed, by reason.",
        "stats.refused",
        "reason",
        Refused,
    ),
    row("blocks", "Live blocks, as announced to routers.", "blocks", "medium", (DEVICE_MEDIUM,)),
)

OUTPUTS: Final = (
    row("output_batches_total", "Batches sent, heartbeats among them.", "stats.batches"),
    row("output_events_total", "Events sent.", "stats.events"),
    row("output_bytes_total", "Payload bytes sent.", "stats.bytes"),
    row("output_heartbeats_total", "Empty batches sent on an idle stream.", "heartbeats"),
    row(
        "replay_batches_total",
        "Messages of replay answers sent, END among them.",
        "stats.replay_batches",
        part="replay",
    ),
    row(
        "output_queue_depth",
        "Batches that wait for the slowest router, or for a broker.",
        lambda o: max(o.stats.queue_depth, o.queue_max),
    ),
    row(
        "output_queue_limit",
        "Maximum number of batches waiting for the transport, all streams together.",
        "stats.queue_limit",
    ),
    row("output_subscribers", "Subscriptions of routers.", "stats.subscribers"),
    row("output_routers", "Connected routers, whatever they subscribe to.", "stats.routers"),
    row("output_publishers", "Engines connected at ports with interpose.", "stats.publishers", part="interpose"),
    row(
        "output_publishers_limit",
        "Maximum number of engines at these ports.",
        "stats.publishers_limit",
        part="interpose",
    ),
    row(
        "output_publishers_accepted_total",
        "Connections of engines that were taken at these ports.",
        "stats.publishers_accepted",
        part="interpose",
    ),
    row("output_streams_written", "Streams that a log takes.", "stats.streams_written", part="log"),
    row(
        "output_states_overdue",
        "Streams whose next state in a log is ten seconds late.",
        "stats.states_overdue",
        part="log",
    ),
    row(
        "output_streams_fenced",
        "Streams of a log that are written no more: another writer has them, or they were erased.",
        "stats.streams_fenced",
        part="log",
    ),
    row(
        "output_records_gone_total",
        "Records in Dynamo's discovery that somebody else took away or replaced; they are put back.",
        "stats.records_gone",
        part="dynamo",
    ),
    row("output_router_queue_limit", "Limit of batches that wait for one router.", "stats.router_queue_limit"),
    row("replay_sessions", "Replay answers being sent.", "stats.replay_sessions", part="replay"),
    row(
        "replay_sessions_limit",
        "Maximum number of replay answers being sent.",
        "stats.replay_sessions_limit",
        part="replay",
    ),
    row(
        "replay_waiting", "Replay requests that wait until others are answered.", "stats.replay_waiting", part="replay"
    ),
    row(
        "replay_waiting_limit",
        "Maximum number of replay requests that wait; kvbus refuses more.",
        "stats.replay_waiting_limit",
        part="replay",
    ),
    row("output_sequence", "Newest seq of each stream, -1 for none.", "sequences", "stream"),
    row("output_journal_batches", "Batches kept for replay.", "journal_batches"),
    row("output_journal_bytes", "Payload bytes kept for replay.", "journal_bytes"),
    row(
        "output_journal_batches_limit",
        "Maximum number of batches kept for replay, all streams together.",
        "journal_batches_limit",
    ),
    row(
        "output_journal_bytes_limit",
        "Maximum payload bytes kept for replay, all streams together.",
        "journal_bytes_limit",
    ),
    row(
        "output_states_outgrown_total",
        "Times a log state and the batches after it outgrew the journal: routers that join wait for the next state.",
        "outgrown",
    ),
    row(
        "output_views", "Different rights of the owners of keys, which have streams of their own.", "views", part="keys"
    ),
    row(
        "output_withheld_events_total",
        "Stores that a view leaves out: its rights do not cover them, or their parent is unknown.",
        "withheld",
        "reason",
        WITHHELD,
        part="keys",
    ),
    row(
        "output_dropped_batches_total",
        "Batches that a router did not get live, by reason: counted for each slow router, once if for everybody.",
        "stats.dropped_batches",
        "reason",
        DROP_REASONS,
    ),
    row(
        "output_dropped_events_total",
        "Events in those batches, and events that the profile leaves out (other_group).",
        "stats.dropped_events",
        "reason",
        EVENT_REASONS,
    ),
    row(
        "output_handshakes_failed_total",
        "Connections of routers that were refused or failed, or to brokers, by reason.",
        "stats.refused",
        "reason",
        Refused,
    ),
    row(
        "output_router_disconnects_total",
        "Connections of routers that ended, by reason.",
        "stats.router_disconnects",
        "reason",
    ),
    row(
        "output_router_states_total",
        "How often a router came into a state, on each of its streams.",
        "stats.router_states",
        "state",
    ),
    row(
        "output_states_sent_total",
        "States that a router began to get, by reason: it had subscribed, or it had lost batches.",
        "stats.states_sent",
        "reason",
        STATE_REASONS,
    ),
    row(
        "output_state_bytes_total",
        "Bytes of states that were appended to a log, as they stand there.",
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
    row("output_router_queue_max", "Largest number of batches that wait for one router.", "queue_max"),
    row("output_router_behind_seconds", "Age of the oldest batch that some connected router lacks.", "behind_seconds"),
    row(
        "router_queue_batches",
        "Batches that wait for a router, by the name of its key.",
        lambda o: {name: router.queued for name, router in o.named.items()},
        "router",
        part="keys",
    ),
    row(
        "router_behind_seconds",
        "Age of the oldest batch that a router lacks, by the name of its key.",
        lambda o: {name: router.behind for name, router in o.named.items()},
        "router",
        part="keys",
    ),
    row(
        "router_dropped_batches",
        "Batches that a router's present connections did not get live, by the name of its key.",
        lambda o: {name: router.dropped for name, router in o.named.items()},
        "router",
        part="keys",
    ),
)

DISCOVERY: Final = (
    row("discovery_engines", "Engines that a discovery lists.", "engines"),
    row(
        "discovery_failing", "1 while kvbus cannot ask a discovery; the engines found before stay in force.", "failing"
    ),
    row("discovery_failures_total", "Attempts to ask a discovery that failed.", "failures"),
    row(
        "discovery_changes_total",
        "Sources (ranks) that a discovery has made join, leave or move to another address, and changes refused.",
        "changes",
        "change",
        DISCOVERY_CHANGES,
    ),
    row(
        "discovery_records_total",
        "Records of a log that were not handed on, by reason.",
        "records",
        "reason",
        LOG_RECORDS,
    ),
    row(
        "discovery_lag_seconds",
        "Time since the newest moment up to which a log was read to its end; 0 where there is no log.",
        "lag",
    ),
    row(
        "discovery_left_out", "Engines that a discovery lists and that are no sources, by reason.", "left_out", "reason"
    ),
)

FRONT: Final = (
    row("front_connections", "Connections open to the front of the engine's API.", "http_connections"),
    row("front_connections_limit", "Maximum number of connections to the front: front.max_connections.", "limit"),
    row(
        "front_connections_closed_total",
        "Connections to the front that kvbus closed, by reason.",
        "http_closed",
        "reason",
        FRONT_REASONS,
    ),
    row(
        "front_requests_total",
        "Requests at the front, by what became of them.",
        "requests",
        "outcome",
        (*CALL_OUTCOMES, "upgrade"),
    ),
)

FRONT_GRPC: Final = (
    row("front_grpc_calls", "Calls under way at the front of the engine's gRPC API.", "open"),
    row("front_grpc_calls_limit", "Maximum number of calls under way: front_grpc.max_calls.", "limit"),
    row(
        "front_grpc_calls_total",
        "Calls at the gRPC front, by what became of them.",
        "calls",
        "outcome",
        (*CALL_OUTCOMES, "too_many"),
    ),
)

PROCESS: Final = (
    row("build_info", "Version of this kvbus. The value is 1.", lambda _: {kvbus_version(): 1}, "version"),
    row(
        "state_writing",
        "1 while kvbus writes its state to state_dir; 0 without one, and after writing failed.",
        "state_writing",
    ),
    row("state_refused_total", "Files of a saved state that could not be used and were moved aside.", "state_refused"),
    row(
        "source_slots",
        "Sources, all ranks counted, that have a slot: present, or gone and remembered.",
        lambda p: {"present": p.slots_present, "gone": p.slots_gone},
        "state",
    ),
    row("views_limit", "Maximum number of views of all outputs together: limits.max_views.", "views_limit"),
    row("source_slots_limit", "Maximum number of these slots: limits.max_sources.", "slots_limit"),
    row("source_slots_reused_total", "Slots of sources that are gone and that others needed.", "slots_reused"),
    row("http_connections", "HTTP connections that are open.", "http_connections"),
    row("http_listeners", "Clients that follow /events.", "http_listeners"),
    row("http_dumps", "Answers of /blocks under way.", "http_dumps"),
    row(
        "http_connections_closed_total",
        "HTTP connections that kvbus closed, by reason.",
        "http_closed",
        "reason",
        HTTP_REASONS,
    ),
    row("http_refused_total", "HTTP requests that were refused, by reason.", "http_refused", "reason", HttpRefusal),
    row(
        "config_reloads_total",
        "Configurations read again, because the file has changed or at SIGHUP, by outcome.",
        "config_reloads",
        "outcome",
        RELOAD_OUTCOMES,
    ),
    row(
        "config_refused", "1 while the newest configuration that was read is not in force as a whole.", "config_refused"
    ),
    row(
        "key_reloads_total",
        "Key files, HTTP tokens and certificates found changed, by outcome.",
        "key_reloads",
        "outcome",
        RELOAD_OUTCOMES,
    ),
)
