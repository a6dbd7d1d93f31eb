"""Log the findings about the bus and about its routers: when a finding begins, changes and ends."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Final, Protocol

from kvbus.config import Config
from kvbus.core.findings import bus as catalogue
from kvbus.core.findings.finding import Finding, Findings, Reported
from kvbus.core.relay import Relay
from kvbus.daemon.discovery import Discovery
from kvbus.daemon.found import found_findings
from kvbus.daemon.runtime import Runtime
from kvbus.daemon.source_log import Report, log_changes
from kvbus.parts.outputs.contract import OutputDriver
from kvbus.state.contract import Store
from kvbus.state.writer import StateWriter
from kvbus.telemetry.readings import DiscoveryStats, RouterKey, read_routers

EVERY_S: Final = 1.0
FIRST_ANSWER_S: Final = 5.0
"""Seconds after the start for which kvbus waits for the first engine that discovery finds.

After this time, a finding says that discovery has found no engine.
"""


class BusState(Protocol):
    """The attributes and methods of the daemon in which findings about the bus and its routers show.

    Attributes:
        configured: the configuration without the engines that discovery has found.
        state: writes the state to disk; None without a state.
        reload_findings: the findings about files that kvbus has read again and refused.
    """

    configured: Config
    relay: Relay
    discovery: Discovery
    runtime: Runtime
    store: Store | None
    state: StateWriter | None
    reload_findings: dict[str, Finding]

    @property
    def drivers(self) -> list[OutputDriver]:
        """The drivers of the outputs, in the order of the configuration."""

    @property
    def discovery_stats(self) -> list[DiscoveryStats]:
        """The counters of each ``sources`` entry with ``discover``."""

    def as_written(self, key: str) -> str:
        """Return a configuration key in the form in which the operator has written it."""


class BusLog:
    """A check of the bus and its routers that runs once a second and logs new, changed and ended findings.

    Args:
        daemon: the daemon of the bus.
        report: called for each finding that begins, changes or ends.
    """

    def __init__(self, daemon: BusState, report: Report) -> None:
        self._daemon = daemon
        self._report = report
        self._bus = Findings(self._daemon.as_written)
        self._routers: dict[RouterKey, tuple[Findings, str]] = {}
        """The current findings about each connected router, and the name of the router's key (empty without one)."""
        self._begun: float | None = None
        self._next = -inf

    def look(self, now: float) -> None:
        """Log the findings that have begun, changed or ended, unless the last check was less than a second ago.

        Args:
            now: the time of the event loop's clock, in seconds.
        """
        if now < self._next:
            return
        self._next = now + EVERY_S
        self._begun = now if self._begun is None else self._begun
        wall = self._daemon.runtime.wall_clock()
        log_changes(self._bus.update(self._found(now - self._begun), wall), "bus", "bus", {}, self._report)
        before, self._routers = self._routers, {}
        for each in read_routers(self._daemon.relay, self._daemon.drivers, wall):
            if each.router.left is None:
                standing, _ = before.get(each.key) or (Findings(self._daemon.as_written), "")
                self._routers[each.key] = standing, each.router.name
                fields: dict[str, str | int] = {
                    "output": each.output,
                    "stream": each.router.stream,
                    "peer": each.router.peer,
                }
                log_changes(
                    standing.update(each.findings, wall), f"output {each.output}", each.output, fields, self._report
                )

    def findings(self) -> Iterator[Reported]:
        """Yield the current findings about the bus itself, and then those about its routers."""
        yield from self._bus.reported(kind="bus")
        for (output, stream, peer, _), (standing, name) in self._routers.items():
            yield from standing.reported(kind="router", name=name, output=output, peer=peer, stream=stream)

    def _found(self, age: float) -> Iterator[Finding]:
        state, store = self._daemon.state, self._daemon.store
        if state is not None and store is not None and state.failure:
            yield catalogue.STATE_NOT_WRITTEN(where=store.location, why=state.failure)
        yield from self._daemon.reload_findings.values()
        discoveries = {each.name: each for each in self._daemon.discovery_stats}
        for index, source in enumerate(self._daemon.configured.sources):
            stats, at = discoveries.get(source.name), f"sources[{index}].discover"
            if stats is None or source.discover is None:
                continue
            if stats.failing:
                yield catalogue.DISCOVERY_FAILS(at=at, name=source.name, why=stats.failing)
            elif not stats.engines and age > FIRST_ANSWER_S:
                yield catalogue.NO_ENGINE_FOUND(at=at, where=f'the discovery "{source.name}" lists no engine')
        discovery = self._daemon.discovery
        yield from found_findings(self._daemon.configured, discovery.found, discovery.left_out)
