"""Tests for how kvbus learns from TCP whether a peer is alive.

A peer that does not read is alive. A peer whose kernel does not answer is dead.
"""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvbus.transport.zmtp import tcp
from kvbus.transport.zmtp.tcp import Silence, gone
from tests.doubles.bus import eventually
from tests.transport.loops import both_loops
from tests.transport.zmtp.peers import hello
from tests.transport.zmtp.test_listener import bare, listening

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("sign", "expected"),
    [
        (Silence(0, 0, 0, 1000), False),  # no acknowledgement is outstanding
        (Silence(0, 0, 5, 1000), False),  # the data was sent just now, after a long silence
        (Silence(8, 0, 5, 70), True),
        (Silence(8, 0, 5, 50), False),  # the silence is too short
        (Silence(2, 0, 5, 70), False),  # too few retransmissions
        (Silence(8, 0, 0, 70), False),  # the peer has acknowledged all data
        (Silence(0, 1, 0, 119), False),  # the window is 0, and the peer may still answer the last probe
        (Silence(0, 3, 0, 300), True),  # the window is 0, and the peer answers no probe
    ],
)
def test_tcp_signs_decide_whether_a_peer_counts_as_dead(sign, expected):
    assert gone(sign) is expected


def test_tcp_options_enable_nodelay_and_keepalive():
    with socket.socket() as made:
        tcp.set_options(made)
        read = [
            made.getsockopt(level, option)
            for level, option in (
                (socket.IPPROTO_TCP, socket.TCP_NODELAY),
                (socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
                (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL),
                (socket.IPPROTO_TCP, socket.TCP_KEEPCNT),
            )
        ]
        assert read == [1, 1, 30, 10, 3]


@both_loops
async def test_a_peer_that_does_not_read_counts_as_alive():
    """A peer that does not read counts as alive: its TCP window is 0, but its kernel answers the window probes."""
    async with listening() as (listener, seen), bare(listener.endpoint, hello(b"SUB")):
        await eventually(lambda: seen.peers, "the peer")
        peer = seen.peers[0]
        peer.write(bytes(20_000_000))
        loop = asyncio.get_running_loop()
        until = loop.time() + 2
        while loop.time() < until:
            assert not peer.silent_for(0.0)
            await asyncio.sleep(0.02)
        assert peer.unread_bytes > 0


SILENT = """
import asyncio, subprocess, sys
sys.path.insert(0, {root!r})
from kvbus.transport.zmtp.settings import Settings
from tests.doubles.bus import eventually
from tests.transport.zmtp.peers import hello
from tests.transport.zmtp.test_listener import bare, listening

def link(state):
    subprocess.run(["ip", "link", "set", "lo", state], check=True)

async def main():
    link("up")
    async with listening(settings=Settings(gone_after=2.0)) as (listener, seen):
        async with bare(listener.endpoint, hello(b"SUB")):
            await eventually(lambda: seen.peers, "the peer")
            link("down")
            seen.peers[0].write(b"\\0\\0" * 100)
            await eventually(lambda: seen.ends, "its end")
            print(seen.ends[0])
            link("up")

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_peer_whose_network_is_down_counts_as_dead():
    """A peer whose network is down counts as dead.

    The test runs in its own network namespace, and takes the loopback interface down.
    """
    alone = [shutil.which("unshare") or "unshare", "--user", "--map-root-user", "--net"]
    if os.name != "posix" or subprocess.run([*alone, "ip", "link"], capture_output=True, check=False).returncode:
        pytest.skip("no network namespace for this user, or no ip")
    ran = subprocess.run(
        [*alone, sys.executable, "-c", SILENT.format(root=str(ROOT))],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.stdout.split() == ["gone"], ran.stdout + ran.stderr
