"""Tests for the event ids that a Dynamo router gets: it holds the engine's blocks, whatever happens to its connection.

The rules of the model router are those of Dynamo 1.6.1 (`tests/interop/test_dynamo_plane.py` runs the real one): it
accepts any first id, ignores ids that it has seen, and drops the rank's blocks at a gap.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvbus.core.types import Tier
from kvbus.parts.outputs.dynamo.messages import Connection, Numbering, rank_of
from kvbus.transport.zmtp.wire import encode_message, take_frame
from tests.doubles.payloads import cleared, payload, removed, store
from tests.outputs.dynamo_reader import unwrapped


def messages(data: bytes) -> list[list[bytes]]:
    """Return the ZMTP messages that the bytes of a connection contain."""
    buffer = bytearray(data)
    found: list[list[bytes]] = [[]]
    while (frame := take_frame(buffer, 2**30)) is not None:
        found[-1].append(frame.body)
        if not frame.more:
            found.append([])
    return found[:-1]


class Router:
    def __init__(self) -> None:
        self.cursor: int | None = None
        self.resets = 0
        self.blocks: set[int] = set()

    def take(self, data: bytes) -> None:
        for frames in messages(data):
            for event in unwrapped(frames)[2]:
                self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        assert (event["worker_id"], event["event"]["dp_rank"]) == (7, 3)
        at, data = event["event"]["event_id"], event["event"]["data"]
        if self.cursor is not None and at <= self.cursor:
            return
        if self.cursor is not None and at > self.cursor + 1:
            self.blocks.clear()
            self.resets += 1
        self.cursor = at
        if "stored" in data:
            self.blocks |= {block["block_hash"] for block in data["stored"]["blocks"]}
        else:
            self.blocks -= set(data["removed"]["block_hashes"])


class Plane(RuleBasedStateMachine):
    """One stream and two routers, each of which gets the messages that kvbus's live side sends."""

    @initialize()
    def begin(self) -> None:
        self.numbering = Numbering(5, 7, 3, lambda _: None)
        self.seq = 0
        self.blocks: set[int] = set()
        self.routers = [Router(), Router()]
        self.connections: list[Connection | None] = [None, None]

    def message(self, *events: dict[str, Any]) -> bytes:
        self.seq += 1
        return encode_message((b"topic", self.seq.to_bytes(8, "big"), payload(*events)))

    def to_all(self, *events: dict[str, Any]) -> None:
        data = self.message(*events)
        for router, connection in zip(self.routers, self.connections, strict=True):
            if connection is not None:
                router.take(connection.rewrite(data))

    @rule(blocks=st.sets(st.integers(1, 40), min_size=1))
    def stored(self, blocks: set[int]) -> None:
        self.blocks |= blocks
        self.to_all(*(store([block]) for block in blocks))

    @rule(blocks=st.sets(st.integers(1, 40), min_size=1))
    def gone(self, blocks: set[int]) -> None:
        self.blocks -= blocks
        self.to_all(removed(sorted(blocks)), store([50]), removed([50]))

    @rule(more=st.booleans())
    def clear(self, more: bool) -> None:
        self.blocks = {60} if more else set()
        self.to_all(cleared(), *([store([60])] if more else []))

    @rule()
    def heartbeat(self) -> None:
        self.to_all()

    @rule(which=st.integers(0, 1))
    def cut(self, which: int) -> None:
        self.connections[which] = None

    @rule(which=st.integers(0, 1), lost=st.booleans())
    def state(self, which: int, lost: bool) -> None:
        """Send the state in two batches to one router, which connects anew or, with ``lost``, has lost batches.

        For each of these batches, the other router gets an empty batch with the same seq.
        """
        if not lost or self.connections[which] is None:
            self.connections[which] = self.numbering.connection()
        blocks = sorted(self.blocks)
        parts = [[cleared(), *(store([block]) for block in blocks[:3])], [store([block]) for block in blocks[3:]]]
        for part in parts:
            data = self.message(*part)
            self.seq -= 1  # the empty batch for the other router has the same seq
            empty = self.message()
            for at, (router, connection) in enumerate(zip(self.routers, self.connections, strict=True)):
                if connection is not None:
                    router.take(connection.rewrite(data if at == which else empty))

    @precondition(lambda self: self.connections[0] is not None)
    @rule(block=st.integers(1, 40))
    def lost_without_a_state(self, block: int) -> None:
        """Lose a batch for the first router, which drops all its blocks at the next batch."""
        before, known = self.routers[0].resets, self.routers[0].cursor is not None
        self.connections[1] = None
        self.message(store([block + 100]))
        self.blocks = {block}
        self.to_all(store([block]))
        assert self.routers[0].resets == before + known

    @invariant()
    def the_routers_hold_the_blocks(self) -> None:
        for router, connection in zip(self.routers, self.connections, strict=True):
            if connection is not None:
                assert router.blocks == self.blocks


Plane.TestCase.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
TestPlane = Plane.TestCase


def test_a_message_contains_the_events_in_the_form_of_dynamo() -> None:
    numbering = Numbering(5, 7, 3, lambda _: None)
    connection = numbering.connection()
    batch = payload(store([1, 2], 9, medium="CPU"), removed([-1]), ts=12.5)
    data = connection.rewrite(encode_message((b"", (4).to_bytes(8, "big"), batch)))
    ((publisher, sequence, events),) = map(unwrapped, messages(data))
    assert (publisher, sequence) == (5, 4)
    assert [event["storage_tier"] for event in events] == ["host_pinned", "device"]
    stored, gone = (event["event"] for event in events)
    assert [stored["event_id"], gone["event_id"]] == [2, 3]
    blocks = stored["data"]["stored"]["blocks"]
    assert (stored["data"]["stored"]["parent_hash"], [block["block_hash"] for block in blocks]) == (9, [1, 2])
    assert gone["data"] == {"removed": {"block_hashes": [2**64 - 1]}}


def test_rank_of_reads_the_rank_of_a_batch() -> None:
    assert [rank_of(payload(store([1]), rank=rank)) for rank in (0, 44, 300)] == [0, 44, 300]


def test_events_about_blocks_of_others_are_omitted_and_counted() -> None:
    left_out: list[int] = []
    numbering = Numbering(5, 7, 3, left_out.append)
    batch = payload(
        store([1], locality="REMOTE"), store([2], locality="LOCAL"), store([3]), removed([3], ownership="kvcr")
    )
    (frames,) = messages(numbering.connection().rewrite(encode_message((b"", bytes(8), batch))))
    events = unwrapped(frames)[2]
    assert [event["event"]["data"]["stored"]["blocks"][0]["block_hash"] for event in events] == [2, 3]
    assert left_out == [2]


def test_a_batch_of_many_events_is_sent_in_one_message() -> None:
    batch = payload(*[removed([1])] * 70_000)
    (frames,) = messages(Numbering(5, 7, 3, print).connection().rewrite(encode_message((b"", bytes(8), batch))))
    assert len(unwrapped(frames)[2]) == 70_000


def test_every_tier_has_its_dynamo_name() -> None:
    media = {"GPU": "device", "CPU": "host_pinned", "FS": "disk", "OBJ": "external"}
    assert set(media.values()) == {"device", "host_pinned", "disk", "external"}
    assert len(Tier) == len(media)
    batch = payload(*(store([at], medium=medium) for at, medium in enumerate(media, 1)))
    (frames,) = messages(Numbering(5, 7, 3, print).connection().rewrite(encode_message((b"", bytes(8), batch))))
    assert [event["storage_tier"] for event in unwrapped(frames)[2]] == list(media.values())
