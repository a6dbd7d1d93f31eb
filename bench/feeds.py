"""The two sources of a simulated router's events: the engines themselves, or kvbus's core without sockets."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from kvbus.client import BlockView
from kvbus.core.checkpoint import Loader, dump
from kvbus.core.commands import AnswerReplay, Publish, RequestReplay, SendState
from kvbus.core.events import (
    BatchReceived,
    ReplayAsked,
    ReplayReceived,
    SourceDown,
    SourceUp,
    Started,
    Subscribed,
    Tick,
)
from kvbus.core.outputs.spec import OutputSpec
from kvbus.core.relay import Relay
from kvbus.core.source_spec import SourceSpec
from kvbus.core.types import Reason
from kvbus.core.wire.codec import decode_batch
from kvbus.core.wire.frames import END_SEQ, replay_request
from kvbus.core.wire.profiles import PROFILES

from .fleet import Feed, View, Worker

JUMP: Final = 4096
"""Number of seqs that kvbus skips when it restarts after a kill without its state."""


class Reader:
    """A simulated router's view of a worker, and the next seq that the router expects."""

    def __init__(self, *, copies: bool) -> None:
        self.view = BlockView(copies=copies)
        self.next: int | None = None
        self.waiting: list[tuple[int, bytes]] | None = None
        """Live batches that wait for the end of a state or an answer; None if neither is being read."""

    def take(self, seq: int, payload: bytes) -> None:
        """Apply a batch to the view."""
        batch = decode_batch(payload)
        assert not isinstance(batch, Reason), f"seq {seq}: {batch}"
        self.view.apply_batch(batch)
        self.next = seq + 1


class Direct(Feed):
    """A simulated router that subscribes to the engines.

    Unlike some real routers, it counts copies and clears its view at an engine's restart.
    """

    aware = True

    def __init__(self, *, asks: bool) -> None:
        self._asks = asks

    def connect(self, workers: Sequence[Worker]) -> None:
        super().connect(workers)
        self._readers = [Reader(copies=True) for _ in workers]

    def views(self) -> Sequence[View]:
        return [reader.view for reader in self._readers]

    def batch(self, worker: Worker, seq: int, payload: bytes, now: float) -> None:
        reader = self._readers[worker.number]
        if reader.next is not None and seq < reader.next:
            reader.view.clear()
        reader.take(seq, payload)

    def router_restarts(self, now: float) -> None:
        self._readers = [Reader(copies=True) for _ in self.workers]
        if self._asks:
            for worker, reader in zip(self.workers, self._readers, strict=True):
                for seq, payload in worker.replay(0, now):
                    reader.take(seq, payload)


