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


def test_the_first_time_the_list_counts() -> None:
    assert slots(assign_slots(Placement(), config("b", "a", ranks=2))) == {"b": 0, "b1": 1, "a": 2, "a1": 3}


def test_a_name_keeps_its_slot_and_so_does_one_that_is_gone() -> None:
    first = assign_slots(Placement(), config("a", "b", "c"))
    second = assign_slots(first, config("d", "c", "a"))
    assert slots(second) == {"a": 0, "b": 1, "c": 2, "d": 3}
    assert second.gone == (Worker("b", 0),)
    third = assign_slots(second, config("b"))
    assert third.streams(config("b"))[1].label == "b"
    assert set(third.gone_slots) == {0, 2, 3}


def test_more_ranks_leave_the_others_where_they_are() -> None:
    first = assign_slots(Placement(), config("a", "b"))
    assert slots(assign_slots(first, config("a", "b", ranks=2))) == {"a": 0, "b": 1, "a1": 2, "b1": 3}


def test_the_one_that_left_first_makes_room() -> None:
    first = assign_slots(Placement(), config("a", "b", "c", most=3))
    second = assign_slots(assign_slots(first, config("a", "c", most=3)), config("c", most=3))
    assert second.gone == (Worker("b", 0), Worker("a", 0))
    third = assign_slots(second, config("c", "d", most=3))
    assert slots(third) == {"a": 0, "d": 1, "c": 2}


def test_there_are_no_more_than_the_limit_says() -> None:
    with pytest.raises(ConfigError, match=r"max_sources: 3"):
        config("a", "b", "c", most=2)
    two, three = config("a", "b", most=2), config("a", "b", "c")
    with pytest.raises(ConfigError, match=r"max_sources: 3"):
        assign_slots(Placement(), two.model_copy(update={"sources": three.sources}))


def test_a_slot_of_its_own_goes_first() -> None:
    first = assign_slots(Placement(), config("a", "b"))
    second = assign_slots(first, config("b", "c", c=0))
    assert slots(second) == {"b": 1, "c": 0}
    assert second.gone == ()


def test_where_an_output_is_per_source_the_list_says_it() -> None:
    ports = {"name": "ports", "endpoint": "ipc:///run/ports"}
    first = assign_slots(Placement(), config("a", "b", outputs=[BY_TOPIC, ports]))
    assert slots(assign_slots(first, config("b", outputs=[BY_TOPIC, ports]))) == {"b": 0}
    assert assign_slots(first, config("a", outputs=[ports])).gone == ()


def test_two_that_would_have_one_topic_are_refused() -> None:
    same = {**BY_TOPIC, "topic": "kv@{source}{rank}"}
    one = config("a", "a1", outputs=[same])
    sources = tuple(each.model_copy(update={"data_parallel_size": 12}) for each in one.sources)
    with pytest.raises(ConfigError, match=r"would both have the topic 'kv@a1[01]'"):
        assign_slots(Placement(), one.model_copy(update={"sources": sources}))
    with pytest.raises(ConfigError, match="would both have the topic 'kv@a1"):
        config("a", "a1", outputs=[same], ranks=12)


def test_one_that_is_gone_yields_its_topic() -> None:
    same = {**BY_TOPIC, "topic": "kv@{source}{rank}"}
    before = Placement({Worker("a", 11): 0}, (Worker("a", 11),))
    after = assign_slots(before, config("a1", outputs=[same]))
    assert Worker("a", 11) in after.slots  # the topics are kv@a11 and kv@a10, so both fit
    before = Placement({Worker("a", 10): 0}, (Worker("a", 10),))
    assert Worker("a", 10) not in assign_slots(before, config("a1", outputs=[same])).slots


@given(st.lists(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=4, unique=True), max_size=12))
def test_whatever_the_list_does(lists: list[list[str]]) -> None:
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


def test_what_is_kept_is_read_again() -> None:
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
def test_what_cannot_be_used_is_left_out(damage: bytes) -> None:
    reservations = SeqReservations(None)
    reservations.keep("slots", damage)
    assert read_placement(reservations, config("a", "b")) == Placement()
