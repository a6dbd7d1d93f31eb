"""Under callgrind: fill a core's cache uncounted, then count the last batches. `instructions` runs it.

It runs in checkouts of any age, whose own driver feeds their own relay, so it asks as little of them as it can.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from kvbus.core.events import BatchReceived
from tests.bench.core import Driver


def main(made: str, batches: str, analytics: str = "") -> None:
    """Feed the payloads of a file, and count the last ones."""
    payloads = msgspec.msgpack.decode(Path(made).read_bytes(), type=list[bytes])
    warm = len(payloads) - int(batches)
    driver = Driver(iter(payloads), **({"analytics": int(analytics)} if analytics else {}))
    driver.feed(warm)
    frames = [[b"", (warm + i).to_bytes(8, "big"), payload] for i, payload in enumerate(payloads[warm:])]
    handle, pid = driver.handle, str(os.getpid())
    subprocess.run(["callgrind_control", "-i", "on", pid], check=True, stdout=subprocess.DEVNULL)
    for each in frames:
        handle(BatchReceived(0, each), 1.0)
    subprocess.run(["callgrind_control", "-i", "off", pid], check=True, stdout=subprocess.DEVNULL)
    stats = driver.relay.sources[0].stats
    assert not +stats.rejected, stats.rejected
    assert stats.batches == len(payloads), (stats.batches, len(payloads))


main(*sys.argv[1:])
