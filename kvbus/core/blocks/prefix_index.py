"""Which worker holds the longest prefix of a prompt: the blocks of many workers as one tree.

A node is a place in a prompt: the tokens of one block behind those of its parent. Workers that hold a block there are
bits of one integer, so that a question walks down once for all of them. Engines name blocks as they like, and no two
need agree: names lead to nodes, and questions go by tokens.

A block whose parent is not known waits, and gets its node when the parent comes. A parent that goes before its children
leaves its node behind, so that they count again when it is back. A worker's blocks on several media are blocks of one
prefix. Blocks of one worker with equal tokens behind equal parents are one place, whatever makes their names differ.

It costs some 210 bytes for each block at a place of its own and 60 for each further worker's there, beside the names
(CPython 3.11, 16 tokens a block), and 2 kB for each medium of a worker. What is removed is free at once, what is
cleared in steps (:meth:`PrefixIndex.collect`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

from msgspec import UNSET

from kvbus.core.blocks.names import Names
from kvbus.core.blocks.prefix_labels import Adapter, Label, Shape, Tokens, adapter, asked, stored
from kvbus.core.blocks.prefix_tree import PrefixTree, count
from kvbus.core.types import DEVICE_MEDIUM, Hash, medium_key
from kvbus.core.wire.codec import AnyEvent
from kvbus.core.wire.parts import value
from kvbus.core.wire.schema import AllBlocksCleared, BlockRemoved, BlockStored

W = TypeVar("W", bound=Hashable)

MAX_SETS: Final = 256
"""Sets of workers that are remembered."""

COLLECTED: Final = 2
"""Cleared blocks that are freed for each block that comes."""


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


class _Waiting(NamedTuple):
    """A block whose parent has no place yet."""

    parent: Hash | None
    label: Label


_NOWHERE: Final = _Waiting(None, b"")
"""A block whose tokens are not known."""


class _Holder:
    """A worker's blocks since it was last cleared."""

    __slots__ = ("bit", "more", "places", "waiting")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.places: dict[str, Names[int | _Waiting]] = {}
        """By medium and name: the node."""
        self.waiting: dict[Hash, set[tuple[str, Hash]]] = {}
        """Blocks that wait, by their parent."""
        self.more: dict[tuple[int, str], int] = {}
        """Names beyond the first that lead to one node."""


