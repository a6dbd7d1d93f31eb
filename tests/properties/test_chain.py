"""Tests for several kvbus in a chain, each of which is a relay without sockets that reads the previous one.

The last relay must end with the engine's blocks, even if batches were lost and requests got no answer.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvbus.core.commands import AnswerReplay, CancelReplay, Command, Publish, RequestReplay
from kvbus.core.events import BatchReceived, ReplayAsked, ReplayReceived, SourceDown, SourceUp, Started, Tick
from kvbus.core.outputs.spec import OutputSpec
from kvbus.core.relay import Relay
from kvbus.core.source_spec import SourceSpec
from kvbus.core.wire.frames import END_SEQ
from kvbus.core.wire.profiles import PROFILES
from tests.doubles.accounting import all_accounted_for
from tests.doubles.answers import reading
from tests.doubles.payloads import batch, cleared, removed, store

Step = tuple[Any, ...]


class Bus:
    """One relay of the chain, and its connection to its publisher.

    The publisher is the engine or the previous relay.
    """

    def __init__(self, profile: str, journal: int, heartbeat: float) -> None:
        self._profile, self._journal, self._heartbeat = profile, journal, heartbeat
        self.connected = True
        self.lose = 0
        """Number of live batches for this relay that the network will lose next."""
        self.silent = False
        """Whether the publisher answers none of this relay's replay requests."""
        self.breaks_after = -1
        """Number of messages after which the next replay answer to this relay breaks off; -1 means that it does not
        break off.
        """
        self.request = -1
        self.begin(0)

    def begin(self, first_seq: int) -> None:
        """Start a new relay without saved state. Its first seq is ``first_seq``."""
        source = SourceSpec("engine", 0, probe_interval=2.5, clears="all")
        output = OutputSpec(
            "out",
            PROFILES[self._profile],
            [None],
            heartbeat=self._heartbeat,
            journal_batches=self._journal,
            first_seqs=[first_seq],
        )
        self.relay = Relay([source], [output])
        self.request = -1

    @property
    def blocks(self) -> set[Any]:
        index = self.relay.sources[0].normalizer.index
        return {block for table in index.tables.values() for block in table.blocks}


