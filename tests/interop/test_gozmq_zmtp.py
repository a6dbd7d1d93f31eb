"""kvbus's own ZMTP with peers on go-zeromq, which answer no command and greet as ZMTP 3.0."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbus.transport.dialling import dial
from kvbus.transport.reach import Outcome, Stop
from kvbus.transport.zmtp.endpoint import Listener, Settings
from kvbus.transport.zmtp.mechanism import Role
from kvbus.transport.zmtp.peer import Peer
from kvbus.transport.zmtp.wire import encode_message
from tests.doubles.bus import eventually
from tests.doubles.payloads import payload
from tests.ports import ports_in_a_row
from tests.transport.loops import END, u64
from tests.transport.zmtp.peers import Recorder

from .go_peers import publisher, subscriber

PATIENT = Settings(handshake_timeout=60.0)
"""However long the machine stands still, no connection is lost, and none made twice."""


class Replaying(Recorder):
    """A ROUTER that answers each request with three batches and END."""

    def received(self, peer: Peer, frames: list[bytes]) -> None:
        super().received(peer, frames)
        start = int.from_bytes(frames[1], "big")
        answer = [[b"", b"kv", u64(start + n), payload()] for n in range(3)]
        peer.write(b"".join(map(encode_message, [*answer, [b"", b"", END, b""]])))


@pytest.mark.gozmq
async def test_a_subscriber_and_requester(gozmq: Path, tmp_path: Path) -> None:
    port = ports_in_a_row(2)
    live, replay = Recorder(), Replaying()
    listeners = [
        Listener(f"tcp://127.0.0.1:{port}", Role.PUB, live, settings=PATIENT, refused=live.refuse),
        Listener(f"tcp://127.0.0.1:{port + 1}", Role.ROUTER, replay, settings=PATIENT, refused=replay.refuse),
    ]
    try:
        async with subscriber(gozmq, tmp_path, listeners[0].endpoint, listeners[1].endpoint) as router:
            await eventually(lambda: live.topics == [("+", b"")], "its subscription")
            for n in range(1_000):
                live.send(b"kv", b"not a number", b"x" * (n % 600))
            live.send(b"kv", b"", b"x" * 20_000)
            await eventually(lambda: router.said["message"] == 1_001, "every message")
            assert [len(frame) // 2 for frame in router.odd[-1]] == [2, 0, 20_000]
            # it asks on from the last batch that it was given: both directions go on
            await eventually(lambda: len(replay.messages) > 1, "two requests")
            assert replay.messages[:2] == [[b"", u64(0)], [b"", u64(3)]]
            assert [peer.version for peer in (*live.peers, *replay.peers)] == [(3, 0)] * 2
            assert (router.said["lost"], live.refused, replay.refused) == (0, [], [])
    finally:
        for listener in listeners:
            listener.close()


@pytest.mark.gozmq
async def test_a_publisher_is_dialled_by_hand(gozmq: Path, tmp_path: Path) -> None:
    port = ports_in_a_row(2)
    live, replay = (f"tcp://127.0.0.1:{port + n}" for n in range(2))
    async with publisher(gozmq, tmp_path, "bind", live, replay):
        for endpoint, role, kind in (
            (live, Role.SUB, "PUB"),
            (replay, Role.DEALER, "ROUTER"),
            (live, Role.DEALER, "PUB"),
        ):
            found = Outcome(endpoint, Stop.REFUSED)
            while found.stop is Stop.REFUSED:  # it is still starting
                async with dial(endpoint, role, seconds=30) as dialled:
                    found = dialled.outcome
            assert (found.stop, found.socket_type, found.version) == (Stop.OPEN, kind, (3, 0))
