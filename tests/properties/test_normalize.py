"""Tests that the normalizer keeps a router with a plain set exact, for random histories of a simple engine cache."""

from collections import Counter
from itertools import pairwise
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from kvbus.core.stats import SourceStats
from kvbus.core.wire.tokens import array_head
from tests.core.dsl import Bench
from tests.doubles.payloads import cleared, pack, payload, removed, store

NODES = 31
SIZE = 4


def parent_of(node):
    """Return a node's parent.

    The blocks form a binary tree, so each hash has one prefix, as in engines that chain hashes.
    """
    return (node - 1) // 2 if node else None


def tokens(node, size=SIZE):
    return [1000 * node + i for i in range(size)]


class Naming:
    """The form of an engine's block hashes: signed integers, unsigned integers, or 32 raw bytes."""

    def __init__(self, kind):
        self.kind = kind

    def __call__(self, node):
        if node is None:
            return None
        number = (node + 1) * 0x9E3779B97F4A7C15 % 2**64
        if self.kind == "bytes":
            return number.to_bytes(8, "big") * 4
        return number - 2**63 if self.kind == "signed" else number


@st.composite
def paths(draw, length=4):
    """Draw a path of consecutive nodes, downwards from any node of the tree of prefixes.

    Each node stands for a block.
    """
    path = [draw(st.integers(0, NODES - 1))]
    while len(path) < length and 2 * path[-1] + 2 < NODES and draw(st.booleans()):
        path.append(2 * path[-1] + draw(st.integers(1, 2)))
    return path


GROUPS = st.sampled_from([None, 0, 1])
MEDIA = st.sampled_from(["GPU", None, "gpu", "CPU", "cpu", "DISK"])
NAMES = {"GPU": "GPU", None: "GPU", "gpu": "GPU", "CPU": "CPU", "cpu": "CPU", "DISK": "DISK"}
EVENTS = st.one_of(
    st.tuples(st.just("store"), GROUPS, MEDIA, paths()),
    st.tuples(st.just("store"), GROUPS, MEDIA, paths()),
    st.tuples(st.just("remove"), GROUPS, MEDIA, st.lists(st.integers(0, NODES - 1), min_size=1, max_size=6)),
    st.tuples(st.just("evict"), GROUPS, MEDIA, st.integers(1, 8)),
    st.tuples(st.just("clear"), st.none(), st.none(), st.none()),
    st.tuples(st.just("clear medium"), st.none(), MEDIA.filter(bool), st.none()),
)
HISTORIES = st.lists(st.lists(EVENTS, max_size=8), min_size=1, max_size=15)


class Model:
    """A model of the engine's cache: the number of copies for each group, medium and block."""

    def __init__(self, *, count=True, clears_all=False):
        self.copies = Counter[Any]()
        self.count = count
        self.clears_all = clears_all

    def store(self, group, medium, path):
        for node in path:
            key = (group, NAMES[medium], node)
            self.copies[key] = self.copies[key] + 1 if self.count else 1

    def remove(self, group, medium, nodes):
        for node in nodes:
            key = (group, NAMES[medium], node)
            if self.copies[key]:
                self.copies[key] -= 1

    def evictable(self, group, medium, count):
        return [node for (g, m, node), n in self.copies.items() if n and (g, m) == (group, NAMES[medium])][:count]

    def clear(self, *, again=False):
        """Clear the GPU's blocks. With ``again``, clear the blocks of the other tiers instead.

        A batch may have two clears: the first one means the GPU, the second one the other tiers.
        """
        for key in list(self.copies):
            if self.clears_all or (key[1] == "GPU") != again:
                del self.copies[key]

    def clear_medium(self, medium):
        for key in [key for key in self.copies if key[1] == medium]:
            del self.copies[key]

    @property
    def live(self):
        return {key for key, copies in self.copies.items() if copies}


