"""What a publisher says, taken in by the relay's own code: what it refuses here, it refuses in the daemon."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Final

from msgspec import UNSET, structs

from kvbus.core.events import BatchReceived
from kvbus.core.relay import Relay
from kvbus.core.sequencing.fingerprints import fingerprint
from kvbus.core.source import Source
from kvbus.core.source_spec import SourceSpec
from kvbus.core.types import Hash, Reason
from kvbus.core.wire.codec import decode_batch
from kvbus.core.wire.frames import FrameLimits, LiveMessage, parse_live
from kvbus.core.wire.parts import value
from kvbus.core.wire.schema import BlockStored
from kvbus.core.wire.tokens import decode_tokens

MAX_KEPT: Final = 1024
"""Batches, topics and first blocks that are remembered."""

Root = bytes
"""A digest of what the hash of a prompt's first block follows from: its tokens, LoRA, salt and other keys."""


class Heard:
    """The messages of one publisher.

    Args:
        spec: the source as the daemon would have it; nobody is asked for a replay.
        limits: what a message may be.
    """

    def __init__(self, spec: SourceSpec, limits: FrameLimits) -> None:
        settings = structs.replace(spec.settings, replay=False, snapshot=False)
        self._relay = Relay([structs.replace(spec, settings=settings)], [], limits)
        self._limits = limits
        self.topics: Counter[bytes] = Counter()
        self.batches: dict[int, int] = {}
        """Fingerprints of the newest batches, by seq."""
        self.contested = 0
        """Batches under a seq that another batch had."""
        self.events = 0
        self.stores = 0
        self.ranks: set[int] = set()
        self.kinds: set[str] = set()
        """Of hashes: bytes, integer."""
        self.roots: dict[Root, Hash] = {}
        self.skew: float | None = None
        """Seconds that the publisher's clock is behind ours, at the least."""
        self.oversize = False
        self.messages = 0

    @property
    def source(self) -> Source:
        """The source that has taken it in."""
        return self._relay.sources[0]

    @property
    def newest(self) -> int | None:
        """The seq of the newest batch."""
        return next(reversed(self.batches), None)

    @property
    def wanted(self) -> int:
        """Messages whose topic is the one that is subscribed to."""
        topic = self.source.spec.topic
        return sum(count for each, count in self.topics.items() if each.startswith(topic))

    def take(self, frames: list[bytes], *, live: bool) -> None:
        """Take in one message: of the live stream, or (as ``[topic, seq, payload]``) of an answer."""
        self.messages += 1
        topic = frames[0] if frames else b""
        if live:
            if topic in self.topics or len(self.topics) < MAX_KEPT:
                self.topics[topic] += 1
            if not topic.startswith(self.source.spec.topic):
                return
        message = parse_live(frames, self._limits)
        if not isinstance(message, Reason):
            if live and self.source.topics.own in {None, topic}:  # another topic may have its own numbers
                self._number(message)
            self._look_into(message, live=live)
        if live:
            self._relay.handle(BatchReceived(0, frames), time.monotonic())

    def _number(self, message: LiveMessage) -> None:
        before, now = self.batches.pop(message.seq, None), fingerprint(message.payload)
        self.contested += before is not None and before != now
        self.batches[message.seq] = now
        if len(self.batches) > MAX_KEPT:
            del self.batches[next(iter(self.batches))]

    def _look_into(self, message: LiveMessage, *, live: bool) -> None:
        batch = decode_batch(message.payload)
        if isinstance(batch, Reason):
            return
        if batch.rank is not None:
            self.ranks.add(batch.rank)
        if live and batch.ts:
            behind = time.time() - batch.ts
            self.skew = behind if self.skew is None else min(self.skew, behind, key=abs)
        self.events += len(batch.events)
        for event in batch.events:
            if isinstance(event, BlockStored):
                self.stores += 1
                self.kinds.update("bytes" if isinstance(each, bytes) else "integer" for each in event.block_hashes)
                self._remember_root(event)
        self.source.dialect.see(message.payload)

    def _remember_root(self, event: BlockStored) -> None:
        tokens = decode_tokens(event.token_ids)
        if value(event, "parent_block_hash") is not None or isinstance(tokens, Reason) or len(self.roots) >= MAX_KEPT:
            return
        carried = [b"" if each is UNSET else bytes(each) for each in (event.extra_keys, event.cache_salt)]  # type: ignore[comparison-overlap]
        about = (event.block_size, *(value(event, name) for name in ("lora_id", "lora_name", "group_idx")), *carried)
        root = repr((about, tokens[: event.block_size])).encode()
        self.roots[blake2b(root, digest_size=16).digest()] = event.block_hashes[0]


def differing_roots(heard: Sequence[tuple[str, Heard]]) -> Iterator[tuple[str, str]]:
    """Yield labels of publishers that name the same first block differently.

    The hash of a prompt's first block follows from its tokens and a seed: vLLM draws the seed at random in each process
    unless ``PYTHONHASHSEED`` is set. One publisher alone does not show it.
    """
    first: dict[Root, tuple[str, Hash]] = {}
    for label, each in heard:
        for root, name in each.roots.items():
            other, known = first.setdefault(root, (label, name))
            if known != name and type(known) is type(name) and other != label:
                yield other, label
                return
