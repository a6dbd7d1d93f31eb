"""The drivers of all outputs. The type of an output selects its driver."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from kvbus.config import Config, OutputConfig, SourceStream, parts
from kvbus.core.events import RelayEvent
from kvbus.core.stats import OutputStats
from kvbus.daemon.keys import Keys, output_domain, source_domain
from kvbus.daemon.views import AccessScopes
from kvbus.parts.outputs.contract import OutputDriver, OutputFactory, Services
from kvbus.transport.interposed import Interposed
from kvbus.transport.sockets import PeerPolicy
from kvbus.transport.subscription import limits_of_publishers
from kvbus.transport.unsent import Unsent
from kvbus.transport.zmtp.settings import SYSTEM, System

log = logging.getLogger("kvbus.daemon")

LOOK_AGAIN: Final = 0.01
"""Seconds between two checks whether all replay answers are sent."""


class Outputs:
    """The drivers of the configured outputs.

    Args:
        config: the configuration.
        feed: called with each router's request, as an event for the relay.
        clock: returns the seconds for which the process has been running.
        system: the operating system's sockets.

    Attributes:
        drivers: the drivers, in the order of the configuration.
    """

    def __init__(
        self,
        config: Config,
        feed: Callable[[RelayEvent], None],
        clock: Callable[[], float],
        system: System = SYSTEM,
    ) -> None:
        sessions = config.limits.max_replay_sessions
        self.unsent = Unsent(config.limits.max_unsent_bytes)
        """The limit for the bytes that wait in kvbus for all routers together."""
        publishers = limits_of_publishers(config.limits.max_frame_bytes)
        self.interposed: dict[str, Interposed] = {}
        """The ports that both engines and routers dial (``interpose``), by endpoint."""
        made = factories(config)
        self.stats = [OutputStats(parts=_optional(output)) for output in config.outputs]
        """The counters of the outputs, in the order of the configuration. Each output's driver updates its own."""
        self.drivers: list[OutputDriver] = [
            factory(
                number,
                config.outputs[number],
                Services(self.stats[number], feed, clock, sessions, self.interposed, publishers, system, self.unsent),
            )
            for number, factory in enumerate(made)
        ]

    async def drain(self, seconds: float) -> None:
        """Wait until all replay answers are sent.

        After ``seconds``, end each unfinished answer with the marker END, and log the number of these answers.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        # poll, because the answers are sent by callbacks that set no event
        while any(driver.busy for driver in self.drivers) and loop.time() < until:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_AGAIN)
        cut_off = sum(driver.end_answers() for driver in self.drivers)
        if cut_off:
            log.warning("%d replay answers were not finished within shutdown_timeout", cut_off)

    def close(self, linger: float) -> None:
        """Close every stream. Batches that are already queued may be sent for up to ``linger`` seconds."""
        for driver in self.drivers:
            for stream in driver.streams:
                driver.close(stream, linger)


def _optional(output: OutputConfig) -> frozenset[str]:
    """Return the names of the optional features that an output uses, such as ``replay``.

    kvbus shows no metrics of this output about features that the output does not use.
    """
    parts_there = {
        "log": output.log is not None,
        "dynamo": output.type == "dynamo",
        "interpose": output.interpose,
        "replay": output.replay_endpoint is not None,
        "keys": output.curve_client_keys is not None,
    }
    return frozenset(name for name, installed in parts_there.items() if installed)


def factories(config: Config) -> list[OutputFactory]:
    """Return the factory of each output's driver, in the order of the configuration."""
    return [parts.load(parts.OUTPUTS, output.type) for output in config.outputs]


def peer_policy_of(config: Config, number: int, keys: Keys, views: AccessScopes) -> PeerPolicy:
    """Return the rules for the routers of an output: their keys, the view of each key, and the maximum request size.

    Args:
        config: the configuration.
        number: the position of the output in the configuration.
        keys: the CURVE keys of all sources and outputs.
        views: the views of all outputs.
    """
    output = config.outputs[number]
    curve = keys.get(output_domain(output.name))
    numbers = {} if curve is None else views.by_key(number, curve.clients)
    hidden = views.hidden(config, number) if output.layout == "per_source" else {}
    return PeerPolicy(config.limits.max_request_bytes, curve, numbers, hidden)


def source_policy_of(config: Config, stream: SourceStream, keys: Keys) -> PeerPolicy:
    """Return the rules for the connection to an engine: the CURVE keys, and the maximum frame size.

    Args:
        config: the configuration.
        stream: the stream that the engine publishes. Only keys that may publish this stream are allowed.
        keys: the CURVE keys of all sources and outputs.
    """
    name = config.sources[stream.source_index].name
    curve = keys.get(source_domain(name))
    if curve is not None:
        label = f"{name}/{stream.rank}"
        may = {key: each for key, each in curve.clients.items() if each.grant.reads_source(name, label, None, None)}
        curve = replace(curve, clients=may)
    return PeerPolicy(config.limits.max_frame_bytes, curve)
