"""What tells the blocks behind one parent apart: their tokens, and what else the engine put into their hashes.

Tokens are packed four bytes each, which is the cheapest form to make of a question's token ids. A block with extra
keys (a salt, images) has them beside its tokens. An adapter's name is not among them: it names the tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice, pairwise
from struct import Struct, error
from typing import Any, Final

from msgspec import UNSET, Raw, UnsetType

from kvbus.core.types import Reason
from kvbus.core.wire.encoding import decode_value, encode_value
from kvbus.core.wire.tokens import decode_tokens

Label = bytes | tuple[bytes, bytes]
"""Tokens, or tokens and extra keys."""

Tokens = Sequence[int] | bytes
"""A prompt's token ids, or these packed as little-endian integers of 32 bits."""

Shape = tuple[int, bool]
"""Tokens a block, and whether a token is a pair (EAGLE)."""

Adapter = str | int | None
"""A LoRA adapter's name, or its id where the engine says no name."""

_ID: Final = Struct("<I")

_AT_ONCE: Final = 32
"""Labels that are made together: a third of the cost, where there are twice as many."""

_NO_KEYS: Final = (b"\xc0", b"\x90", b"\x91\xc0", b"\x91\x90")
"""No extra keys of any block, or of the one there is."""


def asked(tokens: Tokens, shape: Shape, salt: str | None) -> Iterator[Label]:
    """The labels of a prompt's whole blocks, each made when it is looked at: most prompts end early.

    Raises:
        ValueError: a token id is none of 32 bits.
    """
    return divided(whole(tokens, shape), width_of(shape), salt)


def width_of(shape: Shape) -> int:
    """Bytes of a block's tokens, packed."""
    size, pairs = shape
    return _ID.size * size * (1 + pairs)


def whole(tokens: Tokens, shape: Shape) -> bytes:
    """The tokens of a prompt's whole blocks, packed.

    Raises:
        ValueError: a token id is none of 32 bits.
    """
    if shape[1]:
        ids = tokens if not isinstance(tokens, bytes) else [number for (number,) in _ID.iter_unpack(tokens)]
        tokens = [each for pair in pairwise(ids) for each in pair]
    if not isinstance(tokens, bytes):
        tokens = packed(tokens)
    width = width_of(shape)
    return tokens[: len(tokens) // width * width]


def divided(tokens: bytes, width: int, salt: str | None) -> Iterator[Label]:
    """The labels of blocks, whose first one has the salt if there is one."""
    labels: Iterator[Any] = _divided(tokens, width)
    if salt is None:
        return labels
    return chain([(label, bytes(encode_value([salt]))) for label in islice(labels, 1)], labels)


def stored(
    tokens: Raw | bytes,
    size: int,
    count: int,
    lora_name: str | None,
    extra_keys: Raw | bytes | UnsetType | None,
    root_salt: Raw | UnsetType | None,
) -> tuple[Shape, list[Label]] | None:
    """The labels of so many blocks of a store; None if their tokens are not known.

    ``root_salt`` is the event's own salt where its first block is a chain's first: SGLang says it there, and vLLM in
    that block's extra keys.
    """
    decoded = decode_tokens(tokens)
    if isinstance(decoded, Reason) or not decoded or size <= 0 or len(decoded) != size * count:
        return None
    pairs = isinstance(decoded[0], tuple)
    flat: list[Any] = [each for pair in decoded for each in pair] if pairs else decoded  # type: ignore[union-attr]
    labels: list[Any] = list(_divided(packed(flat), width_of((size, pairs))))
    if isinstance(extra_keys, Raw):
        extra_keys = bytes(extra_keys)
    if isinstance(extra_keys, bytes) and extra_keys not in _NO_KEYS:
        keys = decode_value(extra_keys)
        for at, own in enumerate(keys[:count] if isinstance(keys, list) else ()):
            if isinstance(own, list) and own and own[0] == lora_name:
                own = own[1:]  # noqa: PLW2901 - the adapter's name is vLLM's first extra key
            if own:
                labels[at] = (labels[at], bytes(encode_value(own)))
    if isinstance(root_salt, Raw) and bytes(root_salt) != b"\xc0" and type(labels[0]) is bytes:
        labels[0] = (labels[0], bytes(encode_value([decode_value(root_salt)])))
    return (size, pairs), labels


def adapter(lora_id: int | UnsetType | None, lora_name: str | UnsetType | None) -> Adapter:
    """What names an event's adapter."""
    if lora_name is UNSET or lora_name is None:
        return None if lora_id is UNSET else lora_id
    return lora_name


def packed(tokens: Sequence[int]) -> bytes:
    """Token ids as integers of four bytes.

    Raises:
        ValueError: one of them is none of 32 bits.
    """
    try:
        return Struct(f"<{len(tokens)}I").pack(*tokens)
    except error as problem:
        raise ValueError("a token id is an integer from 0 to 4294967295") from problem


def _divided(tokens: bytes, width: int) -> Iterator[bytes]:
    """The tokens of each block of so many bytes."""
    label = f"{width}s"
    one = Struct(label).iter_unpack
    if len(tokens) < 2 * width * _AT_ONCE:
        return chain.from_iterable(one(tokens))
    several = Struct(label * _AT_ONCE)
    cut = len(tokens) // several.size * several.size
    return chain.from_iterable(chain(several.iter_unpack(tokens[:cut]), one(tokens[cut:])))
