"""Tests for the client library's index of prompt prefixes.

Whatever the order of events, the index must know how many blocks of a prompt each worker holds.
"""

import gc
import itertools
import tracemalloc
from array import array
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.client import prefix_index
from kvbus.client.prefix_index import Match, PrefixIndex
from kvbus.core.wire.encoding import encode_value
from kvbus.core.wire.schema import AllBlocksCleared, BlockRemoved, BlockStored

SIZE = 4


def tokens_of(*blocks, size=SIZE):
    """Return the tokens of a prompt. Each number in ``blocks`` stands for one block of ``size`` tokens."""
    return [block * 1000 + at for block in blocks for at in range(size)]


def store(hashes, parent, *blocks, size=SIZE, keys=None, salt=None, **more):
    more |= {name: encode_value(value) for name, value in (("extra_keys", keys), ("cache_salt", salt)) if value}
    return BlockStored(tuple(hashes), parent, encode_value(tokens_of(*blocks, size=size)), size, **more)


def index_of(*said):
    index: PrefixIndex[str] = PrefixIndex()
    for worker, event in said:
        index.apply(worker, event)
    return index


def test_an_answer_lists_workers_by_the_length_of_their_prefix():
    index = index_of(
        ("b", store([9], None, 1)),
        ("a", store([1, 2, 3], None, 1, 2, 3)),
        ("c", store([7, 8], None, 1, 5)),
        ("d", store([1], None, 2)),
    )
    assert index.longest_prefix(tokens_of(1, 2, 3, 4)) == {"a": 3, "b": 1, "c": 1}
    assert next(iter(index.longest_prefix(tokens_of(1, 5)))) == "c"
    assert index.longest_prefix(tokens_of(1, 2)[:-1]) == {"a": 1, "b": 1, "c": 1}
    assert index.longest_prefix(tokens_of(4)) == index.longest_prefix([]) == {}
    assert index.matches(tokens_of(1, 2)) == {
        "a": Match(2, SIZE, {"GPU": 2}),
        "b": Match(1, SIZE, {"GPU": 1}),
        "c": Match(1, SIZE, {"GPU": 1}),
    }
    assert (len(index), index.workers) == (7, ["b", "a", "c", "d"])


def test_an_offloaded_block_without_tokens_gets_the_position_of_the_device_block():
    offloaded = BlockStored((1, 2, 9), None, encode_value([]), 0, medium="CPU")
    index = index_of(("a", store([1, 2], None, 1, 2)), ("a", offloaded), ("a", offloaded), ("b", offloaded))
    assert index.matches(tokens_of(1, 2)) == {"a": Match(2, SIZE, {"GPU": 2, "CPU": 2})}
    index.apply("a", BlockRemoved((1, 2), "GPU"))
    assert index.matches(tokens_of(1, 2)) == {"a": Match(2, SIZE, {"CPU": 2})}
    index.apply("a", BlockRemoved((1, 2, 9), "CPU"))
    assert (index.longest_prefix(tokens_of(1, 2)), len(index)) == ({}, 3)


def test_a_block_without_tokens_gets_its_position_when_its_tokens_arrive():
    index = index_of(("a", BlockStored((1, 3), None, encode_value([]), 0, medium="CPU")))
    index.apply("a", store([2], 1, 2, medium="CPU"))
    assert (index.longest_prefix(tokens_of(1, 2)), len(index)) == ({}, 3)
    index.apply("a", store([3], 2, 3, medium="CPU"))
    index.apply("a", store([1], None, 1, medium="CPU"))
    assert index.matches(tokens_of(1, 2, 3)) == {"a": Match(3, SIZE, {"CPU": 3})}
    index.apply("a", BlockRemoved((1, 2, 3), "CPU"))
    assert (index.longest_prefix(tokens_of(1)), len(index)) == ({}, 0)


def test_prompts_with_different_salts_or_adapters_do_not_match():
    index = index_of(
        ("plain", store([1, 2], None, 1, 2, keys=[None, None])),
        ("salt", store([1, 2], None, 1, 2, keys=[["s"], None])),  # vLLM has the salt in the first block's extra keys
        ("salt", store([3], 2, 3, keys=[None])),
        ("sglang", store([1], None, 1, salt="s")),  # SGLang has the salt as a field of every store
        ("sglang", store([2], 1, 2, salt="s")),
        ("lora", store([1, 2], None, 1, 2, keys=[["l"], ["l"]], lora_name="l", lora_id=1)),
        ("both", store([1, 2], None, 1, 2, keys=[["l", "s"], ["l"]], lora_name="l")),
        ("number", store([1], None, 1, lora_id=1)),
        ("image", store([1, 2], None, 1, 2, keys=[None, [["image", 3]]])),
    )
    asked = tokens_of(1, 2, 3)
    assert index.longest_prefix(asked) == {"plain": 2, "image": 1}
    assert index.longest_prefix(asked, salt="s") == {"salt": 3, "sglang": 2}
    assert index.longest_prefix(asked, lora="l") == {"lora": 2}
    assert index.longest_prefix(asked, lora="l", salt="s") == {"both": 2}
    assert index.longest_prefix(asked, lora=1) == {"number": 1}
    assert index.longest_prefix([], salt="s") == {}


