"""What the live stream, the probes and ``/metrics`` notice of clients that ask over HTTP.

Every run has a bus of its own with a filled index, a live stream at a rate, and a client that probes now and then. Cases
take turns: nobody else asks; nobody again, which says how much two equal runs differ here; questions at a rate, in each
form, and those with nothing to look up, which are the floor; a crowd.
On two cores all of them share one with engine and router, and kvbus has the other to itself. So engine and router go
first, then whoever asks at a rate, and the crowd is polite (nice): the time that somebody waits for this core is not
kvbus's. kvbus goes before what else the machine does on its core, as the kernel's thread that looks at memory: such
threads had it for 1.5 ms six times a second, which is in every hundredth question.
"""

from __future__ import annotations

import itertools
from typing import Final, NamedTuple

import msgspec

from . import asker
from .processes import go_first
from .report import Section, Series, Table, Target, ratios
from .setups import Setup, percentile, running
from .turns import alternate

RATE: Final = 1000
"""Batches a second of all sources."""
SOURCES: Final = 100
QUESTIONS: Final = 50.0
CLIENTS: Final = 100
ASKED: Final = f"{QUESTIONS:.0f} questions a second"
CASES: Final[dict[str, tuple[asker.Kind, asker.Form] | None]] = {
    "nobody": None,
    "nobody, again": None,
    ASKED: ("questions", "json"),
    f"{ASKED}, packed": ("questions", "packed"),
    f"{ASKED}, by hashes": ("questions", "hashes"),
    f"{ASKED}, by hashes in msgpack": ("questions", "integers"),
    f"{ASKED}, of one unknown block": ("questions", "unknown"),
    f"{CLIENTS} clients that never wait": ("crowd", "json"),
}
SHARES: Final = {"p50": 0.5, "p99": 0.99}


class Noticed(NamedTuple):
    """One run: of the stream and of each probed path the percentiles in seconds, and what those who asked got.

    ``questions`` are the percentiles of those who asked them, zeros if nobody did; ``failed`` are probes without an
    answer.
    """

    stream: dict[str, float]
    questions: dict[str, float]
    probes: dict[str, dict[str, float]]
    failed: int
    answered: float
    refused: float


def run(*, quick: bool, runs: int) -> Section:
    """All cases in turn."""
    blocks, seconds = (256_000, 2) if quick else (1_000_000, 30)
    section = Section(
        "asking",
        f"The stream while clients ask, at {blocks:,} live blocks of {SOURCES} sources and {RATE:,} batches a second",
    )
    found = alternate("asking", runs, list(CASES), lambda case: _measure(case, blocks, seconds))
    alone = found["nobody"]
    table = Table(
        f"By the same turn's run in which nobody asked; prompts of {asker.BLOCKS:,} blocks as JSON, or as it says",
        [
            "",
            "stream p50, us",
            "p50 x",
            "p99, us",
            "p99 x",
            "question p50, ms",
            "p99, ms",
            "/livez p99, ms",
            "p99 x",
            "/metrics p99, ms",
            "p99 x",
            "probes failed",
            "answers/s",
            "refused/s",
        ],
    )
    for case, results in found.items():
        times = {name: [each.stream[name] for each in results] for name in SHARES}
        by = {name: ratios(times[name], [each.stream[name] for each in alone]) for name in SHARES}
        probed: list[float | str] = []
        for path in asker.PROBES:
            late = [each.probes[path]["p99"] for each in results]
            probed += [
                Series(late).median * 1e3,
                _with_spread(ratios(late, [each.probes[path]["p99"] for each in alone])),
            ]
        asked = {name: Series([each.questions[name] * 1e3 for each in results], "ms") for name in SHARES}
        questions: list[float | str] = ["", ""]
        if CASES[case] is not None:
            questions = [asked["p50"].median, _with_spread(asked["p99"])]
        table.add(
            case,
            Series(times["p50"]).median * 1e6,
            _with_spread(by["p50"]),
            Series(times["p99"]).median * 1e6,
            _with_spread(by["p99"]),
            *questions,
            *probed,
            sum(each.failed for each in results),
            Series([each.answered for each in results]).median,
            Series([each.refused for each in results]).median,
        )
        if (how := CASES[case]) is not None and "unknown" not in how:
            name = "-".join(how)
            section.targets.append(Target(f"asking-{name}", f"the stream's p99 with {case}", by["p99"], 1.2))
            if how[0] == "questions":
                what = f"p99 of a question of {asker.BLOCKS:,} blocks, {case}"
                section.targets.append(Target(f"asking-{name}-answer", what, asked["p99"], 2.0))
    section.tables.append(table)
    return section


def _with_spread(series: Series) -> str:
    return f"{series.median:.2f} ({series.spread})"


def _measure(case: str, blocks: int, seconds: int) -> Noticed:
    fill, rate = blocks // 60 // SOURCES, RATE / SOURCES
    batches = fill + round(seconds * rate)
    setup = Setup("kvbus", f"asked:{fill}", batches, ranks=SOURCES, rate=rate, prefill=fill, apart=True)
    with running(setup) as processes:
        probe = processes.asker(asker.Spec(processes.http, "probe", setup.load))
        for each, priority in ((processes.relay, 1), (processes.engine, 2), (processes.routers, 2)):
            if each is not None:
                go_first(each.pid, priority)
        others = []
        if (how := CASES[case]) is not None:
            kind, form = how
            nice = 19 if kind == "crowd" else 0
            asking = processes.asker(asker.Spec(processes.http, kind, setup.load, QUESTIONS, CLIENTS, nice, form))
            if kind == "questions":
                go_first(asking.pid, 1)
            others = [asking]
        for child in (probe, *others):
            child.tell("run")
        result = processes.run()
        probed, *asked = [msgspec.convert(child.ask("stop"), asker.Asked, strict=False) for child in (probe, *others)]
        processes.check_kvbus(joined_late=True)  # a hundred connections take their time
    answered = sum(each.statuses.get(200, 0) for each in asked)
    refused = sum(sum(each.statuses.values()) for each in asked) - answered
    times = sorted(itertools.chain.from_iterable(each.times.get("/query", ()) for each in asked)) or [0.0]
    probes = {path: _shares(sorted(late)) for path, late in probed.times.items()}
    failed = sum(probed.statuses.values()) - probed.statuses.get(200, 0)
    return Noticed(
        _shares(result.latencies), _shares(times), probes, failed, answered / result.seconds, refused / result.seconds
    )


def _shares(ordered: list[float]) -> dict[str, float]:
    return {name: percentile(ordered, share) for name, share in SHARES.items()}
