"""Tests of kvbus's complete core: a script gives events to the relay and checks the relay's commands."""

import pytest

from kvbus.core.blocks.announce import MOST_BLOCKS
from kvbus.core.blocks.index import MAX_RUN
from kvbus.core.commands import Publish
from kvbus.core.events import (
    BatchReceived,
    OutputPlaced,
    ReplayAsked,
    RequestSent,
    RequestWaits,
    SnapshotAsked,
    Started,
    Tick,
)
from kvbus.core.findings.source import source_findings
from kvbus.core.outputs.spec import OutputSpec
from kvbus.core.relay import SLICE, Relay
from kvbus.core.source_spec import SourceSpec
from kvbus.core.wire.frames import END_SEQ
from kvbus.core.wire.profiles import PROFILES
from tests.core.dsl import (
    Script,
    answer,
    asked,
    asked_raw,
    live,
    publish,
    raw,
    replay_end,
    replayed,
    tick,
    up,
)
from tests.doubles.answers import joined, reading
from tests.doubles.payloads import batch, cleared, pack, payload, removed, store, unpack
from tests.doubles.router import PlainSetRouter
from tests.typed import there

A, B, C = store([1]), store([2], 1), store([3], 2)


def blocks(script):
    return {block for _, _, block in script.router.blocks}


def answered(script, start):
    """Return the seqs and payloads of a complete replay answer."""
    script >> asked(start)
    (command,) = script.whatever()
    found = []
    reader = reading(script.relay, command)
    while (message := there(reader.next_message()))[-2] != END_SEQ:
        found.append((int.from_bytes(message[-2], "big"), message[-1]))
    return found


def sent_blocks(script):
    """Return the number of blocks in each of the batches just sent.

    Check that none has more blocks than routers accept.
    """
    batches = [unpack(command.payload)[1] for command in script.whatever()]
    named = [[len(event["block_hashes"]) for event in events] for events in batches]
    assert max(map(sum, named)) <= MOST_BLOCKS
    assert max(map(max, named)) <= MAX_RUN
    return sum(map(sum, named))


def replayed_view(script):
    """Return a new router that has applied the answer to a replay request from 0."""
    router = PlainSetRouter()
    for seq, body in answered(script, 0):
        router.apply(seq, body)
    return router


class TestFromStartToEnd:
    def test_a_batch_without_a_rank_gets_the_rank_of_its_source(self):
        script = Script(ranks=(5,))
        assert script >> live(0, A, rank=None) << publish(0, A, rank=5)
        assert script >> raw(b"", (1).to_bytes(8, "big"), pack([1.0, [B]])) << publish(1, B, rank=5)

    def test_an_output_with_a_topic_replaces_the_engines_topic(self):
        assert Script(topic=b"kv@a@m") >> live(0, A, topic=b"x") << publish(0, A, topic=b"kv@a@m")


class TestRestarts:
    def test_an_engine_may_have_another_dialect_after_a_restart(self):
        script = Script()
        assert script >> live(0, A) << publish(0, A)
        first = script.source.dialect.name
        array = ["BlockStored", [b"x" * 32], None, list(range(64)), 64, None]
        script >> raw(b"", bytes(8), pack([2.0, [array]]))
        script.whatever()
        assert blocks(script) == {b"x" * 32}
        assert script.source.dialect.name == "vllm-0.9.0" != first
        assert script.source.normalizer.block_size == 64
        assert script.stats.rejected == {}


class TestLargeBlocks:
    """Tests for events that become many times larger because kvbus cuts their blocks."""

    @pytest.mark.parametrize("count", [1, 3, 20])
    def test_large_divided_blocks_are_sent_in_batches_that_routers_accept(self, count):
        script = Script(block_size=16)
        names = list(range(1, count + 1))
        script >> up() >> live(0, store(names, block_size=16 * 5000))
        assert sent_blocks(script) == count * 5000
        assert len(blocks(script)) == count * 5000
        assert script.router.orphans == 0
        script >> live(1, removed(names))
        assert sent_blocks(script) == count * 5000
        assert script.router.blocks == {}
        assert script.router.violations == []


