"""Tests that kvbus refuses an output's topic that the routers of its profile cannot read."""

from __future__ import annotations

import pytest

from kvbus.core.wire.profiles import PROFILES
from tests.config.texts import text_of


def test_a_topic_with_the_model_placeholder_needs_a_model(problems, read):
    text = text_of("[{}]", "[{topic: 'kv@{model}'}]")
    assert "outputs[0].topic uses {model}" in problems(text)["model"]
    assert read("model: m\n" + text).model == "m"


def test_llm_d_may_use_complete_topics_of_the_sources(read):
    sources = "[{name: a, topic: 'kv@pod-a@m'}, {name: b, endpoint: 'ipc:///b', topic: 'kv@pod-b@m'}]"
    assert read(text_of(sources, "[{layout: merged, profile: llm-d}]")).outputs[0].topic is None


def test_only_profiles_of_llm_d_require_a_topic(read):
    for profile in set(PROFILES) - {"llm-d", "llm-d-sglang"}:
        assert read(text_of("[{}]", f"[{{profile: {profile}}}]")).outputs[0].topic is None


def test_profile_vllm_router_refuses_a_topic(problems, read):
    found = problems(text_of("[{}]", "[{profile: vllm-router, topic: 'kv@{worker}@m'}]"))["outputs[0].topic"]
    assert "profile vllm-router accepts only batches without a topic; for example topic: null" in found
    assert read(text_of("[{}]", "[{profile: vllm-router, topic: ''}]")).outputs[0].topic == ""


def test_an_llm_d_topic_refuses_a_model_with_an_at_sign(problems, read):
    text = text_of("[{}]", "[{profile: llm-d, topic: 'kv@{worker}@{model}'}]", "worker: w\n")
    assert "'kv@w@a@b'" in problems(text + "model: a@b")["outputs[0].topic"]
    assert read(text + "model: a").outputs[0].profile == "llm-d"


@pytest.mark.parametrize("topic", ["null", "kv-events"])
def test_profile_kthena_accepts_its_own_topic(topic, read):
    assert read(text_of("[{}]", f"[{{profile: kthena, topic: {topic}}}]")).outputs[0].profile == "kthena"


@pytest.mark.parametrize("topic", ["''", "kv", "'kv@{source}'"])
def test_profile_kthena_refuses_another_topic(topic, problems):
    line = problems(text_of("[{}]", f"[{{profile: kthena, topic: {topic}}}]"))["outputs[0].topic"]
    assert "profile kthena accepts only batches with the topic kv-events; for example topic: null" in line
