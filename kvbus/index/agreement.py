"""Check that the workers of a model have the same hashes for the same prompts.

If they differ, a router that looks up one worker's hashes at another worker finds nothing, and its operator has no
other sign of that. vLLM's hashes differ if the engines do not have the same PYTHONHASHSEED.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

from kvbus.client import Worker
from kvbus.core.findings.engine import HASHES_DIFFER
from kvbus.core.findings.finding import Findings
from kvbus.core.types import Hash
from kvbus.daemon.source_log import log_changes

SAMPLE: Final = 1000
"""Number of blocks of each worker that are compared: its oldest ones, as all workers' prompts often begin with them."""

Named = Mapping[Worker, Mapping[bytes, Hash]]
"""The hashes of blocks, by worker and place."""


class Agreement:
    """The last comparison of all workers.

    Attributes:
        shared: by worker, number of compared blocks whose prompt another worker of the model holds too.
        differing: by worker, number of these blocks whose hash is different at the other worker.
    """

    def __init__(self) -> None:
        self.shared: Counter[Worker] = Counter()
        self.differing: Counter[Worker] = Counter()
        self._reported: dict[tuple[Worker, Worker], Findings] = {}

    def compare(self, named: Named, model_of: Callable[[Worker], str]) -> None:
        """Compare the hash of each block with the hash at the first worker that holds the block's prompt.

        Log when two workers begin to differ, and when they agree again.
        """
        first: dict[tuple[str, bytes], tuple[Worker, Hash]] = {}
        pairs: Counter[tuple[Worker, Worker]] = Counter()
        self.shared, self.differing = Counter(), Counter()
        for worker, blocks in named.items():
            model = model_of(worker)
            for place, block in blocks.items():
                other, theirs = first.setdefault((model, place), (worker, block))
                if other is worker:
                    continue
                for each in (worker, other):
                    self.shared[each] += 1
                    self.differing[each] += theirs != block
                pairs[other, worker] += theirs != block
        self._report(+pairs, set(pairs))

    def _report(self, differing: Counter[tuple[Worker, Worker]], compared: set[tuple[Worker, Worker]]) -> None:
        for pair in compared & (differing.keys() | self._reported.keys()):
            one, other = (worker.name for worker in pair)
            found = [HASHES_DIFFER(one=one, other=other)] if pair in differing else []
            changes = self._reported.setdefault(pair, Findings()).update(found, time.time())
            log_changes(changes, "index", "index", {}, lambda *_: None)
            if not found:
                del self._reported[pair]
