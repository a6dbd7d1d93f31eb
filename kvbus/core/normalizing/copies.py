"""Decide what a removal of a block with several copies takes away.

vLLM stores a hash once for each physical copy, and removes it as often (``count``). An engine may also remove a block
once, with its last copy (``last``), or announce a live block again without a copy (``ignore``). The stream does not
show which of these it is, so the operator says it. A removal with ``remaining_copy_counts`` decides for itself.
"""

from __future__ import annotations

from typing import Final

from kvbus.core.blocks.index import Table
from kvbus.core.source_spec import Duplicates
from kvbus.core.source_stats import SourceStats
from kvbus.core.types import Filtered, Hash

_COPY: Final = Filtered.COPY


class Copies:
    """Counts down the copies of live blocks.

    Args:
        rule: the operator's choice.
        stats: where removals of copies are counted.

    Attributes:
        counted: A store of a live block is one more copy, and a removal takes one copy away.
    """

    def __init__(self, rule: Duplicates, stats: SourceStats) -> None:
        self.counted: Final = rule == "count"
        self._stats = stats

    def keeps(self, table: Table, block: Hash) -> bool:
        """Take one copy away from a live block that has several; return whether the block stays live."""
        further = table.copies.pop(block)
        if not self.counted:
            return False
        if further > 1:
            table.copies[block] = further - 1
        self._stats.filtered[_COPY] += 1
        return True

    def say(self, table: Table | None, block: Hash, left: int) -> bool:
        """Apply the engine's own count of remaining copies (vllm#48933); return whether the block stays live."""
        if table is None or block not in table.blocks:
            return False
        table.copies.pop(block, None)
        if left > 1:
            table.copies[block] = left - 1
        if left:
            self._stats.filtered[_COPY] += 1
        return left > 0
