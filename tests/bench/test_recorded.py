"""Looped recordings are the recorded traffic: the same bytes first, the same structure ever after, and a full cache."""

from __future__ import annotations

import hashlib
from collections import Counter
from itertools import combinations, islice
from typing import Any

import msgspec
import pytest

from kvbus.core.types import PREFIX_KINDS
from tests.core.dsl import Script, raw, tick
from tests.doubles.router import events_of
from tests.long import sample
from tests.wire.captures import BY_PREFIX, load, truth

from .loads import END, PROBE, load_named, stamped, tally
from .recorded import FAMILIES, Hash, Looped, Names, recording

LOOPS = 2


@pytest.fixture(scope="module", params=sample(list(FAMILIES), 3))
def capture(request):
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def loops(capture):
    """The batches of some loops, with a cache as large as the recorded one."""
    looped = Looped(capture, live=1)
    assert looped.loops == 1
    batches = iter(looped)
    return [list(islice(batches, looped.batches)) for _ in range(LOOPS)]


def events(payloads):
    return [event for payload in payloads for event in events_of(payload)]


def recorded(capture):
    return [message.payload for message in load(capture)]


def stores(payloads):
    return [event for event in events(payloads) if event["type"] == "BlockStored"]


def blocks_by_table(payloads, kind):
    found: Counter[Any] = Counter()
    for event in events(payloads):
        if event["type"] == kind:
            found[event.get("group_idx"), event.get("medium")] += len(event["block_hashes"])
    return found


def shape(payload):
    """Everything but the names: header bytes of each event, keys in order, and how wide each value is."""
    _, raws, *rest = msgspec.msgpack.decode(payload, type=list[msgspec.Raw])
    return [_shape(bytes(item)) for item in msgspec.msgpack.decode(raws, type=list[msgspec.Raw])], len(rest)


def _shape(event):
    decoded = msgspec.msgpack.decode(event)
    if isinstance(decoded, dict):
        fields = msgspec.msgpack.decode(event, type=dict[str, msgspec.Raw])
        return event[:3], [(name, len(bytes(value)), bytes(value)[:1]) for name, value in fields.items()]
    values = msgspec.msgpack.decode(event, type=list[msgspec.Raw])
    return event[:1], [(len(bytes(value)), bytes(value)[:1]) for value in values]


def copies(payloads):
    """Stores of blocks that were live, by table, as a count of whole blocks."""
    held: Counter[Any] = Counter()
    found: Counter[Any] = Counter()
    for event in events(payloads):
        if event["type"] == "AllBlocksCleared":
            held.clear()
            continue
        table = (event.get("group_idx"), event.get("medium"))
        for block in event["block_hashes"]:
            if event["type"] == "BlockStored":
                found[table] += held[table, block] > 0
                held[table, block] += 1
            else:
                held[table, block] -= 1
    return found


def test_the_first_lap_is_the_recording_itself(capture, loops):
    lap = recording(capture).laps[0]
    ours, theirs = loops[0], recorded(capture)
    if len(events_of(theirs[0])) == 1 and events_of(theirs[0])[0]["type"] == "AllBlocksCleared":
        theirs = theirs[1:]  # the clear that it opens with is in the first batch that stores
        assert events_of(ours[0])[0]["type"] == "AllBlocksCleared"
        assert events_of(ours[0])[1:] == events_of(theirs[0])
        ours, theirs = ours[1:], theirs[1:]
    whole = len(lap.messages) - 2  # the last one may be divided by a clear
    assert whole > 100
    assert ours[:whole] == theirs[:whole]


def test_every_loop_stores_what_was_recorded_in_the_recorded_form(capture, loops):
    wanted = [_shape(msgspec.msgpack.encode(event)) for event in stores(recorded(capture))]
    for loop in loops:
        assert [_shape(msgspec.msgpack.encode(event)) for event in stores(loop)] == wanted
        assert copies(loop) == copies(recorded(capture))


def test_headers_are_as_wide_as_recorded(capture, loops):
    """msgspec writes the header of a large map wider than it must, and the engines' bytes are msgspec's."""
    known = {name for payload in recorded(capture) for name, _ in shape(payload)[0]}
    lengths = {shape(payload)[1] for payload in recorded(capture)}
    for loop in loops:
        assert {name for payload in loop for name, _ in shape(payload)[0]} <= known
        assert {shape(payload)[1] for payload in loop} == lengths


def test_with_a_full_cache_as_many_blocks_leave_as_come(capture, loops):
    for loop in loops[1:]:
        stored, removed = (blocks_by_table(loop, kind) for kind in ("BlockStored", "BlockRemoved"))
        assert stored == removed
        assert stored == blocks_by_table(recorded(capture), "BlockStored")
    assert "AllBlocksCleared" not in {event["type"] for event in events([p for loop in loops[1:] for p in loop])}


