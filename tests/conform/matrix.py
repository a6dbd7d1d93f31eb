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

This page shows which engine or router keeps which clause of [the standard](kv-events.md), as far as it was observed.
*Kept* means that a run or a recorded stream (a *capture*) shows that the program keeps the clause. *Broken* means that a run
or capture, which the cell names, shows the opposite. *Not seen* means that no run shows either. The head of a column links
to proposed fixes. `python -m tests.conform.matrix` makes each cell from [results](results/README.md) and from the captures in
[tests/wire/data](../../tests/wire/data/README.md). Tests compare this page and repeat the cheaper runs.
[recordings.md](recordings.md) has the verdicts on each capture, and [profiles.md](profiles.md) the verdicts on kvbus's
profiles.

## Publishers

*judged* means that `kvbus conform engine` ran against the release. A name in `code type` is a capture. *read* means that
the release's source code shows the verdict. *broken (S)* is a broken SHOULD, *broken* alone a broken MUST.

"""

_UNSEEN: Final = """
Only kvbus can keep 5.2, 5.3 and 5.4 (a state on subscription), 5.5 (snapshots) and 14.1 (CURVE), because no released engine
has these features (vllm#57789 proposes snapshots). 1.4, 1.5, 4.6, 4.8 and 9.2 are often not seen, because they need a run with
batches during an answer, ZMTP heartbeats, a thousand batches or two media.

"""

_READERS: Final = """## Readers

The table shows the verdicts of `kvbus conform router`. The kit tests each clause in one or several cases. A cell names the
cases in which the router broke the clause, or says *kept*. The next section has the result of each case.

"""

_CASES: Final = """
## The cases at real routers

A cell has the number of missing blocks (the engine holds them, the router does not), a slash, and the number of dead blocks
(the router holds them, the engine does not). It is empty if both are 0. *Stops* means that the router stopped reading. AIBrix
reads only arrays, so it gets arrays in all cases except `maps`, `nulls-left-out` and `unknown-field`.

"""

_INDEXER: Final = """
## The vectors at a real reader

A [vector](vectors/README.md) is a file with the messages of a publisher and the blocks that a reader must hold after them.
Dynamo's indexer (1.6.1) holds other blocks after these vectors (`tests/spec/test_dynamo.py`). The test's publisher can
replay only the batches of the vector.

"""

_DECODERS: Final = """
## The vectors at published decoders

The payloads of each vector were decoded with `msgspec.msgpack.Decoder(KVEventBatch)`, with the `kv_events.py` of published
wheels (`tests/spec/test_published.py`). {counts} For all other vectors the decoder raises the error in the table, and a reader
that uses it loses the whole batch. Payloads of `not-msgpack` and `no-batch` are not batches, so no decoder can read them.

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
    """Return whether a publisher keeps a clause of the specification, and the run or capture that shows it."""
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
    """Return whether a router keeps a clause of the specification, and the cases that show it."""
    verdicts = [each for each in load("routers")[peer].verdicts if each["clause"] == clause]
    broken = [each for each in verdicts if each["outcome"] == "broken"]
    known = sorted({f"`{each['case']}`" for each in broken}) + _read(peer, clause, "broken")
    if known:
        should = {each["level"] for each in broken} == {"SHOULD"}
        return "broken", f"{' (S)' if should else ''}: {', '.join(known)}"
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
    text = f"Of {len(VECTORS)} vectors, {', '.join(counts)}. The decoder of 0.11.1 reads only arrays."
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
