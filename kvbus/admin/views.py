"""The content of ``/sources`` and ``/routers``, as plain data."""

from __future__ import annotations

from typing import Any

from msgspec import to_builtins

from kvbus.core.analytics import AnalyticsReading
from kvbus.core.stats import RouterView
from kvbus.telemetry.readings import SourceReading


def source_json(source: SourceReading, endpoint: str, replay_endpoint: str | None) -> dict[str, Any]:
    """Return one entry of ``/sources``."""
    stats, why = source.stats, source.missing
    return {
        "name": source.name,
        "rank": source.rank,
        "endpoint": endpoint,
        "replay_endpoint": replay_endpoint,
        "state": source.state.value,
        "partial": source.partial,
        "partial_since": source.partial_since,
        "partial_reason": why.reason if why else None,
        "missing_before": why.before if why else None,
        "heals": why.heals if why else None,
        "reasons": [to_builtins(said) for said in source.reasons],
        "epoch": source.epoch,
        "last_seq": source.last_seq,
        "dialect": source.dialect,
        "block_size": source.block_size,
        "queue_depth": source.queue_depth,
        "unverified": source.unverified,
        "counts": {
            "batches": stats.batches,
            "bytes": stats.bytes,
            "stored": stats.stored,
            "removed": stats.removed,
            "cleared": stats.cleared,
            "gaps": stats.gaps,
            "missing": stats.missing,
            "recovered": stats.recovered,
            "lost": stats.lost,
            "pending": source.pending,
            "duplicates": stats.duplicates,
            "restarts": stats.restarts,
            "ways": {
                "as_it_came": {"batches": stats.as_they_came, "blocks": stats.as_they_came_blocks},
                "encoded": {"batches": stats.encoded, "blocks": stats.encoded_blocks},
                "by_event": {"batches": stats.by_event, "blocks": stats.by_event_blocks},
            },
            "rejected": {str(reason): n for reason, n in stats.rejected.items()},
            "filtered": {str(reason): n for reason, n in stats.filtered.items()},
        },
        "examples": source.examples,
        "blocks": {medium: count for medium, count in source.blocks.items() if count},
        "analytics": None if source.analytics is None else _analytics_json(source.analytics),
    }


def _analytics_json(analytics: AnalyticsReading) -> dict[str, Any]:
    lifetimes = analytics.lifetimes
    return {
        "live": analytics.live,
        "stored": analytics.stored,
        "removed": analytics.removed,
        "stored_again": analytics.stored_again,
        "stored_per_second": round(analytics.stored_per_second, 6),
        "removed_per_second": round(analytics.removed_per_second, 6),
        "churn": round(analytics.churn, 6),
        "shared": round(analytics.shared, 4),
        "lifetimes": {
            "seconds": round(lifetimes.total, 3),
            "buckets": dict(zip([*map(str, lifetimes.bounds), "+Inf"], lifetimes.counts, strict=True)),
        },
        "followed": {"blocks": analytics.followed, "one_in": analytics.weight},
    }


def router_json(output: str, router: RouterView) -> dict[str, Any]:
    """Return one entry of ``/routers``."""
    return {
        "output": output,
        "stream": router.stream,
        "peer": router.peer,
        "since": router.since,
        "topics": router.topics,
        "subscriptions": router.subscriptions,
        "state": router.state,
        "state_sent": {"count": router.states_sent, "at": router.state_sent_at},
        "queued": router.queued_batches,
        "bytes": router.queued_bytes,
        "behind_seconds": round(router.behind_seconds, 3),
        "dropped": {"batches": router.dropped_batches, "events": router.dropped_events},
        "left": router.left,
        "left_at": router.left_at,
    }