def play(model, name, history, *, groups=True, size=SIZE):
    """Yield the batches of a history as lists of wire events. Update the model before each batch."""
    for batch in history:
        events = []
        for what, group, medium, detail in batch:
            here = group if groups else None
            if what == "clear":
                model.clear(again=cleared() in events)
                events.append(cleared())
                continue
            if what == "clear medium":
                model.clear_medium(NAMES[medium])
                events.append(cleared(medium))
                continue
            if what == "store":
                model.store(here, medium, detail)
                body = [token for node in detail for token in tokens(node, size)]
                hashes, parent = [name(node) for node in detail], name(parent_of(detail[0]))
                events.append(store(hashes, parent, tokens=body, block_size=size, medium=medium, group=here))
                continue
            nodes = model.evictable(here, medium, detail) if what == "evict" else detail
            if here is None:  # a removal without a group may match a block of a group, which this test does not cover
                left = {node: model.copies[None, NAMES[medium], node] for node in nodes}
                nodes = [node for at, node in enumerate(nodes) if nodes[:at].count(node) < left[node]]
            model.remove(here, medium, nodes)
            if nodes:
                events.append(removed([name(node) for node in nodes], medium=medium, group=here))
        yield events


def named(model, name):
    return {(group, medium, name(node)) for group, medium, node in model.live}


def check_announced(bench):
    announced = bench.announced()
    assert announced.blocks == bench.router.blocks
    assert announced.violations == []
    told: set[Any] = set()
    for event in bench.normalizer.announce():
        fields = event if isinstance(event, dict) else {f: getattr(event, f) for f in event.__struct_fields__}
        group = fields["group_idx"] if isinstance(fields["group_idx"], int) else None
        medium, parent = NAMES[fields["medium"]], fields["parent_block_hash"]
        for where in {medium, "GPU"}:
            if (group, where, parent) in bench.router.blocks:
                assert (group, where, parent) in told, "a parent that is live was told after its child"
        told.update((group, medium, block) for block in fields["block_hashes"])


KINDS = st.sampled_from(["signed", "unsigned", "bytes"])


@given(HISTORIES, KINDS)
def test_the_router_holds_the_engines_blocks_after_every_batch(history, kind):
    bench, model, name = Bench(), Model(), Naming(kind)
    for events in play(model, name, history):
        bench.feed(*events)
        assert set(bench.router.blocks) == named(model, name)
        assert bench.router.violations == []
    assert bench.rejected == {}
    check_announced(bench)


@given(HISTORIES, KINDS)
def test_the_router_is_exact_for_an_engine_without_copies_with_duplicates_ignore(history, kind):
    bench, model, name = Bench(duplicates="ignore"), Model(count=False), Naming(kind)
    for events in play(model, name, history):
        bench.feed(*events)
        assert set(bench.router.blocks) == named(model, name)
    assert bench.router.violations == []
    check_announced(bench)


@given(HISTORIES)
def test_the_router_is_exact_if_a_clear_empties_every_tier(history):
    bench, model, name = Bench(), Model(clears_all=True), Naming("signed")
    bench.feed(cleared(), first_of_epoch=True)
    for events in play(model, name, history, groups=False):
        bench.feed(*events)
        assert set(bench.router.blocks) == named(model, name)
    assert bench.router.violations == []


def counted(bench):
    return {name: getattr(bench.stats, name) for name in SourceStats.__struct_fields__}


def cache_of(bench):
    """Return the blocks in the normalizer's index: parent, tokens and metadata of each block."""
    return {
        (key, block): (chunk.parent_of(at), chunk.tokens_of(at, at + 1), chunk.meta)
        for key, table in bench.normalizer.index.tables.items()
        for block, chunk in table.blocks.items()
        for at in [chunk.hashes.index(block)]
    }


@given(HISTORIES, KINDS)
def test_the_encoding_of_an_event_does_not_change_the_output(history, kind):
    """Of two engines, one omits null fields and encodes token ids in more bytes than necessary.

    Both give the same output.
    """
    benches, name = [Bench(), Bench()], Naming(kind)
    for events in play(Model(), name, history):
        terse = [{k: wide(v) if k == "token_ids" else v for k, v in event.items() if v is not None} for event in events]
        one, other = benches
        assert one.feed(*events) == other.feed(*terse)
        assert cache_of(one) == cache_of(other)
        assert counted(one) == counted(other)
        assert one.normalizer.dump() == other.normalizer.dump()


