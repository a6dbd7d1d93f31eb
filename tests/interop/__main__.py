"""Run every router in every interop case, each in its own process, and write the results into docs/INTEROP.md.

    python -m tests.interop [--router NAME] [--case NAME] [--jobs 3]

If routers or cases are selected, the document is not changed. Exit code 1: a result differs from `expected.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from .cache import Score
from .cases import CASES, Case, play
from .expected import DIRECT, THROUGH_KVBUS, Belief
from .kinds import KINDS
from .report import DOCUMENT, Cell, replaced, written

if TYPE_CHECKING:
    from .routers import Kind

LIMIT: Final = 400.0
"""Maximum duration of one interop case, in seconds."""


async def cell(kind: Kind, case: Case, slot: int, slots: int) -> Cell | None:
    """Run one case with one router in another process, and return its result; None if the case failed."""
    command = [sys.executable, "-m", "tests.interop", "--router", kind.name, "--case", case.name, "--here"]
    env = os.environ | {"PYTEST_XDIST_WORKER": f"gw{slot}", "PYTEST_XDIST_WORKER_COUNT": str(slots)}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=env)
    assert process.stdin is not None
    assert process.stdout is not None
    out = b""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LIMIT):
            out = await process.stdout.readline()
    process.stdin.close()  # the child ends itself and all that it started
    try:
        async with asyncio.timeout(60):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
    if not out:
        return None
    live, direct, behind = json.loads(out)
    return Cell(live, Score(*direct), Score(*behind))


async def here(kind: Kind, case: Case) -> None:
    """Run one case with one router in this process. Stop early when the parent process closes the standard input."""
    asked = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(asked), sys.stdin)
    with tempfile.TemporaryDirectory() as directory:
        playing = asyncio.ensure_future(play(case, kind, Path(directory)))
        nobody = asyncio.ensure_future(asked.read())
        await asyncio.wait((playing, nobody), return_when=asyncio.FIRST_COMPLETED)
        nobody.cancel()
        if not playing.done():
            playing.cancel()
        print(json.dumps(await playing), flush=True)  # noqa: T201 - for the process above


def unexpected(kind: Kind, case: Case, found: Cell | None) -> bool:
    """Return whether a router's result in a case differs from the expected one in `expected.py`."""
    if found is None:
        return True
    sides = ((DIRECT, found.direct), (THROUGH_KVBUS, found.behind))
    return not all(side[kind.name].get(case.name, Belief.EXACT).agrees(each, found.live) for side, each in sides)


async def campaign(kinds: list[Kind], cases: list[Case], jobs: int) -> tuple[dict[tuple[str, str], Cell], list[str]]:
    """Run all cases with all routers, and return the results and the messages about unexpected results."""
    cells: dict[tuple[str, str], Cell] = {}
    wrong: list[str] = []
    waiting = [(kind, case) for case in sorted(cases, key=lambda case: -case.seconds) for kind in kinds]

    async def worker(slot: int) -> None:
        while waiting:
            kind, case = waiting.pop(0)
            found = await cell(kind, case, slot, jobs)
            text = f"{kind.name:28} {case.name:18} failed"
            if found is not None:
                cells[kind.name, case.name] = found
                numbers = (*found.direct, *found.behind)
                text = "{:28} {:18} directly {} / {}, through kvbus {} / {}".format(kind.name, case.name, *numbers)
            if unexpected(kind, case, found):
                wrong.append(text)
            print(text, flush=True)  # noqa: T201

    await asyncio.gather(*(worker(slot) for slot in range(jobs)))
    return cells, wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.interop")
    parser.add_argument("--router", help="run only routers with this text in their names")
    parser.add_argument("--case", help="run only the case with this name")
    parser.add_argument("--jobs", type=int, default=3, help="number of cases that run at the same time")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    kinds = [kind for kind in KINDS if chosen.router is None or chosen.router in kind.name]
    cases = [case for case in CASES if chosen.case in (None, case.name)]
    if chosen.here:
        asyncio.run(here(kinds[0], cases[0]))
        return 0
    lacking = {kind.name: why for kind in kinds if (why := kind.lacking())}
    for name, why in lacking.items():
        print(f"NOT HERE: {name}: {why}")  # noqa: T201
    cells, wrong = asyncio.run(campaign([kind for kind in kinds if kind.name not in lacking], cases, chosen.jobs))
    if chosen.router is None and chosen.case is None:
        DOCUMENT.write_text(replaced(DOCUMENT.read_text(), written(cells, lacking)))
    for line in wrong:
        print(f"UNEXPECTED: {line}")  # noqa: T201
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