class Chain:
    """An engine that keeps every batch for replays, and a chain of relays after it."""

    def __init__(self, *profiles: str, journal: int = 10_000, heartbeat: float = 1.0) -> None:
        self.now = 100.0
        self.sent: list[list[bytes]] = []
        self.truth: set[int] = set()
        self.buses = [Bus(profile, journal, heartbeat) for profile in profiles]
        for at in range(len(profiles)):
            self.tell(at, Started(1e9))
            self.tell(at, SourceUp(0))

    # -- events ------------------------------------------------------------------------------------------------------

    def step(self, what: str, at: int, number: int) -> None:
        self.now += 0.001  # so that no two epochs start with the same bytes
        bus = self.buses[at % len(self.buses)]
        at %= len(self.buses)
        if what == "store" and number not in self.truth:
            self.publish(store([number]))
            self.truth.add(number)
        elif what == "remove" and number in self.truth:
            self.publish(removed([number]))
            self.truth.discard(number)
        elif what == "clear":
            self.publish(cleared())
            self.truth.clear()
        elif what == "engine restarts":
            self.sent, self.truth = [], set()
            self.drop(0, back=True)
        elif what == "lose":
            bus.lose = number
        elif what == "silent":
            bus.silent = not bus.silent
        elif what == "break":
            bus.breaks_after = number
        elif what == "away":
            self.drop(at, back=not bus.connected)
        elif what == "restart":
            (stream,) = bus.relay.outputs[0].streams
            bus.begin(stream.next_seq + number if number % 2 else 0)
            self.tell(at, Started(1e9 + self.now))
            self.drop(at, back=True)
            if at + 1 < len(self.buses):
                self.drop(at + 1, back=True)
        elif what == "wait":
            self.seconds_pass(number)

    def settle(self) -> None:
        """End all faults, and let the engine publish a batch, so that each relay notices missing batches."""
        for at, bus in enumerate(self.buses):
            bus.lose, bus.silent, bus.breaks_after = 0, False, -1
            if not bus.connected:
                self.drop(at, back=True)
        self.step("store", 0, 99)
        self.seconds_pass(150)

    def seconds_pass(self, count: int) -> None:
        for _ in range(count):
            self.now += 1.0
            for at in range(len(self.buses)):
                self.tell(at, Tick(1e9 + self.now))

    # -- the network -------------------------------------------------------------------------------------------------

    def publish(self, *events: Any) -> None:
        self.sent.append(batch(len(self.sent), *events, ts=self.now))
        self.arrive(0, self.sent[-1])

    def arrive(self, at: int, frames: list[bytes]) -> None:
        """Deliver a live batch to a relay, unless the batch is to be lost."""
        if at == len(self.buses) or not self.buses[at].connected:
            return
        if self.buses[at].lose:
            self.buses[at].lose -= 1
            return
        self.tell(at, BatchReceived(0, frames))

    def drop(self, at: int, *, back: bool) -> None:
        """Break the connection of the relay at position ``at`` of the chain to its publisher.

        If ``back``, connect it again.
        """
        bus = self.buses[at]
        if bus.connected:
            bus.connected = False
            self.tell(at, SourceDown(0))
        if back:
            bus.connected = True
            self.tell(at, SourceUp(0))

    def tell(self, at: int, event: Any) -> None:
        bus = self.buses[at]
        asked = None
        for command in bus.relay.handle(event, self.now):
            if isinstance(command, Publish):
                self.arrive(at + 1, [command.topic, command.seq.to_bytes(8, "big"), command.payload])
            elif isinstance(command, RequestReplay):
                bus.request, asked = command.request, command
            elif isinstance(command, CancelReplay) and command.request == bus.request:
                bus.request = -1
        all_accounted_for(bus.relay.sources[0])
        if asked is not None and bus.connected and not bus.silent:
            self.answer(at, asked)

    def answer(self, at: int, asked: RequestReplay) -> None:
        """Answer a relay's replay request, until the answer breaks off or the relay cancels the request."""
        bus = self.buses[at]
        room, bus.breaks_after = bus.breaks_after, -1
        messages = self.of_engine(asked.start) if at == 0 else self.of_bus(at - 1, asked.start)
        for count, message in enumerate(messages):
            if bus.request != asked.request or count == room:
                return
            self.tell(at, ReplayReceived(0, asked.request, message))

    def of_engine(self, start: int) -> list[list[bytes]]:
        return [[b"", *frames] for frames in self.sent[start:]] + [[b"", b"", END_SEQ, b""]]

    def of_bus(self, at: int, start: int) -> Any:
        frames = [b"id", b"", start.to_bytes(8, "big")]

        def carry_out(commands: list[Command]) -> None:
            for command in commands:
                if isinstance(command, Publish):  # an empty batch that makes room for a state
                    self.arrive(at + 1, [command.topic, command.seq.to_bytes(8, "big"), command.payload])

        relay = self.buses[at].relay
        (begun,) = relay.handle(ReplayAsked(0, 0, frames), self.now)
        assert isinstance(begun, AnswerReplay)
        answer = reading(relay, begun, carry_out)
        while (message := answer.next_message()) is not None:
            yield message[1:]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                *["store"] * 4,
                *["silent"] * 2,
                *["wait"] * 2,
                "remove",
                "clear",
                "engine restarts",
                "lose",
                "break",
                "away",
                "restart",
            ]
        ),
        st.integers(0, 2),
        st.integers(0, 12),
    ),
    max_size=40,
)


