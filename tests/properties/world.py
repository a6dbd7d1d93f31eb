"""A simulated world without I/O: engines, a network, kvbus and routers. Each of its steps is a line of a script.

Scripts drive a :class:`World` in ``test_regressions.py``. Seeds drive it in ``test_random_worlds.py`` and, for a long
time, in ``python -m tests.properties.soak``. A step is a method with plain arguments, which is possible in any state of
the world. So a failing run can be printed as a script, shortened, and kept as a test.

Engines hold a tree of blocks (the parent of block ``n`` is ``n // 2``) on two media, with copies, and know their real
cache contents. The network loses, doubles, delays and reorders messages, and breaks connections. Routers keep plain
sets and send a standard replay request when they see a gap.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal

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
"""A change of an engine's cache. One of these tuples:

* ``("store", block, medium)`` stores a block.
* ``("chain", block, medium)`` stores a block and its ancestors in one event.
* ``("remove", block, medium)`` removes a block.
* ``("tail", block, medium)`` and ``("untail", block, medium)`` store and remove a tail block of half a block after that
  block, if the block size is pinned.
* ``("clear",)`` clears the GPU. The second such clear in a batch clears the other tiers.
* ``("clear", None, medium)`` clears one medium.
"""

CLEARED = {"type": "AllBlocksCleared"}

NAMED_FROM: Final = 4
"""Seq of the first batch in which an engine with changing ranks names its second rank."""

TAIL = 1000
"""Difference between the number of a tail block and the number of the block before it."""

Blocks = set[tuple[str, Any]]


@dataclass(frozen=True)
class Setup:
    """The configuration of a simulated world: its engines, outputs and limits."""

    engines: tuple[str, ...] = ("replay",)
    """The kind of each source: ``replay``, ``deaf`` (no replay) or ``snapshot`` (replay and snapshots, 24-byte seq
    frames).
    """
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
    """Number of blocks in a batch of a state.

    None means kvbus's default, which is more blocks than these engines have.
    """
    host: bool = True
    """Whether engines also keep blocks on the CPU. If not, all their blocks are on the GPU."""
    ranks: Literal["fixed", "late", "changing"] = "fixed"
    """The ranks that an engine's batches name: always its own, its own from the fourth batch on, or another one from
    the fourth batch on.
    """


def seq_frame(seq: int, publisher: bytes = b"") -> bytes:
    return seq.to_bytes(8, "big") + publisher


def path(block: int) -> list[int]:
    """Return the blocks on the path from the root of the tree to a block."""
    return [*path(block // 2), block] if block > 1 else [block]


class Engine:
    """A model of an engine's publisher and cache, without I/O.

    `tests.doubles` explains how it differs from :mod:`kvbus.tools.sim`, the simulated engine that users can run.
    """

    def __init__(self, kind: str, setup: Setup, rank: int) -> None:
        self.kind, self.setup, self.rank = kind, setup, rank
        self.life = -1
        self.restart()

    def restart(self) -> None:
        self.life += 1
        self.seq = 0
        self.buffer: list[tuple[int, bytes]] = []
        self.truth: Counter[tuple[str, int]] = Counter()
        """Number of copies that the engine holds of each block, by medium and block."""
        self.visible: Counter[tuple[str, int]] = Counter()
        """The blocks of `truth` that kvbus may announce to routers, that is, without dropped orphans."""
        self.tails: Counter[tuple[str, int]] = Counter()
        """Number of copies of each tail block. kvbus does not announce tail blocks to routers."""

    @property
    def publisher(self) -> bytes:
        return b"%016d" % (self.rank * 1000 + self.life) if self.kind == "snapshot" else b""

    def envelope(self) -> list[Any]:
        """Return the rest of the next batch after its events: the rank, or nothing if the batch has two items."""
        own, other = [self.rank], [self.rank + 9]
        ways: dict[str, list[tuple[list[Any], list[Any]]]] = {
            "fixed": [(own, own)],
            "late": [([None], own), ([], own)],
            "changing": [([None], other), ([], other), (own, other), (other, [None]), (other, own)],
        }
        first, later = ways[self.setup.ranks][(self.life + self.rank) % len(ways[self.setup.ranks])]
        return first if self.seq < NAMED_FROM else later

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
            **self.names(medium),
        }

    def names(self, medium: str) -> dict[str, str]:
        """Return the locality and the owner that the engine names for blocks that are not on the GPU.

        Each life of the engine names others; the first life names none.
        """
        ways = [{}, {"locality": "LOCAL"}, {"ownership": "kvcr"}, {"locality": "REMOTE", "ownership": "kvcr"}]
        return {} if medium == "GPU" or not self.life else ways[(self.life + self.rank) % len(ways)]

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
                    gone = {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}
                    events.append(gone | self.names(medium))
                continue
            if what == "remove":
                block, medium = rest
                if self.truth[medium, block]:
                    self._see(run)
                    self.truth[medium, block] -= 1
                    if self.visible[medium, block]:
                        self.visible[medium, block] -= 1
                    hashes = [self.hash_of(block)]
                    gone = {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}
                    events.append(gone | self.names(medium))
            elif rest:
                self._see(run)
                events.append(CLEARED | {"medium": rest[1]})
                for counts in (self.truth, self.visible, self.tails):
                    for key in [key for key in counts if key[0] == rest[1]]:
                        del counts[key]
            # do not begin an epoch with a clear: kvbus would take the engine for SGLang, whose clears apply to every
            # medium
            elif self.seq or events:
                self._see(run)
                again = CLEARED in events
                events.append(CLEARED)
                for counts in (self.truth, self.visible, self.tails):
                    for key in [key for key in counts if (key[0] == "GPU") != again]:
                        del counts[key]
        self._see(run)
        payload = encode([float(self.life), events, *self.envelope()])
        message = (self.seq, payload)
        self.seq += 1
        self.buffer = [*self.buffer, message][-self.setup.buffer_steps :]
        return message

    def _add(self, counts: Counter[tuple[str, int]], blocks: list[int], medium: str) -> None:
        for block in blocks:
            counts[medium, block] = counts[medium, block] + 1 if self.setup.duplicates == "count" else 1

    def _see(self, run: list[tuple[list[int], str]]) -> None:
        """Add the blocks of consecutive stores to `visible`, the blocks that kvbus may announce.

        With ``orphans: pass`` every block is added. Otherwise a block is added if it has no parent, or if its parent is
        visible or in the same run of stores.
        """
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
        """Return the engine's reply to a snapshot request.

        The reply stores every copy of every block, parents first.
        """
        live = sorted((key for key, count in self.truth.items() if count), key=lambda key: (key[0] != "GPU", key[1]))
        events = [self.store([block], medium) for medium, block in live for _ in range(self.truth[medium, block])]
        # kvbus learns an engine's block size from an event with at least two blocks.
        events.insert(0, self.store([1, 3], "GPU"))
        hashes = [self.hash_of(1), self.hash_of(3)]
        events.insert(1, {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"})
        chunks = [encode([float(self.life), events, *self.envelope()])] if self.seq else []
        return [(self.seq - 1).to_bytes(8, "big", signed=True), self.publisher, *chunks]


class Router(RankedRouter):
    """A router with a plain set for each rank, which fails at any violation of the stream's rules.

    It ignores live batches while ``deaf``. With ``ignores_ranks`` it has one set for all ranks, so each removal and
    clear applies to all ranks.
    """

    def __init__(self, *, ignores_ranks: bool = False, takes_late: bool = False) -> None:
        super().__init__()
        self.ignores_ranks = ignores_ranks
        self.takes_late = takes_late
        """Whether the router's profile permits answers that begin after the requested seq."""
        self.deaf = False
        self.stale = False
        """Whether the router held blocks when it got a state without AllBlocksCleared.

        It may therefore hold dead blocks.

        This is permitted for profiles whose routers clear by pod, if each rank has its own stream. kvbus sends no clear
        while another rank has blocks, because connections are not ordered against each other
        (docs/decisions/profiles-of-routers.md).
        """

    def begin_late(self, seq: int) -> None:
        """Accept an answer that begins after the requested seq, if the profile permits it or the router holds no
        block.
        """
        if self.takes_late or (not self.next and not self.blocks):
            self.next = max(seq, self.next)

    def take(self, payload: bytes) -> None:
        if self.ignores_ranks:
            self.views.setdefault(0, PlainSetRouter()).take(self.next - 1, payload)
        else:
            super().take(payload)
        if self.stale:
            for view in self.views.values():
                view.violations = [wrong for wrong in view.violations if "stored twice" not in wrong]
            self.stale = not any(event["type"] == "AllBlocksCleared" for event in events_of(payload))
        assert self.violations == []


