"""Read and write the results of real engines and routers in docs/spec/results.

The matrix is generated from these files.

``python -m tests.conform.results KIND/NAME SUBJECT HOW < REPORT`` stores a report that ``kvbus conform … --json`` has
printed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

SPEC: Final = Path(__file__).parents[2] / "docs" / "spec"
RESULTS: Final = SPEC / "results"
_KEPT: Final = ("clause", "case", "outcome", "level", "message", "counts")


class Result(NamedTuple):
    """The stored results of one engine or router.

    Attributes:
        name: name of the file, without its extension.
        subject: the judged program, with its version.
        how: the options of the run.
        verdicts: the verdicts of the report, without their evidence.
    """

    name: str
    subject: str
    how: str
    verdicts: list[dict[str, Any]]

    def of_clause(self, clause: str) -> dict[str, Any]:
        """Return the verdict about a clause. An engine's result has exactly one for each clause."""
        return next(each for each in self.verdicts if each["clause"] == clause)

    def of_case(self, case: str) -> dict[str, Any] | None:
        """Return the verdict about a case, which is the same for all clauses of the case; None if the case was not
        played.
        """
        return next((each for each in self.verdicts if each["case"] == case), None)


def store(name: str, subject: str, how: str, report: dict[str, Any]) -> None:
    """Write a report to its file, with one verdict on each line."""
    lines = [json.dumps({key: each[key] for key in _KEPT if each[key]}) for each in report["verdicts"]]
    head = json.dumps({"subject": subject, "how": how, "seen": report["seen"]})[:-1]
    body = ",\n".join(lines)
    (RESULTS / f"{name}.json").write_text(f'{head}, "verdicts": [\n{body}\n]}}\n')


def load(kind: str) -> dict[str, Result]:
    """Return all results of a kind (`engines` or `routers`), by file name."""
    found = {}
    for path in sorted((RESULTS / kind).glob("*.json")):
        said = json.loads(path.read_text())
        verdicts = [{"case": "", "counts": {}} | each for each in said["verdicts"]]
        found[path.stem] = Result(path.stem, said["subject"], said["how"], verdicts)
    return found


if __name__ == "__main__":
    kind_and_name, subject, how = sys.argv[1:]
    store(kind_and_name, subject, how, json.load(sys.stdin))
