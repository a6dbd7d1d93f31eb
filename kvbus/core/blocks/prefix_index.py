"""Which worker holds the longest prefix of a prompt: the blocks of many workers as one tree.

A node is a place in a prompt: the tokens of one block behind those of its parent. Workers that hold a block there are
bits of one integer, so that a question walks down once for all of them. Engines name blocks as they like, and no two
need agree. Where they do, names are the nodes', and a question by names is for all workers as well.

A block whose parent is not known waits, and gets its node when the parent comes. A parent that goes before its children
leaves its node behind, so that they count again when it is back. A worker's blocks on several media are blocks of one
prefix. Blocks of one worker with equal tokens behind equal parents are one place, whatever makes their names differ.

It costs some 220 bytes for each block at a place of its own, nothing for a further worker's there that has the same
name for it and 180 for one that has another, beside the names (CPython 3.11, 16 tokens a block), and up to 16 MiB for
what :meth:`PrefixIndex.matches` was asked for lately. What is removed is free at once, what is cleared in steps
(:meth:`PrefixIndex.collect`).
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Sequence
from itertools import chain
from typing import Any, Final, Generic, NamedTuple, TypeVar

from msgspec import UNSET

from kvbus.core.blocks.prefix_holder import NOWHERE, Holder, OwnNames
from kvbus.core.blocks.prefix_labels import Adapter, Label, Shape, Tokens, adapter, asked, stored
from kvbus.core.blocks.prefix_paths import KEPT, PIECE, NamedBlocks, Paths, Prompt, named_ahead, named_path
from kvbus.core.blocks.prefix_tree import PrefixTree, count, each_bit
from kvbus.core.types import DEVICE_MEDIUM, Hash, medium_key
from kvbus.core.wire.carried import readable
from kvbus.core.wire.codec import AnyEvent, clears_all
from kvbus.core.wire.parts import value
from kvbus.core.wire.schema import AllBlocksCleared, BlockRemoved, BlockStored

W = TypeVar("W", bound=Hashable)

MAX_SETS: Final = 256
"""Sets of workers that are remembered."""

AHEAD: Final = 1024
"""Blocks of a prompt that are read ahead at a time."""

COLLECTED: Final = 2
"""Cleared blocks that are freed for each block that comes."""


Read = dict[Shape, Prompt]
"""By the size of blocks: a prompt, and what of it is known."""


class Match(NamedTuple):
    """What a worker holds of a prefix.

    Attributes:
        blocks: whole blocks from the prefix's beginning, without a hole.
        block_size: tokens of one.
        tiers: by medium, how many of them are there.
    """

    blocks: int
    block_size: int
    tiers: dict[str, int]


def medium_of(event: AnyEvent) -> str:
    """Where an event's blocks are, as an index has it."""
    medium = value(event, "medium")
    return medium_key(medium) or str(medium).upper()