class TestHeartbeats:
    def test_an_idle_stream_sends_heartbeats(self):
        script = Script(heartbeat=1.0)
        assert (
            script
            >> live(0, A)
            << publish(0, A)
            >> tick(0.9)
            >> tick(0.2, wall=500.0)
            << publish(1, ts=500.0, rank=0)
            >> tick(0.5)
            >> tick(0.5)
            << publish(2)
            >> live(1, B)
            << publish(3, B)
        )
        assert script.relay.outputs[0].stats.heartbeats == 2

    def test_each_stream_sends_its_own_heartbeats(self):
        script = Script(heartbeat=1.0, ranks=(0, 1))
        assert script >> tick() >> tick(0.6) >> live(0, A, source=1, rank=1) << publish(0, A, stream=1)
        assert script >> tick(0.5) << publish(0, stream=0) >> tick(0.6) << publish(1, stream=1, rank=1)

    def test_an_engines_wrong_clock_changes_no_heartbeat_of_another_stream(self):
        script = Script(heartbeat=1.0, ranks=(0, 1))
        assert script >> tick() >> live(0, A, ts=9000.0) << publish(0, A)
        assert (
            script >> tick(1.1, wall=500.0) << publish(1, ts=9000.0, rank=0) << publish(0, stream=1, ts=500.0, rank=1)
        )

    def test_a_merged_stream_without_sources_sends_heartbeats(self):
        relay = Relay([], [OutputSpec("out", PROFILES["vllm"], [None], merged=True, heartbeat=1.0)])
        relay.handle(Tick(500.0), 0.0)
        (beat,) = relay.handle(Tick(501.0), 1.5)
        assert isinstance(beat, Publish)
        assert unpack(beat.payload) == [501.0, [], 0]


class TestReplayAnswers:
    @pytest.mark.parametrize("frames", [[], [b"id"]])
    def test_a_malformed_replay_request_is_counted(self, frames):
        script = Script()
        assert script >> asked_raw(*frames)
        assert script.relay.outputs[0].stats.malformed == 1

    def test_a_request_for_batches_before_the_journal_gets_the_state(self):
        script = Script(journal_batches=2)
        assert script >> live(0, A) << publish(0, A) >> live(1, B, C) << publish(1, B, C)
        assert (
            script >> live(2, removed([3])) << publish(2, removed([3])) >> live(3, store([4])) << publish(3, store([4]))
        )
        assert script >> asked(0) << answer(3) >> asked(1) << answer(1, 2, 3) >> asked(3) << answer(3)
        assert replayed_view(script).blocks == script.router.blocks

    def test_an_llm_d_router_gets_an_answer_from_its_requested_seq(self):
        script = Script(journal_batches=2, profiles=("llm-d",))
        for seq in range(4):
            script >> live(seq, store([seq]))
            script.whatever()
        assert script >> asked(0) << answer(0, 1, 2, 3) >> asked(1) << answer(1, 2, 3)


