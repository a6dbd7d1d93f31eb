"""Test for a host name that moves to another engine while kvbus is connected to the old engine.

kvbus must send replay requests to the engine of the live stream, and not to the new address of the name.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ports import free_ports

CHILD = """
import asyncio, sys
from pathlib import Path
import zmq
from kvbus.transport.request import RequestConnection
from kvbus.transport.sockets import PeerPolicy, make_context
from kvbus.transport.subscription import DialledStream, Events

live, replay = int(sys.argv[1]), int(sys.argv[2])
hosts = Path("/etc/hosts")

def engine(context, address):
    publisher, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    publisher.bind(f"tcp://{address}:{live}")
    router.bind(f"tcp://{address}:{replay}")
    return publisher, router

async def asked(context, stream, router):
    # return whether the replay request reaches this engine
    request = RequestConnection(context, stream.beside(f"tcp://engine.test:{replay}"), [b"", b"1"], lambda _: None)
    found = await asyncio.to_thread(router.poll, 60_000)
    if found:
        router.recv_multipart()
    request.close()
    return bool(found)

async def main():
    context = make_context()
    old, new = engine(context, "127.0.0.2"), engine(context, "127.0.0.3")
    hosts.write_text("127.0.0.2 engine.test\\n")
    up = asyncio.Queue()
    events = Events(lambda _: None, up.put_nowait)
    stream = DialledStream(f"tcp://engine.test:{live}", topics=[b""], events=events, policy=PeerPolicy(1000))
    assert await asyncio.wait_for(up.get(), 60)
    hosts.write_text("127.0.0.3 engine.test\\n")
    assert await asked(context, stream, old[1]), "the live stream's engine is asked"
    for socket in old:
        socket.close(0)
    assert not await asyncio.wait_for(up.get(), 60)
    assert await asyncio.wait_for(up.get(), 60)
    assert await asked(context, stream, new[1]), "the name is looked up again with the live stream"
    stream.close()
    context.destroy(0)
    print("moved")

asyncio.run(main())
"""


@pytest.mark.timeout(250)
def test_replays_go_to_the_engine_of_the_live_stream_after_a_dns_change(tmp_path: Path) -> None:
    if os.getuid():
        pytest.skip("needs root for an /etc/hosts of its own")
    (tmp_path / "hosts").write_text("")
    live, replay = free_ports(2)
    mounted = f'mount --bind {tmp_path / "hosts"} /etc/hosts && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", mounted, "sh", sys.executable, "-c", CHILD, str(live), str(replay)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    if "mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip(f"no mount namespace here: {done.stderr}")
    assert done.stdout == "moved\n", done.stderr
