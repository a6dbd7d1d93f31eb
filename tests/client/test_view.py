from __future__ import annotations

import base64
import json
from pathlib import Path

import msgspec
import pytest

from kvbus.client.updates import Lost, Received, Restarted, Snapshot
from kvbus.client.view import Block, BlockView, Cleared, Key, Removed, Stored
from kvbus.core.sequencing.actions import LostReason, RestartReason
from kvbus.core.types import PREFIX_KINDS, medium_key
from kvbus.core.wire.schema import AllBlocksCleared, Batch, BlockRemoved, BlockStored
from kvbus.core.wire.tokens import decode_tokens, divide
from tests.typed import there, well_formed

DATA = Path(__file__).parent.parent / "wire" / "data"
# kvbus cuts these captures' blocks to another size and filters them, so routers never read them as they are here.
NOT_FOR_ROUTERS = {"syn_sglang_variable", "syn_vllm_two_granularities"}
CAPTURES = sorted(path.stem for path in DATA.glob("*.jsonl") if path.stem not in NOT_FOR_ROUTERS)


def stored(hashes, tokens=None, *, parent=None, size=2, **fields):
    tokens = list(range(len(hashes) * size)) if tokens is None else tokens
    return BlockStored(hashes, parent, msgspec.Raw(msgspec.msgpack.encode(tokens)), size, **fields)


def key_of(block):
    return (block.rank, block.group_idx, block.medium, block.hash)


def follow(followed, changes):
    """Apply the changes of a view to a dictionary of blocks."""
    for change in changes:
        if isinstance(change, Stored):
            followed[key_of(change.block)] = change.block
        elif isinstance(change, Removed):
            assert followed.pop(key_of(change.block)) is change.block
        else:
            assert isinstance(change, Cleared)
            followed.clear()


@pytest.mark.parametrize("name", CAPTURES)
def test_a_view_ends_a_capture_with_the_state_of_the_engine(name):
    truth = json.loads((DATA / f"{name}.truth.json").read_text())["blocks"]
    view = BlockView(copies=True, cleared="device" if name.startswith("vllm") else "all")
    followed: dict[Key, Block] = {}
    last = -1
    for line in (DATA / f"{name}.jsonl").read_text().splitlines():
        message = json.loads(line)
        if message["seq"] <= last:
            follow(followed, view.clear())
        last = message["seq"]
        follow(followed, view.apply_batch(well_formed(base64.b64decode(message["payload"]))))
    live = {(b.group_idx, b.medium, b.to_json()["hash"]): b for b in view}
    assert set(live) == {(b.get("group_idx"), medium_key(b["medium"]), b["hash"]) for b in truth}
    assert len(view) == len(truth)
    assert followed == {key_of(block): block for block in view}
    without_prefix = {b["group_idx"] for b in truth if b.get("kind") not in (None, *PREFIX_KINDS)}
    placeholders = {"CPU"} if name == "vllm033_offload_native" else set()
    for block in view:
        assert block.token_ids is not None or block.group_idx in without_prefix or block.medium in placeholders
    if name.startswith("vllm033_map_int"):
        for block in truth:
            seen = live[block["group_idx"], "GPU", block["hash"]].to_json()
            assert (seen["token_ids"], seen["parent"], seen["copies"]) == (
                block["tokens"],
                block["parent"],
                block["copies"],
            )


def test_a_missing_medium_and_gpu_and_device_are_the_same_medium():
    view = BlockView()
    view.apply(stored([1]))
    view.apply(stored([1], medium="GPU"))
    view.apply(stored([1], medium="DEVICE"))
    assert len(view) == 1
    view.apply(BlockRemoved((1,), medium="device"))
    assert len(view) == 0


def test_a_removal_applies_only_to_its_medium_group_and_rank():
    view = BlockView()
    view.apply(stored([1], medium="GPU"), rank=0)
    view.apply(stored([1], medium="CPU_PINNED"), rank=0)
    view.apply(stored([1], medium="GPU", group_idx=1), rank=0)
    view.apply(stored([1], medium="GPU"), rank=1)
    view.apply(BlockRemoved((1,), medium="GPU"), rank=0)
    assert sorted(view.keys(), key=str) == sorted(
        [(0, None, "CPU_PINNED", 1), (0, 1, "GPU", 1), (1, None, "GPU", 1)], key=str
    )
    assert 1 in view
    assert (0, None, "GPU", 1) not in view


def test_an_unknown_medium_is_separate_from_other_media():
    view = BlockView()
    view.apply(stored([1], medium="holographic"))
    assert view.get(1) is None
    assert there(view.get(1, medium="HOLOGRAPHIC")).hash == 1


