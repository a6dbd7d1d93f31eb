"""Tests for stores with masked blocks, whose hashes vLLM leaves out.

These are blocks that a sliding window or Mamba never reads again. Such a store has the tokens of all its blocks and the
hashes of some of them, in order. ``parent_block_hash`` is the block before the first block, and may never have been
stored.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.core.findings.source import source_findings
from kvbus.core.types import Filtered
from kvbus.core.wire.profiles import PROFILES, encode
from tests.core.dsl import Bench, Script, live, up
from tests.doubles.payloads import cleared, removed, store, tokens_of, unpack
from tests.doubles.router import PlainSetRouter

STRICT = sorted(name for name in PROFILES if name not in {"vllm", "aibrix", "dynamo-plane", "mooncake"})
"""Profiles whose routers need tokens and whose outgoing events can be compared one by one."""

WINDOW = {"group": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 64}


def masked(chain: range, hashes: list[int], **more: Any) -> dict[str, Any]:
    """Return a store of a chain of full blocks in which only the blocks ``hashes`` are cached."""
    body = [token for block in chain for token in tokens_of(block)]
    parent = chain[0] - 1 or None
    return store(hashes, parent, tokens=body, extra_keys=[None] * len(hashes), lora_id=None, **(WINDOW | more))


class MaskedBench(Bench):
    """A normalizer with two routers: one identifies blocks by their hashes, the other one needs tokens."""

    def __init__(self, **rules: Any) -> None:
        super().__init__(**({"groups": "all"} | rules))
        self.strict = PlainSetRouter()

    def feed(self, *events: Any, raw: bytes | None = None, first_of_epoch: bool = False) -> list[dict[str, Any]]:
        left = super().feed(*events, raw=raw, first_of_epoch=first_of_epoch)
        self.strict.apply(self.seq - 1, encode(PROFILES["sglang"].wire, self.left, 1.0, 0))
        assert self.router.violations == self.strict.violations == []
        assert self.strict.blocks == {key: block for key, block in self.router.blocks.items() if block.tokens}
        announced = self.announced()
        assert announced.blocks.keys() == self.router.blocks.keys()
        assert announced.violations == []
        return left

    @property
    def with_tokens(self) -> set[Any]:
        return {block for _, _, block in self.strict.blocks}


def test_a_masked_block_is_sent_with_tokens_when_a_later_store_has_them():
    bench = MaskedBench()
    bench.feed(masked(range(1, 9), [6, 7, 8]), masked(range(1, 9), [7, 8]))
    bench.feed(masked(range(6, 9), [6, 7, 8]))
    assert bench.live == bench.with_tokens == {6, 7, 8}
    bench.feed(removed([6, 7, 8], group=1), removed([6, 7, 8], group=1))
    assert bench.live == {7, 8}
    bench.feed(removed([7, 8], group=1))
    assert bench.live == set()


def test_blocks_that_kvbus_divides_need_tokens():
    """If kvbus divides blocks, it computes the hashes of the parts from their tokens, so it refuses blocks without
    tokens.
    """
    bench = MaskedBench(block_size=8)
    bench.feed(store([1, 2], group=1))
    assert bench.feed(masked(range(1, 9), [6, 7, 8])) == []
    assert bench.normalizer.refused == {"tokenless"}
    bench.feed(removed([6, 7, 8], group=1))
    assert bench.normalizer.entries == 2
    assert bench.filtered == {Filtered.HASH_ONLY: 1, Filtered.COARSE: 4}


@pytest.mark.parametrize("profile", ["vllm", "dynamo", "vllm-router"])
def test_a_finding_names_an_output_that_omits_blocks_without_tokens(profile: str):
    script = Script(groups="all", profiles=(profile,))
    for each in (up(), live(0, store([1, 2], group=0), masked(range(1, 9), [6, 7, 8]))):
        script >> each
        script.whatever()
    found = [each.id for each in source_findings(script.source)]
    assert found == ([] if profile == "vllm" else ["hashes_alone"])
    assert len(script.router.blocks) == (5 if profile == "vllm" else 2)
    script >> live(1, cleared())
    script.whatever()
    assert source_findings(script.source) == []


@pytest.mark.parametrize("profile", STRICT)
def test_a_router_that_needs_tokens_gets_no_event_of_masked_blocks(profile: str):
    bench = MaskedBench()
    for events in ([masked(range(1, 9), [6, 7, 8]), store([1, 2], novelty=1)], [removed([6, 7], group=1)], [cleared()]):
        bench.feed(*events)
        sent = unpack(encode(PROFILES[profile].wire, bench.left, 1.0, 0))[1]
        text = str(sent)
        assert "group_idx" not in text
        assert len(sent) == (events[0]["type"] != "BlockRemoved")


STEPS = st.one_of(
    st.tuples(st.just("store"), st.integers(1, 8), st.integers(1, 4), st.integers(0, 15)),
    st.tuples(st.just("store"), st.integers(1, 8), st.integers(1, 4), st.just(15)),
    st.tuples(st.just("remove"), st.integers(1, 12), st.just(0), st.just(0)),
    st.tuples(st.just("clear"), st.just(0), st.just(0), st.just(0)),
)


@given(st.lists(st.lists(STEPS, max_size=5), max_size=12), st.sampled_from(["GPU", "CPU"]))
def test_routers_hold_the_engines_blocks_after_random_masked_stores(history: Any, second: str):
    """Routers hold the engine's blocks after random stores with masked blocks, whose hashes the stores leave out.

    One chain is stored on two media, in parts of up to four blocks of which any may be masked.
    """
    bench, copies = MaskedBench(), Counter[tuple[str, int]]()
    for turn in history:
        events: list[Any] = []
        for at, (what, first, count, mask) in enumerate(turn):
            medium = second if at % 2 else "GPU"
            if what == "store":
                hashes = [first + i for i in range(count) if mask & 1 << i]
                copies.update((medium, block) for block in hashes)
                events.append(masked(range(first, first + count), hashes, medium=medium))
            elif what == "clear":
                copies = Counter({key: held for key, held in copies.items() if key[0] != medium})
                events.append(cleared(medium))
            else:
                copies[medium, first] -= copies[medium, first] > 0
                events.append(removed([first], medium=medium, group=1))
        bench.feed(*events)
        assert {(medium, block) for _, medium, block in bench.router.blocks} == {
            key for key, held in copies.items() if held
        }
    assert bench.rejected == {}
