"""Ports for tests, on loopback: none is given out twice, so that nobody finds a neighbour on its own."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from typing import Final

LOWEST, HIGHEST = 10_000, 32_000
"""Below the range that the system gives to outgoing connections: there, whoever tries to reach an engine that is not
there yet may be given the engine's own port, connect to itself, and keep the engine from ever binding it."""


class Ports:
    """One test process's share of the range, walked from a random place on; round again when all were used.

    Args:
        worker: which of the processes that run tests side by side this is.
        workers: how many there are.
    """

    def __init__(self, worker: int, workers: int) -> None:
        size = (HIGHEST - LOWEST) // workers
        self._lowest = LOWEST + worker * size
        self._highest = self._lowest + size
        self._next = random.SystemRandom().randrange(self._lowest, self._highest)

    def in_a_row(self, count: int) -> int:
        """The first of so many ports that nobody listens on."""
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
    """The first of so many ports that nobody listens on."""
    return _MINE.in_a_row(count)


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on."""
    return [_MINE.in_a_row(1) for _ in range(count)]


def free_port() -> int:
    """A port nobody listens on."""
    return _MINE.in_a_row(1)
