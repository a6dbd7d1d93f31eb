"""Tests for how discovered engines become sources: their names and endpoints, the limit of sources, and engines
that leave.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvbus.common.errors import Problem
from kvbus.config import Config, load
from kvbus.core.findings.finding import Findings
from kvbus.daemon.found import Listed, found_findings, with_found
from kvbus.daemon.placement import Placement, assign_slots
from kvbus.parts.discovery.contract import Engine, Publisher

DISCOVER = {"file": {"path": "/run/engines.yaml"}}


def config(
    *entries: str, fixed: tuple[str, ...] = (), room: int = 100, by_topic: str | None = None, **more: Any
) -> Config:
    sources: list[dict[str, Any]] = [{"name": name, "endpoint": f"ipc:///run/{name}"} for name in fixed]
    sources += [{"name": name, "discover": DISCOVER, **more} for name in entries]
    outputs = [{"endpoint": "ipc:///run/out", "layout": "merged"}]
    if by_topic is not None:
        outputs = [{"endpoint": "ipc:///run/out", "layout": "per_topic", "topic": by_topic}]
    return load(None, env={}, overrides={"sources": sources, "outputs": outputs, "limits": {"max_sources": room}})


def engine(name: str, *endpoints: str, **more: Any) -> Engine:
    return Engine(name, tuple(Publisher(rank, endpoint) for rank, endpoint in enumerate(endpoints)), "here", **more)


def listed(*engines: Engine) -> Listed:
    made = Listed()
    made.take(engines, 0.0)
    return made


def labels(config: Config) -> list[str]:
    return [stream.label for stream in config.streams()]


def test_a_configuration_without_discovery_does_not_change():
    plain = config(fixed=("a", "b"))
    assert with_found(plain, {}, ()).config is plain


def test_the_streams_of_a_discovered_engine_have_its_properties():
    entry = config("workers", topic="kv@")
    found = listed(engine("pod", "tcp://a:1", "tcp://b:9", topic="t", api="http://a"))
    made = with_found(entry, {"workers": found}, ()).config
    first, second = made.streams()
    assert (first.label, first.endpoint, first.topic, first.rank) == ("pod/0", "tcp://a:1", b"kv@", 0)
    assert (second.label, second.endpoint, second.found) == ("pod/1", "tcp://b:9", "workers: here")
    assert made.sources[0].api == "http://a"
    assert Config.model_validate(made.to_dict()).sources[0].name == "pod"


def test_a_discovered_engine_keeps_its_topic_if_its_entry_has_none():
    found = listed(engine("pod", "tcp://a:1", topic="kv@pod"))
    assert with_found(config("workers"), {"workers": found}, ()).config.streams()[0].topic == b"kv@pod"


def test_the_first_entry_with_a_name_decides_the_endpoint():
    found = {
        "one": listed(engine("pod", "tcp://a:1")),
        "two": listed(engine("pod", "tcp://b:1"), engine("a", "ipc:///x")),
    }
    made = with_found(config("one", "two", fixed=("a",)), found, ())
    assert [stream.endpoint for stream in made.config.streams()] == ["ipc:///run/a", "tcp://a:1"]
    assert made.left_out == {("two", "pod"): "same_name", ("two", "a"): "same_name"}


def test_a_listed_engine_takes_precedence_over_a_leaving_one():
    was = listed(engine("old", "tcp://a:1"), engine("older", "tcp://c:1"))
    was.take([engine("new", "tcp://a:1")], 10.0)
    made = with_found(config("workers", room=2), {"workers": was}, ("old", "older"))
    assert [stream.label for stream in made.config.streams()] == ["new", "older"]
    was.leave(9.9)
    assert set(was.engines) == {"new", "old", "older"}
    was.leave(10.0)
    assert set(was.engines) == {"new"}
    assert was.leaving == {}


def test_an_engine_that_returns_in_time_does_not_leave():
    was = listed(engine("pod", "tcp://a:1"))
    was.take([], 10.0)
    was.take([], 20.0)
    assert was.leaving == {"pod": 10.0}
    was.take([engine("pod", "tcp://b:1")], 30.0)
    was.leave(40.0)
    assert was.engines["pod"].publishers[0].endpoint == "tcp://b:1"


def test_two_engines_with_one_name_give_the_same_result_in_any_order():
    pair = (engine("pod", "tcp://a:1"), engine("pod", "tcp://b:1"))
    assert listed(*pair).engines == listed(*reversed(pair)).engines


FAULT = Problem("annotation kvbus/port", "must be between 1 and 65535", "70000", "5557")


def test_an_engine_whose_entry_becomes_invalid_keeps_its_ranks():
    was = listed(engine("pod", "tcp://a:1", "tcp://a:2"))
    was.take([engine("pod", faults=(FAULT,)), engine("other", faults=(FAULT,))], 10.0)
    made = with_found(config("workers"), {"workers": was}, ("pod/0", "pod/1"))
    assert labels(made.config) == ["pod/0", "pod/1"]
    assert made.left_out == {("workers", "other"): "invalid"}
    said = [each.key for each in found_findings(config("workers"), {"workers": was}, made.left_out)]
    assert said == ["sources[0].discover, other", "sources[0].discover, pod"]
    was.take([engine("pod", "tcp://b:1", faults=(FAULT,), size=2)], 20.0)
    assert [each.endpoint for each in was.engines["pod"].publishers] == ["tcp://b:1", "tcp://a:2"]
    assert set(was.engines) == {"pod"}, "an engine that was never a source leaves at once"
    was.take([engine("pod", "tcp://b:1", "tcp://b:2")], 30.0)
    assert [each.endpoint for each in was.engines["pod"].publishers] == ["tcp://b:1", "tcp://b:2"]
    assert found_findings(config("workers"), {"workers": was}, {}) == []


def test_a_rank_beside_an_invalid_one_has_the_label_that_it_keeps():
    was = listed(engine("pod", "tcp://a:1", faults=(FAULT,), size=2))
    assert labels(with_found(config("workers"), {"workers": was}, ()).config) == ["pod/0"]


def test_twenty_invalid_engines_have_a_finding_each():
    was = listed(*(engine(f"pod-{n}", faults=(FAULT, FAULT)) for n in range(30)))
    said = found_findings(config("workers"), {"workers": was}, {})
    assert len(said) == len({each.key for each in said}) == 20
    assert str(said[0]).startswith(
        "the discovery workers finds pod-0 with an invalid value: annotation kvbus/port = 70000: must be between 1 and "
        "65535; for example 5557 (and 1 more) [sources[0].discover, pod-0]: "
    )


def test_present_engines_stay_if_max_sources_is_reached():
    found = {"one": listed(engine("b", "tcp://b:1"), engine("a", "tcp://a:1")), "two": listed(engine("c", "tcp://c:1"))}
    made = with_found(config("one", "two", room=2), found, ("c",))
    assert labels(made.config) == ["a", "c"]
    assert made.left_out == {("one", "b"): "max_sources"}


def test_another_order_of_omitted_engines_does_not_change_the_finding():
    rules, findings = config("one"), Findings()
    for now, names in enumerate(("ab", "ba", "cab")):
        left_out = {("one", name): "max_sources" for name in names}
        changes = findings.update(found_findings(rules, {}, left_out), float(now))
        assert [each.word for each in changes] == ["begins"][now:], names
    (finding,) = findings.standing
    assert finding.text == "kvbus does not read 3 of the discovered engines (reason max_sources)"
    assert finding.remedy == "raise limits.max_sources; one of the left-out engines is a"


def test_an_engine_whose_ranks_share_a_topic_or_an_endpoint_is_omitted():
    found = {
        "one": listed(engine("a", "tcp://a:1", "tcp://a:2"), engine("b", "tcp://b:1"), engine("c", *["tcp://c:1"] * 2))
    }
    made = with_found(config("one", by_topic="kv@{source}"), found, ())
    assert labels(made.config) == ["b"]
    assert made.left_out == {("one", "a"): "same_topic", ("one", "c"): "same_endpoint"}
    assert labels(with_found(config("one", by_topic="kv@{source}@{rank}"), found, ()).config) == ["a/0", "a/1", "b"]


def test_a_discovered_engine_gets_no_topic_of_a_configured_source():
    found = {"one": listed(engine("a-1", "tcp://a:1"))}
    made = with_found(config("one", fixed=("a",), by_topic="kv@{source}-{rank}"), found, ())
    assert made.left_out == {}
    found = {"one": listed(Engine("a", (Publisher(0, "tcp://a:1"),), "here"), engine("a-0", "tcp://b:1"))}
    made = with_found(config("one", fixed=("b",), by_topic="kv@{source}"), found, ())
    assert labels(made.config) == ["b", "a", "a-0"]


NAMES = st.sampled_from("abcdef")
SETS = st.dictionaries(
    NAMES, st.lists(st.sampled_from([f"tcp://h:{n}" for n in range(1, 8)]), min_size=1, max_size=3, unique=True)
)


@given(st.lists(st.tuples(st.sampled_from(["one", "two"]), SETS), max_size=8), st.integers(1, 6))
def test_random_discoveries_give_unique_names_and_endpoints_in_stable_slots(steps, room):
    found = {"one": Listed(), "two": Listed()}
    placement, there = Placement(), set[str]()
    for now, (entry, engines) in enumerate(steps):
        for each in found.values():
            each.leave(now)
        found[entry].take([engine(name, *endpoints) for name, endpoints in engines.items()], now + 2)
        made = with_found(config("one", "two", fixed=("fixed",), room=room), found, there)
        streams = made.config.streams()
        assert streams[0].label == "fixed"
        assert len(streams) <= room
        for key in ("label", "index", "endpoint"):
            assert len({getattr(stream, key) for stream in streams}) == len(streams)
        before, placement = placement, assign_slots(placement, made.config)
        kept = before.slots.keys() & placement.slots.keys()
        assert all(placement.slots[worker] == before.slots[worker] for worker in kept)
        assert len(placement.slots) <= room
        known = {(name, each) for name, one in found.items() for each in one.engines}
        names = {source.name for source in made.config.sources}
        assert all(each in names for name, each in known if (name, each) not in made.left_out)
        there = set(labels(made.config))
