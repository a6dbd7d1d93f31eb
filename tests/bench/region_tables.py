"""Fleets as tables: what was measured, what the model says of it, and what 1,000 engines take by that."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from kvbus.parts.outputs.state_due import LEAST_TAIL

from .processes import ROOT
from .region_model import FITTED, MB, RECOVERIES, ROUTERS, WORDS, Compared, Point, compare, load_of, recoveries, windows
from .render import DOCUMENT, into_document
from .report import markdown_table, number

RESULTS: Final = ROOT / "docs" / "bench" / "region.json"
SIZING: Final = ROOT / "docs" / "OPERATIONS.md"
BEGIN: Final = "<!-- rendered from docs/bench/region.json: python -m tests.bench.region --render -->"
END: Final = "<!-- end of the rendered table -->"

NAMES: Final = {"kafka": "Kafka", "nats": "NATS", "redis": "Redis"}

FULL: Final = 700.0
"""Milliseconds of CPU a second that one process is given: the rest is for bursts."""

STATE_EVERY: Final = 1800.0
"""Seconds; the default of `state_every`."""


class Load(NamedTuple):
    """What a thousand engines might publish.

    Attributes:
        name: for the table.
        rate: batches a second of each engine.
        kilobytes: of a batch, token ids included.
        blocks: in each engine's cache.
    """

    name: str
    rate: float
    kilobytes: float
    blocks: int


LOADS: Final = (
    Load("2 batches/s of 1.8 kB, 20,000 blocks", 2, 1.8, 20_000),
    Load("10 batches/s of 0.5 kB, 20,000 blocks", 10, 0.5, 20_000),
    Load("10 batches/s of 1.8 kB, 100,000 blocks", 10, 1.8, 100_000),
    Load("10 batches/s of 5.3 kB, 100,000 blocks", 10, 5.3, 100_000),
)
THOUSAND: Final = 1000
LARGEST: Final = 100


def measured_table(runs: Sequence[dict[str, Any]]) -> list[str]:
    """What each process took."""
    columns = [
        "engines",
        "batches/s of each",
        "kB of one",
        "leaf",
        "log",
        "aggregator",
        "with all 16 routers",
        "router",
        "leaf, MiB",
        "log",
        "aggregator",
        "router",
        "others",
    ]
    rows = []
    for run in runs:
        points = list(windows(run))
        for rate in run["rates"]:
            near = [
                (w, p)
                for w, p in zip([w for w in run["windows"] for _ in (0, 1)], points, strict=True)
                if w["rate"] == rate
            ]
            even = [(w, p) for w, p in near if w["split"][0] == w["split"][1]]
            all_of = [
                p["CPU of an aggregator"] / 10 for w, p in near if p["sent"] > 0 and w["split"][0] != w["split"][1]
            ]

            def middle(name: str, by: float = 1.0, even: list[tuple[Any, Point]] = even) -> str:
                return number(median(p[name] for _, p in even) / by)

            rows.append(
                [
                    str(run["engines"]),
                    middle("batches of one"),
                    number(median(p["kB"] / p["batches"] for _, p in even)),
                    middle("CPU of a leaf", 10),
                    middle("CPU of the log", 10),
                    middle("CPU of an aggregator", 10),
                    number(median(all_of)) if all_of else "",
                    middle("CPU of a router", 10),
                    middle("memory of a leaf"),
                    middle("memory of the log's server"),
                    middle("memory of an aggregator"),
                    middle("memory of a router"),
                    number(100 * median(w["others"] for w, _ in even)),
                ]
            )
    return markdown_table(columns, rows)


def model_table(compared: Sequence[Compared]) -> list[str]:
    """The costs, and what they predict of the largest fleet."""
    rows = []
    for each in compared:
        quantity, unit = each.fitted.quantity, each.fitted.quantity.unit
        costs = [
            f"{number(c)} {WORDS.get(name, name)}".strip()
            for c, name in zip(each.fitted.coefficients, quantity.features, strict=True)
            if c
        ]
        if each.fitted.turn:
            costs.append(f"turns of {1e3 * each.fitted.turn:.0f} ms")
        low, high = min(each.measured), max(each.measured)
        spread = f"{number(median(each.measured))} ({number(low)} to {number(high)})"
        off = f"{each.deviation:+.0f} %"
        rows.append(
            [
                f"{quantity.name}, {unit}",
                " + ".join(costs),
                f"{100 * each.fitted.worst:.0f} %",
                number(each.predicted),
                spread,
                off if abs(each.deviation) <= 20 else f"**{off}**",
            ]
        )
    return markdown_table(["", "fitted", "fit, at worst", "predicted", "measured", "off by"], rows)


def recovery_table(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Seconds until routers are exact."""
    rows = []
    for run in runs:
        points = list(recoveries(run))
        cells = []
        for quantity in RECOVERIES:
            took = [point[quantity.name] for point in points if quantity.name in point]
            cells.append(f"{number(median(took))} ({number(min(took))} to {number(max(took))})")
        journal, load = (median(point[name] for point in points) for name in ("journal", "load"))
        rows.append([str(run["engines"]), f"{run['engines'] * run['blocks']:,}", number(journal), *cells, number(load)])
    columns = ["engines", "blocks", "MB behind states", *(quantity.name for quantity in RECOVERIES), "load"]
    return markdown_table(columns, rows)


