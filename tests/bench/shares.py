"""Whose time a whole relay's is: ``make profile-process``, or ``python -m tests.bench.shares 1x8 --ranks 8 --rate 50``.

``perf`` samples the relay's process while a load goes through it; what it finds is summed up by thread and library.
That is where a target that is not met can be seen to be out of Python's hands, or not.
"""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Final

from .setups import BETWEEN, Child, Setup, running

OWNERS: Final = (
    ("kernel", r"\[kernel"),
    ("Python", r"libpython|^python"),
    ("pyzmq and libzmq", r"libzmq|_zmq|libsodium|libstdc"),
    ("msgspec", r"_core\."),
    ("uvloop", r"^loop\."),
    ("zlib (CRC-32)", r"libz\.|zlib"),
    ("libc", r"libc\.|ld-linux|libm\."),
)


def owner(library: str) -> str:
    """Whom a library belongs to, for the table."""
    return next((name for name, pattern in OWNERS if re.search(pattern, library)), "other")


def sampled(setup: Setup) -> tuple[dict[tuple[str, str], float], float]:
    """Run a setup under ``perf``: percent by thread and owner, and CPU microseconds a batch (of a relay watched)."""
    watchers: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="kvbus-shares-") as directory:
        data = Path(directory) / "perf.data"

        def watch(relay: Child) -> None:
            command = ["perf", "record", "--quiet", "-F", "5000", "-o", str(data), "-p", str(relay.pid)]
            watchers.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))

        with running(setup, before=watch) as processes:
            result = processes.run()
            for watcher in watchers:
                watcher.send_signal(signal.SIGINT)
                watcher.wait(60)
        report = subprocess.run(
            ["perf", "report", "-i", str(data), "--stdio", "--sort", "comm,dso", "--field-separator", "|"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    shares: defaultdict[tuple[str, str], float] = defaultdict(float)
    for line in report.splitlines():
        if line and not line.startswith("#"):
            share, thread, library = (part.strip() for part in line.split("|"))
            kind = "I/O thread" if thread.startswith("ZMQ") else "main thread"
            shares[kind, owner(library)] += float(share.strip("%"))
    return shares, result.cpu["relay"] / result.batches * 1e6


def main() -> int:
    """Sample one load and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.shares", description=__doc__)
    parser.add_argument("load", nargs="?", default="1x1", help="as in docs/BENCHMARKS.md (default: 1x1)")
    parser.add_argument("--between", choices=BETWEEN[1:], default="kvbus")
    parser.add_argument("--batches", type=int, help="of each rank (default: 200,000, or 20 s at a rate)")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rate", type=float, default=0.0, help="batches a second of each rank; 0: as fast as it goes")
    arguments = parser.parse_args()
    if shutil.which("perf") is None:
        sys.stderr.write("perf is not installed (package linux-perf, or linux-tools)\n")
        return 2
    batches = arguments.batches or int(20 * arguments.rate) or 200_000
    shares, each = sampled(
        Setup(arguments.between, arguments.load, batches, ranks=arguments.ranks, rate=arguments.rate)
    )
    sys.stdout.write(f"{arguments.between}, {arguments.load}: {each:.3g} us of CPU a batch\n")
    for (thread, who), share in sorted(shares.items(), key=lambda item: -item[1]):
        if share >= 0.5:
            sys.stdout.write(f"  {share:5.1f} %  {share * each / 100:6.2f} us  {thread}, {who}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
