"""Addresses that two would have, ports past the last one, and wildcards to connect to."""

from __future__ import annotations

import pytest

from kvbus.config import ConfigError, load
from tests.config.texts import text_of

ENGINE = "{endpoint: 'tcp://10.0.0.1:5557'}"


@pytest.mark.parametrize(
    ("sources", "outputs", "more", "key", "other"),
    [
        # ranks of one source: the publisher of rank 1 is the replay of rank 0
        ("[{data_parallel_size: 2}]", "[{layout: merged}]", "", "sources[0].replay_endpoint", "sources[0].endpoint"),
        # ranks of two sources
        (
            "[{name: a, endpoint: 'tcp://10.0.0.1:7000', data_parallel_size: 3}, {name: b, endpoint: 'tcp://10.0.0.1:7002'}]",
            "[{layout: merged}]",
            "",
            "sources[1].endpoint",
            "sources[0].endpoint",
        ),
        # streams of one output
        (
            "[{name: a, endpoint: 'ipc:///a'}, {name: b, endpoint: 'ipc:///b'}]",
            "[{}]",
            "",
            "outputs[0].replay_endpoint",
            "outputs[0].endpoint",
        ),
        # snapshot against replay
        (
            f"[{ENGINE}]",
            "[{endpoint: 'tcp://*:7000', replay_endpoint: 'tcp://*:7001', snapshot_endpoint: 'tcp://*:7001'}]",
            "",
            "outputs[0].snapshot_endpoint",
            "outputs[0].replay_endpoint",
        ),
        # two outputs, a wildcard against one interface
        (
            f"[{ENGINE}]",
            "[{endpoint: 'tcp://127.0.0.1:7000'}, {name: b, endpoint: 'tcp://*:7000'}]",
            "",
            "outputs[1].endpoint",
            "outputs[0].endpoint",
        ),
        # HTTP
        (f"[{ENGINE}]", "[{endpoint: 'tcp://*:9477'}]", "", "http", "outputs[0].endpoint"),
        (
            f"[{ENGINE}]",
            "[{endpoint: 'tcp://127.0.0.1:9000'}]",
            "http: localhost:9000",
            "http",
            "outputs[0].endpoint",
        ),
        # a source that kvbus binds
        (
            "[{endpoint: 'tcp://*:7000', bind: true}]",
            "[{endpoint: 'tcp://*:7000'}]",
            "",
            "outputs[0].endpoint",
            "sources[0].endpoint",
        ),
        # the engine's own port on this machine
        ("[{}]", "[{endpoint: 'tcp://*:5557'}]", "", "outputs[0].endpoint", "sources[0].endpoint"),
        # local sockets, with the suffix of rank 1
        (
            "[{name: a, endpoint: 'ipc:///kv', data_parallel_size: 2}, {name: b, endpoint: 'ipc:///kv-1'}]",
            "[{layout: merged}]",
            "",
            "sources[1].endpoint",
            "sources[0].endpoint",
        ),
    ],
)
def test_two_at_one_address(problems, sources, outputs, more, key, other):
    found = problems(text_of(sources, outputs, more))
    assert set(found) == {key}
    assert f"is taken by {other}" in found[key]


@pytest.mark.parametrize(
    ("sources", "outputs"),
    [
        ("[{data_parallel_size: 2, endpoint: 'tcp://127.0.0.1:5557', replay_endpoint: 'tcp://127.0.0.1:5559'}]",
         "[{endpoint: 'tcp://*:5657', replay_endpoint: 'tcp://*:5659'}]"),
        # the same port at different hosts
        ("[{name: a, endpoint: 'tcp://10.0.0.1:5557'}, {name: b, endpoint: 'tcp://10.0.0.2:5557'}]",
         "[{layout: merged}]"),
        # kvbus takes the port that the engine has on another machine
        ("[{endpoint: 'tcp://10.0.0.1:5557'}]", "[{endpoint: 'tcp://*:5557'}]"),
        # different interfaces
        ("[{}]", "[{endpoint: 'tcp://127.0.0.2:5557'}]"),
        # dialling out claims nothing here
        ("[{}]", "[{endpoint: 'tcp://127.0.0.1:9477', bind: false}]"),
        ("[{endpoint: 'ipc:///kv-{rank}', data_parallel_size: 2}]", "[{layout: merged}]"),
    ],
)  # fmt: skip
def test_no_contradiction(read, sources, outputs):
    assert read(text_of(sources, outputs)).sources


