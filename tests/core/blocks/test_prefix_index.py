"""The tree of prefixes: what each worker holds of a prompt, whatever the order in which blocks come and go."""

import itertools
from array import array
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.core.blocks.prefix_index import Match, PrefixIndex
from kvbus.core.blocks.prefix_labels import stored
from kvbus.core.blocks.prefix_paths import KEPT, PIECE, NamedBlocks
from kvbus.core.wire.encoding import encode_value
from kvbus.core.wire.schema import AllBlocksCleared, BlockRemoved, BlockStored
from tests.generators import driven

SIZE = 4


def by_names(names, size=9):
    """A prompt by the names of its blocks, in pieces of so many."""
    return [NamedBlocks(names[first : first + size]) for first in range(0, len(names), size)]


def tokens_of(*blocks, size=SIZE):
    """A prompt: each number stands for a block of tokens."""
    return [block * 1000 + at for block in blocks for at in range(size)]


def store(hashes, parent, *blocks, size=SIZE, keys=None, salt=None, **more):
    more |= {name: encode_value(value) for name, value in (("extra_keys", keys), ("cache_salt", salt)) if value}
    return BlockStored(tuple(hashes), parent, encode_value(tokens_of(*blocks, size=size)), size, **more)


def index_of(*said, piece=PIECE, kept=KEPT):
    index: PrefixIndex[str] = PrefixIndex(piece, kept)
    for worker, event in said:
        index.apply(worker, event)
    return index


def test_each_worker_with_the_blocks_it_holds_the_longest_first():
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


def test_a_prefix_ends_where_a_block_is_gone_and_goes_on_when_it_is_back():
    index = index_of(("a", store([1, 2, 3], None, 1, 2, 3)), ("a", BlockRemoved((2,))))
    assert index.longest_prefix(tokens_of(1, 2, 3)) == {"a": 1}
    index.apply("a", store([2], 1, 2))
    assert index.longest_prefix(tokens_of(1, 2, 3)) == {"a": 3}
    assert not index.remove("a", 77)
    assert not index.remove("nobody", 1)


def test_a_block_waits_for_its_parent_with_all_that_wait_for_it():
    index = index_of(("a", store([3], 2, 3)), ("a", store([4, 5], 3, 4, 5)), ("a", store([6], 2, 6)))
    assert index.longest_prefix(tokens_of(3)) == {}
    assert (len(index), index.nodes) == (4, 0)
    index.remove("a", 6)
    index.apply("a", store([1, 2], None, 1, 2))
    assert index.longest_prefix(tokens_of(1, 2, 3, 4, 5)) == {"a": 5}
    assert index.longest_prefix(tokens_of(1, 2, 6)) == {"a": 2}


def test_a_parent_of_another_worker_is_not_ones_own():
    index = index_of(("a", store([1], None, 1)), ("b", store([2], 1, 2)))
    assert index.longest_prefix(tokens_of(1, 2)) == {"a": 1}


def test_blocks_on_several_tiers_are_one_prefix():
    index = index_of(
        ("a", store([1, 2], None, 1, 2)),
        ("a", store([2, 3], 1, 2, 3, medium="CPU")),
        ("b", store([1, 2, 3], None, 1, 2, 3, medium="DEVICE")),
    )
    asked = tokens_of(1, 2, 3)
    both = {"a": Match(3, SIZE, {"GPU": 2, "CPU": 2}), "b": Match(3, SIZE, {"GPU": 3})}
    assert index.matches(asked) == both
    assert index.holds("a", 3, "CPU")
    assert not index.holds("a", 3)
    assert index.named(by_names([1, 2, 3, 4])) == (both, [])
    index.apply("a", BlockRemoved((1, 2), "GPU"))
    assert index.matches(asked) == {"b": both["b"]}
    index.apply("a", store([1], None, 1, medium="cpu"))
    assert index.matches(asked)["a"] == Match(3, SIZE, {"CPU": 3})


def test_a_block_offloaded_without_tokens_is_where_it_is_on_the_device():
    offloaded = BlockStored((1, 2, 9), None, encode_value([]), 0, medium="CPU")
    index = index_of(("a", store([1, 2], None, 1, 2)), ("a", offloaded), ("a", offloaded), ("b", offloaded))
    assert index.matches(tokens_of(1, 2)) == {"a": Match(2, SIZE, {"GPU": 2, "CPU": 2})}
    index.apply("a", BlockRemoved((1, 2), "GPU"))
    assert index.matches(tokens_of(1, 2)) == {"a": Match(2, SIZE, {"CPU": 2})}
    index.apply("a", BlockRemoved((1, 2, 9), "CPU"))
    assert (index.longest_prefix(tokens_of(1, 2)), index.nodes, len(index)) == ({}, 0, 3)


