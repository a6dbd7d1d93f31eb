"""Tests of an engine that names its data-parallel rank late, or names another rank later.

Routers file blocks by rank, so all blocks of an engine must be under one rank: in the live stream, in the state for a
late router, and after a restart of kvbus.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest

from kvbus.core.checkpoint import Loader, dump
from kvbus.core.commands import Command, Publish, RequestReplay
from kvbus.core.events import BatchReceived, RelayEvent, ReplayReceived, SourceDown, SourceUp
from kvbus.core.outputs.spec import OutputSpec
from kvbus.core.relay import Relay
from kvbus.core.source_spec import SourceSpec
from kvbus.core.wire.frames import END_SEQ
from kvbus.core.wire.profiles import PROFILES
from kvbus.core.write_ahead_log import decode_records
from tests.doubles.answers import AnswerReader
from tests.doubles.payloads import pack, removed, store
from tests.doubles.stage import FAMILIES, Stage, Trusting

NAMED: dict[str, list[int | None]] = {"null": [None], "two items": [], "0": [0], "1": [1]}
"""The rest of a batch after its events: a third item, or nothing if the batch has two items."""

HELD = {1, 2, 3, 5, 6}
"""The blocks that the engine holds after both of its batches."""


class OneEngine(Stage):
    """A relay with one engine. The engine answers replay requests, and chooses the end of each of its batches."""

    def __init__(self, rank: int = 0, profile: str = "vllm") -> None:
        self.sent: list[bytes] = []
        source = SourceSpec("engine/0", rank, replay=True, probe_interval=0.0)
        super().__init__([source], [OutputSpec("out", PROFILES[profile], [None], heartbeat=0.0)])
        self.remember()

    def remember(self) -> None:
        """Save a checkpoint, and write the later records into a new write-ahead log."""
        self.saved = list(dump(self.relay))
        self.relay.keep_records(keep=True)

    def carry_out(self, commands: Iterable[Command]) -> list[AnswerReader]:
        todo = list(commands)
        answers = super().carry_out(todo)
        for command in todo:
            if isinstance(command, RequestReplay):
                for seq in range(command.start, len(self.sent)):
                    self.answer(command, seq.to_bytes(8, "big"), self.sent[seq])
                self.answer(command, END_SEQ, b"")
        return answers

    def answer(self, command: RequestReplay, number: bytes, payload: bytes) -> list[Any]:
        event: RelayEvent = ReplayReceived(0, command.request, [b"", b"", number, payload])
        return self.handle(event)

    def publish(self, named: str, *events: Any, heard: bool = True) -> None:
        """Publish a batch that ends as ``named`` says. kvbus receives it on the live stream if it is ``heard``."""
        self.sent.append(pack([1.0, list(events), *NAMED[named]]))
        if heard:
            self.handle(BatchReceived(0, [b"", (len(self.sent) - 1).to_bytes(8, "big"), self.sent[-1]]))

    def publish_first(self, named: str) -> None:
        self.publish(named, store([1, 2, 3]), store([4], 3))

    def publish_later(self, named: str, *, heard: bool = True) -> None:
        self.publish(named, store([5, 6], 3), removed([4]), heard=heard)

    def kill(self, routers: list[Trusting]) -> None:
        """Kill kvbus with SIGKILL, and start it again from its checkpoint and its write-ahead log."""
        for router in routers:
            router.cut(self)
        assert self.relay.records is not None
        body, payloads = self.relay.records.take()
        records = decode_records(body, b"".join(payloads))
        assert records is not None
        used = self.relay.outputs[0].streams[0].next_seq
        self.relay = Relay(*self.specs)
        loader = Loader(self.relay)
        for blob in self.saved:
            loader.feed(blob)
        for record in records:
            self.relay.apply_record(record, self.now)
        self.relay.resume_at(lambda _output, _stream: used + 100)
        self.relay.recovery_finished(self.now)
        self.remember()

    def check(self, routers: list[Trusting]) -> int:
        """Check that all routers hold the engine's blocks under one rank, and return the rank."""
        late = [family() for family in FAMILIES]
        self.connect_all([*routers, *late])
        self.read_all([*routers, *late])
        source = self.relay.sources[0]
        assert {block for _, table in source.normalizer.index.tables.items() for block in table.blocks} == HELD
        for router in [*routers, *late]:
            router.holds({(source.rank, None, "GPU", block) for block in HELD})
            assert router.views.violations == []
        return source.rank


