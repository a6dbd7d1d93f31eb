"""``front``: what it takes, and what cannot be."""

from __future__ import annotations

import pytest

from kvbus.config import load
from kvbus.daemon.serve import changed_keys
from tests.config.test_config_docs import ROOT

GRPC = "front_grpc: {listen: '0.0.0.0:50051', engine: '127.0.0.1:50052'%s}\n"
FRONT = "front: {listen: '0.0.0.0:8000', engine: 'http://127.0.0.1:8001'%s}\n"
TWO = "sources: [{name: a}, {name: b, endpoint: 'ipc:///b'}]\n"
ONE = "sources: [{}]\n"
MERGED = "outputs: [{layout: merged, endpoint: 'tcp://*:5700'}]"


def test_the_example():
    front = load(ROOT / "deploy" / "front.yaml", env={}, overrides={}).front
    assert front is not None
    assert (front.listen, front.engine) == ("0.0.0.0:8000", "http://127.0.0.1:8001")
    assert (front.source, front.output, front.host, front.max_connections) == (None, None, None, 1024)


def test_both_of_one_engine(read):
    config = read(ONE + FRONT % "" + GRPC % ", output: routers" + "outputs: [{}]")
    assert config.front is not None
    front = config.front_grpc
    assert front is not None
    assert (front.listen, front.engine, front.host, front.output) == (
        "0.0.0.0:50051",
        "127.0.0.1:50052",
        None,
        "routers",
    )
    assert (front.max_connections, front.max_calls, front.max_message) == (1024, 1024, 64 * 1024 * 1024)


def test_variables():
    env = {"KVBUS_FRONT__LISTEN": "127.0.0.1:8000", "KVBUS_FRONT__ENGINE": "http://[::1]:8000/api/"}
    front = load(None, env=env, overrides={"front.host": "[fd00::1]", "sources": [{}], "outputs": [{}]}).front
    assert front is not None
    assert (front.engine, front.host) == ("http://[::1]:8000/api", "[fd00::1]")


@pytest.mark.parametrize(
    ("text", "key", "says"),
    [
        (ONE + "front: 3", "front", "must be a mapping of keys"),
        (ONE + "front: {}", "front.listen", "must be given"),
        (ONE + "front: {listen: '0.0.0.0:1'}", "front.engine", "must be given"),
        (ONE + FRONT % ", host: 'a b'", "front.host", "must be a host name or address, IPv6 in brackets"),
        (ONE + FRONT % ", host: 3", "front.host", "must be a host name or address"),
        (ONE + FRONT % ", host: '[::]'", "front.host", "is no address that others reach"),
        (ONE + FRONT % ", max_connections: 0", "front.max_connections", "at least 1"),
        (ONE + FRONT % ", source: other", "front.source", "no source has this name; there are: engine"),
        (TWO + FRONT % "" + MERGED, "front.source", "there are 2 sources: which of them is the engine"),
        (ONE + FRONT % ", output: other", "front.output", "no output has this name; there are: routers"),
        (ONE + FRONT % "" + "outputs: [{endpoint: 'ipc:///o'}]", "front.output", "outputs[0] has an ipc:// endpoint"),
        (ONE + FRONT % "" + "outputs: [{endpoint: 'tcp://a:1', bind: false}]", "front.output", "outputs[0] dials out"),
        (ONE + FRONT % "" + "outputs: [{type: dynamo}]", "front.output", "outputs[0] is of type dynamo"),
        (
            "sources: [{data_parallel_size: 2, replay_endpoint: null}]\n" + FRONT % "" + MERGED,
            "front.output",
            "has one stream for all 2 ranks",
        ),
        (ONE + FRONT.replace("8001", "8000") % "", "front.engine", "kvbus would ask itself"),
        ("sources: [{api: 'http://localhost:8000'}]\n" + FRONT % "", "sources[0].api", "kvbus would ask itself"),
        (
            "sources: [{discover: {http: {url: 'http://127.0.0.1:8000'}}}]\n" + FRONT % "" + MERGED,
            "sources[0].discover",
            "kvbus would ask itself",
        ),
        (ONE + FRONT.replace("8000", "9477") % "", "front.listen", "port 9477 (the front) is taken by http (HTTP)"),
        (ONE + FRONT.replace("8000", "5657") % "", "front.listen", "port 5657 (the front) is taken by outputs[0]"),
        (ONE + GRPC.replace("50052", "0") % "", "front_grpc.engine", "must be host:port, where the engine listens"),
        (ONE + GRPC.replace("127.0.0.1", "0.0.0.0") % "", "front_grpc.engine", "must be host:port, where"),
        (ONE + GRPC.replace("127.0.0.1:50052", "x") % "", "front_grpc.engine", "must be host:port"),
        (ONE + GRPC.replace("50052", "50051") % "", "front_grpc.engine", "kvbus would ask itself"),
        (ONE + GRPC % ", host: '*'", "front_grpc.host", "is no address that others reach"),
        (ONE + GRPC % ", max_calls: 0", "front_grpc.max_calls", "at least 1"),
        (ONE + GRPC % ", max_message: 1", "front_grpc.max_message", "must be at least 4"),
        (ONE + GRPC % ", source: other", "front_grpc.source", "no source has this name; there are: engine"),
        (ONE + GRPC % ", output: other", "front_grpc.output", "no output has this name; there are: routers"),
        (TWO + GRPC % "" + MERGED, "front_grpc.source", "there are 2 sources: which of them is the engine"),
        (ONE + GRPC % "" + "outputs: [{type: dynamo}]", "front_grpc.output", "outputs[0] is of type dynamo"),
        (
            ONE + FRONT % "" + GRPC.replace("50051", "8000") % "",
            "front_grpc.listen",
            "port 8000 (the gRPC front) is taken by front.listen (the front)",
        ),
    ],
)
def test_what_cannot_be(problems, text, key, says):
    found = problems(text if "outputs" in text else text.rstrip() + "\noutputs: [{}]")
    assert says in found[key]
    assert len(found) == 1 + (text.endswith("front: {}"))


@pytest.mark.parametrize(
    "text",
    [
        TWO + FRONT % ", source: b" + MERGED,
        ONE + FRONT % "" + MERGED,
        "sources: [{data_parallel_size: 2, replay_endpoint: null}]\n"
        + FRONT % ""
        + "outputs: [{endpoint: 'tcp://*:1'}]",
        "sources: [{name: w, discover: {http: {url: 'http://127.0.0.1:8001'}}}]\n" + FRONT % ", source: x" + MERGED,
        "sources: [{api: 'http://10.0.0.9:8000'}]\n" + FRONT % "" + "outputs: [{}]",
    ],
)
def test_what_can_be(read, text):
    assert read(text).front is not None


def test_it_changes_with_a_restart_alone(read):
    without = read(ONE + "outputs: [{}]")
    one, other = (read(ONE + FRONT % more + "outputs: [{}]") for more in ("", ", max_connections: 5"))
    for before, now, key in ((without, one, "front"), (one, without, "front"), (one, other, "front.max_connections")):
        assert changed_keys(before, now) == [key]
