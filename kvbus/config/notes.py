"""What a good configuration cannot give: said by ``kvbus check``, and no mistake."""

from __future__ import annotations

from collections import Counter

from kvbus.config.models import Config, render_topic
from kvbus.config.outputs import OutputConfig
from kvbus.core.wire.profiles import PROFILES


def notes(config: Config) -> list[str]:
    """A sentence for each output whose routers cannot always be exact."""
    return [
        f"outputs[{i}]: routers of profile {output.profile} take AllBlocksCleared for all ranks of a pod, and here "
        "each rank has a connection of its own, which nothing orders against the others: a router that missed batches "
        "may keep blocks that are gone, or miss some that are there; layout: merged is exact"
        for i, output in enumerate(config.outputs)
        if output.layout == "per_source"
        and PROFILES[output.profile].clears != "rank"
        and _ranks_of_a_pod(config, output) > 1
    ]


def _ranks_of_a_pod(config: Config, output: OutputConfig) -> int:
    """The most streams that are of one pod: those under one topic, where routers read the pod off it."""
    by_topic = PROFILES[output.profile].topics == "pod and model"
    pods = Counter(
        (stream.topic if output.topic is None else render_topic(output.topic, stream, config)) if by_topic else b""
        for stream in config.streams()
    )
    return max(pods.values(), default=0)
