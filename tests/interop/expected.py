"""What each router believes in each case, directly at an engine and through kvbus: one line for each router and side.

A case that is not named is exact. The numbers behind the words are in docs/INTEROP.md.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

from .cache import Score

if TYPE_CHECKING:
    from collections.abc import Mapping


class Belief(Enum):
    """How far a router's view and the engine's cache agree."""

    EXACT = "exact"
    NOTHING = "all blocks missing, none dead"
    WRONG = "not exact"
    CHANCE = "exact or not, by chance"

    def agrees(self, found: Score, live: int) -> bool:
        """Whether this is what was found."""
        if self is Belief.EXACT:
            return found == Score(missing=0, dead=0)
        if self is Belief.NOTHING:
            return found == Score(missing=live, dead=0)
        return self is Belief.CHANCE or found != Score(missing=0, dead=0)


Beliefs = dict[str, Belief]


def but(wrong: str = "", *, nothing: str = "", chance: str = "") -> Beliefs:
    """Exact, but in these cases."""
    named = {Belief.WRONG: wrong, Belief.NOTHING: nothing, Belief.CHANCE: chance}
    return {case: belief for belief, cases in named.items() for case in cases.split()}


EXACT: Final = but()

NEVER: Final = but(
    "missed_five engine_restarts lost_tail loss one_more rank_restarts rank_merged flow",
    nothing="late high_numbers cut router_restarts long",
)
"""Takes what comes, asks for nothing, and looks at no number."""

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
    "llm-d with replay (double)": but("lost_tail", nothing="long"),
    "never asks (double)": NEVER,
    "clears by pod (double)": NEVER,
    "PING as a message (double)": NEVER,
}

THROUGH_KVBUS: Final[Mapping[str, Beliefs]] = {
    "llm-d-kv-cache 0.9.0": EXACT,
    "Dynamo 1.6.1, indexer": EXACT,
    # a connection is one rank to these: a merged stream is not for them
    "Dynamo 1.6.1, KvRouter": but(nothing="rank_merged"),
    "vLLM router 0.1.17": but(nothing="rank_merged"),
    "vLLM router, no replay": but(nothing="rank_merged"),
    # with a stream a rank, SMG's gateway removes the blocks of all ranks at a clear of one
    "SMG relay 0.14.1": but("rank_restarts"),
    "SMG Rust relay 1.13.0": EXACT,
    # it ignores AllBlocksCleared: what went while it was not connected stays
    "AIBrix 0.7.0": but("missed_five bus_killed bus_killed_state"),
    "go-zeromq 0.17.0": EXACT,
    "llm-d with replay (double)": EXACT,
    "never asks (double)": EXACT,
    "clears by pod (double)": EXACT,
    "PING as a message (double)": EXACT,
}
