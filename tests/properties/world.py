"""Engines, a network, kvbus and routers in one object without I/O, whose every step is a line of a script.

A :class:`World` is driven by hand (``test_regressions.py``) or from a seed: shortly by ``test_random_worlds.py``, for
long by ``python -m tests.properties.soak``. Each step is a method with plain arguments that works in any state, so that
a failing run can be printed as a script, shortened, and kept as a test.

Engines hold a tree of blocks (the parent of block ``n`` is ``n // 2``) on two media, with copies, and know their real
content. The network loses, doubles, delays, reorders and cuts. Routers are plain sets that ask the standard replay at a
hole.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from kvbus.core.answering import ReplayAnswer
from kvbus.core.blocks.compaction import StateSnapshot
from kvbus.core.checkpoint import Loader, dump
from kvbus.core.commands import (
    AnswerReplay,
    AnswerSnapshot,
    CancelReplay,
    Publish,
    RequestReplay,
    RequestSnapshot,
    SendState,
)
from kvbus.core.events import (
    BatchReceived,
    ReplayAsked,
    ReplayReceived,
    SnapshotAsked,
    SnapshotReceived,
    SourceDown,
    SourceUp,
    Started,
    Subscribed,
    Tick,
)
from kvbus.core.outputs.snapshot import Unfinished
from kvbus.core.outputs.spec import OutputSpec
from kvbus.core.relay import Relay
from kvbus.core.sequencing.phases import State
from kvbus.core.source_spec import SourceSpec
from kvbus.core.wire.frames import END_SEQ, FrameLimits
from kvbus.core.wire.profiles import PROFILES, fold
from kvbus.core.write_ahead_log import Frame, Records, decode_records
from tests.doubles.accounting import all_accounted_for, size_is_true
from tests.doubles.answers import StateReader, reading
from tests.doubles.router import PlainSetRouter, RankedRouter, events_of
from tests.doubles.stage import cut_states

encode = msgspec.msgpack.encode
decode = msgspec.msgpack.decode

Change = tuple[Any, ...]
"""A change of an engine's cache.

* ``("store", block, medium)``; ``("chain", block, medium)``: the block and its ancestors in one event.
* ``("remove", block, medium)``.
* ``("tail", block, medium)``, ``("untail", block, medium)``: half a block after that block, if the size is pinned.
* ``("clear",)``: clears the GPU; a second one in the same batch clears the other tiers.
* ``("clear", None, medium)``: clears the medium.
"""

CLEARED = {"type": "AllBlocksCleared"}

TAIL = 1000
"""Difference between the hash of a tail and that of the block before it."""

Blocks = set[tuple[str, Any]]


@dataclass(frozen=True)
class Setup:
    """A world's configuration."""

    engines: tuple[str, ...] = ("replay",)
    """For each source: ``replay``, ``deaf`` (no replay) or ``snapshot`` (replay and snapshots, 24-byte seq frames)."""
    outputs: tuple[str, ...] = ("vllm",)
    buffer_steps: int = 1000
    bytes_hashes: bool = False
    duplicates: str = "count"
    orphans: str = "pass"
    on_lost: str = "clear"
    timeout: float = 1e9
    reorder_batches: int = 1000
    reorder_bytes: int = 10**9
    journal_batches: int = 10_000
    journal_bytes: int = 10**9
    max_blocks: int = 10**6
    block_size: int | None = None
    blocks_per_batch: int | None = None
    """Number of blocks in a batch of a state; None for kvbus's default, which is never reached here."""
    host: bool = True
    """Whether engines also keep blocks on the CPU. If not, these blocks are on the GPU."""


def seq_frame(seq: int, publisher: bytes = b"") -> bytes:
    return seq.to_bytes(8, "big") + publisher


