"""Where kvbus has the events of the engine behind the front, as its sources are now."""

from __future__ import annotations

from typing import Protocol

from kvbus.config import Config, SourceStream, render_topic
from kvbus.config.front import Fronting
from kvbus.core.wire.profiles import PROFILES
from kvbus.parts.front.answers import Offer, Offers, UnanswerableError


class Observed(Protocol):
    """The sources that there are now."""

    config: Config
    streams: dict[int, SourceStream]


def offers(observed: Observed, front: Fronting, host: str) -> Offers:
    """Return them by rank.

    Args:
        observed: the sources.
        front: says which of them the engine is, and which output its routers read.
        host: stands for a wildcard in an endpoint.

    Raises:
        UnanswerableError: there is no such source now, or several could be it.
    """
    config = observed.config
    names = {slot: config.sources[stream.source_index].name for slot, stream in observed.streams.items()}
    streams = [stream for slot, stream in observed.streams.items() if front.source in (None, names[slot])]
    if not streams:
        raise UnanswerableError("kvbus does not know yet where the engine publishes")
    if len({names[stream.index] for stream in streams}) > 1:
        raise UnanswerableError("kvbus has several engines, and the front's source does not say which this one is")
    number = front.number_of_output(config.outputs)
    output = config.outputs[number or 0]
    if output.layout == "merged" and len(streams) > 1:
        raise UnanswerableError(f"kvbus has one stream for all ranks (output {output.name})")
    offered = {}
    for stream in streams:
        endpoint, replay_endpoint, _ = output.stream_endpoints(stream.index)
        topic = PROFILES[output.profile].only_topic
        if topic is None and output.topic is not None:
            topic = render_topic(output.topic, stream, config).decode()
        offered[stream.rank] = Offer(endpoint, replay_endpoint, topic, host)
    return offered
