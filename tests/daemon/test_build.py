"""Tests for how the daemon builds the relay from the configuration: slots of sources and streams, topics, and reserved
seqs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvbus.config import Config, load
from kvbus.core.source_spec import SourceSpec
from kvbus.daemon.build import journal_bounds, make_relay, new_stream, next_seqs, reserve_seqs, source_spec
from kvbus.daemon.placement import Placement, Worker, assign_slots
from kvbus.daemon.views import AccessScope
from kvbus.state.reservations import SeqReservations
from kvbus.state.sqlite import RESERVE_AHEAD as AHEAD
from kvbus.state.sqlite import SqliteStore
from tests.state.left import opened

SOURCES = [
    {"name": "a", "endpoint": "ipc:///run/a", "data_parallel_size": 2},
    {"name": "b", "endpoint": "ipc:///run/b", "replay_endpoint": "ipc:///run/b-replay", "slot": 3},
]


def config(*outputs: dict[str, Any], **settings: Any) -> Config:
    outgoing = [{"name": "routers", "endpoint": "ipc:///run/out"} | output for output in outputs or ({},)]
    return load(None, env={}, overrides={"sources": SOURCES, "outputs": outgoing, **settings})


def slots(made: Config) -> dict[int, Any]:
    return {stream.index: stream for stream in made.streams()}


def reserved(made: Config, store: SqliteStore | None = None, placement: Placement | None = None) -> SeqReservations:
    reservations = SeqReservations(store)
    reserve_seqs(reservations, made, placement or assign_slots(Placement(), made))
    return reservations


def relay_of(made: Config, reservations: SeqReservations | None = None) -> Any:
    return make_relay(made, slots(made), reservations or reserved(made))


def test_each_slot_has_its_source_and_a_free_slot_has_no_source() -> None:
    relay = relay_of(config())
    assert [source.spec.label for source in relay.sources] == ["a/0", "a/1", "", "b"]
    assert relay.sources[2].spec == SourceSpec()
    assert [source.rank for source in relay.present] == [0, 1, 0]


def test_an_output_has_a_stream_for_each_slot_or_one_for_all() -> None:
    relay = relay_of(config({}, {"name": "one", "endpoint": "ipc:///run/one", "layout": "merged"}))
    assert [len(output.streams) for output in relay.outputs] == [4, 1]


def test_the_journal_of_a_log_source_has_the_limits_of_the_index() -> None:
    made = config({"journal_batches": 3, "journal_bytes": 4})
    assert journal_bounds(made, made.outputs[0]) == (3, 4)
    log = {"name": "fleet", "discover": {"kafka": {"endpoint": "tcp://kafka:9092"}}}
    limits = {"max_blocks": 5, "max_index_bytes": 6}
    made = config({"layout": "per_topic", "topic": "{source}"}, sources=[log], limits=limits)
    assert journal_bounds(made, made.outputs[0]) == (5, 6)


def test_the_settings_of_a_source_reach_the_relay() -> None:
    made = config(
        on_lost="keep",
        block_size=32,
        source_timeout=7,
        reorder_batches=9,
        limits={"max_held_bytes": 11, "max_blocks": 13},
    )
    one, _, other = (source_spec(made, stream) for stream in made.streams())
    assert (one.replay, other.replay) == (False, True)
    assert (one.reorder_batches, one.max_held_bytes) == (9, 11)
    assert (one.block_size, one.max_blocks, one.source_timeout, one.on_lost) == (32, 13, 7, "keep")


def test_block_size_auto_is_passed_as_none() -> None:
    made = config()
    assert source_spec(made, made.streams()[0]).block_size is None


def test_the_topic_of_a_stream_is_that_of_its_source_or_rendered() -> None:
    made = config({"topic": "kv@{source}@{rank}"})
    assert new_stream(made, AccessScope(0), Worker("a", 1), 5).topic == b"kv@a@1"
    assert new_stream(config(), AccessScope(0), Worker("a", 1), 5).topic is None


def test_an_output_with_snapshots_has_publisher_ids_and_fast_heartbeats() -> None:
    made = config(
        {"snapshot_endpoint": "ipc:///run/snapshots", "heartbeat": 30}, {"name": "b", "endpoint": "ipc:///run/2"}
    )
    with_snapshots, without = relay_of(made).outputs
    ids = [stream.publisher_id for stream in with_snapshots.open_streams.values()]
    assert len(set(ids)) == len(ids)
    assert {len(each) for each in ids} == {16}
    assert with_snapshots.spec.heartbeat == 1.0
    assert without.streams[0].publisher_id == b""


def test_seqs_continue_after_an_earlier_process_was_killed(tmp_path: Path) -> None:
    made = config()
    with opened(tmp_path) as store:
        reserved(made, store).use(0, 3, 41)
    with opened(tmp_path) as store:
        relay = relay_of(made, reserved(made, store))
        assert [stream.next_seq for stream in relay.outputs[0].streams] == [0, 0, 0, 41 + AHEAD]


def test_a_merged_output_has_one_reservation(tmp_path: Path) -> None:
    made = config({"layout": "merged"})
    with opened(tmp_path) as store:
        reserved(made, store)
        assert len(store.reserved.streams) == 1


@pytest.mark.parametrize("kind", ["kafka", "nats", "redis"])
def test_each_stream_of_a_log_has_its_own_reservation(kind: str, tmp_path: Path) -> None:
    made = config({"type": kind, "endpoint": "tcp://127.0.0.1:9"}, model="m")
    with opened(tmp_path) as store:
        reserved(made, store).use(0, 3, 41)
        assert len(store.reserved.streams) == len(made.streams()) > 1
    with opened(tmp_path) as store:
        relay = relay_of(made, reserved(made, store))
        assert [stream.next_seq for stream in relay.outputs[0].streams] == [0, 0, 0, 41 + AHEAD]


def test_a_stream_that_was_never_open_has_no_next_seq() -> None:
    relay = relay_of(config())
    open_stream, gone = relay.outputs[0].streams[0], relay.outputs[0].streams[1]
    open_stream.next_seq = 7
    gone.next_seq, gone.closed = 5, True
    relay.outputs[0].streams[3].closed = True
    found = next_seqs(relay)
    assert (found[0, 0], found[0, 1]) == (7, 5)
    assert (0, 3) not in found


def test_the_stream_of_a_removed_source_stays_in_the_layout_per_topic() -> None:
    made = config({"layout": "per_topic", "topic": "kv@{source}.{rank}"})
    placement = Placement({**assign_slots(Placement(), made).slots, Worker("c", 5): 6}, (Worker("c", 5),))
    relay = make_relay(made, slots(made), reserved(made, None, placement), placement.gone_slots)
    (output,) = relay.outputs
    assert [stream.topic for stream in output.streams] == [b"kv@a.0", b"kv@a.1", b"", b"kv@b.0", b"", b"", b"kv@c.5"]
    assert list(output.open_streams) == [0, 1, 3]
    assert list(output.served_streams) == [0, 1, 3, 6]
    assert relay.sources[6].rank == 5
    assert relay.sources[6].gone
