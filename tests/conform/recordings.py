"""What the judge finds in each recorded stream, as docs/spec/recordings.md: ``python -m tests.conform.recordings``."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvbus.conform.engine.recording import judge_recording
from kvbus.conform.report import Report
from kvbus.conform.verdict import Level, Outcome
from tests.wire.captures import CAPTURES, load

PAGE: Final = Path(__file__).parents[2] / "docs" / "spec" / "recordings.md"

_HEAD: Final = """# Recorded streams, judged

What `kvbus conform engine FILE` finds in each stream of [tests/wire/data](../../tests/wire/data/README.md), by the
clauses of [kv-events.md](kv-events.md). What is in neither column was kept or not seen. Written by
`python -m tests.conform.recordings`, and a test compares it.

| stream | kept | a MUST is broken | a SHOULD is broken |
|---|---|---|---|
"""


def judged(name: str) -> Report:
    return judge_recording(name, load(name))


def row(report: Report) -> str:
    def clauses(level: Level) -> str:
        found = [each for each in report.verdicts if each.outcome is Outcome.BROKEN and each.level is level]
        return ", ".join(str(each.clause) for each in found) or "none"

    kept = report.count(Outcome.KEPT)
    return f"| `{report.subject}` | {kept} | {clauses(Level.MUST)} | {clauses(Level.SHOULD)} |\n"


def page() -> str:
    return _HEAD + "".join(row(judged(name)) for name in CAPTURES)


if __name__ == "__main__":
    PAGE.write_text(page())
