"""Generate docs/spec/matrix.md from the files in docs/spec/results and from the captures.

Run it with ``python -m tests.conform.matrix``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from textwrap import fill
from typing import Final

from kvbus.tools.conform.engine.clauses import WATCHED
from kvbus.tools.conform.router.cases import CASES, CLAUSES
from kvbus.tools.conform.vectors import VECTORS
from tests.conform.judged import CAPTURES as ENGINES
from tests.conform.judged import DECODERS
from tests.conform.recordings import FILED
from tests.conform.results import RESULTS, SPEC, Result, load

PAGE: Final = SPEC / "matrix.md"

PUBLISHERS: Final = {
    "vllm-0.11.1": ("vLLM 0.11.1", "vllm.md", "vllm0110"),
    "vllm-0.33.0": ("vLLM 0.33.0", "vllm.md", "vllm033"),
    "sglang-0.5.23": ("SGLang 0.5.23", "sglang.md", "sglang0523"),
    "dynamo-mocker-1.6.1": ("Dynamo's mocker 1.6.1", "dynamo-mocker.md", ""),
    "llm-d-inference-sim-0.10.2": ("llm-d-inference-sim 0.10.2", "llm-d-inference-sim.md", ""),
    "kvbus": ("kvbus", "", ""),
}
"""The columns of publishers: title, page of findings, and name of the release's captures.

The key is the beginning of the names of the publisher's result files.
"""

ROUTERS: Final = {
    "dynamo-1.6.1-indexer": ("Dynamo 1.6.1, indexer", "dynamo-indexer.md"),
    "dynamo-1.6.1-kvrouter": ("Dynamo 1.6.1, KvRouter", "dynamo-kvrouter.md"),
    "vllm-router-0.1.17": ("vLLM router 0.1.17", "vllm-router.md"),
    "llm-d-kv-cache-0.9.0": ("llm-d-kv-cache 0.9.0", "llm-d-kv-cache.md"),
    "aibrix-0.7.0": ("AIBrix 0.7.0", "aibrix.md"),
    "smg-relay-0.14.1": ("SMG relay 0.14.1", "smg.md"),
    "kvbus-client": ("kvbus's library", ""),
}

_HEAD: Final = """# Who keeps which clause

This page shows which engine or router keeps which clause of [the standard](kv-events.md), as far as it was observed. *Kept*
means that a run or a recorded stream (a *capture*) shows that the program keeps the clause. *Not seen* means that nothing
shows whether it does. The head of a column links to the program's defects and proposed fixes. `python -m tests.conform.matrix`
writes this page from [results](results/README.md) and from the captures in [tests/wire/data](../../tests/wire/data/README.md).
[recordings.md](recordings.md) has the verdicts on each capture, and [profiles.md](profiles.md) the verdicts on kvbus's
profiles.

## Publishers

If a clause is *broken*, the cell says what shows it: a *live run* of `kvbus conform engine` against the release, a capture, or
the release's *source code*. *Broken SHOULD* means that only a recommendation is broken.

