"""Generate docs/spec/matrix.md from the files in docs/spec/results and from the captures.

Run it with ``python -m tests.conform.matrix``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Final

from kvbus.tools.conform.engine.clauses import WATCHED
from kvbus.tools.conform.router.cases import CASES, CLAUSES
from kvbus.tools.conform.vectors import VECTORS
from tests.conform.judged import CAPTURES as ENGINES
from tests.conform.judged import DECODERS
from tests.conform.recordings import FILED
from tests.conform.results import RESULTS, SPEC, Result, load

PAGE: Final = SPEC / "matrix.md"
INDEXER: Final = RESULTS / "vectors-dynamo-1.6.1-indexer.json"

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

This page shows what was observed. *Kept*: a run or a capture shows that the program keeps the clause. *Broken*: the cell names
the run that shows it. *Not seen*: no run shows it. `python -m tests.conform.matrix` makes each cell from
[results](results/README.md) and from the captures in [tests/wire/data](../../tests/wire/data/README.md). A test compares
the page, and tests repeat the cheaper runs. [recordings.md](recordings.md) has the verdicts on each capture, and
[profiles.md](profiles.md) those on kvbus's profiles. The head of a column links to proposed fixes.

## Publishers

*judged*: `kvbus conform engine` ran against the release. A name in this `type` is a capture. *read*: the release's
source says so. (S) is a SHOULD.

"""

_UNSEEN: Final = """
5.2, 5.3 and 5.4 are about a state on subscription, 5.5 of snapshots, 14.1 of CURVE. No released engine has any of these
(vllm#57789 proposes snapshots), so only kvbus can show them. 1.4, 1.5, 4.6, 4.8 and 9.2 need conditions that not every run
has: batches during an answer, heartbeats, a thousand batches, two media.

"""

_READERS: Final = """## Readers

The verdicts of `kvbus conform router`, by clause: the broken cases, or *kept* if none is broken. The next section has each
case.

"""

_CASES: Final = """
## The cases at real routers

Missing / dead blocks. A cell is empty if the case is kept. *Stops*: the router stopped reading. AIBrix reads only
arrays, so it gets arrays in all cases except `maps`, `nulls-left-out` and `unknown-field`.

"""

_INDEXER: Final = """
## The vectors at a real reader

Dynamo's indexer (1.6.1) reads these [vectors](vectors/README.md) differently from the specification. The publisher
replays only the batches of the vector (`tests/spec/test_dynamo.py`).

"""

_DECODERS: Final = """
## The vectors at published decoders

`msgspec.msgpack.Decoder(KVEventBatch)` of the `kv_events.py` in the published wheels (`tests/spec/test_published.py`). {counts}
For the others it raises the error in the table, and the whole batch is lost. No decoder can read `not-msgpack` and `no-batch`.

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
        f"read: {each['what']}"
        for each in read()
        if (each["peer"], each["clause"], each["outcome"]) == (peer, clause, outcome)
    ]


@cache
def _captures(prefix: str) -> dict[str, dict[str, list[str]]]:
    captures = json.loads(FILED.read_text())
    return {name: found for name, found in captures.items() if prefix and name.startswith(prefix)}


def publisher(peer: str, clause: str) -> tuple[str, str]:
    """Return the outcome of a clause at a publisher, and the run or capture that shows it."""
    verdicts = [result.of_clause(clause) for name, result in load("engines").items() if name.startswith(peer)]
    captures = _captures(PUBLISHERS[peer][2])
    for outcome, levels in (("broken", ("MUST", "SHOULD")), ("kept", ("kept",))):
        runs = {each["level"] for each in verdicts if each["outcome"] == outcome}
        shown = {name: level for name, found in captures.items() for level in levels if clause in found[level]}
        names = [f"`{next(iter(shown))}`" + (f" and {len(shown) - 1} more" if len(shown) > 1 else "")] if shown else []
        known = ["judged"] * bool(runs) + names + _read(peer, clause, outcome)
        if known:
            level = runs | set(shown.values()) or {str(WATCHED[clause].level)}
            return outcome, f"{' (S)' if outcome == 'broken' and level == {'SHOULD'} else ''}: {', '.join(known)}"
    return "not seen", ""


def reader(peer: str, clause: str) -> tuple[str, str]:
    """Return the outcome of a clause at a router, and the cases that show it."""
    verdicts = [each for each in load("routers")[peer].verdicts if each["clause"] == clause]
    broken = [each for each in verdicts if each["outcome"] == "broken"]
    known = sorted({f"`{each['case']}`" for each in broken}) + _read(peer, clause, "broken")
    if known:
        should = {each["level"] for each in broken} == {"SHOULD"}
        return "broken", f"{' (S)' if should else ''}: {', '.join(known)}"
    return ("kept", "") if any(each["outcome"] == "kept" for each in verdicts) else ("not seen", "")


def played(result: Result, case: str) -> str:
    """Return the cell of a case in the table of routers."""
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
    counts = [f"{ENGINES[each][0]}'s decodes {sum(not one for one in said[each].values())}" for each in ENGINES]
    head = ["vector", *(subject for subject, _ in ENGINES.values()), "clause"]
    rows = [
        [f"`{name}`", *(said[each][name] or "decoded" for each in ENGINES), ", ".join(VECTORS[name].clauses)]
        for name in vectors
    ]
    text = f"Of {len(VECTORS)} vectors {', '.join(counts)}: that of 0.11.1 reads arrays alone."
    return _DECODERS.format(counts=text) + table(head, rows)


def page() -> str:
    publishers = table(
        ["clause", *(headed(subject, page) for subject, page, _ in PUBLISHERS.values())],
        (
            [f"{number} {asked.clause.title}", *("".join(publisher(peer, number)) for peer in PUBLISHERS)]
            for number, asked in WATCHED.items()
        ),
    )
    heads = [headed(*each) for each in ROUTERS.values()]
    readers = table(
        ["clause", *heads],
        (
            [f"{number} {clause.title}", *("".join(reader(peer, number)) for peer in ROUTERS)]
            for number, clause in CLAUSES.items()
        ),
    )
    found = load("routers")
    cells = {case.name: [played(found[peer], case.name) for peer in ROUTERS] for case in CASES}
    cases = table(
        ["case", "clauses", *heads],
        ([f"`{case.name}`", ", ".join(case.clauses), *cells[case.name]] for case in CASES if any(cells[case.name])),
    )
    wrong: dict[str, Any] = json.loads(INDEXER.read_text())
    indexer = table(
        ["vector", "at the indexer", "clause"],
        (
            [f"`{name}`", wrong[name], f"{', '.join(vector.clauses)}: {vector.title[0].lower()}{vector.title[1:]}"]
            for name, vector in VECTORS.items()
            if name in wrong
        ),
    )
    said = decoders(json.loads(DECODERS.read_text()))
    return f"{_HEAD}{publishers}{_UNSEEN}{_READERS}{readers}{_CASES}{cases}{_INDEXER}{indexer}{said}"


if __name__ == "__main__":
    PAGE.write_text(page())
