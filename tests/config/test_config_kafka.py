"""Tests for outputs that write to a log: the keys' defaults, and the keys that such an output must not have."""

from __future__ import annotations

import pytest

HEAD = "model: m\nsources: [{name: e}]\n"


def test_type_kafka_sets_its_defaults(read):
    output = read(f"{HEAD}outputs: [{{type: kafka, endpoint: 'tcp://kafka-0:9092'}}]").outputs[0]
    assert (output.bind, output.token_ids, output.heartbeat, output.replay_endpoint) == (False, "drop", 0, None)
    assert {output.stream_endpoints(slot).endpoint for slot in (0, 60_000)} == {"tcp://kafka-0:9092"}
    assert output.kafka is None


def test_types_nats_and_redis_set_the_same_defaults_as_kafka(read):
    output = read(f"{HEAD}outputs: [{{type: nats, endpoint: 'tcp://nats-0:4222'}}]").outputs[0]
    assert (output.bind, output.token_ids, output.heartbeat, output.replay_endpoint) == (False, "drop", 0, None)
    assert (output.nats, output.log.stream, output.log.more_servers) == (None, "kvbus", ())
    output = read(f"{HEAD}outputs: [{{type: redis, endpoint: 'tcp://redis-0:6379'}}]").outputs[0]
    assert (output.bind, output.token_ids, output.heartbeat, output.replay_endpoint) == (False, "drop", 0, None)
    assert {output.stream_endpoints(slot).endpoint for slot in (0, 60_000)} == {"tcp://redis-0:6379"}
    assert output.redis is None
    assert (output.log.prefix, output.log.database, output.log.retention) == ("kvbus", 0, 300.0)


def test_an_output_accepts_every_key_of_kafka(read):
    keys = "topic: a.b, cluster: eu, more_servers: ['tcp://kafka-1:9092'], state_every: 60, "
    keys += "tls_ca_file: /a, tls_certificate_file: /c, tls_key_file: /k, username: u, password_file: /p"
    text = f"{HEAD}outputs: [{{type: kafka, endpoint: 'tcp://k:9092', token_ids: keep, kafka: {{{keys}}}}}]"
    output = read(text).outputs[0]
    assert output.token_ids == "keep"
    assert output.kafka.model_dump(mode="json") == {
        "topic": "a.b",
        "cluster": "eu",
        "more_servers": ["tcp://kafka-1:9092"],
        "state_every": 60.0,
        "tls_ca_file": "/a",
        "tls_certificate_file": "/c",
        "tls_key_file": "/k",
        "username": "u",
        "password_file": "/p",
    }


@pytest.mark.parametrize(
    ("keys", "key", "says"),
    [
        (
            "type: kafka, endpoint: 'ipc://k'",
            "outputs[0].endpoint",
            "type: kafka needs the address of a Kafka server",
        ),
        ("type: kafka, endpoint: 'tcp://k:1', bind: true", "outputs[0].bind", "needs bind: false"),
        (
            "type: kafka, endpoint: 'tcp://k:1', on_subscribe: nothing",
            "outputs[0].on_subscribe",
            "needs on_subscribe: 'state'",
        ),
        ("type: kafka, endpoint: 'tcp://k:1', profile: sglang", "outputs[0].profile", "needs profile: 'vllm'"),
        ("type: kafka, endpoint: 'tcp://k:1', topic: a", "outputs[0].topic", "type: kafka needs topic"),
        ("type: kafka, endpoint: 'tcp://k:1', layout: merged", "outputs[0].layout", "needs layout: 'per_source'"),
        (
            "type: kafka, endpoint: 'tcp://k:1', replay_endpoint: 'tcp://*:2'",
            "outputs[0].replay_endpoint",
            "does not support this",
        ),
        (
            "type: kafka, endpoint: 'tcp://k:1', kafka: {topic: 'a b'}",
            "outputs[0].kafka.topic",
            "may have only letters",
        ),
        ("type: nats, endpoint: 'ipc://n'", "outputs[0].endpoint", "needs the address of a NATS server"),
        ("type: nats, endpoint: 'tcp://n:1', nats: {stream: a.b}", "outputs[0].nats.stream", "may have only letters"),
        ("type: redis, endpoint: 'ipc://r'", "outputs[0].endpoint", "needs the address of a Redis server"),
        (
            "type: kafka",
            "outputs[0].endpoint",
            "needs the address of a Kafka server; for example endpoint: tcp://kafka-0:9092",
        ),
        (
            "type: kafka, endpoint: 'kafka://k:9'",
            "outputs[0].endpoint",
            "these keys: type: kafka, endpoint: tcp://k:9, kafka: {topic: kvbus}",
        ),
        (
            "type: redis, endpoint: 'tcp://r:1', redis: {prefix: 'a{b}'}",
            "outputs[0].redis.prefix",
            "may have only letters",
        ),
        ("type: redis, endpoint: 'tcp://r:1', redis: {retention: 59}", "outputs[0].redis.retention", "at least 60"),
        ("type: redis, endpoint: 'tcp://r:1', kafka: {topic: a}", "outputs[0].kafka", "the type is redis"),
        ("type: redis, endpoint: 'tcp://r:1', redis: {username: u}", "outputs[0].redis.tls_ca_file", "needed if"),
        ("endpoint: 'tcp://*:1', kafka: {topic: a}", "outputs[0].kafka", "only type: kafka has these keys"),
    ],
)
def test_impossible_settings_of_a_log_output_are_reported(problems, keys, key, says):
    assert says in problems(f"{HEAD}outputs: [{{{keys}}}]")[key]