def test_nothing_is_a_copy_that_was_none(capture, loops):
    """No name comes again in another loop, of a block or of tokens (but pages of one token do)."""
    names = [{block for event in stores(loop) for block in event["block_hashes"]} for loop in loops]
    tokens = [{str(event["token_ids"]) for event in stores(loop)} for loop in loops]
    for first, second in combinations(range(LOOPS), 2):
        assert not names[first] & names[second]
        assert not tokens[first] & tokens[second] or capture == "sglang0523_page1"


class Kvbus:
    """The relay with a plain-set router behind it."""

    def __init__(self):
        self.script = Script()
        self._seq = 0
        self._filtered: Counter[str] = Counter()

    @property
    def router(self):
        return self.script.router

    def take(self, payloads):
        """What was left out of these, by reason."""
        for payload in payloads:
            self.script >> raw(b"", self._seq.to_bytes(8, "big"), payload)
            self.script.whatever()
            self._seq += 1
        self.script >> tick(1.0)
        self.script.whatever()
        filtered = Counter(self.script.stats.filtered)
        new, self._filtered = filtered - self._filtered, filtered
        return new


def renamed_truth(capture, names):
    """What the recording's engine held at the end, in the names of a lap."""
    if capture not in BY_PREFIX:
        return {
            (group, medium, msgspec.msgpack.decode(names.hash(Hash(msgspec.msgpack.encode(block)))))
            for group, medium, block in truth(capture)
        }
    original = Kvbus()
    original.take(recorded(capture))
    paths = [names.tokens(original.router.path(group, block)) for group, _, block in original.router.blocks]
    return {hashlib.sha256(b"".join(t.to_bytes(4, "little") for t in path)).hexdigest() for path in paths}


def left_out(payloads):
    """What kvbus has to leave out, by reason: later copies, coarse duplicates, and groups that carry no prefixes.

    A store of such a group counts once, everything else block by block.
    """
    held: Counter[Any] = Counter()
    found: Counter[str] = Counter()
    sizes: dict[Any, int] = {}
    no_prefix = set()
    coarse = {event["block_size"] for event in stores(payloads)} == {16, 128}
    for event in events(payloads):
        group = event.get("group_idx")
        if event["type"] == "BlockStored":
            kind = event.get("kv_cache_spec_kind")
            if kind is not None and kind not in PREFIX_KINDS:
                no_prefix.add(group)
                found["group"] += 1
                continue
            sizes |= dict.fromkeys(event["block_hashes"], event["block_size"])
        for block in event.get("block_hashes", ()):
            if group in no_prefix:
                found["group"] += 1
            elif coarse and sizes.get(block) == 128:
                found["coarse"] += 1
            elif event["type"] == "BlockStored":
                found["copy"] += held[group, event.get("medium"), block] > 0
                held[group, event.get("medium"), block] += 1
            else:
                held[group, event.get("medium"), block] -= 1
                found["copy"] += held[group, event.get("medium"), block] > 0
    return found


def test_kvbus_holds_the_renamed_truth_at_each_loop_s_end_and_leaves_out_what_it_did(capture, loops):
    kvbus = Kvbus()
    laps = len(recording(capture).laps)
    for number, loop in enumerate(loops, 1):
        filtered = kvbus.take(loop)
        held = kvbus.router.prefixes() if capture in BY_PREFIX else set(kvbus.router.blocks)
        assert held == renamed_truth(capture, Names(number * laps - 1, 0))
    assert kvbus.router.violations == []
    assert kvbus.router.orphans == 0
    assert kvbus.script.stats.rejected == {}
    so_far = [payload for loop in loops for payload in loop]
    assert filtered == left_out(so_far) - left_out(so_far[: -len(loops[-1])])


def test_a_cache_can_be_larger_than_the_recorded_one():
    payloads = load_named("vllm-map").take((load := load_named("vllm-map")).warm + load.loop)
    before = len(tally(payloads[: load.warm])[2])
    assert before > 4000
    assert abs(len(tally(payloads)[2]) - before) < 16


def test_ranks_and_probes_have_names_of_their_own():
    for family in FAMILIES:
        load = load_named(family)
        seen = [tally(load.take(20, rank))[2] for rank in (0, 1)]
        seen += [tally([load.probe(number)])[2] for number in (1, 2)] + [tally([load.end()])[2]]
        assert len(set.union(*seen)) == sum(map(len, seen))
        assert (stamped(load.probe(1)), stamped(load.end())) == (PROBE, END)


def test_a_probe_goes_through_a_kvbus_that_knows_the_stream():
    for family, capture in FAMILIES.items():
        load, kvbus = load_named(family), Kvbus()
        for payloads in ([load.probe(1)], load.take(50), [load.end()]):
            before = set(kvbus.router.blocks)
            kvbus.take(payloads)
            assert set(kvbus.router.blocks) - before, capture
        assert kvbus.router.violations == []
