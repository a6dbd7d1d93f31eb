"""Tests for several streams with separate topics on one socket of an engine.

Each source gets only its own topic. The streams have common or separate seqs, and batches are lost.
"""

from __future__ import annotations

import random
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.core.commands import RequestReplay
from kvbus.core.events import BatchReceived, ReplayReceived, SourceDown, SourceUp, Tick
from kvbus.core.findings.source import stream_findings
from kvbus.core.relay import Relay
from kvbus.core.sequencing.topics import MAX_RUN, filler
from kvbus.core.source_spec import SourceSpec
from kvbus.core.types import Filtered, Reason
from kvbus.core.wire.codec import decode_batch
from kvbus.core.wire.frames import END_SEQ
from tests.doubles.payloads import payload, store

Numbering = Literal["one", "each"]
A, B, C = b"kv@a@m", b"kv@b@m", b"kv@c@m"


def findings_of(source):
    """Return the texts of kvbus's findings about a stream, by the ids of the findings."""
    return {each.id: each.text for each in stream_findings(source)}


class Socket:
    """A PUB socket with several topics, a replay for all of them, and a relay whose sources read one topic each."""

    def __init__(
        self,
        numbering: Numbering,
        *topics: bytes,
        replay: bool = True,
        framing: int = 4,
        shared: bool = True,
        probe: float = 0.0,
    ) -> None:
        self.numbering, self.framing = numbering, framing
        self.buffer: list[tuple[bytes, int, bytes]] = []
        self.stored: dict[bytes, set[int]] = {}
        specs = [
            SourceSpec(f"s{n}", 0, replay=replay, probe_interval=probe, topic=topic, shared=shared)
            for n, topic in enumerate(topics)
        ]
        self.relay = Relay(specs, [])
        self.now = 100.0
        self.asked: list[RequestReplay] = []
        self.trimmed = 0

    def handle(self, event: Any) -> None:
        self.asked += [each for each in self.relay.handle(event, self.now) if isinstance(each, RequestReplay)]

    def up(self) -> None:
        for slot in range(len(self.relay.sources)):
            self.handle(SourceUp(slot))

    def publish(self, topic: bytes, lost: bool = False) -> None:
        of = [each for each in self.buffer if self.numbering == "one" or each[0] == topic]
        seq, block = len(of), len(self.buffer) + 1
        self.stored.setdefault(topic, set()).add(block)
        self.buffer.append((topic, seq, payload(store([block]))))
        if not lost:
            for slot in range(len(self.relay.sources)):
                self.handle(BatchReceived(slot, [topic, seq.to_bytes(8, "big"), self.buffer[-1][2]]))

    def answer(self) -> None:
        """Answer all open replay requests of the relay from the socket's buffer."""
        while self.asked:
            request = self.asked.pop(0)
            for topic, seq, content in self.buffer[self.trimmed :]:
                if seq >= request.start:
                    frames = [b"", topic, seq.to_bytes(8, "big"), content]
                    if self.framing == 3:
                        del frames[1]
                    self.handle(ReplayReceived(request.source, request.request, frames))
            self.handle(ReplayReceived(request.source, request.request, [b"", b"", END_SEQ, b""]))

    def settle(self) -> None:
        for _ in range(60):
            self.now += 1.0
            self.handle(Tick(0.0))
            self.answer()

    def reorder_buffer(self, slot: int = 0) -> set[Any]:
        return set(self.relay.sources[slot].normalizer.index.names())


@pytest.mark.parametrize("numbering", ["one", "each"])
@pytest.mark.parametrize("late", [False, True], ids=["from the start", "late"])
def test_two_sources_on_one_socket_get_the_batches_of_their_topics(numbering: Numbering, late: bool) -> None:
    socket = Socket(numbering, A, B)
    topics = [A, A, B, A, B, B, A, B]
    if late:
        for topic in topics:
            socket.publish(topic, lost=True)
    socket.up()
    socket.answer()
    for n, topic in enumerate(topics * 3):
        socket.publish(topic, lost=n in {9, 10, 17})
        socket.answer()
    for topic in (A, B):  # only a later batch shows that the last batches were lost
        socket.publish(topic)
    socket.settle()
    assert [socket.reorder_buffer(0), socket.reorder_buffer(1)] == [socket.stored[A], socket.stored[B]]
    for source in socket.relay.sources:
        assert not source.partial
        assert source.sequencer.pending == source.stats.lost == 0
        assert not source.stats.rejected
        assert source.stats.filtered[Filtered.TOPIC] > 0
        assert findings_of(source) == {}


