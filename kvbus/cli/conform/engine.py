"""``kvbus conform engine``: which clauses an engine's publisher keeps."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvbus.cli.conform.options import deliver, report_options
from kvbus.cli.curve import curve_keys, curve_options
from kvbus.cli.until import run_until_signal, until
from kvbus.tools.conform.options import engine_options

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from kvbus.tools.conform.report import Report


@click.command("engine")
@engine_options
@click.option(
    "--ranks",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Judge so many data-parallel ranks: rank r is at each port plus r.",
)
@curve_options
@report_options
def command(
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
    """Judge an engine's publisher, or a recording of one, clause by clause.

    \b
    Examples:
      kvbus conform engine tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5558
      kvbus conform engine tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5558 --api http://127.0.0.1:8000
      kvbus conform engine tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5558 --await-restart
      kvbus conform engine stream.jsonl.gz --json

    Each clause is kept, broken (with the bytes that show it), or not seen (with what to do to see it). A stream shows
    more if it has been watched from its first batch, or if it has a replay. With --api the engine's cache is reset and
    the engine put to sleep: use one that serves nobody. Ctrl-C ends with what was seen so far.

    Exit codes: 0 no MUST is broken, 1 one is (with --strict a SHOULD, too), 2 nothing could be judged.
    """  # noqa: D301 - \b is click's: keep these lines as they are
    if "://" in subject:
        from kvbus.tools.conform.engine.watch import Target  # noqa: PLC0415 - brings zmq

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
        raise click.UsageError("--api goes with one rank: nobody knows which of several ranks gets a prompt")
    try:
        return [target.of_rank(rank) for rank in range(count)]
    except ValueError as error:
        raise click.UsageError(f"{error}; for example tcp://127.0.0.1:5557") from error


def watched(targets: Sequence[Any]) -> Report:
    """Watch publishers until the time is over or somebody presses Ctrl-C, and say what was seen."""
    from kvbus.tools.conform import report as forms  # noqa: PLC0415 - brings rich
    from kvbus.tools.conform.engine.watch import Watch  # noqa: PLC0415 - brings zmq
    from kvbus.tools.doctor.findings import Line  # noqa: PLC0415 - imported on use

    line = Line(sys.stderr)
    watches = [Watch(target, line.show) for target in targets]

    async def watch() -> None:
        from asyncio import gather  # noqa: PLC0415 - imported on use

        await gather(*(each.run() for each in watches))

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