class TestNumbering:
    """Tests for the seq and the clears with which kvbus begins a stream, and for a changed publisher id of an
    engine.
    """

    def relay(self, **fields):
        spec = OutputSpec("out", PROFILES["vllm"], [b"kv"], heartbeat=0.0, **fields)
        return Relay([SourceSpec("engine", 0, replay=False)], [spec])

    def test_a_stream_that_continues_old_seqs_begins_with_a_clear(self):
        relay = self.relay(first_seqs=[5000])
        (first,) = relay.handle(Started(7.0), 0.0)
        assert (first.seq, unpack(first.payload)) == (5000, [7.0, [cleared()], 0])
        (second,) = relay.handle(BatchReceived(0, batch(0, A)), 0.0)
        assert second.seq == 5001

    @pytest.mark.parametrize("extra", [{}, {"not_known_yet": 1}], ids=["usual", "unusual"])
    def test_a_clear_is_sent_for_an_unexpected_rank_of_an_engine(self, extra):
        """If the engine's batches name another rank than the configured one, kvbus sends a clear for that rank, too.

        A previous kvbus process may have announced the engine's blocks under that rank, so routers may still hold them.
        """
        relay = self.relay(first_seqs=[5000])
        relay.handle(Started(7.0), 0.0)
        sent = relay.handle(BatchReceived(0, batch(0, A | extra, rank=3)), 0.0)
        said = [(command.seq, *unpack(command.payload)[1:]) for command in sent]
        assert [(seq, [event["type"] for event in events], rank) for seq, events, rank in said] == [
            (5001, ["AllBlocksCleared"], 3),
            (5002, ["BlockStored"], 3),
        ]
        (again,) = relay.handle(BatchReceived(0, batch(1, B, rank=3)), 0.0)
        assert again.seq == 5003

    def test_a_new_stream_begins_with_the_first_batch_of_the_engine(self):
        """If no former kvbus process used the output, its batch 0 is the engine's first batch, without a clear
        before it.

        Readers take a stream that begins with AllBlocksCleared for SGLang's, because SGLang begins its streams so.
        """
        (first,) = self.relay().handle(BatchReceived(0, batch(0, A, rank=3)), 0.0)
        _, (event,), rank = unpack(first.payload)
        assert (first.seq, event["type"], rank) == (0, "BlockStored", 3)

    def test_a_merged_stream_clears_the_ranks_of_removed_sources(self):
        """kvbus clears the ranks of sources that a former process had on the stream and that are no longer configured.

        Routers that stayed connected hold blocks of these ranks, and no other process clears them.
        """
        sources = [SourceSpec("engine/1", 1, replay=False)]
        spec = OutputSpec("out", PROFILES["vllm"], [None], merged=True, first_seqs=[9], known_slots=3)
        relay = Relay([SourceSpec(), *sources], [spec])
        commands = [command for command in relay.handle(Started(), 0.0) if isinstance(command, Publish)]
        assert [(command.seq, unpack(command.payload)[2]) for command in commands] == [(9, 1), (10, 0), (11, 2)]

    @pytest.mark.parametrize("placed", [False, True], ids=["started", "placed"])
    def test_a_merged_stream_with_only_rank_0_gets_one_clear(self, placed):
        """kvbus sends one clear with rank 0, not one for each rank.

        SMG's gateway expects consecutive seqs in each rank, so it would see a gap at the first batch of another rank.
        """
        spec = OutputSpec("out", PROFILES["smg"], [b""], merged=True, first_seqs=[9], known_slots=4)
        relay = Relay([SourceSpec("engine/0", 0, replay=False), SourceSpec("engine/1", 1, replay=False)], [spec])
        sent = relay.handle(OutputPlaced(0, spec) if placed else Started(), 0.0)
        commands = [command for command in sent if isinstance(command, Publish)]
        assert [(command.seq, unpack(command.payload)[1:]) for command in commands] == [(9, [[cleared()], 0])]

    def test_a_changed_publisher_id_is_a_restart(self):
        script = Script()
        old, new = b"a" * 16, b"b" * 16
        assert script >> raw(b"", bytes(8) + old, payload(A)) << publish(0, A)
        assert script >> raw(b"", (1).to_bytes(8, "big") + old, payload(B)) << publish(1, B)
        assert script >> raw(b"", (2).to_bytes(8, "big") + new, payload(C)) << publish(2, cleared()) << publish(3, C)
        assert script.stats.restarts == 1


