"""The metrics of outputs: one row each."""

from __future__ import annotations

from typing import Final

from kvbus.core.types import Refused
from kvbus.telemetry.readings import OutputReading
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
STATE_REASONS: Final = ("subscribed", "lost", "refreshed", "trimmed")

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
    one("output_publishers", "Engines connected at ports with interpose.", lambda o: o.stats.publishers),
    one("output_publishers_limit", "Most engines at these ports.", lambda o: o.stats.publishers_limit),
    one(
        "output_publishers_accepted_total",
        "Connections of engines that were taken at these ports.",
        lambda o: o.stats.publishers_accepted,
    ),
    one("output_streams_written", "Streams that a log takes.", lambda o: o.stats.streams_written),
    one(
        "output_states_overdue",
        "Streams whose next state in a log is ten seconds late.",
        lambda o: o.stats.states_overdue,
    ),
    one(
        "output_streams_fenced",
        "Streams of a log that are written no more: another writer has them, or they were erased.",
        lambda o: o.stats.streams_fenced,
    ),
    one(
        "output_records_gone_total",
        "Records in Dynamo's discovery that somebody else took away or replaced; they are put back.",
        lambda o: o.stats.records_gone,
    ),
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
    one(
        "output_states_outgrown_total",
        "Times that a log's state, and what came behind it, had no room: routers that join wait for the next state.",
        lambda o: o.outgrown,
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
        "Connections of routers that were refused or failed, or to brokers, by reason.",
        lambda o: known(o.stats.refused, Refused),
    ),
    by(
        "reason",
        "output_router_disconnects_total",
        "Connections of routers that ended, by reason.",
        lambda o: known(o.stats.router_disconnects, ()),
    ),
    by(
        "state",
        "output_router_states_total",
        "How often a router came into a state, on each of its streams.",
        lambda o: known(o.stats.router_states, ()),
    ),
    by(
        "reason",
        "output_states_sent_total",
        "States that a router began to get, by reason: it had subscribed, or it had lost batches.",
        lambda o: known(o.stats.states_sent, STATE_REASONS),
    ),
    one(
        "output_state_bytes_total",
        "Bytes of states that were appended to a log, as they stand there.",
        lambda o: o.stats.state_bytes,
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
