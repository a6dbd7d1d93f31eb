"""kvbus's real core in the model of the exhaustive search.

The model passes events to it, executes its commands, keeps its write-ahead log, and restarts it after a kill. Only this
module depends on the form of commands and records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from kvbus.core import write_ahead_log as wal
from kvbus.core.checkpoint import Loader, dump
from kvbus.core.commands import Answer, AnswerReplay, CancelReplay, Command, Publish, RequestReplay, SendState
from kvbus.core.events import (
    BatchReceived,
    RelayEvent,
    ReplayAsked,
    ReplayReceived,
    SourceDown,
    SourceUp,
    Subscribed,
    Tick,
    Unread,
)
from kvbus.core.outputs.spec import OutputSpec
from kvbus.core.relay import Relay
from kvbus.core.source import Source
from kvbus.core.source_spec import SourceSpec
from kvbus.core.wire.frames import END_SEQ
from kvbus.core.wire.profiles import PROFILES
from tests.properties.world import everything

JOURNAL = 3
TIMEOUT = 3.0
"""Seconds for which an engine may be unreachable before kvbus clears its blocks."""

Batch = tuple[int, bytes]
"""A batch that kvbus sends to a router: its seq and its payload."""


class Hooks(msgspec.Struct):
    """The model's functions that `Bus` calls for the relay's commands and records."""

    published: Callable[[int, bytes], None]
    ask: Callable[[int, int], None]
    """Called with the id and the first seq of a replay request."""
    cancel: Callable[[int], None]
    delivered: Callable[[int, bytes], None]
    """Called with the engine's seq and the payload of each batch that the relay has delivered."""
    epoch: Callable[[], None]
    """Called when the relay begins a new epoch."""


def make_relay() -> Relay:
    """Return a relay with one source, which has a replay, and one output."""
    spec = SourceSpec("engine", 0, source_timeout=TIMEOUT, copied_below=0)
    return Relay([spec], [OutputSpec("out", PROFILES["vllm"], [None], journal_batches=JOURNAL)])


class Reading(msgspec.Struct):
    """A replay answer that a router is reading, and how far it has read."""

    answer: Answer
    messages: Iterator[list[bytes]]


class Bus:
    """A kvbus of the model with its disk. It may be killed and restarted any number of times."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self.relay = make_relay()
        self.relay.keep_records(keep=True)
        self.saved = list(dump(self.relay))
        self.log: list[wal.Frame] = []

    @property
    def source(self) -> Source:
        return self.relay.sources[0]

    @property
    def index(self) -> set[int]:
        """Hashes of the blocks that routers should have; none while the source has expired."""
        tables = {} if self.source.expired else self.source.normalizer.index.tables
        return {block for table in tables.values() for block in table.blocks if isinstance(block, int)}

    @property
    def next_seq(self) -> int:
        return self.relay.outputs[0].streams[0].next_seq

    @property
    def journal(self) -> int:
        """Number of batches in the journal of the output."""
        return len(self.relay.outputs[0].streams[0].journal)

    def connected(self, now: float, *, up: bool) -> None:
        self._feed(SourceUp(0) if up else SourceDown(0), now)

    def live(self, seq: int, payload: bytes, now: float) -> None:
        self._feed(BatchReceived(0, [b"", seq.to_bytes(8, "big"), payload]), now)

    def replayed(self, request: int, seq: int, payload: bytes, now: float) -> None:
        self._feed(ReplayReceived(0, request, [b"", b"", seq.to_bytes(8, "big"), payload]), now)

    def replay_ended(self, request: int, now: float) -> None:
        self._feed(ReplayReceived(0, request, [b"", b"", END_SEQ, b""]), now)

    def unread(self, now: float) -> None:
        self._feed(Unread(0), now)

    def tick(self, now: float) -> None:
        self._feed(Tick(), now)

    def subscribed(self, now: float) -> list[Batch]:
        """Handle a router's subscription, and return the batches of the state that the router gets."""
        (command,) = self._feed(Subscribed(0, 0, (1,)), now)
        assert isinstance(command, SendState)
        return [batch for batch in command.transfer.batches() if batch is not None]

    def asked(self, start: int, now: float) -> Reading:
        """Handle a router's replay request, and return the answer as :meth:`answer` reads it."""
        (command,) = self._feed(ReplayAsked(0, 0, [b"router", b"", start.to_bytes(8, "big")]), now)
        assert isinstance(command, AnswerReplay)
        return Reading(command.answer, command.answer.messages())

    def answer(self, reading: Reading) -> Batch | None:
        """Return the next batch of a replay answer, or None at its END."""
        message = next(filter(None, reading.messages))
        assert not self._carry_out(self.relay.take_commands())
        if message[-2] == END_SEQ:
            assert reading.answer.finished, "an answer goes on after END"
            assert next(reading.messages, None) is None, "an answer goes on after END"
            return None
        return int.from_bytes(message[-2], "big"), message[-1]

    def killed(self, now: float, *, checkpoint: bool) -> None:
        """Kill the process and start a new one from the disk.

        With ``checkpoint``, write a checkpoint before the kill.
        """
        if checkpoint:
            self.saved, self.log = list(dump(self.relay)), []
        before = self.relay
        relay = make_relay()
        loader = Loader(relay)
        for blob in self.saved:
            loader.feed(blob)
        for body, payloads in self.log:
            records = wal.decode_records(body, b"".join(payloads))
            assert records is not None, "a record is not what it was"
            for record in records:
                relay.apply_record(record, now)
        relay.recovery_finished(now)
        relay.keep_records(keep=True)
        self.relay = relay
        kept = {(0, 0): relay.outputs[0].streams[0].journal.first_seq}
        assert everything(relay, kept) == everything(before, kept), "the log does not give what was there"

    def _feed(self, event: RelayEvent, now: float) -> list[Command]:
        return self._carry_out(self.relay.handle(event, now))

    def _carry_out(self, commands: list[Command]) -> list[Command]:
        self._write()
        left: list[Command] = []
        for command in commands:
            if isinstance(command, Publish):
                self._hooks.published(command.seq, command.payload)
            elif isinstance(command, RequestReplay):
                self._hooks.ask(command.request, command.start)
            elif isinstance(command, CancelReplay):
                self._hooks.cancel(command.request)
            else:
                left.append(command)
        return left

    def _write(self) -> None:
        """Write the relay's records. They must be on disk before a batch that depends on them is sent."""
        records = self.relay.records
        assert records is not None
        for record in records.heads:
            if isinstance(record, wal.Delivered):
                self._hooks.delivered(record.seq, record.payload)
            elif isinstance(record, wal.EpochBegun):
                self._hooks.epoch()
        if records.heads:
            self.log.append(records.take())
