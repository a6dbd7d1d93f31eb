"""Counters of the proxies in front of an engine's API. They are plain integers, from which metrics are made."""

from __future__ import annotations

from collections import Counter


class FrontStats:
    """Counters of the connections and requests of the HTTP proxy in front of an engine's API.

    Args:
        limit: maximum number of open connections.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.http_connections = 0
        """Number of open connections of clients to the HTTP proxy."""
        self.http_closed: Counter[str] = Counter()
        """Number of connections that kvbus closed, by reason: ``too_many`` connections, or a ``slow`` client."""
        self.requests: Counter[str] = Counter()
        """Number of requests to the HTTP proxy, by outcome."""


class CallStats:
    """Counters of the calls of the gRPC proxy in front of an engine's API.

    Args:
        limit: maximum number of calls that are open at the same time.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.open = 0
        """Number of calls through the gRPC proxy that have not ended yet."""
        self.calls: Counter[str] = Counter()
        """Number of calls through the gRPC proxy, by outcome."""
