"""What hashes name: whether equal ones mean equal content, within an epoch and over restarts (6.7, 6.8)."""

from __future__ import annotations

import hashlib
from typing import Final

from kvbus.tools.conform.engine.events import Event, Hash
from kvbus.tools.conform.engine.ledger import Ledger

MAX_BLOCKS: Final = 200_000
"""Blocks whose content is remembered; later ones are not compared."""

_ROOT: Final = b"root"


class Contents:
    """Remembers the content of each hash as a digest of its prefix, and the hash of each content."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._epoch = 0
        self._prefix: dict[tuple[int | None, Hash], bytes] = {}
        """By group and hash, the digest of its block and all before it."""
        self._named: dict[bytes, tuple[Hash, int]] = {}
        """By that digest, the hash and the epoch it was last stored in."""
        self._alone: dict[bytes, tuple[bytes, Hash]] = {}
        """By the digest of a block alone, the prefix and the hash that it was first seen with."""

    def new_epoch(self) -> None:
        """The publisher has begun anew."""
        self._epoch += 1

    def stored(self, event: Event) -> None:
        """Compare what a store says with what was said before. One hash may name blocks of several groups."""
        group = event.place[0]
        parent = _ROOT if event.parent is None else self._prefix.get((group, event.parent))
        for at, block in enumerate(event.hashes):
            content = event.content_of(at)
            if content is None or parent is None:
                return
            alone = _digest(repr(group).encode(), content)
            parent = _digest(parent, alone)
            self._compare(event, block, alone, parent)

    def _compare(self, event: Event, block: Hash, alone: bytes, prefix: bytes) -> None:
        ledger = self._ledger
        key = (event.place[0], block)
        before = self._prefix.get(key)
        if before is not None and before != prefix:
            ledger.broken("6.7", f"{event.where} has a hash that named another prefix before", event.evidence)
        elif before is not None:
            ledger.kept("6.7")
        if len(self._prefix) >= MAX_BLOCKS:
            return
        self._prefix.setdefault(key, prefix)
        other = self._alone.setdefault(alone, (prefix, block))
        if other[0] != prefix and other[1] != block:
            ledger.kept("6.7")  # the same tokens behind another prefix have another hash
        known = self._named.get(prefix)
        if known is not None and known[1] != self._epoch:
            if known[0] == block:
                ledger.kept("6.8")
            else:
                ledger.broken("6.8", f"{event.where} has another hash than before the restart", event.evidence)
        self._named[prefix] = (block, self._epoch)


def _digest(*parts: bytes) -> bytes:
    made = hashlib.blake2b(digest_size=12)
    for part in parts:
        made.update(len(part).to_bytes(4, "big") + part)
    return made.digest()
