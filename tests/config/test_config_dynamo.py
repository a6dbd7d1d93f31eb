"""Tests for outputs of `type: dynamo`: the defaults that the type sets, and the keys that it excludes."""

from __future__ import annotations

SOURCES = "sources: [{name: e}]\n"


def test_what_follows_from_the_type(read):
    output = read(f"{SOURCES}outputs: [{{type: dynamo}}]").outputs[0]
    assert (output.profile, output.topic, output.replay_endpoint) == ("dynamo-plane", "{source}@{rank}", None)
    assert output.dynamo is None


def test_everything_that_may_be_said(read):
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
