"""Outputs of `type: kafka`: what follows from the type, and what cannot be with it."""

from __future__ import annotations

import pytest

HEAD = "model: m\nsources: [{name: e}]\n"


def test_what_follows_from_the_type(read):
    output = read(f"{HEAD}outputs: [{{type: kafka, endpoint: 'tcp://kafka-0:9092'}}]").outputs[0]
    assert (output.bind, output.token_ids, output.heartbeat, output.replay_endpoint) == (False, "drop", 0, None)
    assert {output.stream_endpoints(slot).endpoint for slot in (0, 60_000)} == {"tcp://kafka-0:9092"}
    assert output.kafka is None


def test_everything_that_may_be_said(read):
    keys = "topic: a.b, cluster: eu, more_servers: ['tcp://kafka-1:9092'], state_every: 60"
    text = f"{HEAD}outputs: [{{type: kafka, endpoint: 'tcp://k:9092', token_ids: keep, kafka: {{{keys}}}}}]"
    output = read(text).outputs[0]
    assert output.token_ids == "keep"
    assert output.kafka.model_dump() == {
        "topic": "a.b",
        "cluster": "eu",
        "more_servers": ("tcp://kafka-1:9092",),
        "state_every": 60.0,
    }


@pytest.mark.parametrize(
    ("keys", "key", "says"),
    [
        ("type: kafka, endpoint: 'ipc://k'", "outputs[0].endpoint", "Kafka is reached over TCP alone"),
        ("type: kafka, endpoint: 'tcp://k:1', bind: true", "outputs[0].bind", "bind: false alone"),
        ("type: kafka, endpoint: 'tcp://k:1', on_subscribe: nothing", "outputs[0].on_subscribe", "'state' alone"),
        ("type: kafka, endpoint: 'tcp://k:1', profile: sglang", "outputs[0].profile", "'vllm' alone"),
        ("type: kafka, endpoint: 'tcp://k:1', topic: a", "outputs[0].topic", "type: kafka goes with topic"),
        ("type: kafka, endpoint: 'tcp://k:1', layout: merged", "outputs[0].layout", "'per_source' alone"),
        (
            "type: kafka, endpoint: 'tcp://k:1', replay_endpoint: 'tcp://*:2'",
            "outputs[0].replay_endpoint",
            "no such thing",
        ),
        ("type: kafka, endpoint: 'tcp://k:1', kafka: {topic: 'a b'}", "outputs[0].kafka.topic", "must be letters"),
        ("endpoint: 'tcp://*:1', kafka: {topic: a}", "outputs[0].kafka", "only type: kafka has these keys"),
    ],
)
def test_what_cannot_be_is_said(problems, keys, key, says):
    assert says in problems(f"{HEAD}outputs: [{{{keys}}}]")[key]