def sized(compared: Sequence[Compared], load: Load) -> list[str]:
    """One row: what a thousand engines take."""
    by = {each.fitted.quantity.name: each.fitted for each in compared}
    run = {"engines": THOUSAND, "blocks": load.blocks}
    batches = load.rate * THOUSAND
    point = load_of(run, batches, batches * load.kilobytes * 1e3) | {"sent": batches * ROUTERS / 2, "MB since": 0.0}
    state = by["journal of an aggregator"](point)
    kept = by["journal of an aggregator"].coefficients[1]
    tail = min(LEAST_TAIL / MB, kept * load.rate * load.kilobytes / 1e3 * STATE_EVERY) * THOUSAND
    full = point | {"journal": state + tail}
    whole = point | {"journal": state + tail / 2, "records": tail / 2 / (kept * load.kilobytes)}

    def divided(shards: int) -> Point:
        return {name: value / shards for name, value in whole.items()} | {"one": 1.0}

    cpu = by["CPU of an aggregator"]
    shards = next(shards for shards in count(1) if cpu(divided(shards)) <= FULL)
    shard = divided(shards)
    return [
        load.name,
        f"{number(by['CPU of a leaf'](point) / 10)} %",
        f"{number(by['leaf → log'](point) / 1e3)} MB/s",
        f"{number(by['CPU of the log'](point) / 1e3)} cores",
        f"2 x {shards}, {number(shards * cpu(shard) / 1e3)} cores a side",
        f"{number(by['memory of an aggregator'](full) / 1024)} GiB",
        f"{number(batches)}/s, {number(by['aggregator → a router'](point) / 1e3)} MB/s",
        f"{number(by['aggregator → a router'](point) * ROUTERS / 1e3)} MB/s",
        number(by["aggregator, its CPU"](shard) + by["router, its CPU"](shard)),
        number(by["region, CPU of an aggregator"](shard) + by["region, CPU of a router"](whole)),
        number(by["router, its CPU"](whole)),
    ]


def thousand_table(compared: Sequence[Compared]) -> list[str]:
    """What a thousand engines take."""
    columns = [
        "each engine",
        "a leaf",
        "into the log",
        "log",
        "aggregators",
        "memory of a side",
        "a router gets",
        "16 routers get",
        "aggregator back, s",
        "region, s",
        "router, s",
    ]
    return markdown_table(columns, [sized(compared, load) for load in LOADS])


def report(found: dict[str, dict[str, Any]]) -> str:
    """For docs/BENCHMARKS.md: all logs that were measured."""
    lines: list[str] = []
    for log, told in found.items():
        runs, about = told["runs"], told["machine"]
        lines += [f"**{NAMES[log]}** ({told['date']}, {about['processor']}, {about['cores']} cores):", ""]
        lines += [
            "CPU in % of a core, of a router that of reading into its view; medians. Others' is of all other processes:",
            "",
        ]
        lines += [*measured_table(runs), "", "Seconds until every block is right, median and range:", ""]
        lines += [*recovery_table(runs), ""]
        for engines in sorted({run["engines"] for run in runs if run["engines"] > FITTED}, reverse=True):
            lines += [f"Fitted on fleets of up to {FITTED} engines, predicted of {engines}:", ""]
            lines += [*model_table(compare(runs, engines)), ""]
    return "\n".join(lines)


def sizes(found: dict[str, dict[str, Any]]) -> str:
    """For docs/OPERATIONS.md."""
    return "\n".join(thousand_table(compare(found["kafka"]["runs"], LARGEST)))


def render(results: Path = RESULTS, document: Path = DOCUMENT, sizing: Path = SIZING) -> None:
    """Write the tables anew."""
    found = json.loads(results.read_text())
    for path, text in ((document, report(found)), (sizing, sizes(found))):
        path.write_text(into_document(path.read_text(), text, BEGIN, END))
