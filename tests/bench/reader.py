"""A router that comes late, as a process: asks the replay from 0, and says how long the answer took.

Started with a JSON :class:`Spec`; says ``ready``, waits for a line, asks, and says :class:`Answered`. ``dealer`` reads
the answer's messages and decodes them after the clock; ``client`` is kvbus's own library, which builds a view of every
block as it reads; ``subscriber`` asks nothing, and counts what its subscription brings.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any, Literal

import msgspec
import zmq

from kvbus.client import BlockView, Subscriber, Synced

from .loads import monotonic, tally

PATIENCE_MS = 60_000


class Spec(msgspec.Struct):
    """Whom to ask, how, and how politely (nice value)."""

    endpoint: str
    replay_endpoint: str
    kind: Literal["dealer", "client", "subscriber"] = "dealer"
    nice: int = 0
    blocks: int = 0
    """A subscriber is done when it has so many."""


class Answered(msgspec.Struct):
    """From the request to the end of the answer, on the monotonic clock; and what was in it."""

    asked: float
    ended: float
    batches: int
    blocks: int
    bytes: int = 0
    first: int = 0
    """The first seq that came."""


def ask(replay_endpoint: str) -> Answered:
    """The standard replay, from 0.

    Raises:
        RuntimeError: the answer is not contiguous.
        TimeoutError: it does not end.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.RCVHWM, 0)
    dealer.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
    dealer.connect(replay_endpoint)
    asked = monotonic()
    dealer.send_multipart([b"", bytes(8)])
    payloads: list[Any] = []
    first = 0
    while True:
        try:
            frames = dealer.recv_multipart()
        except zmq.Again:
            raise TimeoutError("the answer does not end") from None
        if frames[-2] == b"\xff" * 8:
            break
        seq = int.from_bytes(frames[-2][:8], "big")
        first = first if payloads else seq
        if seq != first + len(payloads):
            raise RuntimeError(f"not contiguous at batch {len(payloads)}")
        payloads.append(frames[-1])
    ended = monotonic()
    context.destroy(0)
    return Answered(asked, ended, len(payloads), len(tally(payloads)[2]), sum(map(len, payloads)), first)


def subscribe(spec: Spec) -> Answered:
    """The state that a subscription brings.

    Raises:
        TimeoutError: it does not come.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sub = context.socket(zmq.SUB)
    sub.setsockopt(zmq.RCVHWM, 0)
    sub.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
    sub.setsockopt(zmq.SUBSCRIBE, b"")
    asked = monotonic()
    sub.connect(spec.endpoint)
    messages: list[list[bytes]] = []
    stored = 0
    while stored < spec.blocks:
        try:
            messages.append(sub.recv_multipart())
        except zmq.Again:
            raise TimeoutError(f"{stored} of {spec.blocks} blocks came") from None
        stored += tally(messages[-1][2:])[0]
    ended = monotonic()
    context.destroy(0)
    payloads = [message[2] for message in messages]
    first = int.from_bytes(messages[0][1][:8], "big")
    return Answered(asked, ended, len(payloads), len(tally(payloads)[2]), sum(map(len, payloads)), first)


async def follow(spec: Spec) -> Answered:
    """The same by the library, until it is in sync with the live stream."""
    view = BlockView()
    asked = monotonic()
    batches = 0
    async with Subscriber(spec.endpoint, spec.replay_endpoint) as subscriber:
        async for update in subscriber:
            view.update(update)
            batches += 1
            if isinstance(update, Synced):
                break
        ended = monotonic()
    return Answered(asked, ended, batches, len(view))


def main() -> None:
    """Ask once."""
    spec = msgspec.json.decode(sys.argv[1], type=Spec)
    os.nice(spec.nice)
    _say("ready")
    sys.stdin.readline()
    if spec.kind == "dealer":
        answered = ask(spec.replay_endpoint)
    elif spec.kind == "subscriber":
        answered = subscribe(spec)
    else:
        answered = asyncio.run(follow(spec))
    _say(answered)


def _say(what: object) -> None:
    sys.stdout.write(msgspec.json.encode(what).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
