"""Tests for the small cache of the engine simulator: stored blocks, hits, evictions, and the reported events."""

import random
from collections import Counter
from typing import Any

import pytest

from kvbus.tools.sim.cache import GPU, Cleared, PrefixCache, Removed, Stored, make_block

BLOCK = 4


def tokens(*blocks):
    """Return the tokens of blocks of four equal tokens: tokens(1, 2) is 1,1,1,1,2,2,2,2."""
    return [value for value in blocks for _ in range(BLOCK)]


def serve(cache, prompt, output=0, tenant=""):
    """Run one request to its end. Return its events, and how many tokens of its prompt were in the cache."""
    request = cache.start(prompt + [0] * output, len(prompt), tenant)
    cache.compute(request, len(request.tokens))
    cache.finish(request)
    return cache.take_events(), request.cached_prompt


def short_form(events):
    """Return the cache's events in a short form: sign, tier, and first token of each block."""
    return [
        ("clear",)
        if isinstance(event, Cleared)
        else ("+" if isinstance(event, Stored) else "-", event.tier, [b.tokens[0] for b in event.blocks])
        for event in events
    ]


def applied(events):
    """Return the number of copies of each block that a reader counts after these events."""
    live = Counter[Any]()
    for event in events:
        if isinstance(event, Cleared):
            live = Counter({key: n for key, n in live.items() if key[1] != GPU})
            continue
        for block in event.blocks:
            key = (event.group_idx, event.tier, block.digest)
            live[key] += 1 if isinstance(event, Stored) else -1
            assert live[key] >= 0
    return +live


def counted(cache):
    return Counter({key: entry.copies for key, entry in cache.live_blocks().items()})


def test_the_cache_stores_full_blocks_in_one_event_and_no_partial_block():
    events, hit = serve(PrefixCache(8, BLOCK), [*tokens(1, 2), 3])
    assert short_form(events) == [("+", GPU, [1, 2])]
    assert hit == 0
    first, second = events[0].blocks
    assert second.parent is first
    assert first.parent is None


def test_a_shared_prefix_is_a_hit_and_only_the_new_part_is_stored():
    cache = PrefixCache(8, BLOCK)
    serve(cache, tokens(1, 2))
    events, hit = serve(cache, tokens(1, 2, 3))
    assert hit == 2 * BLOCK
    assert short_form(events) == [("+", GPU, [3])]


def test_with_copies_a_fully_cached_prompt_stores_its_last_block_again():
    cache = PrefixCache(8, BLOCK)
    serve(cache, tokens(1, 2))
    events, hit = serve(cache, tokens(1, 2))
    assert hit == BLOCK
    assert short_form(events) == [("+", GPU, [2])]
    assert sorted(counted(cache).values()) == [1, 2]


def test_without_copies_a_request_uses_the_cached_block():
    cache = PrefixCache(8, BLOCK, copies=False)
    serve(cache, tokens(1, 2))
    events, _ = serve(cache, tokens(1, 2))
    assert events == []
    assert set(counted(cache).values()) == {1}
    assert cache.fits(8 * BLOCK)


def test_eviction_takes_the_leaf_of_the_least_recently_used_chain():
    cache = PrefixCache(4, BLOCK)
    serve(cache, tokens(1, 2))
    serve(cache, tokens(5))
    events, _ = serve(cache, tokens(7, 8))
    assert short_form(events) == [("-", GPU, [2]), ("+", GPU, [7, 8])]


def test_copies_are_removed_one_by_one():
    cache = PrefixCache(4, BLOCK)
    serve(cache, tokens(1, 2))
    serve(cache, tokens(1, 2))
    cache.take_events()
    events, _ = serve(cache, tokens(4, 5, 6, 7))
    assert [e for e in short_form(events) if e[0] == "-"].count(("-", GPU, [2])) == 2
    assert len(cache.live_blocks()) == 4


def test_blocks_in_use_are_never_evicted():
    cache = PrefixCache(4, BLOCK)
    held = cache.start(tokens(1, 2), 2 * BLOCK)
    cache.compute(held, 100)
    assert cache.fits(2 * BLOCK)
    assert not cache.fits(3 * BLOCK)
    with pytest.raises(ValueError, match="do not fit in 2 free blocks"):
        cache.start(tokens(3, 4, 5), 3 * BLOCK)
    serve(cache, tokens(3, 4))
    serve(cache, tokens(5, 6))
    assert {e.block.tokens[0] for e in cache.live_blocks().values()} == {1, 2, 5, 6}


