"""Simulated routers, each of which reads kvbus's stream in its own way.

``trusting`` applies every batch and ignores seqs. ``checking`` does the same, and fails at every seq and event that
breaks the protocol. Like Dynamo and llm-d, ``asking`` requests a replay from 0 when it starts, and from its next seq at
a gap. ``client`` is kvbus's client library, which uses kvbus's own sequencer.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from math import inf
from typing import Any

import msgspec

from kvbus.client.sequence import Sequence
from kvbus.client.updates import Lost, Restarted
from kvbus.core.sequencing.actions import Ask, Deliver, Stop
from kvbus.core.wire.frames import ASKS_REPLAY, END_SEQ, REBUILDS
from tests.doubles.router import RankedRouter, events_of
from tests.vopr.network import End, Network

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
decode = msgspec.msgpack.decode

Key = tuple[int, str, int]
"""Rank, medium and first token of a block. They identify a block even if engine and router use different hashes."""


class WrongError(AssertionError):
    """An error: a router received a seq or an event that the protocol does not permit."""


def ready(kind: bytes, identity: bytes = b"") -> bytes:
    """Return a ZMTP READY command for a socket type and an identity."""
    body = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    body += b"\x08Identity" + len(identity).to_bytes(4, "big") + identity
    return bytes([4, len(body)]) + body


def message(frames: list[bytes]) -> bytes:
    """Encode a ZMTP message whose frames have at most 255 bytes."""
    last = len(frames) - 1
    return b"".join(bytes([n < last, len(frame)]) + frame for n, frame in enumerate(frames))


def begins_with_clear(payload: bytes) -> bool:
    """Return whether a batch begins with AllBlocksCleared, as the first batch of a state does."""
    events = events_of(payload)
    return bool(events) and events[0]["type"] == "AllBlocksCleared"


class Zmtp:
    """A router's end of a ZMTP connection. It assumes that the other end follows the protocol."""

    def __init__(self, received: Callable[[list[bytes]], None], hello: bytes) -> None:
        self._buffer = bytearray()
        self._frames: list[bytes] = []
        self._greeted = False
        self._received = received
        self.hello = GREETING + hello

    def feed(self, data: bytes) -> None:
        """Add received bytes, and pass complete messages to the router."""
        buffer = self._buffer
        buffer += data
        at, size = 0, len(buffer)
        if not self._greeted:
            if size < 64:
                return
            self._greeted, at = True, 64
        while size - at >= 2:
            flags = buffer[at]
            head = 9 if flags & 2 else 2
            if size - at < head:
                break
            end = at + head + int.from_bytes(buffer[at + 1 : at + head], "big")
            if end > size:
                break
            frame = bytes(buffer[at + head : end])
            at = end
            if flags & 4:
                continue
            self._frames.append(frame)
            if not flags & 1:
                frames, self._frames = self._frames, []
                self._received(frames)
        del buffer[:at]


class View(RankedRouter):
    """A simulated router's blocks, as a plain set for each rank."""

    @property
    def keys(self) -> set[Key]:
        """Rank, medium and first token of each block in the view."""
        return {
            (rank, medium, block.tokens[0])
            for rank, view in self.views.items()
            for (_, medium, _), block in view.blocks.items()
        }


