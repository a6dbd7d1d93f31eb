"""A bus without sockets, made from a configuration: frames in, the batches of every output stream out.

This module alone knows how kvbus is put together. Everything else in this folder speaks of frames, seqs and events.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from kvbus.config import Config
from kvbus.config.load import load
from kvbus.core.commands import AnswerReplay, AnswerSnapshot, Command, Publish, RequestReplay, SendState
from kvbus.core.events import (
    BatchReceived,
    RelayEvent,
    ReplayAsked,
    ReplayReceived,
    SnapshotAsked,
    SourceDown,
    SourceUp,
    Started,
    Subscribed,
    Tick,
)
from kvbus.core.wire.frames import END_SEQ
from kvbus.daemon.build import make_relay
from kvbus.daemon.placement import Placement, place
from kvbus.http.entries import source_entry
from kvbus.state.reservations import SeqReservations
from kvbus.telemetry.readings import read_source
from tests.doubles.answers import joined, reading

Stream = tuple[int, int]
"""Output and stream, each by its position in the configuration."""


class Published(NamedTuple):
    """One batch of an output stream. ``identity`` numbers the publishers' ids, which are random."""

    stream: Stream
    topic: bytes
    seq: int
    payload: bytes
    identity: int


class GoldenBus:
    """A relay with the outputs and sources of one configuration.

    Args:
        config: as the configuration file has it.

    Attributes:
        asked: replay requests to engines that nobody has answered yet, as source, request and start.
        published: every batch that was published, in order.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config: Config = load(None, env={}, overrides=config)
        placement = place(Placement(), self.config)
        reservations = SeqReservations(None)
        self._relay = make_relay(self.config, placement.streams(self.config), reservations)
        self._identities: dict[bytes, int] = {b"": 0}
        self.now = 1000.0
        self.asked: list[tuple[int, int, int]] = []
        self.published: list[Published] = []
        self._handle(Started(self.now))

    @property
    def streams(self) -> list[Stream]:
        """Every output stream."""
        return [(at, each) for at, output in enumerate(self._relay.outputs) for each in range(len(output.streams))]

    def up(self, source: int) -> None:
        """The engine's connection stands."""
        self._handle(SourceUp(source))

    def down(self, source: int) -> None:
        """The engine's connection is gone."""
        self._handle(SourceDown(source))

    def live(self, source: int, frames: list[bytes]) -> None:
        """The engine publishes one message."""
        self._handle(BatchReceived(source, frames))

    def replayed(self, source: int, request: int, frames: list[list[bytes]]) -> None:
        """The engine answers a replay request with these messages, ``[seq, payload]`` each, and END."""
        for message in frames:
            self._handle(ReplayReceived(source, request, [b"", *message]))
        self._handle(ReplayReceived(source, request, [b"", END_SEQ, b""]))

    def wait(self, seconds: float) -> None:
        """Let time go by, a tick every 0.1 s."""
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            self._handle(Tick(self.now))
            while self._relay.backlog:
                self._handle(Tick(self.now))

    def replay(self, stream: Stream, start: int) -> list[tuple[int, bytes]] | None:
        """What a router gets that asks for a replay, without END; None if END is missing."""
        frames = [b"router", b"", start.to_bytes(8, "big")]
        found = self._answer(ReplayAsked(*stream, frames))
        if not found or found[-1][-2][:8] != END_SEQ:
            return None
        return [(int.from_bytes(message[-2][:8], "big"), message[-1]) for message in found[:-1]]

    def snapshot(self, stream: Stream) -> list[bytes]:
        """The reply to a router that asks for a snapshot: seq frame, publisher id and chunks."""
        return joined(self._answer(SnapshotAsked(*stream, [b"router", b"", b"snapshot"])))[2:]

    def subscribe(self, stream: Stream) -> list[tuple[int, bytes]]:
        """The batches of the state that a router gets when it subscribes."""
        found = []
        for command in self._handle(Subscribed(*stream, (1,))):
            if isinstance(command, SendState):
                found += [batch for batch in command.transfer.batches() if batch is not None]
        return found

    def offers_snapshots(self, stream: Stream) -> bool:
        """Whether the stream's output has a snapshot endpoint."""
        return self.config.outputs[stream[0]].snapshot_endpoint is not None

    def sources(self) -> list[dict[str, Any]]:
        """The entries of ``/sources``, without addresses."""
        entries: list[dict[str, Any]] = msgspec.to_builtins(
            [source_entry(read_source(source), "", None) for source in self._relay.sources]
        )
        for entry in entries:  # batches have the time of day, and this world has its own
            entry["findings"] = [each for each in entry["findings"] if each["id"] != "clock_off"]
        return entries

    def _answer(self, event: RelayEvent) -> list[list[bytes]]:
        return [
            message
            for command in self._handle(event)
            if isinstance(command, AnswerReplay | AnswerSnapshot)
            for message in self._read(command)
        ]

    def _read(self, command: AnswerReplay | AnswerSnapshot) -> Iterator[list[bytes]]:
        reader = reading(self._relay, command, self._keep)
        while (message := reader.next_message()) is not None:
            if message:
                yield message

    def _handle(self, event: RelayEvent) -> list[Command]:
        commands = self._relay.handle(event, self.now)
        self._keep(commands)
        return commands

    def _keep(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Publish):
                number = self._identities.setdefault(command.publisher_id, len(self._identities))
                stream = (command.output, command.stream)
                self.published.append(Published(stream, command.topic, command.seq, command.payload, number))
            elif isinstance(command, RequestReplay):
                self.asked.append((command.source, command.request, command.start))