def test_a_clear_ends_requests_and_empties_each_tier():
    cache = PrefixCache(8, BLOCK, tiers={"CPU": 8})
    serve(cache, tokens(1, 2))
    running = cache.start(tokens(3, 4), 2 * BLOCK)
    cache.compute(running, BLOCK)
    cache.clear()
    assert cache.live_blocks() == {}
    assert cache.fits(8 * BLOCK)
    events = cache.take_events()
    assert isinstance(events[-1], Cleared)
    assert any(isinstance(event, Removed) and event.tier == "CPU" for event in events)


def test_a_finished_request_is_written_to_the_tier_and_loaded_back():
    cache = PrefixCache(4, BLOCK, tiers={"CPU": 8})
    events, _ = serve(cache, tokens(1, 2))
    assert short_form(events) == [("+", GPU, [1, 2]), ("+", "CPU", [1, 2])]
    serve(cache, tokens(3, 4, 5, 6))  # evicts both blocks from the GPU pool
    events, hit = serve(cache, tokens(1, 2, 9))
    assert hit == 2 * BLOCK
    assert ("+", GPU, [1, 2]) in short_form(events)


def test_a_full_tier_evicts_its_oldest_leaf_and_not_the_stored_chain():
    cache = PrefixCache(16, BLOCK, tiers={"CPU": 3})
    serve(cache, tokens(1, 2))
    events, _ = serve(cache, tokens(3, 4, 5, 6))
    cpu = [event for event in short_form(events) if event[1] == "CPU"]
    assert cpu == [
        ("+", "CPU", [3]),
        ("-", "CPU", [2]),
        ("+", "CPU", [4]),
        ("-", "CPU", [1]),
        ("+", "CPU", [5]),
    ]


def test_tenants_share_no_cached_block():
    cache = PrefixCache(8, BLOCK)
    serve(cache, tokens(1, 2), tenant="a")
    _, hit = serve(cache, tokens(1, 2), tenant="b")
    assert hit == 0
    assert make_block(None, [1], "a").digest != make_block(None, [1], "b").digest


def test_a_cache_of_too_few_blocks_is_refused():
    with pytest.raises(ValueError, match="not 1 of 16"):
        PrefixCache(1, 16)


@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("tiers", [{}, {"CPU": 12}, {"CPU": 10, "DISK": 30}])
@pytest.mark.parametrize("seed", range(5))
def test_the_events_of_the_cache_add_up_to_its_live_blocks(copies, tiers, seed):
    rng = random.Random(seed)
    cache = PrefixCache(24, BLOCK, copies=copies, tiers=tiers)
    seen, running = [], []
    for step in range(600):
        choice = rng.random()
        if choice < 0.5:
            prompt = tokens(*(rng.randint(1, 3) for _ in range(rng.randint(1, 5))))
            if cache.fits(len(prompt) + 3):
                running.append(cache.start([*prompt, 9, 9, 9], len(prompt)))
        elif running:
            request = rng.choice(running)
            cache.compute(request, rng.randint(1, 9))
            if request.done:
                cache.finish(request)
                running.remove(request)
        if step % 211 == 210:
            cache.clear()
            running.clear()
        seen += cache.take_events()
        assert applied(seen) == counted(cache)
        if not copies:
            assert all(n == 1 for n in counted(cache).values())
    assert any(isinstance(event, Removed) for event in seen)


@pytest.mark.parametrize("tier", [GPU, "CPU"])
def test_without_copies_no_live_block_ever_lacks_its_parent(tier):
    rng = random.Random(7)
    cache = PrefixCache(16, BLOCK, copies=False, tiers={"CPU": 12})
    for _ in range(500):
        serve(cache, tokens(*(rng.randint(1, 3) for _ in range(rng.randint(1, 5)))), output=2)
        live = {digest for _, where, digest in cache.live_blocks() if where == tier}
        for (_, where, _), entry in cache.live_blocks().items():
            if where == tier and entry.block.parent is not None:
                assert entry.block.parent.digest in live
