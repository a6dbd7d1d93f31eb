"""Counters of the proxies in front of the engine's API: plain values, read at a scrape."""

from __future__ import annotations

from collections import Counter


class FrontStats:
    """Connections and requests of the HTTP proxy.

    Args:
        limit: maximum number of connections at a time.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.http_connections = 0
        """Number of open connections."""
        self.http_closed: Counter[str] = Counter()
        """Number of connections that kvbus closed, by reason: too_many, slow."""
        self.requests: Counter[str] = Counter()
        """Number of requests by outcome."""


class CallStats:
    """Calls of the gRPC proxy.

    Args:
        limit: maximum number of calls at a time.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.open = 0
        """Number of calls under way."""
        self.calls: Counter[str] = Counter()
        """Number of calls by outcome."""
