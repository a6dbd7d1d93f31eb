"""The drivers of all outputs. An output's type in the configuration selects its driver."""

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
from kvbus.daemon.views import Views
from kvbus.parts.outputs.contract import OutputDriver, OutputFactory, Services
from kvbus.transport.accepted import limits_of_publishers
from kvbus.transport.interposed import Interposed
from kvbus.transport.sockets import PeerPolicy
from kvbus.transport.zmtp.endpoint import SYSTEM, System

log = logging.getLogger("kvbus.daemon")

LOOK_AGAIN: Final = 0.01
"""Seconds between two checks whether all answers are sent."""


class Outputs:
    """The drivers of the configured outputs, in ``drivers``.

    Args:
        config: the configuration.
        feed: called with each router's request, as an event.
        clock: returns the seconds in which the process was running.
        system: the operating system, for endpoints.
    """

    def __init__(
        self,
        config: Config,
        feed: Callable[[RelayEvent], None],
        clock: Callable[[], float],
        system: System = SYSTEM,
    ) -> None:
        sessions = config.limits.max_replay_sessions
        publishers = limits_of_publishers(config.limits.max_frame_bytes)
        self.interposed: dict[str, Interposed] = {}
        """The ports at which engines connect as routers do (interpose), by endpoint."""
        made = factories(config)
        self.stats = [OutputStats(parts=_optional(output)) for output in config.outputs]
        """The counters of each driver."""
        self.drivers: list[OutputDriver] = [
            factory(
                number,
                config.outputs[number],
                Services(self.stats[number], feed, clock, sessions, self.interposed, publishers, system),
            )
            for number, factory in enumerate(made)
        ]

    def flush(self) -> None:
        """Send the batches of the current burst."""
        for driver in self.drivers:
            driver.flush()

    async def drain(self, seconds: float) -> None:
        """Wait until all replay answers are sent. After ``seconds``, end unfinished ones with END and count them."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        # poll, because the answers are sent by callbacks that set no event
        while any(driver.busy for driver in self.drivers) and loop.time() < until:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_AGAIN)
        cut_off = sum(driver.end_answers() for driver in self.drivers)
        if cut_off:
            log.warning("%d replay answers were not finished within shutdown_timeout", cut_off)

    def close(self, linger: float) -> None:
        """Close every stream. Queued batches may still be sent for up to ``linger`` seconds."""
        for driver in self.drivers:
            for stream in driver.streams:
                driver.close(stream, linger)


def _optional(output: OutputConfig) -> frozenset[str]:
    """Return the optional parts that an output has. Metrics of other parts are absent for it."""
    parts_there = {
        "log": output.log is not None,
        "dynamo": output.type == "dynamo",
        "interpose": output.interpose,
        "replay": output.replay_endpoint is not None,
        "keys": output.curve_client_keys is not None,
    }
    return frozenset(name for name, there in parts_there.items() if there)


def factories(config: Config) -> list[OutputFactory]:
    """Return the factory of each output's driver."""
    return [parts.load(parts.OUTPUTS, output.type) for output in config.outputs]


def peer_policy_of(config: Config, number: int, keys: Keys, views: Views) -> PeerPolicy:
    """Return the peers that may connect to an output, the view that each one reads, and the maximum request size."""
    output = config.outputs[number]
    curve = keys.get(output_domain(output.name))
    numbers = {} if curve is None else views.by_key(number, curve.clients)
    hidden = views.hidden(config, number) if output.layout == "per_source" else {}
    return PeerPolicy(config.limits.max_request_bytes, curve, numbers, hidden)


def source_policy_of(config: Config, stream: SourceStream, keys: Keys) -> PeerPolicy:
    """Return the keys and limits for the connection to a source's rank, including the keys that may publish as it."""
    name = config.sources[stream.source_index].name
    curve = keys.get(source_domain(name))
    if curve is not None:
        label = f"{name}/{stream.rank}"
        may = {key: each for key, each in curve.clients.items() if each.grant.reads_source(name, label, None, None)}
        curve = replace(curve, clients=may)
    return PeerPolicy(config.limits.max_frame_bytes, curve)
