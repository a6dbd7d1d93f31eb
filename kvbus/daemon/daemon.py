"""The daemon: a relay, its sockets, a clock, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

from kvbus.admin.http import AdminServer
from kvbus.config import Config, SourceStream
from kvbus.core.commands import (
    AnswerReplay,
    AnswerSnapshot,
    Command,
    Publish,
    RequestReplay,
    RequestSnapshot,
)
from kvbus.core.events import RelayEvent, Tick
from kvbus.core.stats import ProcessStats
from kvbus.core.write_ahead_log import StateError
from kvbus.daemon import build as wiring
from kvbus.daemon.clock import RunningClock
from kvbus.daemon.keys import Keys, in_clear, read_keys, source_domain
from kvbus.daemon.outputs import Outputs, allow, peer_policy_of
from kvbus.daemon.source_sockets import SourceSockets
from kvbus.daemon.state_store import StateStore
from kvbus.errors import StateDirError
from kvbus.transport.sockets import PeerPolicy, check_library, end, make_context
from kvbus.transport.zap import ZapHandler

log = logging.getLogger("kvbus.daemon")

TICK: Final = 0.1
"""Seconds between two looks at deadlines."""

DUMP_TICK: Final = 0.01
"""Seconds between two slices of a dump."""


class Daemon:
    """Runs one configuration. Make it inside a running loop; :meth:`start`, then :meth:`close` or :meth:`run`.

    Args:
        config: what to run.
        keep_seqs: whether the outputs' numbering goes on over a restart (``state_dir``, or the runtime directory).

    Raises:
        ConfigError: a key file cannot be used.
        UnsupportedError: libzmq is too old.
        StateDirError: the directory cannot be used.
    """

    def __init__(self, config: Config, *, keep_seqs: bool = True) -> None:
        check_library()
        self.config = config
        self._loop = asyncio.get_running_loop()
        self.clock = RunningClock(self._loop.time)
        """What the relay's deadlines are measured by."""
        self.keys = read_keys(config)
        self.streams: dict[int, SourceStream] = {stream.index: stream for stream in config.streams()}
        self.process = ProcessStats()
        self.resumed = False
        """The relay goes on where a former process was."""
        self.marks = wiring.Marks(config, self.streams, keep=keep_seqs)
        self.relay = wiring.make_relay(config, self.streams, self.marks)
        self.state = self._load_state() if config.state_dir is not None and keep_seqs else None
        self.started = False
        self._context = make_context()
        self.zap = ZapHandler(self._context)
        allow(self.zap, self.keys)
        before_send = self.state.flush if self.state is not None else None
        self.outputs = Outputs(self._context, config, self.relay, self._feed, before_send, self.clock.time)
        latency = self.process.relay_latency
        self.source_sockets = SourceSockets(
            self._context, self.relay, self._feed, self._feed_live, self.outputs.flush, latency
        )
        self._admin = AdminServer(self)
        self._ticker: asyncio.TimerHandle | None = None
        self._next_tick = 0.0
        self._states: dict[int, str] = {}

    def _load_state(self) -> StateStore | None:
        """Go on where a former process was. What cannot be used is moved aside, and the relay begins empty."""
        if self.config.state_dir is None:
            return None
        store = StateStore(self.config.state_dir, self.identity())
        now = self.clock.time()
        try:
            self.resumed = store.open(self.relay, now)
        except StateError:
            self.relay = wiring.make_relay(self.config, self.streams, self.marks)
            store.open(self.relay, now)
        except OSError as error:
            raise StateDirError(self.config.state_dir, error.strerror or str(error)) from error
        for number, output in enumerate(self.relay.outputs):
            for at, stream in output.open_streams.items():
                stream.next_seq = max(stream.next_seq, self.marks.least(number, at))
        self._show_state(store)
        return store

    def identity(self) -> list[str]:
        """Whose state it is: sources with their slots, and outputs."""
        sources = [f"{slot} {stream.label}" for slot, stream in sorted(self.streams.items())]
        return sources + [output.name for output in self.config.outputs]

    async def start(self) -> None:
        """Bind and connect everything: outputs first, so that routers miss nothing of the catch-up.

        Raises:
            BindError: an endpoint or the HTTP address cannot be bound; nothing is left open.
        """
        for warning in in_clear(self.config):
            log.warning("%s: see curve_secret_key_file", warning)
        try:
            for number, output in enumerate(self.relay.outputs):
                for at in output.open_streams:
                    self.outputs.drivers[number].open(at, self.output_policy(number))
            await self._admin.start()
            if not self.resumed:
                self.carry_out(self.relay.begin(self.clock.time(), time.time()))
            for stream in self.streams.values():
                self.source_sockets.open(stream, self.source_policy(stream))
        except BaseException:
            await self.close(drain=0)
            raise
        self._next_tick = self._loop.time() + TICK
        self._ticker = self._loop.call_at(self._next_tick, self._tick)
        self.started = True

    @property
    def http_address(self) -> tuple[str, int] | None:
        """Where the HTTP server listens, the real port included."""
        return self._admin.address

    def output_policy(self, number: int, keys: Keys | None = None) -> PeerPolicy:
        """What an output takes from its routers."""
        return peer_policy_of(self.config, number, self.keys if keys is None else keys)

    def source_policy(self, stream: SourceStream) -> PeerPolicy:
        """What a source takes from its engine."""
        domain = source_domain(self.config.sources[stream.source_index].name)
        return PeerPolicy(self.config.limits.max_frame_bytes, self.keys.get(domain), domain)

    def _feed(self, event: RelayEvent) -> None:
        self.carry_out(self.relay.handle(event, self.clock.time()))

    def _feed_live(self, event: RelayEvent) -> None:
        """One of a burst of batches: what follows from it is sent when the burst is over."""
        for command in self.relay.handle(event, self.clock.time()):
            self._carry_out(command)

    def carry_out(self, commands: list[Command]) -> None:
        """Do what the relay says."""
        for command in commands:
            self._carry_out(command)
        self.outputs.flush()

    def _carry_out(self, command: Command) -> None:
        if isinstance(command, Publish):
            self.marks.use(command.output, command.stream, command.seq)
            self.outputs.drivers[command.output].publish(command)
        elif isinstance(command, AnswerReplay | AnswerSnapshot):
            self.outputs.drivers[command.output].answer(command)
        elif isinstance(command, RequestReplay | RequestSnapshot):
            self.source_sockets.ask(command)
        else:
            self.source_sockets.cancel(command)

    def _tick(self) -> None:
        now = self._loop.time()
        self.process.loop_lag.observe(max(0.0, now - self._next_tick))
        try:
            self._feed(Tick(time.time()))
            self._log_states()
            if self.state is not None:
                self.state.flush()
                self.state.work()
                self._show_state(self.state)
        finally:
            # whatever went wrong: the clock goes on
            dumping = self.state is not None and self.state.busy
            self._next_tick = now if self.relay.backlog else now + (DUMP_TICK if dumping else TICK)
            self._ticker = self._loop.call_at(self._next_tick, self._tick)

    def _show_state(self, store: StateStore) -> None:
        self.process.state_writing = not store.failed
        self.process.state_refused = store.refused

    def _log_states(self) -> None:
        for slot in self.streams:
            source = self.relay.sources[slot]
            before = self._states.get(slot, "connecting")
            if source.state != before:
                log.info(
                    "source %s: %s -> %s, epoch %d, next seq %d, %d blocks",
                    source.spec.label,
                    before,
                    source.state,
                    source.sequencer.epoch,
                    source.sequencer.next,
                    len(source.normalizer.index),
                )
                self._states[slot] = source.state

    async def run(self, stop: asyncio.Event) -> None:
        """Run until ``stop`` is set, then end in order."""
        await self.start()
        try:
            await stop.wait()
        finally:
            await self.close()

    async def close(self, drain: float | None = None) -> None:
        """Stop listening to engines, give routers ``drain`` seconds to take what is theirs, and close every socket.

        Args:
            drain: None for ``shutdown_timeout``. It is for the replay answers under way and for what is queued, both.
        """
        until = self._loop.time() + (self.config.shutdown_timeout if drain is None else drain)
        if self._ticker is not None:
            self._ticker.cancel()
        self.source_sockets.close_all()
        await self.outputs.drain(until - self._loop.time())
        await self._admin.close()
        self.outputs.close(max(0.0, until - self._loop.time()))
        self.zap.close()
        if self.state is not None:
            self.state.close()
        # a start that failed has used no number: the file may be that of the process that holds the endpoints
        self.marks.close(self.relay if self.started else None)
        await asyncio.sleep(0)  # descriptors are let go one turn after their sockets were closed
        await asyncio.sleep(0)
        await asyncio.to_thread(end, self._context)
