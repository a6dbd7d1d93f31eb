"""Tests for reading events in the form of Mooncake's RFC 1527, with the field order and nulls of Mooncake's
publisher.
"""

import pytest

from kvbus.core.types import Filtered, Reason
from kvbus.core.wire.codec import decode
from kvbus.core.wire.schema import Batch
from tests.core.dsl import Bench
from tests.doubles.payloads import cleared, pack, plain_all, removed, store, tokens_of

MS = 1_763_000_000_123


def event(kind, *, legacy=True, **more):
    """Return one event of a Mooncake pool.

    ``more`` are fields to add, or to set to another value than the usual one.
    """
    said = {"event_id": 7, "timestamp": MS, "event_type": kind}
    if legacy:
        said["type"] = {"stored": "BlockStored", "removed": "BlockRemoved"}.get(kind, "AllBlocksCleared")
    said |= {"model_name": None, "block_size": None, "additional_salt": None, "lora_name": None, "tenant_id": "default"}
    said |= {"backend_id": "node-1", "medium": "cpu", "dp_rank": 0}
    if kind != "cleared":
        said |= {"seq_hashes": [1], "base_block_idx": None}
    if kind == "stored":
        said |= {"parent_hash": None, "token_ids": None}
    if legacy and kind != "cleared":
        said |= {"block_hashes": [1], "parent_block_hash": None}
    return said | more


def batch(*events):
    return pack([MS, list(events), None])


def known(**more):
    """Return a store event that has the tokens of its blocks, as an engine sends it.

    The store events of a Mooncake pool have no tokens.
    """
    fields = {"seq_hashes": [1, 2], "token_ids": tokens_of(1) + tokens_of(2), "block_size": 16, "medium": "gpu"}
    return event("stored", legacy=False, base_block_idx=4, parent_hash=9, **fields | more)


@pytest.mark.parametrize("legacy", [True, False])
def test_the_events_of_a_pool_are_decoded(legacy):
    found = decode(batch(*(event(kind, legacy=legacy) for kind in ("stored", "removed", "cleared"))))
    assert isinstance(found, Batch)
    assert found.ts == MS / 1000
    assert (found.rejects, found.unknown, found.extras) == ([], set(), None)
    stored = store([1], tokens=[], block_size=0, medium="cpu")
    assert plain_all(found.events) == plain_all([stored, removed([1], medium="cpu"), cleared()])


def test_the_fields_of_mooncake_keys_are_known():
    """kvbus knows the fields of Mooncake#2876: ranks, group, namespace, and the complete hash.

    ``seq_hashes`` has the last 64 bits of this hash.
    """
    more = {
        "connector_block_hash": "ab" * 32,
        "group_id": 0,
        "cache_prefix": "kv",
        "head_or_tp_rank": 0,
        "layer_id": None,
    }
    found = decode(batch(event("stored", **more), event("removed", **more)))
    assert isinstance(found, Batch)
    assert (found.rejects, found.unknown, found.extras) == ([], set(), None)


def test_pool_blocks_with_unknown_tokens_are_filtered():
    bench = Bench()
    assert bench.feed(raw=batch(event("stored"))) == []
    assert bench.filtered == {Filtered.TOKENLESS: 1}
    assert bench.rejected == {}


def test_the_events_of_an_engine_become_events_of_vllm():
    bench = Bench()
    assert bench.feed(raw=batch(known())) == plain_all([store([1, 2], 9)])
    assert bench.feed(raw=batch(event("stored"))) == plain_all([store([1], 9, medium="CPU")])
    assert bench.feed(raw=batch(event("removed", medium="gpu"))) == plain_all([removed([1])])
    assert bench.live == {1, 2}
    assert bench.feed(raw=batch(event("cleared"), event("cleared"))) == plain_all([cleared()])


def test_adapter_and_salt_of_an_engine_are_decoded():
    found = decode(batch(known(lora_name="a", additional_salt="s")))
    assert isinstance(found, Batch)
    assert plain_all(found.events) == plain_all([store([1, 2], 9, lora_name="a", cache_salt="s", medium="gpu")])


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"event_type": "updated"}, Reason.UNKNOWN_EVENT),
        ({"event_type": None}, Reason.UNKNOWN_EVENT),
        ({"seq_hashes": 5}, Reason.WRONG_TYPE),
        ({"seq_hashes": ["x"]}, Reason.HASH_KIND),
        ({"block_size": "x"}, Reason.WRONG_TYPE),
        ({"medium": 5}, Reason.WRONG_TYPE),
    ],
)
def test_a_wrong_event_is_rejected_without_the_rest_of_its_batch(wrong, reason):
    found = decode(batch(known(), known() | wrong, event("removed")))
    assert isinstance(found, Batch)
    assert found.rejects == [reason]
    assert len(found.events) == 2


def test_an_unknown_field_is_relayed_and_named():
    found = decode(batch(known(later=1)))
    assert isinstance(found, Batch)
    assert found.unknown == {"field of BlockStored later"}
    assert found.extras is not None


def test_times_in_seconds_are_not_converted():
    found = decode(pack([1.5, [known()], 0]))
    assert isinstance(found, Batch)
    assert found.ts == 1.5