@given(st.data())
def test_sources_of_one_socket_are_exact_after_random_losses(data: st.DataObject) -> None:
    numbering: Numbering = data.draw(st.sampled_from(["one", "each"]))
    steps = data.draw(st.lists(st.tuples(st.sampled_from([A, B, C]), st.booleans(), st.booleans()), max_size=60))
    up = data.draw(st.integers(0, 20))
    socket = Socket(numbering, A, B)
    for n, (topic, lost, answered) in enumerate(steps):
        if n == up:
            socket.up()
        socket.publish(topic, lost=lost or n < up)
        if answered:
            socket.answer()
    socket.up()
    for topic in (A, B, A, B):
        socket.publish(topic)
        socket.settle()
    assert [socket.reorder_buffer(0), socket.reorder_buffer(1)] == [socket.stored[A], socket.stored[B]]
    assert not any(source.partial for source in socket.relay.sources)
    assert [source.stats.restarts for source in socket.relay.sources] == [0, 0]


def test_topics_with_common_seqs_and_no_replay_have_no_gaps() -> None:
    socket = Socket("one", A, B, replay=False)
    socket.up()
    draw = random.Random(7)
    for _ in range(200):
        socket.publish(draw.choice([A, B, C]))
    socket.settle()
    assert [socket.reorder_buffer(0), socket.reorder_buffer(1)] == [socket.stored[A], socket.stored[B]]
    assert [source.stats.lost for source in socket.relay.sources] == [0, 0]


@pytest.mark.parametrize("numbering", ["one", "each"])
def test_a_second_topic_at_a_source_is_refused_and_reported(numbering: Numbering) -> None:
    socket = Socket(numbering, b"", shared=False)
    socket.up()
    socket.answer()
    for topic in [A, B] * 10:
        socket.publish(topic)
        socket.answer()
    socket.settle()
    source = socket.relay.sources[0]
    assert socket.reorder_buffer() == socket.stored[A]
    assert source.stats.rejected == {Reason.OTHER_TOPIC: source.stats.rejected[Reason.OTHER_TOPIC]}
    assert source.stats.rejected[Reason.OTHER_TOPIC] >= 10
    assert list(findings_of(source)) == ["other_topic"]
    assert "kvbus reads topic 'kv@a@m' and refuses batches under 'kv@b@m'" in findings_of(source)["other_topic"]


def test_sources_that_share_a_replay_ignore_answers_without_topics() -> None:
    socket = Socket("each", A, B, framing=3)
    for topic in (A, B, B):
        socket.publish(topic, lost=True)
    socket.up()
    socket.answer()
    for topic in (A, B, B):
        socket.publish(topic)
    socket.settle()
    for source, topic in zip(socket.relay.sources, (A, B), strict=True):
        assert set(source.normalizer.index.names()) <= socket.stored[topic]
        assert source.partial
        assert "replay answers name no topic" in findings_of(source)["topic_unknown"]


@pytest.mark.parametrize("framing", [3, 4])
def test_a_finding_reports_a_topic_without_batches(framing: int) -> None:
    socket = Socket("one", b"kv@", shared=False, framing=framing)
    socket.up()
    socket.answer()
    source = socket.relay.sources[0]
    assert findings_of(source) == {}
    for _ in range(5):
        socket.publish(b"")
    socket.settle()
    assert list(findings_of(source)) == ["topic"]
    assert "under topic 'kv@': the engine publishes under ''" in findings_of(source)["topic"]
    assert source.stats.batches == 0
    socket.publish(b"kv@a@m")
    assert "topic" not in findings_of(source)


def test_a_finding_reports_a_source_that_gets_only_replayed_batches() -> None:
    """A finding reports a connected source that gets batches only from its replay: its endpoint may be another
    engine's.
    """
    socket = Socket("one", b"", shared=False, probe=0.5)
    socket.publish(A, lost=True)
    socket.up()
    socket.answer()
    source = socket.relay.sources[0]
    for _ in range(3):
        assert findings_of(source) == {}
        socket.publish(A, lost=True)
        socket.settle()
    assert socket.reorder_buffer() == socket.stored[A]
    assert source.stats.batches == 0
    assert list(findings_of(source)) == ["replay_alone"]
    socket.settle()
    assert list(findings_of(source)) == ["replay_alone"]
    socket.publish(A)
    assert findings_of(source) == {}


