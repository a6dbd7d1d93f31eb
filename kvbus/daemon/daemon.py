"""The daemon: a relay, its sockets, a clock, changes while it runs, and a graceful shutdown."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

from kvbus.admin.credentials import read_credentials
from kvbus.admin.http import AdminServer
from kvbus.config import Config, SourceStream
from kvbus.core.commands import (
    AnswerReplay,
    AnswerSnapshot,
    CancelReplay,
    Command,
    Publish,
    RequestReplay,
    RequestSnapshot,
    SendPart,
    SendState,
)
from kvbus.core.events import (
    AnswerPulled,
    OutputPlaced,
    RelayEvent,
    SourceDown,
    SourcePlaced,
    SourceRemoved,
    Started,
    Tick,
)
from kvbus.core.stats import OutputStats, ProcessStats
from kvbus.daemon.build import (
    add_reservation,
    add_reservations,
    new_stream,
    next_seqs,
    output_spec,
    reserve_seqs,
    source_spec,
)
from kvbus.daemon.cache_reset import CacheResets
from kvbus.daemon.change import Change, must_reconnect, only_list
from kvbus.daemon.clock import RunningClock
from kvbus.daemon.discovery import Discovery
from kvbus.daemon.disk import Disk
from kvbus.daemon.engine_watch import EngineWatch
from kvbus.daemon.found_file import FoundFile
from kvbus.daemon.keys import Keys, in_clear, output_domain, rank_domain, read_keys, read_state_keys_of, source_domain
from kvbus.daemon.outputs import Outputs, allow, peer_policy_of
from kvbus.daemon.placement import Placement, PlacementFile, forget, place, worker_of
from kvbus.daemon.resume import identity, resume
from kvbus.daemon.seq_reservation import MARGIN
from kvbus.daemon.source_log import SourceLog
from kvbus.daemon.source_sockets import SourceSockets
from kvbus.daemon.state_place import Place, open_place
from kvbus.daemon.state_store import StateStore
from kvbus.daemon.unreachable import Unreachable
from kvbus.daemon.views import Views
from kvbus.errors import BindError, StateDirError
from kvbus.outputs.contract import OutputDriver, ViewDriver
from kvbus.telemetry.discovery import DiscoveryStats
from kvbus.transport.sockets import PeerPolicy, check_library, end, make_context
from kvbus.transport.zap import ZapHandler

log = logging.getLogger("kvbus.daemon")

TICK: Final = 0.1
"""Seconds between two ticks, which check deadlines."""

CHECKPOINT_TICK: Final = 0.01
"""Seconds between two slices of a checkpoint."""

BIND_AGAIN: Final = 0.01
"""Seconds until the daemon tries an address again that it has just given up."""

BIND_ATTEMPTS: Final = 200


class Daemon:
    """Runs one configuration. Make it inside a running loop, then call :meth:`run`, or :meth:`start` and :meth:`close`.

    Args:
        config: the configuration to run.
        keep_seqs: False keeps no seq reservations and no state on disk, whatever ``state_dir`` says.
        disk: the real one, or a test's.

    Raises:
        ConfigError: a file with keys, tokens or certificates cannot be used.
        InUseError: another process uses the same state or the same numbering.
        UnsupportedError: libzmq is too old.
        StateDirError: ``state_dir`` cannot be used.
        StateKeyError: the state cannot be opened with ``state_key_file``.
    """

    def __init__(self, config: Config, *, keep_seqs: bool = True, disk: Disk | None = None) -> None:
        check_library()
        self._loop = asyncio.get_running_loop()
        self.changing = asyncio.Lock()
        """Held while the configuration changes."""
        self.streams: dict[int, SourceStream] = {}
        self.discovery = Discovery(self, config)
        self.clock = RunningClock(self._loop.time)
        """The clock of the relay's deadlines."""
        state_keys = read_state_keys_of(config)
        credentials = read_credentials(config)
        self.process = ProcessStats()
        self.process.views_limit = config.limits.max_views
        self._disk = disk or Disk()
        self._place = open_place(config, self._disk) if keep_seqs else Place()
        try:
            directory = self._place.seq_directory if keep_seqs else None
            self.discovery.begin_with(FoundFile(directory, config, self._disk))
            self.config = config = self.discovery.preview(config)
            self.keys = read_keys(config)
            self.views = Views(config, self.keys)
            self._placement_file = PlacementFile(directory, config, self._disk)
            self.placement = place(self._placement_file.read(), config)
            self.streams = self.placement.streams(config)
            self.reservations = reserve_seqs(config, self.placement, directory, self._disk, self.views)
            try:
                found = resume(
                    config,
                    self.placement,
                    self._place.directory,
                    self.reservations,
                    self._disk,
                    self.clock.time(),
                    state_keys,
                    self.views,
                    self.views.identity(config, self.keys),
                )
            except BaseException:
                self.reservations.release()
                raise
        except BaseException:
            self._place.release()
            raise
        self.relay, self.state, self.restored = found
        self.started = False
        self._context = make_context()
        self.zap = ZapHandler(self._context)
        allow(self.zap, config, self.keys)
        before_send = self.state.flush if self.state is not None else None
        self.outputs = Outputs(config, self.feed, self.pull, before_send, self.clock.time)
        latency = self.process.relay_latency
        self.source_sockets = SourceSockets(self._context, self.feed, self._feed_live, self.outputs.flush, latency)
        self.admin = AdminServer(self, credentials)
        self._cache_resets = CacheResets(self, self.feed)
        self._engine_watch = EngineWatch(self, self.feed)
        self._ticker: asyncio.TimerHandle | None = None
        self._next_tick = 0.0
        self._source_log = SourceLog(self.admin.timeline.add)
        self._unreachable = Unreachable(self, self.feed, lambda stream: self._source_policy(stream).curve)

    def _begin_state(self) -> None:
        """Write the state from now on. Everything is bound, so no other process needs the state on disk."""
        if self.state is None:
            return
        try:
            self.state.begin(self.relay)
        except OSError as error:
            if self.config.state_dir != "auto":
                raise StateDirError(self.config.state_dir, error.strerror or str(error)) from error
            self.state.fail(error)
        self._show_state(self.state)

    async def start(self) -> None:
        """Bind and connect everything: outputs before sources, so that routers miss nothing of the catch-up.

        The daemon writes the state only after that: a process that cannot bind leaves the state on disk as it is.
        Between the first of these sockets and the state it awaits nothing, so it relays nothing that it does not keep.

        Raises:
            BindError: an endpoint or the HTTP address cannot be bound; all sockets are closed again.
            StateDirError: the daemon cannot write to ``state_dir``.
        """
        for warning in in_clear(self.config):
            log.warning("%s: see curve_secret_key_file", warning)
        try:
            await self.admin.start()
            for number, driver in enumerate(self.outputs.drivers):
                for slot, stream in self.relay.outputs[number].served_streams.items():
                    driver.open(slot, stream.topic, self._output_policy(number))
            self._serve_views()
            for source in self.streams.values():
                self.source_sockets.open(source, self._source_policy(source))
            self._keep_slots()
            self._begin_state()
            if not self.restored:
                self.feed(Started(time.time()))
        except BaseException:
            await self.close(drain=0)
            raise
        self._engine_watch.start()
        self._next_tick = self._loop.time() + TICK
        self._ticker = self._loop.call_at(self._next_tick, self._tick)
        self.started = True
        self.discovery.start()

    def _keep_slots(self) -> None:
        """Keep who has which slot, before anything of them is sent."""
        placement, process = self.placement, self.process
        self._placement_file.keep(placement)
        process.slots_gone = len(placement.gone)
        process.slots_present = len(placement.slots) - len(placement.gone)
        process.slots_limit = self.config.limits.max_sources
        self._widen()

    def _widen(self) -> None:
        for number, view in enumerate(self.views.all):
            if not view.closed and self.config.outputs[view.output].layout == "merged":
                self.reservations.widen(number, max(self.streams, default=-1) + 1)

    @property
    def drivers(self) -> list[OutputDriver]:
        """The driver of each output."""
        return self.outputs.drivers

    @property
    def output_stats(self) -> list[OutputStats]:
        """What each driver counts."""
        return self.outputs.stats

    @property
    def discoveries(self) -> list[DiscoveryStats]:
        """What each entry counts that finds engines."""
        return self.discovery.stats

    @property
    def http_address(self) -> tuple[str, int] | None:
        """The HTTP server's address, with its real port; None without one."""
        return self.admin.address

    def _driver(self, number: int) -> OutputDriver:
        """Return the driver of an output or a view."""
        return self.outputs.drivers[self.views.all[number].output]

    def _serve_views(self) -> None:
        """Open the streams of views that are to be served, and close the others."""
        for driver in self.outputs.drivers:
            if isinstance(driver, ViewDriver):
                for number, slot in driver.views:
                    if slot not in self.relay.outputs[number].open_streams:
                        driver.close_view(number, slot)
        for number in range(len(self.outputs.drivers), len(self.views.all)):
            driver = self._driver(number)
            if isinstance(driver, ViewDriver):
                for slot, stream in self.relay.outputs[number].open_streams.items():
                    if (number, slot) not in driver.views:
                        driver.open_view(number, slot, stream.topic)

    def _output_policy(self, number: int) -> PeerPolicy:
        return peer_policy_of(self.config, number, self.keys, self.views)

    def _source_policy(self, stream: SourceStream) -> PeerPolicy:
        name = self.config.sources[stream.source_index].name
        curve = self.keys.get(source_domain(name))
        return PeerPolicy(self.config.limits.max_frame_bytes, curve, rank_domain(name, stream.rank))

    def feed(self, event: RelayEvent) -> None:
        """Hand an event to the relay, and carry out its commands."""
        self.carry_out(self.relay.handle(event, self.clock.time()))

    def pull(self, event: AnswerPulled) -> SendPart:
        """Hand a pull to the relay, and carry out its commands but the last one, which is the part."""
        commands = self.relay.handle(event, self.clock.time())
        (part,) = (command for command in commands if isinstance(command, SendPart))
        self.carry_out([command for command in commands if command is not part])
        return part

    def _feed_live(self, event: RelayEvent) -> None:
        """Hand one batch of a burst to the relay. Its output is sent after the burst."""
        for command in self.relay.handle(event, self.clock.time()):
            self._carry_out(command)

    def carry_out(self, commands: list[Command]) -> None:
        """Carry out the relay's commands, and send."""
        for command in commands:
            self._carry_out(command)
        self.outputs.flush()

    def catch_up(self) -> None:
        """Do all work that the relay has put off to keep the event loop responsive."""
        while self.relay.backlog:
            self.feed(Tick(time.time()))

    def _carry_out(self, command: Command) -> None:
        if isinstance(command, Publish):
            self.reservations.use(command.output, command.stream, command.seq)
            self._driver(command.output).publish(command)
        elif isinstance(command, AnswerReplay | AnswerSnapshot):
            self._driver(command.output).answer(command)
        elif isinstance(command, SendState):
            self._driver(command.output).send_state(command)
        elif isinstance(command, RequestReplay | RequestSnapshot):
            self.source_sockets.ask(command)
        elif isinstance(command, CancelReplay):
            self.source_sockets.cancel(command)

    def _tick(self) -> None:
        now = self._loop.time()
        self.process.loop_lag.observe(max(0.0, now - self._next_tick))
        try:
            self.feed(Tick(time.time()))
            self._unreachable.look()
            self.discovery.look()
            self._source_log.look(self.relay, self.streams)
            self.admin.look(now)
            self._cache_resets.look()
            if self.state is not None:
                self.state.flush()
                self.state.work()
                self._show_state(self.state)
        finally:
            # the next tick comes even after an error
            busy = self.state is not None and self.state.busy
            self._next_tick = now if self.relay.backlog else now + (CHECKPOINT_TICK if busy else TICK)
            self._ticker = self._loop.call_at(self._next_tick, self._tick)

    def _show_state(self, store: StateStore) -> None:
        self.process.state_writing = not store.failed
        self.process.state_refused = store.refused

    # -- changes while it runs -----------------------------------------------------------------------------------------

    async def apply(self, change: Change, keys: Keys) -> None:
        """Change to another configuration.

        Raises:
            BindError: an endpoint of an added stream cannot be bound; nothing has changed.
            InUseError: another process numbers an added stream; nothing has changed.
            ConfigError: the owners of keys have too many different rights; nothing has changed.
        """
        self.views.wanted(change.config, keys)
        placement = self._make_room(change)
        self._open_streams(change, placement)
        self.config = change.config
        self.placement = placement
        self.streams = placement.streams(change.config)
        self._keep_slots()
        for slot in change.removed:
            self._remove(slot)
        for stream in change.replaced:
            self._replace(stream)
        if change.replaced or change.removed:
            for number in range(len(self.outputs.drivers)):
                if self.views.of_output(number):  # what its routers see depends on what the sources are called
                    self.outputs.drivers[number].allow(self._output_policy(number))
            self._serve_views()
        await self.apply_keys(keys, without=frozenset(stream.index for stream in change.replaced))
        for stream in change.replaced:
            await self._open_source(stream)
        for stream in change.moved:
            await self._reconnect(stream)
        if change.replaced or change.removed:
            if self.state is not None:
                self.catch_up()
                self.state.rename(self._identity)
            counts = len(change.added), len(change.changed), len(change.removed)
            log.info("sources: %d added, %d changed, %d removed", *counts)
        logging.getLogger().setLevel(change.config.log_level.upper())

    async def apply_keys(self, keys: Keys, without: frozenset[int] = frozenset()) -> None:
        """Change to other keys. Peers that must show their keys again have to reconnect; all others stay connected.

        Args:
            keys: all keys.
            without: slots whose sources are opened anew anyway.

        Raises:
            ConfigError: their owners have too many different rights; nothing has changed.
        """
        changed, known = self._change_views(keys), self._identity
        before, self.keys = self.keys, keys
        allow(self.zap, self.config, keys)
        for domain in before.keys() - keys.keys():
            self.zap.forget(domain)
        for number, output in enumerate(self.config.outputs):
            domain = output_domain(output.name)
            was, now = before.get(domain), keys.get(domain)
            if only_list(was, now) and self.outputs.drivers[number].allow(self._output_policy(number)):
                log.info(
                    "output %s: another list of routers that may connect", output.name, extra={"output": output.name}
                )
            elif must_reconnect(was, now):
                text = "output %s: keys changed or removed, every router has to connect again"
                log.info(text, output.name, extra={"output": output.name})
                self.outputs.drivers[number].reopen(self._output_policy(number))
        self._place_views(changed)
        if self.state is not None and self._identity != known:
            self.catch_up()
            self.state.rename(self._identity)
        for slot, stream in self.streams.items():
            domain = source_domain(self.config.sources[stream.source_index].name)
            if slot not in without and must_reconnect(before.get(domain), keys.get(domain)):
                log.info("source %s: keys changed or removed, connecting again", stream.label, extra=stream.log_fields)
                await self._reconnect(stream)

    async def _reconnect(self, stream: SourceStream) -> None:
        """Connect to the engine of a source anew: whether it is in the same epoch shows then."""
        self.feed(SourceDown(stream.index))
        self.source_sockets.close(stream.index)
        await self._open_source(stream)

    @property
    def _identity(self) -> list[str]:
        return identity(self.config, self.streams, self.views.identity(self.config, self.keys))

    def _change_views(self, keys: Keys) -> list[int]:
        """Find out which views there are to be now; the numbers of those that change.

        Raises:
            ConfigError: there would be too many; nothing has changed.
        """
        changed = self.views.change(self.config, keys)
        before = next_seqs(self.relay)
        unseen = (max(before.values(), default=0) // MARGIN + 1) * MARGIN
        for number in changed:
            view = self.views.all[number]
            self.reservations.drop(number, before)
            if not view.closed:
                add_reservations(self.reservations, self.config, view, number, self.placement)
                self.reservations.skip(unseen, output=number)
        return changed

    def _place_views(self, changed: list[int]) -> None:
        """Begin with other views. Whoever has lost its view is disconnected already."""
        commands: list[Command] = []
        for number in changed:
            view, driver = self.views.all[number], self._driver(number)
            if isinstance(driver, ViewDriver):
                for _, slot in [each for each in driver.views if each[0] == number]:
                    driver.close_view(number, slot)
            spec = output_spec(self.config, view, number, self.streams, self.reservations)
            commands += self.relay.handle(OutputPlaced(number, spec), self.clock.time())
        self._widen()
        self._serve_views()
        self.carry_out(commands)

    def _make_room(self, change: Change) -> Placement:
        """End the streams under topics whose workers lose their slots to others.

        Routers that are connected get the clear before; one that comes later never hears of them.
        """
        if all(output.layout == "per_source" for output in self.config.outputs):
            return change.placement
        lost = {slot: worker for worker, slot in self.placement.slots.items() if worker not in change.placement.slots}
        numbers = [number for number, output in enumerate(self.config.outputs) if output.layout == "per_topic"]
        for slot, worker in lost.items():
            log.warning("source %s, rank %d: another one needs its slot %d", *worker, slot)
            if not self.relay.sources[slot].gone:
                self.source_sockets.close(slot)
                self.feed(SourceRemoved(slot))
            for number in numbers:
                self.outputs.drivers[number].retire(slot)
        reached = [self.reservations.first(number, slot) for number in numbers for slot in lost]
        placement = forget(change.placement, reached)
        self._placement_file.keep(placement)  # before the files of those that it forgets are gone
        for number in numbers:
            for slot in lost:
                self.reservations.forget(number, slot)
        self.process.slots_reused += len(lost)
        return placement

    def _open_streams(self, change: Change, placement: Placement) -> None:
        """Open the outputs' streams of added sources: all of them, or none.

        A change leaves the outputs as they are.
        """
        config = change.config
        opened: list[tuple[OutputDriver, int]] = []
        try:
            for number, view in enumerate(self.views.all):
                layout = config.outputs[view.output].layout
                if view.closed or layout == "merged":
                    continue
                if number >= len(self.outputs.drivers):
                    add_reservations(self.reservations, config, view, number, placement)
                    continue
                driver = self.outputs.drivers[number]
                by_topic = layout == "per_topic"
                for stream in change.replaced if by_topic else change.added:
                    if by_topic and stream.index in driver.streams:
                        continue  # it was here before
                    worker = worker_of(config, stream)
                    add_reservation(self.reservations, config, view, number, placement, worker)
                    topic = new_stream(config, view, worker, 0).topic or b""
                    driver.open(stream.index, topic, peer_policy_of(config, number, self.keys, self.views))
                    opened.append((driver, stream.index))
        except BaseException:
            for driver, slot in opened:
                driver.close(slot)
            raise

    def _remove(self, slot: int) -> None:
        self.source_sockets.close(slot)
        self.feed(SourceRemoved(slot))
        for number, output in enumerate(self.config.outputs):
            if output.layout == "per_source":
                self.outputs.drivers[number].close(slot, self.config.shutdown_timeout)

    def _replace(self, stream: SourceStream) -> None:
        """Begin with a source in its slot, instead of the one that is there."""
        slot = stream.index
        self.source_sockets.close(slot)
        streams = [
            new_stream(
                self.config,
                view,
                worker_of(self.config, stream),
                0 if self.config.outputs[view.output].layout == "merged" else self.reservations.first(number, slot),
            )
            for number, view in enumerate(self.views.all)
        ]
        self.feed(SourcePlaced(slot, source_spec(self.config, stream), streams))

    async def _open_source(self, stream: SourceStream) -> None:
        """Open a source's socket. Its address may be one that was given up a moment ago.

        If another process has the address, the source stays without a connection until a later reload.
        """
        for _ in range(BIND_ATTEMPTS):
            try:
                self.source_sockets.open(stream, self._source_policy(stream))
            except BindError as error:
                reason = error
            else:
                return
            await asyncio.sleep(BIND_AGAIN)
        text = "source %s is not connected: %s; reload again once the address is free"
        log.error(text, stream.label, reason, extra=stream.log_fields)

    # -- the end -------------------------------------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Run until ``stop`` is set, then shut down gracefully."""
        await self.start()
        try:
            await stop.wait()
        finally:
            await self.close()

    async def close(self, drain: float | None = None) -> None:
        """Stop listening to engines, give routers time to read what is queued for them, and close every socket.

        Args:
            drain: seconds for both the replay answers under way and the queued batches; None for
                ``shutdown_timeout``.
        """
        until = self._loop.time() + (self.config.shutdown_timeout if drain is None else drain)
        await self.discovery.close()
        if self._ticker is not None:
            self._ticker.cancel()
        await self._cache_resets.close()
        await self._engine_watch.close()
        await self._unreachable.close()
        self.source_sockets.close_all()
        await self.outputs.drain(until - self._loop.time())
        await self.admin.close()
        self.outputs.close(max(0.0, until - self._loop.time()))
        self.zap.close()
        if self.state is not None:
            self.state.close()
        # a failed start has used no seq
        self.reservations.close(next_seqs(self.relay) if self.started else {})
        self._place.release()
        await asyncio.sleep(0)  # asyncio releases descriptors one turn after their sockets are closed
        await asyncio.sleep(0)
        await asyncio.to_thread(end, self._context)
