"""Test of the size of the state on disk: bytes for each live block, and as a multiple of the checkpoint."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvbus.core.checkpoint import dump
from kvbus.core.events import BatchReceived, SourceUp
from kvbus.core.outputs.spec import OutputSpec
from kvbus.core.relay import Relay
from kvbus.core.source_spec import SourceSpec
from kvbus.core.wire.profiles import PROFILES
from kvbus.state import sqlite
from kvbus.state.database import NAME
from kvbus.state.lock import DirectoryLock
from kvbus.state.sqlite import SqliteStore
from kvbus.state.writer import StateWriter
from tests.doubles.payloads import payload, removed, store

LIVE = 10_000
"""Number of live blocks. A batch stores 64 blocks, and removes the 64 oldest blocks if there are more."""

A_BLOCK = 160
"""Maximum bytes of a checkpoint for each block of 16 tokens."""

MOST = 5
"""Maximum size of the state as a multiple of the checkpoint, without SQLite's own file of constant size."""


@pytest.mark.parametrize("blocks", [1, 8], ids=["one block an event", "eight blocks an event"])
def test_the_state_is_a_small_multiple_of_its_checkpoint(blocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sqlite, "CHECKPOINT_AFTER", 100_000)
    relay = Relay([SourceSpec("engine", 0)], [OutputSpec("out", PROFILES["vllm"], [None], journal_batches=10)])
    kept = SqliteStore(tmp_path, DirectoryLock(tmp_path, "the state"))
    state = StateWriter(kept, time.monotonic)
    state.begin(relay)
    relay.handle(SourceUp(0), 1.0)
    largest = 0
    for seq in range(6 * LIVE // 64):
        events = []
        for first in range(64 * seq, 64 * seq + 64, blocks):
            hashes = [2**62 + n for n in range(first, first + blocks)]
            if first >= LIVE:
                events.append(removed([block - LIVE for block in hashes[::-1]]))
            events.append(store(hashes, tokens=[100_000 + n for n in range(16 * blocks)]))
        relay.handle(BatchReceived(0, [b"", seq.to_bytes(8, "big"), payload(*events)]), 1.0)
        state.flush()
        state.work()
        largest = max(largest, (tmp_path / NAME).stat().st_size)
    kept.close()
    size = sum(map(len, dump(relay)))
    assert size <= A_BLOCK * LIVE
    assert largest <= MOST * size