def test_block_sizes_may_differ_between_workers_and_within_a_worker():
    index = index_of(
        ("small", store([1, 2, 3], None, 1, 2, 3)),
        ("large", store([1], None, 1, size=8)),
        ("both", store([1, 2], None, 1, 2)),
        ("both", store([3], None, 1, size=8)),
    )
    assert index.longest_prefix(tokens_of(1, size=8)) == {"large": 1, "both": 1, "small": 1}
    assert index.matches(tokens_of(1, size=8))["both"] == Match(1, 8, {"GPU": 1})
    assert index.matches(tokens_of(1, 2)) == {"small": Match(2, 4, {"GPU": 2}), "both": Match(2, 4, {"GPU": 2})}


def test_blocks_with_eagle_token_pairs_are_found_by_plain_tokens():
    tokens = list(range(5))
    pairs = encode_value(list(itertools.pairwise(tokens)))
    index = index_of(("a", BlockStored((1,), None, pairs, 4)))
    assert index.longest_prefix(tokens) == index.longest_prefix(array("I", tokens).tobytes()) == {"a": 1}
    assert index.longest_prefix(tokens[:4]) == {}


def test_a_prompt_may_be_packed_tokens():
    index = index_of(("a", store([1, 2], None, 1, 2)))
    packed = array("I", tokens_of(1, 2)).tobytes()
    assert index.longest_prefix(packed) == {"a": 2}
    assert index.longest_prefix(packed[:-1]) == {"a": 1}


def test_blocks_without_tokens_are_found_only_by_hash():
    index = index_of(("a", BlockStored((1, 2), None, encode_value([]), 0)), ("a", store([3], 2, 3)))
    assert index.longest_prefix(tokens_of(3)) == {}
    assert index.matches_by_hash([1, 2, 3]) == {"a": Match(3, 0, {"GPU": 3})}
    index.apply("a", BlockRemoved((1, 3)))
    assert len(index) == 1


def test_an_event_that_stores_no_block_changes_nothing():
    index = index_of(("a", store([1], None, 1)), ("a", store([], 1)))
    assert (index.longest_prefix(tokens_of(1)), len(index)) == ({"a": 1}, 1)


def test_an_event_with_unknown_fields_is_applied():
    known = store([1], None, 1)
    index = index_of(
        (
            "a",
            {"type": "BlockStored", "new": 1, "token_ids": known.token_ids, "block_size": SIZE}
            | {"block_hashes": (1,), "parent_block_hash": None},
        )
    )
    assert index.longest_prefix(tokens_of(1)) == {"a": 1}


@pytest.mark.parametrize("tokens", [[-1], [2**32], ["1"], [1.5], [None]])
def test_a_value_that_is_not_a_token_is_refused(tokens):
    with pytest.raises(ValueError, match="integer from 0 to 4294967295"):
        index_of(("a", store([1], None, 1, size=1))).longest_prefix(tokens)


def test_removed_blocks_use_no_memory():
    index = index_of()

    def come_and_go(first):
        names = range(first, first + 2000)
        index.apply("a", store(names, None, *names))
        # The block's parent is unknown, so the index has not placed the block yet when it is removed.
        index.apply("a", store([first + 5000], first + 4000, first))
        index.apply("a", BlockRemoved((*names, first + 5000)))

    def kept():
        """Count the objects that the code of the index's module has allocated and not freed.

        A dict counts as one object, whatever its size.
        """
        gc.collect()  # a full collection also frees the tuples that Python keeps for reuse
        own = tracemalloc.Filter(inclusive=True, filename_pattern=str(prefix_index.__file__))
        return sum(each.count for each in tracemalloc.take_snapshot().filter_traces([own]).statistics("filename"))

    tracemalloc.start()
    try:
        come_and_go(0)
        come_and_go(10_000)
        before = kept()
        for round_ in range(2, 6):
            come_and_go(10_000 * round_)
        grown = kept() - before
    finally:
        tracemalloc.stop()
    assert len(index) == 0
    assert grown < 100, "objects kept of 8,000 blocks"


# -- against a plain model


@dataclass
class ModelBlock:
    """A block of a worker in the index :class:`Naive`: its parent, its content and its media.

    If all ancestors of the block are known, ``path`` is the prompt up to the block's end. Otherwise it is None.
    """

    parent: bytes | None
    content: int
    path: tuple[int, ...] | None
    media: set[str] = field(default_factory=set)


