"""Tests that an output without token ids never sends one, and that its routers hold the same blocks as other routers.

The tests replace the tokens, salts, sessions and keys in every capture by marked values, which they can find in any
bytes. For each profile they run an output with tokens and one without.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import pytest

from kvbus.client.view import BlockView
from kvbus.core.commands import AnswerReplay, AnswerSnapshot, Publish, SendState
from kvbus.core.events import BatchReceived, ReplayAsked, SnapshotAsked, SourceUp, Subscribed
from kvbus.core.outputs.spec import OutputSpec
from kvbus.core.relay import Relay
from kvbus.core.source_spec import SourceSpec
from kvbus.core.wire.profiles import PROFILES
from tests.doubles.answers import reading
from tests.doubles.payloads import pack, unpack
from tests.doubles.router import events_of
from tests.long import sample
from tests.typed import well_formed
from tests.wire.captures import CAPTURES, lives

MARK: Final = 0xF0F00000
SECRET: Final = "SECRET-"
POSITIONS: Final = {"token_ids": 3, "lora_name": 7, "extra_keys": 8}
CONTENT: Final = {"token_ids", "extra_keys", "session_id", "cache_salt", "lookahead_token_ids"}
TOKEN: Final = re.compile(rb"(?=\xce\xf0[\xf0-\xff]..)", re.DOTALL)
PUBLISHER: Final = b"p" * 16


def marked(value: Any) -> Any:
    """Return a value whose token ids and texts contain a mark, so that a test can find them in kvbus's output.

    Texts begin with ``SECRET``, and token ids are at least ``MARK``.
    """
    if isinstance(value, list):
        return [marked(each) for each in value]
    if isinstance(value, dict):
        return {name: marked(each) for name, each in value.items()}
    if isinstance(value, str):
        return SECRET + value
    return MARK + value % 2**20 if isinstance(value, int) else value


def with_marks(payload: bytes) -> bytes:
    ts, events, *rank = unpack(payload)
    for event in events:
        if isinstance(event, dict):
            event.update({name: marked(event[name]) for name in CONTENT & event.keys()})
            event.update({"novelty": marked("x")} if event["type"] == "BlockStored" else {})
        elif event[0] == "BlockStored":
            for name, at in POSITIONS.items():
                if at < len(event) and (name != "lora_name" or isinstance(event[at], dict)):
                    event[at] = marked(event[at])
    return pack([ts, events, *rank])


def messages_of(relay: Relay, command: AnswerReplay | AnswerSnapshot) -> Iterator[list[bytes]]:
    reader = reading(relay, command)
    while (message := reader.next_message()) is not None:
        if message:
            yield message


def state_of(relay: Relay, number: int) -> list[tuple[int, bytes]]:
    (command,) = [each for each in relay.handle(Subscribed(number, 0, (1,)), 0.0) if isinstance(each, SendState)]
    return [batch for batch in command.transfer.batches() if batch is not None]


def keys_of(sent: list[tuple[int, bytes]]) -> set[Any]:
    """Return the keys of the blocks that the client library holds after these batches."""
    view = BlockView()
    for _, payload in sent:
        view.apply_batch(well_formed(payload))
    return set(view.keys())


def without(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return events as maps, without the fields that show prompt content and without null fields."""
    left = CONTENT | {"novelty"}
    return [{name: each for name, each in event.items() if name not in left and each is not None} for event in events]


def holds_content(sent: bytes) -> bool:
    return SECRET.encode() in sent or TOKEN.search(sent) is not None


def test_the_search_for_prompt_content_finds_marked_content():
    event = ["BlockStored", [1], None, [7], 1, None, "GPU", {"cache_salt": "s"}]
    assert holds_content(with_marks(pack([1.0, [event]])))
    assert TOKEN.search(pack([MARK + 5]))
    assert TOKEN.search(pack([MARK + 2**20 - 1]))


@pytest.mark.parametrize("capture", sample(CAPTURES, 4))
def test_an_output_without_tokens_sends_the_same_blocks_without_content(capture):
    pairs = list(PROFILES.values())
    specs = [
        OutputSpec(f"{number}-{kind}", profile, [None], heartbeat=0.0, publisher_ids=[PUBLISHER], journal_batches=50)
        for number, family in enumerate(pairs)
        for kind, profile in (("keep", family), ("drop", family.without_tokens()))
    ]
    relay = Relay([SourceSpec("e", 0, replay=False, probe_interval=0.0)], specs)
    relay.handle(SourceUp(0), 0.0)
    sent: list[list[tuple[int, bytes]]] = [[] for _ in specs]
    for message in lives(capture)[0]:
        frames = [message.topic, message.seq.to_bytes(8, "big"), with_marks(message.payload)]
        for command in relay.handle(BatchReceived(0, frames), 0.0):
            if isinstance(command, Publish):
                sent[command.output].append((command.seq, command.payload))
    for number, found in enumerate(sent):
        found.extend(state_of(relay, number))
        asked: list[Any] = [
            ReplayAsked(number, 0, [b"id", b"", bytes(8)]),
            SnapshotAsked(number, 0, [b"id", b"snapshot"]),
        ]
        for ask in asked:
            (command,) = relay.handle(ask, 0.0)
            assert isinstance(command, AnswerReplay | AnswerSnapshot)
            for frames in messages_of(relay, command):
                found.extend((0, frame) for frame in frames if frame[:1] == b"\x93")
    for keep, drop in zip(sent[::2], sent[1::2], strict=True):
        assert any(holds_content(payload) for _, payload in keep)
        assert not any(holds_content(payload) for _, payload in drop)
        assert [seq for seq, _ in keep] == [seq for seq, _ in drop]
        for (_, whole), (_, bare) in zip(keep, drop, strict=True):
            assert without(events_of(whole)) == without(events_of(bare))
            assert all(event["token_ids"] == [] for event in events_of(bare) if event["type"] == "BlockStored")
        assert keys_of(keep) == keys_of(drop)


class Stored(msgspec.Struct, tag="BlockStored", omit_defaults=True):
    """The fields of BlockStored that vLLM 0.33's own consumers require, with their types."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    lookahead_token_ids: list[list[int]] | None = None


class Removed(msgspec.Struct, tag="BlockRemoved", omit_defaults=True):
    block_hashes: list[bytes | int]
    medium: str | None


class Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None = None


@pytest.mark.parametrize("capture", ["vllm033_map_extras", "vllm033_lookahead", "sglang0523_radix_eagle"])
def test_the_structs_of_vllm_decode_an_output_without_tokens(capture):
    profile = PROFILES["vllm"].without_tokens()
    relay = Relay(
        [SourceSpec("e", 0, replay=False, probe_interval=0.0)],
        [OutputSpec("out", profile, [None], heartbeat=0.0)],
    )
    relay.handle(SourceUp(0), 0.0)
    stored = 0
    for message in lives(capture)[0]:
        for command in relay.handle(
            BatchReceived(0, [message.topic, message.seq.to_bytes(8, "big"), message.payload]), 0.0
        ):
            assert isinstance(command, Publish)
            batch = msgspec.msgpack.decode(command.payload, type=Batch)
            stores = [event for event in batch.events if isinstance(event, Stored)]
            assert all(event.token_ids == [] and event.block_size > 0 for event in stores)
            stored += sum(len(event.block_hashes) for event in stores)
    assert stored
