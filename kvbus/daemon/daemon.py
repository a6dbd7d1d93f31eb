"""The daemon: a relay, its sockets and its clock, from the start to the graceful shutdown."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from math import isfinite
from typing import Final

from kvbus.common.errors import BindError
from kvbus.common.front_stats import CallStats, FrontStats
from kvbus.config import Config, SourceStream
from kvbus.core.commands import (
    Answer,
    AnswerReplay,
    AnswerSnapshot,
    CancelReplay,
    Command,
    Publish,
    RequestReplay,
    RequestSnapshot,
    SendState,
)
from kvbus.core.events import BatchReceived, RelayEvent, SourcesNamed, Started, Tick
from kvbus.core.findings.bus import HTTP_TAKEN
from kvbus.core.findings.engine import CANNOT_LISTEN, ENGINE_PORT_TAKEN
from kvbus.core.findings.finding import Finding, Reported, Severity
from kvbus.core.source_spec import SourceLocation
from kvbus.core.stats import OutputStats, ProcessStats
from kvbus.daemon.binding import explained
from kvbus.daemon.build import next_seqs, reserve_seqs
from kvbus.daemon.bus_log import BusLog
from kvbus.daemon.changing import Changes
from kvbus.daemon.discovery import Discovery
from kvbus.daemon.engine_watch import EngineWatch
from kvbus.daemon.found import FoundFile
from kvbus.daemon.front import Fronts
from kvbus.daemon.keys import in_clear, read_keys
from kvbus.daemon.moved_names import MovedNames
from kvbus.daemon.outputs import Outputs, peer_policy_of, source_policy_of
from kvbus.daemon.placement import assign_slots, keep_placement, read_placement
from kvbus.daemon.resume import resume
from kvbus.daemon.runtime import RUNTIME, RunningClock, Runtime
from kvbus.daemon.source_log import SourceLog
from kvbus.daemon.source_sockets import SourceSockets
from kvbus.daemon.unreachable import Unreachable
from kvbus.daemon.views import AccessScopes
from kvbus.http.credentials import read_credentials
from kvbus.http.server import AdminServer
from kvbus.parts.log.location import check_files
from kvbus.parts.outputs.contract import OutputDriver, ViewDriver
from kvbus.state.contract import StoreError
from kvbus.state.reservations import SeqReservations
from kvbus.state.writer import StateWriter
from kvbus.telemetry.readings import DiscoveryStats
from kvbus.transport.sockets import PeerPolicy, check_library

log = logging.getLogger("kvbus.daemon")

TICK: Final = 0.1
"""Seconds between two ticks of the daemon. At a tick, the relay checks its deadlines."""

CLOSING: Final = 3.0
"""Maximum seconds at shutdown for the last batches of an output to a log.

