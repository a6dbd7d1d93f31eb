from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from kvbus.config import Config, FoundRank, FoundSource, OutputConfig, SourceConfig, load, render_topic
from kvbus.config.logs import KafkaTopic, NatsStream, RedisKeys
from kvbus.core.wire.profiles import PROFILES

TWO = """
model: org/m
worker: pod
sources:
  - {name: a, endpoint: 'tcp://127.0.0.1:7000', replay_endpoint: 'tcp://127.0.0.1:7100', data_parallel_size: 2, topic: kv}
  - {name: b, endpoint: 'ipc:///run/b', bind: true}
outputs:
  - {endpoint: 'tcp://*:8000', replay_endpoint: 'tcp://*:8100', snapshot_endpoint: 'ipc:///run/s'}
  - {name: m, endpoint: 'tcp://*:8200', layout: merged}
"""


def test_a_configuration_has_a_stream_for_each_rank(read):
    streams = read(TWO).streams()
    assert streams[1].log_fields == {"source": streams[1].label, "rank": streams[1].rank}
    assert [
        (s.label, s.source_index, s.rank, s.endpoint, s.replay_endpoint, s.bind, s.topic, s.index) for s in streams
    ] == [
        ("a/0", 0, 0, "tcp://127.0.0.1:7000", "tcp://127.0.0.1:7100", False, b"kv", 0),
        ("a/1", 0, 1, "tcp://127.0.0.1:7001", "tcp://127.0.0.1:7101", False, b"kv", 1),
        ("b", 1, 0, "ipc:///run/b", None, True, b"", 2),
    ]


def test_each_stream_has_its_endpoints_at_an_output(read):
    per_source, merged = read(TWO).outputs
    assert per_source.stream_endpoints(0) == ("tcp://*:8000", "tcp://*:8100", "ipc:///run/s")
    assert per_source.stream_endpoints(2) == ("tcp://*:8002", "tcp://*:8102", "ipc:///run/s-2")
    assert merged.stream_endpoints(2) == merged.stream_endpoints(0) == ("tcp://*:8200", None, None)


@pytest.mark.parametrize("profile", PROFILES)
def test_the_replay_framing_follows_the_profile_unless_it_is_set(profile):
    assert OutputConfig(profile=profile).framing == PROFILES[profile].framing
    assert OutputConfig(profile=profile, replay_framing=3).framing == "3"
    assert OutputConfig(profile=profile, replay_framing=4).framing == "4"


def test_a_topic_is_rendered_with_its_placeholders(read):
    config = read(TWO)
    stream = config.streams()[1]
    assert render_topic("kv@{worker}@{model}", stream, config) == b"kv@pod@org/m"
    assert render_topic("{{{source}}}-{rank}", stream, config) == b"{a}-1"
    assert render_topic("é", stream, config) == "é".encode()


@pytest.mark.parametrize("topic", ["{", "}", "{}", "{0}", "{model.x}", "{model[0]}", "{model!r}", "{rank:04}", "{pod}"])
def test_a_topic_with_an_unknown_placeholder_is_refused(topic):
    with pytest.raises(ValidationError, match=r"placeholder|braces"):
        OutputConfig(topic=topic)


def test_a_loaded_configuration_cannot_be_changed(read):
    config = read(TWO)
    with pytest.raises(ValidationError):
        config.model = "x"
    with pytest.raises(ValidationError):
        config.sources[0].name = "x"
    with pytest.raises(AttributeError):
        config.sources.append(config.sources[0])


def test_the_http_address_is_loopback_by_default_or_none(read):
    assert read(TWO).http_address == ("127.0.0.1", 9477)
    assert read(TWO, http="null").http_address is None


def test_the_printed_configuration_loads_as_the_same_configuration(read, tmp_path):
    config = read(TWO)
    path = tmp_path / "effective.yaml"
    path.write_text(config.to_yaml())
    assert load(path, env={}, overrides={}) == config


TEXT = st.text().filter(str.isprintable)


@given(model=TEXT | st.none(), worker=TEXT, topic=TEXT)
@settings(deadline=None)
def test_any_text_is_unchanged_after_writing_and_reading_yaml(tmp_path_factory, model, worker, topic):
    config = Config.model_validate({"model": model, "worker": worker, "sources": [{"topic": topic}], "outputs": [{}]})
    path = tmp_path_factory.mktemp("yaml") / "effective.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8", newline="")
    assert load(path, env={}, overrides={}) == config


@pytest.mark.parametrize(
    ("keys", "gets"),
    [
        ({}, "state"),
        ({"on_subscribe": "nothing"}, "nothing"),
        ({"curve_secret_key_file": "/s", "curve_client_keys": "/c"}, "state"),
    ],
)
def test_an_output_sends_the_state_on_subscription_by_default(keys, gets):
    overrides = {"sources": [{}], "outputs": [{"endpoint": "tcp://*:7000", **keys}]}
    assert load(None, env={}, overrides=overrides).outputs[0].on_subscribe == gets


def test_an_output_type_may_set_its_own_defaults():
    output = OutputConfig.model_validate({"type": "dynamo"})
    assert (output.profile, output.replay_endpoint) == ("dynamo-plane", None)


def test_a_discovered_source_has_the_endpoints_of_its_discovered_ranks():
    ranks = (FoundRank(0, "tcp://a:1", "tcp://a:2"), FoundRank(3, "tcp://b:7", None))
    found = FoundSource.model_construct(
        **{**dict(SourceConfig()), "name": "pod", "ranks": ranks, "data_parallel_size": 2}
    )
    assert found.rank_slots(5) == [(0, 5), (3, 6)]
    assert found.rank_endpoints(3) == ("tcp://b:7", None, None)
    assert SourceConfig.model_validate({"discover": {"file": {"path": "/a"}}}).rank_slots(0) == []


@pytest.mark.parametrize("rule", ["count", "ignore", "last"])
def test_the_duplicates_setting_applies_to_every_stream(read, rule):
    assert {stream.duplicates for stream in read(TWO).streams()} == {"count"}
    assert {stream.duplicates for stream in read(f"duplicates: {rule}\n{TWO}").streams()} == {rule}


@pytest.mark.parametrize(
    ("type_", "keys"), [("kafka", KafkaTopic), ("nats", NatsStream), ("redis", RedisKeys), ("zmq", None)]
)
def test_each_log_type_has_its_section_of_keys(type_, keys):
    assert OutputConfig(type=type_).log == (keys and keys())
    if keys is not None:
        said = keys(cluster="east")
        output = OutputConfig(type=type_, **{type_: said})
        assert output.log == said
        assert output.stream_endpoints(3) == output.stream_endpoints(0), "every stream is at the same address"
