"""Check that all workers of a model compute the same block hashes for the same prompts.

A router may look up the hashes of one worker among the blocks of another worker. If the workers compute different
hashes, the router finds nothing, and reports no error. In vLLM, hashes are different if the engines do not have the
same PYTHONHASHSEED.
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
"""Number of blocks of each worker whose hashes are compared with those of other workers.

The worker's oldest blocks are compared. They are often the beginnings of many prompts, such as a system prompt, so
other workers hold them, too.
"""

Named = Mapping[Worker, Mapping[bytes, Hash]]
"""The block hashes of each worker. The key of a hash is a digest of the prompt up to the end of the block."""


class Agreement:
    """The result of the last comparison of the workers' block hashes.

    Attributes:
        shared: for each worker, the number of compared blocks whose prompt another worker of the same model also holds.
        differing: for each worker, the number of these blocks for which the other worker has a different hash.
    """

    def __init__(self) -> None:
        self.shared: Counter[Worker] = Counter()
        self.differing: Counter[Worker] = Counter()
        self._reported: dict[tuple[Worker, Worker], Findings] = {}

    def compare(self, named: Named, model_of: Callable[[Worker], str]) -> None:
        """Compare the hashes of all workers of a model for the same prompts.

        ``named`` has the hashes of each worker. Each block is compared with the block of the first worker in ``named``
        that holds the same prompt. Log when two workers begin to have different hashes, and when they have the same
        hashes again.
        """
        first: dict[tuple[str, bytes], tuple[Worker, Hash]] = {}
        pairs: Counter[tuple[Worker, Worker]] = Counter()
        self.shared, self.differing = Counter(), Counter()
        for worker, blocks in named.items():
            model = model_of(worker)
            for prefix, block in blocks.items():
                other, theirs = first.setdefault((model, prefix), (worker, block))
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
