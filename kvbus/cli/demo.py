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
    help="End after N seconds with the verdict; by default at Ctrl-C.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the workload and the script.")
@click.option("--curve", is_flag=True, help="Encrypt between bus and routers with CURVE and temporary keys.")
@click.option("--plain", is_flag=True, help="Lines instead of a screen, as a file or a pipe gets them.")
def command(*, seconds: float | None, seed: int, curve: bool, plain: bool) -> None:
    """Watch the bus at work: simulated engines, the real bus, routers with and without it, and faults on the way.

    \b
    Examples:
      kvbus demo
      kvbus demo --seconds 30
      kvbus demo --seconds 10 | tee demo.txt

    A vLLM engine and an SGLang engine with two ranks each publish their caches' events. Batches are lost, an engine
    crashes, a router joins late. At the end the demo compares each router's view with each engine's own cache, block
    by block. The router `direct` reads the engines themselves, as llm-d-kv-cache 0.9.0 does: it shows what goes wrong
    without the bus. The demo needs no configuration, and runs on free ports of the loopback interface.

    Exit codes: 0 every view behind the bus is exact, 1 a view is not (the demo names the differences), 130 a second
    Ctrl-C.
    """  # noqa: D301 - \b is click's: keep these lines as they are
    # imported on use, to keep `kvbus --help` fast
    from rich.console import Console  # noqa: PLC0415

    from kvbus.tools.demo.run import perform, reporter_for  # noqa: PLC0415
    from kvbus.tools.demo.scene import Scene  # noqa: PLC0415

    exact = False

    async def session(stop: asyncio.Event) -> None:
        nonlocal exact
        reporter = reporter_for(Console(), click.echo, plain=plain)
        verdict = await perform(Scene(seconds=seconds, seed=seed, curve=curve), reporter, stop)
        exact = verdict.equal and not verdict.unsettled

    run_until_signal(session)
    if not exact:
        raise click.exceptions.Exit(1)
