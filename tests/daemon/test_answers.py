"""Test of a replay answer whose messages change the relay's state while a router reads them."""

from __future__ import annotations

from kvbus.core.events import ReplayAsked
from kvbus.core.wire.frames import replay_request
from kvbus.transport.engine.publisher import EnginePublisher
from tests.doubles.bus import eventually, running_bus
from tests.doubles.payloads import payload, store
from tests.doubles.stage import cut_states


async def test_the_seqs_of_a_state_are_committed_before_the_state_is_sent(monkeypatch, tmp_path) -> None:
    """Before kvbus sends the first part of a state, it commits on disk which seqs belong to this state.

    Otherwise, if kvbus were killed after this part, a restarted kvbus would answer the router's next request with the
    rest of the state from the journal.
    """
    cut_states(monkeypatch, 1)
    async with (
        running_bus(state_dir=str(tmp_path / "state"), output={"journal_batches": 1}) as bus,
        EnginePublisher(bus.engine, bus.engine_replay, bind=True) as engine,
    ):
        await eventually(lambda: bus.source.state == "live", "the bus in sync")
        for block in range(5):
            engine.publish(payload(store([block])))
        await eventually(lambda: bus.source.sequencer.next == 5, "the batches relayed")
        daemon, answers = bus.daemon, []
        (driver,) = daemon.drivers
        monkeypatch.setattr(driver, "answer", lambda _command, messages: answers.append(messages))
        daemon.feed(ReplayAsked(0, 0, [b"id", *replay_request(0)]))
        (messages,) = answers
        assert int.from_bytes(next(filter(None, messages))[-2], "big") == 0
        (stream,) = daemon.relay.outputs[0].streams
        assert 4 in stream.incomplete
        assert daemon.relay.records is not None
        assert daemon.relay.records.heads == []
        assert daemon.relay.take_commands() == []