In this time kvbus sends the batches that are still queued, and closes the connections to the log's servers.
"""

CHECKPOINT_TICK: Final = 0.01
"""Seconds between two slices of a checkpoint, which the daemon writes slice by slice."""


class Daemon:
    """The daemon that runs one configuration.

    Create it inside a running event loop. Then call :meth:`run`, or :meth:`start` and :meth:`close`.

    Args:
        config: the configuration to run.
        runtime: the clocks, random numbers, sockets and store of the daemon.
        stopped: returns whether the process was asked to end. The daemon calls it while it reads the state on disk.

    Raises:
        ConfigError: a file with keys, tokens or certificates cannot be used.
        InUseError: another process uses the same state or the same numbering.
        UnsupportedError: libzmq is too old.
        StateDirError: ``state_dir`` cannot be used.
        StoppedError: the process was asked to end while it read its state.
    """

    def __init__(
        self,
        config: Config,
        *,
        runtime: Runtime = RUNTIME,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        check_library()
        self._loop = asyncio.get_running_loop()
        self.runtime = runtime
        self.changing = asyncio.Lock()
        """A lock that is held while sources or keys change."""
        self.configured = config
        """The configuration without the engines that discovery has found."""
        self.streams: dict[int, SourceStream] = {}
        self.discovery = Discovery(self, config)
        self.clock = RunningClock(self._loop.time)
        """The clock by which the relay measures its deadlines."""
        credentials = read_credentials(config)
        check_files(config)
        self.process = ProcessStats()
        self.process.views_limit = config.limits.max_views
        # If batches keep the seqs of a log, kvbus has no seqs and no state of its own to store.
        self.store = None if config.log_numbers else runtime.open_store(config)
        self.state: StateWriter | None = None
        try:
            if self.store is not None and self.store.keeps_state:
                self.state = StateWriter(self.store, self._loop.time, stopped)
            self.reservations = SeqReservations(self.store, self._state_lost)
            found_file = FoundFile(self.reservations, config)
            if self.store is not None and not self.store.keeps_state:
                found_file.keep({})  # the engines that a process with a state has stored
            else:
                self.discovery.begin_with(found_file)
            self.config = config = self.discovery.preview(config)
            self.keys = read_keys(config)
            self.views = AccessScopes(config, self.keys)
            self.placement = assign_slots(read_placement(self.reservations, config), config)
            self.streams = self.placement.streams(config)
            reserve_seqs(self.reservations, config, self.placement, self.views)
            readers = self.views.identity(config, self.keys)
            found = resume(
                config, self.placement, self.state, self.reservations, self.clock.time(), self.views, readers, runtime
            )
        except BaseException:
            self._close_store()
            raise
        self.relay, self.restored = found
        self.started = False
        self.engine_sockets = runtime.engine_sockets()
        self.outputs = Outputs(config, self.feed, self.clock.time, runtime.system)
        self.process.measure_unsent = lambda: self.outputs.unsent.bytes
        self.process.unsent_limit = config.limits.max_unsent_bytes
        self._commands: deque[Command] = deque()
        """The relay's commands that the daemon has not carried out yet."""
        self.admin = AdminServer(self, credentials)
        self.source_sockets = SourceSockets(
            self.engine_sockets,
            self.feed,
            self._take,
            self._feed_record,
            self.flush,
            self.outputs.interposed,
            self.discovery.carrier,
        )
        self.fronts = Fronts(self)
        self.changes = Changes(self)
        self._engine_watch = EngineWatch(self, self.feed)
        self._moved_names = MovedNames(self)
        self._ticker: asyncio.TimerHandle | None = None
        self._next_tick = 0.0
        self.reload_findings: dict[str, Finding] = {}
        """The findings about files that kvbus has read again and refused: at most one for each kind of file."""
        self._source_log = SourceLog(self.admin.timeline.add, runtime.wall_clock, self.as_written)
        self._bus_log = BusLog(self, self.admin.timeline.add)
        self._unreachable = Unreachable(self, self.feed, lambda stream: self.source_policy(stream).curve, runtime.dial)

    def _begin_state(self) -> None:
        """Start writing the state to disk.

        All endpoints are bound before this call. So no other kvbus with the same endpoints is running and using the
        state on disk.
        """
        if self.state is None:
            return
        self.state.begin(self.relay)
        self._show_state(self.state)

    def _close_store(self) -> None:
        if self.store is not None:
            self.store.close()

    async def start(self) -> None:
        """Bind the outputs, and then connect to the engines.

        The outputs are bound first, so that routers can connect before the first batch of an engine arrives. The daemon
        begins to write its state only after all sockets are open, so a process that cannot bind does not change the
        state on disk. There is no ``await`` between the opening of the outputs and the begin of the state, so every
        relayed batch is in the state.

        Raises:
            BindError: an endpoint or the HTTP address cannot be bound. All sockets are closed again.
        """
        for warning in in_clear(self.config):
            log.warning(warning)
        try:
            with explained(HTTP_TAKEN):
                await self.admin.start()
            await self.fronts.start()
            for number, driver in enumerate(self.outputs.drivers):
                for slot, stream in self.relay.outputs[number].served_streams.items():
                    endpoints = self.config.outputs[number].stream_endpoints(slot)
                    names = dict(zip(endpoints, endpoints._fields, strict=True))
                    with explained(CANNOT_LISTEN, f"outputs[{number}]", names=names, written=self.as_written):
                        driver.open(slot, stream.topic, self.output_policy(number))
            self.serve_views()
            for source in self.streams.values():
                self._open_source(source)
            self.keep_slots()
            self._begin_state()
            if not self.restored:
                self.feed(Started(self.runtime.wall_clock()))
            self.place_sources()
        except BaseException:
            await self.close(drain=0)
            raise
        self._engine_watch.start()
        self._moved_names.start()
        self._next_tick = self._loop.time() + TICK
        self._ticker = self._loop.call_at(self._next_tick, self._tick)
        self.started = True
        self.discovery.start()

    def _open_source(self, source: SourceStream) -> None:
        """Open the connection of one source when kvbus starts.

        If the source was discovered and its endpoint is not usable, log the error, so that kvbus starts with the other
        sources.

        Raises:
            BindError: an endpoint from the configuration cannot be bound or dialled.
        """
        try:
            section = self.configured.sections(self.config.sources)[source.source_index]
            with explained(ENGINE_PORT_TAKEN, section, written=self.as_written):
                self.source_sockets.open(source, self.source_policy(source))
        except BindError as error:
            if not source.found:
                raise
            log.error("source %s is not connected: %s", source.label, error, extra=source.log_fields)  # noqa: TRY400

    @property
    def awaited(self) -> str:
        """The reason why kvbus is not ready for routers, such as ``starting``; empty if it is ready.

        A disconnected engine does not make kvbus unready. In a native sidecar, kvbus's readiness is a part of the pod's
        readiness, and a gap in the event stream must not take the engine out of service. An aggregator is ready only
        after it has read the log to its end. Until then, another aggregator serves the routers.
        """
        if not self.started:
            return "starting"
        return "" if self.discovery.level else "reading the log"

    def place_sources(self) -> None:
        """Send the relay the configuration section and the endpoints of each source.

        Findings and log lines contain them.
        """
        sections = self.configured.sections(self.config.sources)
        self.feed(
            SourcesNamed(
                {
                    slot: SourceLocation(sections[stream.source_index], stream.endpoint, stream.replay_endpoint or "")
                    for slot, stream in self.streams.items()
                }
            )
        )

    def as_written(self, key: str) -> str:
        """Return a configuration key as the operator has written it, which may be a short form."""
        return self.configured.as_written(key)

    @property
    def findings(self) -> list[Reported]:
        """All current findings: about this kvbus, its routers and its sources. Problems come before notes."""
        found = [*self._bus_log.findings(), *self._source_log.findings(self.relay, self.streams)]
        return sorted(found, key=lambda each: each.severity is Severity.NOTE)

    def keep_slots(self) -> None:
        """Write the slots of all workers to disk. Call this before a batch of a new worker is sent."""
        placement, process = self.placement, self.process
        keep_placement(self.reservations, self.config, placement)
        process.slots_gone = len(placement.gone)
        process.slots_present = len(placement.slots) - len(placement.gone)
        process.slots_limit = self.config.limits.max_sources
        self.widen()

    def widen(self) -> None:
        """Record, in the seq reservation of each merged output and view, how many slots exist.

        The next process needs the number, because routers may still know the ranks of all these slots.
        """
        for number, view in enumerate(self.views.all):
            if not view.closed and self.config.outputs[view.output].layout == "merged":
                self.reservations.widen(number, max(self.streams, default=-1) + 1)

    def set_log_level(self, level: str) -> None:
        """Change the log level of the process."""
        logging.getLogger().setLevel(level.upper())
        self.config = self.config.model_copy(update={"log_level": level})
        self.configured = self.configured.model_copy(update={"log_level": level})

    @property
    def drivers(self) -> list[OutputDriver]:
        """The drivers of the outputs, in the order of the configuration."""
        return self.outputs.drivers

    @property
    def output_stats(self) -> list[OutputStats]:
        """The counters of the outputs' drivers, in the order of the configuration."""
        return self.outputs.stats

    @property
    def discovery_stats(self) -> list[DiscoveryStats]:
        """The counters of each ``sources`` entry that has a discoverer."""
        return self.discovery.stats

    @property
    def front_stats(self) -> FrontStats | None:
        """The counters of the proxy in front of the engine's API; None without a proxy."""
        return None if self.fronts.http is None else self.fronts.http.stats

    @property
    def front_grpc_stats(self) -> CallStats | None:
        """The counters of the proxy in front of the engine's gRPC API; None without a proxy."""
        return None if self.fronts.grpc is None else self.fronts.grpc.stats

    @property
    def http_address(self) -> tuple[str, int] | None:
        """The host and port on which the HTTP server listens; None without a server.

        If the configured port is 0, this is the port that the system has assigned.
        """
        return self.admin.address

    def dialled_in(self, slot: int) -> list[str] | None:
        """Return the addresses of the engines that have connected to kvbus for this source.

        It is None if kvbus dials the engine.
        """
        return self.source_sockets.dialled_in(slot)

    def driver_of(self, number: int) -> OutputDriver:
        """Return the driver that serves the view with this number.

        The outputs themselves have the first numbers, from 0.
        """
        return self.outputs.drivers[self.views.all[number].output]

    def serve_views(self) -> None:
        """Open the streams of the views that routers may read, and close the streams of all other views.

        A view is a separate stream for all router keys with the same rights.
        """
        for driver in self.outputs.drivers:
            if isinstance(driver, ViewDriver):
                for number, slot in driver.views:
                    if slot not in self.relay.outputs[number].open_streams:
                        driver.close_view(number, slot)
        for number in range(len(self.outputs.drivers), len(self.views.all)):
            driver = self.driver_of(number)
            if isinstance(driver, ViewDriver):
                for slot, stream in self.relay.outputs[number].open_streams.items():
                    if (number, slot) not in driver.views:
                        driver.open_view(number, slot, stream.topic)

    def output_policy(self, number: int) -> PeerPolicy:
        """Return the keys of the routers that may connect to an output, and the rights of each key."""
        return peer_policy_of(self.config, number, self.keys, self.views)

    def source_policy(self, stream: SourceStream) -> PeerPolicy:
        """Return the CURVE keys and size limits for the connection to a source's engine."""
        return source_policy_of(self.config, stream, self.keys)

    def feed(self, event: RelayEvent) -> None:
        """Pass an event to the relay, and carry out the commands that the relay returns."""
        self.carry_out(self.relay.handle(event, self.clock.time()))

    def _messages(self, answer: Answer) -> Iterator[list[bytes]]:
        """Yield the messages of an answer to a router.

        While the relay builds a message, it may publish batches. The daemon commits and sends these batches before it
        yields the message. The transport's sender asks for messages in its own callbacks, never while :meth:`flush`
        carries out commands.
        """
        for message in answer.messages():
            self.carry_out(self.relay.take_commands())
            yield message

    def _take(self, slot: int, messages: deque[list[bytes]]) -> None:
        """Relay the messages that one wakeup has read from a source's live stream.

        Args:
            slot: the slot of the source.
            messages: the frames of each message. Each message is removed before it is handled, so that after an error
                the next wakeup continues with the remaining messages.
        """
        stopwatch, process = self.runtime.stopwatch, self.process
        begin, now = stopwatch(), self.clock.time()
        stats, handle = self.relay.sources[slot].stats, self.relay.handle
        before = stats.last_batch
        while messages:
            self._commands += handle(BatchReceived(slot, messages.popleft()), now)
        self.flush()
        process.relay_latency.observe(stopwatch() - begin)
        if stats.last_batch != before and isfinite(stats.last_batch):
            process.batch_age.observe(max(0.0, self.runtime.wall_clock() - stats.last_batch))

    def _feed_record(self, event: RelayEvent) -> None:
        """Pass an event of a discoverer's burst to the relay. After the burst, :meth:`flush` sends the batches."""
        self._commands += self.relay.handle(event, self.clock.time())

    def carry_out(self, commands: list[Command]) -> None:
        """Carry out commands of the relay. See :meth:`flush`."""
        self._commands += commands
        self.flush()

    def flush(self) -> None:
        """Commit the relay's records to disk, reserve seqs, carry out the relay's commands, and send the batches.

        Everything that a message depends on is on disk before the message is sent. No command calls the relay before it
        returns: drivers and sockets report to the relay later, in their own callbacks. So no new record or command
        appears meanwhile.
        """
        if self.state is not None:
            self.state.flush()
        commands = self._commands
        newest = {(each.output, each.stream): each.seq for each in commands if type(each) is Publish}
        for (output, stream), seq in newest.items():
            self.reservations.use(output, stream, seq)
        while commands:
            self._carry_out(commands.popleft())
        for driver in self.outputs.drivers:
            driver.flush()

    def catch_up(self) -> None:
        """Do all work that the relay has postponed so that the event loop stays responsive."""
        while self.relay.backlog:
            self.feed(Tick(self.runtime.wall_clock()))

    def _carry_out(self, command: Command) -> None:
        if isinstance(command, Publish):
            self.outputs.drivers[self.views.all[command.output].output].publish(command)
        elif isinstance(command, AnswerReplay | AnswerSnapshot):
            self.driver_of(command.output).answer(command, self._messages(command.answer))
        elif isinstance(command, SendState):
            self.driver_of(command.output).send_state(command)
        elif isinstance(command, RequestReplay | RequestSnapshot):
            self.source_sockets.ask(command)
        elif isinstance(command, CancelReplay):
            self.source_sockets.cancel(command)

    def _tick(self) -> None:
        now = self._loop.time()
        self.process.loop_lag.observe(max(0.0, now - self._next_tick))
        try:
            self.source_sockets.look()
            self.feed(Tick(self.runtime.wall_clock(), self.clock.stood()))
            self._unreachable.look()
            self.discovery.look()
            self._source_log.look_in_turns(self.relay, self.streams)
            self._bus_log.look(now)
            self.admin.look(now)
            if self.state is not None:
                self.state.work()
                self._show_state(self.state)
        finally:
            # in a `finally` block, so that the next tick is scheduled even if this one has failed
            busy = self.state is not None and self.state.busy
            self._next_tick = now if self.relay.backlog else now + (CHECKPOINT_TICK if busy else TICK)
            self._ticker = self._loop.call_at(self._next_tick, self._tick)

    def _state_lost(self, error: StoreError) -> None:
        if self.state is not None:
            self.state.fail(error)

    def _show_state(self, state: StateWriter) -> None:
        self.process.state_writing = not state.failed
        self.process.state_refused = state.refused

    # -- running and shutting down -------------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Start the daemon, wait until ``stop`` is set, and shut down gracefully."""
        await self.start()
        try:
            await stop.wait()
        finally:
            await self.close()

    async def close(self, drain: float | None = None) -> None:
        """Disconnect from the engines, wait until routers have read their queued batches, and close every socket.

        Args:
            drain: maximum seconds in which the replay answers and the queued batches are sent; None for
                ``shutdown_timeout``.
        """
        until = self._loop.time() + (self.config.shutdown_timeout if drain is None else drain)
        await self.discovery.close()
        if self._ticker is not None:
            self._ticker.cancel()
        await self._engine_watch.close()
        await self._moved_names.close()
        await self._unreachable.close()
        self.source_sockets.close_all()
        await self.outputs.drain(until - self._loop.time())
        await self.admin.close()
        await self.fronts.close()
        self.outputs.close(max(0.0, until - self._loop.time()))
        await self.outputs.drain(CLOSING)
        if self.state is not None:
            self.state.close()
        # if the start has failed, no seq was used, and the reservations stay unchanged
        self.reservations.close(next_seqs(self.relay) if self.started else {})
        self._close_store()
        await self.engine_sockets.close()
