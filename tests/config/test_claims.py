"""Tests for configurations in which several entries name the same address or port.

kvbus accepts them if there is no conflict, for example if the port is used on two different hosts.
"""

from __future__ import annotations

import pytest

from kvbus.config import ConfigError, load
from tests.config.texts import text_of


@pytest.mark.parametrize(
    ("sources", "outputs"),
    [
        ("[{data_parallel_size: 2, endpoint: 'tcp://127.0.0.1:5557', replay_endpoint: 'tcp://127.0.0.1:5559'}]",
         "[{endpoint: 'tcp://*:5657', replay_endpoint: 'tcp://*:5659'}]"),
        # The engines use the same port at different hosts.
        ("[{name: a, endpoint: 'tcp://10.0.0.1:5557'}, {name: b, endpoint: 'tcp://10.0.0.2:5557'}]",
         "[{layout: merged}]"),
        # kvbus listens at a port number that the engine uses on another machine.
        ("[{endpoint: 'tcp://10.0.0.1:5557'}]", "[{endpoint: 'tcp://*:5557'}]"),
        # The source and the output use different interfaces.
        ("[{}]", "[{endpoint: 'tcp://127.0.0.2:5557'}]"),
        # The output dials its router, so it does not listen at kvbus's own HTTP port.
        ("[{}]", "[{endpoint: 'tcp://127.0.0.1:9477', bind: false}]"),
        ("[{endpoint: 'ipc:///kv-{rank}', data_parallel_size: 2}]", "[{layout: merged}]"),
    ],
)  # fmt: skip
def test_equal_addresses_that_do_not_contradict_each_other_are_accepted(read, sources, outputs):
    assert read(text_of(sources, outputs)).sources


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
