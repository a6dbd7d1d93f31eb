"""``kvbus demo``: engines, bus and routers on this machine, live."""

from __future__ import annotations

import asyncio

import click

from kvbus.cli.until import run_until_signal


@click.command("demo")
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    metavar="N",
    help="End after so long, with the verdict; else at Ctrl-C.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed, the same workload and script.")
@click.option("--curve", is_flag=True, help="Routers and bus talk over CURVE, with keys made for the occasion.")
def command(*, seconds: float | None, seed: int, curve: bool) -> None:
    """Watch the bus at work: simulated engines, the real bus, two routers, and faults on the way.

    \b
    Examples:
      kvbus demo
      kvbus demo --seconds 30
      kvbus demo --seconds 10 | tee demo.txt

    A vLLM engine and an SGLang engine with two ranks each publish what enters and leaves their caches; batches are
    lost, an engine crashes, a router joins late. In the end each router's view is compared with each engine's own
    cache, block by block. Nothing is to be configured; all of it is on loopback, on free ports.

    Exit codes: 0 every view is exact, 1 one is not (the differences are named), 130 a second Ctrl-C.
    """  # noqa: D301 - \b is click's: keep these lines as they are
    # imported only when a demo is played: `kvbus --help` stays quick
    from rich.console import Console  # noqa: PLC0415

    from kvbus.demo.run import perform, reporter_for  # noqa: PLC0415
    from kvbus.demo.scene import Scene  # noqa: PLC0415

    exact = False

    async def session(stop: asyncio.Event) -> None:
        nonlocal exact
        reporter = reporter_for(Console(), click.echo)
        verdict = await perform(Scene(seconds=seconds, seed=seed, curve=curve), reporter, stop)
        exact = verdict.equal and not verdict.unsettled

    run_until_signal(session)
    if not exact:
        raise click.exceptions.Exit(1)
