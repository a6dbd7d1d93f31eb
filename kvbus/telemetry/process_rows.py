"""The metrics of the process, of what finds engines for it, and of its fronts: one row each."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from typing import Final

from kvbus.common.front_stats import CallStats, FrontStats
from kvbus.core.stats import HttpRefusal, ProcessStats
from kvbus.telemetry.discovery import DiscoveryStats
from kvbus.telemetry.row import Row, by, counts, one

HTTP_REASONS: Final = ("too_many", "too_large", "slow", "tls", "revoked")
RELOAD_OUTCOMES: Final = ("applied", "refused")
DISCOVERY_CHANGES: Final = ("joined", "left", "moved", "refused")
LOG_RECORDS: Final = (
    *("lost", "expired", "unusable", "late", "old_epoch", "double", "known", "clock_set_back", "malformed", "damaged"),
    *("other_schema", "unreadable_pointer", "unreadable_batch", "wrong_type", "foreign_key", "same_name"),
)

FRONT_REASONS: Final = ("too_many", "slow")
FRONT_OUTCOMES: Final = (
    *("passed", "answered", "unanswered", "engine_down", "engine_broke_off", "client_gone", "bad_request", "upgrade"),
)
CALL_OUTCOMES: Final = (
    *("passed", "answered", "unanswered", "engine_down", "engine_broke_off", "client_gone", "bad_request", "too_many"),
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
        "Sources (ranks) that a discovery has made join, leave or move to another address, and changes refused.",
        lambda d: counts(d.changes, DISCOVERY_CHANGES),
    ),
    by(
        "reason",
        "discovery_records_total",
        "Records of a log that were not handed on, by reason.",
        lambda d: counts(d.records, LOG_RECORDS),
    ),
    one(
        "discovery_lag_seconds",
        "Time since the newest moment up to which a log was read to its end; 0 where there is no log.",
        lambda d: d.lag,
    ),
    by(
        "reason",
        "discovery_left_out",
        "Engines that a discovery lists and that are no sources, by reason.",
        lambda d: d.left_out.items(),
    ),
)

FRONT: Final[tuple[Row[FrontStats], ...]] = (
    one("front_connections", "Connections open to the front of the engine's API.", lambda f: f.http_connections),
    one("front_connections_limit", "The most of them: front.max_connections.", lambda f: f.limit),
    by(
        "reason",
        "front_connections_closed_total",
        "Connections to the front that kvbus closed, by reason.",
        lambda f: counts(f.http_closed, FRONT_REASONS),
    ),
    by(
        "outcome",
        "front_requests_total",
        "Requests at the front, by what became of them.",
        lambda f: counts(f.requests, FRONT_OUTCOMES),
    ),
)

FRONT_GRPC: Final[tuple[Row[CallStats], ...]] = (
    one("front_grpc_calls", "Calls under way at the front of the engine's gRPC API.", lambda f: f.open),
    one("front_grpc_calls_limit", "The most of them: front_grpc.max_calls.", lambda f: f.limit),
    by(
        "outcome",
        "front_grpc_calls_total",
        "Calls at the gRPC front, by what became of them.",
        lambda f: counts(f.calls, CALL_OUTCOMES),
    ),
)


@cache  # the distribution's metadata is a file
def kvbus_version() -> str:
    """Version of this kvbus."""
    return version("kvbus")


PROCESS: Final[tuple[Row[ProcessStats], ...]] = (
    Row(
        "build_info",
        "Version of this kvbus. The value is 1.",
        ("version",),
        lambda _: [((kvbus_version(),), 1.0)],
    ),
    one(
        "state_writing",
        "1 while kvbus writes its state to state_dir; 0 without one, and after writing failed.",
        lambda p: float(bool(p.state_writing)),
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
        "Configurations read again, because the file has changed or at SIGHUP, by outcome.",
        lambda p: counts(p.config_reloads, RELOAD_OUTCOMES),
    ),
    one(
        "config_refused",
        "1 while the newest configuration that was read is not in force as a whole.",
        lambda p: float(bool(p.config_refused)),
    ),
    by(
        "outcome",
        "key_reloads_total",
        "Key files, HTTP tokens and certificates found changed, by outcome.",
        lambda p: counts(p.key_reloads, RELOAD_OUTCOMES),
    ),
)