def test_the_tokens_of_a_store_are_divided_among_its_blocks():
    view = BlockView()
    view.apply(stored([1, b"\x02\xff"], [5, 6, 7, 8], parent=9, lora_name="poet", group_idx=0), rank=3)
    assert [block.to_json() for block in view] == [
        {
            "rank": 3,
            "hash": 1,
            "parent": 9,
            "medium": "GPU",
            "group_idx": 0,
            "block_size": 2,
            "token_ids": [5, 6],
            "copies": 1,
        },
        {
            "rank": 3,
            "hash": "02ff",
            "parent": 1,
            "medium": "GPU",
            "group_idx": 0,
            "block_size": 2,
            "token_ids": [7, 8],
            "copies": 1,
        },
    ]
    assert {block.lora for block in view} == {"poet"}


def test_a_store_with_masked_blocks_has_no_token_ids():
    view = BlockView()
    view.apply(stored([1], [5, 6, 7, 8]))
    assert there(view.get(1)).token_ids is None


def test_the_tokens_of_a_long_store_are_read_in_linear_time(monkeypatch):
    """Reading the tokens of all blocks of a store takes linear time. The test counts the decoded bytes.

    An earlier version decoded the complete store once for each of its blocks.
    """
    read = 0

    def counted(function):
        def call(raw, *args):
            nonlocal read
            read += len(raw)
            return function(raw, *args)

        return call

    monkeypatch.setattr("kvbus.client.view.decode_tokens", counted(decode_tokens))
    monkeypatch.setattr("kvbus.client.view.divide", counted(divide))
    view = BlockView()
    event = stored(list(range(1_000)), [(n, n + 1) for n in range(2_000)])
    view.apply(event)
    for _ in range(2):
        assert [block.token_ids for block in view] == [[(n, n + 1), (n + 1, n + 2)] for n in range(0, 2_000, 2)]
    assert read < 4 * len(event.token_ids)


@pytest.mark.parametrize(
    ("tokens", "reason"), [([5], "token_count"), ([-1, 5], "token_range"), (["5", 6], "wrong_type")]
)
def test_a_store_with_bad_or_too_few_tokens_is_skipped_and_counted(tokens, reason):
    view = BlockView()
    assert view.apply(stored([1], tokens)) == []
    assert (len(view), view.refused) == (0, {reason: 1})


def test_a_block_without_tokens_gets_them_from_a_later_store():
    view = BlockView(copies=True)
    view.apply(stored([1], [], size=0))
    assert there(view.get(1)).token_ids == []
    view.apply(stored([1], [5, 6]))
    assert (there(view.get(1)).token_ids, there(view.get(1)).copies) == ([5, 6], 2)


@pytest.mark.parametrize(("cleared", "left"), [("all", set()), ("device", {"CPU"})])
def test_a_clear_applies_only_to_its_rank(cleared, left):
    view = BlockView(cleared=cleared)
    view.apply(stored([1]), rank=0)
    view.apply(stored([1], medium="CPU"), rank=0)
    view.apply(stored([2]), rank=1)
    view.apply(AllBlocksCleared(), rank=0)
    assert {block.medium for block in view if block.rank == 0} == left
    assert 2 in view


@pytest.mark.parametrize(
    ("update", "on_lost", "left"),
    [
        (Restarted(1, RestartReason.PAYLOAD), "keep", 0),
        (Lost(4, 5, LostReason.HOLE), "clear", 0),
        (Lost(4, 5, LostReason.HOLE), "keep", 1),
    ],
)
def test_a_view_keeps_or_drops_blocks_at_updates_other_than_batches(update, on_lost, left):
    view = BlockView(on_lost=on_lost)
    view.update(Received(0, b"", Batch(0.0, [stored([1])], 0)))
    assert len(view) == 1
    view.update(update)
    assert len(view) == left
    assert (1 in view) == bool(left)


def test_a_snapshot_replaces_every_rank():
    view = BlockView(on_lost="keep")
    for rank in (0, 1):
        view.update(Received(0, b"", Batch(0.0, [stored([1])], rank)))
    view.update(Snapshot(7, (Batch(0.0, [AllBlocksCleared(), stored([2])], 0), Batch(0.0, [stored([3])], 0))))
    assert set(view.keys()) == {(0, None, "GPU", 2), (0, None, "GPU", 3)}


@pytest.mark.parametrize("rule", ["all", "device"])
def test_a_clear_with_a_medium_drops_only_the_blocks_on_it(rule):
    view = BlockView(cleared=rule)
    view.apply(stored([1]), rank=1)
    for medium, hashes in (("GPU", [1, 2]), ("CPU", [1]), ("DISK", [3])):
        view.apply(stored(hashes, medium=medium), rank=0)
    (change,) = view.apply_batch(Batch(0.0, [AllBlocksCleared("cpu")], 0))
    assert isinstance(change, Removed)
    assert (change.block.medium, change.block.hash) == ("CPU", 1)
    view.apply_batch(Batch(0.0, [AllBlocksCleared("DISK"), AllBlocksCleared()], 0))
    assert {block.rank for block in view} == {1}
