"""What Dynamo calls a block's ``tokens_hash``: what is in the block, whatever came before it.

The frontend computes the same from a request, so each byte counts: XXH3 over the tokens as 32-bit little-endian
integers, then the hashes of images in the block. LoRA adapter and cache namespace are in the seed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, Final

from xxhash import xxh3_64_intdigest

from kvbus.core.wire.tokens import Token

SEED: Final = 1337
MASK: Final = 2**64 - 1

SALT_TAG: Final = "dynamo-cache-salt:"
"""How Dynamo's workers mark a cache namespace among vLLM's ``extra_keys``."""

_DIGEST: Final = 64
"""Characters of a hexadecimal digest, as which vLLM names an image."""


def seed(lora: str | None, namespace: str | None) -> int:
    """The seed of all blocks of one adapter and one cache namespace."""
    found = SEED
    if lora:
        found += xxh3_64_intdigest(lora.encode(), seed=0)
    if namespace:
        found += xxh3_64_intdigest(namespace.encode(), seed=1)
    return found & MASK


def blocks_of(tokens: Sequence[Token], size: int) -> list[bytes]:
    """The bytes of each block of so many tokens; with EAGLE's pairs a block reaches one token into the next."""
    pairs = bool(tokens) and isinstance(tokens[0], tuple)
    firsts = [token[0] if isinstance(token, tuple) else token for token in tokens]
    data = struct.pack(f"<{len(firsts)}I", *firsts)
    found = [data[at : at + 4 * size] for at in range(0, len(data), 4 * size)]
    if pairs:
        lasts = [token[1] for token in tokens[size - 1 :: size] if isinstance(token, tuple)]
        found = [block + struct.pack("<I", last) for block, last in zip(found, lasts, strict=True)]
    return found


def tokens_hash(block: bytes, seed: int, images: Iterable[int] = ()) -> int:
    """The hash of one block."""
    return xxh3_64_intdigest(block + b"".join(image.to_bytes(8, "little") for image in sorted(images)), seed=seed)


def images_in(keys: Any, lora: str | None) -> list[int]:
    """The hashes of the images in one block, from its entry in ``extra_keys``.

    A pair is an image with its offset. A bare text is one if it is a digest: others are adapters and salts.
    """
    found = []
    for each in keys if isinstance(keys, list) else ():
        tagged = isinstance(each, list) and len(each) == 2
        name = each[0] if tagged else each
        if not isinstance(name, str) or not name or (name == lora and not tagged):
            continue
        if len(name) == _DIGEST and all(char in "0123456789abcdefABCDEF" for char in name):
            found.append(int(name[:16], 16))
        elif tagged:
            found.append(xxh3_64_intdigest(name.encode(), seed=0))
    return found


def namespace_in(keys: Any, lora: str | None) -> str | None:
    """The cache namespace of a store, from its first block's entry in ``extra_keys``; None if it names none."""
    for each in keys if isinstance(keys, list) else ():
        if isinstance(each, str) and each != lora and len(each) > len(SALT_TAG) and each.startswith(SALT_TAG):
            return each.removeprefix(SALT_TAG)
    return None
