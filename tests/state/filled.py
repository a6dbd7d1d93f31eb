"""Fill or load a state directory in a process of its own: ``python -m tests.state.filled fill|load DIRECTORY BYTES``.

``fill`` relays batches until the state's database has ``BYTES`` bytes. The program prints the peak memory of its
process in kilobytes. The relay has only ``LIVE`` blocks, however long the write-ahead log is.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from kvbus.core.events import BatchReceived, ReplayReceived, SourceUp
from kvbus.core.outputs.spec import OutputSpec
from kvbus.core.relay import Relay
from kvbus.core.source_spec import SourceSpec
from kvbus.core.wire.encoding import encode_batch, encode_value
from kvbus.core.wire.frames import END_SEQ
from kvbus.core.wire.profiles import Profile
from kvbus.core.wire.schema import BlockRemoved, BlockStored
from kvbus.state import sqlite
from kvbus.state.contract import StoreError
from kvbus.state.writer import StateWriter
from tests.state.left import opened

LIVE = 2000
"""Number of blocks that the relay's index has."""


def most_memory() -> int:
    """Return the peak memory of this process in kilobytes."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1])


def fill(relay: Relay, state: StateWriter, directory: Path, size: int) -> None:
    """Feed batches of an engine to the relay until the state's database has this many bytes."""
    relay.handle(SourceUp(0), 1.0)
    relay.handle(ReplayReceived(0, 1, [b"", b"", END_SEQ, b""]), 1.0)
    seq = 0
    while (directory / "state.db").stat().st_size < size:
        for _ in range(100):
            events: list[BlockStored | BlockRemoved] = [
                BlockStored((seq,), None, encode_value([seq] * 256), 256, None, "GPU", None, 0)
            ]
            if seq >= LIVE:
                events.append(BlockRemoved((seq - LIVE,), "GPU", 0))
            relay.handle(BatchReceived(0, [b"", seq.to_bytes(8, "big"), encode_batch(events, 1.0, 0)]), 1.0)
            seq += 1
        state.flush()


def main(what: str, path: str, size: str) -> None:
    """Load the state of a directory. If ``what`` is ``fill``, then add batches to the state.

    Print the result and the peak memory. The result is whether a state was loaded: yes, no or refused. The process ends
    without closing the directory, as if killed.
    """
    sqlite.CHECKPOINT_AFTER = 10**12  # type: ignore[misc]
    directory = Path(path)
    relay = Relay([SourceSpec("engine", 0)], [OutputSpec("routers", Profile(), [None], heartbeat=0)])
    with opened(directory) as store:
        state = StateWriter(store, time.monotonic)
        try:
            loaded = "yes" if state.load(relay, ["engine", "routers"], 0.0) else "no"
        except StoreError:
            loaded = "refused"
        if what == "fill":
            state.begin(relay)
            fill(relay, state, directory, int(size))
        sys.stdout.write(f"{loaded} {most_memory()}\n")
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
