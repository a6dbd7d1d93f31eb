"""An index of prefixes: it finds how much of a prompt each of many workers holds.

Each block of a worker has a *prefix digest*. This is a digest of the tokens from the prompt's beginning to the block's
end, of the LoRA adapter, and of everything else that the engine's block hash depends on (a salt, images). To answer a
question, the index computes the prefix digests of the prompt's blocks and looks them up. So workers may use different
hashes and block sizes.

A block whose parent has no prefix digest yet waits, and gets its digest when the parent gets one. If a parent is
removed, its children keep their prefix digests, and can be found again when the parent is back. A worker's blocks on
different media can form one prefix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import islice, pairwise
from struct import Struct, error
from typing import Any, Final, Generic, NamedTuple, TypeVar

from msgspec import UNSET, Raw, UnsetType

from kvbus.core.types import DEVICE_MEDIUM, LOCAL, Hash, Reason, medium_key
from kvbus.core.wire.carried import readable, text_of
from kvbus.core.wire.codec import AnyEvent, clears_all
from kvbus.core.wire.encoding import decode_value, encode_value, value
from kvbus.core.wire.schema import AllBlocksCleared, BlockRemoved, BlockStored
from kvbus.core.wire.tokens import decode_tokens

W = TypeVar("W", bound=Hashable)
K = TypeVar("K")

Tokens = Sequence[int] | bytes
"""The token ids of a prompt: a sequence of integers, or the same ids packed as little-endian integers of 32 bits."""

Adapter = str | int | None
"""The name of a LoRA adapter, or its id if the engine announces no name. None means the base model."""


Names = tuple[str | None, str | None]
"""The locality and the owner under which an engine keeps a block on a medium. None means that it names none."""

_UNNAMED: Final[Names] = (None, None)
_ONLY_UNNAMED: Final = frozenset({_UNNAMED})


class Shape(NamedTuple):
    """The form of a worker's blocks: the number of tokens in a block, and whether two tokens count as one (EAGLE)."""

    size: int
    pairs: bool = False


class Label(NamedTuple):
    """The content of a block: its packed tokens, and its extra keys encoded as msgpack (empty if it has none)."""

    tokens: bytes
    keys: bytes = b""


class Match(NamedTuple):
    """The part of a prompt that one worker holds.

    Attributes:
        blocks: number of blocks at the beginning of the prompt that the worker holds without a gap.
        block_size: number of tokens in one block; 0 if the publisher does not state it.
        tiers: number of these blocks on each medium.
    """

    blocks: int
    block_size: int
    tiers: dict[str, int]

    @property
    def tokens(self) -> int:
        """Number of tokens at the beginning of the prompt that the worker holds."""
        return self.blocks * self.block_size


