"""Judge each recorded stream by the specification, and write the results to docs/spec/recordings.md.

Run it with ``python -m tests.conform.recordings``.
"""

from __future__ import annotations

import json
from typing import Final

from kvbus.tools.conform.engine.judge import judge_recording
from kvbus.tools.conform.report import Level, Outcome, Report
from tests.conform.results import RESULTS, SPEC
from tests.wire.captures import CAPTURES, load

PAGE: Final = SPEC / "recordings.md"
FILED: Final = RESULTS / "captures.json"

_HEAD: Final = """# Recorded streams, judged

This page shows the verdicts of `kvbus conform engine FILE` on each recorded stream in
[tests/wire/data](../../tests/wire/data/README.md). The clauses are those of
[the standard](kv-events.md). A recording does not show all of them. `python -m tests.conform.recordings` writes this page.

| stream | number of kept clauses | clauses of which a MUST is broken | clauses of which a SHOULD is broken |
|---|---|---|---|
"""


def judged(name: str) -> Report:
    return judge_recording(name, load(name))


def row(name: str, found: dict[str, list[str]]) -> str:
    must, should = (", ".join(found[level]) or "none" for level in Level)
    return f"| `{name}` | {len(found['kept'])} | {must} | {should} |\n"


def summary(report: Report) -> dict[str, list[str]]:
    """Return the clauses that a stream keeps, and the clauses of which it breaks a MUST or a SHOULD."""
    broken = {
        str(level): [str(each.clause) for each in report.verdicts if each.fails(strict=True) and each.level is level]
        for level in Level
    }
    return {"kept": [str(each.clause) for each in report.verdicts if each.outcome is Outcome.KEPT]} | broken


def found() -> dict[str, dict[str, list[str]]]:
    return {name: summary(judged(name)) for name in CAPTURES}


def page(captures: dict[str, dict[str, list[str]]]) -> str:
    return _HEAD + "".join(row(name, each) for name, each in captures.items())


def main() -> None:
    captures = found()
    PAGE.write_text(page(captures))
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in captures.items())
    FILED.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
