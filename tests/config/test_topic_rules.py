"""Tests that kvbus refuses an output's topic that the routers of its profile cannot read."""

from __future__ import annotations

import pytest

from kvbus.core.wire.profiles import PROFILES
from tests.config.texts import text_of


def test_a_topic_needs_the_model(problems, read):
    text = text_of("[{}]", "[{topic: 'kv@{model}'}]")
    assert "outputs[0].topic uses {model}" in problems(text)["model"]
    assert read("model: m\n" + text).model == "m"


def test_llm_d_may_have_the_sources_topics_where_they_are_told_in_full(read):
    sources = "[{name: a, topic: 'kv@pod-a@m'}, {name: b, endpoint: 'ipc:///b', topic: 'kv@pod-b@m'}]"
    assert read(text_of(sources, "[{layout: merged, profile: llm-d}]")).outputs[0].topic is None


def test_only_llm_d_asks_for_a_topic(read):
    for profile in set(PROFILES) - {"llm-d", "llm-d-sglang"}:
        assert read(text_of("[{}]", f"[{{profile: {profile}}}]")).outputs[0].topic is None


def test_the_vllm_router_takes_nothing_under_a_topic(problems, read):
    found = problems(text_of("[{}]", "[{profile: vllm-router, topic: 'kv@{worker}@m'}]"))["outputs[0].topic"]
    assert "profile vllm-router accepts only batches without a topic; for example topic: null" in found
    assert read(text_of("[{}]", "[{profile: vllm-router, topic: ''}]")).outputs[0].topic == ""


def test_a_model_with_an_at_sign_breaks_an_llm_d_topic(problems, read):
    text = text_of("[{}]", "[{profile: llm-d, topic: 'kv@{worker}@{model}'}]", "worker: w\n")
    assert "'kv@w@a@b'" in problems(text + "model: a@b")["outputs[0].topic"]
    assert read(text + "model: a").outputs[0].profile == "llm-d"


@pytest.mark.parametrize("topic", ["null", "kv-events"])
def test_kthena_is_given_its_topic(topic, read):
    assert read(text_of("[{}]", f"[{{profile: kthena, topic: {topic}}}]")).outputs[0].profile == "kthena"


@pytest.mark.parametrize("topic", ["''", "kv", "'kv@{source}'"])
def test_kthena_is_given_no_other_topic(topic, problems):
    line = problems(text_of("[{}]", f"[{{profile: kthena, topic: {topic}}}]"))["outputs[0].topic"]
    assert "profile kthena accepts only batches with the topic kv-events; for example topic: null" in line