def test_a_block_without_tokens_gets_its_place_when_they_come():
    index = index_of(("a", BlockStored((1, 3), None, encode_value([]), 0, medium="CPU")))
    index.apply("a", store([2], 1, 2, medium="CPU"))
    assert (index.longest_prefix(tokens_of(1, 2)), index.nodes, len(index)) == ({}, 0, 3)
    index.apply("a", store([3], 2, 3, medium="CPU"))
    index.apply("a", store([1], None, 1, medium="CPU"))
    assert index.matches(tokens_of(1, 2, 3)) == {"a": Match(3, SIZE, {"CPU": 3})}
    index.apply("a", BlockRemoved((1, 2, 3), "CPU"))
    assert (index.longest_prefix(tokens_of(1)), index.nodes, len(index)) == ({}, 0, 0)


def test_blocks_are_found_by_names_of_all_workers_and_by_those_of_one_alone():
    index = index_of(
        ("a", store([1, 2], None, 1, 2)),
        ("b", store([1], None, 1)),
        ("c", store([b"x"], b"unknown", 1)),
        ("d", store([7, 2], None, 1, 3)),
    )
    one, two = Match(1, SIZE, {"GPU": 1}), Match(2, SIZE, {"GPU": 2})
    assert index.named(by_names([1, 2, 3])) == ({"a": two, "b": one}, ["c", "d"])
    assert index.named(by_names([7, 2])) == ({}, ["c", "d"])
    assert index.named(by_names([2, 1])) == ({"a": two}, ["c", "d"])  # whatever their order
    assert index.named_by("c", by_names([b"x"])) == Match(1, 0, {"GPU": 1})
    assert index.named_by("d", by_names([7, 2])) == two
    assert (
        index.named_by("d", by_names([1, 2]))
        is index.named_by("a", by_names([7]))
        is index.named_by("e", by_names([1]))
        is None
    )
    index.apply("d", BlockRemoved((7, 2)))
    index.apply("c", BlockRemoved((b"x",)))
    assert index.named(by_names([1, 2, 3])) == ({"a": two, "b": one}, [])


def test_a_name_of_ones_own_beside_that_of_the_node():
    index = index_of(("a", store([1], None, 1)), ("a", store([2], None, 1)), ("b", store([1], None, 1)))
    one = Match(1, SIZE, {"GPU": 1})
    assert index.named(by_names([1])) == ({"b": one}, ["a"])
    assert index.named_by("a", by_names([1, 2])) == Match(2, SIZE, {"GPU": 2})
    index.apply("a", BlockRemoved((1,)))
    assert not index.holds("a", 1)
    assert not index.remove("a", 1)
    assert index.named_by("a", by_names([2, 1])) == one
    assert index.longest_prefix(tokens_of(1)) == {"a": 1, "b": 1}
    index.apply("a", BlockRemoved((2,)))
    assert index.longest_prefix(tokens_of(1)) == {"b": 1}


def test_a_nodes_name_goes_with_the_node():
    index = index_of(("a", store([1], None, 1)), ("b", store([2], None, 1)), ("a", BlockRemoved((1,))))
    index.apply("c", store([1], None, 2))  # is taken as long as the node is there
    assert index.named(by_names([1])) == ({}, ["b", "c"])
    index.apply("b", BlockRemoved((2,)))
    index.apply("d", store([1], None, 2))
    assert index.named(by_names([1])) == ({"d": Match(1, SIZE, {"GPU": 1})}, ["c"])
    assert index.named_by("c", by_names([1])) == Match(1, SIZE, {"GPU": 1})
    index.apply("d", store([3, 4], 1, 3, 4))
    index.apply("d", BlockRemoved((1, 3)))  # leaves the nodes behind, and so their names
    assert index.named(by_names([1])) == ({}, ["c"])
    index.apply("e", store([1, 3], None, 2, 3))
    assert index.named(by_names([1, 3, 4]))[0] == {"e": Match(2, SIZE, {"GPU": 2})}