class Router:
    """A router of one stream. Its SUB reconnects whenever its connection breaks.

    Args:
        network: the simulated network.
        name: name of the router in error messages.
        endpoints: endpoint of the live stream, and endpoint of its replay.
        host: address of the router.
    """

    topics: tuple[bytes, ...] = (b"",)
    identity = b""

    def __init__(self, network: Network, name: str, endpoints: tuple[str, str], host: str) -> None:
        self.network, self.schedule = network, network.schedule
        self.name, self.host = name, host
        self.chance: random.Random = self.schedule.chance(f"router {name}")
        self.endpoint, self.replay_endpoint = endpoints
        self.view = View()
        self.sub: End | None = None
        self.request: End | None = None
        self.gone = False
        self.reading = True
        self.newest = -1
        """The highest seq that the router has received live."""
        self._floor = -1
        self._dial()

    # -- the live stream ---------------------------------------------------------------------------------------------

    def _dial(self) -> None:
        if self.gone or self.sub is not None:
            return
        hello = ready(b"SUB") + b"".join(message([b"\x01" + topic]) for topic in self.topics)
        zmtp = Zmtp(self._live, hello)
        self.sub = self.network.connect(self.endpoint, self.host, zmtp.feed, self._disconnected)
        if self.sub is None:
            self.schedule.after(self.chance.uniform(0.1, 0.5), self._dial)
            return
        self.sub.send(zmtp.hello)
        self.sub.read(on=self.reading)
        self._floor = self.network.floors.get(self.endpoint, -1)
        self.connected()

    def _disconnected(self) -> None:
        self.sub = None
        self.interrupted()
        self.schedule.after(self.chance.uniform(0.1, 0.5), self._dial)

    def _live(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != 8:
            raise WrongError(f"{self.name}: a message of {len(frames)} frames")
        seq = int.from_bytes(frames[1], "big")
        self.schedule.note(frames[1] + frames[2])
        if seq <= self.newest:
            raise WrongError(f"{self.name}: seq {seq} after {self.newest}")
        if seq <= self._floor:
            raise WrongError(f"{self.name}: seq {seq}, which an earlier process of the bus has used")
        self.newest = seq
        seen = self.network.seen
        seen[self.endpoint] = max(seq, seen.get(self.endpoint, -1))
        self.live(seq, frames)

    def connected(self) -> None:
        """Called when the router's live connection has been established. Subclasses override it."""

    def interrupted(self) -> None:
        """Called when the router's live connection has broken. Subclasses override it."""

    def live(self, seq: int, frames: list[bytes]) -> None:
        """Apply a batch of the live stream."""
        del seq
        self.view.take(frames[2])

    # -- faults ------------------------------------------------------------------------------------------------------

    def read(self, *, on: bool) -> None:
        """Start or stop reading the live stream."""
        self.reading = on
        if self.sub is not None:
            self.sub.read(on=on)

    def break_connection(self) -> None:
        """Break the live connection. The router reconnects."""
        if self.sub is not None:
            self.sub.close(reset=True)
            self._disconnected()

    def hold(self, *, up: bool) -> None:
        """Stop the delivery of bytes on the link of the live connection. If ``up`` is true, resume it instead."""
        if self.sub is not None:
            self.sub.hold(up=up)

    def break_answer(self) -> None:
        """Break the connection on which the router reads a replay answer, if there is one."""
        if self.request is not None:
            self.request.close(reset=True)

    def read_answers(self, *, on: bool) -> None:
        """Start or stop reading the answer to the current replay request."""
        if self.request is not None:
            self.request.read(on=on)

    def leave(self) -> None:
        """Stop the router and close its connections."""
        self.gone = True
        if self.sub is not None:
            self.sub.close()

    @property
    def blocks(self) -> set[Key]:
        """Rank, medium and first token of each block that the router holds."""
        return self.view.keys


class Checking(Router):
    """A router that applies every batch and never requests a replay.

    It fails if the first batch of a connection, or the first batch after missing seqs, does not begin with a clear, as
    a state does: the router's blocks would then be wrong. It also fails if its :class:`View` finds a violation.
    """

    def __init__(self, *args: Any) -> None:
        self._last: int | None = None
        super().__init__(*args)

    def connected(self) -> None:
        self._last = None

    def live(self, seq: int, frames: list[bytes]) -> None:
        if self._last is None or seq != self._last + 1:
            if not begins_with_clear(frames[2]):
                raise WrongError(f"{self.name}: seq {seq} after {self._last} and no state")
            self.view = View()
        self._last = seq
        super().live(seq, frames)
        if self.view.violations:
            raise WrongError(f"{self.name}: {self.view.violations[0]}")


class Asking(Router):
    """A router that requests a replay from 0 at its start, and from its next seq at a gap.

    Live batches wait for the answer.
    """

    PATIENCE = 3.0
    """Seconds without a message of the answer after which the router requests a replay again."""

    def __init__(self, *args: Any) -> None:
        self._next = 0
        self._held: dict[int, bytes] = {}
        self._number = 0
        self._heard = 0.0
        self._synced = False
        super().__init__(*args)
        self._ask()

    def _begin_anew(self) -> None:
        self.view = View()
        self._next = 0
        self._held.clear()
        self._synced = False
        self._ask()

    def live(self, seq: int, frames: list[bytes]) -> None:
        if seq < self._next:
            return
        self._held[seq] = frames[2]
        if self._synced and self.request is None:
            self._go_on()

    def _go_on(self) -> None:
        self._advance()
        if self._held:
            self._ask()

    def break_answer(self) -> None:
        """Break the answer that the router is reading.

        If the router has read a complete answer before, it continues with the live batches, and requests a replay only
        at a gap. Otherwise it requests the replay again.
        """
        super().break_answer()
        if self.request is not None and self._synced:
            self.request = None
            self._number += 1
            for seq in [seq for seq in self._held if seq < self._next]:
                del self._held[seq]
            self._go_on()

    def _advance(self) -> None:
        while (payload := self._held.pop(self._next, None)) is not None:
            self.view.take(payload)
            self._next += 1

    def _ask(self) -> None:
        if self.request is not None:
            self.request.close()
            self.request = None
        if self.gone:
            return
        self._number += 1
        number = self._number
        self._heard = self.schedule.now
        zmtp = Zmtp(lambda frames: self._answered(number, frames), ready(b"DEALER", self.identity))
        self.request = self.network.connect(self.replay_endpoint, self.host, zmtp.feed, lambda: None)
        if self.request is not None:
            self.request.send(zmtp.hello + message([b"", self._next.to_bytes(8, "big")]))
        self.schedule.after(self.PATIENCE, self._late, number)

    def _late(self, number: int) -> None:
        if number != self._number or self.gone or (self._synced and self.request is None):
            return
        if self.request is not None and self.schedule.now - self._heard < self.PATIENCE:
            self.schedule.after(self.PATIENCE, self._late, number)
        else:
            self._ask()

    def _answered(self, number: int, frames: list[bytes]) -> None:
        if number != self._number or self.gone:
            return
        self._heard = self.schedule.now
        seq_bytes, payload = frames[-2], frames[-1]
        self.schedule.note(seq_bytes + payload)
        if seq_bytes == END_SEQ:
            self._end()
            return
        seq = int.from_bytes(seq_bytes, "big")
        if seq > self._next and self._next and not begins_with_clear(payload):
            raise WrongError(f"{self.name}: an answer from {seq} on; {self._next} was asked")
        if seq < self._next:
            return
        self.view.take(payload)
        self._next = seq + 1

    def _end(self) -> None:
        if self.request is not None:
            self.request.close()
            self.request = None
        for seq in [seq for seq in self._held if seq < self._next]:
            del self._held[seq]
        self._synced = True
        self._advance()
        if self._held:  # the answer had a hole or no batch: continue with the live batches of the subscription
            self._next = min(self._held)
            self._go_on()

    def ask_again(self) -> None:
        """Restart the router, so that it requests a replay from 0."""
        if self.sub is not None:
            self.sub.close()
            self._disconnected()
        self._begin_anew()

    def leave(self) -> None:
        super().leave()
        if self.request is not None:
            self.request.close()


class Client(Router):
    """A simulated router that uses kvbus's client library, with simulated sockets."""

    topics = (b"", ASKS_REPLAY)
    identity = REBUILDS + b"vopr"

    def __init__(self, *args: Any) -> None:
        self.sequence = Sequence()
        self._number = 0
        self._tick_at = inf
        super().__init__(*args)
        self._follow(self.sequence.open(self.schedule.now))

    def connected(self) -> None:
        self._follow(self.sequence.connected(self.schedule.now))

    def interrupted(self) -> None:
        self._follow(self.sequence.interrupted(self.schedule.now))

    def live(self, seq: int, frames: list[bytes]) -> None:
        del seq
        self._follow(self.sequence.live(frames, self.schedule.now))

    def _follow(self, outputs: list[Any]) -> None:
        for output in outputs:
            if isinstance(output, Deliver):
                self.view.take(output.payload)
            elif isinstance(output, Ask):
                self._ask(output.start)
                self.sequence.sent(output.request, self.schedule.now)
            elif isinstance(output, Stop):
                self._stop()
            elif isinstance(output, Lost | Restarted):
                self.view = View()
        deadline = self.sequence.deadline
        if deadline is not None and deadline < self._tick_at:
            self._tick_at = deadline
            self.schedule.at(deadline, self._tick, deadline)

    def _tick(self, planned: float) -> None:
        if planned == self._tick_at and not self.gone:
            self._tick_at = inf
            self._follow(self.sequence.tick(self.schedule.now))

    def _stop(self) -> None:
        self._number += 1
        if self.request is not None:
            self.request.close()
            self.request = None

    def _ask(self, start: int) -> None:
        self._stop()
        number = self._number
        zmtp = Zmtp(lambda frames: self._answered(number, frames), ready(b"DEALER", self.identity))
        self._dial_replay(number, zmtp, start)

    def _dial_replay(self, number: int, zmtp: Zmtp, start: int) -> None:
        if number != self._number or self.gone:
            return
        self.request = self.network.connect(self.replay_endpoint, self.host, zmtp.feed, lambda: None)
        if self.request is None:
            self.schedule.after(0.1, self._dial_replay, number, zmtp, start)
        else:
            self.request.send(zmtp.hello + message([b"", start.to_bytes(8, "big")]))

    def _answered(self, number: int, frames: list[bytes]) -> None:
        if number != self._number or self.gone:
            return
        if frames[-2] == END_SEQ:
            self._stop()
        self._follow(self.sequence.replayed(frames, self.schedule.now))

    def leave(self) -> None:
        super().leave()
        self._stop()


KINDS: dict[str, type[Router]] = {"trusting": Router, "checking": Checking, "asking": Asking, "client": Client}