@given(HISTORIES, KINDS)
def test_empty_caches_do_not_change_the_output(history, kind):
    """A normalizer whose caches are empty, as after a restart, sends the same bytes and holds the same blocks as one
    whose caches are full.
    """
    benches, name = [Bench(), Bench()], Naming(kind)
    for events in play(Model(), name, history):
        warm, cold = benches
        assert msgspec.msgpack.encode(warm.feed(*events)) == msgspec.msgpack.encode(cold.feed(*events))
        assert cache_of(warm) == cache_of(cold)
        assert counted(warm) == counted(cold)
        assert warm.normalizer.dump() == cold.normalizer.dump()
        cold.restart()


def wide(tokens):
    """Return an array of token ids that uses nine bytes for each id."""
    return Raw(array_head(len(tokens)) + b"".join(b"\xcf" + token.to_bytes(8, "big") for token in tokens))


def positional(event):
    if event["type"] == "AllBlocksCleared":
        return ["AllBlocksCleared", *([event["medium"]] if "medium" in event else [])]
    if event["type"] == "BlockRemoved":
        return ["BlockRemoved", event["block_hashes"], event["medium"]]
    names = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
    return ["BlockStored", *(event.get(field) for field in names)]


@given(HISTORIES, KINDS)
def test_positional_events_give_the_same_output_as_maps(history, kind):
    one, other, name = Bench(), Bench(), Naming(kind)
    for events in play(Model(), name, history, groups=False):
        assert one.feed(*events) == other.feed(*map(positional, events))


@given(HISTORIES, st.sampled_from([1, 2]))
def test_the_router_holds_all_sub_blocks_of_divided_blocks(history, base):
    bench, model, name = Bench(block_size=base), Model(), Naming("unsigned")
    for events in play(model, name, history):
        bench.feed(*events)
        expected = {
            (group, medium, tuple(tokens(node)[at : at + base]))
            for group, medium, node in model.live
            for at in range(0, SIZE, base)
        }
        assert {(key[0], key[1], block.tokens) for key, block in bench.router.blocks.items()} == expected
        assert len(bench.router.blocks) == len(expected)
        assert bench.router.violations == []
    announced = bench.announced()
    assert announced.blocks == bench.router.blocks
    assert announced.violations == []


@given(HISTORIES, st.data())
def test_coarse_duplicates_of_blocks_do_not_change_the_router(history, data):
    """Routers stay exact if the engine also sends each pair of blocks as one larger block, as a hybrid model does.

    The larger block has its own hash.
    """
    bench, model, name = Bench(), Model(), Naming("signed")
    bench.feed(store([1, 2], tokens=[1] * (2 * SIZE), block_size=SIZE), removed([1, 2]))
    coarse = Counter[Any]()
    for events in play(model, name, history, groups=False):
        mixed = []
        for event in events:
            mixed.append(event)
            path = data.draw(paths(2))
            if event["type"] == "AllBlocksCleared":
                if event.get("medium", "GPU").upper() == "GPU" and ("medium" in event or cleared() not in mixed[:-1]):
                    coarse.clear()
            elif len(path) == 2 and data.draw(st.booleans()):
                twin = 10_000 + path[1]
                if coarse[twin] and data.draw(st.booleans()):
                    coarse[twin] -= 1
                    mixed.append(removed([twin]))
                else:
                    coarse[twin] += 1
                    body = tokens(path[0]) + tokens(path[1])
                    mixed.append(store([twin], tokens=body, block_size=2 * SIZE))
        bench.feed(*mixed)
        assert set(bench.router.blocks) == named(model, name)
    assert bench.router.violations == []
    assert bench.rejected == {}


