"""Profiles: what a family of routers reads, and the batch that follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from kvbus.core.codec import encode_batch, encode_positional_batch
from kvbus.core.emit import OutEvent
from kvbus.core.frames import Framing

Encoding = Literal["map", "array"]


class Profile(msgspec.Struct, frozen=True):
    """How events are encoded and how a replay is framed."""

    encoding: Encoding = "map"
    framing: Framing = "4"


PROFILES: Final[dict[str, Profile]] = {
    "vllm": Profile("map", "4"),
    "dynamo": Profile("map", "4"),
    "llm-d": Profile("map", "4"),
    "aibrix": Profile("array", "4"),
    "sglang": Profile("map", "3"),
}
"""By the name of ``outputs[].profile``. Sources: Dynamo 1.6.1 takes both framings, llm-d 4, AIBrix reads arrays only,
sgl-router's client reads framing 3."""


def encode(encoding: Encoding, events: Sequence[OutEvent], ts: float, rank: int) -> bytes:
    """One batch in one encoding: always an array of exactly three, ``[ts, events, rank]``."""
    return encode_batch(events, ts, rank) if encoding == "map" else encode_positional_batch(events, ts, rank)