class PrefixIndex(Generic[W]):
    """The live blocks of many workers, which can be searched by a prompt's tokens or by block hashes."""

    def __init__(self) -> None:
        self._workers: dict[W, _WorkerBlocks] = {}

    def __len__(self) -> int:
        """Return the number of blocks of all workers on all media."""
        return sum(blocks.on_media.total() for blocks in self._workers.values())

    @property
    def workers(self) -> list[W]:
        """The workers that have stored a block since they were last cleared."""
        return list(self._workers)

    def on_media(self, worker: W) -> dict[str, int]:
        """Return the number of a worker's blocks on each medium."""
        blocks = self._workers.get(worker)
        return {} if blocks is None else dict(blocks.on_media)

    def names(self, worker: W, most: int) -> dict[bytes, Hash]:
        """Return the hashes of a worker's oldest blocks, by a digest of the prompt up to the block's end.

        With the digests, the hashes of several workers for the same prompt can be compared. At most ``most`` blocks
        are read. Blocks without such a digest are left out.
        """
        blocks = self._workers.get(worker)
        return {} if blocks is None else blocks.names(most)

    # -- applying events

    def apply(self, worker: W, event: AnyEvent) -> None:
        """Apply one event of a worker.

        The index does not separate KV-cache groups, so pass only the events of one group.
        """
        if isinstance(event, AllBlocksCleared):
            if clears_all(event):
                self.clear(worker)
            elif worker in self._workers:
                self._workers[worker].clear_medium(medium_of(event))
            return
        if isinstance(event, dict):  # the decoder returns a dict for a store with fields that BlockStored lacks
            event = readable(event)
            event = BlockStored(**{name: event[name] for name in BlockStored.__struct_fields__ if name in event})
        medium, names = medium_of(event), names_of(event)
        if isinstance(event, BlockRemoved):
            for block in event.block_hashes:
                self.remove(worker, block, medium, names)
        else:
            self._workers.setdefault(worker, _WorkerBlocks()).store(event, medium, names)

    def remove(self, worker: W, block: Hash, medium: str = DEVICE_MEDIUM, names: Names = _UNNAMED) -> bool:
        """Remove a worker's block under these names from a medium. Return whether the medium held it so.

        The medium holds the block as long as it holds the block under other names.
        """
        blocks = self._workers.get(worker)
        return blocks is not None and blocks.remove(block, medium, names)

    def holds(self, worker: W, block: Hash, medium: str = DEVICE_MEDIUM, names: Names | None = None) -> bool:
        """Return whether a worker holds a block on a medium: under these names, or under any if ``names`` is None."""
        blocks = self._workers.get(worker)
        held = frozenset() if blocks is None else blocks.names_on(block, medium)
        return bool(held) if names is None else names in held

    def clear(self, worker: W) -> None:
        """Remove all blocks of a worker."""
        self._workers.pop(worker, None)

    # -- finding the workers that hold a prompt

    def longest_prefix(self, tokens: Tokens, *, lora: Adapter = None, salt: str | None = None) -> dict[W, int]:
        """Return how many leading blocks of a prompt each worker holds.

        The worker with the most tokens is first. Workers that hold no block of the prompt are left out.

        Raises:
            ValueError: a token id does not fit into 32 bits.
        """
        return {worker: match.blocks for worker, match in self.matches(tokens, lora=lora, salt=salt).items()}

    def matches(self, tokens: Tokens, *, lora: Adapter = None, salt: str | None = None) -> dict[W, Match]:
        """Return the part of a prompt that each worker holds.

        The worker with the most tokens is first. Workers that hold no block of the prompt are left out. If a worker has
        blocks of several sizes, the result is for the size that covers the most tokens.

        Args:
            tokens: the token ids of the prompt.
            lora: the LoRA adapter of the prompt.
            salt: the cache salt of the prompt.

        Raises:
            ValueError: a token id does not fit into 32 bits.
        """
        found: dict[W, Match] = {}
        for shape in sorted({shape for blocks in self._workers.values() for shape in blocks.shapes}):
            holders = {
                worker: blocks.media_with_prefix for worker, blocks in self._workers.items() if shape in blocks.shapes
            }
            for worker, (count, tiers) in _longest(holders, _prefix_digests(tokens, shape, lora, salt)).items():
                match, other = Match(count, shape.size, tiers), found.get(worker)
                if other is None or other.tokens < match.tokens:
                    found[worker] = match
        return dict(sorted(found.items(), key=lambda each: each[1].tokens, reverse=True))

    def matches_by_hash(self, hashes: Sequence[Hash]) -> dict[W, Match]:
        """Return the part of a prompt that each worker holds, found by the hashes of the prompt's blocks.

        Args:
            hashes: the hashes of the prompt's blocks, from the first to the last.
        """
        holders = {worker: blocks.media_of for worker, blocks in self._workers.items()}
        found = {
            worker: Match(count, self._workers[worker].size_of(hashes[0]), tiers)
            for worker, (count, tiers) in _longest(holders, hashes).items()
        }
        return dict(sorted(found.items(), key=lambda each: (each[1].tokens, each[1].blocks), reverse=True))


def medium_of(event: AnyEvent) -> str:
    """Return the medium that an event names, in upper case.

    All names of the device, such as ``GPU`` or no name, result in the same medium.
    """
    medium = value(event, "medium")
    return medium_key(medium) or str(medium).upper()


def names_of(event: AnyEvent) -> Names:
    """Return the locality and the owner that a store or a removal names."""
    return text_of(value(event, "locality")), text_of(value(event, "ownership"))


