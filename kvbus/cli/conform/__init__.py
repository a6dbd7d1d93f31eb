"""``kvbus conform``: which clauses of the contract of the wire an engine or a router keeps."""

from __future__ import annotations

import click

from kvbus.cli.program import Program, Subcommand

_SUBCOMMANDS = (
    Subcommand("engine", "Judge the stream and the replay of an engine.", __name__),
    Subcommand("router", "Judge the view that a router has.", __name__),
)


@click.group("conform", cls=Program, subcommands=_SUBCOMMANDS)
def command() -> None:
    """Judge an engine or a router by the contract of the wire: a verdict for each clause.

    \b
    Examples:
      kvbus conform engine tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5558 --api http://127.0.0.1:8000
      kvbus conform engine stream.jsonl

    The clauses are in docs/spec/kv-events.md.
    """  # noqa: D301 - \b is click's: keep these lines as they are
