"""Routers as a process: one SUB socket for each endpoint, each a connection of its own.

Started with a JSON :class:`Spec`; says ``ready`` when it has connected, ``over`` when the end has come on all of them,
and then, asked to ``count`` without the blocks of so many probes, a :class:`Heard` for each socket. Every seq is
checked to be the one after the last.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Collection
from pathlib import Path
from typing import Final

import msgspec
import zmq

from kvbus.core.wire.frames import ASKS_REPLAY

from .counters import Counters
from .loads import END, NUMBERED, PROBE, is_empty, load_named, monotonic, stamped, tally

TURN: Final = 64
"""Messages of one socket before the others are looked at."""


class Spec(msgspec.Struct):
    """Whom to listen to.

    Attributes:
        endpoints: one socket for each.
        counters: file of counters; two for each socket.
        first: which socket of the counters' is the first of this process.
        times: write (time of arrival, latency) of each batch whose ``ts`` is a time to this file, as doubles.
        verify: keep every payload of this load, and count the blocks after the end.
        patience: seconds without a message before the process gives up.
    """

    endpoints: list[str]
    counters: str
    first: int = 0
    times: str | None = None
    verify: str | None = None
    patience: float = 30.0


class Heard(msgspec.Struct):
    """What one socket has received: batches of the load, seq that were missing, blocks, and when the end came."""

    batches: int = 0
    missing: int = 0
    went_back: int = 0
    bytes: int = 0
    ended: float = 0.0
    stored: int = 0
    removed: int = 0
    live: int = 0
    live_sum: int = 0
    """Sum of the live blocks' hashes in Python, modulo 2**64: equal in all processes, which have one PYTHONHASHSEED."""


class Listener:
    """One socket."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, slot: int, spec: Spec) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        self.socket.setsockopt(zmq.SUBSCRIBE, ASKS_REPLAY)  # every relay sends the same
        self.socket.connect(endpoint)
        self.heard = Heard()
        self.over = False
        self._counters = Counters(Path(spec.counters)).values
        self._seen, self._next = 2 * slot, 2 * slot + 1
        self._seq = -1
        self._kept: list[bytes] | None = None if spec.verify is None else []
        self.times = array("d")

    def drain(self) -> int:
        """Take in what is there, up to a turn's worth; how many messages that was."""
        receive, heard, kept = self.socket.recv, self.heard, self._kept
        taken, number = 0, -1.0
        while taken < TURN and not self.over:
            try:
                receive(zmq.NOBLOCK)
            except zmq.Again:
                break
            frame = receive(zmq.NOBLOCK)
            payload = receive(zmq.NOBLOCK)
            taken += 1
            seq = int.from_bytes(frame[:8], "big")
            if seq != self._seq + 1 and self._seq >= 0:
                heard.missing += max(seq - self._seq - 1, 0)
                heard.went_back += seq <= self._seq
            self._seq = seq
            if is_empty(payload):
                continue
            ts = stamped(payload)
            if ts < 0:
                self._special(ts)
                continue
            heard.batches += 1
            heard.bytes += len(payload)
            if ts >= NUMBERED:
                number = ts
            else:
                now = monotonic()
                self.times.append(now)
                self.times.append(now - ts)
            if kept is not None:
                kept.append(payload)
        if number >= 0:
            self._counters[self._next] = int(number - NUMBERED) + 1
        return taken

    def _special(self, ts: float) -> None:
        if ts == PROBE:
            self._counters[self._seen] = 1
        elif ts == END:
            self.heard.ended = monotonic()
            self.over = True

    def count(self, probes: Collection[object]) -> Heard:
        """What was heard; blocks are counted by decoding everything once more, off the clock.

        Where the state is told anew, probes' blocks come with it; how many there are differs from run to run.
        """
        heard, kept = self.heard, self._kept
        if kept is not None:
            heard.stored, heard.removed, live = tally(kept)
            live = {block for block in live if block[2] not in probes}
            heard.live, heard.live_sum = len(live), sum(hash(repr(block)) for block in live) & (2**64 - 1)
        return heard


def listen(listeners: list[Listener], patience: float) -> None:
    """Read until the end has come on every socket.

    Raises:
        TimeoutError: nothing came for so long.
    """
    poller = zmq.Poller()
    by_socket = {}
    for listener in listeners:
        poller.register(listener.socket, zmq.POLLIN)
        by_socket[listener.socket] = listener
    while by_socket:
        ready = poller.poll(int(patience * 1000))
        if not ready:
            raise TimeoutError(f"nothing came for {patience:g} s")
        for socket, _ in ready:
            listener = by_socket[socket]
            while listener.drain() == TURN and len(by_socket) == 1:
                pass
            if listener.over:
                poller.unregister(socket)
                del by_socket[socket]


def main() -> None:
    """Be all routers of a spec."""
    spec = msgspec.json.decode(sys.argv[1], type=Spec)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, max(1023, len(spec.endpoints)))
    listeners = [Listener(context, endpoint, spec.first + i, spec) for i, endpoint in enumerate(spec.endpoints)]
    _say("ready")
    listen(listeners, spec.patience)
    _say("over")
    numbers = range(1, int(sys.stdin.readline().removeprefix("count")) + 1)
    if spec.times is not None:
        with Path(spec.times).open("wb") as file:
            for listener in listeners:
                listener.times.tofile(file)
    probes: set[object] = set()
    if spec.verify is not None:
        load, ranks = load_named(spec.verify), range(len(set(spec.endpoints)))
        probes = {block[2] for rank in ranks for block in tally([load.probe(number, rank) for number in numbers])[2]}
    _say([listener.count(probes) for listener in listeners])


def _say(what: object) -> None:
    sys.stdout.write(msgspec.json.encode(what).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
