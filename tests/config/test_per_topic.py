"""Tests for the errors and notes of ``kvbus check`` about ``layout: per_topic``."""

from __future__ import annotations

from typing import Any

import pytest

from kvbus.common.errors import ConfigError
from kvbus.config import load

GOOD: dict[str, Any] = {"layout": "per_topic", "topic": "kv@{source}@{model}", "endpoint": "tcp://*:5657"}


def problems(*sources: dict[str, Any], **output: Any) -> str:
    """Return the error for a configuration; an empty string if it is valid."""
    engines = [{"endpoint": f"ipc:///run/{n}", "name": f"e{n}", **source} for n, source in enumerate(sources or ({},))]
    try:
        load(None, env={}, overrides={"model": "m", "sources": engines, "outputs": [{**GOOD, **output}]})
    except ConfigError as error:
        return str(error)
    return ""


def test_valid_configurations_per_topic_are_accepted() -> None:
    assert problems() == problems({}, {}, {}) == ""
    assert problems({"data_parallel_size": 3}, {}, topic="kv@{source}.{rank}@{model}", profile="llm-d") == ""
    assert problems({}, {}, bind=False, endpoint="tcp://router:5657") == ""
    assert problems({}, {}, profile="dynamo") == ""


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (
            {"topic": None},
            "outputs[0].topic: with layout: per_topic each stream needs its own topic, so the topic needs {source}",
        ),
        ({"topic": "kv@{worker}@{model}"}, 'so the topic needs {source}; for example topic: "kv@{source}@{model}"'),
        (
            {"replay_endpoint": "tcp://*:5658"},
            "outputs[0].replay_endpoint = 'tcp://*:5658': requests do not contain a topic",
        ),
        ({"snapshot_endpoint": "tcp://*:5659"}, "outputs[0].snapshot_endpoint"),
        ({"on_subscribe": "nothing"}, "there is no replay, so a router needs the state"),
        ({"profile": "aibrix"}, "routers of profile aibrix identify a worker by its connection"),
        ({"profile": "kthena", "topic": "kv-events"}, "routers of profile kthena assign all blocks to the pod"),
        ({"profile": "smg"}, "routers of profile smg keep one seq for each connection"),
        ({"profile": "vllm-router", "topic": None}, "accept only batches without a topic"),
    ],
)
def test_invalid_configurations_per_topic_are_reported(output: dict[str, Any], said: str) -> None:
    found = problems({}, {}, **output)
    assert said in found
    assert "has a problem:" in found


def test_layout_per_topic_has_no_replay_endpoint_by_default() -> None:
    made = load(None, env={}, overrides={"outputs": [{"layout": "per_topic", "topic": "kv@{source}"}], "sources": [{}]})
    assert (made.outputs[0].endpoint, made.outputs[0].replay_endpoint) == ("tcp://*:5657", None)
