"""A kvbus without sockets for the golden cases, built from a configuration.

It gets engines' frames and returns the batches of all streams. Only this module knows how kvbus's parts are connected.
The other modules of this package use frames, seqs and events.
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
from kvbus.core.findings.source import source_findings
from kvbus.core.wire.frames import END_SEQ
from kvbus.daemon.build import make_relay
from kvbus.daemon.placement import Placement, assign_slots
from kvbus.http.entries import source_entry
from kvbus.state.reservations import SeqReservations
from kvbus.telemetry.readings import read_source
from tests.doubles.answers import joined, reading

Stream = tuple[int, int]
"""Identifies an output stream: index of the output, and index of the stream in the output, in the configuration's
order.
"""


class Published(NamedTuple):
    """A batch that kvbus has published. ``identity`` is a small number instead of the random id of the publisher."""

    stream: Stream
    topic: bytes
    seq: int
    payload: bytes
    identity: int


class GoldenBus:
    """A relay with the outputs and sources of a configuration.

    Args:
        config: the content of the configuration file.

    Attributes:
        asked: replay requests to engines without an answer yet, each with its source, request number and first seq.
        published: every published batch, in order.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config: Config = load(None, env={}, overrides=config)
        placement = assign_slots(Placement(), self.config)
        reservations = SeqReservations(None)
        self._relay = make_relay(self.config, placement.streams(self.config), reservations)
        self._identities: dict[bytes, int] = {b"": 0}
        self.now = 1000.0
        self.asked: list[tuple[int, int, int]] = []
        self.published: list[Published] = []
        self._handle(Started(self.now))

    @property
    def streams(self) -> list[Stream]:
        """Return every output stream of the relay, by the indexes of its output and of the stream."""
        return [(at, each) for at, output in enumerate(self._relay.outputs) for each in range(len(output.streams))]

    def up(self, source: int) -> None:
        """Tell the relay that an engine's connection is open."""
        self._handle(SourceUp(source))

    def down(self, source: int) -> None:
        """Tell the relay that an engine's connection is closed."""
        self._handle(SourceDown(source))

    def live(self, source: int, frames: list[bytes]) -> None:
        """Give the relay a live message of an engine."""
        self._handle(BatchReceived(source, frames))

    def replayed(self, source: int, request: int, frames: list[list[bytes]]) -> None:
        """Give the relay an engine's answer to a replay request: these messages, ``[seq, payload]`` each, and then
        END.
        """
        for message in frames:
            self._handle(ReplayReceived(source, request, [b"", *message]))
        self._handle(ReplayReceived(source, request, [b"", END_SEQ, b""]))

    def wait(self, seconds: float) -> None:
        """Advance the simulated clock, with a tick every 0.1 s."""
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            self._handle(Tick(self.now))
            while self._relay.backlog:
                self._handle(Tick(self.now))

    def replay(self, stream: Stream, start: int) -> list[tuple[int, bytes]] | None:
        """Return the batches of kvbus's replay answer from the seq ``start``, or None if the answer has no END."""
        frames = [b"router", b"", start.to_bytes(8, "big")]
        found = self._answer(ReplayAsked(*stream, frames))
        if not found or found[-1][-2][:8] != END_SEQ:
            return None
        return [(int.from_bytes(message[-2][:8], "big"), message[-1]) for message in found[:-1]]

    def snapshot(self, stream: Stream) -> list[bytes]:
        """Return the reply to a snapshot request: seq frame, publisher id and chunks."""
        return joined(self._answer(SnapshotAsked(*stream, [b"router", b"", b"snapshot"])))[2:]

    def subscribe(self, stream: Stream) -> list[tuple[int, bytes]]:
        """Return the batches of the state that a router gets on subscription."""
        found = []
        for command in self._handle(Subscribed(*stream, (1,))):
            if isinstance(command, SendState):
                found += [batch for batch in command.transfer.batches() if batch is not None]
        return found

    def offers_snapshots(self, stream: Stream) -> bool:
        """Return whether the stream's output has a snapshot endpoint."""
        return self.config.outputs[stream[0]].snapshot_endpoint is not None

    def sources(self) -> list[dict[str, Any]]:
        """Return what kvbus's ``/sources`` shows of each source, without addresses, and the findings about it."""
        # The finding clock_off compares the wall clock with the batches' ts, which do not fit the simulated time.
        return [
            msgspec.to_builtins(source_entry(read_source(source), "", None))
            | {"findings": msgspec.to_builtins([each for each in source_findings(source) if each.id != "clock_off"])}
            for source in self._relay.sources
        ]

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
