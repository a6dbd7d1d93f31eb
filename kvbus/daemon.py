"""The daemon: a relay, its sockets, a clock, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import time
from collections.abc import Callable
from typing import Final

from kvbus.admin.http import AdminServer
from kvbus.config import Config, OutputConfig, SourceStream, render_topic
from kvbus.core.commands import (
    AnswerReplay,
    AnswerSnapshot,
    CancelReplay,
    Command,
    Publish,
    RequestReplay,
    RequestSnapshot,
)
from kvbus.core.encoding import PROFILES, Profile
from kvbus.core.events import (
    BatchReceived,
    RelayEvent,
    ReplayAsked,
    ReplayReceived,
    SnapshotAsked,
    SnapshotReceived,
    SourceDown,
    SourceUp,
    Tick,
)
from kvbus.core.frames import PUBLISHER_ID_BYTES, Limits, replay_request
from kvbus.core.normalize import Rules
from kvbus.core.parts import OutputSpec, SourceSpec
from kvbus.core.persist import StateError
from kvbus.core.relay import Relay
from kvbus.core.sequencer import Settings
from kvbus.core.snapshot import REQUEST as SNAPSHOT_REQUEST
from kvbus.core.stats import ProcessStats
from kvbus.errors import BindError, StateDirError
from kvbus.marks import SeqMarks, default_directory
from kvbus.statestore import StateStore
from kvbus.transport.egress import LiveOutput
from kvbus.transport.ingress import LiveStream, Question
from kvbus.transport.pump import Handler
from kvbus.transport.replay import Budget, ReplayServer
from kvbus.transport.sockets import Context

log = logging.getLogger("kvbus.daemon")

TICK: Final = 0.05
"""Seconds between two looks at deadlines."""

DRAIN: Final = 2.0
"""Seconds that routers get, at the end, to take what is still queued for them."""


class Daemon:
    """Runs one configuration. Make it inside a running loop; :meth:`start`, then :meth:`close` or :meth:`run`.

    Args:
        config: what to run.
        keep_seqs: whether the outputs' numbering goes on over a restart (``state_dir``, or the runtime directory).
    """

    def __init__(self, config: Config, *, keep_seqs: bool = True) -> None:
        self.config = config
        self.streams = config.streams()
        self.process = ProcessStats()
        self.resumed = False
        """The relay goes on where a former process was."""
        self._marks, self._mark_of = _open_marks(config, len(self.streams), keep=keep_seqs)
        self.relay = self._make_relay()
        self._state = self._load_state() if config.state_dir is not None and keep_seqs else None
        self.started = False
        self._loop = asyncio.get_running_loop()
        self._context = Context()
        self._budgets = [Budget(config.limits.max_replay_sessions, output.stats) for output in self.relay.outputs]
        self._live: list[LiveStream] = []
        self._questions: dict[tuple[int, int], Question] = {}
        self._outputs: dict[tuple[int, int], LiveOutput] = {}
        self._servers: dict[tuple[int, int], ReplayServer] = {}
        self._snapshots: dict[tuple[int, int], ReplayServer] = {}
        self._admin = AdminServer(self)
        self._ticker: asyncio.TimerHandle | None = None
        self._next_tick = 0.0
        self._states: list[str] = []

    def _make_relay(self) -> Relay:
        config = self.config
        return Relay(
            [_source_spec(config, stream) for stream in self.streams],
            [
                _output_spec(config, output, self.streams, [self._marks.first(mark) for mark in self._mark_of[number]])
                for number, output in enumerate(config.outputs)
            ],
            Limits(config.limits.max_frames, config.limits.max_frame_bytes, config.limits.max_events),
        )

    def _load_state(self) -> StateStore | None:
        """Go on where a former process was. What cannot be used is moved aside, and the relay begins empty."""
        if self.config.state_dir is None:
            return None
        names = [stream.label for stream in self.streams] + [output.name for output in self.config.outputs]
        store = StateStore(self.config.state_dir, names)
        now = asyncio.get_running_loop().time()
        try:
            self.resumed = store.open(self.relay, now)
        except StateError:
            self.relay = self._make_relay()
            store.open(self.relay, now)
        except OSError as error:
            raise StateDirError(self.config.state_dir, error.strerror or str(error)) from error
        for number, output in enumerate(self.relay.outputs):
            for at, stream in enumerate(output.streams):
                stream.next_seq = max(stream.next_seq, self._marks.least(self._mark_of[number][at]))
        self._show_state(store)
        return store

    async def start(self) -> None:
        """Bind and connect everything: outputs first, so that routers miss nothing of the catch-up.

        Raises:
            BindError: an endpoint or the HTTP address cannot be bound; nothing is left open.
        """
        try:
            for number, output in enumerate(self.config.outputs):
                for at in range(len(self.relay.outputs[number].streams)):
                    self._open_output(number, output, at)
            await self._admin.start()
            if not self.resumed:
                for command in self.relay.begin(self._loop.time(), time.time()):
                    self._carry_out(command)
            for stream in self.streams:
                self._open_source(stream)
        except BaseException:
            await self.close(drain=0)
            raise
        self._states = [source.state for source in self.relay.sources]
        self._next_tick = self._loop.time() + TICK
        self._ticker = self._loop.call_at(self._next_tick, self._tick)
        self.started = True

    @property
    def http_address(self) -> tuple[str, int] | None:
        """Where the HTTP server listens, the real port included."""
        return self._admin.address

    def _open_output(self, number: int, output: OutputConfig, at: int) -> None:
        endpoints = output.stream_endpoints(at)
        before_send = self._state.flush if self._state is not None else None
        stats = self.relay.outputs[number].stats
        self._outputs[number, at] = LiveOutput(
            self._context,
            endpoints.endpoint,
            bind=output.bind,
            send_hwm=output.send_hwm,
            queue_limit=output.queue_batches,
            stats=stats,
            before_send=before_send,
        )
        log.info("output %s: %s %s", output.name, "bound" if output.bind else "dialling", endpoints.endpoint)
        if endpoints.replay_endpoint is not None:
            self._servers[number, at] = ReplayServer(
                self._context,
                endpoints.replay_endpoint,
                on_request=self._asker(number, at),
                stats=stats,
                budget=self._budgets[number],
                before_send=before_send,
            )
            log.info("output %s: replay at %s", output.name, endpoints.replay_endpoint)
        if endpoints.snapshot_endpoint is not None:
            self._snapshots[number, at] = ReplayServer(
                self._context,
                endpoints.snapshot_endpoint,
                on_request=self._snapshot_asker(number, at),
                stats=stats,
                budget=self._budgets[number],
                before_send=before_send,
            )
            log.info("output %s: snapshots at %s", output.name, endpoints.snapshot_endpoint)

    def _asker(self, number: int, at: int) -> Handler:
        return lambda frames: self._feed(ReplayAsked(number, at, frames))

    def _snapshot_asker(self, number: int, at: int) -> Handler:
        return lambda frames: self._feed(SnapshotAsked(number, at, frames))

    def _open_source(self, stream: SourceStream) -> None:
        self._live.append(
            LiveStream(
                self._context,
                stream.endpoint,
                bind=stream.bind,
                topic=stream.topic,
                on_message=self._receiver(stream.index),
                on_connection=self._connector(stream),
            )
        )
        log.info("source %s: %s %s", stream.label, "bound" if stream.bind else "connecting to", stream.endpoint)

    def _receiver(self, index: int) -> Handler:
        latency = self.process.relay_latency
        clock = time.perf_counter

        def received(frames: list[bytes]) -> None:
            begin = clock()
            self._feed(BatchReceived(index, frames))
            latency.observe(clock() - begin)

        return received

    def _connector(self, stream: SourceStream) -> Callable[[bool], None]:
        def changed(up: bool) -> None:
            log.info("source %s: %s", stream.label, "connected" if up else "connection lost")
            self._feed(SourceUp(stream.index) if up else SourceDown(stream.index))

        return changed

    def _feed(self, event: RelayEvent) -> None:
        for command in self.relay.handle(event, self._loop.time()):
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        if isinstance(command, Publish):
            self._marks.use(self._mark_of[command.output][command.stream], command.seq)
            self._outputs[command.output, command.stream].publish(
                command.topic, command.seq.to_bytes(8, "big") + command.publisher_id, command.payload, command.events
            )
        elif isinstance(command, AnswerReplay):
            self._servers[command.output, command.stream].send(command.answer)
        elif isinstance(command, AnswerSnapshot):
            self._snapshots[command.output, command.stream].send(command.answer)
        elif isinstance(command, RequestReplay):
            self._ask(command)
        elif isinstance(command, RequestSnapshot):
            self._ask_snapshot(command)
        else:
            self._cancel(command)

    def _ask(self, command: RequestReplay) -> None:
        endpoint = self.streams[command.source].replay_endpoint
        if endpoint is None:  # pragma: no cover - the relay knows which sources have a replay
            return

        def received(frames: list[bytes]) -> None:
            self._feed(ReplayReceived(command.source, command.request, frames))

        request = replay_request(command.start)
        self._questions[command.source, command.request] = Question(self._context, endpoint, request, received)
        log.debug("source %s: replay asked from %d", self.streams[command.source].label, command.start)

    def _ask_snapshot(self, command: RequestSnapshot) -> None:
        endpoint = self.streams[command.source].snapshot_endpoint
        if endpoint is None:  # pragma: no cover - the relay knows which sources have snapshots
            return

        def received(frames: list[bytes]) -> None:
            self._feed(SnapshotReceived(command.source, command.request, frames))

        self._questions[command.source, command.request] = Question(
            self._context, endpoint, [SNAPSHOT_REQUEST], received
        )

    def _cancel(self, command: CancelReplay) -> None:
        client = self._questions.pop((command.source, command.request), None)
        if client is not None:
            client.close()

    def _tick(self) -> None:
        now = self._loop.time()
        self.process.loop_lag.observe(max(0.0, now - self._next_tick))
        try:
            self._feed(Tick(time.time()))
            self._log_states()
            if self._state is not None:
                self._state.flush()
                self._state.work()
                self._show_state(self._state)
        finally:
            # whatever went wrong: the clock goes on
            self._next_tick = now if self.relay.backlog else now + TICK
            self._ticker = self._loop.call_at(self._next_tick, self._tick)

    def _show_state(self, store: StateStore) -> None:
        self.process.state_writing = not store.failed
        self.process.state_refused = store.refused

    def _log_states(self) -> None:
        for i, source in enumerate(self.relay.sources):
            if source.state != self._states[i]:
                log.info(
                    "source %s: %s -> %s, epoch %d, next seq %d, %d blocks",
                    source.spec.label,
                    self._states[i],
                    source.state,
                    source.sequencer.epoch,
                    source.sequencer.next,
                    len(source.normalizer.index),
                )
                self._states[i] = source.state

    async def run(self, stop: asyncio.Event) -> None:
        """Run until ``stop`` is set, then end in order."""
        await self.start()
        try:
            await stop.wait()
        finally:
            await self.close()

    async def close(self, drain: float = DRAIN) -> None:
        """Stop listening, give routers ``drain`` seconds to take what is queued, and close every socket."""
        if self._ticker is not None:
            self._ticker.cancel()
        await self._admin.close()
        for live in self._live:
            live.close()
        for client in self._questions.values():
            client.close()
        for server in (*self._servers.values(), *self._snapshots.values()):
            server.close()
        for output in self._outputs.values():
            output.close(drain)
        if self._state is not None:
            self._state.close()
        # a start that failed has used no number: the file may be that of the process that holds the endpoints
        used = [stream.next_seq for output in self.relay.outputs for stream in output.streams]
        self._marks.close(used if self.started else [])
        await asyncio.sleep(0)  # descriptors are let go one turn after their sockets were closed
        await asyncio.sleep(0)
        await asyncio.to_thread(self._context.destroy)


async def serve(config: Config) -> None:
    """Run the daemon until SIGTERM or SIGINT; a second signal ends the process at once.

    Raises:
        BindError: an endpoint is taken.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def asked(signum: int) -> None:
        if stop.is_set():
            # the default action: whoever waits for this process sees that it was killed
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
        log.info("%s: ending; once more to end at once", signal.Signals(signum).name)
        stop.set()

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, asked, signum)
    try:
        await Daemon(config).run(stop)
    finally:
        for signum in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ValueError):
                loop.remove_signal_handler(signum)


