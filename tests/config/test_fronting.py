"""Tests for the section ``front`` of the configuration (the proxy before an engine's API).

They test its valid values, and the combinations that are refused.
"""

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


def test_the_example_of_a_front_is_valid():
    front = load(ROOT / "deploy" / "front.yaml", env={}, overrides={}).front
    assert front is not None
    assert (front.listen, front.engine) == ("0.0.0.0:8000", "http://127.0.0.1:8001")
    assert (front.source, front.output, front.host, front.max_connections) == (None, None, None, 1024)


def test_an_engine_may_have_a_front_and_a_front_grpc(read):
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


def test_variables_configure_the_front():
    env = {"KVBUS_FRONT__LISTEN": "127.0.0.1:8000", "KVBUS_FRONT__ENGINE": "http://[::1]:8000/api/"}
    front = load(None, env=env, overrides={"front.host": "[fd00::1]", "sources": [{}], "outputs": [{}]}).front
    assert front is not None
    assert (front.engine, front.host) == ("http://[::1]:8000/api", "[fd00::1]")


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
def test_valid_configurations_of_a_front_are_accepted(read, text):
    assert read(text).front is not None


def test_a_change_of_the_front_needs_a_restart(read):
    without = read(ONE + "outputs: [{}]")
    one, other = (read(ONE + FRONT % more + "outputs: [{}]") for more in ("", ", max_connections: 5"))
    for before, now, key in ((without, one, "front"), (one, without, "front"), (one, other, "front.max_connections")):
        assert changed_keys(before, now) == [key]
