"""``make chaos``: inject faults into real processes and connections, and check that kvbus recovers.

Exit code 0: every check succeeded; else 1.
"""

from __future__ import annotations

import asyncio
import random
import sys

import click
import uvloop

from tests.chaos.campaign import Campaign, Wanted, main_console
from tests.chaos.plan import SHAPES, make_round


@click.command()
@click.option("--seed", type=int, help="Seed of all plans. By default a new seed, which is printed.")
@click.option(
    "--faults", type=click.IntRange(1), default=10_000, show_default=True, help="Stop after this number of faults."
)
@click.option("--seconds", type=click.FloatRange(1), help="Stop after this number of seconds.")
@click.option(
    "--cell",
    "cells",
    type=click.IntRange(0, len(SHAPES) - 1),
    multiple=True,
    help="Run only this cell. May be given several times.",
)
@click.option("--generation", type=click.IntRange(0), help="Run only this generation of the cells, once.")
@click.option("--rounds", type=click.IntRange(1), help="Number of rounds of a generation.")
@click.option("--first", type=click.IntRange(0), default=0, help="Number of the first round.")
@click.option(
    "--width",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Number of instances of each cell that run at the same time.",
)
@click.option("--show", is_flag=True, help="Print the plan of a generation, and inject no fault.")
def main(
    *,
    seed: int | None,
    faults: int,
    seconds: float | None,
    cells: tuple[int, ...],
    generation: int | None,
    rounds: int | None,
    first: int,
    width: int,
    show: bool,
) -> None:
    """Break connections, batches, processes and disks at random.

    After each burst of faults, check that all routers hold
    exactly the engine's blocks.
    """
    seed = random.SystemRandom().randrange(1 << 20) if seed is None else seed
    chosen = cells or tuple(range(len(SHAPES)))
    if show:
        for cell in chosen:
            for number in range(first, rounds or first + 1):
                plan = make_round(seed, cell, generation or 0, number)
                click.echo(f"cell {cell} ({SHAPES[cell].name}), round {number} ({plan.flavour})")
                for fault in plan.faults:
                    click.echo(f"  {fault}")
        return
    console = main_console()
    console.print(f"seed {seed}: make chaos SEED={seed} plans the same faults again", highlight=False)
    wanted = Wanted(seed, faults, seconds or float("inf"), chosen, generation, rounds, first, width)
    campaign = Campaign(wanted, console)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(campaign.run())
    campaign.summary()
    sys.exit(bool(campaign.tally.failures))


if __name__ == "__main__":
    main()
