"""Sources that are read from a log: whose numbers routers get, and what is refused because it would be other ones."""

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
def test_the_numbers_are_the_logs_where_sources_are_read_from_one(kind):
    log = {"discover": {kind: {"endpoint": "tcp://log:9"}}}
    assert read(source=log).log_numbers
    assert refused({"numbers": "own"}, log) == ["outputs[0].numbers"]
    assert not load(None, env={}, overrides={"sources": [{}], "outputs": [{}]}).log_numbers


def test_the_example():
    config = load(ROOT / "deploy" / "aggregator.yaml", env={}, overrides={})
    assert [output.numbers for output in config.outputs] == ["log"]
    again = load(None, env={}, overrides=config.to_dict())
    assert again == config


@pytest.mark.parametrize(
    ("output", "key"),
    [
        ({"layout": "merged", "topic": None}, "outputs[0].layout"),
        ({"numbers": "own"}, "outputs[0].numbers"),
        ({"snapshot_endpoint": "tcp://*:5659"}, "outputs[0].snapshot_endpoint"),
        ({"profile": "llm-d", "topic": "kv@{source}@m"}, "outputs[0].profile"),
        ({"profile": "smg"}, "outputs[0].profile"),
        ({"profile": "dynamo"}, "outputs[0].profile"),
    ],
)
def test_an_output_that_could_not_have_them(output, key):
    assert key in refused(output)


def test_tokens_are_there_where_the_operator_says_so():
    kafka = {"endpoint": "tcp://kafka:9092", "token_ids": "keep"}
    assert read({"profile": "dynamo"}, {"discover": {"kafka": kafka}}).log_numbers


@pytest.mark.parametrize(
    ("keys", "at"),
    [
        ({"block_size": 16}, "block_size"),
        ({"groups": "all"}, "groups"),
        ({"without_media": ["CPU"]}, "without_media"),
        ({"orphans": "drop"}, "orphans"),
        ({"state_dir": "/var/lib/kvbus"}, "state_dir"),
    ],
)
def test_what_would_tell_something_else(keys, at):
    assert at in refused(**keys)


def test_engines_beside_the_log_and_its_numbers_without_one():
    beside = [SOURCE, {"name": "engine", "endpoint": "tcp://127.0.0.1:5557"}]
    with pytest.raises(ConfigError, match="beside sources that are read from a log"):
        load(None, env={}, overrides={"sources": beside, "outputs": [OUTPUT]})
    with pytest.raises(ConfigError, match="numbers"):
        load(None, env={}, overrides={"sources": [{}], "outputs": [{"numbers": "log"}]})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "endpoint"),
        ({"endpoint": "ipc://log"}, "over TCP alone"),
        ({"endpoint": "tcp://kafka:9092", "username": "a"}, "needed with username"),
        ({"endpoint": "tcp://kafka:9092", "state_every": 5}, "unknown key"),
    ],
)
def test_settings_that_are_none(kind, given, says):
    with pytest.raises(ConfigError, match=says):
        read(None, {"discover": {kind: given}})