def test_salts_and_adapters_keep_equal_tokens_apart():
    index = index_of(
        ("plain", store([1, 2], None, 1, 2, keys=[None, None])),
        ("salt", store([1, 2], None, 1, 2, keys=[["s"], None])),  # vLLM: in the first block's extra keys
        ("salt", store([3], 2, 3, keys=[None])),
        ("sglang", store([1], None, 1, salt="s")),  # SGLang: a field of every store
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


def test_two_names_for_equal_tokens_are_one_place_until_both_are_gone():
    index = index_of(*[("a", store([name], None, 1, medium=medium)) for name in (1, 2, 3) for medium in (None, "CPU")])
    for name in (2, 1, 3):
        assert index.matches(tokens_of(1)) == {"a": Match(1, SIZE, {"GPU": 1, "CPU": 1})}
        index.apply("a", BlockRemoved((name,)))
        index.apply("a", BlockRemoved((name,), "CPU"))
    assert index.longest_prefix(tokens_of(1)) == {}
    assert (len(index), index.nodes) == (0, 0)


def test_block_sizes_may_differ_from_worker_to_worker_and_within_one():
    index = index_of(
        ("small", store([1, 2, 3], None, 1, 2, 3)),
        ("large", store([1], None, 1, size=8)),
        ("both", store([1, 2], None, 1, 2)),
        ("both", store([3], None, 1, size=8)),
    )
    assert index.longest_prefix(tokens_of(1, size=8)) == {"large": 1, "both": 1, "small": 1}
    assert index.matches(tokens_of(1, size=8))["both"] == Match(1, 8, {"GPU": 1})
    assert index.matches(tokens_of(1, 2)) == {"small": Match(2, 4, {"GPU": 2}), "both": Match(2, 4, {"GPU": 2})}


def test_pairs_of_eagle_are_asked_for_by_plain_tokens():
    tokens = list(range(5))
    pairs = encode_value(list(itertools.pairwise(tokens)))
    index = index_of(("a", BlockStored((1,), None, pairs, 4)))
    assert index.longest_prefix(tokens) == index.longest_prefix(array("I", tokens).tobytes()) == {"a": 1}
    assert index.longest_prefix(tokens[:4]) == {}


def test_tokens_may_be_packed_already():
    index = index_of(("a", store([1, 2], None, 1, 2)))
    packed = array("I", tokens_of(1, 2)).tobytes()
    assert index.longest_prefix(packed) == {"a": 2}
    assert index.longest_prefix(packed[:-1]) == {"a": 1}


def test_blocks_without_their_tokens_are_found_by_name_alone():
    index = index_of(("a", BlockStored((1, 2), None, encode_value([]), 0)), ("a", store([3], 2, 3)))
    assert index.longest_prefix(tokens_of(3)) == {}
    assert index.named_by("a", by_names([1, 2, 3])) == Match(3, 0, {"GPU": 3})
    index.apply("a", BlockRemoved((1, 3)))
    assert len(index) == 1


def test_an_event_that_stores_no_block_changes_nothing():
    index = index_of(("a", store([1], None, 1)), ("a", store([], 1)))
    assert (index.longest_prefix(tokens_of(1)), len(index)) == ({"a": 1}, 1)


def test_an_event_with_unknown_fields_is_one_like_the_others():
    known = store([1], None, 1)
    index = index_of(
        (
            "a",
            {"type": "BlockStored", "new": 1, "token_ids": known.token_ids, "block_size": SIZE}
            | {"block_hashes": (1,), "parent_block_hash": None},
        )
    )
    assert index.longest_prefix(tokens_of(1)) == {"a": 1}


def test_a_name_for_two_blocks_stays_where_it_was_first():
    index = index_of(("a", store([1], None, 1)), ("a", store([1], None, 2)), ("a", store([2], 1, 2)))
    assert index.longest_prefix(tokens_of(1, 2)) == {"a": 2}
    assert index.longest_prefix(tokens_of(2)) == {}
    index.apply("a", AllBlocksCleared())
    index.collect(10)
    assert index.nodes == 0


def test_what_is_cleared_counts_no_more_and_is_freed_in_steps():
    many = range(1, 100)
    index = index_of(("a", store(many, None, *many)), ("b", store([1], None, 1)), ("a", AllBlocksCleared()))
    assert index.longest_prefix(tokens_of(1, 2)) == {"b": 1}
    assert (len(index), index.nodes) == (1, 101)
    index.apply("a", store([7], None, 1))  # a new begin, beside what is left of the old one
    assert index.longest_prefix(tokens_of(1, 2)) == {"a": 1, "b": 1}
    assert index.collect(1)
    for _ in range(2):
        index.clear("b")
    assert not index.collect(1000)
    assert (len(index), index.nodes) == (1, 3)
    index.apply("c", store([7], None, 1))  # takes a bit that was freed
    assert index.longest_prefix(tokens_of(1, 2)) == {"a": 1, "c": 1}


def test_a_prompt_is_read_ahead_some_blocks_at_a_time_and_what_comes_or_goes_then_counts():
    index = index_of(("a", store(range(1, 6), None, *range(1, 6))), piece=1)
    whole, longer = tokens_of(*range(1, 6)), tokens_of(*range(1, 8))
    read, turns = driven(index.read_ahead(whole, blocks=2))
    assert (turns, index.matches(whole, read=read)) == (2, {"a": Match(5, SIZE, {"GPU": 5})})
    read, turns = driven(index.read_ahead(longer, blocks=1))
    index.apply("a", store([6], 5, 6))
    index.apply("b", store([1], None, 1, size=8))
    assert (turns, index.matches(longer, read=read)["a"].blocks) == (0, 6)  # five are known, and the sixth was none
    read, turns = driven(index.read_ahead(tokens_of(1, 9, 3, 4), blocks=1))
    assert turns == 0
    for question, expected in ((range(1, 6), 2), ([1, 9, 3, 4], 1), ([1, 2], 0), ([], 0)):
        assert driven(index.read_ahead_named(by_names(question, 2), blocks=2)) == (None, expected)
    with pytest.raises(ValueError, match="integer from 0"):
        driven(index.read_ahead([-1] * SIZE))


def test_a_prompt_that_comes_again_is_not_read_ahead():
    index = index_of(("a", store(range(1, 9), None, *range(1, 9))), piece=2)
    prompt = tokens_of(*range(1, 9))
    assert [driven(index.read_ahead(prompt, blocks=2))[1] for _ in range(2)] == [3, 0]
    assert index.matches(prompt)["a"].blocks == 8
    index.apply("a", BlockRemoved((8, 7)))
    index.apply("a", store([9], 6, 9))  # where one of them was
    assert index.matches(prompt)["a"].blocks == 6
    assert index.matches(tokens_of(*range(1, 7), 9))["a"].blocks == 7
    index.apply("a", store([7, 8], 6, 7, 8))
    assert [index.matches(prompt)["a"].blocks, len(index.matches(tokens_of(2, 3)))] == [8, 0]
    assert index.matches(prompt, salt="s") == {}


def test_a_prompt_by_names_that_comes_again_is_not_read_ahead():
    index = index_of(("a", store(range(1, 9), None, *range(1, 9))))
    names = by_names(range(1, 9), 2)
    assert [driven(index.read_ahead_named(names, blocks=2))[1] for _ in range(2)] == [3, 0]
    for change, blocks in ((BlockRemoved((8,)), 7), (store([8], 7, 8), 8)):
        index.apply("a", change)
        assert index.named(names)[0]["a"].blocks == blocks
    index.apply("a", BlockRemoved((8, 7)))
    index.apply("a", store([10, 11], 6, 7, 8))  # the places that they had
    assert index.named(names)[0]["a"].blocks == 6
    assert index.named(by_names([*range(1, 7), 10, 11], 2))[0]["a"].blocks == 8
    index.apply("a", store([7, 8], None, 1, 2, size=8))
    assert index.named(names)[0]["a"].blocks == 8
    assert driven(index.read_ahead_named(names, blocks=2))[1] == 0


def test_a_place_that_is_behind_another_block_by_now_is_not_found_there():
    """It has the number and the label that it had."""
    index = index_of(("a", store([1, 3], None, 1, 3)), ("a", store([4], None, 4)), piece=1)
    found = stored(encode_value(tokens_of(2)), SIZE, 1, None, None, None)
    index.store("a", [2], 1, found)
    assert index.matches(tokens_of(1, 2))["a"].blocks == 2
    index.remove("a", 2)
    index.store("a", [5], 4, found)
    assert [index.matches(tokens_of(first, 2))["a"].blocks for first in (1, 4)] == [1, 2]


def test_what_is_kept_of_prompts_has_a_limit():
    index = index_of(("a", store(range(1, 101), None, *range(1, 101))), piece=2, kept=8000)
    for blocks in range(1, 101):
        assert index.matches(tokens_of(*range(1, blocks + 1)))["a"].blocks == blocks
        assert index.paths_size <= 8000
    assert index.paths_size > 6000
    steps = 0
    while index.forget(3):
        steps += 1
    assert (index.paths_size, steps > 3) == (0, True)


def test_a_tree_that_is_emptied_while_a_prompt_is_read_ahead():
    index = index_of(("a", store([1, 2, 3], None, 1, 2, 3)), piece=1)
    ahead, named = (
        index.read_ahead(tokens_of(1, 2, 3), blocks=1),
        index.read_ahead_named(by_names([1, 2, 3], 1), blocks=1),
    )
    next(ahead)
    next(named)
    index.clear("a")
    while index.collect(10):
        pass
    read, _ = driven(ahead)
    assert driven(named) == (None, 0)
    index.apply("b", store([1], None, 1))
    assert index.matches(tokens_of(1, 2, 3), read=read) == {"b": Match(1, SIZE, {"GPU": 1})}


def test_names_of_ones_own_are_freed_in_steps_too():
    index = index_of(
        ("a", store(range(2, 12), 1, *range(2, 12))),  # they wait
        ("b", store(range(20, 24), None, *range(20, 24))),
        ("c", store(range(30, 34), None, *range(20, 24))),  # other names
        *[(worker, AllBlocksCleared()) for worker in "abc"],
    )
    steps = 0
    while index.collect(2):
        steps += 1
    assert steps >= 4
    assert (len(index), index.nodes) == (0, 0)


@pytest.mark.parametrize("tokens", [[-1], [2**32], ["1"], [1.5], [None]])
def test_a_token_that_is_none_is_refused(tokens):
    with pytest.raises(ValueError, match="integer from 0 to 4294967295"):
        index_of(("a", store([1], None, 1, size=1))).longest_prefix(tokens)


# -- against a model: of each worker, the blocks by name and medium, each with its place in a prompt as far as it is known


@dataclass
class Naive:
    blocks: dict = field(default_factory=dict)
    """Worker -> (medium, name) -> (parent, block, path or None)."""

    def store(self, worker, medium, chain, variant, first):
        blocks = self.blocks.setdefault(worker, {})
        content = content_of(worker, variant, chain)
        for at in range(first, len(chain)):
            name, parent = name_of(variant, chain[: at + 1]), name_of(variant, chain[:at]) if at else None
            blocks.setdefault((medium, name), (parent, content[at], None if at else content[:1]))
        changed = True
        while changed:  # whoever's parent has a place has one, too
            changed = False
            for key, (parent, block, path) in list(blocks.items()):
                above = [up for (_, name), (_, _, up) in blocks.items() if name == parent and up]
                if path is None and above:
                    blocks[key] = (parent, block, (*above[0], block))
                    changed = True

    def remove(self, worker, medium, name):
        self.blocks.get(worker, {}).pop((medium, name), None)

    def answer(self, prompt):
        found = {}
        for worker, blocks in self.blocks.items():
            held = [{path for (at, _), (_, _, path) in blocks.items() if at == medium} for medium in MEDIA]
            count = 0
            while count < len(prompt) and any(prompt[: count + 1] in each for each in held):
                count += 1
            if count:
                paths = [prompt[: at + 1] for at in range(count)]
                tiers = {medium: sum(path in each for path in paths) for medium, each in zip(MEDIA, held, strict=True)}
                found[worker] = (count, {medium: n for medium, n in tiers.items() if n})
        return found

    def answer_by_name(self, worker, names):
        held = [{name for at, name in self.blocks.get(worker, ()) if at == medium} for medium in MEDIA]
        count = 0
        while count < len(names) and any(names[count] in each for each in held):
            count += 1
        tiers = {medium: sum(name in each for name in names[:count]) for medium, each in zip(MEDIA, held, strict=True)}
        return count, {medium: n for medium, n in tiers.items() if n}

    def check(self, index, names, prompt):
        """An index says the same of a prompt by these names."""
        matches, others = index.named(prompt)
        assert not matches.keys() & others
        for worker in index.workers:
            match = index.named_by(worker, prompt)
            assert ((match.blocks, match.tiers) if match else (0, {})) == self.answer_by_name(worker, names)
            assert worker in others or matches.get(worker) == match


def name_of(variant, chain):
    return repr((variant, chain)).encode()


def content_of(worker, variant, chain):
    """What a worker calls by such names: of the last variant it is another thing for one of them."""
    return tuple(3 - block for block in chain) if (worker, variant) == ("b", 2) else chain


SHORT = [chain for length in (1, 2) for chain in itertools.product((1, 2), repeat=length)]
NAMES = [name_of(variant, chain) for variant in range(3) for chain in SHORT]


class Ahead:
    """A prompt that is read ahead, while blocks come and go."""

    def __init__(self, index, prompt):
        self.prompt = prompt
        self._work = index.read_ahead(tokens_of(*prompt), blocks=1)
        names = [name_of(0, prompt[: at + 1]) for at in range(len(prompt))]
        self._named = index.read_ahead_named(by_names(names, 1), blocks=1)
        self._read = None

    def step(self):
        next(self._named, None)
        if self._read is None:
            try:
                next(self._work)
            except StopIteration as done:
                self._read = done.value

    def whole(self):
        while self._read is None:
            self.step()
        return self._read


MEDIA = ("GPU", "CPU")
WORKERS = st.sampled_from("abc")
CHAINS = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=4).map(tuple)
VARIANTS = st.integers(0, 2)
STEPS = st.one_of(
    st.tuples(st.just("store"), WORKERS, st.sampled_from(MEDIA), CHAINS, VARIANTS, st.sampled_from((0, 0, 0, 1, 3))),
    st.tuples(st.just("remove"), WORKERS, st.sampled_from(MEDIA), CHAINS, VARIANTS),
    st.tuples(st.just("clear"), WORKERS),
    st.tuples(st.just("collect"), st.integers(1, 5)),
)


