"""Tests for an engine that hangs while its host name moves to another engine.

kvbus must connect to the new address, and remove the dead blocks from its routers.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvbus.daemon import moved_names
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import Bus, eventually, running_bus
from tests.doubles.payloads import payload, store
from tests.ports import free_ports

ENGINE = """
import asyncio, sys
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.payloads import payload, store

async def main():
    address, live, replay, first = sys.argv[1], *map(int, sys.argv[2:])
    async with EnginePublisher(f"tcp://{address}:{live}", f"tcp://{address}:{replay}", bind=True) as publisher:
        for block in range(first, first + 5):
            publisher.publish(payload(store([block])))
        print("published", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""
CHILD = """
import asyncio, signal, subprocess, sys
from pathlib import Path
from kvbus.config import load
from kvbus.daemon import moved_names
from kvbus.daemon.daemon import Daemon
from tests.doubles.runtimes import WITHOUT_STORE
from tests.doubles.bus import eventually
from tests.doubles.socket_routers import RouterOnASet

moved_names.INTERVAL = 0.2
live, replay, out, out_replay = map(int, sys.argv[2:])
hosts = Path("/etc/hosts")

def engine(address, first):
    command = [sys.executable, "-c", sys.argv[1], address, str(live), str(replay), str(first)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    process.stdout.readline()
    return process

async def main():
    hosts.write_text("127.0.0.2 engine.test\\n")
    engines = [engine("127.0.0.2", 100), engine("127.0.0.3", 200)]
    outputs = [{"endpoint": f"tcp://127.0.0.1:{out}", "replay_endpoint": f"tcp://127.0.0.1:{out_replay}"}]
    source = {"endpoint": f"tcp://engine.test:{live}", "replay_endpoint": f"tcp://engine.test:{replay}"}
    settings = {"http": None, "state_dir": None, "sources": [source], "outputs": outputs}
    daemon = Daemon(load(None, env={}, overrides=settings), runtime=WITHOUT_STORE)
    await daemon.start()
    try:
        router = RouterOnASet(f"tcp://127.0.0.1:{out}", f"tcp://127.0.0.1:{out_replay}")
        router.rebuilds = False
        router.subscribe()

        async def holds(blocks, what, patience):
            await eventually(lambda: router.read() and {key[2] for key in router.view.blocks} == set(blocks), what, patience)

        await holds(range(100, 105), "the first engine's blocks", 60)
        engines[0].send_signal(signal.SIGSTOP)
        hosts.write_text("127.0.0.3 engine.test\\n")
        await holds(range(200, 205), "the second engine's blocks alone", 30)
        router.close()
        print("followed", daemon.relay.sources[0].state)
    finally:
        await daemon.close(drain=0)
        for each in engines:
            each.kill()

asyncio.run(main())
"""


@pytest.mark.timeout(250)
def test_kvbus_leaves_a_frozen_engine_whose_name_has_moved(tmp_path: Path) -> None:
    if os.getuid():
        pytest.skip("needs root for an /etc/hosts of its own")
    (tmp_path / "hosts").write_text("")
    mounted = f'mount --bind {tmp_path / "hosts"} /etc/hosts && exec "$@"'
    ports = [str(port) for port in free_ports(4)]
    command = ["unshare", "-m", "sh", "-c", mounted, "sh", sys.executable, "-c", CHILD, ENGINE, *ports]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    if "mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip(f"no mount namespace here: {done.stderr}")
    assert done.stdout == "followed live\n", done.stderr


NAME = "127.1"  # to the resolver this is a name, which leads to 127.0.0.1 on every machine


class Names:
    """A substitute for host name lookups, with an answer that the test can change."""

    def __init__(self) -> None:
        self.asked = 0
        self.answer: str | OSError | None = None

    async def getaddrinfo(self, host: str, *args: Any, **more: Any) -> Any:
        self.asked += 1
        if isinstance(self.answer, OSError):
            raise self.answer
        found = await asyncio.to_thread(socket.getaddrinfo, host, *args, **more)
        return found if self.answer is None else [(*each[:4], (self.answer, 0)) for each in found]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    monkeypatch.setattr(moved_names, "INTERVAL", 0.02)
    return Names()


async def rounds(names: Names, count: int = 5) -> None:
    enough = names.asked + count
    await eventually(lambda: names.asked >= enough, "names are looked up")


@pytest.mark.parametrize("answer", [None, OSError("the DNS is down")], ids=["the same", "none"])
async def test_a_silent_engine_keeps_its_connection_until_its_name_moves(
    names: Names, answer: OSError | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", names.getaddrinfo)
    live, replay = free_ports(2)
    source = {"endpoint": f"tcp://{NAME}:{live}", "replay_endpoint": f"tcp://{NAME}:{replay}"}
    async with (
        EnginePublisher(f"tcp://127.0.0.1:{live}", f"tcp://127.0.0.1:{replay}", bind=True) as engine,
        running_bus(source=source) as bus,
    ):
        engine.publish(payload(store([1])))
        await eventually(lambda: holds(bus) == {1}, "the engine's block")
        names.answer = answer
        await rounds(names)
        assert "connection lost" not in caplog.text
        assert "connecting again" not in caplog.text
        names.answer = "127.0.0.9"
        await eventually(lambda: "and no longer 127.0.0.1: connecting again" in caplog.text, "it dials anew")


async def test_ip_addresses_and_engines_that_dial_in_cause_no_name_lookup(
    names: Names, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", names.getaddrinfo)
    live, name, at, *replays = free_ports(6)
    more = {"name": "named", "endpoint": f"tcp://{NAME}:{name}"}
    dialled = {"name": "bound", "endpoint": f"tcp://127.0.0.1:{at}", "bind": True}
    async with (
        EnginePublisher(f"tcp://127.0.0.1:{live}", f"tcp://127.0.0.1:{replays[0]}", bind=True),
        EnginePublisher(f"tcp://127.0.0.1:{name}", f"tcp://127.0.0.1:{replays[1]}", bind=True),
        EnginePublisher(f"tcp://127.0.0.1:{at}", f"tcp://127.0.0.1:{replays[2]}", bind=False),
        running_bus(
            source={"endpoint": f"tcp://127.0.0.1:{live}"}, more_sources=[more, dialled], output={"layout": "merged"}
        ) as bus,
    ):
        await eventually(lambda: all(each.sequencer.connected for each in bus.daemon.relay.sources), "all connect")
        names.answer = "127.0.0.9"
        await eventually(lambda: "source named: the host name in" in caplog.text, "the named one is dialled anew")
        assert "source engine: the host name in" not in caplog.text
        assert "source bound: the host name in" not in caplog.text


def holds(bus: Bus) -> set[int | bytes]:
    return set(bus.source.normalizer.index.names())
