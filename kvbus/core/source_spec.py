"""A source as configured."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from kvbus.core.blocks.overlay import SMALL
from kvbus.core.normalizing.rules import Rules
from kvbus.core.sequencing.settings import Settings


class SourceSpec(msgspec.Struct, frozen=True):
    """One engine publisher: worker x rank."""

    label: str
    rank: int
    settings: Settings
    rules: Rules
    on_lost: Literal["clear", "keep"] = "clear"
    timeout: float = 30.0
    topic: bytes = b""
    """What the source's topic begins with."""
    shared: bool = False
    """Another source reads the same socket, or the same replay."""
    copied_below: int = SMALL
    """Tables of fewer blocks are copied for a snapshot, see :mod:`kvbus.core.blocks.overlay`."""
    numbered: bool = False
    """It is read from a log, and routers get its records under the numbers that they have there."""


NOBODY: Final = SourceSpec("", 0, Settings(), Rules())
"""The source of a slot that is free."""


def nobody(rank: int) -> SourceSpec:
    """The source of a slot that is free, and whose stream's routers knew this rank."""
    return msgspec.structs.replace(NOBODY, rank=rank) if rank else NOBODY
