"""Free ports on loopback for tests.

Test processes that run in parallel get different ports, so that they do not disturb each other.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
from typing import Final

LOWEST, HIGHEST = 10_000, 32_000
"""The range of port numbers for tests. It lies below the ports that the operating system uses for outgoing connections.

In that range, a client that dials an engine before the engine listens may get the engine's own port as its local port.
It then connects to itself, and the engine can never bind the port.
"""


class Ports:
    """The port numbers that belong to one of several parallel test processes.

    It hands them out in order from a random start, and begins again after the last.

    Args:
        worker: number of this process among the parallel test processes.
        workers: number of parallel test processes.
    """

    def __init__(self, worker: int, workers: int) -> None:
        size = (HIGHEST - LOWEST) // workers
        self._lowest = LOWEST + worker * size
        self._highest = self._lowest + size
        self._next = random.SystemRandom().randrange(self._lowest, self._highest)

    def in_a_row(self, count: int) -> int:
        """Return the first of ``count`` consecutive ports at which no process listens."""
        for _ in range(1000):
            if self._next + count > self._highest:
                self._next = self._lowest
            first = self._next
            self._next += count
            with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
                return first
        raise AssertionError(f"no {count} free ports in a row")


_MINE: Final = Ports(
    int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")),
    int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")),
)


def ports_in_a_row(count: int) -> int:
    """Return the first of ``count`` consecutive ports at which no process listens."""
    return _MINE.in_a_row(count)


def free_ports(count: int) -> list[int]:
    """Return ``count`` loopback ports at which no process listens."""
    return [_MINE.in_a_row(1) for _ in range(count)]


def free_port() -> int:
    """Return a loopback port at which no process listens."""
    return _MINE.in_a_row(1)