def begun(rank: int, first: str, profile: str = "vllm") -> tuple[OneEngine, list[Trusting]]:
    """Return a relay and its routers after the engine's first batch."""
    stage = OneEngine(rank, profile)
    routers = [family() for family in FAMILIES]
    stage.publish_first(first)
    stage.connect_all(routers)
    stage.read_all(routers)
    return stage, routers


def expected(rank: int, *named: str) -> int:
    """Return the first rank that the engine names, or the configured rank if it names none."""
    return next((end for each in named for end in NAMED[each] if end is not None), rank)


each_pair = pytest.mark.parametrize(("first", "later"), list(itertools.permutations(NAMED, 2)))
each_rank = pytest.mark.parametrize("rank", [0, 1])


@each_pair
@each_rank
@pytest.mark.parametrize("profile", ["vllm", "dynamo", "smg"])
def test_routers_hold_the_blocks_from_before_the_rank_was_named(profile, rank, first, later):
    stage, routers = begun(rank, first, profile)
    stage.publish_later(later)
    assert stage.check(routers) == expected(rank, first, later)


@each_pair
@each_rank
def test_routers_hold_them_after_kvbus_was_killed_between_the_two_batches(rank, first, later):
    stage, routers = begun(rank, first)
    stage.kill(routers)
    stage.handle(SourceUp(0))
    stage.publish_later(later)
    assert stage.check(routers) == expected(rank, first, later)


@each_pair
@each_rank
def test_routers_hold_them_if_the_rank_is_named_while_kvbus_is_killed(rank, first, later):
    """The routers connect again only after kvbus has learned the rank, and still hold blocks under the earlier one."""
    stage, routers = begun(rank, first)
    stage.kill(routers)
    stage.publish_later(later, heard=False)
    stage.handle(SourceUp(0))
    assert stage.check(routers) == expected(rank, first, later)


@each_pair
@each_rank
def test_routers_hold_them_after_kvbus_was_killed_later(rank, first, later):
    stage, routers = begun(rank, first)
    stage.publish_later(later)
    stage.kill(routers)
    stage.handle(SourceUp(0))
    assert stage.check(routers) == expected(rank, first, later)


@each_pair
@each_rank
def test_a_router_that_was_away_when_the_rank_was_named_holds_them(rank, first, later):
    stage, routers = begun(rank, first)
    for router in routers:
        router.cut(stage)
    stage.publish_later(later)
    assert stage.check(routers) == expected(rank, first, later)


def test_an_engine_that_restarts_under_another_rank_leaves_no_block_under_its_old_rank():
    stage, routers = begun(0, "1")
    for router in routers:
        router.cut(stage)
    stage.handle(SourceDown(0))
    stage.sent.clear()
    stage.handle(SourceUp(0))
    stage.publish_first("0")
    stage.publish_later("0")
    assert stage.check(routers) == 0


def test_a_merged_stream_names_no_rank_of_an_engine_and_is_not_cleared():
    source = SourceSpec("engine/0", 0, replay=False)
    relay = Relay([source], [OutputSpec("all", PROFILES["vllm"], [b"kv"], merged=True, heartbeat=0.0)])
    commands: list[Command] = []
    for seq, named in enumerate((NAMED["null"], NAMED["1"])):
        payload = pack([1.0, [store([seq + 1])], *named])
        commands += relay.handle(BatchReceived(0, [b"", seq.to_bytes(8, "big"), payload]), 1.0)
    assert [type(command) for command in commands] == [Publish, Publish]
