"""Run a fault campaign.

Several cells (an engine, kvbus and routers each) run in parallel until enough faults have been made. The module shows
the progress and prints the summary.
"""

from __future__ import annotations

import asyncio
import platform
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from tests.chaos.bus import PortTakenError
from tests.chaos.cell import Cell
from tests.chaos.namespaces import why_not
from tests.chaos.plan import SHAPES
from tests.chaos.tally import Tally

ROUNDS: Final = 10
"""Number of rounds after which a cell is built anew. A cell whose kvbus is never killed is built only once."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A campaign's options.

    Attributes:
        seed: seed from which all plans of faults are made.
        faults: number of faults after which the campaign ends.
        seconds: seconds after which the campaign ends even if it has made fewer faults.
        cells: numbers of the cells that run. A cell is an engine, kvbus and routers; ``SHAPES`` describes each
            cell.
        generation: the only generation of each cell that is played; None: one generation after the other. A
            generation is a cell's processes, from their start until the cell is built anew.
        rounds: number of rounds in a generation; None: ``ROUNDS``, or no end if kvbus is never killed.
        first: number of the first round.
        width: number of generations that each cell plays in parallel, if its kvbus is killed.
    """

    seed: int
    faults: int = 10_000
    seconds: float = float("inf")
    cells: tuple[int, ...] = tuple(range(len(SHAPES)))
    generation: int | None = None
    rounds: int | None = None
    first: int = 0
    width: int = 1


class Campaign:
    """A campaign of faults in cells, with the given options. The results are counted in `tally`."""

    def __init__(self, wanted: Wanted, console: Console) -> None:
        self.wanted = wanted
        self.tally = Tally()
        self._console = console
        self._began = time.monotonic()
        self._told = 0.0

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._began

    @property
    def over(self) -> bool:
        return self.tally.total >= self.wanted.faults or self.elapsed > self.wanted.seconds

    async def run(self) -> Tally:
        """Run cells until the campaign's end. Failures are recorded in the tally."""
        lacking = {"mount": await why_not(network=False), "net": await why_not(network=True)}
        cells = list(self.wanted.cells)
        if lacking["mount"]:
            self.tally.skipped["disk full, restart on a full disk"] = lacking["mount"]
        if lacking["net"] and any(SHAPES[cell].namespaces for cell in cells):
            cells = [cell for cell in cells if not SHAPES[cell].namespaces]
            self.tally.skipped["packet loss, partition, tcp reset, link down"] = lacking["net"]
        progress = asyncio.ensure_future(self._progress())
        try:
            lanes = [
                (cell, lane)
                for lane in range(self.wanted.width)
                for cell in cells
                if not lane or SHAPES[cell].kills_bus
            ]
            await asyncio.gather(*(self._cell(cell, lane, namespaces=lacking["mount"] is None) for cell, lane in lanes))
        finally:
            progress.cancel()
        for name, samples in self.tally.growth.items():
            for what, found in samples.growth().items():
                self.tally.checks["memory and descriptors flat"] += 1
                if found["grown"]:
                    self.tally.failures.append(f"{name}: {what}: {found['first']:.1f} has grown to {found['last']:.1f}")
        return self.tally

    async def _cell(self, number: int, lane: int, *, namespaces: bool) -> None:
        wanted = self.wanted
        generation = lane if wanted.generation is None else wanted.generation
        while not self.over:
            await self._generation(number, generation, namespaces=namespaces)
            generation += wanted.width
            if wanted.generation is not None:
                return

    async def _generation(self, number: int, generation: int, *, namespaces: bool) -> None:
        """Build a cell (an engine, kvbus and routers), and play rounds with it, until they end or a check fails.

        The cell is built again for each generation. If a check fails, the directory of its files is kept.
        """
        wanted = self.wanted
        last = wanted.rounds or (ROUNDS if SHAPES[number].kills_bus else sys.maxsize)
        directory = Path(tempfile.mkdtemp(prefix=f"kvbus-chaos-{number}-"))
        cell = Cell(wanted.seed, number, generation, directory, self.tally, namespaces=namespaces)
        failed = False
        try:
            await cell.open()
            for at in range(wanted.first, last):
                if self.over:
                    break
                await cell.play(at)
                cell.sample()
        except PortTakenError:
            self.tally.skipped[f"cell {number}, generation {generation}"] = "somebody else had taken one of its ports"
        except Exception as error:  # noqa: BLE001 - every error is a finding
            failed = True
            self.tally.failures.append(f"{error}\n  logs: {directory}")
            self._console.print(f"FAILED: {self.tally.failures[-1]}", highlight=False, markup=False)
        finally:
            await cell.close()
            if not failed:
                shutil.rmtree(directory, ignore_errors=True)

    async def _progress(self) -> None:
        """Show the progress: in one updated line on a terminal, elsewhere in a new line every 30 s."""
        terminal = self._console.is_terminal
        while True:
            await asyncio.sleep(1.0 if terminal else 30.0)
            tally = self.tally
            line = (
                f"{self.elapsed:6.0f} s  {tally.total:6,} faults ({tally.total / self.elapsed:.1f}/s)  {tally.rounds} rounds"
                f"  {sum(tally.checks.values()):,} checks  {len(tally.failures)} failures"
            )
            self._console.print(line, end="\r" if terminal else "\n", highlight=False)

    def summary(self) -> None:
        """Print the summary of the campaign: its faults, checks and failures."""
        tally, out = self.tally, self._console.print
        faults = Table(
            "fault", "made", "found nothing to hit", "worst recovery, s", title=f"faults (seed {self.wanted.seed})"
        )
        for kind in sorted(set(tally.faults) | set(tally.void)):
            recovery = f"{tally.recovery[kind]:.1f}" if kind in tally.recovery else ""
            faults.add_row(
                kind, f"{tally.faults[kind]:,}", f"{tally.void[kind]:,}" if tally.void[kind] else "", recovery
            )
        faults.add_section()
        faults.add_row(
            "all", f"{tally.total:,}", f"{sum(tally.void.values()):,}", f"{max(tally.recovery.values(), default=0):.1f}"
        )
        checks = Table("check", "times", title="checks")
        for name, count in sorted(tally.checks.items()):
            checks.add_row(name, f"{count:,}")
        growth = Table("process", "value", "first", "last", title="growth")
        for name, samples in sorted(tally.growth.items()):
            for what, seen in samples.growth().items():
                growth.add_row(name, what, f"{seen['first']:.1f}", f"{seen['last']:.1f}")
        for table in (faults, checks, growth):
            out(table)
        out(
            f"{tally.rounds} rounds in {self.elapsed:.0f} s, {tally.blocks:,} blocks of exact views;"
            f" {tally.given_up} questions of routers nobody answered while kvbus or the way to it was gone"
        )
        out(f"latest batch at a healthy router while another was ill-treated: {tally.latest:.2f} s")
        for what, reason in tally.skipped.items():
            out(f"SKIPPED: {what}: {reason}")
        out(f"machine: {machine()}")
        for failure in tally.failures:
            out(f"FAILED: {failure}", markup=False, highlight=False)
        out("ok" if not tally.failures else f"{len(tally.failures)} FAILED")


def machine() -> str:
    """Return a description of the machine in one line, for the summary."""
    cores = len(__import__("os").sched_getaffinity(0))
    return f"{cores} cores, {platform.system()} {platform.release().split('-')[0]}, Python {platform.python_version()}"


def main_console() -> Console:
    """Return a console that is 120 columns wide unless it is a terminal."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120)
