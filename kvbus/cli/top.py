"""``kvbus top``: show a running bus on a terminal."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

from kvbus.cli.login import LOCAL_BUS, bus_url, login, login_options
from kvbus.cli.until import run_until_signal

if TYPE_CHECKING:
    from pathlib import Path


@click.command("top")
@click.option(
    "--http",
    default=LOCAL_BUS,
    show_default=True,
    metavar="URL",
    help="Where the bus serves /metrics: a URL or HOST:PORT.",
)
@login_options
@click.option(
    "--interval", type=click.FloatRange(0.1), default=1.0, show_default=True, help="Seconds between two updates."
)
@click.option("--count", type=click.IntRange(1), metavar="N", help="End after N updates; by default at q or Ctrl-C.")
@click.option(
    "--sort",
    type=click.Choice(["name", "rate", "blocks", "missing", "rejected", "queue"]),
    default="name",
    show_default=True,
    help="Order of the sources.",
)
@click.option(
    "--filter", "wanted", default="", metavar="TEXT", help="Show only rows with this text in the name or state."
)
@click.option("--plain", is_flag=True, help="Print lines instead of a screen, as for a file or a pipe.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per update, instead of a screen.")
def command(
    *,
    http: str,
    http_token_file: Path | None,
    http_ca: Path | None,
    interval: float,
    count: int | None,
    sort: str,
    wanted: str,
    plain: bool,
    as_json: bool,
) -> None:
    """Watch a running bus: sources, outputs, routers, rates, queues, and what was rejected or dropped, by reason.

    \b
    Examples:
      kvbus top
      kvbus top --http 10.0.0.7:9477 --sort missing
      kvbus top --filter engine-3
      kvbus top --plain --count 1
      kvbus top --json --count 1 | jq '.sources[] | {name, state, batches_per_second}'
      kubectl port-forward pod/engine-0 9477 & kvbus top

    kvbus top reads only the HTTP port of the bus (configuration key http).

    Keys: q quits, ? shows all keys, j and k scroll, s sorts by the next column, / filters, p pauses.
    """  # noqa: D301 - \b is click's: keep these lines as they are
    # Import these modules only when the command runs, to keep `kvbus --help` fast.
    from rich.console import Console  # noqa: PLC0415

    from kvbus.tools.terminal import is_screen  # noqa: PLC0415
    from kvbus.tools.top.run import Watch, as_lines, on_screen  # noqa: PLC0415
    from kvbus.tools.top.view import Choice  # noqa: PLC0415

    url = bus_url(http)
    shown = login(url, http_token_file, http_ca)
    watch = Watch(url, interval, count, Choice(sort=sort, wanted=wanted), shown, as_json)

    async def session(stop: asyncio.Event) -> None:
        console = Console()
        if is_screen(console) and not plain and not as_json:
            await on_screen(watch, console, stop)
        else:
            await as_lines(watch, click.echo, stop)

    run_until_signal(session)