"""

_UNSEEN: Final = """
Only kvbus can keep 5.2, 5.3 and 5.4 (a state on subscription), 5.5 (snapshots) and 14.1 (CURVE), because no released engine
has these features (vllm#57789 proposes snapshots). No run shows 1.4, which needs batches during an answer, and 1.5, which
needs ZMTP heartbeats.

"""

_READERS: Final = """The table shows the verdicts of `kvbus conform router`, which tests each clause in one or several
cases. [The next table](#the-cases-at-real-routers) shows in which cases a router breaks a clause. All routers keep {kept}.
"""

_CASES: Final = """
## The cases at real routers

A cell has the number of missing blocks (the engine holds them, the router does not), a slash, and the number of dead blocks
(the router holds them, the engine does not). An empty cell means that both are 0. *Stops* means that the router stopped
reading. AIBrix reads only arrays, so it gets arrays in all cases except `maps`, `nulls-left-out` and `unknown-field`.

"""

_DECODERS: Final = """
## The vectors at published decoders

The table shows how `msgspec.msgpack.Decoder(KVEventBatch)` decodes the payloads of each vector, with the `kv_events.py` of
published wheels (`tests/spec/test_published.py`). {counts} If the decoder raises an error, a reader that uses it loses the
whole batch. Payloads of `not-msgpack` and `no-batch` are not batches, so no decoder can read them.

"""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines).replace("|  |", "| |").replace("|  |", "| |")


def headed(subject: str, page: str) -> str:
    return f"[{subject}](findings/{page})" if page else subject


@cache
def read() -> list[dict[str, str]]:
    found: list[dict[str, str]] = json.loads((RESULTS / "read.json").read_text())
    return found


def _read(peer: str, clause: str, outcome: str) -> list[str]:
    return [
        f"source code: {each['what']}"
        for each in read()
        if (each["peer"], each["clause"], each["outcome"]) == (peer, clause, outcome)
    ]


@cache
def _captures(prefix: str) -> dict[str, dict[str, list[str]]]:
    captures = json.loads(FILED.read_text())
    return {name: found for name, found in captures.items() if prefix and name.startswith(prefix)}


def publisher(peer: str, clause: str) -> tuple[str, str]:
    """Return whether a publisher keeps a clause of the specification, and the run or capture that shows a defect."""
    verdicts = [result.of_clause(clause) for name, result in load("engines").items() if name.startswith(peer)]
    captures = _captures(PUBLISHERS[peer][2])
    for outcome, levels in (("broken", ("MUST", "SHOULD")), ("kept", ("kept",))):
        runs = {each["level"] for each in verdicts if each["outcome"] == outcome}
        shown = {name: level for name, found in captures.items() for level in levels if clause in found[level]}
        more = f" and {len(shown) - 1} more capture{'s' if len(shown) > 2 else ''}" if len(shown) > 1 else ""
        names = [f"`{next(iter(shown))}`{more}"] if shown else []
        known = ["live run"] * bool(runs) + names + _read(peer, clause, outcome)
        if known and outcome == "kept":
            return outcome, ""
        if known:
            level = runs | set(shown.values()) or {str(WATCHED[clause].level)}
            return outcome, f"{' SHOULD' if level == {'SHOULD'} else ''} ({', '.join(known)})"
    return "not seen", ""


def reader(peer: str, clause: str) -> tuple[str, str]:
    """Return whether a router keeps a clause of the specification, and a note for the cell of the matrix.

    The note says that only a SHOULD is broken, or how the source code shows a defect that no case shows.
    """
    verdicts = [each for each in load("routers")[peer].verdicts if each["clause"] == clause]
    broken = [each for each in verdicts if each["outcome"] == "broken"]
    by_source = _read(peer, clause, "broken")
    if broken or by_source:
        should = {each["level"] for each in broken} == {"SHOULD"}
        return "broken", (" SHOULD" if should else "") + "".join(f" ({each})" for each in by_source if not broken)
    return ("kept", "") if any(each["outcome"] == "kept" for each in verdicts) else ("not seen", "")


def played(result: Result, case: str) -> str:
    """Return the text for one case in a router's column of the matrix."""
    verdict = result.of_case(case)
    if verdict is None or verdict["outcome"] == "not seen":
        return "not seen"
    if verdict["outcome"] == "kept":
        return ""
    counts = verdict["counts"]
    parts = [f"{counts['missing']} / {counts['dead']}"] if counts else []
    return ", ".join([*parts, *(["stops"] if "reads no further" in verdict["message"] else [])]) or "broken"


def decoders(said: dict[str, dict[str, str]]) -> str:
    vectors = [name for name in VECTORS if any(said[each][name] for each in ENGINES if each != "vllm-0.11.1")]
    counts = [
        f"the decoder of {ENGINES[each][0]} reads {sum(not one for one in said[each].values())}" for each in ENGINES
    ]
    head = ["vector", *(subject for subject, _ in ENGINES.values()), "clause"]
    rows = [
        [f"`{name}`", *(said[each][name] or "decoded" for each in ENGINES), ", ".join(VECTORS[name].clauses)]
        for name in vectors
    ]
    listed = f"{', '.join(counts[:-1])}, and {counts[-1]}"
    text = f"Of {len(VECTORS)} vectors, {listed}. The decoder of 0.11.1 reads only arrays."
    return _DECODERS.format(counts=text) + table(head, rows)


def page() -> str:
    seen = {number: ["".join(publisher(peer, number)) for peer in PUBLISHERS] for number in WATCHED}
    publishers = table(
        ["clause", *(headed(subject, page) for subject, page, _ in PUBLISHERS.values())],
        (
            [f"{number} {WATCHED[number].clause.title}", *cells]
            for number, cells in seen.items()
            if set(cells) != {"not seen"}
        ),
    )
    heads = [headed(*each) for each in ROUTERS.values()]
    read_by = {number: ["".join(reader(peer, number)) for peer in ROUTERS] for number in CLAUSES}
    kept = [f"{number} ({CLAUSES[number].title})" for number, cells in read_by.items() if set(cells) == {"kept"}]
    about = fill(_READERS.format(kept=", ".join(kept)), 120, break_on_hyphens=False)
    readers = table(
        ["clause", *heads],
        ([f"{number} {CLAUSES[number].title}", *cells] for number, cells in read_by.items() if set(cells) != {"kept"}),
    )
    found = load("routers")
    cells = {case.name: [played(found[peer], case.name) for peer in ROUTERS] for case in CASES}
    cases = table(
        ["case (cells: missing / dead blocks)", "clauses", *heads],
        ([f"`{case.name}`", ", ".join(case.clauses), *cells[case.name]] for case in CASES if any(cells[case.name])),
    )
    said = decoders(json.loads(DECODERS.read_text()))
    return f"{_HEAD}{publishers}{_UNSEEN}## Readers\n\n{about}\n\n{readers}{_CASES}{cases}{said}"


if __name__ == "__main__":
    PAGE.write_text(page())
