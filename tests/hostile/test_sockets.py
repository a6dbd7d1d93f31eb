"""Tests for bad input to a real ``kvbus run``: it counts the input and survives, and its router stays exact."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from pathlib import Path

import pytest
import zmq

from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import eventually
from tests.doubles.kvbus_process import Place, engine_at, router_at, run_async
from tests.doubles.payloads import payload, removed, store
from tests.doubles.socket_routers import RouterOnASet
from tests.hostile.bad import BATCHES, FRAMES
from tests.hostile.test_flood import resident
from tests.transport.zmtp.peers import hello


def rejected(place: Place) -> dict[str, int]:
    text = place.get("/metrics")[1]
    found = re.findall(r'kvbus_events_rejected_total\{reason="(\w+)",source="engine"\} (\d+)', text)
    return {reason: int(count) for reason, count in found if int(count)}


async def holds(router: RouterOnASet, *blocks: int) -> None:
    """Wait until the router holds exactly these blocks."""

    def there() -> bool:
        router.read()
        return {block for _, _, block in router.view.blocks} == set(blocks)

    await eventually(there, f"a router that holds {blocks}")
    assert router.view.violations == []


def test_a_running_bus_counts_every_kind_of_bad_input_and_survives(tmp_path: Path) -> None:
    async def main() -> None:
        place = Place(tmp_path)
        with place.kvbus() as command:
            await place.ready(command)
            async with engine_at(place) as engine:
                with router_at(place) as router:
                    await place.subscribed()
                    engine.publish(payload(store([1, 2]), removed([2])))
                    expected: dict[str, int] = {}
                    for _, frames, reason in FRAMES:
                        if 0 < len(frames) <= 64:
                            engine.send_frames(*frames)
                            expected[reason] = expected.get(reason, 0) + 1
                    for bad in BATCHES:
                        engine.publish(bad.payload)
                    engine.send_frames(b"\xff\xfe", (0).to_bytes(8, "big"), payload(store([1, 2]), removed([2])))
                    engine.publish(payload(store([3], 1), removed([1])))
                    last = engine.next_seq - 1
                    await eventually(lambda: place.sources()[0]["last_seq"] == last, "all of it taken in")
                    # Some bad batches had good events whose blocks kvbus may have stored. The clear removes them from the comparison.
                    engine.publish(payload({"type": "AllBlocksCleared"}, store([4, 5])))
                    await holds(router, 4, 5)
                    got = rejected(place)
                    assert {reason: got.get(reason) for reason in expected} == expected
                    assert set(got) >= {"not_msgpack", "nesting", "batch_shape", "token_range", "self_parent"}
                    (source,) = place.sources()
                    assert source["state"] == "live"
                    assert place.get("/livez")[0] == 200
                    assert command.process.poll() is None

    run_async(main())


def flood(server: socket.socket, sent: list[int]) -> None:
    """Accept connections as an engine, one after another, and send each one a message that does not end."""
    with contextlib.suppress(OSError):  # the server is closed at the end of the test
        while True:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(hello(b"PUB"))
                while True:
                    sent.append(connection.send(b"\1\0" * 32_768))


def test_a_message_without_an_end_costs_little_memory_and_time(tmp_path: Path) -> None:
    """An engine to which kvbus connects sends 16 MB of empty frames, none of which is the last one of its message.

    kvbus closes the connection, counts the message, names the reason, and answers ``/livez`` at once. Later a correct
    engine at the same address is read.
    """

    async def main() -> None:
        place = Place(tmp_path)
        sent: list[int] = []
        with place.kvbus() as command:
            await place.ready(command)
            before = resident(command.process.pid)
            server = socket.create_server(("127.0.0.1", int(place.engine.rpartition(":")[2])))
            threading.Thread(target=flood, args=(server, sent), daemon=True).start()
            slowest = 0.0

            def alive() -> bool:
                nonlocal slowest
                begin = time.monotonic()
                assert place.get("/livez")[0] == 200
                slowest = max(slowest, time.monotonic() - begin)
                return rejected(place).get("message_size", 0) >= 3

            await eventually(alive, "three messages that were cut")
            assert slowest < 2
            assert resident(command.process.pid) - before < 60_000_000
            await eventually(lambda: "message_too_large" in place.get("/findings")[1], "the finding")
            server.shutdown(socket.SHUT_RDWR)
            server.close()
            async with engine_at(place) as engine:
                with router_at(place) as router:
                    await place.subscribed()
                    engine.publish(payload(store([1, 2])))
                    await holds(router, 1, 2)

    run_async(main())


@pytest.mark.parametrize("interpose", [False, True], ids=["bind", "interpose"])
def test_a_router_is_exact_after_two_engines_used_the_same_endpoint(tmp_path: Path, interpose: bool) -> None:
    """kvbus binds, and two engines connect, each with seqs from 0.

    When only one engine remains, the router must be exact.
    """

    async def main() -> None:
        place = Place(tmp_path)
        place.config["sources"][0]["bind"] = True
        if interpose:
            place.config["sources"][0]["endpoint"] = place.engine = place.out
            place.config["outputs"][0]["interpose"] = True
        with place.kvbus() as command, zmq.Context() as context:
            await place.ready(command)
            other = context.socket(zmq.PUB)
            other.setsockopt(zmq.LINGER, 0)
            other.connect(place.engine)
            async with EnginePublisher(place.engine, place.engine_replay, bind=False) as engine:
                with router_at(place) as router:
                    await place.subscribed()

                    def both_publish() -> bool:
                        seq = engine.publish(payload(store([1000 + engine.next_seq])))
                        other.send_multipart([b"", seq.to_bytes(8, "big"), payload(store([5000 + seq]))])
                        return bool(place.sources()[0]["state"] == "conflict")

                    await eventually(both_publish, "the conflict")
                    await eventually(lambda: both_publish() and rejected(place).get("conflict"), "it is counted")
                    await holds(router)
                    other.close()
                    mine = {1000 + n for n in range(engine.next_seq)}
                    await eventually(lambda: place.sources()[0]["state"] == "live", "another try")
                    await holds(router, *mine)
                    assert not place.sources()[0]["partial"]

    run_async(main())
