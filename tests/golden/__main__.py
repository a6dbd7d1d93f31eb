"""Compare the golden cases (recorded outputs of kvbus: streams and texts) with the outputs of this source tree.

python -m tests.golden                      compare every case with the recorded hash
python -m tests.golden --diff COMMIT        and show the lines that differ from the outputs of COMMIT
python -m tests.golden --write              record the hashes of this tree
python -m tests.golden --print CASE         print the lines of a case
"""

from __future__ import annotations

import argparse
import difflib
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.golden.cases import cases
from tests.golden.hashes import FILE, digest, recorded, written
from tests.golden.texts import DATA, texts

ROOT: Final = Path(__file__).parents[2]

MOST_LINES: Final = 60
"""Maximum number of differing lines that are shown for each case."""


def main() -> int:
    """Run the command. Return 1 if a golden case differs from its recorded hash, else 0."""
    parser = argparse.ArgumentParser(prog="make golden", description="Compare golden streams.")
    parser.add_argument("--write", action="store_true", help="record the hashes of this tree")
    parser.add_argument("--diff", metavar="COMMIT", help="show what COMMIT sent instead, event by event")
    parser.add_argument("--print", metavar="CASE", dest="shown", help="print the lines of one case")
    given = parser.parse_args()
    every = cases()
    if given.shown:
        sys.stdout.writelines(f"{line}\n" for line in every[given.shown]())
        return 0
    found = {name: digest(case()) for name, case in every.items()}
    if given.write:
        FILE.write_text(written(found))
        for name, text in texts().items():
            (DATA / name).write_text(text())
        sys.stdout.write(f"{len(found)} cases and {len(texts())} texts recorded in {FILE.parent.relative_to(ROOT)}\n")
        return 0
    before = recorded()
    for name, text in texts().items():
        sys.stdout.writelines(_difference((DATA / name).read_text(), text(), f"recorded {name}"))
    wrong = sorted(name for name in found.keys() | before.keys() if found.get(name) != before.get(name))
    sys.stdout.write(f"{len(found)} cases, {len(wrong)} differ from the recorded hashes\n")
    for name in wrong:
        sys.stdout.write(f"\n{name}\n")
        if given.diff and name in every:
            _show(given.diff, name)
    return 1 if wrong else 0


def _show(commit: str, name: str) -> None:
    """Print how a golden case's output differs between an older commit and this tree."""
    with tempfile.TemporaryDirectory() as directory:
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True)
        subprocess.run(["tar", "-x"], cwd=directory, input=archive.stdout, check=True)
        command = [sys.executable, "-m", "tests.golden", "--print", name]
        before, after = (
            subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
            for root in (directory, ROOT)
        )
    sys.stdout.writelines(_difference(before, after, commit))


def _difference(before: str, after: str, origin: str) -> list[str]:
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), origin, "this tree", lineterm="", n=0))
    more = [f"… and {len(lines) - MOST_LINES} more lines"] if len(lines) > MOST_LINES else []
    return [f"{line}\n" for line in (*lines[:MOST_LINES], *more)]


if __name__ == "__main__":
    sys.exit(main())
