"""Tests for attacks on memory and time: replay answers that nobody reads, an endless message, SIGTERM during the start.

Each test states the limit that kvbus must keep.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import zmq

from tests.doubles.bus import wait_for
from tests.doubles.kvbus_process import Process
from tests.doubles.payloads import payload, store
from tests.hostile.test_flood import resident
from tests.ports import free_port
from tests.transport.zmtp.peers import hello

MB: Final = 10**6

PEERS: Final = 40
"""Number of peers that request a snapshot and read one byte of it."""

BLOCKS: Final = 2_000
"""Number of blocks in the requested snapshot, which then has 2.6 MB."""

BLOCK_SIZE: Final = 256
"""Number of tokens in a block. An encoded token has five bytes."""

PER_PEER: Final = 500_000
"""Maximum number of bytes that kvbus may keep for one peer that does not read. A complete snapshot has more."""

SENT: Final = 4 * MB
"""Number of bytes that the test sends of a message without end."""

STATE_BLOCKS: Final = 10_000
"""Number of blocks in the saved state. kvbus reads its write-ahead log of 13 MB in a quarter of a second."""


class BoundExceeded(Exception):  # noqa: N818
    """An error: kvbus exceeded the limit of a test, so the attack succeeded.

    Other exceptions are errors of the test.
    """


def require(kept: bool, found: str) -> None:
    if not kept:
        raise BoundExceeded(found)


def configure(process: Process, source: dict[str, Any], output: dict[str, Any], state_dir: Path | None = None) -> None:
    """Configure a kvbus process with one source and one output."""
    sources = [{"name": "engine", "endpoint": process.engine, **source}]
    outputs = [{"endpoint": process.out, **output}]
    state = None if state_dir is None else str(state_dir)
    everything = {"sources": sources, "outputs": outputs, "http": process.http, "state_dir": state}
    process.config = everything


@contextlib.contextmanager
def connected(port: int, kind: bytes) -> Iterator[socket.socket]:
    """Yield a raw connection to kvbus after the ZMTP handshake. It has a small receive buffer."""
    with socket.socket() as peer:
        peer.settimeout(60)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.connect(("127.0.0.1", port))
        peer.sendall(hello(kind))
        read(peer, 65)  # the greeting, and the flags of READY
        read(peer, read(peer, 1)[0])
        yield peer


def read(peer: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = peer.recv(size - len(data))
        if not part:
            raise ConnectionError("kvbus ended the connection")
        data += part
    return data


@contextlib.contextmanager
def engine_of(process: Process) -> Iterator[zmq.Socket[bytes]]:
    """Yield the socket of the engine to which a kvbus process connects."""
    with zmq.Context() as context, context.socket(zmq.XPUB) as engine:
        engine.setsockopt(zmq.LINGER, 0)
        engine.setsockopt(zmq.SNDHWM, 0)
        engine.setsockopt(zmq.RCVTIMEO, 60_000)
        engine.bind(process.engine)
        yield engine


def publish_blocks(engine: zmq.Socket[bytes], process: Process, count: int) -> None:
    """Wait for kvbus's subscription, publish ``count`` blocks, and wait until kvbus has applied them."""
    engine.recv()
    for seq in range(count):
        first = 2**20 + seq
        event = store([seq], tokens=list(range(first, first + BLOCK_SIZE)), block_size=BLOCK_SIZE)
        engine.send_multipart([b"", seq.to_bytes(8, "big"), payload(event)])
    wait_for(lambda: process.sources()[0]["last_seq"] == count - 1, "every batch in kvbus")


def test_clients_that_do_not_read_share_the_memory_of_one_snapshot(tmp_path: Path) -> None:
    process, snapshots = Process(tmp_path, keeps_state=False), free_port()
    configure(process, {}, {"snapshot_endpoint": f"tcp://127.0.0.1:{snapshots}"})
    with engine_of(process) as engine, process, contextlib.ExitStack() as peers:
        publish_blocks(engine, process, BLOCKS)

        def ask() -> socket.socket:
            peer = peers.enter_context(connected(snapshots, b"DEALER"))
            peer.sendall(b"\x00\x08snapshot")
            return peer

        read(ask(), 1)  # the bytes after the handshake belong to the answer
        with_one = resident(process.pid)
        for peer in [ask() for _ in range(PEERS)]:
            read(peer, 1)
        grown = resident(process.pid) - with_one
        require(grown < PEERS * PER_PEER, f"{grown / MB:.0f} MB for {PEERS} peers")


def test_an_endless_message_takes_little_memory(tmp_path: Path) -> None:
    process = Process(tmp_path, keeps_state=False)
    configure(process, {"bind": True}, {})
    with process:
        wait_for(lambda: process.get("/livez"), "kvbus")
        before = resident(process.pid)
        with connected(int(process.engine.rpartition(":")[2]), b"PUB") as peer:
            with contextlib.suppress(ConnectionError):  # kvbus may refuse such a message
                peer.sendall(b"\x01\x00" * (SENT // 2))  # empty frames with the MORE flag
                peer.sendall(b"\x04\x07\x04PING\x00\x00")
                said = b""
                while b"PONG" not in said:  # PONG shows that kvbus has read everything before the PING
                    said += read(peer, 1)
            grown = resident(process.pid) - before
            assert process.get("/livez") == b"ok\n"
            require(grown < 4 * SENT, f"{grown / MB:.0f} MB for {SENT / MB:.0f} MB")


def reads_state(pid: int, state: Path) -> bool:
    """Return whether a process has the database of the saved state open."""
    with contextlib.suppress(FileNotFoundError):  # a descriptor may be closed meanwhile
        files = [each.readlink() for each in Path(f"/proc/{pid}/fd").iterdir()]
        return any(file.parent == state and file.name == "state.db" for file in files)
    return False


def test_sigterm_while_kvbus_loads_a_large_state_exits_with_code_0(tmp_path: Path) -> None:
    process, state = Process(tmp_path, keeps_state=True), tmp_path / "state"
    configure(process, {}, {}, state)
    with engine_of(process) as engine, process:
        publish_blocks(engine, process, STATE_BLOCKS)
    process.log.write_text("")
    process.start()
    try:
        wait_for(lambda: reads_state(process.pid, state), "kvbus reading its state")
    finally:
        code = process.terminate()
    log = process.log.read_text()
    require(code == 0 and str(state) in log, f"exit code {code}; the log, which should name the state: {log!r}")
