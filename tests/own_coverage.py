"""How much of each module its own tests cover: ``python -m tests.own_coverage [MODULE ...]`` (``make coverage``).

Coverage by the whole suite says little: a system test passes through every line and proves none of them. Here each
module meets its mirror alone (`kvbus/core/source.py`, `tests/core/test_source.py`). Floors and mirrors of another name
are in own_coverage.toml; a module below its floor, or without tests of its own, fails the run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvbus.compiled import PURE

ROOT: Final = Path(__file__).parents[1]
PACKAGES: Final = ("core", "daemon", "admin", "client", "config", "conform", "transport/live")
FILE: Final = Path(__file__).with_suffix(".toml")


class Covered(NamedTuple):
    """What of a module ran."""

    lines: int
    of_lines: int
    branches: int
    of_branches: int

    @property
    def percent(self) -> float:
        """Of lines and branches together."""
        of = self.of_lines + self.of_branches
        return 100 * (self.lines + self.branches) / of if of else 100.0


def modules() -> list[str]:
    """Every module that is to have tests of its own, as `core/sequencing/conflict`."""
    package = ROOT / "kvbus"
    found = (path for name in PACKAGES for path in (package / name).rglob("*.py") if path.name != "__init__.py")
    return sorted(str(path.relative_to(package).with_suffix("")) for path in found)


def mirror_of(module: str, mirrors: Mapping[str, str]) -> str:
    """The tests of a module."""
    where, _, name = module.rpartition("/")
    return mirrors.get(module, f"tests/{where}/test_{name}.py")


def measure(modules: Sequence[str], tests: str) -> dict[str, Covered]:
    """Run the tests of some modules alone, in a process of their own.

    Raises:
        RuntimeError: a test fails.
    """
    sources = {f"kvbus/{module}.py": module for module in modules}
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        coverage = [sys.executable, "-m", "coverage"]
        # compiled modules have no lines to be covered
        env = {**os.environ, PURE: "1", "COVERAGE_FILE": str(Path(directory) / "data")}
        pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", tests]
        done = subprocess.run(
            [*coverage, "run", "--branch", f"--include={','.join(sources)}", *pytest],
            cwd=ROOT, env=env, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{tests} fails:\n{done.stdout}{done.stderr}")
        made = subprocess.run([*coverage, "json", "-q", "-o", str(report)], cwd=ROOT, env=env, check=False)
        files = {} if made.returncode else json.loads(report.read_text())["files"]
    return {module: _covered(files.get(source)) for source, module in sources.items()}


def _covered(found: Mapping[str, Any] | None) -> Covered:
    if found is None:
        return Covered(0, 1, 0, 0)  # its own tests never import it
    names = ("covered_lines", "num_statements", "covered_branches", "num_branches")
    return Covered(*(found["summary"][name] for name in names))


def verdict(known: Sequence[str], covered: Mapping[str, Covered], settings: Mapping[str, Any]) -> list[str]:
    """What is wrong: a floor that is not held, tests that are missing, settings for what is not there."""
    floors, without = settings["floors"], settings["without"]
    wrong = [f"{name}: in own_coverage.toml, and no module" for name in {*floors, *without} - set(known)]
    wrong += [f"{name}: no tests of its own" for name in known if name not in without and name not in floors]
    wrong += [
        f"{name}: {each.percent:.1f} %, and its floor is {floors[name]} %"
        for name, each in covered.items()
        if each.percent < floors.get(name, 0)
    ]
    return sorted(wrong)


def main(wanted: Sequence[str]) -> int:
    """Measure, print a table, and say what is wrong."""
    settings = tomllib.loads(FILE.read_text())
    known = modules()
    chosen = [name for name in known if name in settings["floors"] and (not wanted or name in wanted)]
    shared: dict[str, list[str]] = {}
    for name in chosen:
        shared.setdefault(mirror_of(name, settings["mirrors"]), []).append(name)
    covered: dict[str, Covered] = {}
    say = partial(print, flush=True)
    say(f"{'module':36} {'lines':>9} {'branches':>9} {'%':>6} {'floor':>6}")
    with ThreadPoolExecutor(max_workers=2) as pool:
        for measured in pool.map(measure, shared.values(), shared):
            covered |= measured
            for name, each in measured.items():
                lines, branches = f"{each.lines}/{each.of_lines}", f"{each.branches}/{each.of_branches}"
                say(f"{name:36} {lines:>9} {branches:>9} {each.percent:6.1f} {settings['floors'][name]:6}")
    wrong = verdict(known, covered, settings)
    for line in wrong:
        say(f"WRONG {line}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