class LateRouter:
    """A router that subscribes, requests a replay from 0, and reads the answer slowly while live batches arrive."""

    def __init__(self, router: Router, answer: Any) -> None:
        self.router = router
        self.answer = answer
        self.begun = False
        self.live: list[tuple[int, bytes]] = []

    def read(self) -> None:
        """Read the next message of the answer, unless the answer has ended."""
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
        """Read the rest of the answer, and then the live batches that arrived since the request."""
        while self.answer is not None:
            self.read()
        for seq, payload in self.live:
            assert self.router.apply(seq, payload), "a hole between the answer and the live stream"
        self.live.clear()


class Subscriber:
    """A router that gets a state when it subscribes, reads it slowly, and then reads the live stream."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.connected = False
        self.state: StateReader | None = None
        """Reader of the rest of the state, or None if the router reads no state."""
        self.clears = True
        """Whether the state that the router reads must begin with AllBlocksCleared."""
        self.waiting: list[tuple[int, bytes]] | None = None
        """Live batches that wait until the router has read its state or answer; None if it reads neither."""

    def cut(self) -> None:
        self.connected, self.state, self.waiting = False, None, None

    def receive(self, seq: int, payload: bytes) -> None:
        """Receive a live batch. Apply it, or keep it until the router has read its state or answer."""
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
        """End the reading of the stream's state or of a replay answer. Apply the live batches that have waited."""
        waited, self.waiting, self.state = self.waiting or [], None, None
        for seq, payload in waited:
            self.receive(seq, payload)


