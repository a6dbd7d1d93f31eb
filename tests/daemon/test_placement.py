"""Tests for the slots of sources: a source with the same name keeps its slot over reloads and restarts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.common.errors import ConfigError
from kvbus.config import Config, load
from kvbus.daemon.placement import Placement, Worker, assign_slots, forget, keep_placement, read_placement
from kvbus.state.reservations import SeqReservations

BY_TOPIC = {"endpoint": "ipc:///run/out", "layout": "per_topic", "topic": "kv@{source}.{rank}"}
MERGED = {"endpoint": "ipc:///run/out", "layout": "merged"}


def config(*names: str, outputs: Any = (BY_TOPIC,), ranks: int = 1, most: int = 100, **slots: int) -> Config:
    sources = [
        {"name": name, "endpoint": f"ipc:///run/{name}", "data_parallel_size": ranks, "slot": slots.get(name)}
        for name in names
    ]
    overrides = {"sources": sources, "outputs": list(outputs), "limits": {"max_sources": most}}
    return load(None, env={}, overrides=overrides)


def slots(placement: Placement) -> dict[str, int]:
    return {f"{worker.source}{worker.rank or ''}": slot for worker, slot in placement.slots.items()}


def test_the_first_assignment_of_slots_follows_the_list() -> None:
    assert slots(assign_slots(Placement(), config("b", "a", ranks=2))) == {"b": 0, "b1": 1, "a": 2, "a1": 3}


def test_present_and_removed_workers_keep_their_slots() -> None:
    first = assign_slots(Placement(), config("a", "b", "c"))
    second = assign_slots(first, config("d", "c", "a"))
    assert slots(second) == {"a": 0, "b": 1, "c": 2, "d": 3}
    assert second.gone == (Worker("b", 0),)
    third = assign_slots(second, config("b"))
    assert third.streams(config("b"))[1].label == "b"
    assert set(third.gone_slots) == {0, 2, 3}


def test_additional_ranks_do_not_move_other_workers() -> None:
    first = assign_slots(Placement(), config("a", "b"))
    assert slots(assign_slots(first, config("a", "b", ranks=2))) == {"a": 0, "b": 1, "a1": 2, "b1": 3}


def test_a_new_worker_gets_the_slot_of_the_worker_that_left_first() -> None:
    first = assign_slots(Placement(), config("a", "b", "c", most=3))
    second = assign_slots(assign_slots(first, config("a", "c", most=3)), config("c", most=3))
    assert second.gone == (Worker("b", 0), Worker("a", 0))
    third = assign_slots(second, config("c", "d", most=3))
    assert slots(third) == {"a": 0, "d": 1, "c": 2}


def test_more_sources_than_max_sources_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_sources: 3"):
        config("a", "b", "c", most=2)
    two, three = config("a", "b", most=2), config("a", "b", "c")
    with pytest.raises(ConfigError, match=r"max_sources: 3"):
        assign_slots(Placement(), two.model_copy(update={"sources": three.sources}))


def test_a_configured_slot_takes_precedence_over_a_kept_slot() -> None:
    first = assign_slots(Placement(), config("a", "b"))
    second = assign_slots(first, config("b", "c", c=0))
    assert slots(second) == {"b": 1, "c": 0}
    assert second.gone == ()


def test_an_output_with_ports_assigns_slots_by_the_list() -> None:
    ports = {"name": "ports", "endpoint": "ipc:///run/ports"}
    first = assign_slots(Placement(), config("a", "b", outputs=[BY_TOPIC, ports]))
    assert slots(assign_slots(first, config("b", outputs=[BY_TOPIC, ports]))) == {"b": 0}
    assert assign_slots(first, config("a", outputs=[ports])).gone == ()


def test_workers_with_the_same_topic_are_refused() -> None:
    same = {**BY_TOPIC, "topic": "kv@{source}{rank}"}
    one = config("a", "a1", outputs=[same])
    sources = tuple(each.model_copy(update={"data_parallel_size": 12}) for each in one.sources)
    with pytest.raises(ConfigError, match=r"would both have the topic 'kv@a1[01]'"):
        assign_slots(Placement(), one.model_copy(update={"sources": sources}))
    with pytest.raises(ConfigError, match="would both have the topic 'kv@a1"):
        config("a", "a1", outputs=[same], ranks=12)


def test_a_removed_worker_loses_its_slot_if_a_new_worker_has_its_topic() -> None:
    same = {**BY_TOPIC, "topic": "kv@{source}{rank}"}
    before = Placement({Worker("a", 11): 0}, (Worker("a", 11),))
    after = assign_slots(before, config("a1", outputs=[same]))
    assert Worker("a", 11) in after.slots  # the topics are kv@a11 and kv@a10, so both fit
    before = Placement({Worker("a", 10): 0}, (Worker("a", 10),))
    assert Worker("a", 10) not in assign_slots(before, config("a1", outputs=[same])).slots


@given(st.lists(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=4, unique=True), max_size=12))
def test_workers_keep_unique_slots_after_any_changes_of_the_list(lists: list[list[str]]) -> None:
    """After any changes of the sources, each slot belongs to one worker, and a known worker keeps its slot.

    At most five workers have a slot: that is the test's limit of sources.
    """
    placement = Placement()
    for names in lists:
        before, placement = placement, assign_slots(placement, config(*names, most=5))
        assert len(set(placement.slots.values())) == len(placement.slots) <= 5
        assert {worker.source for worker in placement.slots.keys() - set(placement.gone)} == set(names)
        assert max(placement.slots.values()) < 5
        for worker, slot in placement.slots.items():
            assert before.slots.get(worker, slot) == slot
        lost = [worker for worker in before.slots if worker not in placement.slots]
        assert not lost or len(placement.slots) == 5
        assert set(lost) <= {*before.gone, *(worker for worker in before.slots if worker.source not in names)}


def test_a_kept_placement_is_read_again() -> None:
    made, reservations = config("a", "b"), SeqReservations(None)
    assert read_placement(reservations, made) == Placement()
    kept = forget(assign_slots(assign_slots(Placement(), made), config("b")), [7, 5])
    keep_placement(reservations, made, kept)
    assert kept.forgotten == 7
    assert read_placement(reservations, made) == kept
    ports = config("a", outputs=[{"endpoint": "ipc:///run/out"}])
    keep_placement(reservations, ports, Placement())
    assert read_placement(reservations, ports) == Placement(), "slots follow the list"
    assert read_placement(reservations, made) == kept


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b'{"version":"kvbus\xadslots"}',
        b'{"version":"kvbus-slots-1","slots":[["a",0,1000000000]],"gone":[],"forgotten":0}',
        b'{"version":"kvbus-slots-1","slots":[["a",0,0],["b",0,0]],"gone":[],"forgotten":0}',
    ],
)
def test_a_damaged_placement_is_read_as_empty(damage: bytes) -> None:
    reservations = SeqReservations(None)
    reservations.keep("slots", damage)
    assert read_placement(reservations, config("a", "b")) == Placement()
