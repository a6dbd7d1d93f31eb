"""The reasons of kvbus's own ZMTP under the names that the metrics have for failed handshakes."""

from __future__ import annotations

from typing import Final

from kvbus.core.types import Refused
from kvbus.transport.zmtp.reasons import Reason

_MECHANISM: Final = frozenset({Reason.MECHANISM})
_CLOSED: Final = frozenset({Reason.LEFT, Reason.BROKEN, Reason.HANDSHAKE_TIMEOUT, Reason.REFUSED})


def counted_as(reason: str) -> str:
    """Return the name to count a refused connection under; bounds have names of their own."""
    if reason == Reason.KEY:
        return Refused.KEY
    if reason in _MECHANISM:
        return Refused.MECHANISM
    if reason in _CLOSED:
        return Refused.CLOSED
    if reason in {Reason.HALF_OPEN, Reason.TOO_MANY_PEERS, Reason.NO_DESCRIPTOR}:
        return reason
    return Refused.PROTOCOL
