"""A listener for a moment: who dials in, and what it is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

from kvbus.transport.curve import Curve
from kvbus.transport.reach.dialling import Dialled, shake_hands
from kvbus.transport.reach.outcome import Outcome, Stop
from kvbus.transport.zmtp.addresses import bind, peer_address
from kvbus.transport.zmtp.limits import Limits
from kvbus.transport.zmtp.roles import Role

MAX_PEERS = 16
"""Connections that are taken at most."""


async def accept(endpoint: str, role: Role, curve: Curve | None, limits: Limits) -> AsyncIterator[Dialled]:
    """Bind, and yield each peer that has dialled in, until whoever reads stops. All connections are closed then.

    Raises:
        BindError: the endpoint cannot be bound.
    """
    bound = bind(endpoint)
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as opened:
        opened.callback(bound.close)
        for _ in range(MAX_PEERS):
            connected, _ = await loop.sock_accept(bound.socket)
            opened.callback(connected.close)
            connected.setblocking(False)
            outcome = Outcome(endpoint, Stop.SILENT, addresses=(peer_address(connected),))
            dialled = await shake_hands(outcome, connected, role, curve, limits, None)
            if dialled.outcome.stop is Stop.OPEN or dialled.outcome.mechanism:
                yield Dialled(replace(dialled.outcome, addresses=outcome.addresses), dialled.connection)
        await asyncio.Future()
