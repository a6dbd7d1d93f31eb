"""Tests for kvbus's own implementation of ZMTP with peers on go-zeromq.

These peers answer no ZMTP command, and announce ZMTP 3.0 in their greeting.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbus.transport.dialling import dial
from kvbus.transport.reach import Outcome, Stop
from kvbus.transport.zmtp.mechanism import Role
from kvbus.transport.zmtp.settings import Settings
from tests.ports import ports_in_a_row

from .go_peers import publisher

PATIENT = Settings(handshake_timeout=60.0)
"""Settings with a long handshake timeout, so that no connection is lost or made twice on a busy machine."""


@pytest.mark.gozmq
async def test_kvbuss_own_zmtp_connects_to_a_publisher_on_go_zeromq(gozmq: Path, tmp_path: Path) -> None:
    port = ports_in_a_row(2)
    live, replay = (f"tcp://127.0.0.1:{port + n}" for n in range(2))
    async with publisher(gozmq, tmp_path, "bind", live, replay):
        for endpoint, role, kind in (
            (live, Role.SUB, "PUB"),
            (replay, Role.DEALER, "ROUTER"),
            (live, Role.DEALER, "PUB"),
        ):
            found = Outcome(endpoint, Stop.REFUSED)
            while found.stop is Stop.REFUSED:  # the program is still starting
                async with dial(endpoint, role, seconds=30) as dialled:
                    found = dialled.outcome
            assert (found.stop, found.socket_type, found.version) == (Stop.OPEN, kind, (3, 0))