def packed(tokens: Sequence[int]) -> bytes:
    """Pack token ids as little-endian integers of 32 bits.

    Raises:
        ValueError: a token id does not fit into 32 bits.
    """
    try:
        return Struct(f"<{len(tokens)}I").pack(*tokens)
    except error as problem:
        raise ValueError("a token id is an integer from 0 to 4294967295") from problem


class _Block:
    """One block of a worker.

    Attributes:
        size: number of tokens in the block; 0 if the publisher does not state it.
        media: the media that hold the block.
        names: for each medium, the localities and owners under which it holds the block. A medium that is not listed
            holds the block without names.
        parent: the hash of the block before this one; None for the first block of a prompt.
        label: the content of the block; None while its tokens are unknown.
        prefix: the digest of the prompt up to the end of the block. It is None while the block's tokens, or the digest
            of its parent, are unknown.
    """

    __slots__ = ("label", "media", "names", "parent", "prefix", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.media: tuple[str, ...] = ()
        self.names: dict[str, frozenset[Names]] | None = None
        self.parent: Hash | None = None
        self.label: Label | None = None
        self.prefix: bytes | None = None


class _WorkerBlocks:
    """The blocks that one worker has stored since it was last cleared.

    Attributes:
        shapes: the forms of the worker's blocks: the number of tokens, and whether a token is a pair.
        on_media: number of blocks on each medium.
    """

    def __init__(self) -> None:
        self.shapes: Final[set[Shape]] = set()
        self.on_media: Final[Counter[str]] = Counter()
        self._blocks: Final[dict[Hash, _Block]] = {}
        self._prefixes: Final[dict[str, Counter[bytes]]] = {}
        """Number of blocks, by medium and prefix digest (digest of the prompt up to the end of the block).

        It can be higher than 1, because engines may have several hashes for equal tokens.
        """
        self._waiting: Final[dict[Hash, set[Hash]]] = {}
        """Hashes of the blocks that have no prefix digest yet because their parent has none, by the parent's hash.

        A prefix digest is a digest of the prompt up to the end of a block.
        """

    def media_of(self, block: Hash) -> Sequence[str]:
        """Return the media that hold the block with this hash."""
        found = self._blocks.get(block)
        return () if found is None else found.media

    def names_on(self, block: Hash, medium: str) -> frozenset[Names]:
        """Return the localities and owners under which a medium holds the block with this hash."""
        known = self._blocks.get(block)
        if known is None or medium not in known.media:
            return frozenset()
        return (known.names or {}).get(medium, _ONLY_UNNAMED)

    def media_with_prefix(self, prefix: bytes) -> Sequence[str]:
        """Return the media that hold a block with this prefix digest (of the prompt up to the end of the block)."""
        return [medium for medium, prefixes in self._prefixes.items() if prefix in prefixes]

    def names(self, most: int) -> dict[bytes, Hash]:
        """Return the hashes of the oldest blocks, by a digest of the prompt up to the block's end.

        With the digests, the hashes of several workers for the same prompt can be compared. At most ``most`` blocks
        are read. Blocks without such a digest are left out.
        """
        oldest = islice(self._blocks.items(), most)
        return {known.prefix: block for block, known in oldest if known.prefix is not None}

    def size_of(self, block: Hash) -> int:
        """Return the number of tokens in a block that the worker holds."""
        return self._blocks[block].size

    def store(self, event: BlockStored, medium: str, names: Names = _UNNAMED) -> None:
        """Add the blocks of a store event, and compute their prefix digests (of the prompt up to the end of the block).

        A block that already has a prefix digest keeps it. A block whose parent has no prefix digest waits for it.
        """
        parent = None if event.parent_block_hash is UNSET else event.parent_block_hash
        lora = _adapter(event.lora_id, event.lora_name)
        found = _labels(event, lora if isinstance(lora, str) else None, root=parent is None)
        if found is not None:
            self.shapes.add(found[0])
        for position, block in enumerate(event.block_hashes):
            known = self._blocks.get(block)
            if known is None:
                known = self._blocks[block] = _Block(event.block_size)
            if known.label is None and found is not None:
                shape, labels = found
                known.size, known.parent, known.label = shape.size, parent, labels[position]
                above = _root(lora, shape) if parent is None else self._prefix_of(parent)
                if above is None and parent is not None:
                    self._waiting.setdefault(parent, set()).add(block)
                elif above is not None:
                    self._settle(block, above)
            held = self.names_on(block, medium)
            if names not in held and (held or names != _UNNAMED):
                known.names = {**(known.names or {}), medium: held | {names}}
            if medium not in known.media:
                known.media += (medium,)
                self.on_media[medium] += 1
                if known.prefix is not None:
                    self._hold(known.prefix, medium)
            parent = block

    def remove(self, block: Hash, medium: str, names: Names) -> bool:
        """Remove a block under these names from a medium. Return whether the medium held it so.

        As in kvbus, a missing locality and ``LOCAL`` stand for each other if only one of the two has the block.
        """
        held = self.names_on(block, medium)
        if names not in held and names[0] in {None, LOCAL}:
            names = (None if names[0] else LOCAL, names[1])
        if names not in held:
            return False
        known, left = self._blocks[block], held - {names}
        if left:
            known.names = {**(known.names or {}), medium: left}
        else:
            self._drop(block, known, medium)
        return True

    def _drop(self, block: Hash, known: _Block, medium: str) -> None:
        """Remove a block from a medium under all its names."""
        if known.names:
            known.names = {each: names for each, names in known.names.items() if each != medium}
        known.media = tuple(each for each in known.media if each != medium)
        _decrement(self.on_media, medium)
        if known.prefix is not None:
            _decrement(self._prefixes[medium], known.prefix)
        if not known.media:
            del self._blocks[block]
            if known.prefix is None and known.parent is not None:
                siblings = self._waiting[known.parent]
                siblings.remove(block)
                if not siblings:
                    del self._waiting[known.parent]

    def clear_medium(self, medium: str) -> None:
        """Remove all blocks from a medium."""
        for block, known in [each for each in self._blocks.items() if medium in each[1].media]:
            self._drop(block, known, medium)

    def _prefix_of(self, block: Hash) -> bytes | None:
        known = self._blocks.get(block)
        return None if known is None else known.prefix

    def _settle(self, block: Hash, above: bytes) -> None:
        """Compute the prefix digest of a block, and then the prefix digests of all blocks that wait for it.

        A prefix digest is a digest of the prompt up to the end of the block.

        Args:
            block: the hash of the block.
            above: the prefix digest of its parent.
        """
        settled = [(block, above)]
        while settled:
            block, above = settled.pop()
            known = self._blocks[block]
            assert known.label is not None  # noqa: S101 - only blocks with tokens wait
            known.prefix = _prefix_digest(above, known.label)
            for medium in known.media:
                self._hold(known.prefix, medium)
            settled += [(child, known.prefix) for child in self._waiting.pop(block, ())]

    def _hold(self, prefix: bytes, medium: str) -> None:
        self._prefixes.setdefault(medium, Counter())[prefix] += 1


def _longest(
    holders: Mapping[W, Callable[[K], Sequence[str]]], keys: Iterable[K]
) -> dict[W, tuple[int, dict[str, int]]]:
    """Return how many blocks at the beginning of a prompt each worker holds, in total and on each medium.

    Args:
        holders: for each worker, a function that returns the media which hold the block of a key.
        keys: the prefix digests or hashes of the prompt's blocks, from the first to the last. They are read only
            up to the first block that no worker holds.
    """
    found: dict[W, tuple[int, dict[str, int]]] = {}
    left = dict(holders)
    for key in keys if left else ():
        for worker, media_of in list(left.items()):
            media = media_of(key)
            if not media:
                del left[worker]
                continue
            count, tiers = found.get(worker, (0, {}))
            for medium in media:
                tiers[medium] = tiers.get(medium, 0) + 1
            found[worker] = count + 1, tiers
        if not left:
            break
    return found


def _decrement(counts: Counter[Any], key: Any) -> None:
    """Subtract one from a count, and delete the key if the count is zero."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


# -- prefix digests: digests of a prompt up to the end of a block

_ID: Final = Struct("<I")
_LENGTH: Final = Struct("<Q")


def _root(lora: Adapter, shape: Shape) -> bytes:
    """Return the digest that a prompt's first block uses instead of a parent's prefix digest, because it has no parent.

    It depends on the LoRA adapter, the number of tokens in a block, and whether two tokens count as one (EAGLE).
    """
    return sha256(encode_value([lora, shape.size, shape.pairs])).digest()


def _prefix_digest(above: bytes, label: Label) -> bytes:
    """Return the prefix digest of a block: a digest of its parent's prefix digest ``above`` and of its content."""
    return sha256(above + _LENGTH.pack(len(label.tokens)) + label.tokens + label.keys).digest()


def _prefix_digests(tokens: Tokens, shape: Shape, lora: Adapter, salt: str | None) -> Iterator[bytes]:
    """Yield the prefix digest of each complete block of a prompt.

    It is a digest of the prompt up to the end of the block.

    Raises:
        ValueError: a token id does not fit into 32 bits.
    """
    if shape.pairs:
        ids = [number for (number,) in _ID.iter_unpack(tokens)] if isinstance(tokens, bytes) else tokens
        tokens = [each for pair in pairwise(ids) for each in pair]
    raw = tokens if isinstance(tokens, bytes) else packed(tokens)
    digest, keys = _root(lora, shape), b"" if salt is None else bytes(encode_value([salt]))
    for block in _divided(raw, shape):
        digest = _prefix_digest(digest, Label(block, keys))
        yield digest
        keys = b""  # only the first block has the salt as an extra key


def _divided(tokens: bytes, shape: Shape) -> list[bytes]:
    """Divide packed tokens into blocks of the size ``shape``. Leave out an incomplete last block."""
    width = _ID.size * shape.size * (1 + shape.pairs)
    return [tokens[start : start + width] for start in range(0, len(tokens) - width + 1, width)]


def _labels(event: BlockStored, lora_name: str | None, *, root: bool) -> tuple[Shape, list[Label]] | None:
    """Return the size (`Shape`) and the contents (`Label`) of a store's blocks; None if their tokens are unknown.

    Args:
        event: the store.
        lora_name: the name of the adapter, which vLLM repeats as the first extra key of each block.
        root: whether the store begins a prompt. In that case SGLang puts the salt into the event, and vLLM puts it into
            the extra keys of the first block.
    """
    count, size = len(event.block_hashes), event.block_size
    decoded = decode_tokens(event.token_ids)
    if isinstance(decoded, Reason) or not decoded or size <= 0 or len(decoded) != size * count:
        return None
    shape = Shape(size, isinstance(decoded[0], tuple))
    flat: list[Any] = [each for pair in decoded for each in pair] if shape.pairs else decoded  # type: ignore[union-attr]
    labels = [Label(block) for block in _divided(packed(flat), shape)]
    for position, keys in enumerate(_extra_keys(event.extra_keys)[:count]):
        if isinstance(keys, list):
            own = keys[1:] if keys and keys[0] == lora_name else keys
            if own:
                labels[position] = Label(labels[position].tokens, bytes(encode_value(own)))
    salt = event.cache_salt
    if root and isinstance(salt, Raw) and not labels[0].keys and (text := decode_value(salt)) is not None:
        labels[0] = Label(labels[0].tokens, bytes(encode_value([text])))
    return shape, labels


def _extra_keys(raw: Raw | bytes | UnsetType | None) -> list[Any]:
    """Return the extra keys of a store's blocks, decoded. They are empty if the event has none."""
    keys = decode_value(raw) if isinstance(raw, Raw | bytes) else None
    return keys if isinstance(keys, list) else []


def _adapter(lora_id: int | UnsetType | None, lora_name: str | UnsetType | None) -> Adapter:
    """Return the name of an event's LoRA adapter, or its id if the event has no name."""
    if lora_name is UNSET or lora_name is None:
        return None if lora_id is UNSET else lora_id
    return lora_name
