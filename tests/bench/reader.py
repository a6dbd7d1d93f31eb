"""A router that comes late, as a process: asks the replay from 0, and says how long the answer took.

Started with a JSON :class:`Spec`; says ``ready``, waits for a line, asks, and says :class:`Answered`. ``dealer`` reads
the answer's messages and decodes them after the clock; ``client`` is kvbus's own library, which builds a view of every
block as it reads.
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
    kind: Literal["dealer", "client"] = "dealer"
    nice: int = 0


class Answered(msgspec.Struct):
    """From the request to the end of the answer, on the monotonic clock; and what was in it."""

    asked: float
    ended: float
    batches: int
    blocks: int
    bytes: int = 0


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
    while True:
        try:
            frames = dealer.recv_multipart()
        except zmq.Again:
            raise TimeoutError("the answer does not end") from None
        if frames[-2] == b"\xff" * 8:
            break
        if int.from_bytes(frames[-2][:8], "big") != len(payloads):
            raise RuntimeError(f"not contiguous at batch {len(payloads)}")
        payloads.append(frames[-1])
    ended = monotonic()
    context.destroy(0)
    return Answered(asked, ended, len(payloads), len(tally(payloads)[2]), sum(map(len, payloads)))


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
    _say(ask(spec.replay_endpoint) if spec.kind == "dealer" else asyncio.run(follow(spec)))


def _say(what: object) -> None:
    sys.stdout.write(msgspec.json.encode(what).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
