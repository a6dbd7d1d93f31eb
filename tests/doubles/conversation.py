"""Recorded conversations of routers: what a router was sent, what it requested, and which blocks it then had.

A file has one JSON object in a line. The first line of a conversation names it. Each further line is one of:

* ``{"sent": FRAMES}``: a message of the live stream.
* ``{"asked": FRAMES, "answer": [FRAMES, …]}``: a replay request of the router, and the messages that it was sent for it.
* ``{"cut": true}``: the live connection breaks. The router connects again.
* ``{"pause": SECONDS}``: nothing is sent.
* ``{"held": [HASH, …]}``: the blocks that the router then has.
* ``{"ping": true}``: a ZMTP PING. In such a conversation, "held" also has ``odd``, the number of messages that were no
  batch for the router, and ``commands``, the names of the ZMTP commands that the router has sent.

Frames are in hex. ``tests.interop.conversations`` records real programs, and ``test_conversations`` plays the files to
the doubles.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final, Self

import zmq

from tests.doubles.bus import eventually
from tests.ports import free_ports
from tests.transport.bare import BarePeer

DATA: Final = Path(__file__).with_name("data")
PATIENCE: Final = 30.0
Line = dict[str, Any]


def conversations(name: str) -> Iterator[tuple[str, list[Line]]]:
    """Yield the name and the lines of each conversation of a recorded program."""
    found: list[Line] = []
    title = ""
    for line in map(json.loads, (DATA / f"{name}.jsonl").read_text().splitlines()):
        if "conversation" in line:
            if found:
                yield title, found
            title, found = line["conversation"], []
        else:
            found.append(line)
    yield title, found


def hexed(frames: list[bytes]) -> list[str]:
    return [frame.hex() for frame in frames]


def raw(frames: list[str]) -> list[bytes]:
    return [bytes.fromhex(frame) for frame in frames]


class Speaker:
    """The publisher of a conversation: a live stream and its replay endpoint, by default on free ports."""

    def __init__(self, host: str = "127.0.0.1", *ports: int) -> None:
        self.live, self.replay = (f"tcp://{host}:{port}" for port in ports or free_ports(2))
        self.requests: deque[list[bytes]] = deque()
        """Requests of the router that have arrived and were not answered: identity, and the frames after it."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pub: zmq.Socket[bytes] | None = None
        self._router = self._context.socket(zmq.ROUTER)

    def __enter__(self) -> Self:
        self._router.bind(self.replay)
        self._bind()
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def _bind(self) -> None:
        self._pub = self._context.socket(zmq.XPUB)
        try:
            self._pub.bind(self.live)
        except zmq.ZMQError:
            self._pub.close(0)
            raise

    async def subscribed(self) -> None:
        """Wait until the router has subscribed."""
        pub = self._pub
        assert pub is not None
        await eventually(lambda: pub.poll(0), "a subscription", PATIENCE)
        pub.recv()

    def send(self, frames: list[bytes]) -> None:
        assert self._pub is not None
        self._pub.send_multipart(frames)

    async def cut(self) -> None:
        """Break the live connection, and wait until the router has subscribed again."""
        assert self._pub is not None
        self._pub.close(0)
        while True:
            try:
                self._bind()
                break
            except zmq.ZMQError:
                await asyncio.sleep(0.01)
        await self.subscribed()

    def listen(self) -> bool:
        """Receive the requests that have arrived. Return whether one waits for an answer."""
        while self._router.poll(0):
            self.requests.append(self._router.recv_multipart())
        return bool(self.requests)

    def answer(self, messages: list[list[bytes]]) -> None:
        """Answer the oldest request."""
        identity = self.requests.popleft()[0]
        for message in messages:
            self._router.send_multipart([identity, *message])


def play_to_peer(lines: list[Line], peer: BarePeer) -> Line:
    """Send the batches and PINGs of a conversation on a bare ZMTP connection, and return its last line."""
    for line in lines:
        if "sent" in line:
            peer.send(*raw(line["sent"]))
        elif "ping" in line:
            peer.command(b"PING", bytes(2))
    return lines[-1]


async def play(
    lines: list[Line],
    speaker: Speaker,
    held: Callable[[], set[int]],
    pause: Callable[[float], Awaitable[object]],
) -> None:
    """Play a recorded conversation to a router that reads from ``speaker``.

    Args:
        lines: the recording.
        speaker: the publisher, to which the router has not connected yet.
        held: returns the hashes of the router's blocks.
        pause: called where the recorded program was sent nothing for some seconds.

    Raises:
        AssertionError: the router has requested something else than the recorded program, or has other blocks.
    """

    for at, line in enumerate(lines):
        if "sent" in line:
            speaker.send(raw(line["sent"]))
        elif "asked" in line:
            await eventually(speaker.listen, f"line {at}: the request {line['asked']}", PATIENCE)
            assert hexed(speaker.requests[0][1:]) == line["asked"], f"line {at}"
            speaker.answer([raw(message) for message in line["answer"]])
        elif "cut" in line:
            await speaker.cut()
        elif "pause" in line:
            await pause(line["pause"])
        else:
            wanted = set(line["held"])
            await eventually(lambda wanted=wanted: held() == wanted, f"line {at}: {wanted}", PATIENCE)
            assert not speaker.listen(), f"line {at}: a request that the program did not send: {speaker.requests[0]}"