def test_one_problem_for_each_pair_of_keys(read):
    with pytest.raises(ConfigError) as caught:
        read(text_of("[{data_parallel_size: 64}]", "[{layout: merged}]"))
    assert [problem.key for problem in caught.value.problems] == ["sources[0].replay_endpoint"]


def test_ports_past_the_last_one(problems):
    found = problems(
        text_of("[{endpoint: 'tcp://10.0.0.1:65530', data_parallel_size: 8}]", "[{endpoint: 'tcp://*:65535'}]")
    )
    assert "rank 7 would be at port 65537" in found["sources[0].endpoint"]
    assert "stream 7 would be at port" in found["outputs[0].endpoint"]


@pytest.mark.parametrize(
    ("sources", "outputs", "key"),
    [
        ("[{endpoint: 'tcp://*:5557'}]", "[{}]", "sources[0].endpoint"),
        ("[{endpoint: 'tcp://0.0.0.0:5557', bind: true, replay_endpoint: 'tcp://*:6558'}]", "[{}]",
         "sources[0].replay_endpoint"),
        ("[{}]", "[{endpoint: 'tcp://*:7557', bind: false}]", "outputs[0].endpoint"),
    ],
)  # fmt: skip
def test_a_wildcard_cannot_be_connected_to(problems, sources, outputs, key):
    found = problems(text_of(sources, outputs))
    assert set(found) == {key}
    assert "it must name a host" in found[key]


def test_a_slot_is_a_port(problems):
    sources = "[{name: a, endpoint: 'ipc:///a'}, {name: c, endpoint: 'ipc:///c', slot: 5}]"
    found = problems(text_of(sources, "[{endpoint: 'tcp://*:7000', replay_endpoint: 'tcp://*:7005'}]"))
    assert "port 7005 (stream 0) is taken by outputs[0].endpoint (stream 5)" in found["outputs[0].replay_endpoint"]


@pytest.mark.parametrize(
    ("output", "taken"),
    [
        ("{endpoint: 'tcp://*:5557', interpose: true}", False),
        ("{endpoint: 'tcp://*:5557'}", True),
        ("{endpoint: 'tcp://127.0.0.1:5557', interpose: true}", True),
        ("{endpoint: 'tcp://*:5657', replay_endpoint: 'tcp://*:5557', interpose: true}", True),
    ],
)
def test_engines_and_routers_share_a_listener_only_where_it_is_said(problems, output, taken):
    found = problems(f"sources: [{{bind: true, endpoint: 'tcp://*:5557'}}]\nhttp: x\noutputs: [{output}]")
    said = [text for key, text in found.items() if key.startswith("outputs[0].")]
    assert any("is taken by sources[0].endpoint (source)" in text for text in said) is taken


@pytest.mark.parametrize(
    ("one", "other", "may"),
    [("kv@a@m", "kv@b@m", True), ("kv@a", "kv@ab", False), ("", "kv@b@m", False), ("", "", False)],
)
def test_two_sources_share_an_endpoint_if_their_topics_exclude_each_other(one: str, other: str, may: bool) -> None:
    at = {"endpoint": "tcp://engine:5557", "replay_endpoint": "tcp://engine:5558"}
    sources = [{"name": "one", "topic": one, **at}, {"name": "other", "topic": other, **at}]
    sources.append({"name": "alone", "endpoint": "tcp://engine:5600"})
    outputs = [{"endpoint": "tcp://*:6000", "layout": "merged"}]
    if may:
        config = load(None, env={}, overrides={"sources": sources, "outputs": outputs})
        assert [stream.shared for stream in config.streams()] == [True, True, False]
    else:
        with pytest.raises(ConfigError, match="may share it if neither one's topic begins with the other's"):
            load(None, env={}, overrides={"sources": sources, "outputs": outputs})
