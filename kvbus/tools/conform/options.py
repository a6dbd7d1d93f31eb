"""The options of ``kvbus conform engine`` and ``kvbus conform router``, which the pytest plugin reads too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

_SECONDS: Final = click.FloatRange(0, min_open=True)

_ENGINE: Final = (
    click.option("--replay-endpoint", "replay", metavar="ENDPOINT", help="The replay endpoint."),
    click.option("--snapshot-endpoint", "snapshot", metavar="ENDPOINT", help="The snapshot endpoint."),
    click.option("--api", metavar="URL", help="An OpenAI-style API: send prompts, reset the cache, put it to sleep."),
    click.option("--model", default="", metavar="NAME", help="Model to ask there; by default the first that it names."),
    click.option(
        "--prompts", type=click.IntRange(1), default=32, show_default=True, help="Prompts to send; more evict more."
    ),
    click.option("--topic", default="", help="Watch only topics with this prefix."),
    click.option("--bind", is_flag=True, help="Listen at ENDPOINT, for engines that connect to it."),
    click.option(
        "--seconds", type=_SECONDS, default=30.0, show_default=True, metavar="S", help="Watch for this time at least."
    ),
    click.option("--await-restart", is_flag=True, help="Watch on until you have restarted the engine."),
)

WAYS: Final = ("driver", "view_url", "dynamo_indexer", "client")
"""To ask a router what it holds; one of them is named."""

_ROUTER: Final = (
    click.option("--driver", metavar="CMD", help="Start this program for each case; it reads and writes JSON lines."),
    click.option("--view-url", metavar="URL", help="GET this to see what a running router holds."),
    click.option("--dynamo-indexer", metavar="URL", help="A running indexer of Dynamo; each case has its own model."),
    click.option("--client", is_flag=True, help="kvbus's own library: what it looks like when all is kept."),
    click.option(
        "--engine",
        multiple=True,
        metavar="LIVE,REPLAY",
        help="Where the router reads a rank; once for each. The kit binds it. [default: rank 0 at ports 5557 and 5558 "
        "of loopback for a running router, new ports for each case otherwise]",
    ),
    click.option(
        "--reads",
        multiple=True,
        metavar="LIVE,REPLAY",
        help="Where a driver, Dynamo's indexer or the client reads a rank, if something is between it and the engine.",
    ),
    click.option("--topic", default="", metavar="TOPIC", help="The topic of all batches, such as kv@pod@model."),
    click.option("--arrays", is_flag=True, help="Send events as arrays, to a router that reads no maps (6.2)."),
    click.option(
        "--settle", type=_SECONDS, default=5.0, show_default=True, metavar="S", help="Time to come to the right view."
    ),
    click.option("--connect", type=_SECONDS, default=60.0, show_default=True, metavar="S", help="Time to subscribe."),
)


def engine_options(function: F) -> F:
    """Add the endpoint and the options that say what is watched."""
    return click.argument("subject", metavar="ENDPOINT|FILE")(_with(function, _ENGINE))


def router_options(function: F) -> F:
    """Add the options that say which router is tried, and how."""
    return _with(function, _ROUTER)


def _with(function: F, options: tuple[Callable[[F], F], ...]) -> F:
    for option in reversed(options):
        function = option(function)
    return function
