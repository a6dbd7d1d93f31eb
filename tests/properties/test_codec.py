"""Tests that decoding random bytes, and real payloads with changed bytes, raises no error and accepts no invalid
event.
"""

from hypothesis import example, given
from hypothesis import strategies as st

from kvbus.core.wire.codec import decode_batch
from kvbus.core.wire.schema import Batch
from tests.core.dsl import Script, raw, tick
from tests.doubles.payloads import pack, payload, plain_all, removed, store
from tests.fuzz.targets import codec, message
from tests.wire.captures import CAPTURES, load

SAMPLES = [message.payload for name in CAPTURES for message in load(name)[1:60:15]]
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(max_size=5), st.binary(max_size=5)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=8,
)
FIELDS = {
    "type": st.one_of(st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared"]), VALUES),
    "block_hashes": st.one_of(st.lists(st.integers(0, 5), max_size=3), VALUES),
    "parent_block_hash": VALUES,
    "token_ids": st.one_of(st.lists(st.integers(0, 2**32), max_size=6), VALUES),
    "block_size": VALUES,
    "lora_id": VALUES,
    "medium": VALUES,
    "lora_name": VALUES,
    "extra_keys": VALUES,
    "group_idx": VALUES,
    "kv_cache_spec_kind": VALUES,
    "novelty": VALUES,
}
MAPS = st.fixed_dictionaries({"type": FIELDS["type"]}, optional={k: v for k, v in FIELDS.items() if k != "type"})
ARRAYS = st.tuples(*FIELDS.values()).flatmap(lambda items: st.integers(0, len(items)).map(lambda n: list(items[:n])))


@st.composite
def mutated(draw):
    """Draw the payload of a captured batch with up to four random changes of its bytes."""
    body = bytearray(draw(st.sampled_from(SAMPLES)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, min(len(body), 400)))
        how = draw(st.sampled_from(["set", "set", "flip", "insert", "delete", "cut", "twice"]))
        if how == "set" and at < len(body):
            body[at] = draw(st.integers(0, 255))
        elif how == "flip" and at < len(body):
            body[at] ^= 1 << draw(st.integers(0, 7))
        elif how == "insert":
            body[at:at] = draw(st.binary(min_size=1, max_size=4))
        elif how == "delete":
            del body[at : at + draw(st.integers(1, 8))]
        elif how == "cut":
            del body[at:]
        else:
            body[at:at] = body[at : at + 20]
    return bytes(body)


@given(st.binary(max_size=200))
@example(b"\xc7\x00\xff")
@example(b"\x93\xcb" + bytes(8) + b"\x91\xc1\x00")
def test_the_codec_decodes_or_rejects_random_bytes(body):
    codec(body)


@given(mutated())
def test_the_codec_decodes_or_rejects_changed_bytes_of_captures(body):
    codec(body)


@given(st.lists(st.one_of(MAPS, ARRAYS, VALUES), max_size=4), SCALARS, SCALARS)
def test_the_codec_decodes_or_rejects_well_formed_nonsense(events, ts, rank):
    codec(pack([1.0, events, 0]))
    codec(pack([ts, events, rank]))
    codec(pack({"ts": 1.0, "events": events, "data_parallel_rank": 0}))


@given(st.lists(st.one_of(MAPS, ARRAYS, VALUES), max_size=4))
def test_nonsense_events_do_not_affect_good_events_of_a_batch(events):
    batch = decode_batch(pack([1.0, [store([1, 2], 3), *events, removed([1])], 0]))
    assert isinstance(batch, Batch)
    kept = plain_all([batch.events[0], batch.events[-1]])
    assert kept == plain_all([store([1, 2], 3), removed([1])])
    assert len(batch.events) + len(batch.rejects) == len(events) + 2


@given(st.lists(mutated(), min_size=1, max_size=6))
def test_the_relay_sends_only_valid_events_after_random_batches(bodies):
    script = Script()
    for seq, body in enumerate([*bodies, payload(store([2**40]))]):
        script >> raw(b"", seq.to_bytes(8, "big"), body)
        script.whatever()
    script >> tick(1.0)
    script.whatever()
    assert script.router.violations == []
    assert script.stats.batches == len(bodies) + 1


@given(st.lists(st.binary(max_size=30), max_size=6))
def test_the_parsers_read_or_reject_random_frames(frames):
    message(frames, 20)