@dataclass
class Naive:
    """A simple and slow index with which the tests compare the real one: the blocks of each worker, by hash."""

    workers: dict = field(default_factory=dict)

    def store(self, worker, medium, chain, variant, first):
        blocks = self.workers.setdefault(worker, {})
        content = content_of(worker, variant, chain)
        for at in range(first, len(chain)):
            parent = name_of(variant, chain[:at]) if at else None
            block = blocks.setdefault(
                name_of(variant, chain[: at + 1]), ModelBlock(parent, content[at], None if at else content[:1])
            )
            block.media.add(medium)
        changed = True
        while changed:  # a block has a path once its parent has one
            changed = False
            for block in blocks.values():
                parent = blocks.get(block.parent)
                if block.path is None and parent is not None and parent.path is not None:
                    block.path, changed = (*parent.path, block.content), True

    def remove(self, worker, medium, name):
        blocks = self.workers.get(worker, {})
        if name in blocks:
            blocks[name].media.discard(medium)
            if not blocks[name].media:
                del blocks[name]

    def answer(self, prompt):
        paths = [prompt[: at + 1] for at in range(len(prompt))]
        return self._answer(paths, lambda block, _name, path: block.path == path)

    def answer_by_hash(self, names):
        return self._answer(names, lambda _block, name, asked: name == asked)

    def _answer(self, keys, fits):
        found = {}
        for worker, blocks in self.workers.items():
            count, tiers = 0, dict[str, int]()
            for key in keys:
                media = set().union(*(block.media for name, block in blocks.items() if fits(block, name, key)))
                if not media:
                    break
                count += 1
                for medium in media:
                    tiers[medium] = tiers.get(medium, 0) + 1
            if count:
                found[worker] = count, tiers
        return found


def name_of(variant, chain):
    return repr((variant, chain)).encode()


def content_of(worker, variant, chain):
    """Return the content of the last block of a chain, for a worker and a variant.

    The block's hash depends on the variant. For variant 2, worker "b" has other content under this hash than the other
    workers.
    """
    return tuple(3 - block for block in chain) if (worker, variant) == ("b", 2) else chain


SHORT = [chain for length in (1, 2) for chain in itertools.product((1, 2), repeat=length)]
NAMES = [name_of(variant, chain) for variant in range(3) for chain in SHORT]
MEDIA = ("GPU", "CPU")
WORKERS = st.sampled_from("abc")
CHAINS = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=4).map(tuple)
VARIANTS = st.integers(0, 2)
STEPS = st.one_of(
    st.tuples(st.just("store"), WORKERS, st.sampled_from(MEDIA), CHAINS, VARIANTS, st.sampled_from((0, 0, 0, 1, 3))),
    st.tuples(st.just("remove"), WORKERS, st.sampled_from(MEDIA), CHAINS, VARIANTS),
    st.tuples(st.just("clear medium"), WORKERS, st.sampled_from(MEDIA)),
    st.tuples(st.just("clear"), WORKERS),
)


@given(
    st.lists(STEPS, min_size=12, max_size=60),
    st.lists(CHAINS, min_size=1, max_size=4),
    st.lists(st.lists(st.tuples(VARIANTS, CHAINS), max_size=4), max_size=4),
)
def test_the_index_answers_as_a_simple_model_does(steps, prompts, questions):
    index: PrefixIndex[str] = PrefixIndex()
    model = Naive()
    by_hash = [
        [name_of(variant, prompt[: at + 1]) for at in range(len(prompt))] for prompt in prompts for variant in range(3)
    ]
    by_hash += [[name_of(variant, chain) for variant, chain in question] for question in questions]

    def check(prompt, names):
        answer = index.matches(tokens_of(*prompt))
        assert {worker: (match.blocks, match.tiers) for worker, match in answer.items()} == model.answer(prompt)
        assert index.longest_prefix(tokens_of(*prompt)) == {worker: match.blocks for worker, match in answer.items()}
        answer = index.matches_by_hash(names)
        assert {worker: (match.blocks, match.tiers) for worker, match in answer.items()} == model.answer_by_hash(names)

    for number, (kind, worker, *step) in enumerate(steps):
        if kind == "store":
            medium, chain, variant, first = step
            first = min(first, len(chain) - 1)
            names = [name_of(variant, chain[: at + 1]) for at in range(len(chain))]
            parent = names[first - 1] if first else None
            content = content_of(worker, variant, chain)
            index.apply(worker, store(names[first:], parent, *content[first:], medium=medium))
            model.store(worker, medium, chain, variant, first)
        elif kind == "remove":
            medium, chain, variant = step
            index.apply(worker, BlockRemoved((name_of(variant, chain),), medium))
            model.remove(worker, medium, name_of(variant, chain))
        elif kind == "clear medium":
            index.apply(worker, AllBlocksCleared(step[0]))
            for name in list(model.workers.get(worker, {})):
                model.remove(worker, step[0], name)
        else:
            index.clear(worker)
            model.workers.pop(worker, None)
        check(prompts[number % len(prompts)], by_hash[number % len(by_hash)])
    for prompt in prompts:
        check(prompt, by_hash[0])
    for names in by_hash:
        check(prompts[0], names)
    for worker in "abc":
        blocks = model.workers.get(worker, {})
        counts = {medium: sum(medium in block.media for block in blocks.values()) for medium in MEDIA}
        assert index.on_media(worker) == {medium: count for medium, count in counts.items() if count}
        for medium, name in itertools.product(MEDIA, NAMES):
            assert index.holds(worker, name, medium) == (name in blocks and medium in blocks[name].media)
    assert len(index) == sum(len(block.media) for blocks in model.workers.values() for block in blocks.values())
