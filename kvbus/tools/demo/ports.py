"""Free ports for the demo."""

from __future__ import annotations

import secrets
import socket
from typing import Final

LOOPBACK: Final = "127.0.0.1"

_LOW, _HIGH = 20_000, 32_000  # below the range from which systems take the ports of outgoing connections
_TRIES: Final = 200


class PortRun:
    """A run of consecutive free ports, handed out in order.

    Ranks and streams have consecutive ports (port + r), so single free ports are not enough. The ports were free when
    checked, and nobody reserves them: a bind may still fail.
    """

    def __init__(self, count: int) -> None:
        self._next = _free_run(count)
        self._end = self._next + count

    def take(self, count: int) -> int:
        """Return the first of the next ``count`` ports."""
        first = self._next
        self._next += count
        if self._next > self._end:
            raise ValueError("the run is used up")
        return first


def _free_run(count: int) -> int:
    for _ in range(_TRIES):
        first = _LOW + secrets.randbelow(_HIGH - _LOW - count)
        if all(_free(port) for port in range(first, first + count)):
            return first
    raise OSError(f"no {count} neighbouring ports are free on {LOOPBACK} between {_LOW} and {_HIGH}")


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True
