"""Outputs of `type: dynamo`: what follows from the type, and what cannot be with it."""

from __future__ import annotations

import pytest

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


@pytest.mark.parametrize(
    ("keys", "key", "says"),
    [
        ("profile: vllm", "profile", "type: dynamo goes with profile: dynamo-plane alone"),
        ("topic: kv", "topic", "type: dynamo goes with topic: {source}@{rank} alone"),
        ("bind: false, endpoint: 'tcp://router:1'", "bind", "type: dynamo goes with bind: true alone"),
        ("layout: merged", "layout", "type: dynamo goes with layout: per_source alone"),
        ("replay_endpoint: 'tcp://*:1'", "replay_endpoint", "Dynamo's event plane has no such thing"),
        ("snapshot_endpoint: 'tcp://*:1'", "snapshot_endpoint", "Dynamo's event plane has no such thing"),
        ("endpoint: 'ipc:///x'", "endpoint", "Dynamo's frontends connect over TCP alone"),
        ("dynamo: {workers: {f: 1}}", "dynamo", "workers names 'f', and no source has this name"),
        ("dynamo: {workers: {e: x}}", "dynamo.workers.e", "must be a whole number"),
        ("dynamo: {workers: {e: -1}}", "dynamo.workers.e", "at least 0"),
        ("dynamo: {discovery: /tmp}", "dynamo.discovery", "must be file:///DIRECTORY or http://host:2379"),
        ("dynamo: {discovery: 'https://etcd'}", "dynamo.discovery", "must be file:///DIRECTORY or http://host:2379"),
        ("dynamo: {discovery: 'http://etcd:x'}", "dynamo.discovery", "must be file:///DIRECTORY or http://host:2379"),
        ("dynamo: {discovery: 'file://host/x'}", "dynamo.discovery", "must be file:///DIRECTORY or http://host:2379"),
        ("dynamo: {advertise: 'h:1'}", "dynamo.advertise", "must be a host name or an address, without a port"),
        ("dynamo: {advertise: '*'}", "dynamo.advertise", "must be a host name or an address, without a port"),
        ("dynamo: {namespace: 'a/b'}", "dynamo.namespace", "must be a name without slashes and spaces"),
        ("dynamo: {component: ''}", "dynamo.component", "must be a name without slashes and spaces"),
    ],
)
def test_what_cannot_be(problems, keys, key, says):
    found = problems(f"{SOURCES}outputs: [{{type: dynamo, {keys}}}]")
    assert list(found) == [f"outputs[0].{key}"]
    assert says in found[f"outputs[0].{key}"]


def test_the_keys_belong_to_the_type(problems):
    found = problems(f"{SOURCES}outputs: [{{dynamo: {{}}}}]")
    assert "only type: dynamo has these keys, and the type is zmq" in found["outputs[0].dynamo"]
