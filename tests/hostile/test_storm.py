"""Test of several hundred routers that subscribe at once and read nothing.

kvbus delays their states, so that its memory stays within a limit. A router that reads gets every batch meanwhile.
``STORM_ROUTERS=2000`` runs the test with more routers.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import eventually
from tests.doubles.kvbus_process import Place, engine_at, router_at, run_async
from tests.doubles.payloads import payload, store
from tests.doubles.socket_routers import Deaf
from tests.hostile.test_flood import resident

ROUTERS = int(os.environ.get("STORM_ROUTERS", "300"))
STORMS = 3

BLOCKS = 8_000
"""Number of live blocks. Their state has several batches of about 75 kB."""

LIMIT = 2 * 1024 * 1024

SUBSCRIBED = 'kvbus_output_subscribers{output="routers"}'

SUBSCRIBER = (
    b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
    + b"\x04\x19\x05READY\x0bSocket-Type" + struct.pack(">I", 3) + b"SUB"
    + b"\x00\x01\x01"
)  # fmt: skip
"""The bytes of a SUB without encryption: the greeting, READY, and a subscription to all topics."""


@contextlib.contextmanager
def storm(endpoint: str) -> Iterator[None]:
    """Let many routers connect and subscribe, which read nothing. Disconnect them at the end."""
    with contextlib.ExitStack() as stack:
        for _ in range(ROUTERS):
            router = stack.enter_context(socket.socket())
            router.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            router.connect(("127.0.0.1", int(endpoint.rpartition(":")[2])))
            router.sendall(SUBSCRIBER)
        yield


def value(place: Place, metric: str) -> float:
    status, text = place.get("/metrics")
    found = re.search(rf"^{re.escape(metric)} (\S+)$", text, re.MULTILINE)
    assert found is not None, (metric, status, text[:300])
    return float(found[1])


def test_many_routers_that_read_nothing_need_little_memory(tmp_path: Path) -> None:
    async def main() -> None:
        place = Place(tmp_path, limits={"max_unsent_bytes": LIMIT})
        with place.kvbus() as command:
            await place.ready(command)
            async with engine_at(place) as engine:
                with router_at(place) as router:
                    await place.subscribed()
                    publish(engine, 0, BLOCKS)

                    def there(count: int) -> bool:
                        router.read()
                        return {block for _, _, block in router.view.blocks} == set(range(count))

                    await eventually(lambda: there(BLOCKS), "the blocks")
                    first = BLOCKS
                    sizes = [resident(command.process.pid)]
                    for _ in range(STORMS):
                        with storm(place.out):
                            slow = Deaf(place.out, buffer=4096)
                            await eventually(lambda: value(place, SUBSCRIBED) == ROUTERS + 2, "the storm")
                            # the state of each router has begun
                            await eventually(lambda: value(place, "kvbus_unsent_bytes") > LIMIT, "the limit")
                            for _ in range(10):
                                publish(engine, first, 8)
                                first += 8
                                await eventually(lambda count=first: there(count), "a batch during the storm")
                            sizes.append(resident(command.process.pid))
                            assert value(place, "kvbus_unsent_bytes") < LIMIT + ROUTERS * 100_000
                        await eventually(
                            lambda slow=slow, count=first: {block for *_, block in slow.read()} == set(range(count)),
                            "the state, later",
                        )
                        assert slow.view.violations == []
                        slow.close()
                        await eventually(lambda: value(place, SUBSCRIBED) == 1, "the end of the storm")
                        await eventually(lambda: value(place, "kvbus_unsent_bytes") == 0, "no waiting bytes")
                    assert router.view.violations == []
                    each = [(size - sizes[0]) / ROUTERS for size in sizes[1:]]
                    assert max(each) < 64 * 1024 + 3 * LIMIT / ROUTERS, each
                    assert each[-1] < each[0] + 20_000, each

    run_async(main())


def publish(engine: EnginePublisher, first: int, count: int) -> None:
    """Publish stores of ``count`` blocks from the hash ``first`` on, eight blocks in each."""
    for start in range(first, first + count, 8):
        engine.publish(payload(store(list(range(start, start + 8)))))