@given(steps=STEPS, journal=st.sampled_from([1, 5, 12, 1000]), profile=st.sampled_from(["vllm", "dynamo", "llm-d"]))
@example(
    steps=[
        *[("store", 0, n) for n in range(9)],
        ("silent", 1, 0),
        ("restart", 1, 0),
        *[("store", 0, n) for n in range(9, 12)],
        ("wait", 0, 12),
    ],
    journal=12,
    profile="vllm",
)
@example(
    # the middle relay sends the same history again from seq 0, while the last relay holds blocks of the previous epoch
    steps=[
        ("silent", 2, 0),
        ("clear", 0, 0),
        ("restart", 1, 7),
        ("store", 0, 1),
        ("clear", 0, 0),
        ("restart", 1, 0),
        ("clear", 0, 0),
        ("store", 0, 11),
        ("store", 0, 4),
    ],
    journal=12,
    profile="dynamo",
)
@settings(max_examples=60, deadline=None)
def test_each_kvbus_of_a_chain_holds_the_engines_blocks(steps: list[Step], journal: int, profile: str) -> None:
    chain = Chain(profile, profile, "vllm", journal=journal)
    for step in steps:
        chain.step(*step)
    chain.settle()
    for bus in chain.buses:
        assert bus.blocks == chain.truth
        assert not bus.relay.sources[0].partial


def test_a_chained_kvbus_does_not_take_heartbeats_for_a_new_epoch() -> None:
    """In a chain of kvbuses, the last one requests a replay after a loss, a reconnection and a silence.

    All replayed heartbeats have the same ``ts``, and must not look like batches of another epoch.
    """
    chain = Chain("vllm", "vllm")
    chain.step("store", 0, 1)
    chain.seconds_pass(20)
    chain.step("lose", 1, 2)
    chain.seconds_pass(5)
    chain.drop(1, back=True)
    chain.step("lose", 1, 6)  # lose so many heartbeats that the relay probes the idle stream
    chain.seconds_pass(20)
    (source,) = chain.buses[1].relay.sources
    assert source.stats.restarts == 0
    assert source.stats.recovered >= 2
    assert source.stats.lost == 0
    assert len(source.normalizer.index) == 1


@pytest.mark.parametrize("journal", [1, 2, 5, 8])
def test_a_chained_kvbus_does_not_take_a_probed_state_for_a_new_epoch(journal: int) -> None:
    """The last relay must not take a state of the first relay for another epoch.

    The last relay requests batches with each probe of the idle stream, and after a loss. The journal of the first
    relay lacks them, so it answers with a state.
    """
    chain = Chain("vllm", "vllm", journal=journal, heartbeat=1000.0)
    for n in range(20):
        chain.step("store", 0, n)
    chain.seconds_pass(60)
    (source,) = chain.buses[1].relay.sources
    assert source.stats.replays > 4
    assert (source.stats.restarts, source.sequencer.epoch) == (0, 0)
    chain.step("lose", 1, 10)
    for n in range(20, 30):
        chain.step("store", 0, n)
    # kvbus probes an idle stream after at most 80 s, and TCP may delay batches by as many seconds as the stream was
    # silent
    chain.seconds_pass(170)
    assert chain.buses[1].blocks == chain.truth == set(range(30))
    assert source.stats.restarts == 0


@pytest.mark.parametrize("again", ["live", "away"])
def test_a_chained_kvbus_does_not_take_a_state_for_missing_batches_for_a_restart(again: str) -> None:
    """The last relay must not take a state of the first relay for a restart.

    It notices missing batches by the next batch or by a reconnection. The first relay's journal no longer has them, so
    the first relay answers with a state.
    """
    chain = Chain("vllm", "vllm", journal=5)
    for n in range(20):
        chain.step("store", 0, n)
    if again == "live":
        chain.step("lose", 1, 10)
    else:
        chain.drop(1, back=False)
    for n in range(20, 30):
        chain.step("store", 0, n)
    if again == "away":
        chain.drop(1, back=True)
    chain.step("store", 0, 30)
    chain.seconds_pass(5)
    (source,) = chain.buses[1].relay.sources
    assert chain.buses[1].blocks == chain.truth == set(range(31))
    assert source.stats.restarts == 0
