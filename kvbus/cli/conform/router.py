"""``kvbus conform router``: what a router makes of every fault of an engine."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvbus.cli.conform.options import deliver, report_options
from kvbus.cli.until import run_until_signal, say, until

if TYPE_CHECKING:
    import asyncio

    from kvbus.conform.router.adapters import Adapter

_WAYS = ("driver", "view_command", "view_url", "score_url", "dynamo_indexer", "client")


@click.command("router")
@click.option("--driver", metavar="CMD", help="Start this program for each case: JSON lines on its input and output.")
@click.option("--view-command", metavar="CMD", help="Run this to see what a running router holds.")
@click.option("--view-url", metavar="URL", help="GET this to see what a running router holds.")
@click.option("--score-url", metavar="URL", help="POST prompts here; the answer says how much of them is cached.")
@click.option("--dynamo-indexer", metavar="URL", help="A running indexer of Dynamo; each case is a model of its own.")
@click.option("--client", is_flag=True, help="kvbus's own library: what it looks like when all is kept.")
@click.option(
    "--score-body",
    default='{"token_ids": "{tokens}"}',
    show_default=True,
    metavar="JSON",
    help='The body for --score-url; "{tokens}" stands for the list of tokens.',
)
@click.option(
    "--score-pointer", default="", metavar="POINTER", help="Where the score is in the answer, as a JSON pointer."
)
@click.option("--score-blocks", is_flag=True, help="The score counts blocks, and not tokens.")
@click.option(
    "--engine",
    "engines",
    multiple=True,
    metavar="LIVE,REPLAY",
    help="Where the router reads a rank; once for each. The kit binds it. [default: rank 0 at ports 5557 and 5558 of "
    "loopback for a running router, new ports for each case otherwise]",
)
@click.option(
    "--reads",
    multiple=True,
    metavar="LIVE,REPLAY",
    help="Where --driver, --dynamo-indexer or --client reads a rank, if something is between it and --engine.",
)
@click.option("--topic", default="", metavar="TOPIC", help="The topic of all batches, such as kv@pod@model.")
@click.option(
    "--case", "names", multiple=True, metavar="NAME", help="Only this case, or the cases of this clause; repeatable."
)
@click.option("--list", "listed", is_flag=True, help="Print the cases and their clauses, and end.")
@click.option(
    "--settle",
    type=click.FloatRange(0, min_open=True),
    default=5.0,
    show_default=True,
    metavar="S",
    help="Seconds that the router has to come to what it must hold.",
)
@click.option(
    "--connect",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    show_default=True,
    metavar="S",
    help="Seconds that the router has to subscribe.",
)
@report_options
def command(
    *,
    engines: tuple[str, ...],
    reads: tuple[str, ...],
    topic: str,
    names: tuple[str, ...],
    listed: bool,
    settle: float,
    connect: float,
    as_json: bool,
    junit: Path | None,
    strict: bool,
    without_bytes: bool,
    **ways: Any,
) -> None:
    """Play an engine with every fault to a router, and compare what it holds with what the engine has.

    \b
    Examples:
      kvbus conform router --driver './my-router-driver'
      kvbus conform router --dynamo-indexer http://127.0.0.1:8090
      kvbus conform router --view-url http://127.0.0.1:9000/blocks --engine tcp://127.0.0.1:5557,tcp://127.0.0.1:5558
      kvbus conform router --client --case 3.4 --junit router.xml

    Nothing else may feed the router. A router that the kit starts itself (--driver) or that takes models of their own
    (--dynamo-indexer) begins each case with nothing. A running one is cleared between two cases, and one that does not
    survive a fault has to be started anew before the rest is tried: --case.

    Blocks have two tokens. A verdict is of one clause in one case: kept, broken with the missing and dead blocks, or
    not seen.

    Exit codes: 0 no MUST is broken, 1 one is, 2 nothing could be tried, 130 Ctrl-C before anything was tried.
    """  # noqa: D301 - \b is click's: keep these lines as they are
    from kvbus.conform.report import Report  # noqa: PLC0415 - brings rich
    from kvbus.conform.router.adapters import Stream  # noqa: PLC0415 - brings aiohttp
    from kvbus.conform.router.judge import chosen, judge, table  # noqa: PLC0415 - brings zmq
    from kvbus.conform.router.play import Player, Settings  # noqa: PLC0415 - brings zmq

    if listed:
        width = max(len(name) for name, _, _ in table())
        for name, clauses, title in table():
            click.echo(f"{name:{width}}  {clauses:10}  {title}")
        return
    way, subject = _one_way(ways)
    adapter = _adapter(way, ways, behind=bool(reads))
    if reads and (not adapter.fresh or not engines):
        raise click.UsageError("--reads is for routers that the kit points at streams, and takes --engine")
    if not adapter.fresh and not engines:
        engines = ("tcp://127.0.0.1:5557,tcp://127.0.0.1:5558",)
    settings = Settings(
        endpoints=[_pair("--engine", each) for each in engines],
        streams=[Stream(*_pair("--reads", each), topic) for each in reads],
        topic=topic,
        settle=settle,
        connect=connect,
    )
    try:
        cases = chosen(names)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    report = Report("router", subject)
    player = Player(adapter, settings)

    async def main(stop: asyncio.Event) -> None:
        try:
            await until(stop, judge(player, cases, report, say))
        finally:
            player.close()
        if stop.is_set():
            report.notes.append(f"interrupted: {len(cases) - int(report.seen.split()[0] or 0)} cases were not played")

    run_until_signal(main)
    deliver(report, as_json=as_json, junit=junit, strict=strict, without_bytes=without_bytes)


def _one_way(ways: dict[str, Any]) -> tuple[str, str]:
    """Return the one way to ask that was named, and what it names."""
    named = [way for way in _WAYS if ways[way]]
    if len(named) != 1:
        options = ", ".join(f"--{way.replace('_', '-')}" for way in _WAYS)
        raise click.UsageError(f"name one way to ask the router: {options}")
    return named[0], "kvbus.client" if named[0] == "client" else str(ways[named[0]])


def _adapter(way: str, ways: dict[str, Any], *, behind: bool) -> Adapter:
    from kvbus.conform.router import adapters  # noqa: PLC0415 - brings aiohttp

    match way:
        case "driver":
            return adapters.Driver(shlex.split(ways["driver"]))
        case "view_command":
            return adapters.ViewCommand(shlex.split(ways["view_command"]))
        case "view_url":
            return adapters.ViewUrl(ways["view_url"])
        case "score_url":
            body, pointer = ways["score_body"], ways["score_pointer"]
            return adapters.ScoreUrl(ways["score_url"], body, pointer, blocks=ways["score_blocks"])
        case "dynamo_indexer":
            return adapters.DynamoIndexer(ways["dynamo_indexer"])
    return adapters.Client(copies=not behind)


def _pair(option: str, text: str) -> tuple[str, str]:
    live, _, replay = text.partition(",")
    if not live or not replay:
        raise click.UsageError(f"{option} {text}: LIVE,REPLAY, such as tcp://127.0.0.1:5557,tcp://127.0.0.1:5558")
    return live, replay
