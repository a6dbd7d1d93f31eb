"""A router that is tried: what its options mean."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvbus.tools.conform.report import Report
from kvbus.tools.conform.router import adapters
from kvbus.tools.conform.router.arrays import as_arrays
from kvbus.tools.conform.router.judge import chosen, judge
from kvbus.tools.conform.router.play import Player, Settings
from kvbus.tools.conform.router.steps import Case

_RUNNING = "tcp://127.0.0.1:5557,tcp://127.0.0.1:5558"


@dataclass(frozen=True, slots=True)
class Trial:
    """A router, the cases that are played to it, and the report that they make."""

    player: Player
    cases: list[Case]
    report: Report

    async def run(self, progress: Callable[[str], object]) -> None:
        """Play the cases."""
        try:
            await judge(self.player, self.cases, self.report, progress)
        finally:
            self.player.close()


def trial(way: str, what: str, said: Mapping[str, Any], names: Iterable[str] = (), dashes: str = "--") -> Trial:
    """Return the trial of a router.

    Args:
        way: the key of the way to ask it.
        what: the command or the URL.
        said: the other options by their keys.
        names: of cases or clauses; none: all.
        dashes: what the options begin with, for errors.

    Raises:
        ValueError: the options do not fit each other, or one cannot be read.
    """
    reads = said["reads"]
    adapter = _adapter(way, what, said)
    if reads and not (adapter.fresh and said["engine"]):
        raise ValueError(f"{dashes}reads is for routers that the kit points at streams, and takes {dashes}engine")
    engines = said["engine"] or (() if adapter.fresh else (_RUNNING,))
    settings = Settings(
        endpoints=[_pair(f"{dashes}engine", each) for each in engines],
        streams=[adapters.Stream(*_pair(f"{dashes}reads", each), said["topic"]) for each in reads],
        topic=said["topic"],
        settle=said["settle"],
        connect=said["connect"],
    )
    cases = chosen(names)
    if said["arrays"]:
        cases = [as_arrays(case) for case in cases]
    return Trial(Player(adapter, settings), cases, Report("router", what or "kvbus.client"))


def _adapter(way: str, what: str, said: Mapping[str, Any]) -> adapters.Adapter:
    match way:
        case "driver":
            return adapters.Driver(shlex.split(what))
        case "view_command":
            return adapters.ViewCommand(shlex.split(what))
        case "view_url":
            return adapters.ViewUrl(what)
        case "score_url":
            return adapters.ScoreUrl(what, said["score_body"], said["score_pointer"], blocks=said["score_blocks"])
        case "dynamo_indexer":
            return adapters.DynamoIndexer(what)
    return adapters.Client(copies=not said["reads"])


def _pair(option: str, text: str) -> tuple[str, str]:
    live, _, replay = text.partition(",")
    if not live or not replay:
        raise ValueError(f"{option} {text}: LIVE,REPLAY, such as {_RUNNING}")
    return live, replay
