"""The expected result of each router in each interop case, directly at an engine and through kvbus.

There is one entry for each router and side. In a case that an entry does not name, the router is exact. The measured
numbers are in docs/INTEROP.md.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

from .cache import Score

if TYPE_CHECKING:
    from collections.abc import Mapping


class Belief(Enum):
    """An expected result: how far a router's view should agree with the engine's cache."""

    EXACT = "exact"
    NOTHING = "all blocks missing, none dead"
    WRONG = "not exact"
    CHANCE = "exact or not, by chance"

    def agrees(self, found: Score, live: int) -> bool:
        """Return whether a router's result is as expected.

        Args:
            found: the numbers of missing and dead blocks at the router.
            live: the number of blocks in the engine's cache. All of them are missing if the router has no block.
        """
        if self is Belief.EXACT:
            return found == Score(missing=0, dead=0)
        if self is Belief.NOTHING:
            return found == Score(missing=live, dead=0)
        return self is Belief.CHANCE or found != Score(missing=0, dead=0)


Beliefs = dict[str, Belief]


def but(wrong: str = "", *, nothing: str = "", chance: str = "") -> Beliefs:
    """Return the expected results of a router that is exact in all cases except the named ones.

    Each argument has names of cases, separated by spaces.

    Args:
        wrong: cases in which the router is not exact.
        nothing: cases in which it has no block.
        chance: cases in which it is exact or not, by chance.
    """
    named = {Belief.WRONG: wrong, Belief.NOTHING: nothing, Belief.CHANCE: chance}
    return {case: belief for belief, cases in named.items() for case in cases.split()}


EXACT: Final = but()

NEVER: Final = but(
    "missed_five engine_restarts lost_tail loss one_more rank_restarts rank_merged flow",
    nothing="late high_numbers cut router_restarts long",
)
"""Expected results of a router that applies every batch it gets, requests no replay and checks no seq."""

DIRECT: Final[Mapping[str, Beliefs]] = {
    "llm-d-kv-cache 0.9.0": NEVER,
    "Dynamo 1.6.1, indexer": but(
        "missed_five engine_restarts lost_tail rank_restarts rank_merged",
        nothing="late high_numbers cut router_restarts long",
    ),
    "Dynamo 1.6.1, KvRouter": NEVER,
    "vLLM router 0.1.17": but("missed_five lost_tail", nothing="late high_numbers cut router_restarts long"),
    "vLLM router, no replay": but(
        "missed_five lost_tail loss one_more flow", nothing="late high_numbers cut router_restarts long"
    ),
    "SMG relay 0.14.1": but(
        "missed_five lost_tail one_more flow",
        nothing="late high_numbers cut engine_restarts router_restarts rank_restarts rank_merged long",
    ),
    "SMG Rust relay 1.13.0": but("missed_five lost_tail"),
    "AIBrix 0.7.0": NEVER,
    "go-zeromq 0.17.0": NEVER,
    "llm-d with replay (double)": but("missed_five lost_tail", nothing="long"),
    "never asks (double)": NEVER,
    "clears by pod (double)": NEVER,
    "PING as a message (double)": NEVER,
}

THROUGH_KVBUS: Final[Mapping[str, Beliefs]] = {
    "llm-d-kv-cache 0.9.0": EXACT,
    "Dynamo 1.6.1, indexer": EXACT,
    # Each of these routers expects one rank for each connection, so it cannot read a merged stream.
    "Dynamo 1.6.1, KvRouter": but(nothing="rank_merged"),
    "vLLM router 0.1.17": but(nothing="rank_merged"),
    "vLLM router, no replay": but(nothing="rank_merged"),
    # If each rank has its own stream, SMG's gateway removes the blocks of all ranks when one rank is cleared.
    "SMG relay 0.14.1": but("rank_restarts"),
    "SMG Rust relay 1.13.0": EXACT,
    # AIBrix ignores AllBlocksCleared: blocks that were evicted while it was disconnected stay in its view.
    "AIBrix 0.7.0": but("missed_five bus_killed bus_killed_state"),
    "go-zeromq 0.17.0": EXACT,
    "llm-d with replay (double)": EXACT,
    "never asks (double)": EXACT,
    "clears by pod (double)": EXACT,
    "PING as a message (double)": EXACT,
}
