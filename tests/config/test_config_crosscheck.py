"""Tests for errors about configuration keys that are valid on their own but contradict each other."""

from __future__ import annotations

import pytest

from kvbus.core.wire.profiles import PROFILES
from tests.config.texts import text_of


def test_sources_keep_their_slots_and_a_used_slot_is_refused(read, problems):
    three = "[{name: a, endpoint: 'ipc:///a'}, {name: c, endpoint: 'ipc:///c', slot: 2, data_parallel_size: 2}, "
    config = read(text_of(three + "{name: d, endpoint: 'ipc:///d'}]", "[{layout: merged}]"))
    assert [(stream.label, stream.index) for stream in config.streams()] == [("a", 0), ("c/0", 2), ("c/1", 3), ("d", 4)]
    found = problems(text_of(three + "{name: d, endpoint: 'ipc:///d', slot: 3}]", "[{layout: merged}]"))
    assert "= 3: slot 3 is taken by c; for example slot: 4" in found["sources[2].slot"]


def test_the_url_of_an_api_is_accepted_without_a_request(read):
    config = read(text_of("[{api: 'https://engine:8000/v1/'}]", "[{}]"))
    assert config.sources[0].api == "https://engine:8000/v1"


def test_a_malformed_api_is_reported_once(problems):
    found = problems(text_of("[{api: 'engine:8000'}]", "[{}]"))
    assert set(found) == {"sources[0].api"}
    assert "must be http://host:port" in found["sources[0].api"]


@pytest.mark.parametrize("profile", PROFILES)
def test_snapshots_are_refused_for_routers_that_drop_long_sequence_frames(problems, read, profile):
    output = f"[{{profile: {profile}, snapshot_endpoint: 'tcp://*:5659', topic: 'kv@{{worker}}@m'}}]"
    found = problems(text_of("[{api: bad}]", output))
    if profile in {"aibrix", "dynamo", "smg"}:  # these routers break the case publisher-id in docs/spec/results/routers
        assert "drop such batches" in found["outputs[0].snapshot_endpoint"]
    else:
        assert "outputs[0].snapshot_endpoint" not in found


@pytest.mark.parametrize("profile", PROFILES)
def test_an_output_without_tokens_is_refused_for_routers_that_hash_tokens(problems, read, profile):
    output = f"[{{profile: {profile}, token_ids: drop, topic: 'kv@{{worker}}@m'}}]"
    if profile == "vllm":
        assert read(text_of("[{}]", output)).outputs[0].token_ids == "drop"
        return
    wrong = problems(text_of("[{}]", output))["outputs[0].token_ids"]
    assert f"routers of profile {profile} hash the token ids themselves" in wrong
    assert "for example token_ids: keep" in wrong
