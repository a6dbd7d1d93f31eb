"""Tests that peers that answer no ZMTP command stay connected, and that kvbus sends them no command.

go-zeromq (used by llm-d and its simulated engine) passes a command to its application as a message, and answers none. A
socket with ZMTP heartbeats would put a PING into a replay answer, and end the connection because no PONG comes.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from kvbus.core.wire.frames import replay_request
from kvbus.transport.request import RequestConnection
from tests.doubles.bus import eventually
from tests.long import LONG
from tests.ports import free_port
from tests.transport.bare import dialled, listening
from tests.transport.live.test_stream import stream_of
from tests.transport.loops import END, both_loops, u64
from tests.transport.replaying import served
from tests.transport.test_dialled import dialled as dialled_stream
from tests.transport.test_subscription import bound as bound_stream

SECONDS = 23.0 if LONG else 6.0
"""Duration of the test in seconds.

The long duration suffices to see a peer cut off by ZMTP heartbeats: a PING every 5 s and 15 s for the PONG. The short
duration suffices to see the first PING.
"""


@pytest.mark.slow
async def test_peers_without_zmtp_commands_stay_connected_and_get_no_command(context):
    """Connect peers that do not know ZMTP's commands to each kind of socket of kvbus.

    Some peers are busy, some are silent, and one is reading a replay answer. kvbus must not send any of them a command
    such as PING, and must not close their connections because they send none.
    """
    engine_port, replay_port = (free_port() for _ in range(2))
    loop = asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        # routers: one with each minor version of ZMTP 3, one that requests replays, and one that reads its answer
        # slowly
        output = await enter(stream_of(context, state=False))
        stats = output.stats
        routers = [await enter(dialled(output.port, b"SUB", minor=minor)) for minor in (0, 1)]
        replay = await enter(served(600, payload=b"p" * 20_000))
        server = int(replay.endpoint.rpartition(":")[2])
        patient = await enter(dialled(server, b"DEALER"))
        slow = await enter(dialled(server, b"DEALER", pace=SECONDS / 600))
        # engines: one to which kvbus connects, one that connects to kvbus, and one that answers a replay request slowly
        engines = await enter(listening(engine_port, b"PUB"))
        live = await enter(dialled_stream(f"tcp://127.0.0.1:{engine_port}"))
        bound = await enter(bound_stream())
        dials = await enter(dialled(int(bound.endpoint.rpartition(":")[2]), b"PUB"))
        replays = await enter(listening(replay_port, b"ROUTER"))
        answer: list[Any] = []
        question = RequestConnection(context, f"tcp://127.0.0.1:{replay_port}", replay_request(0), answer.append)
        stack.callback(question.close)

        for router in routers:
            router.send(b"\x01")
        for requester, start in ((patient, 599), (slow, 0)):
            requester.send(b"", u64(start))
        await eventually(lambda: stats.subscribers == 2, "both subscriptions")
        await eventually(lambda: engines and engines[0].messages and dials.messages, "subscriptions to both engines")
        await eventually(lambda: replays and replays[0].messages, "the request")
        replays[0].send(b"", b"", u64(0), b"x")
        await eventually(lambda: len(patient.messages) == 2, "the first answer")

        sent = 0
        begin = loop.time()
        while loop.time() < begin + SECONDS:
            output.live.publish(b"", u64(sent), b"x", 1)
            output.live.flush()
            sent += 1
            await asyncio.sleep(0.05)
        peers = [*routers, patient, slow, *engines, dials, *replays]
        assert [peer.commands for peer in peers] == [[b"READY"]] * 7
        assert not any(peer.gone for peer in peers)

        patient.send(b"", u64(599))
        for engine in (engines[0], dials):
            engine.send(b"", u64(0), b"x")
        replays[0].send(b"", b"", END, b"")
        await eventually(lambda: len(patient.messages) == 4, "one more answer on the same connection")
        await eventually(lambda: live.batches and bound.batches and len(answer) == 2, "what the engines said at last")
        await eventually(lambda: slow.messages[-1][-2] == END, "the end of the slow answer")
        await eventually(lambda: all(len(router.messages) == sent for router in routers), "every batch")

        assert [peer.commands for peer in peers] == [[b"READY"]] * 7
        assert live.ups == [True]
        assert bound.seen[0] is True
        assert False not in bound.seen
        for router in routers:
            assert router.messages == [[b"", u64(seq), b"x"] for seq in range(sent)]
        assert [message[-2] for message in slow.messages] == [*map(u64, range(600)), END]
        assert replay.outcomes == {"complete": 3}
        assert stats.subscribers == 2


@both_loops
async def test_a_zmtp_heartbeat_of_a_router_is_answered(context):
    async with stream_of(context, state=False) as output, dialled(output.port, b"SUB", minor=1) as router:
        router.command(b"PING", bytes(2) + b"context")
        await eventually(lambda: router.commands == [b"READY", b"PONG"], "the answer")
