"""``kvbus conform``: check an engine or a router against each clause of the wire specification."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import click

from kvbus.cli.curve import curve_keys, curve_options
from kvbus.cli.until import run_until_signal, say, until
from kvbus.common.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvbus.tools.conform.report import Report


@click.group("conform")
def command() -> None:
    """Check an engine or a router against the wire specification: a verdict for each clause.

    \b
    Examples:
      kvbus conform engine tcp://127.0.0.1:5557 --replay-endpoint tcp://127.0.0.1:5558 --api http://127.0.0.1:8000
      kvbus conform engine stream.jsonl

    The clauses are in docs/spec/kv-events.md.
    """  # noqa: D301 - \b is click's: keep these lines as they are


F = TypeVar("F", bound="Callable[..., Any]")


_SECONDS: Final = click.FloatRange(0, min_open=True)

_ENGINE: Final = (
    click.option("--replay-endpoint", "replay", metavar="ENDPOINT", help="The engine's replay endpoint."),
    click.option("--snapshot-endpoint", "snapshot", metavar="ENDPOINT", help="The engine's snapshot endpoint."),
    click.option(
        "--api",
        metavar="URL",
        help="The engine's OpenAI-style API, to send prompts, reset the cache and put the engine to sleep.",
    ),
    click.option(
        "--model", default="", metavar="NAME", help="Model for the prompts; by default the API's first model."
    ),
    click.option(
        "--prompts",
        type=click.IntRange(1),
        default=32,
        show_default=True,
        help="Number of prompts to send. More prompts evict more blocks.",
    ),
    click.option("--topic", default="", help="Watch only topics with this prefix."),
    click.option("--bind", is_flag=True, help="Listen at ENDPOINT, for engines that connect to it."),
    click.option(
        "--seconds",
        type=_SECONDS,
        default=30.0,
        show_default=True,
        metavar="S",
        help="Minimum number of seconds to watch.",
    ),
    click.option("--await-restart", is_flag=True, help="Continue to watch until you have restarted the engine."),
)

_ROUTER: Final = (
    click.option(
        "--driver",
        metavar="CMD",
        help="Start this program, which has the router, for each case. It reads and writes JSON lines.",
    ),
    click.option("--view-url", metavar="URL", help="URL at which a running router shows its blocks."),
    click.option(
        "--client",
        is_flag=True,
        help="Judge kvbus's own client library, an example of a router that keeps every clause.",
    ),
    click.option(
        "--engine",
        multiple=True,
        metavar="LIVE,REPLAY",
        help="Endpoints of a simulated rank, at which the router reads. Repeatable. [default: for a running router, "
        "rank 0 at the ports 5557 and 5558 of loopback; otherwise new ports for each case]",
    ),
    click.option(
        "--reads",
        multiple=True,
        metavar="LIVE,REPLAY",
        help="Endpoints at which the driver or the client reads a rank, if a program such as kvbus is between the "
        "reader and the engine.",
    ),
    click.option("--topic", default="", metavar="TOPIC", help="The topic of all batches, such as kv@pod@model."),
    click.option("--arrays", is_flag=True, help="Send events as arrays, to a router that reads no maps (clause 6.2)."),
    click.option(
        "--settle",
        type=_SECONDS,
        default=5.0,
        show_default=True,
        metavar="S",
        help="Maximum seconds after the last step of a case until the router's view is right.",
    ),
    click.option(
        "--connect",
        type=_SECONDS,
        default=60.0,
        show_default=True,
        metavar="S",
        help="Maximum seconds until the router subscribes.",
    ),
)

_REPORT: Final = (
    click.option(
        "--without-bytes", is_flag=True, help="Leave out the bytes that prove a verdict: they may contain prompts."
    ),
    click.option("--strict", is_flag=True, help="Count a broken SHOULD as a failure, like a broken MUST."),
    click.option("--json", "as_json", is_flag=True, help="Print JSON."),
)


def _options(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Return a decorator that adds these options to a click command.

    The command's help lists them in the order of the arguments.
    """

    def add(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def deliver(report: Report, *, as_json: bool, strict: bool, without_bytes: bool) -> NoReturn:
    """Print the report of a conformance check, and end the process with the report's exit code."""
    from kvbus.tools.conform import report as forms  # noqa: PLC0415 - brings rich

    if without_bytes:
        report = report.without_bytes()
    if as_json:
        click.echo(forms.as_json(report), nl=False)
    else:
        forms.print_table(report, sys.stdout)
    raise click.exceptions.Exit(report.exit_code(strict=strict))


@command.command("engine", short_help="Judge the stream and the replay of an engine.")
@click.argument("subject", metavar="ENDPOINT|FILE")
@_options(*_ENGINE)
@click.option(
    "--ranks",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Number of data-parallel ranks to judge; the ports of rank r are those of rank 0, plus r.",
)
@curve_options
@_options(*_REPORT)
def engine(
    *,
    subject: str,
    curve_secret_key: Path | None,
    curve_server_key: Path | None,
    ranks: int,
    as_json: bool,
    strict: bool,
    without_bytes: bool,
    **named: Any,
) -> None:
    """Judge an engine's publisher, or a recording of its stream, clause by clause.

    \b
    Examples:
      kvbus conform engine tcp://127.0.0.1:5557 --replay-endpoint tcp://127.0.0.1:5558
      kvbus conform engine tcp://127.0.0.1:5557 --replay-endpoint tcp://127.0.0.1:5558 --api http://127.0.0.1:8000
      kvbus conform engine tcp://127.0.0.1:5557 --replay-endpoint tcp://127.0.0.1:5558 --await-restart
      kvbus conform engine stream.jsonl.gz --json

    The verdict on a clause is kept, broken (with the bytes that prove it), or not seen (with the reason, and often the
    option that helps). The kit can judge more clauses if it watches the stream from its first batch, or if the engine
    answers replay requests. --api resets the engine's cache and puts the engine to sleep, so use an engine that serves
    no users. Ctrl-C ends the watch early, and the report has the verdicts so far.

    Exit codes: 0 no MUST is broken, 1 a MUST is broken (with --strict a MUST or a SHOULD), 69 nothing could be judged.
    """  # noqa: D301 - \b is click's: keep these lines as they are
    if "://" in subject:
        from kvbus.tools.conform.engine.probes import Target  # noqa: PLC0415 - brings zmq

        curve = curve_keys(curve_secret_key, curve_server_key, bind=named["bind"])
        target = Target.of(subject, curve, **named)
        report = watched([target] if ranks == 1 else _ranks(target, ranks))
    else:
        from kvbus.tools.capture.format import read_capture  # noqa: PLC0415 - imported on use
        from kvbus.tools.conform.engine.judge import judge_recording  # noqa: PLC0415 - imported on use

        report = judge_recording(subject, read_capture(Path(subject)))
    deliver(report, as_json=as_json, strict=strict, without_bytes=without_bytes)


def _ranks(target: Any, count: int) -> list[Any]:
    if target.api is not None:
        raise click.UsageError("--api needs a single rank: with several ranks it is unknown which one gets a prompt")
    try:
        return [target.of_rank(rank) for rank in range(count)]
    except ValueError as error:
        raise click.UsageError(f"{error}; for example tcp://127.0.0.1:5557") from error


def watched(targets: Sequence[Any]) -> Report:
    """Watch engines' publishers until the watching time has passed or the user presses Ctrl-C. Return the report."""
    from kvbus.tools.conform import report as forms  # noqa: PLC0415 - brings rich
    from kvbus.tools.conform.engine.watch import Watch  # noqa: PLC0415 - brings zmq
    from kvbus.tools.doctor.findings import StatusLine  # noqa: PLC0415 - imported on use

    line = StatusLine(sys.stderr)
    watches = [Watch(target, line.show) for target in targets]

    async def watch() -> None:
        await asyncio.gather(*(each.run() for each in watches))

    async def session(stop: asyncio.Event) -> None:
        try:
            await until(stop, watch())
        except ValueError as error:
            raise click.UsageError(f"{error}; for example tcp://127.0.0.1:5557") from error
        finally:
            line.end()

    run_until_signal(session)
    reports = [each.report() for each in watches]
    return reports[0] if len(reports) == 1 else forms.Report.of_ranks(reports)


@command.command("router", short_help="Judge a router's view of the engines' blocks.")
@_options(*_ROUTER)
@click.option(
    "--case",
    "names",
    multiple=True,
    metavar="NAME",
    help="Play only this case, or the cases of this clause. Repeatable.",
)
@click.option("--list", "listed", is_flag=True, help="Print the cases and their clauses, and end.")
@_options(*_REPORT)
def router(
    *,
    names: tuple[str, ...],
    listed: bool,
    as_json: bool,
    strict: bool,
    without_bytes: bool,
    **options: Any,
) -> None:
    """Simulate an engine and its faults for a router, and compare the router's blocks with the engine's.

    \b
    Examples:
      kvbus conform router --driver './my-router-driver'
      kvbus conform router --view-url http://127.0.0.1:9000/blocks --engine tcp://127.0.0.1:5557,tcp://127.0.0.1:5558
      kvbus conform router --client --case 3.4 --json

    No other engine may send events to the router. A router that kvbus conform starts itself (--driver) begins each case
    without blocks. A running router is cleared between two cases. If the router does not survive a fault, start it
    again and play the remaining cases with --case.

    The simulated blocks have two tokens. A verdict is about one clause in one case: kept, broken (with the missing and
    dead blocks), or not seen.

    Exit codes: 0 no MUST is broken, 1 a MUST is broken, 69 no case was played, 130 Ctrl-C before the first verdict.
    """  # noqa: D301 - \b is click's: keep these lines as they are
    from kvbus.tools.conform.router.cases import CASES  # noqa: PLC0415 - imported on use
    from kvbus.tools.conform.router.play import judge, trial  # noqa: PLC0415 - brings aiohttp, rich and zmq

    if listed:
        width = max(len(case.name) for case in CASES)
        for case in CASES:
            click.echo(f"{case.name:{width}}  {', '.join(case.clauses):10}  {case.title}")
        return
    try:
        player, cases, report = trial(options, names)
    except ValueError as error:
        raise click.UsageError(str(error)) from error

    async def main(stop: asyncio.Event) -> None:
        try:
            await until(stop, judge(player, cases, report, say))
        finally:
            player.close()
        if stop.is_set():
            played = len({each.case for each in report.verdicts})
            report.notes.append(f"interrupted: {len(cases) - played} cases were not played")

    run_until_signal(main)
    if not report.verdicts:
        raise click.exceptions.Exit(ExitCode.INTERRUPTED)
    deliver(report, as_json=as_json, strict=strict, without_bytes=without_bytes)
