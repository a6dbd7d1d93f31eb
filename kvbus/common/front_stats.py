"""What stands before the engine's API has counted: plain values, read at a scrape."""

from __future__ import annotations

from collections import Counter


class FrontStats:
    """Connections and requests of the front.

    Args:
        limit: the most connections at once.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.http_connections = 0
        """Those that are open."""
        self.http_closed: Counter[str] = Counter()
        """Those that kvbus closed, by reason: too_many, slow."""
        self.requests: Counter[str] = Counter()
        """Requests by what became of them."""


class CallStats:
    """Calls of the gRPC front.

    Args:
        limit: the most at once.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.open = 0
        """Those that are under way."""
        self.calls: Counter[str] = Counter()
        """Calls by what became of them."""