def _source_spec(config: Config, stream: SourceStream) -> SourceSpec:
    settings = Settings(
        replay=stream.replay_endpoint is not None,
        snapshot=stream.snapshot_endpoint is not None,
        replay_timeout=config.replay_timeout,
        probe_interval=config.probe_interval,
        reorder_batches=config.reorder_batches,
        reorder_bytes=config.limits.max_held_bytes,
        trust_unverified=config.on_lost == "keep",
    )
    rules = Rules(
        block_size=None if config.block_size == "auto" else config.block_size,
        duplicates=config.duplicates,
        groups=config.groups,
        orphans=config.orphans,
        max_blocks=config.limits.max_blocks,
    )
    return SourceSpec(stream.label, stream.rank, settings, rules, config.on_lost, config.source_timeout, stream.topic)


def _open_marks(config: Config, sources: int, *, keep: bool) -> tuple[SeqMarks, list[list[int]]]:
    """The marks of all outgoing streams, and which one belongs to which stream of which output."""
    names: list[str] = []
    places: list[list[int]] = []
    for output in config.outputs:
        count = 1 if output.layout == "merged" else sources
        places.append(list(range(len(names), len(names) + count)))
        names += [f"{output.name} {output.stream_endpoints(at).endpoint}" for at in range(count)]
    directory = config.state_dir or default_directory()
    return SeqMarks(directory if keep else None, names), places


def _output_spec(
    config: Config, output: OutputConfig, streams: list[SourceStream], first_seqs: list[int]
) -> OutputSpec:
    merged = output.layout == "merged"
    served = streams[:1] if merged else streams
    topics = [None if output.topic is None else render_topic(output.topic, stream, config) for stream in served]
    profile = Profile(PROFILES[output.profile].wire, "3" if output.framing == 3 else "4")
    return OutputSpec(
        output.name,
        profile,
        topics,
        merged,
        # the snapshot protocol's consumers count on an empty batch a second
        min(output.heartbeat or 1.0, 1.0) if output.snapshot_endpoint else output.heartbeat,
        output.journal_batches,
        output.journal_bytes,
        first_seqs,
        [secrets.token_bytes(PUBLISHER_ID_BYTES) for _ in served] if output.snapshot_endpoint else (),
    )


__all__ = ["BindError", "Daemon", "serve"]
