"""The verdict: routers' views compared with the engines' caches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvbus.client import BlockView
from kvbus.core.types import PREFIX_KINDS, medium_key

Key = tuple[int | None, str, int | str]
"""(group, medium, hash). Byte hashes are hex strings."""

_NAMED: Final = 3


def truth_keys(truth: Iterable[Mapping[str, Any]]) -> set[Key]:
    """Return the keys of an engine's live blocks in groups that can match a prefix, from `SimEngine.truth`."""
    return {
        (entry["group_idx"], medium_key(entry["medium"]) or str(entry["medium"]).upper(), entry["hash"])
        for entry in truth
        if entry["kind"] is None or entry["kind"] in PREFIX_KINDS
    }


def view_keys(view: BlockView) -> set[Key]:
    """Return the keys of a router's view."""
    return {(it.group_idx, it.medium, it.hash.hex() if isinstance(it.hash, bytes) else it.hash) for it in view}


@dataclass(frozen=True, slots=True)
class Comparison:
    """One router's view of one source, compared with that engine rank's own cache.

    Attributes:
        router: name of the router.
        source: label of the rank.
        blocks: live blocks in the engine's cache.
        missing: blocks that only the engine has.
        dead: blocks that only the router has.
    """

    router: str
    source: str
    blocks: int
    missing: frozenset[Key]
    dead: frozenset[Key]

    @property
    def equal(self) -> bool:
        """Whether both have the same blocks."""
        return not self.missing and not self.dead

    def differences(self) -> str:
        """Describe the difference, with a few of the blocks; empty if there is none."""
        parts = []
        for what, keys in (("missing", self.missing), ("dead", self.dead)):
            if keys:
                parts.append(f"{len(keys)} {what}: {_names(keys)}")
        return "; ".join(parts)


def compare(router: str, source: str, view: set[Key], truth: set[Key]) -> Comparison:
    """Compare one view with one cache."""
    return Comparison(router, source, len(truth), frozenset(truth - view), frozenset(view - truth))


def counts(comparisons: Sequence[Comparison]) -> str:
    """Say how many blocks are wrong in all of them."""
    missing = sum(len(item.missing) for item in comparisons)
    dead = sum(len(item.dead) for item in comparisons)
    return f"{missing:,} missing, {dead:,} dead"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of the demo.

    Attributes:
        comparisons: every running router behind the bus, with every source.
        unsettled: what had not settled in time, as texts; empty if everything had.
        direct: the router that reads the engines themselves, with every source. It is shown and not judged.
    """

    comparisons: Sequence[Comparison]
    unsettled: Sequence[str] = ()
    direct: Sequence[Comparison] = ()

    @property
    def equal(self) -> bool:
        """Whether there is a comparison, and all are equal."""
        return bool(self.comparisons) and all(item.equal for item in self.comparisons)

    @property
    def headline(self) -> str:
        """The verdict in one sentence."""
        total = len(self.comparisons)
        good = sum(item.equal for item in self.comparisons)
        if self.equal:
            return f"exact: all {total} views hold exactly what the engines' caches hold"
        if not total:
            return "nothing to compare: no router had joined"
        return f"NOT EXACT: {total - good} of {total} views differ from the engines' caches"

    @property
    def without(self) -> str:
        """What the direct router has, in one sentence; empty if there is none."""
        if not self.direct:
            return ""
        return f"what a router has without kvbus: {counts(self.direct)} blocks"


def _names(keys: frozenset[Key]) -> str:
    named = [f"{medium} {block}" for _, medium, block in sorted(keys, key=str)[:_NAMED]]
    return ", ".join(named) + (", …" if len(keys) > _NAMED else "")
