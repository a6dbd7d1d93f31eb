"""The content of ``/routers``, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from kvbus.core.relay import Relay
from kvbus.core.stats import RouterView
from kvbus.telemetry.table import Routers


class Driver(Routers, Protocol):
    """What knows the routers of an output."""

    @property
    def routers(self) -> list[RouterView]:
        """The connected ones, and those that left last."""


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


def routers_json(relay: Relay, drivers: Sequence[Driver]) -> list[dict[str, Any]]:
    """Return the body of ``/routers``, by output and stream."""
    return [
        router_json(output.spec.name, router)
        for output, driver in zip(relay.outputs, drivers, strict=True)
        for router in driver.routers
    ]
