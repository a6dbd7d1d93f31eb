"""What a good configuration cannot give: said by ``kvbus check``, and no mistake."""

from __future__ import annotations

from collections import Counter

from kvbus.config.models import Config, render_topic
from kvbus.config.outputs import OutputConfig
from kvbus.core.wire.profiles import PROFILES


def notes(config: Config) -> list[str]:
    """A sentence for each output whose routers cannot always be exact."""
    return [*_clears(config), *_replays(config)]


def _clears(config: Config) -> list[str]:
    return [
        f"outputs[{i}]: routers of profile {output.profile} take AllBlocksCleared for all ranks of a pod, and here "
        "each rank has a connection of its own, which nothing orders against the others: a router that missed batches "
        "may keep blocks that are gone, or miss some that are there; layout: merged is exact"
        for i, output in enumerate(config.outputs)
        if output.layout == "per_source"
        and PROFILES[output.profile].clears != "rank"
        and _ranks_of_a_pod(config, output) > 1
    ]


def _replays(config: Config) -> list[str]:
    """Routers at an engine's own address may take its replay for that of the stream they read."""
    engines = [source.replay_endpoint for source in config.sources if source.replay_endpoint is not None]
    return [
        f"outputs[{i}]: a router that learns from the engine where its replay is ({engines[0]}) would get the engine's "
        "numbers there, and reads others here; give the engine of such a router no replay_endpoint, or the router "
        + ("kvbus's replay" if output.replay_endpoint is None else output.replay_endpoint)
        for i, output in enumerate(config.outputs)
        if output.interpose and engines
    ]


def _ranks_of_a_pod(config: Config, output: OutputConfig) -> int:
    """The most streams that are of one pod: those under one topic, where routers read the pod off it."""
    by_topic = PROFILES[output.profile].topics == "pod and model"
    pods = Counter(
        (stream.topic if output.topic is None else render_topic(output.topic, stream, config)) if by_topic else b""
        for stream in config.streams()
    )
    return max(pods.values(), default=0)