def test_replayed_batches_after_live_batches_cause_no_finding() -> None:
    socket = Socket("one", b"", shared=False, probe=0.5)
    socket.up()
    socket.answer()
    for _ in range(5):
        socket.publish(A)
        socket.publish(A, lost=True)
        socket.settle()
    assert findings_of(socket.relay.sources[0]) == {}
    for _ in range(5):
        socket.handle(SourceDown(0))
        socket.publish(A, lost=True)
        socket.up()
        socket.answer()
        socket.settle()
    assert findings_of(socket.relay.sources[0]) == {}
    assert socket.reorder_buffer() == socket.stored[A]


def test_a_healthy_stream_has_no_finding_about_its_topic() -> None:
    """No finding reports a wrong topic if the stream is idle, has had batches only by replay, or has no engine yet."""
    socket = Socket("one", b"kv@", shared=False)
    for _ in range(5):
        socket.publish(b"kv@a@m", lost=True)
    assert findings_of(socket.relay.sources[0]) == {}
    socket.up()
    socket.answer()
    socket.settle()
    assert socket.reorder_buffer() == socket.stored[b"kv@a@m"]
    assert findings_of(socket.relay.sources[0]) == {}


def test_a_source_may_have_another_topic_after_a_reconnection() -> None:
    socket = Socket("one", b"", shared=False)
    socket.up()
    socket.answer()
    socket.publish(b"old")
    socket.handle(SourceDown(0))
    socket.buffer.clear()
    socket.stored.clear()
    socket.up()
    socket.answer()
    for _ in range(3):
        socket.publish(b"new")
    socket.settle()
    assert socket.reorder_buffer() == socket.stored[b"new"]
    assert findings_of(socket.relay.sources[0]) == {}


def test_sglang_topics_with_an_epoch_suffix_belong_to_one_source() -> None:
    socket = Socket("one", b"kv", shared=False)
    socket.up()
    socket.answer()
    for epoch in (b"1", b"1", b"2"):
        socket.publish(b"kv\0sgl-kv-epoch=" + epoch)
    assert len(socket.reorder_buffer()) == 3
    assert findings_of(socket.relay.sources[0]) == {}


def test_batches_of_a_foreign_topic_need_bounded_memory() -> None:
    socket = Socket("one", A, B)
    socket.up()
    socket.answer()
    for _ in range(MAX_RUN + 10):
        socket.handle(BatchReceived(0, [C, len(socket.buffer).to_bytes(8, "big"), b"x"]))
        socket.buffer.append((C, 0, b""))
    assert socket.relay.sources[0].stats.filtered[Filtered.TOPIC] == MAX_RUN + 10


@pytest.mark.parametrize("content", [payload(store([1]), ts=12.5), b"", b"\x93", b"nonsense of more than ten bytes"])
def test_the_filler_for_a_foreign_batch_has_no_events(content: bytes) -> None:
    batch = decode_batch(filler(content))
    assert not isinstance(batch, Reason)
    assert batch.events == []
    assert batch.ts == (12.5 if content[:1] == b"\x93" and len(content) > 20 else 0.0)
    assert filler(content) != filler(content + b"x")


@pytest.mark.parametrize("refuted_by", [A, B], ids=["by an own batch", "by a foreign one"])
def test_kvbus_corrects_a_wrong_guess_that_topics_share_their_seqs(refuted_by: bytes) -> None:
    """kvbus recovers after it has mistaken the separate seqs of two topics for one common series.

    kvbus receives only batch 0 of topic a, batch 1 of topic b, and batch 2 of topic a, which look like one series. Then
    it receives a batch that cannot belong to this series.
    """
    socket = Socket("each", A, B, replay=False)
    socket.up()
    for topic, lost in [(A, False), (B, True), (B, False), (A, True), (A, False)]:
        socket.publish(topic, lost=lost)  # kvbus receives live: batches 0 and 2 of a, and 1 of b
    source = socket.relay.sources[0]
    assert source.stats.lost == 0
    if refuted_by == A:
        socket.handle(BatchReceived(0, [A, (1).to_bytes(8, "big"), socket.buffer[3][2]]))
    else:
        socket.handle(BatchReceived(0, [B, (0).to_bytes(8, "big"), socket.buffer[1][2]]))
    socket.publish(A)
    socket.settle()
    assert source.stats.restarts == 0
    assert socket.reorder_buffer() <= socket.stored[A]
    socket.publish(B)
    assert source.sequencer.pending == 0