@dataclass
class Line:
    """The connection between one engine and kvbus, with the messages that have not arrived."""

    engine: Engine
    connected: bool = False
    wire: list[tuple[int, bytes, bytes]] = field(default_factory=list)
    answers: list[tuple[int, list[bytes]]] = field(default_factory=list)
    asked: int | None = None
    """Id of kvbus's open replay request, or None."""
    heard: tuple[int, int] = (0, -1)
    """Epoch and seq of the newest live batch that kvbus has received."""
    hidden: int = -1
    """kvbus's epoch in which the publisher restarted unnoticed or a second publisher sent batches, else -1.

    kvbus need not be exact before it has begun a later epoch.
    """
    refused: bool = False
    """Whether an earlier kvbus process refused blocks because the index was full. Its counters are lost."""


def step(method: Callable[..., None]) -> Callable[..., None]:
    """Turn a method into a step: record the call before it runs, and check the invariants after it."""

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
    """A simulated world without I/O, whose methods are the steps of a script.

    The arguments of a step that name a source, output or message may be any numbers. The step divides such a number by
    the number of sources, outputs or messages, and uses the remainder.
    """

    steps = 0
    """Number of steps that all worlds of this process have executed."""

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
        """Live batches that a router received while it was reading an answer, by stream."""
        self.late: dict[tuple[int, int], LateRouter] = {}
        self.subscribers: dict[tuple[int, int], Subscriber] = {}
        self.saved = list(dump(self.relay))
        self.log: list[Frame] = []
        self.forgot_ranks = False
        """Whether kvbus has lost its state, and with it the ranks under which routers may hold blocks.

        A rank that neither the configuration nor the engine names any more can then not be cleared.
        """
        self.begun: tuple[Iterator[bytes], int] | None = None
        """The checkpoint in progress: its remaining slices, and the index of the first write-ahead log frame after
        its start.
        """

    @property
    def places(self) -> list[tuple[int, int]]:
        """Every stream, as a tuple of the index of its output and its index within the output."""
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
        # send the requests after all other commands: an answer may publish batches, which must come after these
        # commands
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
            """Start a state, and note whether the router may keep dead blocks because the state has no clear."""
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
        """Return whether a clear on stream ``at`` of output ``number`` also clears other streams' blocks at routers."""
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
        """Change the engine's cache and publish a batch, ``times`` times.

        If kvbus is connected, each batch is sent to it.
        """
        line = self.lines[source % len(self.lines)]
        for _ in range(times):
            seq, payload = line.engine.publish(changes)
            if line.connected:
                line.wire.append((seq, payload, line.engine.publisher))

    @step
    def skip_a_number(self, source: int) -> None:
        """Use a seq without sending a batch, as vLLM does after an exception."""
        self.lines[source % len(self.lines)].engine.seq += 1

    @step
    def restart_engine(self, source: int) -> None:
        """Restart the engine's process. Its connections break, and messages that have not arrived are lost."""
        source %= len(self.lines)
        self._cut(source)
        self.lines[source].engine.restart()
        # if kvbus gets no answer, it keeps the old epoch in two cases: `on_lost` is `keep`, or it believes that the
        # engine has no replay buffer
        believed = self.setup.on_lost == "keep" or self.relay.sources[source].sequencer.dump()["buffer"] is False
        self.lines[source].hidden = self._epoch(source) if believed else -1

    @step
    def restart_behind_a_proxy(self, source: int) -> None:
        """Restart the engine's process while kvbus's connection, which ends at a proxy, stays open."""
        line = self.lines[source % len(self.lines)]
        line.engine.restart()
        line.answers.clear()
        line.hidden = self._epoch(source % len(self.lines))

    @step
    def stranger(self, source: int, seq: int, block: int) -> None:
        """Publish a batch of a second publisher on the same endpoint."""
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
        """Deliver a live batch of an engine to kvbus, lose it, or deliver it twice.

        ``at`` is its position among the sent batches; 0 is the oldest.
        """
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
        """Deliver up to ``count`` messages of the source's replay answers."""
        source %= len(self.lines)
        for _ in range(count):
            if self.lines[source].answers:
                self._take_answer(source)

    @step
    def answers_are_lost(self, source: int) -> None:
        self.lines[source % len(self.lines)].answers.clear()

    @step
    def a_reply_to_nothing(self, source: int, request: int, seq: int) -> None:
        """Deliver an answer to a request that kvbus never made or that has ended."""
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
        """Start a checkpoint. Only `kvbus_is_killed` reads its slices, so all changes between these two steps
        happen during
        the checkpoint.
        """
        self._write_log()
        self.begun = dump(self.relay), len(self.log)

    @step
    def kvbus_is_killed(self, new_generation: bool) -> None:
        """Kill kvbus and restart it with its state. It keeps index and seqs, and has new counters and connections.

        With ``new_generation``, a checkpoint is completed before the kill: the checkpoint in progress, or a new one.
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
                # an empty answer that completes an empty epoch leaves no record, so a restarted kvbus requests the
                # history again
                before["partial"] |= now["partial"]
        assert recovered == live
        relay.records = Records()
        self.relay = relay
        self._answers_are_gone()

    @step
    def kvbus_is_killed_without_state(self) -> None:
        """Restart kvbus without saved state. Its seqs jump ahead, and it learns the index again."""
        for source in range(len(self.lines)):
            self._cut(source)
            self.lines[source].heard = (-1, -1)
        self.first_seqs = {place: seq + 4 if seq >= 0 else 0 for place, seq in self.last_seq.items()}
        self.forgot_ranks = True
        self.relay = self.make_relay()
        self.relay.records = Records()
        for line in self.lines:
            line.hidden, line.refused = -1, False  # the new process knows no earlier epoch
        self.last_seq = {place: seq - 1 for place, seq in self.first_seqs.items()}
        self.saved, self.log, self.begun = list(dump(self.relay)), [], None
        self._answers_are_gone()
        self._feed(Started(self.now))

    def _answers_are_gone(self) -> None:
        """Drop the unfinished replay answers to routers, and break the connections of all subscribers, as the end
        of kvbus does.

        Subscribers keep their blocks.
        """
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
        ignores = spec.profile.one_copy if spec.merged else spec.profile.clears != "rank"
        return Router(ignores_ranks=ignores, takes_late=not spec.profile.filled_replay)

    def _place(self, number: int) -> tuple[int, int]:
        places = self.places
        return places[number % len(places)]

    @step
    def router_link(self, place: int, deaf: bool) -> None:
        """Stop or resume the live stream of a router. While stopped, the router loses all batches."""
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
        """Connect a new or an existing router, and let it read the first ``batches`` batches of the state.

        A state begins with a clear, so the router keeps its earlier blocks until it reads the first batch.
        """
        at = self._place(place)
        if at not in self.subscribers:
            self.subscribers[at] = Subscriber(self._new_router(at))
        self.subscribers[at].cut()
        self._feed(Subscribed(*at, (1,)))
        self.subscribers[at].read(batches)

    @step
    def subscriber_resumes(self, place: int) -> None:
        """Break a subscriber's connection, and continue by a replay from its next seq, even in the middle of a
        state.
        """
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
        """Send a snapshot request of a router. The relay also answers on an output without a snapshot endpoint."""
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
            held = source.sequencer.reorder_buffer
            largest = max((len(held.get(seq)) for seq in held), default=0)
            assert len(held) <= setup.reorder_batches + 1, "held batches"  # plus the batch that is delivered next
            assert held.bytes <= max(setup.reorder_bytes, largest) + largest, "held bytes"
            assert source.normalizer.entries <= setup.max_blocks
        for output in self.relay.outputs:
            for stream in output.streams:
                assert len(stream.journal) <= setup.journal_batches

    def nothing_kept_back(self) -> None:
        """Check that kvbus has published a batch for every seq that it has used."""
        for n, at in self.places:
            assert self.relay.outputs[n].streams[at].next_seq == self.last_seq[n, at] + 1

    @step
    def quiescence(self) -> None:
        """Deliver all messages, let time pass, and check that every router holds the blocks of its engines."""
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
            older = self.routers[place]
            assert late.router.blocks == older.blocks or late.router.stale or older.stale or self.forgot_ranks
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
        # a full index may have refused a tail block, which routers cannot notice
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
        # if kvbus knows that the engine has a replay buffer, a replay from the start exposes every second publisher;
        # but if the engine used seq 0 without sending it, the answer begins with 1, as if the buffer had been trimmed
        reaches_back = engine.setup.buffer_steps == 1000 and [seq for seq, _ in engine.buffer[:1]] == [0][: engine.seq]
        if line.hidden >= 0 and not (reaches_back and source.sequencer.dump()["buffer"]):
            return False  # kvbus may not notice the second publisher before the engine visibly restarts
        # without a replay, kvbus cannot notice that an idle engine's last batches were lost, or that it began a new
        # epoch
        return engine.kind != "deaf" or line.heard == (engine.life, engine.seq - 1)

    def _knows_its_engines(self, place: tuple[int, int], router: Router) -> None:
        """Check that a router holds exactly the blocks of its stream's engines.

        The check is for each rank, unless the router ignores ranks.
        """
        output = self.relay.outputs[place[0]]
        sources = list(range(len(self.lines))) if output.merged else [place[1]]
        for those in [sources] if router.ignores_ranks else [[i] for i in sources]:
            if not all(map(self._can_be_known, those)):
                continue
            ranks = {0 if router.ignores_ranks else output.rank_of(i, self.relay.sources[i]) for i in those}
            whole = not output.merged and not self.forgot_ranks
            view = {(medium, block) for of, _, medium, block in router.blocks if whole or of in ranks}
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
        """Return the blocks of an engine that routers must hold; None if kvbus reports that it does not know them.

        ``folded`` says whether the blocks have hashes folded to integers.
        """
        source, engine = self.relay.sources[i], self.lines[i].engine
        if source.partial:
            return None
        if engine.kind == "snapshot" and self.setup.orphans == "drop":
            return None  # a snapshot has orphans whose parents were there when the orphans were stored
        # if the start of an epoch is unknown, a clear makes only its own tier known; another tier may still hold old
        # blocks
        visible = self._named(engine, engine.visible, folded)
        told = {key for key in visible if key[0] in {"GPU", *source.normalizer.dump()["media"]}}
        # the unknown blocks may be the parents of dropped orphans
        return None if told != visible and self.setup.orphans == "drop" else told

    def _named(self, engine: Engine, counts: Counter[tuple[str, int]], folded: bool) -> Blocks:
        name: Callable[[int], Any] = (lambda b: fold(engine.hash_of(b))) if folded else engine.hash_of
        return {(medium, name(block)) for (medium, block), count in counts.items() if count}

    def lines_of_script(self) -> Iterator[str]:
        """Yield the lines of a test that repeats the run."""
        yield "def test_this() -> None:"
        yield from (f"    {line}" for line in self.script)


def everything(relay: Relay, kept: dict[tuple[int, int], int | None]) -> dict[str, Any]:
    """Return the part of a relay's state that must be equal before and after a recovery from the write-ahead log.

    ``kept`` has, by output and stream, the first seq in the journal of the recovered relay; None if this journal is
    empty. Only batches from this seq on are compared, because a recovered journal has only the batches after the
    checkpoint.
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


OF_A_SOURCE = (
    *("rank", "ranked", "ranks_announced", "ts", "topic", "publisher_id"),
    *("lost", "partial_since", "announced", "expired"),
)


def tables_of(index: Any) -> dict[Any, Any]:
    """Return an index's content for each table: blocks with their number of copies, and sub-blocks with their
    references.
    """
    return {
        key: ({block: table.copies.get(block, 0) for block in table.blocks}, dict(table.refs))
        for key, table in index.tables.items()
        if table.blocks
    }
