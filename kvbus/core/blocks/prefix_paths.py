"""The places of prompts that were asked for lately: a prompt that comes again needs no walk down the tree.

A walk reads at each node where the next one is, and waits for memory each time. Of nodes that are known the processor
reads many at once, and the tokens of many blocks are compared in one go. What is kept only says where to look: a node
counts if it is still behind the one before it, with the label it had.

Names are found again if they are the very objects that were asked for before (:class:`NamedBlocks`): to compare others
with those of an earlier question takes as long as the walk.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Sequence
from typing import Any, Final, NamedTuple

from kvbus.core.blocks.prefix_labels import Label, Shape, Tokens, divided, whole, width_of
from kvbus.core.blocks.prefix_tree import PrefixTree
from kvbus.core.types import Hash

PIECE: Final = 256
"""Blocks whose places are kept together: a conversation's next prompt begins as the one before."""

KEPT: Final = 16 * 1024 * 1024
"""Bytes of what is kept: of forty prompts of 2,048 blocks of 16 tokens."""

END: Final = 64
"""Bytes of each end of a piece's tokens by which, and by their length and the node before, it is found."""

_BLOCK: Final = 110
"""Bytes that a block takes beside its tokens, about: numbers, and a label that the tree may have no more."""

_ENTRY: Final = 600
"""Bytes that a piece takes besides, about."""


class Piece(NamedTuple):
    """Blocks that follow on each other.

    Attributes:
        tokens: theirs.
        nodes: where they were.
        labels: these nodes', the tree's own objects: whether they are still there is seen without a look inside.
    """

    tokens: bytes
    nodes: list[int]
    labels: list[Label]


class Prompt:
    """A prompt's whole blocks, with the salt if there is one.

    Raises:
        ValueError: a token id is none of 32 bits.
    """

    def __init__(self, tokens: Tokens, shape: Shape, salt: str | None) -> None:
        self.width = width_of(shape)
        """Bytes of a block."""
        self.tokens = whole(tokens, shape)
        self.salt = salt
        self.known: dict[int, Piece] = {}
        """Pieces that have been found, by their first byte."""


class NamedBlocks:
    """Blocks that follow on each other, by their names, and where they were when they were asked for last.

    Args:
        names: one at least. Whoever asks for them again with this object has them found without a walk.
    """

    def __init__(self, names: Sequence[Hash]) -> None:
        self.names = names
        self._nodes: list[int] = []
        """Theirs; empty: not all of them were there."""
        self._found: list[Hash | None] = []
        """These nodes' names, the tree's own objects: whether they are still there is seen without a look inside."""

    def path(self, tree: PrefixTree, node: int) -> list[int]:
        """Their nodes, as far as there are any; the first is most likely to be below this node."""
        if not self._nodes or not tree.still_named(self._nodes, self._found):
            nodes = tree.path_named(node, self.names)
            if len(nodes) < len(self.names):
                return nodes
            self._nodes, self._found = nodes, tree.names(nodes)
        return self._nodes

    def known(self, tree: PrefixTree) -> int:
        """The last of their nodes, if it is known where they all were and that one still is; else 0."""
        return self._nodes[-1] if self._nodes and tree.still_named(self._nodes[-1:], self._found[-1:]) else 0


def named_path(tree: PrefixTree, prompt: Sequence[NamedBlocks]) -> list[int]:
    """The nodes of a prompt by the names of its blocks, as far as there are any."""
    path: list[int] = []
    for each in prompt:
        nodes = each.path(tree, path[-1] if path else 0)
        path += nodes
        if len(nodes) < len(each.names):
            break
    return path


def named_ahead(tree: PrefixTree, prompt: Sequence[NamedBlocks], blocks: int) -> Generator[None, None, None]:
    """Walk to what is not known, so many blocks at a time; the last of the prompt is left to :func:`named_path`."""
    node = walked = 0
    for each in prompt[:-1]:
        known = each.known(tree)
        if not known:
            path = each.path(tree, node)
            walked += len(path)
            if len(path) < len(each.names):
                break
            known = path[-1]
        node = known
        if walked >= blocks:
            yield
            walked = 0
    if walked:
        yield