def path(block: int) -> list[int]:
    """Return the blocks from the root of the tree to the block."""
    return [*path(block // 2), block] if block > 1 else [block]


class Engine:
    """A publisher and its cache, without I/O. `tests.doubles` explains the difference from the simulator."""

    def __init__(self, kind: str, setup: Setup, rank: int) -> None:
        self.kind, self.setup, self.rank = kind, setup, rank
        self.life = -1
        self.restart()

    def restart(self) -> None:
        self.life += 1
        self.seq = 0
        self.buffer: list[tuple[int, bytes]] = []
        self.truth: Counter[tuple[str, int]] = Counter()
        """Number of copies by medium and block."""
        self.visible: Counter[tuple[str, int]] = Counter()
        """The blocks that kvbus may announce to routers: `truth` without dropped orphans."""
        self.tails: Counter[tuple[str, int]] = Counter()
        """Tail blocks, which are not announced to routers."""

    @property
    def publisher(self) -> bytes:
        return b"%016d" % (self.rank * 1000 + self.life) if self.kind == "snapshot" else b""

    def hash_of(self, block: int) -> int | bytes:
        return block.to_bytes(32, "big") if self.setup.bytes_hashes else block

    def store(self, blocks: list[int], medium: str) -> dict[str, Any]:
        parent = blocks[0] // 2
        return {
            "type": "BlockStored",
            "block_hashes": [self.hash_of(block) for block in blocks],
            "parent_block_hash": self.hash_of(parent) if parent else None,
            "token_ids": [token for block in blocks for token in (block, block + 100)],
            "block_size": 2,
            "medium": medium,
        }

    def tail(self, block: int, medium: str) -> dict[str, Any]:
        event = self.store([block], medium)
        name, parent, tokens = [self.hash_of(TAIL + block)], self.hash_of(block), [TAIL]
        return {**event, "block_hashes": name, "parent_block_hash": parent, "token_ids": tokens, "block_size": 1}

    def publish(self, changes: list[Change]) -> tuple[int, bytes]:
        events: list[dict[str, Any]] = []
        run: list[tuple[list[int], str]] = []
        for what, *rest in changes:
            if rest and not self.setup.host:
                rest[1] = "GPU"
            if what in ("store", "chain"):
                block, medium = rest
                blocks = path(block) if what == "chain" else [block]
                run.append((blocks, medium))
                events.append(self.store(blocks, medium))
                self._add(self.truth, blocks, medium)
                continue
            if what in ("tail", "untail"):
                block, medium = rest
                if what == "tail" and self.setup.block_size:
                    events.append(self.tail(block, medium))
                    self._add(self.tails, [block], medium)
                elif self.tails[medium, block]:
                    self._see(run)
                    self.tails[medium, block] -= 1
                    hashes = [self.hash_of(TAIL + block)]
                    events.append({"type": "BlockRemoved", "block_hashes": hashes, "medium": medium})
                continue
            if what == "remove":
                block, medium = rest
                if self.truth[medium, block]:
                    self._see(run)
                    self.truth[medium, block] -= 1
                    if self.visible[medium, block]:
                        self.visible[medium, block] -= 1
                    hashes = [self.hash_of(block)]
                    events.append({"type": "BlockRemoved", "block_hashes": hashes, "medium": medium})
            elif rest:
                self._see(run)
                events.append(CLEARED | {"medium": rest[1]})
                for counts in (self.truth, self.visible, self.tails):
                    for key in [key for key in counts if key[0] == rest[1]]:
                        del counts[key]
            # an epoch whose first event is a clear would be SGLang's, whose clears concern every medium
            elif self.seq or events:
                self._see(run)
                again = CLEARED in events
                events.append(CLEARED)
                for counts in (self.truth, self.visible, self.tails):
                    for key in [key for key in counts if (key[0] == "GPU") != again]:
                        del counts[key]
        self._see(run)
        payload = encode([float(self.life), events, self.rank])
        message = (self.seq, payload)
        self.seq += 1
        self.buffer = [*self.buffer, message][-self.setup.buffer_steps :]
        return message

    def _add(self, counts: Counter[tuple[str, int]], blocks: list[int], medium: str) -> None:
        for block in blocks:
            counts[medium, block] = counts[medium, block] + 1 if self.setup.duplicates == "count" else 1

    def _see(self, run: list[tuple[list[int], str]]) -> None:
        """Add consecutive stores to `visible` if their parents are there or come in the same run."""
        waiting, run[:] = list(run), []
        while waiting:
            known = {block for (_, block), count in self.visible.items() if count}
            ready = [one for one in waiting if self.setup.orphans == "pass" or one[0][0] // 2 in {0, *known}]
            if not ready:
                return
            waiting = [one for one in waiting if one not in ready]
            for blocks, medium in ready:
                self._add(self.visible, blocks, medium)

    def snapshot(self) -> list[bytes]:
        """Return the reply to a snapshot request: every copy of every block, parents first."""
        live = sorted((key for key, count in self.truth.items() if count), key=lambda key: (key[0] != "GPU", key[1]))
        events = [self.store([block], medium) for medium, block in live for _ in range(self.truth[medium, block])]
        # an event with two blocks shows the block size
        events.insert(0, self.store([1, 3], "GPU"))
        hashes = [self.hash_of(1), self.hash_of(3)]
        events.insert(1, {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"})
        chunks = [encode([float(self.life), events, self.rank])] if self.seq else []
        return [(self.seq - 1).to_bytes(8, "big", signed=True), self.publisher, *chunks]


class Router(RankedRouter):
    """A plain set for each rank that fails at any breach of the stream's rules. It ignores live batches while ``deaf``.

    With ``one_copy`` it ignores ranks: it is one set, and each removal and clear concerns all ranks.
    """

    def __init__(self, *, one_copy: bool = False, takes_late: bool = False) -> None:
        super().__init__()
        self.one_copy = one_copy
        self.takes_late = takes_late
        """Whether the profile's answers may begin later than asked for."""
        self.deaf = False
        self.stale = False
        """Whether the router got a state without AllBlocksCleared on top of blocks. It may hold dead blocks.

        This is allowed for profiles whose routers clear by pod, if each rank has a stream of its own. While another
        rank has blocks, kvbus sends no clear, because connections are not ordered against each other
        (docs/decisions/profiles-of-routers.md).
        """

    def begin_late(self, seq: int) -> None:
        """Accept an answer that begins late, if the profile allows it or the router holds nothing."""
        if self.takes_late or (not self.next and not self.blocks):
            self.next = max(seq, self.next)

    def take(self, payload: bytes) -> None:
        if self.one_copy:
            self.views.setdefault(0, PlainSetRouter()).take(self.next - 1, payload)
        else:
            super().take(payload)
        if self.stale:
            for view in self.views.values():
                view.violations = [wrong for wrong in view.violations if "stored twice" not in wrong]
            self.stale = not any(event["type"] == "AllBlocksCleared" for event in events_of(payload))
        assert self.violations == []


class LateRouter:
    """A router that subscribes, asks from 0, and reads the answer slowly while the live stream continues."""

    def __init__(self, router: Router, answer: Any) -> None:
        self.router = router
        self.answer = answer
        self.begun = False
        self.live: list[tuple[int, bytes]] = []

    def read(self) -> None:
        """Read the next message of the answer, unless it has ended."""
        message = self.answer.next_message() if self.answer is not None else None
        if message is None:
            return
        if message[-2] == END_SEQ:
            assert self.answer.next_message() is None
            self.answer = None
            return
        seq = int.from_bytes(message[-2][:8], "big")
        if not self.begun:
            self.router.begin_late(seq)
            self.begun = True
        assert seq == self.router.next, "an answer is contiguous"
        self.router.apply(seq, message[-1])

    def finish(self) -> None:
        """Read the complete answer, and the live batches since the request."""
        while self.answer is not None:
            self.read()
        for seq, payload in self.live:
            assert self.router.apply(seq, payload), "a hole between the answer and the live stream"
        self.live.clear()


class Subscriber:
    """A router that gets a state on subscription, reads it slowly, and then reads the live stream."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.connected = False
        self.state: StateReader | None = None
        """The unread part of the state."""
        self.clears = True
        """Whether the state must begin with AllBlocksCleared."""
        self.waiting: list[tuple[int, bytes]] | None = None
        """Live batches that wait until a state or an answer has ended; None if neither is being read."""

    def cut(self) -> None:
        self.connected, self.state, self.waiting = False, None, None

    def receive(self, seq: int, payload: bytes) -> None:
        """Receive a live batch."""
        if not self.connected:
            return
        if self.waiting is not None:
            self.waiting.append((seq, payload))
        else:
            assert self.router.apply(seq, payload), "a hole in the live stream"

    def read(self, batches: int) -> None:
        """Read batches of the state. After the last one, apply the live batches that have waited."""
        state, router = self.state, self.router
        if state is None:
            return
        for _ in range(batches):
            if not state.done and (batch := state.next_batch()) is not None:
                if batch[0] == state.transfer.first_seq:
                    assert batch[0] >= router.next, "an output's seq never goes back"
                    router.next = batch[0]
                    router.stale |= bool(router.blocks) and not self.clears
                assert router.apply(*batch), "a hole in the state"
        if state.done:
            self.go_on()

    def go_on(self) -> None:
        """End the state or the answer."""
        waited, self.waiting, self.state = self.waiting or [], None, None
        for seq, payload in waited:
            self.receive(seq, payload)


@dataclass
class Line:
    """A source's engine, and its messages in the network."""

    engine: Engine
    connected: bool = False
    wire: list[tuple[int, bytes, bytes]] = field(default_factory=list)
    answers: list[tuple[int, list[bytes]]] = field(default_factory=list)
    asked: int | None = None
    """The open request."""
    heard: tuple[int, int] = (0, -1)
    """Epoch and seq of the newest live batch that kvbus received."""
    hidden: int = -1
    """The epoch in which the publisher restarted unseen or was not alone, else -1. Exactness needs a later epoch."""
    refused: bool = False
    """Whether an earlier process of kvbus, whose counters are lost, refused blocks at the index's limit."""


def step(method: Callable[..., None]) -> Callable[..., None]:
    """Make a method a step: record it before it runs, and check the invariants after it."""

    @functools.wraps(method)
    def taken(self: World, *args: Any) -> None:
        self.script.append(f"world.{method.__name__}({', '.join(map(repr, args))})")
        World.steps += 1
        with pytest.MonkeyPatch.context() as patch:
            if self.setup.blocks_per_batch:
                cut_states(patch, self.setup.blocks_per_batch, self.setup.blocks_per_batch)
            method(self, *args)
        self.nothing_uncounted()
        self.nothing_unbounded()
        self.nothing_kept_back()

    return taken


class World:
    """A simulated world. Sources, outputs and messages are chosen by any number, modulo their count."""

    steps = 0
    """Number of steps of all worlds in this process."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.script = [f"world = World({setup!r})"]
        self.now = 100.0
        self.lines = [Line(Engine(kind, setup, rank)) for rank, kind in enumerate(setup.engines)]
        self.first_seqs: dict[tuple[int, int], int] = {}
        self.relay = self.make_relay()
        self.relay.records = Records()
        self.last_seq = dict.fromkeys(self.places, -1)
        self.routers = {place: self._new_router(place) for place in self.places}
        self.rebuilding: dict[tuple[int, int], list[tuple[int, bytes]]] = {}
        """Live batches that a router received while it read an answer."""
        self.late: dict[tuple[int, int], LateRouter] = {}
        self.subscribers: dict[tuple[int, int], Subscriber] = {}
        self.saved = list(dump(self.relay))
        self.log: list[Frame] = []
        self.begun: tuple[Iterator[bytes], int] | None = None
        """An open checkpoint: its remaining slices, and the index of the first log frame after it."""

    @property
    def places(self) -> list[tuple[int, int]]:
        """Every stream, as index of its output and index in it."""
        return [(n, at) for n, output in enumerate(self.relay.outputs) for at in range(len(output.streams))]

    def make_relay(self) -> Relay:
        setup = self.setup
        sources = [
            SourceSpec(
                f"engine/{rank}",
                rank,
                replay=kind != "deaf",
                snapshot=kind == "snapshot",
                reorder_batches=setup.reorder_batches,
                max_held_bytes=setup.reorder_bytes,
                block_size=setup.block_size,
                duplicates=setup.duplicates,  # type: ignore[arg-type]
                orphans=setup.orphans,  # type: ignore[arg-type]
                max_blocks=setup.max_blocks,
                on_lost=setup.on_lost,  # type: ignore[arg-type]
                source_timeout=setup.timeout,
                copied_below=0,  # with 0, every snapshot freezes the index, even a small one
            )
            for rank, kind in enumerate(setup.engines)
        ]
        outputs = []
        for number, name in enumerate(setup.outputs):
            merged = name.startswith("merged:")
            streams = 1 if merged else len(sources)
            outputs.append(
                OutputSpec(
                    f"out-{number}",
                    PROFILES[name.removeprefix("merged:")],
                    [None] * streams,
                    merged=merged,
                    journal_batches=setup.journal_batches,
                    journal_bytes=setup.journal_bytes,
                    first_seqs=[self.first_seqs.get((number, at), 0) for at in range(streams)],
                )
            )
        return Relay(sources, outputs, FrameLimits())

    # -- commands of the relay ------------------------------------------------------------------------------------

    def _feed(self, event: Any) -> None:
        self._carry_out(self.relay.handle(event, self.now))

    def _carry_out(self, commands: list[Any]) -> None:
        # asked after all commands: an answer may publish batches, which must follow those of these commands
        asking = []
        for command in commands:
            if isinstance(command, Publish):
                place = (command.output, command.stream)
                assert command.seq == self.last_seq[place] + 1, "an output's seq is dense and never goes back"
                self.last_seq[place] = command.seq
                if place in self.subscribers:
                    self.subscribers[place].receive(command.seq, command.payload)
                if place in self.late:
                    self.late[place].live.append((command.seq, command.payload))
                router = self.routers[place]
                if place in self.rebuilding:
                    self.rebuilding[place].append((command.seq, command.payload))
                elif not router.deaf and not router.apply(command.seq, command.payload):
                    asking.append(place)
            elif isinstance(command, RequestReplay):
                self.lines[command.source].asked = command.request
                self._serve(command)
            elif isinstance(command, RequestSnapshot):
                line = self.lines[command.source]
                line.asked = command.request
                if line.connected:
                    line.answers.append((command.request, line.engine.snapshot()))
            elif isinstance(command, CancelReplay):
                line = self.lines[command.source]
                line.asked = None
                line.answers = [(request, frames) for request, frames in line.answers if request != command.request]
            elif isinstance(command, SendState):
                self._state_begins(self.subscribers[command.output, command.stream], command)
            else:
                pytest.fail(f"nobody has asked for {command}")
        for place in dict.fromkeys(asking):
            self._router_replay(place)

    def _serve(self, command: RequestReplay) -> None:
        line = self.lines[command.source]
        if not line.connected:
            return  # the request is lost with the connection
        publisher = line.engine.publisher
        for seq, payload in line.engine.buffer:
            if seq >= command.start:
                line.answers.append((command.request, [b"", b"", seq_frame(seq, publisher), payload]))
        line.answers.append((command.request, [b"", b"", END_SEQ, b""]))

    def _ask(self, place: tuple[int, int], router: Router) -> Any:
        event = ReplayAsked(*place, [b"r", b"", seq_frame(router.next)])
        (command,) = self.relay.handle(event, self.now)
        assert isinstance(command, AnswerReplay)
        assert isinstance(command.answer, ReplayAnswer)
        state = command.answer.state
        ending_after = state.ending_after

        def marking(start: int) -> StateSnapshot:
            """Start a state. Without a clear in it, the router may keep dead blocks."""
            if router.blocks and self._others_hold_blocks(*place):
                router.stale = True
            return ending_after(start)

        vars(state)["ending_after"] = marking
        return reading(self.relay, command, self._carry_out)

    def _state_begins(self, subscriber: Subscriber, command: SendState) -> None:
        subscriber.connected, subscriber.waiting = True, []
        subscriber.state = StateReader(command.transfer)
        subscriber.clears = not self._others_hold_blocks(command.output, command.stream)

    def _others_hold_blocks(self, number: int, at: int) -> bool:
        """Return whether a clear on this stream would clear blocks that routers got on another one."""
        spec = self.relay.outputs[number].spec
        return (
            spec.profile.clears != "rank"
            and not spec.merged
            and any(
                len(source.normalizer.index)
                for i, source in enumerate(self.relay.sources)
                if i != at and not source.expired
            )
        )

    def _router_replay(self, place: tuple[int, int]) -> None:
        router = self.routers[place]
        answer = self._ask(place, router)
        live = self.rebuilding[place] = []
        begun = False
        while (message := answer.next_message()) is not None:
            if message[-2] == END_SEQ:
                del self.rebuilding[place]
                assert all(router.apply(seq, payload) for seq, payload in live if not router.deaf)
                return
            seq = int.from_bytes(message[-2][:8], "big")
            if not begun:
                router.begin_late(seq)
                begun = True
            assert router.apply(seq, message[-1]), "the answer has a hole"
        raise AssertionError("an answer without END")

    def _deliver(self, source: int, message: tuple[int, bytes, bytes]) -> None:
        seq, payload, publisher = message
        line = self.lines[source]
        line.heard = (int(decode(payload)[0]), seq)
        self._feed(BatchReceived(source, [b"", seq_frame(seq, publisher), payload]))

    def _take_answer(self, source: int) -> None:
        request, frames = self.lines[source].answers.pop(0)
        received = SnapshotReceived if frames[0] else ReplayReceived
        self._feed(received(source, request, frames))

    def _cut(self, source: int) -> None:
        line = self.lines[source]
        line.wire.clear()
        line.answers.clear()
        if line.connected:
            line.connected = False
            self._feed(SourceDown(source))

    def _epoch(self, source: int) -> int:
        return self.relay.sources[source].sequencer.epoch

    # -- engines -------------------------------------------------------------------------------------------------

    @step
    def publish(self, source: int, changes: list[Change], times: int) -> None:
        """Change the engine's cache. If kvbus is connected, the batch is on its way."""
        line = self.lines[source % len(self.lines)]
        for _ in range(times):
            seq, payload = line.engine.publish(changes)
            if line.connected:
                line.wire.append((seq, payload, line.engine.publisher))

    @step
    def skip_a_number(self, source: int) -> None:
        """Use up a seq without sending a batch, as vLLM does after an exception."""
        self.lines[source % len(self.lines)].engine.seq += 1

    @step
    def restart_engine(self, source: int) -> None:
        """Kill the engine's process: its connections break, and messages on their way are lost."""
        source %= len(self.lines)
        self._cut(source)
        self.lines[source].engine.restart()
        # kvbus keeps the old epoch without an answer if `on_lost` is `keep`, or if it thinks that there is no replay
        # buffer
        believed = self.setup.on_lost == "keep" or self.relay.sources[source].sequencer.dump()["buffer"] is False
        self.lines[source].hidden = self._epoch(source) if believed else -1

    @step
    def restart_behind_a_proxy(self, source: int) -> None:
        """Kill the engine's process, while kvbus's connection to a proxy stays."""
        line = self.lines[source % len(self.lines)]
        line.engine.restart()
        line.answers.clear()
        line.hidden = self._epoch(source % len(self.lines))

    @step
    def stranger(self, source: int, seq: int, block: int) -> None:
        """Publish a batch of another publisher on the same endpoint."""
        source %= len(self.lines)
        line = self.lines[source]
        if not line.connected:
            return
        line.hidden = self._epoch(source)
        payload = encode([99.0, [line.engine.store([block], "GPU")], line.engine.rank])
        line.wire.append((seq, payload, b"stranger's own id"[:16] if line.engine.publisher else b""))

    # -- the network ---------------------------------------------------------------------------------------------

    @step
    def connect(self, source: int) -> None:
        source %= len(self.lines)
        if not self.lines[source].connected:
            self.lines[source].connected = True
            self._feed(SourceUp(source))

    @step
    def disconnect(self, source: int) -> None:
        self._cut(source % len(self.lines))

    @step
    def live_batch(self, source: int, at: int, how: str) -> None:
        """Deliver a batch (the oldest one for 0), lose it, or deliver it twice."""
        source %= len(self.lines)
        wire = self.lines[source].wire
        if not wire:
            return
        message = wire.pop(at % min(len(wire), 6))
        for _ in range({"once": 1, "twice": 2, "lost": 0}[how]):
            self._deliver(source, message)

    @step
    def all_live_batches(self, source: int) -> None:
        source %= len(self.lines)
        while self.lines[source].wire:
            self._deliver(source, self.lines[source].wire.pop(0))

    @step
    def answer(self, source: int, count: int) -> None:
        """Deliver up to ``count`` messages of replay answers."""
        source %= len(self.lines)
        for _ in range(count):
            if self.lines[source].answers:
                self._take_answer(source)

    @step
    def answers_are_lost(self, source: int) -> None:
        self.lines[source % len(self.lines)].answers.clear()

    @step
    def a_reply_to_nothing(self, source: int, request: int, seq: int) -> None:
        """Deliver an answer to a request that was never made or has ended."""
        source %= len(self.lines)
        if self.lines[source].asked != request:
            self._feed(ReplayReceived(source, request, [b"", seq_frame(seq), encode([0.0, [], 0])]))

    @step
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self._feed(Tick(self.now))

    # -- kvbus itself --------------------------------------------------------------------------------------------

    @step
    def checkpoint_begins(self) -> None:
        """Start a checkpoint. Its slices are read when kvbus is killed, so that all later changes happen during it."""
        self._write_log()
        self.begun = dump(self.relay), len(self.log)

    @step
    def kvbus_is_killed(self, new_generation: bool) -> None:
        """Kill kvbus and restart it with its state: same index and seqs, new counters and connections.

        With a new generation, a checkpoint is completed before the kill: the open one, or one of that moment.
        """
        self._write_log()
        marks = [source.sequencer.next for source in self.relay.sources]
        epochs = [source.sequencer.epoch for source in self.relay.sources]
        if new_generation:
            slices, first = self.begun or (dump(self.relay), len(self.log))
            self.saved, self.log = list(slices), self.log[first:]
        self.begun = None
        for source in range(len(self.lines)):
            self._cut(source)
            self.lines[source].heard = (-1, -1)  # held batches are lost with the process
            self.lines[source].refused |= self.relay.sources[source].stats.rejected["index_full"] > 0
        self._write_log()
        relay = self.make_relay()
        loader = Loader(relay)
        for blob in self.saved:
            loader.feed(blob)
        assert loader.complete
        for body, payloads in self.log:
            records = decode_records(body, b"".join(payloads))
            assert records is not None
            for record in records:
                relay.apply_record(record, self.now)
        relay.recovery_finished(self.now)
        for n, at in self.places:
            assert relay.outputs[n].streams[at].next_seq == self.last_seq[n, at] + 1
        for known, mark, epoch in zip(relay.sources, marks, epochs, strict=True):
            assert known.sequencer.next <= mark
            assert known.sequencer.epoch <= epoch
        kept = {(n, at): relay.outputs[n].streams[at].journal.first_seq for n, at in self.places}
        recovered, live = everything(relay, kept), everything(self.relay, kept)
        for now, before, known in zip(recovered["sources"], live["sources"], relay.sources, strict=True):
            if not known.sequencer.next:
                # no record says that an empty answer completed an empty epoch, so a restarted kvbus asks again
                before["partial"] |= now["partial"]
        assert recovered == live
        relay.records = Records()
        self.relay = relay
        self._answers_are_gone()

    @step
    def kvbus_is_killed_without_state(self) -> None:
        """Restart kvbus without state: seqs jump ahead, and the index is learned again."""
        for source in range(len(self.lines)):
            self._cut(source)
            self.lines[source].heard = (-1, -1)
        self.first_seqs = {place: seq + 4 if seq >= 0 else 0 for place, seq in self.last_seq.items()}
        self.relay = self.make_relay()
        self.relay.records = Records()
        for line in self.lines:
            line.hidden, line.refused = -1, False  # the new process knows no earlier epoch
        self.last_seq = {place: seq - 1 for place, seq in self.first_seqs.items()}
        self.saved, self.log, self.begun = list(dump(self.relay)), [], None
        self._answers_are_gone()
        self._feed(Started(self.now))

    def _answers_are_gone(self) -> None:
        """Break late routers' answers and subscribers' connections. Subscribers keep their blocks."""
        self.late.clear()
        for subscriber in self.subscribers.values():
            subscriber.cut()

    def _write_log(self) -> None:
        assert self.relay.records is not None
        if self.relay.records.heads:
            self.log.append(self.relay.records.take())

    # -- routers -------------------------------------------------------------------------------------------------

    def _new_router(self, place: tuple[int, int]) -> Router:
        spec = self.relay.outputs[place[0]].spec
        return Router(one_copy=spec.merged and spec.profile.one_copy, takes_late=not spec.profile.filled_replay)

    def _place(self, number: int) -> tuple[int, int]:
        places = self.places
        return places[number % len(places)]

    @step
    def router_link(self, place: int, deaf: bool) -> None:
        """Stall or resume a router's live stream."""
        self.routers[self._place(place)].deaf = deaf

    @step
    def router_restarts(self, place: int) -> None:
        at = self._place(place)
        self.routers[at] = self._new_router(at)
        self._router_replay(at)

    @step
    def late_router_asks(self, place: int) -> None:
        at = self._place(place)
        router = self._new_router(at)
        self.late[at] = LateRouter(router, self._ask(at, router))

    @step
    def late_router_reads(self, place: int, messages: int) -> None:
        late = self.late.get(self._place(place))
        if late is not None:
            for _ in range(messages):
                late.read()

    @step
    def subscriber_connects(self, place: int, batches: int) -> None:
        """Subscribe a new or an existing router, and read some batches of the state. Until then its blocks are kept."""
        at = self._place(place)
        if at not in self.subscribers:
            self.subscribers[at] = Subscriber(self._new_router(at))
        self.subscribers[at].cut()
        self._feed(Subscribed(*at, (1,)))
        self.subscribers[at].read(batches)

    @step
    def subscriber_resumes(self, place: int) -> None:
        """Cut a subscriber off, and continue by a replay from its next seq, even in the middle of a state."""
        at = self._place(place)
        subscriber = self.subscribers.get(at)
        if subscriber is None:
            return
        subscriber.cut()
        subscriber.connected, subscriber.waiting = True, []
        answer = self._ask(at, subscriber.router)
        begun = False
        while (message := answer.next_message())[-2] != END_SEQ:
            seq = int.from_bytes(message[-2][:8], "big")
            if not begun:
                subscriber.router.begin_late(seq)
                begun = True
            assert subscriber.router.apply(seq, message[-1]), "the answer has a hole"
        subscriber.go_on()

    @step
    def subscriber_reads(self, place: int, batches: int) -> None:
        subscriber = self.subscribers.get(self._place(place))
        if subscriber is not None:
            subscriber.read(batches)

    @step
    def subscriber_is_cut(self, place: int) -> None:
        subscriber = self.subscribers.get(self._place(place))
        if subscriber is not None:
            subscriber.cut()

    @step
    def router_asks_for_a_snapshot(self, place: int) -> None:
        """Ask for a snapshot. An output without a snapshot endpoint answers too."""
        at = self._place(place)
        (command,) = self.relay.handle(SnapshotAsked(*at, [b"r", b"snapshot"]), self.now)
        assert isinstance(command, AnswerSnapshot)
        reader = reading(self.relay, command, self._carry_out)
        messages = [message for message in iter(reader.next_message, None) if message]
        assert [isinstance(message, Unfinished) for message in messages] == [True] * (len(messages) - 1) + [False]

    # -- invariants ------------------------------------------------------------------------------------------------

    def nothing_uncounted(self) -> None:
        for source in self.relay.sources:
            all_accounted_for(source)
            size_is_true(source.normalizer)

    def nothing_unbounded(self) -> None:
        setup = self.setup
        for source in self.relay.sources:
            held = source.sequencer.held
            largest = max((len(held.get(seq)) for seq in held), default=0)
            assert len(held) <= setup.reorder_batches + 1, "held batches"  # plus the batch that is delivered next
            assert held.bytes <= max(setup.reorder_bytes, largest) + largest, "held bytes"
            assert source.normalizer.entries <= setup.max_blocks
        for output in self.relay.outputs:
            for stream in output.streams:
                assert len(stream.journal) <= setup.journal_batches

    def nothing_kept_back(self) -> None:
        """Check that every seq was published together with the event that used it."""
        for n, at in self.places:
            assert self.relay.outputs[n].streams[at].next_seq == self.last_seq[n, at] + 1

    @step
    def quiescence(self) -> None:
        """Deliver everything, let time pass, and check that every router holds its engines' blocks."""
        for source, line in enumerate(self.lines):
            if not line.connected:
                line.connected = True
                self._feed(SourceUp(source))
        for _ in range(60):
            rounds = 0
            while any(line.wire or line.answers for line in self.lines):
                rounds += 1
                assert rounds < 10_000, "it never comes to rest"
                for source, line in enumerate(self.lines):
                    if line.wire:
                        self._deliver(source, line.wire.pop(0))
                    if line.answers:
                        self._take_answer(source)
            self.now += 1.0
            self._feed(Tick(self.now))
        for place, router in self.routers.items():
            router.deaf = False
            self._router_replay(place)
        for place, late in self.late.items():
            late.finish()
            assert late.router.next == self.last_seq[place] + 1
            assert late.router.blocks == self.routers[place].blocks or late.router.stale or self.routers[place].stale
        self.late.clear()
        for place, subscriber in self.subscribers.items():
            if not subscriber.connected:
                self._feed(Subscribed(*place, (1,)))
            while subscriber.waiting is not None:
                subscriber.read(1)
        for source in range(len(self.lines)):
            self._is_exact(source)
        subscribed = [(place, subscriber.router) for place, subscriber in self.subscribers.items()]
        for place, router in [*self.routers.items(), *subscribed]:
            self._knows_its_engines(place, router)

    def _is_exact(self, i: int) -> None:
        source, line = self.relay.sources[i], self.lines[i]
        assert source.state is State.LIVE, f"source {i} is {source.state}"
        assert source.sequencer.pending == 0
        if not self._can_be_known(i):
            return
        engine = line.engine
        numbers = [seq for seq, _ in engine.buffer]
        if engine.kind != "deaf" and line.hidden < 0 and numbers == list(range(engine.seq)):
            partial = source.partial and not source.normalizer.full
            assert not partial, f"source {i} could have been told everything and is partial"
        # a tail may have been refused, which no router notices
        refused = line.refused or source.stats.rejected["index_full"]
        if not source.partial and engine.kind != "snapshot" and not refused:
            tails = {(key[1], block) for key, t in source.normalizer.tails.tables.items() for block in t.blocks}
            assert tails == {
                (medium, engine.hash_of(TAIL + block))
                for (medium, block), count in engine.tails.items()
                if count and medium in {"GPU", *source.normalizer.dump()["media"]}
            }

    def _can_be_known(self, i: int) -> bool:
        source, line = self.relay.sources[i], self.lines[i]
        engine = line.engine
        # a replay that reaches back to the start exposes every stranger, once kvbus knows that there is a buffer; an
        # answer that begins with 1, because 0 was used and never sent, looks as if the buffer were trimmed
        reaches_back = engine.setup.buffer_steps == 1000 and [seq for seq, _ in engine.buffer[:1]] == [0][: engine.seq]
        if line.hidden >= 0 and not (reaches_back and source.sequencer.dump()["buffer"]):
            return False  # nothing may expose the stranger until the engine visibly restarts
        # without a replay, kvbus cannot know of an idle engine's lost last batches or of its silent new epoch
        return engine.kind != "deaf" or line.heard == (engine.life, engine.seq - 1)

    def _knows_its_engines(self, place: tuple[int, int], router: Router) -> None:
        """Compare a router's blocks with those of its stream's engines, by rank unless the router ignores ranks."""
        output = self.relay.outputs[place[0]]
        sources = list(range(len(self.lines))) if output.merged else [place[1]]
        for those in [sources] if router.one_copy else [[i] for i in sources]:
            if not all(map(self._can_be_known, those)):
                continue
            ranks = {0 if router.one_copy else output.rank_of(i, self.relay.sources[i]) for i in those}
            view = {(medium, block) for of, _, medium, block in router.blocks if of in ranks}
            folded = output.spec.profile.wire.fold_hashes
            engines = [self.lines[i].engine for i in those]
            truth = {block for engine in engines for block in self._named(engine, engine.truth, folded)}
            if self.setup.on_lost == "clear" and not router.stale:
                assert view <= truth, f"sources {those}, stream {place}: blocks too many: {view - truth}"
            visible = [self._visible(i, folded) for i in those]
            if None not in visible:
                expected = {block for each in visible for block in each or ()}
                if router.stale:
                    view &= expected
                assert view == expected, f"sources {those}, stream {place}: {view} is not {expected}"

    def _visible(self, i: int, folded: bool) -> Blocks | None:
        """Return the blocks that routers hold of an engine, or None if kvbus does not claim to know them."""
        source, engine = self.relay.sources[i], self.lines[i].engine
        if source.partial:
            return None
        if engine.kind == "snapshot" and self.setup.orphans == "drop":
            return None  # a snapshot has orphans whose parents were there when the orphans were stored
        # a clear ends the unknown start of an epoch only for its tier; a tier without events may still hold blocks
        visible = self._named(engine, engine.visible, folded)
        told = {key for key in visible if key[0] in {"GPU", *source.normalizer.dump()["media"]}}
        # the unknown blocks may be parents of orphans
        return None if told != visible and self.setup.orphans == "drop" else told

    def _named(self, engine: Engine, counts: Counter[tuple[str, int]], folded: bool) -> Blocks:
        name: Callable[[int], Any] = (lambda b: fold(engine.hash_of(b))) if folded else engine.hash_of
        return {(medium, name(block)) for (medium, block), count in counts.items() if count}

    def lines_of_script(self) -> Iterator[str]:
        """Yield the lines of a test that repeats the run."""
        yield "def test_this() -> None:"
        yield from (f"    {line}" for line in self.script)


def everything(relay: Relay, kept: dict[tuple[int, int], int | None]) -> dict[str, Any]:
    """Return the part of a relay's state that records rebuild; it must be equal before and after a recovery.

    ``kept`` has the first seq of each journal that contains only batches after the checkpoint.
    """
    return {
        "sources": [
            {
                **{name: getattr(source, name) for name in OF_A_SOURCE},
                "partial": source.sequencer.partial,
                "normalizer": source.normalizer.dump(),
                "blocks": tables_of(source.normalizer.index),
                "tails": tables_of(source.normalizer.tails),
            }
            for source in relay.sources
        ],
        "streams": [
            (
                stream.next_seq,
                stream.topic,
                [
                    (seq, seq in stream.incomplete, entry.empty or entry.payload)
                    for seq in range(stream.next_seq if kept[n, at] is None else kept[n, at], stream.next_seq)  # type: ignore[arg-type]
                    if (entry := stream.journal.at(stream.journal.position(seq))) is not None
                ],
            )
            for n, output in enumerate(relay.outputs)
            for at, stream in enumerate(output.streams)
        ],
    }


OF_A_SOURCE = ("rank", "ranked", "ts", "topic", "publisher_id", "lost", "partial_since", "announced", "expired")


def tables_of(index: Any) -> dict[Any, Any]:
    """Return an index's content by table: blocks with their copies, and sub-blocks with their references."""
    return {
        key: ({block: table.copies.get(block, 0) for block in table.blocks}, dict(table.refs))
        for key, table in index.tables.items()
        if table.blocks
    }
