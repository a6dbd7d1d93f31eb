"""Compare the blocks that kvbus announces for a stream with the engine's own cache, batch by batch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from kvbus.core.normalizing.normalizer import Normalizer
from kvbus.core.source_spec import SourceSpec
from kvbus.core.stats import SourceStats
from kvbus.core.types import PREFIX_KINDS, medium_key
from kvbus.core.wire.encoding import encode_batch
from tests.doubles.router import PlainSetRouter
from tests.typed import there, well_formed
from tests.wire.captures import Key


class View:
    """kvbus's codec and normalizer for one stream, and a router that keeps the resulting blocks in a set.

    The router does not count copies.
    """

    def __init__(self, **rules: Any) -> None:
        self.stats = SourceStats()
        self.router = PlainSetRouter()
        self.sent = 0
        self._normalizer = Normalizer(SourceSpec(**rules), self.stats)
        self._fed = 0

    def feed(self, batches: Sequence[tuple[float, int, bytes]]) -> None:
        """Apply the batches that were published since the last call.

        ``batches`` has all batches from the start. Those of earlier calls are skipped.
        """
        for _, seq, payload in batches[self._fed :]:
            events = self._normalizer.apply(well_formed(payload), first_of_epoch=seq == 0)
            if events:
                self.router.apply(self.sent, encode_batch(events, 0.0, 0))
                self.sent += 1
        self._fed = len(batches)

    def differs(self, pool: Collection[Key]) -> str | None:
        """Return None if the router holds exactly the blocks of the pool and no rule was broken.

        Otherwise describe the difference.
        """
        missing, dead = set(pool) - set(self.router.blocks), set(self.router.blocks) - set(pool)
        wrong = {
            "missing": sorted(missing, key=repr)[:2],
            "dead": sorted(dead, key=repr)[:2],
            "violations": self.router.violations[:2],
            "rejected": dict(self.stats.rejected),
        }
        if not any(wrong.values()):
            return None
        return f"{len(pool)} blocks, {len(missing)} missing, {len(dead)} dead: {wrong}"


def with_prefixes(pool: Collection[Key], kinds: Sequence[str | None]) -> set[Key]:
    """Return the blocks of a pool that a router must know.

    They are the blocks without a group, and those in groups of full, MLA or sink attention or of unknown kind.
    """
    return {
        (group, there(medium_key(medium)), block)
        for group, medium, block in pool
        if group is None or kinds[group] is None or kinds[group] in PREFIX_KINDS
    }