class Bus(Feed):
    """A router that subscribes to kvbus. Each worker is a source of one relay and has its own stream.

    Args:
        profile: the output's profile.
        asks: True if the router asks for a replay from 0 at its start and at a gap, False if it gets the state on
            subscription.
    """

    aware = True

    def __init__(self, profile: str, *, asks: bool) -> None:
        self._profile, self._asks = PROFILES[profile], asks
        self._events: deque[Any] = deque()
        self._away = self._forgot = False

    def connect(self, workers: Sequence[Worker]) -> None:
        super().connect(workers)
        self._readers = [Reader(copies=False) for _ in workers]
        self._relay = self._make([0] * len(workers))
        self._feed(Started(0.0), 0.0)
        self._all_up(0.0)

    def views(self) -> Sequence[View]:
        return [reader.view for reader in self._readers]

    def batch(self, worker: Worker, seq: int, payload: bytes, now: float) -> None:
        if not self._away:
            self._feed(BatchReceived(worker.number, [b"", seq.to_bytes(8, "big"), payload]), now)

    def tick(self, now: float) -> None:
        if not self._away:
            self._feed(Tick(now), now)
            while self._relay.backlog:
                self._feed(Tick(now), now)

    def crashed(self, worker: Worker, now: float) -> None:
        self._feed(SourceDown(worker.number), now)
        self._feed(SourceUp(worker.number), now)

    def router_restarts(self, now: float) -> None:
        self._readers = [Reader(copies=False) for _ in self.workers]
        self._subscribe(now)

    @property
    def promises(self) -> bool:
        return not self._away

    def kvbus_killed(self) -> None:
        self._away = True
        for reader in self._readers:
            reader.waiting = []

    def kvbus_back(self, now: float, *, state: bool) -> None:
        old = self._relay
        reached = [stream.next_seq for stream in old.outputs[0].streams]
        if state:
            self._relay = self._make([0] * len(self.workers))
            loader = Loader(self._relay)
            for blob in dump(old):
                loader.feed(blob)
            self._relay.recovery_finished(now)
        else:
            self._relay = self._make([seq + JUMP for seq in reached])
            self._feed(Started(now), now)
        self._away, self._forgot = False, not state
        self._all_up(now)

    def check(self) -> None:
        for worker, reader in zip(self.workers, self._readers, strict=True):
            dead = {block.hash for block in reader.view} - set(worker.live)
            missing = 0 if self._forgot else len(worker.live) - len(reader.view)
            assert not dead, f"{len(dead)} blocks of worker {worker.number} are not there"
            assert not missing, f"{missing} blocks of worker {worker.number} are not known"

    def _make(self, first_seqs: list[int]) -> Relay:
        sources = [SourceSpec(f"worker/{worker.number}", 0) for worker in self.workers]
        output = OutputSpec("routers", self._profile, [None] * len(sources), first_seqs=first_seqs)
        return Relay(sources, [output])

    def _all_up(self, now: float) -> None:
        for worker in self.workers:
            self._feed(SourceUp(worker.number), now)
        self._subscribe(now)

    def _subscribe(self, now: float) -> None:
        for number, reader in enumerate(self._readers):
            if self._asks:
                self._ask(number, 0 if reader.next is None else reader.next, now)
            else:
                reader.waiting = []
                self._feed(Subscribed(0, number, (number,)), now)

    def _ask(self, number: int, start: int, now: float) -> None:
        reader = self._readers[number]
        reader.waiting = []
        (command,) = self._relay.handle(ReplayAsked(0, number, [b"router", *replay_request(start)]), now)
        assert isinstance(command, AnswerReplay)

        for message in command.answer.messages():
            self._carry_out(self._relay.take_commands(), now)
            if message and message[-2] != END_SEQ:
                reader.take(int.from_bytes(message[-2], "big"), message[-1])
        self._go_on(number, now)

    def _feed(self, event: Any, now: float) -> None:
        """Feed an event to the relay and carry out its commands. Engines answer immediately."""
        self._events.append(event)
        while self._events:
            self._carry_out(self._relay.handle(self._events.popleft(), now), now)

    def _carry_out(self, commands: Sequence[Any], now: float) -> None:
        for command in commands:
            if isinstance(command, Publish):
                self._receive(command.stream, command.seq, command.payload, now)
            elif isinstance(command, RequestReplay):
                answers = self.workers[command.source].replay(command.start, now)
                ended = [b"", b"", END_SEQ, b""]
                messages = [[b"", b"", seq.to_bytes(8, "big"), payload] for seq, payload in answers]
                for message in [*messages, ended]:
                    self._events.append(ReplayReceived(command.source, command.request, message))
            elif isinstance(command, SendState):
                self._state(command, now)

    def _receive(self, number: int, seq: int, payload: bytes, now: float) -> None:
        reader = self._readers[number]
        if reader.waiting is not None:
            reader.waiting.append((seq, payload))
        elif reader.next is None or seq == reader.next:
            reader.take(seq, payload)
        elif self._asks and seq > reader.next:
            self._ask(number, reader.next, now)
        else:
            assert seq < reader.next, f"stream {number}: {seq} follows {reader.next - 1}"

    def _state(self, command: SendState, now: float) -> None:
        reader = self._readers[command.stream]
        for batch in command.transfer.batches():
            if batch is not None:
                reader.take(*batch)
        self._go_on(command.stream, now)

    def _go_on(self, number: int, now: float) -> None:
        """End a state or a replay answer: apply the waiting live batches that were not part of it."""
        waited, self._readers[number].waiting = self._readers[number].waiting or [], None
        for seq, payload in waited:
            self._receive(number, seq, payload, now)
