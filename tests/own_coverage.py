"""How much of each module its own tests cover: ``python -m tests.own_coverage [MODULE ...]`` (``make coverage``).

Coverage by the whole suite says little: a system test passes through every line and proves none of them. Here each
module meets its mirror alone (`kvbus/core/source.py`, `tests/core/test_source.py`). Floors and mirrors of another name
are in own_coverage.toml; a module below its floor, or without tests of its own, fails the run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from coverage import Coverage

from kvbus.common.compiled import PURE

ROOT: Final = Path(__file__).parents[1]
PACKAGES: Final = ("core", "daemon", "admin", "client", "config", "tools/conform", "transport/http", "transport/live")
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
    """The tests of a module; those of each tool have a folder right below `tests`."""
    where, _, name = module.removeprefix("tools/").rpartition("/")
    return mirrors.get(module, f"tests/{where}/test_{name}.py")


def measure(mirrors: Mapping[str, str]) -> dict[str, Covered]:
    """Run the tests of some modules, and count of each module what its own tests ran.

    Each file of tests is a context of coverage, and all of them share two processes: to start one for each of 250 files
    took longer than the tests. What runs while modules are imported counts for all.

    Args:
        mirrors: The file of tests of each module.

    Raises:
        RuntimeError: a test fails.
    """
    sources = {module: f"kvbus/{module}.py" for module in mirrors}
    by_size = sorted(set(mirrors.values()), key=lambda tests: -_size(tests))
    with tempfile.TemporaryDirectory() as directory:
        data = str(Path(directory) / "data")
        # compiled modules have no lines to be covered
        env = {**os.environ, PURE: "1", "COVERAGE_FILE": data}
        run = ["-m", "coverage", "run", "--branch", "--parallel-mode", f"--include={','.join(sources.values())}"]
        pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.own_coverage_contexts"]

        def share(tests: Sequence[str]) -> None:
            command = [sys.executable, *run, *pytest, *tests]
            done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"tests of modules fail:\n{done.stdout}{done.stderr}")

        with ThreadPoolExecutor() as pool:
            list(pool.map(share, filter(None, (by_size[::2], by_size[1::2]))))
        covered = Coverage(data_file=data)
        covered.combine()
        return {module: _covered(covered, sources[module], tests) for module, tests in mirrors.items()}


def _size(tests: str) -> int:
    """About how long they take; a file that is missing is for pytest to name."""
    path = ROOT / tests
    return path.stat().st_size if path.is_file() else 0


def _covered(covered: Coverage, source: str, tests: str) -> Covered:
    with tempfile.NamedTemporaryFile("r") as report:
        covered.json_report(morfs=[str(ROOT / source)], contexts=["^$", f"^{re.escape(tests)}$"], outfile=report.name)
        (found,) = json.load(report)["files"].values()
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
    covered = measure({name: mirror_of(name, settings["mirrors"]) for name in chosen})
    say = partial(print, flush=True)
    say(f"{'module':36} {'lines':>9} {'branches':>9} {'%':>6} {'floor':>6}")
    for name, each in covered.items():
        lines, branches = f"{each.lines}/{each.of_lines}", f"{each.branches}/{each.of_branches}"
        say(f"{name:36} {lines:>9} {branches:>9} {each.percent:6.1f} {settings['floors'][name]:6}")
    wrong = verdict(known, covered, settings)
    for line in wrong:
        say(f"WRONG {line}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
