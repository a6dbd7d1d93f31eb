"""docs/spec/matrix.md, made of the files below docs/spec/results and of the captures: ``python -m tests.conform.matrix``."""

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
"""By the beginning of the names of their results: the head of the column, the page of findings, the release's captures."""

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

What was seen, not what is promised: *kept* where a run or a capture shows it, *broken* with what shows it, *not seen*
where nothing was. Every cell is made of files of [results](results/README.md) and of the captures in
[tests/wire/data](../../tests/wire/data/README.md), by `python -m tests.conform.matrix`; a test compares it, and tests run
the cheaper ones of these runs again. What the kit finds in each capture is in [recordings.md](recordings.md), at
kvbus's profiles in [profiles.md](profiles.md). A head of a column leads to what could be done about what is broken.

## Publishers

*judged*: `kvbus conform engine` at the release itself. A name in this `type` is a capture. *read*: in the release's
source. (S) is a SHOULD.

"""

_UNSEEN: Final = """
5.2, 5.3 and 5.4 are about a state on subscription, 5.5 of snapshots, 14.1 of CURVE: no released engine has any of these
(vllm#57789 proposes snapshots), so no peer but kvbus can show them. 1.4, 1.5, 4.6, 4.8 and 9.2 take what not every run
has: batches during an answer, heartbeats, a thousand batches, two media.

"""

_READERS: Final = """## Readers

What `kvbus conform router` found, by clause: the cases that are broken, or *kept* where none is. Each case is below.

"""

_CASES: Final = """
## The cases at real routers

Missing / dead blocks, empty where the case is kept, *stops* where the router reads no further. AIBrix gets its events as
arrays, but for `maps`, `nulls-left-out` and `unknown-field`: it reads no others.

"""

_INDEXER: Final = """
## The vectors at a real reader

What Dynamo's indexer (1.6.1) makes of the [vectors](vectors/README.md) that it does not read as they say, from a
publisher that has nothing to replay but what the vector says (`tests/spec/test_dynamo.py`).

"""

_DECODERS: Final = """
## The vectors at published decoders

`msgspec.msgpack.Decoder(KVEventBatch)` of the `kv_events.py` in the published wheels (`tests/spec/test_published.py`). {counts}
For the others it raises what stands here, and the whole batch is lost. `not-msgpack` and `no-batch` nobody can decode.

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
    """What became of a clause at a publisher, and how that is known."""
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
    """What became of a clause at a router, and the cases that show it."""
    verdicts = [each for each in load("routers")[peer].verdicts if each["clause"] == clause]
    broken = [each for each in verdicts if each["outcome"] == "broken"]
    known = sorted({f"`{each['case']}`" for each in broken}) + _read(peer, clause, "broken")
    if known:
        should = {each["level"] for each in broken} == {"SHOULD"}
        return "broken", f"{' (S)' if should else ''}: {', '.join(known)}"
    return ("kept", "") if any(each["outcome"] == "kept" for each in verdicts) else ("not seen", "")


def played(result: Result, case: str) -> str:
    """A cell of the cases."""
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
