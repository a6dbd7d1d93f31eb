"""Radix nodes: stores that fork split a node, removals of a part split it too."""

from kvbus.tools.sim.cache import make_block
from kvbus.tools.sim.nodes import RadixNodes


def chain(text, parent=None):
    """One block a letter."""
    blocks = []
    for letter in text:
        parent = make_block(parent, [ord(letter)])
        blocks.append(parent)
    return tuple(blocks)


def short(changes):
    return [("+" if stored else "-") + "".join(chr(b.tokens[0]) for b in run) for stored, run in changes]


def test_a_store_below_a_nodes_end_is_a_node_of_its_own():
    nodes = RadixNodes()
    first = chain("abc")
    assert short(nodes.store(first)) == ["+abc"]
    assert short(nodes.store(chain("de", first[-1]))) == ["+de"]


def test_a_store_below_a_nodes_middle_splits_it():
    nodes = RadixNodes()
    first = chain("abc")
    list(nodes.store(first))
    assert short(nodes.store(chain("xy", first[0]))) == ["-abc", "+a", "+bc", "+xy"]


def test_a_whole_node_goes_at_once_and_a_part_of_it_after_a_split():
    nodes = RadixNodes()
    first = chain("abcd")
    list(nodes.store(first))
    assert short(nodes.remove(first[:1:-1])) == ["-abcd", "+ab", "+cd", "-cd"]
    assert short(nodes.remove(first[1::-1])) == ["-ab"]


def test_equal_content_is_the_same_block_whoever_made_it():
    nodes = RadixNodes()
    list(nodes.store(chain("abc")))
    again = chain("abc")
    assert short(nodes.store(chain("x", again[2]))) == ["+x"]
    assert short(nodes.store(chain("y", again[1]))) == ["-abc", "+ab", "+c", "+y"]