@given(
    st.lists(STEPS, min_size=12, max_size=60),
    st.lists(CHAINS, min_size=1, max_size=4),
    st.lists(st.lists(st.tuples(VARIANTS, CHAINS), max_size=4), max_size=4),
    st.integers(0, 60),
    st.integers(1, 3),
)
def test_it_answers_as_a_plain_model_does(steps, prompts, questions, begins, piece):
    index: PrefixIndex[str] = PrefixIndex(piece)
    model = Naive()
    ahead: list[Ahead] = []
    along = [
        [name_of(variant, prompt[: at + 1]) for at in range(len(prompt))] for prompt in prompts for variant in range(3)
    ]
    again = [(names, by_names(names, piece)) for names in along]
    for at, (kind, *step) in enumerate(steps):
        if at >= begins and len(ahead) < len(prompts):
            ahead.append(Ahead(index, prompts[len(ahead)]))
        for each in ahead:
            each.step()
        prompt = prompts[at % len(prompts)]  # it is asked for again and again
        answer = index.matches(tokens_of(*prompt))
        assert {worker: (match.blocks, match.tiers) for worker, match in answer.items()} == model.answer(prompt)
        model.check(index, *again[at % len(again)])
        if kind == "store":
            worker, medium, chain, variant, first = step
            first = min(first, len(chain) - 1)
            names = [name_of(variant, chain[: at + 1]) for at in range(len(chain))]
            parent = names[first - 1] if first else None
            content = content_of(worker, variant, chain)
            index.apply(worker, store(names[first:], parent, *content[first:], medium=medium))
            model.store(worker, medium, chain, variant, first)
        elif kind == "remove":
            worker, medium, chain, variant = step
            index.apply(worker, BlockRemoved((name_of(variant, chain),), medium))
            model.remove(worker, medium, name_of(variant, chain))
        elif kind == "clear":
            index.clear(step[0])
            model.blocks.pop(step[0], None)
        else:
            index.collect(step[0])
    assert len(index) == sum(map(len, model.blocks.values()))
    for worker, blocks in model.blocks.items():
        for medium, name in itertools.product(MEDIA, NAMES):
            assert index.holds(worker, name, medium) == ((medium, name) in blocks)
    for prompt in prompts:
        expected = model.answer(prompt)
        answer = index.matches(tokens_of(*prompt))
        assert {worker: (match.blocks, match.tiers) for worker, match in answer.items()} == expected
        assert index.longest_prefix(tokens_of(*prompt)) == {worker: count for worker, (count, _) in expected.items()}
    for each in ahead:
        answer = index.matches(tokens_of(*each.prompt), read=each.whole())
        assert {worker: (match.blocks, match.tiers) for worker, match in answer.items()} == model.answer(each.prompt)
    for names in along + [[name_of(variant, chain) for variant, chain in question] for question in questions]:
        model.check(index, names, by_names(names, piece))
    for worker in model.blocks:
        index.clear(worker)
    while index.collect(7):
        pass
    assert (index.nodes, len(index)) == (0, 0)
