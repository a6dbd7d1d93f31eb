"""Tests for configurations with sources that are read from a log: routers get the seqs of the log.

Settings that would give routers other seqs are refused.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbus.common.errors import ConfigError
from kvbus.config import load

ROOT = Path(__file__).parents[2]
KINDS = ("kafka", "nats", "redis")
SOURCE = {"name": "fleet", "discover": {"kafka": {"endpoint": "tcp://kafka:9092"}}}
OUTPUT = {"endpoint": "tcp://*:5657", "layout": "per_topic", "topic": "kv@{source}"}


def read(output=None, source=None, **keys):
    sources = [{**SOURCE, **(source or {})}]
    return load(None, env={}, overrides={"sources": sources, "outputs": [{**OUTPUT, **(output or {})}], **keys})


def refused(*args, **keys):
    with pytest.raises(ConfigError) as error:
        read(*args, **keys)
    return [problem.key for problem in error.value.problems]


@pytest.mark.parametrize("kind", KINDS)
def test_sources_from_a_log_use_the_seqs_of_the_log(kind):
    log = {"discover": {kind: {"endpoint": "tcp://log:9"}}}
    assert read(source=log).log_numbers
    assert refused({"numbers": "own"}, log) == ["outputs[0].numbers"]
    assert not load(None, env={}, overrides={"sources": [{}], "outputs": [{}]}).log_numbers


def test_the_example_of_an_aggregator_is_valid():
    config = load(ROOT / "deploy" / "aggregator.yaml", env={}, overrides={})
    assert [output.numbers for output in config.outputs] == ["log"]
    again = load(None, env={}, overrides=config.to_dict())
    assert again == config


def test_token_ids_keep_permits_a_profile_that_needs_tokens():
    kafka = {"endpoint": "tcp://kafka:9092", "token_ids": "keep"}
    assert read({"profile": "dynamo"}, {"discover": {"kafka": kafka}}).log_numbers
