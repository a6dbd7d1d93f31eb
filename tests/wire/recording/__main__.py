"""Run the cache code of a real engine, to record its event stream or to test kvbus (see wire/data/README.md).

python -m tests.wire.recording record vllm:window --batches 300 --out wire/data
python -m tests.wire.recording soak vllm:window --seeds 50 --batches 3000

``record`` writes one stream, and the blocks in the engine's cache. ``soak`` runs the engine once for each seed, and
compares its cache with the blocks that kvbus derives from its stream.
"""

from __future__ import annotations

import argparse
import base64
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from tests.wire.captures import digest
from tests.wire.recording.compare import View, with_prefixes

POINTS = 50
"""Number of batches after which a capture records another digest of the engine's cache."""


def engine(family: str, seed: int) -> Any:
    kind, _, name = family.partition(":")
    module = importlib.import_module(f"tests.wire.recording.{kind}_engine")
    return module.Engine(module.FAMILIES[name], seed)


def record(family: str, seed: int, batches: int, name: str, out: Path) -> None:
    running = engine(family, seed)
    points, due = [], POINTS
    while len(running.published) < batches:
        running.step()
        if len(running.published) >= due:
            due = len(running.published) + POINTS
            points.append([len(running.published), digest(with_prefixes(running.pool(), running.kinds()))])
    lines = [
        {
            "t": round(ts - running.published[0][0], 4),
            "topic": "",
            "seq": seq,
            "payload": base64.b64encode(payload).decode(),
        }
        for ts, seq, payload in running.published
    ]
    (out / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    kinds = running.kinds()
    blocks = [
        {
            "hash": block.hex() if isinstance(block, bytes) else block,
            "group_idx": group,
            "medium": medium,
            "copies": copies,
            "kind": None if group is None else kinds[group],
        }
        for (group, medium, block), copies in sorted(running.pool().items(), key=repr)
    ]
    (out / f"{name}.truth.json").write_text(json.dumps({"points": points, "blocks": blocks}))
    sys.stdout.write(f"{name}: {len(lines)} batches, {len(blocks)} blocks, {running.counts()}\n")


def soak(family: str, first: int, seeds: int, batches: int, rules: dict[str, Any]) -> int:
    failures = 0
    for seed in range(first, first + seeds):
        running, view, due, began = engine(family, seed), View(**rules), 100, time.process_time()
        wrong = None
        while wrong is None and len(running.published) < batches:
            running.step()
            if len(running.published) >= due:
                due += 100
                view.feed(running.published)
                wrong = view.differs(with_prefixes(running.pool(), running.kinds()))
        failures += wrong is not None
        sys.stdout.write(
            f"{family} seed {seed}: {len(running.published)} batches, {running.work.asked} requests,"
            f" {running.counts()}, {dict(view.stats.filtered)}, {view.router.orphans} orphans,"
            f" {time.process_time() - began:.0f} s: {wrong or 'equal'}\n"
        )
        sys.stdout.flush()
    return failures


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("record", "soak"))
    parser.add_argument("family")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--name", default="")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "data")
    parser.add_argument("--rule", action="append", default=[], metavar="KEY=VALUE")
    given = parser.parse_args()
    if given.what == "soak":
        rules = dict(rule.split("=", 1) for rule in given.rule)
        return int(soak(given.family, given.seed, given.seeds, given.batches, rules) > 0)
    record(given.family, given.seed, given.batches, given.name or given.family.replace(":", "_"), given.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
