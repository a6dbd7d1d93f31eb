"""Peers that misbehave towards kvbus: ``python -m tests.chaos.peers ENDPOINT COUNT START`` sends many requests."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Final

import zmq

from tests.doubles.child import ROOT, python

END: Final = b"\xff" * 8


async def leave(endpoint: str, start: int, after: int, patience: float = 5.0) -> int:
    """Ask for a replay, read up to ``after`` messages of the answer, disconnect, and return the number of messages."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.RCVHWM, 1)
    taken = 0
    try:
        dealer.connect(endpoint)
        dealer.send_multipart([b"", start.to_bytes(8, "big")])
        end = asyncio.get_running_loop().time() + patience
        while taken < after and asyncio.get_running_loop().time() < end:
            if not dealer.poll(0):
                await asyncio.sleep(0.005)
                continue
            taken += 1
            if dealer.recv_multipart()[-2] == END:
                break
        return taken
    finally:
        dealer.close(0)


class Mute:
    """A router that subscribes and never reads."""

    def __init__(self, endpoint: str) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket = context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 1)
        self._socket.setsockopt(zmq.RCVBUF, 4096)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)

    @property
    def reached(self) -> bool:
        """Return whether something has arrived that will not be read."""
        return bool(self._socket.poll(0))

    def close(self) -> None:
        self._socket.close(0)


async def garbage(host: str, port: int, noise: bytes) -> bool:
    """Send bytes that are not ZMTP. Return whether a connection was accepted."""
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), 3)
    except (OSError, TimeoutError):
        return False
    try:
        writer.write(noise)
        await asyncio.wait_for(reader.read(64), 0.2)
    except (OSError, TimeoutError, RuntimeError):
        pass  # the peer has closed the connection, which is a correct reaction
    finally:
        writer.transport.abort()
    return True


async def crowd(endpoint: str, count: int, start: int) -> str | None:
    """Send ``count`` requests at once from another process. Return the errors, or None if all answers were complete."""
    process = await asyncio.create_subprocess_exec(
        *python("tests.chaos.peers", endpoint, str(count), str(start)),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), 60)
    except BaseException:
        process.kill()
        await process.wait()
        raise
    wrong = json.loads(output)
    return None if not wrong else "; ".join(wrong[:3])


def _ask_all(endpoint: str, count: int, start: int) -> list[str]:
    """Send ``count`` requests at once, read every answer to its END, and return the errors."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4096)
    poller = zmq.Poller()
    due: dict[zmq.Socket[bytes], int] = {}
    for _ in range(count):
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.RCVHWM, 0)
        dealer.connect(endpoint)
        dealer.send_multipart([b"", start.to_bytes(8, "big")])
        poller.register(dealer, zmq.POLLIN)
        due[dealer] = start
    wrong: list[str] = []
    end = time.monotonic() + 40
    while due and time.monotonic() < end:
        for ready, _ in poller.poll(200):
            while ready in due and ready.poll(0):
                frames = ready.recv_multipart()
                if frames[-2] == END:
                    del due[ready]
                    poller.unregister(ready)
                    ready.close(0)
                elif (seq := int.from_bytes(frames[-2][:8], "big")) != due[ready]:
                    wrong.append(f"seq {seq} where {due[ready]} was due")
                    due[ready] = seq + 1
                else:
                    due[ready] += 1
    if due:
        wrong.append(f"{len(due)} of {count} requesters were not answered to the END")
    context.destroy(0)
    return wrong


if __name__ == "__main__":
    print(json.dumps(_ask_all(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))  # noqa: T201 - this is its answer
