import gc
import weakref
from typing import Any

import pytest

from kvbus.core.blocks.announce import MOST_BLOCKS
from kvbus.core.blocks.compaction import BLOCKS_PER_BATCH, KEPT_BYTES, Part, SnapshotChunks, StateSnapshot
from kvbus.core.blocks.live_order import PAUSE
from kvbus.core.wire.profiles import Wire
from tests.core.dsl import Bench
from tests.doubles.payloads import store, unpack
from tests.doubles.router import PlainSetRouter


def bench_of(*events):
    bench = Bench()
    bench.feed(*events)
    return bench


def batches_of(cut, room=10**6):
    reader = cut.chunks(room).reader()
    found: list[Any] = []
    while (body := reader.next_payload()) is not None:
        if body:
            found.append(body)
    return found


def cut_of(*benches):
    parts = [Part(bench.normalizer.index.copy(), rank, 1.5) for rank, bench in enumerate(benches)]
    return StateSnapshot(9, parts, Wire())


def sizes_of(bodies):
    return [sum(len(event.get("block_hashes", ())) for event in unpack(body)[1]) for body in bodies]


@pytest.mark.parametrize("blocks", [1, 3, 500])
def test_a_snapshot_fills_each_batch_before_it_begins_the_next(blocks):
    runs = [store([blocks * at + i for i in range(blocks)]) for at in range(1024 // blocks)]
    cut = cut_of(bench_of(*runs))
    sizes = sizes_of(batches_of(cut))
    assert all(size == BLOCKS_PER_BATCH for size in sizes[:-1])
    assert sum(sizes) == len(runs) * blocks
    assert cut.chunks(10**6).count == len(sizes)


@pytest.mark.parametrize("blocks", [1, 100])
def test_a_snapshot_counts_the_sub_blocks_of_divided_blocks(blocks):
    bench = Bench(block_size=16)
    bench.feed(store(list(range(blocks)), block_size=16 * 1000))
    cut = cut_of(bench)
    bodies = batches_of(cut)
    assert sizes_of(bodies) == [BLOCKS_PER_BATCH] * (1000 * blocks // BLOCKS_PER_BATCH) + [
        1000 * blocks % BLOCKS_PER_BATCH
    ]
    assert cut.chunks(10**6).count == len(bodies)
    assert cut.fewest == -(-1000 * blocks // MOST_BLOCKS)
    assert max(sizes_of(batches_of(cut, cut.fewest))) == min(1000 * blocks, MOST_BLOCKS)
    router = PlainSetRouter()
    for seq, body in enumerate(bodies):
        router.apply(seq, body)
    assert router.blocks == bench.router.blocks
    assert router.violations == []
    assert router.orphans == 0


@pytest.mark.parametrize("room", [1, 2, 3, 10, 1000])
def test_a_snapshot_fits_into_the_available_seqs(room):
    bench = bench_of(*[store([block], block - 1 or None) for block in range(1, 5001)])
    bodies = batches_of(cut_of(bench), room)
    assert len(bodies) <= room
    router = PlainSetRouter()
    for seq, body in enumerate(bodies):
        router.apply(seq, body)
    assert router.blocks == bench.router.blocks
    assert router.violations == []
    assert router.orphans == 0


def test_all_readers_of_a_snapshot_share_its_batches():
    cut = cut_of(bench_of(store([1])))
    assert cut.chunks(100) is cut.chunks(50)
    assert cut.chunks(100).get(0) is cut.chunks(50).get(0)


def test_a_snapshot_is_freed_with_its_last_reader_without_a_garbage_collection():
    """A snapshot is freed as soon as its last reader ends, without a garbage collection.

    While a snapshot exists, a large index stays frozen and keeps later changes separately.
    """
    gc.disable()
    try:
        snapshot = cut_of(bench_of(*[store([block]) for block in range(100)]))
        gone = weakref.ref(snapshot)
        reader = snapshot.chunks(10**6).reader()
        assert reader.next_payload()
        del snapshot
        assert gone() is None
        frozen = weakref.ref(reader)
        del reader
        assert frozen() is None
    finally:
        gc.enable()


def test_the_blocks_of_each_batch_are_collected_once_for_slow_readers_too():
    """Several readers share the batches of a snapshot, because collecting a batch's blocks is most of the work.

    A reader that begins after the snapshot's last batch was collected still gets every batch.
    """
    found = []

    def plans():
        for at in range(5):
            yield None
            found.append(at)
            yield at, False, ()

    chunks = SnapshotChunks(plans(), lambda plan: iter([b"", bytes([plan[0]]) * (KEPT_BYTES // 2)]), 5)
    slow, fast, late = chunks.reader(), chunks.reader(), chunks.reader()
    first = next(filter(None, iter(slow.next_payload, None)))
    whole = list(filter(None, iter(fast.next_payload, None)))
    assert [payload[0] for payload in whole] == list(range(5))
    assert [first, *filter(None, iter(slow.next_payload, None))] == whole
    assert list(filter(None, iter(late.next_payload, None))) == whole
    assert found == list(range(5))


@pytest.mark.parametrize("size", [4, 80], ids=["", "re-cut"])
def test_a_large_batch_is_built_again_in_slices(size):
    bench = Bench(block_size=min(size, 16))
    bench.feed(*[store([at], block_size=size) for at in range(3 * PAUSE)])
    chunks = cut_of(bench).chunks(1)
    reader = chunks.reader()
    whole = list(filter(None, iter(reader.next_payload, None)))
    assert sum(sizes_of(whole)) == 3 * PAUSE * (size // min(size, 16))
    for at, payload in enumerate(whole):
        *pauses, again = chunks.again(at)
        assert again == payload
        assert len(pauses) == -(-sizes_of([payload])[0] // PAUSE) - 1
        assert set(pauses) == {b""}