class PrefixIndex(Generic[W]):
    """The live blocks of many workers, by what they hold.

    Args:
        piece: blocks of a prompt whose places are kept together.
        kept: bytes of such places, about.
    """

    def __init__(self, piece: int = PIECE, kept: int = KEPT) -> None:
        self._holders: dict[W, Holder] = {}
        self._workers: dict[int, W] = {}
        """By bit number, of live workers."""
        self._live = 0
        """Their bits."""
        self._cleared = 0
        """Bits that are not counted any more, and may still be in nodes."""
        self._leaving = 0
        """Those of them that are taken out of the nodes, from :attr:`_next` on."""
        self._next = 0
        self._left: list[OwnNames] = []
        """Of cleared workers, to be freed."""
        self._sets: dict[int, list[W]] = {}
        """Workers by their bits."""
        self._bits = 0
        self._free_bits: list[int] = []
        self._tree = PrefixTree()
        self._paths = Paths(self._tree, piece, kept)

    def __len__(self) -> int:
        """Blocks of all workers on all media."""
        return sum(holder.size for holder in self._holders.values())

    @property
    def nodes(self) -> int:
        """Places there are."""
        return self._tree.nodes

    @property
    def paths_size(self) -> int:
        """Bytes of the places that are kept, about."""
        return self._paths.size

    # -- what workers say ------------------------------------------------------------------------------------------

    def apply(self, worker: W, event: AnyEvent) -> None:
        """Take in one event of a worker. Groups are not told apart: give it the events of one."""
        if isinstance(event, AllBlocksCleared):
            if clears_all(event):
                self.clear(worker)
            elif worker in self._holders:
                self._holders[worker].clear_medium(medium_of(event))
            return
        if isinstance(event, dict):  # with fields that no struct knows
            event = readable(event)
            event = BlockStored(**{name: event[name] for name in BlockStored.__struct_fields__ if name in event})
        where = medium_of(event)
        if isinstance(event, BlockRemoved):
            for block in event.block_hashes:
                self.remove(worker, block, where)
            return
        parent = None if event.parent_block_hash is UNSET else event.parent_block_hash
        lora = adapter(event.lora_id, event.lora_name)
        found = stored(
            event.token_ids,
            event.block_size,
            len(event.block_hashes),
            lora if isinstance(lora, str) else None,
            event.extra_keys,
            event.cache_salt if parent is None else None,
        )
        self.store(worker, event.block_hashes, parent, found, lora=lora, medium=where)

    def store(
        self,
        worker: W,
        hashes: Sequence[Hash],
        parent: Hash | None,
        found: tuple[Shape, Sequence[Label]] | None,
        *,
        lora: Adapter = None,
        medium: str = DEVICE_MEDIUM,
    ) -> None:
        """A worker holds these blocks, each behind the one before it. One that it holds already stays where it is.

        Args:
            worker: whose they are.
            hashes: their names.
            parent: the name of the block before the first; None for the beginning of a prompt.
            found: what :func:`~kvbus.core.blocks.prefix_labels.stored` made of them; None: they get no place but one
                that they have on another medium.
            lora: the adapter.
            medium: where they are.
        """
        if self._collecting:
            self.collect(COLLECTED * len(hashes))
        holder, tree = self._holders.get(worker), self._tree
        if holder is None:
            holder = self._begin(worker)
        if found is None:
            for block in hashes:  # an offloaded block is where it is on another medium
                named = tree.named(block)
                place = holder.at(block, medium, named)
                if place is None:
                    if node := holder.node(block, named):
                        holder.put(block, medium, node)
                    else:
                        holder.put_nowhere(block, medium)
            return
        shape, labels = found
        root = 0
        if parent is not None:
            node = holder.node(parent, tree.named(parent))
        else:
            node = root = tree.root(lora, shape)
        for block, label in zip(hashes, labels, strict=True):
            named = tree.named(block)
            place = holder.at(block, medium, named)
            if place is None or place is NOWHERE:
                if place is NOWHERE:
                    holder.forget(block, medium)
                if node:
                    node = tree.place(node, label, block, named)
                    holder.put(block, medium, node)
                    if holder.waiting:
                        self._join(holder, block, node)
                elif parent is not None:  # only a block behind another has to wait
                    holder.wait(block, medium, parent, label)
            else:
                node = place if isinstance(place, int) else 0
            parent = block
        if root:
            tree.prune(root)  # where every block was known already

    def remove(self, worker: W, block: Hash, medium: str = DEVICE_MEDIUM) -> bool:
        """A worker does not hold a block on a medium any more; False if it was not known to."""
        holder = self._holders.get(worker)
        return holder is not None and holder.remove(block, medium)

    def holds(self, worker: W, block: Hash, medium: str = DEVICE_MEDIUM) -> bool:
        """Whether a worker holds a block on a medium."""
        holder = self._holders.get(worker)
        return holder is not None and holder.at(block, medium, self._tree.named(block)) is not None

    def clear(self, worker: W) -> None:
        """A worker holds nothing any more. Its blocks are freed as others come, or by :meth:`collect`."""
        holder = self._holders.pop(worker, None)
        if holder is not None:
            del self._workers[holder.bit.bit_length() - 1]
            self._live ^= holder.bit
            self._sets.clear()
            self._cleared |= holder.bit
            self._left += holder.own.values()

    def collect(self, most: int) -> bool:
        """Free about so many blocks that were cleared; whether there are more."""
        while self._left and most > 0:
            most = self._left[-1].free(most)
            if not self._left[-1].names.size:
                self._left.pop()
        while self._cleared and most > 0:
            if not self._next:
                self._leaving = self._cleared
            self._next, most = self._tree.let_all_go(self._leaving, self._next, most)
            if not self._next:
                self._cleared ^= self._leaving
                self._free_bits += each_bit(self._leaving)
        self._tree.shrink(most)
        return self._collecting

    @property
    def _collecting(self) -> bool:
        return bool(self._cleared or self._left or self._tree.shrinking)

    # -- questions -------------------------------------------------------------------------------------------------

    def longest_prefix(self, tokens: Tokens, *, lora: Adapter = None, salt: str | None = None) -> dict[W, int]:
        """How many blocks of a prompt each worker holds from its beginning on, where it holds any; the most first.

        Raises:
            ValueError: a token id is none of 32 bits.
        """
        trees = self._tree.roots(lora)
        if len(trees) > 1:
            return {worker: match.blocks for worker, match in self.matches(tokens, lora=lora, salt=salt).items()}
        found: dict[W, int] = {}
        for node, shape in trees:
            path = self._tree.path(node, asked(tokens, shape, salt))
            for bits, blocks in self._tree.ends(path, self._live):
                for worker in self._sets.get(bits) or self._workers_of(bits):
                    found[worker] = blocks
        return found

    def matches(
        self, tokens: Tokens, *, lora: Adapter = None, salt: str | None = None, read: Read | None = None
    ) -> dict[W, Match]:
        """The same with tiers. Of a worker with blocks of several sizes, those that cover the most tokens.

        Args:
            tokens: the prompt.
            lora: the adapter.
            salt: the cache salt.
            read: what :meth:`read_ahead` made of these.

        Raises:
            ValueError: a token id is none of 32 bits.
        """
        found: dict[W, Match] = {}
        for root, shape in self._tree.roots(lora):
            prompt = None if read is None else read.get(shape)
            path = self._paths.of(root, prompt or Prompt(tokens, shape, salt))
            ended = self._ended(path, self._live, shape[0])
            if not found:
                found = dict(ended)
                continue
            for worker, match in ended:
                other = found.get(worker)
                if other is None or _tokens((worker, other)) < _tokens((worker, match)):
                    found[worker] = match
            found = dict(sorted(found.items(), key=_tokens, reverse=True))
        return found

    def read_ahead(
        self, tokens: Tokens, *, lora: Adapter = None, salt: str | None = None, blocks: int = AHEAD
    ) -> Generator[None, None, Read]:
        """Get ready for :meth:`matches`, so many blocks at a time; up to so many last ones are left to it.

        Most of what a look-up takes is that places of blocks are in no cache of the processor. So they are looked up
        before, unless they are known from a prompt that began alike.

        Raises:
            ValueError: a token id is none of 32 bits.
        """
        read: Read = {}
        for root, shape in self._tree.roots(lora):
            read[shape] = prompt = Prompt(tokens, shape, salt)
            yield from self._paths.ahead(root, prompt, blocks)
        return read

    def read_ahead_named(self, prompt: Sequence[NamedBlocks], blocks: int = AHEAD) -> Generator[None, None, None]:
        """The same for :meth:`named`."""
        return named_ahead(self._tree, prompt, blocks)

    def named(self, prompt: Sequence[NamedBlocks]) -> tuple[dict[W, Match], list[W]]:
        """How many of these blocks, by their names, each worker holds from the first on, where it holds any.

        Beside them the workers with names of their own, which are left out: for each of them :meth:`named_by` says it.
        """
        own = [(worker, holder.bit) for worker, holder in self._holders.items() if holder.own]
        path = named_path(self._tree, prompt)
        found = self._ended(path, self._live ^ sum(bit for _, bit in own), self._tree.size_at(path[0] if path else 0))
        return dict(found), [worker for worker, _ in own]

    def named_by(self, worker: W, prompt: Sequence[NamedBlocks]) -> Match | None:
        """The same of one worker, by its own names for them; None if it holds none."""
        holder = self._holders.get(worker)
        if holder is None:
            return None
        blocks = node = 0
        tiers: dict[str, int] = {}
        for block in chain.from_iterable(each.names for each in prompt):
            media = holder.media(block)
            if not media:
                break
            if not blocks:
                node = holder.node(block, self._tree.named(block))
            blocks += 1
            for medium in media:
                tiers[medium] = tiers.get(medium, 0) + 1
        return Match(blocks, self._tree.size_at(node), tiers) if blocks else None

    def _ended(self, path: Sequence[int], alive: int, size: int) -> list[tuple[W, Match]]:
        """What of a path of blocks of some size each of these workers holds, the most first."""
        ends = self._tree.ends(path, alive)
        tiers = self._tree.tiers(path, ends) if self._tree.tiered else {}
        found = []
        for bits, blocks in ends:
            match = Match(blocks, size, {DEVICE_MEDIUM: blocks})
            for worker in self._workers_of(bits):
                if tiers:
                    bit = self._holders[worker].bit
                    match = match._replace(tiers=_some({medium: count(of, bit) for medium, of in tiers.items()}))
                found.append((worker, match))
        return found

    def forget(self, blocks: int) -> bool:
        """Forget where about so many blocks of prompts were; whether there are more of which it is known."""
        return self._paths.forget(blocks)

    @property
    def workers(self) -> list[W]:
        """Those that have said anything since they were last cleared."""
        return list(self._holders)

    def _workers_of(self, bits: int) -> list[W]:
        """The workers of these bits; remembered, since many prompts begin alike."""
        found = self._sets.get(bits)
        if found is None:
            found = [self._workers[bit.bit_length() - 1] for bit in each_bit(bits)]
            if len(self._sets) >= MAX_SETS:
                self._sets.clear()
            self._sets[bits] = found
        return found

    # -- places ----------------------------------------------------------------------------------------------------

    def _begin(self, worker: W) -> Holder:
        if self._free_bits:
            bit = self._free_bits.pop()
        else:
            bit = 1 << self._bits
            self._bits += 1
        self._live |= bit
        self._sets.clear()
        self._workers[bit.bit_length() - 1] = worker
        holder = self._holders[worker] = Holder(self._tree, bit)
        return holder

    def _join(self, holder: Holder, block: Hash, node: int) -> None:
        """A block has got a place: so do those that wait for it, and those that wait for them."""
        placed = [(block, node)]
        while placed:
            parent, above = placed.pop()
            for (medium, child), label in holder.waiting.pop(parent, {}).items():
                holder.forget(child, medium)
                below = self._tree.place(above, label, child, self._tree.named(child))
                holder.put(child, medium, below)
                placed.append((child, below))


def _tokens(found: tuple[Any, Match]) -> int:
    return found[1].blocks * found[1].block_size


def _some(tiers: dict[str, int]) -> dict[str, int]:
    return {medium: count for medium, count in tiers.items() if count}
