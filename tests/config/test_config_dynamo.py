"""Tests for outputs of `type: dynamo`: the defaults that the type sets, and the keys that it excludes."""

from __future__ import annotations

SOURCES = "sources: [{name: e}]\n"


def test_type_dynamo_sets_profile_and_topic_and_no_replay(read):
    output = read(f"{SOURCES}outputs: [{{type: dynamo}}]").outputs[0]
    assert (output.profile, output.topic, output.replay_endpoint) == ("dynamo-plane", "{source}@{rank}", None)
    assert output.dynamo is None


def test_an_output_accepts_every_key_of_dynamo(read):
    keys = "discovery: 'http://etcd:2379/', namespace: n, component: c, endpoint: g, advertise: h, workers: {e: 7}"
    plane = read(f"{SOURCES}outputs: [{{type: dynamo, endpoint: 'tcp://*:1', dynamo: {{{keys}}}}}]").outputs[0].dynamo
    assert plane.model_dump() == {
        "discovery": "http://etcd:2379",
        "namespace": "n",
        "component": "c",
        "endpoint": "g",
        "advertise": "h",
        "workers": {"e": 7},
    }