@given(HISTORIES, st.data(), st.booleans())
def test_larger_blocks_of_a_tier_are_divided_into_device_blocks(history, data, proven):
    """kvbus divides the chunks that a connector stores on disk. Each chunk has two blocks, and its own hash.

    One removal deletes a complete chunk.
    """
    bench, model, name = Bench(), Model(), Naming("signed")
    if proven:
        bench.feed(store([1, 2], tokens=[1] * (2 * SIZE), block_size=SIZE), removed([1, 2]))
    chunks = Counter[Any]()
    history = [[event for event in turn if NAMES.get(event[2]) != "DISK" or event[0] == "clear"] for turn in history]
    for events in play(model, name, history, groups=False):
        mixed = []
        for event in events:
            if event["type"] == "AllBlocksCleared" and "medium" not in event and cleared() in mixed:
                chunks.clear()  # the second clear of a batch is for the other tiers
            mixed.append(event)
            path = data.draw(paths(2))
            if len(path) == 2:
                twin = 10_000 + path[1]
                if chunks[twin] and data.draw(st.booleans()):
                    chunks[twin] -= 1
                    mixed.append(removed([twin], medium="DISK"))
                else:
                    chunks[twin] += 1
                    body = tokens(path[0]) + tokens(path[1])
                    mixed.append(store([twin], tokens=body, block_size=2 * SIZE, medium="DISK"))
        bench.feed(*mixed)
        blocks = bench.router.blocks
        assert bench.router.violations == []
        if proven:
            assert {key for key in blocks if key[1] != "DISK"} == named(model, name)
            # all tokens up to its end identify a sub-block, so chunks that begin with the same tokens share their first
            # sub-block
            held = set()
            for twin, count in chunks.items():
                first, second = tokens((twin - 10_001) // 2), tokens(twin - 10_000)
                held |= {tuple(first), (*first, *second)} if count else set()
            last = sorted(chain[-SIZE:] for chain in held)
            assert sorted(block.tokens for key, block in blocks.items() if key[1] == "DISK") == last
    assert bench.rejected == {}
    check_announced(bench)


# -- one hash for a complete radix node --------------------------------------------------------------------------------

PAGE = 4


class Radix:
    """A model of an engine with a radix tree of pages, which announces complete nodes.

    To split a node, the engine sends a removal and two stores.
    """

    def __init__(self):
        self.nodes = {}
        """Parent and pages of each node, by the node's name."""
        self.fresh = 1

    def path(self, name):
        pages: list[Any] = []
        while name is not None:
            name, own = self.nodes[name]
            pages = [*own, *pages]
        return pages

    def add(self, parent, pages):
        name, self.fresh = self.fresh, self.fresh + 1
        self.nodes[name] = (parent, pages)
        body = [10 * page + i for page in pages for i in range(PAGE)]
        return name, store([name], parent, tokens=body, block_size=len(body), medium=None)

    def children(self, name):
        return [child for child, (parent, _) in self.nodes.items() if parent == name]

    def insert(self, pages):
        events: list[Any] = []
        at, pages = None, list(pages)
        while pages:
            child = next((c for c in self.children(at) if self.nodes[c][1][0] == pages[0]), None)
            if child is None:
                _, event = self.add(at, pages)
                return [*events, event]
            own = self.nodes[child][1]
            same = 0
            while same < min(len(own), len(pages)) and own[same] == pages[same]:
                same += 1
            if same < len(own):
                below = self.children(child)
                del self.nodes[child]
                head, first = self.add(at, own[:same])
                tail, second = self.add(head, own[same:])
                for name in below:
                    self.nodes[name] = (tail, self.nodes[name][1])
                events += [removed([child], medium=None), first, second]
                child = head
            at, pages = child, pages[same:]
        return events

    def evict(self, count):
        gone = []
        for _ in range(count):
            leaf = next((name for name in sorted(self.nodes, reverse=True) if not self.children(name)), None)
            if leaf is not None:
                del self.nodes[leaf]
                gone.append(leaf)
        # Unlike vLLM, SGLang removes a parent before its children.
        return [removed([name], medium=None) for name in sorted(gone)]

    def prefixes(self, base):
        found = set()
        for name in self.nodes:
            body = [10 * page + i for page in self.path(name) for i in range(PAGE)]
            found |= {tuple(body[:end]) for end in range(base, len(body) + 1, base)}
        return found


TURNS = st.lists(
    st.lists(st.one_of(st.integers(1, 3), st.lists(st.integers(0, 2), min_size=1, max_size=5)), min_size=1, max_size=3),
    min_size=1,
    max_size=10,
)


@given(TURNS)
def test_radix_nodes_of_any_size_give_the_engines_prefixes(turns):
    bench, radix = Bench(), Radix()
    for turn in turns:
        events = []
        for what in turn:
            events += radix.insert(what) if isinstance(what, list) else radix.evict(what)
        bench.feed(*events)
        base = bench.normalizer.block_size
        assert bench.router.violations == []
        if base is None:
            continue
        blocks = bench.router.blocks
        assert {tuple(bench.router.path(None, block)) for _, _, block in blocks} == radix.prefixes(base)
        assert len(blocks) == len(radix.prefixes(base))
        announced = bench.announced()
        assert announced.blocks == blocks
        assert announced.violations == []
        assert announced.orphans == 0
    assert bench.rejected == {}


# -- invalid batches ---------------------------------------------------------------------------------------------------

HASHES = st.one_of(st.integers(0, 9), st.sampled_from([b"x", b"y" * 32, b"", "s", None, 1.5, -1, 2**64 - 1]))
WILD_STORES = st.fixed_dictionaries(
    {
        "type": st.just("BlockStored"),
        "block_hashes": st.lists(HASHES, max_size=4),
        "parent_block_hash": st.one_of(st.none(), HASHES),
        "token_ids": st.sampled_from([4, 4, 8, 12, 16, 0, 2, 6]).map(lambda n: list(range(n))),
        "block_size": st.sampled_from([4, 4, 4, 4, 2, 8, 3, 0, -1]),
    },
    optional={
        "medium": st.sampled_from(["GPU", "CPU", None, "HBM", "disk"]),
        "group_idx": st.sampled_from([None, 0, 1]),
        "kv_cache_spec_kind": st.sampled_from([None, "full_attention", "mamba"]),
        "extra_keys": st.one_of(st.none(), st.lists(st.none(), max_size=4), st.integers(0, 9)),
        "novelty": st.integers(0, 5),
        "lora_id": st.one_of(st.none(), st.integers(0, 3), st.text(max_size=1)),
    },
)
WILD_REMOVALS = st.fixed_dictionaries(
    {"type": st.just("BlockRemoved"), "block_hashes": st.lists(HASHES, max_size=4)},
    optional={"medium": st.sampled_from(["GPU", "CPU", None, "HBM"]), "group_idx": st.sampled_from([None, 0, 1])},
)
WILD = st.one_of(WILD_STORES, WILD_STORES, WILD_STORES, WILD_REMOVALS, st.just(cleared()), st.just({"type": "?"}))


@given(
    st.lists(st.lists(WILD, max_size=6), max_size=12),
    st.sampled_from(["count", "last", "ignore"]),
    st.sampled_from([None, 2, 4]),
)
def test_random_events_give_output_that_keeps_every_rule(batches, duplicates, block_size):
    bench = Bench(duplicates=duplicates, block_size=block_size, max_blocks=12)
    for events in batches:
        bench.feed(raw=payload(*events))
        assert bench.router.violations == []
        assert len(bench.normalizer.index) <= 12
    announced = bench.announced()
    assert announced.blocks.keys() == bench.router.blocks.keys()
    assert announced.violations == []


@given(st.lists(st.lists(WILD, max_size=6), max_size=12))
def test_every_random_event_is_applied_or_counted(batches):
    """Every event has an effect that kvbus counts, or is counted as rejected with a reason."""
    bench = Bench()
    stores = removals = clears = unknown = 0
    for events in batches:
        rejected_before = sum(bench.rejected.values())
        bench.feed(raw=pack([1.0, events, 0]))
        stores += sum(event["type"] == "BlockStored" for event in events)
        removals += sum(event["type"] == "BlockRemoved" for event in events)
        clears += sum(event["type"] == "AllBlocksCleared" for event in events)
        unknown += sum(event["type"] == "?" for event in events)
        assert sum(bench.rejected.values()) >= rejected_before + sum(event["type"] == "?" for event in events)
    stats = bench.stats
    assert stats.cleared == clears
    assert bench.rejected.get("unknown_event", 0) == unknown
    assert stats.stored + stats.removed <= stores + removals
    assert stats.stored + stats.removed + sum(bench.rejected.values()) >= stores + removals + unknown


def test_the_radix_model_splits_nodes_and_separates_prefixes():
    """Check `Radix`, the model of an engine with a radix tree: it distinguishes prefixes and splits nodes.

    Without such nodes, the tests that use the model would find no defect.
    """
    radix = Radix()
    kinds = [event["type"] for pages in ([0, 1, 2], [0, 1, 1], [0, 0]) for event in radix.insert(pages)]
    assert kinds.count("BlockRemoved") == 2
    assert {len(prefix) for prefix in radix.prefixes(PAGE)} == {4, 8, 12}
    assert all(
        a < b for a, b in pairwise(sorted(radix.prefixes(PAGE), key=len)) if len(a) < len(b) and a == b[: len(a)]
    )
