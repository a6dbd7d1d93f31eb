"""Tests by example for blocks that an engine keeps on one medium under several localities and owners.

`tests/properties/test_residencies.py` tests random histories.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvbus.core.types import Filtered, Reason
from kvbus.core.wire.profiles import PROFILES
from tests.core.dsl import Bench
from tests.core.outputs.test_fitting import Bus
from tests.doubles.payloads import cleared, plain_all, removed, store
from tests.doubles.router import events_of

ARRAYS = [name for name, each in PROFILES.items() if each.wire.encoding == "array"]
KNOWS = [name for name, each in PROFILES.items() if each.residencies != "one"]
OTHERS = [name for name, each in PROFILES.items() if each.residencies == "one"]


def on(medium: str, **names: Any) -> Any:
    """Return a function that stores or removes a block on a medium, under the names of a locality and an owner."""
    return lambda event, block: event([block], medium=medium, **names)


KVCR, PLAIN = on("CPU", ownership="kvcr"), on("CPU")
REMOTE, LOCAL, MISSING = on("STORAGE", locality="REMOTE"), on("STORAGE", locality="LOCAL"), on("STORAGE")


def told(payloads: list[bytes]) -> list[tuple[Any, ...]]:
    """Return the stores (+) and removals (-) in batches, each with its block, locality and owner."""
    return [
        ("+" if event["type"] == "BlockStored" else "-", block, event.get("locality"), event.get("ownership"))
        for payload in payloads
        for event in events_of(payload)
        for block in event.get("block_hashes", ())
    ]


@pytest.mark.parametrize("profile", KNOWS)
def test_a_router_that_knows_owners_gets_each_residency(profile: str) -> None:
    bus = Bus(profile)
    assert told(bus.say(0, KVCR(store, 2))) == [("+", 2, None, "kvcr")]
    assert told(bus.say(0, PLAIN(store, 2))) == [("+", 2, None, None)]
    assert set(told(bus.state())) == {("+", 2, None, "kvcr"), ("+", 2, None, None)}
    assert told(bus.say(0, PLAIN(removed, 2))) == [("-", 2, None, None)]
    assert told(bus.state()) == [("+", 2, None, "kvcr")]
    assert told(bus.say(0, KVCR(removed, 2))) == [("-", 2, None, "kvcr")]
    assert told(bus.state()) == []


@pytest.mark.parametrize("profile", KNOWS)
def test_a_router_that_knows_localities_gets_each_residency(profile: str) -> None:
    bus = Bus(profile)
    assert told(bus.say(0, REMOTE(store, 1), LOCAL(store, 1))) == [("+", 1, "REMOTE", None), ("+", 1, "LOCAL", None)]
    assert told(bus.say(0, LOCAL(store, 2), REMOTE(store, 2))) == [("+", 2, "LOCAL", None), ("+", 2, "REMOTE", None)]
    assert told(bus.say(0, LOCAL(removed, 2))) == [("-", 2, "LOCAL", None)]
    assert set(told(bus.state())) == {("+", 1, "REMOTE", None), ("+", 1, "LOCAL", None), ("+", 2, "REMOTE", None)}


@pytest.mark.parametrize("profile", OTHERS)
def test_a_router_that_does_not_know_the_fields_gets_one_block(profile: str) -> None:
    bus = Bus(profile)
    names = [block[:2] for block in told(bus.say(0, REMOTE(store, 1), LOCAL(store, 1), KVCR(store, 2)))]
    assert names == [("+", 1), ("+", 2)]
    assert bus.say(0, PLAIN(store, 2), REMOTE(removed, 1)) == []
    assert {block[:2] for block in told(bus.state())} == {("+", 1), ("+", 2)}
    assert [block[:2] for block in told(bus.say(0, KVCR(removed, 2), LOCAL(removed, 1)))] == [("-", 1)]
    assert [block[:2] for block in told(bus.say(0, LOCAL(store, 3), PLAIN(removed, 2)))] == [("+", 3), ("-", 2)]
    assert {block[:2] for block in told(bus.state())} == {("+", 3)}


def test_dynamo_takes_a_missing_locality_for_local() -> None:
    bus = Bus("dynamo")
    assert told(bus.say(0, MISSING(store, 1))) == [("+", 1, None, None)]
    assert bus.say(0, LOCAL(store, 1)) == []
    assert len(told(bus.state())) == 1
    assert bus.say(0, MISSING(removed, 1)) == []
    assert told(bus.say(0, LOCAL(removed, 1))) == [("-", 1, "LOCAL", None)]


@pytest.mark.parametrize(("stored", "gone"), [(MISSING, LOCAL), (LOCAL, MISSING)], ids=["missing", "LOCAL"])
@pytest.mark.parametrize("group", [None, 3])
def test_a_missing_locality_and_local_stand_for_each_other_in_removals(stored: Any, gone: Any, group: Any) -> None:
    bench = Bench()
    bench.feed(stored(store, 1) | ({} if group is None else {"group_idx": group}))
    (left,) = bench.feed(gone(removed, 1) | ({} if group is None else {"group_idx": group}))
    assert left.get("locality") == stored(store, 1).get("locality"), "the removal names the residency as the store did"
    bench.feed(REMOTE(store, 1))
    assert bench.feed(LOCAL(removed, 1), MISSING(removed, 1), on("STORAGE", ownership="x")(removed, 1)) == []
    assert bench.filtered == {Filtered.UNKNOWN_BLOCK: 3}


def test_a_removal_without_a_group_applies_to_the_residency_that_it_names() -> None:
    bench = Bench()
    bench.feed(store([1], group=3, medium="CPU", ownership="kvcr"), store([1], group=4, medium="CPU"))
    assert bench.feed(KVCR(removed, 1)) == plain_all([removed([1], medium="CPU", group=3, ownership="kvcr")])
    assert bench.feed(KVCR(removed, 1)) == []


def test_further_owners_than_the_limit_are_refused() -> None:
    bench = Bench(max_owners=2)
    out = bench.feed(*(on("CPU", ownership=owner)(store, 1) for owner in ("a", "b", "c")), PLAIN(store, 1))
    assert [event.get("ownership") for event in out] == ["a", "b", None]
    assert bench.rejected == {Reason.TOO_MANY_OWNERS: 1}
    assert bench.normalizer.known_owners == 2
    bench.restart()
    assert bench.feed(on("CPU", ownership="d")(store, 2)) == []
    assert len(bench.feed(on("CPU", ownership="b")(store, 2))) == 1


@pytest.mark.parametrize("field", ["locality", "ownership"])
def test_a_name_that_is_too_long_is_refused(field: str) -> None:
    bench = Bench()
    assert len(bench.feed(on("CPU", **{field: "x" * 256})(store, 1))) == 1
    assert bench.feed(on("CPU", **{field: "x" * 257})(store, 1), on("CPU", **{field: "x" * 257})(removed, 1)) == []
    assert bench.rejected == {Reason.TOO_MANY_OWNERS: 1}


@pytest.mark.parametrize("value", [None, 7, ["LOCAL"]], ids=str)
def test_a_value_that_is_not_a_text_names_no_residency(value: Any) -> None:
    bench = Bench()
    bench.feed(on("CPU", locality=value, ownership=value)(store, 1))
    assert bench.feed(PLAIN(store, 1)) == []
    assert bench.feed(on("CPU", ownership=value)(removed, 1)) == []
    assert bench.feed(PLAIN(removed, 1)) == plain_all([PLAIN(removed, 1)])


def test_a_clear_of_a_pod_becomes_one_removal_of_a_block_with_several_residencies() -> None:
    bus = Bus("llm-d", 2)
    bus.say(0, KVCR(store, 1), PLAIN(store, 1), store([2], 1, medium="CPU"))
    bus.say(1, store([7]))
    assert [block[:2] for block in told(bus.say(0, cleared(), cleared()))] == [("-", 2), ("-", 1)]
