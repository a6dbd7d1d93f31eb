"""``kvbus conform router``: what a router makes of every fault of an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kvbus.cli.conform.options import deliver, report_options
from kvbus.cli.until import run_until_signal, say, until
from kvbus.common.errors import ExitCode
from kvbus.tools.conform.options import router_options

if TYPE_CHECKING:
    import asyncio


@click.command("router")
@router_options
@click.option(
    "--case", "names", multiple=True, metavar="NAME", help="Only this case, or the cases of this clause; repeatable."
)
@click.option("--list", "listed", is_flag=True, help="Print the cases and their clauses, and end.")
@report_options
def command(
    *,
    names: tuple[str, ...],
    listed: bool,
    as_json: bool,
    strict: bool,
    without_bytes: bool,
    **said: Any,
) -> None:
    """Play an engine with every fault to a router, and compare what it holds with what the engine has.

    \b
    Examples:
      kvbus conform router --driver './my-router-driver'
      kvbus conform router --dynamo-indexer http://127.0.0.1:8090
      kvbus conform router --view-url http://127.0.0.1:9000/blocks --engine tcp://127.0.0.1:5557,tcp://127.0.0.1:5558
      kvbus conform router --client --case 3.4 --json

    Nothing else may feed the router. A router that the kit starts itself (--driver) or that takes models of their own
    (--dynamo-indexer) begins each case with nothing. A running one is cleared between two cases, and one that does not
    survive a fault has to be started anew before the rest is tried: --case.

    Blocks have two tokens. A verdict is of one clause in one case: kept, broken with the missing and dead blocks, or
    not seen.

    Exit codes: 0 no MUST is broken, 1 one is, 2 nothing could be tried, 130 Ctrl-C before anything was tried.
    """  # noqa: D301 - \b is click's: keep these lines as they are
    from kvbus.tools.conform.router.play import table, trial  # noqa: PLC0415 - brings aiohttp, rich and zmq

    if listed:
        width = max(len(name) for name, _, _ in table())
        for name, clauses, title in table():
            click.echo(f"{name:{width}}  {clauses:10}  {title}")
        return
    try:
        tried = trial(said, names)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    report = tried.report

    async def main(stop: asyncio.Event) -> None:
        await until(stop, tried.run(say))
        if stop.is_set():
            played = len({each.case for each in report.verdicts})
            report.notes.append(f"interrupted: {len(tried.cases) - played} cases were not played")

    run_until_signal(main)
    if not report.verdicts:
        raise click.exceptions.Exit(ExitCode.INTERRUPTED)
    deliver(report, as_json=as_json, strict=strict, without_bytes=without_bytes)
