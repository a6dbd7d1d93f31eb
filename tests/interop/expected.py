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

DIRECT: Final[Mapping[str, Beliefs]] = {
    "llm-d-kv-cache 0.9.0": but("missed_five engine_restarts", nothing="late"),
    "Dynamo 1.6.1, indexer": but("missed_five engine_restarts", nothing="late"),
    "Dynamo 1.6.1, KvRouter": but("missed_five engine_restarts", nothing="late"),
    "vLLM router 0.1.17": but("missed_five", nothing="late"),
    "vLLM router, no replay": but("missed_five", nothing="late"),
    "SMG relay 0.14.1": but("missed_five engine_restarts", nothing="late"),
    "AIBrix 0.7.0": but("missed_five engine_restarts", nothing="late"),
    "go-zeromq 0.17.0": but("missed_five engine_restarts", nothing="late"),
    "llm-d with replay (double)": EXACT,
    "never asks (double)": but("missed_five engine_restarts", nothing="late"),
    "clears by pod (double)": but("missed_five engine_restarts", nothing="late"),
    "PING as a message (double)": but("missed_five engine_restarts", nothing="late"),
}

THROUGH_KVBUS: Final[Mapping[str, Beliefs]] = {
    "llm-d-kv-cache 0.9.0": EXACT,
    "Dynamo 1.6.1, indexer": EXACT,
    "Dynamo 1.6.1, KvRouter": EXACT,
    "vLLM router 0.1.17": EXACT,
    "vLLM router, no replay": EXACT,
    "SMG relay 0.14.1": EXACT,
    "AIBrix 0.7.0": but("missed_five"),  # it ignores AllBlocksCleared
    "go-zeromq 0.17.0": EXACT,
    "llm-d with replay (double)": EXACT,
    "never asks (double)": EXACT,
    "clears by pod (double)": EXACT,
    "PING as a message (double)": EXACT,
}