class PrefixIndex(Generic[W]):
    """The live blocks of many workers, by what they hold."""

    def __init__(self) -> None:
        self._holders: dict[W, _Holder] = {}
        self._workers: dict[int, W] = {}
        """By bit number, of live workers."""
        self._live = 0
        """Their bits."""
        self._cleared: list[_Holder] = []
        """Holders whose bits are not counted any more, and are still in nodes."""
        self._sets: dict[int, list[W]] = {}
        """Workers by their bits."""
        self._bits = 0
        self._free_bits: list[int] = []
        self._tree = PrefixTree()

    def __len__(self) -> int:
        """Blocks of all workers on all media."""
        return sum(places.size for holder in self._holders.values() for places in holder.places.values())

    @property
    def nodes(self) -> int:
        """Places there are."""
        return self._tree.nodes

    # -- what workers say ------------------------------------------------------------------------------------------

    def apply(self, worker: W, event: AnyEvent) -> None:
        """Take in one event of a worker. Groups are not told apart: give it the events of one."""
        if isinstance(event, AllBlocksCleared):
            self.clear(worker)
            return
        if isinstance(event, dict):  # with fields that no struct knows
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
        if self._cleared or self._tree.shrinking:
            self.collect(COLLECTED * len(hashes))
        holder = self._holders.get(worker)
        if holder is None:
            holder = self._begin(worker)
        places = holder.places.get(medium)
        if places is None:
            places = holder.places[medium] = Names()
        if found is None:
            for block in hashes:  # an offloaded block is where it is on another medium
                if places.get(block) is None:
                    if node := self._place(holder, block):
                        self._put(holder, block, medium, places, node)
                    else:
                        places.put(block, _NOWHERE)
            return
        shape, labels = found
        root = 0
        if parent is not None:
            node = self._place(holder, parent)
        else:
            node = root = self._tree.root(lora, shape)
        for block, label in zip(hashes, labels, strict=True):
            place = places.get(block)
            if place is None or place is _NOWHERE:
                if node:
                    node = self._tree.child(node, label)
                    self._put(holder, block, medium, places, node)
                    if holder.waiting:
                        self._join(holder, block, node)
                else:
                    places.put(block, _Waiting(parent, label))
                    holder.waiting.setdefault(parent, set()).add((medium, block))  # type: ignore[arg-type]
            else:
                node = place if isinstance(place, int) else 0
            parent = block
        if root:
            self._tree.prune(root)  # where every block was known already

    def remove(self, worker: W, block: Hash, medium: str = DEVICE_MEDIUM) -> bool:
        """A worker does not hold a block on a medium any more; False if it was not known to."""
        holder = self._holders.get(worker)
        places = None if holder is None else holder.places.get(medium)
        place = None if places is None else places.pop(block)
        if holder is None or place is None:
            return False
        if isinstance(place, int):
            self._take(holder, medium, place)
        elif place.parent is not None:
            waiting = holder.waiting[place.parent]
            waiting.remove((medium, block))
            if not waiting:
                del holder.waiting[place.parent]
        return True

    def holds(self, worker: W, block: Hash, medium: str = DEVICE_MEDIUM) -> bool:
        """Whether a worker holds a block on a medium."""
        holder = self._holders.get(worker)
        places = None if holder is None else holder.places.get(medium)
        return places is not None and places.get(block) is not None

    def clear(self, worker: W) -> None:
        """A worker holds nothing any more. Its blocks are freed as others come, or by :meth:`collect`."""
        holder = self._holders.pop(worker, None)
        if holder is not None:
            del self._workers[holder.bit.bit_length() - 1]
            self._live ^= holder.bit
            self._sets.clear()
            holder.waiting.clear()
            self._cleared.append(holder)

    def collect(self, most: int) -> bool:
        """Free about so many blocks that were cleared; whether there are more."""
        while self._cleared and most > 0:
            holder = self._cleared[-1]
            if not holder.places:
                self._cleared.pop()
                self._free_bits.append(holder.bit)
                continue
            medium, places = next(iter(holder.places.items()))
            while places.size and most > 0:
                place = places.pop_any()
                if isinstance(place, int):
                    self._take(holder, medium, place)
                most -= 1
            if not places.size:
                del holder.places[medium]
        return self._tree.shrink(most) or bool(self._cleared)

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
            ends, _ = self._tree.walk(node, asked(tokens, shape, salt), self._live)
            for bits, blocks in ends:
                for worker in self._sets.get(bits) or self._workers_of(bits):
                    found[worker] = blocks
        return found

    def matches(self, tokens: Tokens, *, lora: Adapter = None, salt: str | None = None) -> dict[W, Match]:
        """The same with tiers. Of a worker with blocks of several sizes, those that cover the most tokens.

        Raises:
            ValueError: a token id is none of 32 bits.
        """
        found: dict[W, Match] = {}
        for node, shape in self._tree.roots(lora):
            ends, path = self._tree.walk(node, asked(tokens, shape, salt), self._live)
            tiers = self._tree.tiers(path, ends)
            for bits, blocks in ends:
                match = Match(blocks, shape[0], {DEVICE_MEDIUM: blocks})
                for worker in self._workers_of(bits):
                    known = found.get(worker)
                    if known is not None and _tokens((worker, known)) >= _tokens((worker, match)):
                        continue
                    if path:
                        bit = self._holders[worker].bit
                        match = match._replace(tiers=_some({medium: count(of, bit) for medium, of in tiers.items()}))
                    found[worker] = match
        return dict(sorted(found.items(), key=_tokens, reverse=True))

    def named(self, worker: W, hashes: Sequence[Hash]) -> Match | None:
        """How many of these blocks, by the worker's own names for them, it holds from the first on; None for none."""
        holder = self._holders.get(worker)
        if holder is None:
            return None
        count, before = 0, -1
        while before < count < len(hashes):
            before = count
            for places in holder.places.values():
                count = places.first_unknown(hashes, count)
        if not count:
            return None
        held = hashes[:count]
        tiers = {medium: places.how_many(held) for medium, places in holder.places.items()}
        return Match(count, self._tree.size_at(self._place(holder, held[0])), _some(tiers))

    @property
    def workers(self) -> list[W]:
        """Those that have said anything since they were last cleared."""
        return list(self._holders)

    def _workers_of(self, bits: int) -> list[W]:
        """The workers of these bits; remembered, since many prompts begin alike."""
        found = self._sets.get(bits)
        if found is None:
            found = []
            rest = bits
            while rest:
                low = rest & -rest
                rest ^= low
                found.append(self._workers[low.bit_length() - 1])
            if len(self._sets) >= MAX_SETS:
                self._sets.clear()
            self._sets[bits] = found
        return found

    # -- places ----------------------------------------------------------------------------------------------------

    def _begin(self, worker: W) -> _Holder:
        if self._free_bits:
            bit = self._free_bits.pop()
        else:
            bit = 1 << self._bits
            self._bits += 1
        self._live |= bit
        self._sets.clear()
        self._workers[bit.bit_length() - 1] = worker
        holder = self._holders[worker] = _Holder(bit)
        return holder

    def _place(self, holder: _Holder, block: Hash) -> int:
        """The node of a block on any medium, 0 if it has none."""
        for places in holder.places.values():
            place = places.get(block)
            if isinstance(place, int):
                return place
        return 0

    def _put(self, holder: _Holder, block: Hash, medium: str, places: Names[int | _Waiting], node: int) -> None:
        places.put(block, node)
        if not self._tree.hold(node, medium, holder.bit):
            holder.more[node, medium] = holder.more.get((node, medium), 0) + 1

    def _take(self, holder: _Holder, medium: str, node: int) -> None:
        """One name of a holder leads to a node no more."""
        more = holder.more
        if more and (left := more.get((node, medium), 0)):
            if left == 1:
                del more[node, medium]
            else:
                more[node, medium] = left - 1
            return
        self._tree.let_go(node, medium, holder.bit)

    def _join(self, holder: _Holder, block: Hash, node: int) -> None:
        """A block has got a place: so do those that wait for it, and those that wait for them."""
        placed = [(block, node)]
        while placed:
            parent, above = placed.pop()
            for medium, child in holder.waiting.pop(parent, ()):
                places = holder.places[medium]
                place = places.get(child)
                if isinstance(place, _Waiting):
                    below = self._tree.child(above, place.label)
                    self._put(holder, child, medium, places, below)
                    placed.append((child, below))


def _tokens(found: tuple[Any, Match]) -> int:
    return found[1].blocks * found[1].block_size


def _some(tiers: dict[str, int]) -> dict[str, int]:
    return {medium: count for medium, count in tiers.items() if count}