class TestSnapshots:
    def snapshot(self, relay, *frames):
        (command,) = relay.handle(SnapshotAsked(0, 0, [b"id", *frames]), 0.0)
        reader = reading(relay, command)
        return joined(iter(reader.next_message, None))

    def relay(self):
        spec = OutputSpec("out", PROFILES["vllm"], [None], heartbeat=0.0, publisher_ids=[b"p" * 16])
        return Relay([SourceSpec("engine", 0, replay=False)], [spec])

    @pytest.mark.parametrize("envelope", [[], [b""]])
    def test_a_snapshot_request_is_answered_at_the_replay_endpoint(self, envelope):
        """kvbus also answers a snapshot request at its replay endpoint, as vllm#50134 proposes.

        The answer has the batches of the state, all with the seq of the next live batch, and then END.
        """
        relay = self.relay()
        for seq, event in enumerate((A, B, removed([2]), C)):
            relay.handle(BatchReceived(0, batch(seq, event)), 0.0)
        (command,) = relay.handle(ReplayAsked(0, 0, [b"id", *envelope, b"snapshot"]), 0.0)
        reader = reading(relay, command)
        messages = []
        while (message := reader.next_message()) is not None:
            messages += [message] if message else []
        assert messages.pop() == [b"id", *envelope, b"", END_SEQ, b""]
        router = PlainSetRouter()
        for *head, number, body in messages:
            assert head == [b"id", *envelope, b""]
            assert number == (4).to_bytes(8, "big") + b"p" * 16
            router.take(0, body)
        assert {block for _, _, block in router.blocks} == {1, 3}
        assert router.clears == 1
        assert router.violations == []
        relay.handle(BatchReceived(0, batch(4, store([4], 3))), 0.0)
        (command,) = relay.handle(ReplayAsked(0, 0, [b"id", *envelope, (4).to_bytes(8, "big")]), 0.0)
        assert there(reading(relay, command).next_message())[-2][:8] == (4).to_bytes(8, "big")

    def test_the_snapshot_of_a_stream_without_batches_has_no_state(self):
        assert self.snapshot(self.relay(), b"", b"snapshot") == [b"id", b"", b"\xff" * 8, b"p" * 16]

    @pytest.mark.parametrize("frames", [[b"what"], [b"", b""], [b"snapshot", b"snapshot"]])
    def test_a_malformed_snapshot_request_is_refused(self, frames):
        message = self.snapshot(self.relay(), *frames)
        assert message[-2:] == [(-2).to_bytes(8, "big", signed=True), b"p" * 16]

    def test_a_snapshot_request_without_a_requester_is_counted(self):
        relay = self.relay()
        assert relay.handle(SnapshotAsked(0, 0, [b"snapshot"]), 0.0) == []
        assert relay.outputs[0].stats.malformed == 1


class TestBacklog:
    def test_a_long_backlog_is_delivered_over_several_ticks(self):
        script = Script(replay=True)
        script >> up()
        script.whatever()
        count = 3 * SLICE
        for seq in range(count, 0, -1):
            assert script >> live(seq, store([seq], seq - 1))
        script >> replayed(0, store([0]))
        seqs, turns = [c.seq for c in script.whatever() if isinstance(c, Publish)], 1
        while script.relay.backlog:
            script >> tick()
            seqs += [c.seq for c in script.whatever() if isinstance(c, Publish)]
            turns += 1
        assert seqs == list(range(count + 1))
        assert turns >= 3
        assert script.router.violations == []


def test_a_replay_request_that_waits_for_other_requests_loses_no_batches():
    script = Script(replay=True, replay_timeout=2.0, reorder_batches=4)
    script.after(up(), replay_end(), live(0, store([1])))
    missed = [store([seq + 1]) for seq in range(2, 9)]
    script.after(live(2, missed[0]))
    script.relay.handle(RequestWaits(0, script.requests[0]), script.now)
    assert [each.id for each in source_findings(script.source)] == ["request_waits"]
    script.after(tick(100.0), *(live(seq, missed[seq - 2]) for seq in range(3, 9)), tick(100.0))
    assert (script.stats.requests_waited, script.stats.replay_timeouts, script.stats.lost) == (1, 0, 0)
    assert script.stats.held_overflow > 0
    script.relay.handle(RequestSent(0, script.requests[0], sent=True), script.now)
    assert source_findings(script.source) == []
    script.after(replayed(1, store([2])), *(replayed(seq, missed[seq - 2]) for seq in range(2, 9)), replay_end())
    assert (script.stats.lost, script.source.sequencer.pending, script.source.sequencer.next) == (0, 0, 9)
    assert script.stats.missing == script.stats.recovered