class Paths:
    """Finds prompts in a tree, and keeps where they were: of too many those go first that have not come for longest.

    Args:
        tree: where they are.
        piece: blocks that are kept together.
        kept: bytes of all that is kept, about.
    """

    def __init__(self, tree: PrefixTree, piece: int = PIECE, kept: int = KEPT) -> None:
        self._tree = tree
        self._piece = piece
        self._kept = kept
        self._known: OrderedDict[Any, Piece] = OrderedDict()
        self.size = 0
        """Bytes of what is kept, about."""

    def of(self, node: int, prompt: Prompt) -> list[int]:
        """The nodes of a prompt below one, as far as there are any."""
        path: list[int] = []
        step, end = self._piece * prompt.width, len(prompt.tokens)
        for first in range(0, end, step):
            last = min(first + step, end)
            known = prompt.known.get(first) or self._find(node, prompt, first, last)
            if known is not None and self._tree.still(node, known.nodes, known.labels):
                nodes = known.nodes
            else:
                nodes = self._walk(node, prompt, first, last)
            path += nodes
            if len(nodes) * prompt.width < last - first:
                break
            node = nodes[-1]
        return path

    def ahead(self, node: int, prompt: Prompt, blocks: int) -> Generator[None, None, None]:
        """Find what is known, walk to the rest, so many blocks at a time; so many last ones are left to :meth:`of`."""
        walked = 0
        step, end = self._piece * prompt.width, len(prompt.tokens)
        for first in range(0, end, step):
            last = min(first + step, end)
            known = self._find(node, prompt, first, last)
            if known is None:
                if first >= end - blocks * prompt.width:
                    break
                nodes = self._walk(node, prompt, first, last)
                walked += len(nodes)
                if len(nodes) * prompt.width < last - first:
                    break
            else:
                prompt.known[first] = known
                nodes = known.nodes
            node = nodes[-1]
            if walked >= blocks:
                yield
                walked = 0
        if walked:
            yield

    def forget(self, blocks: int) -> bool:
        """Forget about so many blocks, those that have not come for longest; whether there are more."""
        while self._known and blocks > 0:
            blocks -= len(self._drop().nodes)
        return bool(self._known)

    def _drop(self) -> Piece:
        """Forget the piece that has not come for longest."""
        piece = self._known.popitem(last=False)[1]
        self.size -= _size(piece)
        return piece

    def _find(self, node: int, prompt: Prompt, first: int, last: int) -> Piece | None:
        key = _key(node, prompt, first, last)
        known = self._known.get(key)
        if known is None or not prompt.tokens.startswith(known.tokens, first):  # nothing is copied for that
            return None
        self._known.move_to_end(key)
        return known

    def _walk(self, node: int, prompt: Prompt, first: int, last: int) -> list[int]:
        tokens = prompt.tokens[first:last]
        nodes = self._tree.path(node, divided(tokens, prompt.width, None if first else prompt.salt))
        if len(nodes) * prompt.width == len(tokens):
            self._keep(_key(node, prompt, first, last), Piece(tokens, nodes, self._tree.labels(nodes)))
        return nodes

    def _keep(self, key: Any, piece: Piece) -> None:
        """Keep a piece, instead of one with the same key."""
        before = self._known.pop(key, None)
        self.size += _size(piece) - (0 if before is None else _size(before))
        self._known[key] = piece
        while self.size > self._kept:
            self._drop()


def _key(node: int, prompt: Prompt, first: int, last: int) -> Any:
    """The node before, the length and both ends of the tokens, and the salt that is the first block's."""
    head, tail = prompt.tokens[first : min(first + END, last)], prompt.tokens[max(first, last - END) : last]
    return node, last - first, head, tail, None if first else prompt.salt


def _size(piece: Piece) -> int:
    return 2 * len(piece.tokens) + _BLOCK * len(piece.nodes) + _ENTRY
