"""Which batches leave as they came: those of which nothing is changed, left out or put in another order."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvbus.core.normalizing.block_size import YOUNG
from kvbus.core.normalizing.normalizer import Normalizer
from kvbus.core.normalizing.rules import Rules
from kvbus.core.source_stats import SourceStats
from kvbus.core.wire import codec
from kvbus.core.wire.batch import Batch
from kvbus.core.wire.codec import AnyEvent

SIZE = 4


def store(hashes: list[Any], parent: Any = None, tokens: Any = None, **fields: Any) -> dict[str, Any]:
    event = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": list(range(SIZE * len(hashes))) if tokens is None else tokens,
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return {name: value for name, value in {**event, **fields}.items() if value is not ...}


def removed(*hashes: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", **fields}


def batch(*events: dict[str, Any], ts: Any = 1.0, rank: Any = 0) -> bytes:
    return msgspec.msgpack.encode([ts, events, rank])


def byte_hash(number: int) -> bytes:
    return number.to_bytes(32, "big")


class Source:
    """A normalizer that knows blocks 1 to 40 in one chain."""

    def __init__(self, **rules: Any) -> None:
        self.stats = SourceStats()
        self.normalizer = Normalizer(Rules(**rules), self.stats)
        for at in range(2 * (YOUNG + 1)):
            first = 4 * at + 1
            self.take(batch(store([first, first + 1, first + 2, first + 3], first - 1 or None)))

    def take(self, payload: bytes) -> list[AnyEvent]:
        decoded = codec.decode(payload, form=self.normalizer.form)
        assert isinstance(decoded, Batch)
        return self.normalizer.apply(decoded)

    def as_it_came(self, *events: dict[str, Any], **envelope: Any) -> bool:
        payload = batch(*events, **envelope)
        left = self.take(payload)
        if self.normalizer.as_it_came:
            whole = codec.decode_batch(payload)
            assert isinstance(whole, Batch)
            assert msgspec.msgpack.encode(left) == msgspec.msgpack.encode(whole.events)
        return self.normalizer.as_it_came

    @property
    def live(self) -> set[Any]:
        return {block for table in self.normalizer.index.tables.values() for block in table.blocks}


@pytest.fixture
def source() -> Source:
    return Source()


CARRIED = {"session_id": "s", "cache_salt": "x", "locality": "LOCAL", "ownership": None}
WHOLE = {
    "a store": [store([50])],
    "behind a block": [store([50], 40)],
    "several blocks": [store([50, 51, 52], 7)],
    "a chain": [store([50], 40), store([51], 50)],
    "a removal": [removed(40)],
    "several, leaf first": [removed(40, 39, 38)],
    "the same in several events": [removed(40), removed(39), removed(38)],
    "removed and stored again": [removed(40), store([40], 39)],
    "stored and removed": [removed(40), store([50], 39), removed(50)],
    "tokens of every length": [
        store([50], tokens=[0, 127, 128, 255]),
        store([51], tokens=[256, 65535, 65536, 2**32 - 1]),
    ],
    "pairs": [store([50], tokens=[[1, 2], [3, 4], [5, 6], [7, 70_000]])],
    "carried fields": [store([50], **CARRIED), store([51], **CARRIED), store([52], **{**CARRIED, "session_id": "t"})],
    "lookahead tokens": [store([50, 51], lookahead_token_ids=[[1], [2, 3]])],
    "a window": [store([50], group_idx=0, kv_cache_spec_kind="full_attention", kv_cache_spec_sliding_window=128)],
    "extra keys": [store([50, 51], extra_keys=[["salt"], None])],
    "another medium, behind a parent on the first": [store([70], 40, medium="CPU")],
    "an orphan": [store([50], 49)],
    "an adapter's name too long to be kept": [store([50], lora_name="x" * 2000)],
}


@pytest.mark.parametrize("events", WHOLE.values(), ids=WHOLE.keys())
def test_what_needs_no_change_leaves_as_it_came(source: Source, events: list[dict[str, Any]]) -> None:
    assert source.as_it_came(*events)
    assert source.stats.rejected == {}


CHANGED = {
    "a clear": [{"type": "AllBlocksCleared"}],
    "a field that was not sent": [store([50], lora_name=...)],
    "no parent": [store([50], ...)],
    "removed without a medium": [{"type": "BlockRemoved", "block_hashes": [40]}],
    "a copy": [store([40], 39, tokens=list(range(12, 16)))],
    "a copy among new ones": [store([50, 40])],
    "its removal": [removed(40, 40)],
    "a parent that comes later": [store([51], 50), store([50])],
    "a parent before its child": [removed(39, 40)],
    "a parent before its child, apart": [removed(39), removed(40)],
    "a chain from its root": [removed(37, 38, 39, 40)],
    "an unknown block": [removed(40, 99)],
    "another spelling of the medium": [store([50], medium="gpu")],
    "block size nought": [store([50], block_size=0)],
    "an unknown field": [store([50], novel=1)],
    "a removal with a locality": [removed(40, locality="LOCAL")],
    "a group without prefixes": [store([50], kv_cache_spec_kind="sliding_window")],
    "a hash twice": [store([50, 50])],
    "good, then bad": [store([50], 40), removed(50), store([51, 52], 40), removed(99)],
}


@pytest.mark.parametrize("events", CHANGED.values(), ids=CHANGED.keys())
def test_what_is_changed_or_left_out_does_not(source: Source, events: list[dict[str, Any]]) -> None:
    assert not source.as_it_came(*events)


def test_by_position_it_does_not(source: Source) -> None:
    decoded = codec.decode(msgspec.msgpack.encode([1.0, [["BlockStored", [50], 40, [1, 2, 3, 4], 4]], 0]))
    assert isinstance(decoded, Batch)
    assert len(source.normalizer.apply(decoded)) == 1
    assert not source.normalizer.as_it_came


@pytest.mark.parametrize("envelope", [{"rank": None}, {"ts": 1}])
def test_nor_in_another_envelope(source: Source, envelope: dict[str, Any]) -> None:
    assert not source.as_it_came(store([50]), **envelope)
    assert 50 in source.live


def test_tokens_in_another_spelling_stay_as_they_are(source: Source) -> None:
    tokens = msgspec.Raw(b"\x94" + b"".join(b"\xcf" + bytes(7) + bytes([token]) for token in range(12, 16)))
    assert source.as_it_came(store([50], tokens=tokens))
    assert not source.as_it_came(store([50], tokens=list(range(12, 16))))
    assert (source.stats.filtered, source.stats.rejected) == ({"copy": 1}, {})


def test_a_field_that_was_not_sent_is_filled_in(source: Source) -> None:
    """SGLang sends no lora_name, and no parent where there is none."""
    events = source.take(batch(store([50], lora_name=...), store([51], ...), store([52])))
    fields = [msgspec.msgpack.decode(msgspec.msgpack.encode(event)) for event in events]
    assert [sorted(each) for each in fields] == [sorted(store([1]))] * 3
    assert {each["parent_block_hash"] for each in fields} == {None}


def test_a_batch_that_takes_nothing_leaves_what_the_last_one_left_behind(source: Source) -> None:
    assert source.as_it_came(store([50]))
    assert not source.as_it_came(store([50, 50]))
    assert source.as_it_came(store([51]))
