"""Checks of topics: a profile's routers must be able to read them, and they must distinguish streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvbus.common.errors import Problem
from kvbus.config import logs
from kvbus.config.models import render_topic
from kvbus.config.paths import Path, show
from kvbus.config.problems import shown
from kvbus.config.values import placeholders, render_template
from kvbus.core.wire.profiles import PROFILES

if TYPE_CHECKING:
    from kvbus.config.problems import Findings

_LLM_D_PARTS: Final = 3


def templates(found: Findings) -> None:
    """Reject topics that the routers of a profile cannot read, and topics with ``{model}`` if ``model`` is not set."""
    for i, output in enumerate(found.config.outputs):
        key: Path = ("outputs", i, "topic")
        if not found.sound(key):
            continue
        profile = PROFILES[output.profile if found.sound((*key[:-1], "profile")) else "vllm"]
        only, llm_d = profile.only_topic, profile.topics == "pod and model"
        if only is not None and output.topic not in (None, only):
            with_it = f"with the topic {only}" if only else "without a topic"
            wrong = f"profile {output.profile} takes batches {with_it} alone"
            found.report(key, wrong, value=output.topic, example="topic: null")
        elif output.topic is None:
            if llm_d:
                _llm_d_own(found, key)
        elif "model" in placeholders(output.topic) and not found.config.model:
            if found.sound(("model",)):
                example = "model: Qwen/Qwen3-32B"
                user = f"{show(key)} uses {{model}}" if output.topic != logs.TOPIC else f"{show(key[:-1])} needs it"
                found.report(("model",), user, value=found.config.model, example=example)
        elif llm_d and found.sound(("worker",), ("model",)):
            # check one rendering for all streams, because neither a source's name nor a rank can contain an @
            model, worker = found.config.model or "", found.config.worker
            text = render_template(output.topic, model=model, worker=worker, source="engine", rank=0).decode()
            if not _names_pod_and_model(text):
                _llm_d(found, key, f"this renders to {text!r}")


def one_topic_each(found: Findings) -> None:
    """Reject ``layout: per_topic`` if topics do not distinguish streams, or if a late router cannot get the state."""
    for i, output in enumerate(found.config.outputs):
        at: Path = ("outputs", i)
        if output.layout != "per_topic" or not found.sound((*at, "layout")):
            continue
        for name in ("replay_endpoint", "snapshot_endpoint"):
            if getattr(output, name) is not None:
                wrong = "a request names no topic, so with layout: per_topic nobody knows which stream is asked for"
                found.report((*at, name), wrong, value=getattr(output, name), example=f"{name}: null")
        if output.on_subscribe != "state":
            wrong = "with layout: per_topic there is no replay, so a router needs the state"
            found.report((*at, "on_subscribe"), wrong, value=output.on_subscribe, example="on_subscribe: state")
        why_not = PROFILES[output.profile].one_stream if found.sound((*at, "profile")) else ""
        if why_not:
            wrong = f"routers of profile {output.profile} {why_not}"
            found.report((*at, "layout"), wrong, value=output.layout, example="layout: merged")
        elif found.sound((*at, "topic")):
            _topic_of_each(found, (*at, "topic"), output.topic)


def _topic_of_each(found: Findings, key: Path, template: str | None) -> None:
    """Reject a topic template that renders to the same topic for two streams."""
    if not found.streams_sound() or not found.sound(("worker",), ("model",)):
        return
    several_ranks = any(source.data_parallel_size > 1 for source in found.config.sources)
    example = 'topic: "kv@{source}' + (".{rank}" if several_ranks else "") + '@{model}"'
    used = set() if template is None else placeholders(template)
    for needed in ("source", "rank") if several_ranks else ("source",):
        if template is None or needed not in used:
            wrong = f"with layout: per_topic each stream needs a topic of its own, by {{{needed}}} in it"
            found.report(key, wrong, value=template, example=example)
            return
    first: dict[bytes, str] = {}
    for stream in found.config.streams():
        topic = render_topic(template or "", stream, found.config)
        other = first.setdefault(topic, stream.label)
        if other != stream.label:
            wrong = f"{other} and {stream.label} would both have the topic {topic.decode()!r}"
            found.report(key, wrong, value=template, example=example)
            return


def _llm_d_own(found: Findings, key: Path) -> None:
    """Reject forwarding the sources' own topics to llm-d if ``sources[].topic`` is not a complete topic.

    A partial or empty ``topic`` means that the engine's topic is known only after its first batch.
    """
    for i, source in enumerate(found.config.sources):
        prefix: Path = ("sources", i, "topic")
        if found.sound(prefix) and not _names_pod_and_model(source.topic):
            _llm_d(found, key, f"null is the source's own, and {show(prefix)} is {source.topic!r}")
            return


def _llm_d(found: Findings, key: Path, instead: str) -> None:
    profile = found.value((*key[:-1], "profile"))
    wrong = f"profile {profile} needs exactly three parts, kv@POD@MODEL; {instead}"
    value = shown(found.value(key))
    found.problems.append(Problem(show(key), wrong, value, 'topic: "kv@{worker}@{model}"', found.origins.get(key)))


def _names_pod_and_model(topic: str) -> bool:
    """Return whether llm-d's router finds a pod and a model in a topic. It subscribes to ``kv@``."""
    parts = topic.split("@")
    return len(parts) == _LLM_D_PARTS and parts[0] == "kv" and all(parts)
