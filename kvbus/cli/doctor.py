"""``kvbus doctor``: find the problems of a configuration or a running bus, and their remedies."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from kvbus.cli.login import LOCAL_BUS, bus_url, login, login_options
from kvbus.cli.options import config_options, load_config, names_a_config
from kvbus.cli.until import run_until_signal, say, until
from kvbus.common.errors import ExitCode
from kvbus.core.wire.profiles import PROFILES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from kvbus.config import Config
    from kvbus.tools.asking import Login
    from kvbus.tools.doctor.examine import Progress
    from kvbus.tools.doctor.findings import Report

TIMEOUT = 5.0


@click.command("doctor")
@partial(config_options, http=False)
@click.option(
    "--http",
    "url",
    metavar="URL",
    help=f"Ask the running bus at this URL for its findings.  [default without a configuration: {LOCAL_BUS}]",
)
@login_options
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=TIMEOUT,
    show_default=True,
    metavar="S",
    help="Maximum seconds for each endpoint. All endpoints are probed at the same time.",
)
@click.option(
    "--router",
    type=click.Choice([name for name in PROFILES if name != "dynamo-plane"]),
    metavar="NAME",
    help="Also compare the outputs with the needs of this router's decoder. NAME is a profile, such as kthena.",
)
@click.option("--history", is_flag=True, help="Request each replay from seq 0, to see how far back it reaches.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    *,
    url: str | None,
    http_token_file: Path | None,
    http_ca: Path | None,
    timeout: float,
    history: bool,
    router: str | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Find out what is wrong: probe every endpoint of a configuration, or ask a running bus.

    Without a configuration, doctor asks the bus on this machine.

    \b
    Examples:
      kvbus doctor
      kvbus doctor kvbus.yaml
      kvbus doctor --source tcp://10.0.0.7:5557,tcp://10.0.0.7:5558 --output 'tcp://*:5657'
      kvbus doctor kvbus.yaml --router kthena
      kvbus doctor --http http://10.0.0.7:9477
      kvbus doctor kvbus.yaml --json | jq -r '.findings[].text'

    Each finding is a line: the cause, [the configuration key], what to do. Problems come first. A line that begins with
    "note:" is about a fact that may be intended. At the end, one line for each source and output says what doctor saw.
    doctor subscribes to each engine for a moment, and sends it one small replay request (with --history a large one).

    Exit codes: 0 no problem, 1 a problem, 78 bad configuration, 130 Ctrl-C.
    """  # noqa: D301 - \b is click's: keep these lines as they are
    configured = any(flags.values())
    if url is None and configured:
        report = examined(load_config(**flags), timeout, history=history, router=router)
    elif configured and (names_a_config() or flags["source"] or flags["output"]):
        raise click.UsageError("--http asks a running bus; leave out the configuration")
    elif router is not None:
        raise click.UsageError("--router needs the configuration")
    else:
        url = bus_url(url or LOCAL_BUS)
        report = _asked(url, timeout, login(url, http_token_file, http_ca))
    show(report, as_json=as_json)


def examined(config: Config, timeout: float = TIMEOUT, *, history: bool = False, router: str | None = None) -> Report:
    """Probe every endpoint of a configuration, and return the report. Ctrl-C ends the process."""
    from kvbus.tools.doctor.examine import examine  # noqa: PLC0415 - brings zmq

    return _run(lambda progress: examine(config, timeout=timeout, history=history, router=router, progress=progress))


def _asked(url: str, timeout: float, shown: Login) -> Report:
    from kvbus.tools.doctor.examine import examine_bus  # noqa: PLC0415 - brings aiohttp

    return _run(lambda _progress: examine_bus(url, timeout=timeout, login=shown))


def _run(work: Callable[[Progress], Awaitable[Report]]) -> Report:
    from kvbus.tools.doctor.findings import Waiting  # noqa: PLC0415 - imported on use

    report: Report | None = None
    waiting = Waiting(sys.stderr)

    async def session(stop: asyncio.Event) -> None:
        async def examined() -> None:
            nonlocal report
            report = await work(waiting)

        try:
            await until(stop, examined())
        finally:
            waiting.end()

    run_until_signal(session)
    if report is None:
        say("interrupted")
        raise SystemExit(ExitCode.INTERRUPTED)
    return report


def show(report: Report, *, as_json: bool = False, err: bool = False) -> None:
    """Print doctor's report, and end the process with exit code 1 if the report has a problem."""
    from kvbus.tools.doctor.findings import coloured, render  # noqa: PLC0415 - imported on use

    out = sys.stderr if err else sys.stdout
    click.echo(render(report, as_json=as_json, colour=not as_json and coloured(out)), nl=False, err=err)
    if not report.healthy:
        raise click.exceptions.Exit(ExitCode.FOUND)
