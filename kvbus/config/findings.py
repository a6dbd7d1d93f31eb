"""What a check across keys is given, and where it reports a contradiction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbus.common.errors import Problem
from kvbus.config.paths import Path, show
from kvbus.config.problems import shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvbus.config.models import Config


class Findings:
    """The configuration under check, and the contradictions found so far.

    Args:
        config: the configuration.
        origins: where the value of each key path came from.
        bad: keys that are reported already, for which ``config`` holds defaults; the checks leave them out.
    """

    def __init__(self, config: Config, origins: Mapping[Path, str], bad: frozenset[Path]) -> None:
        self.config = config
        self.origins = origins
        self.bad = bad
        self.problems: list[Problem] = []

    def sound(self, *keys: Path) -> bool:
        """Return whether none of these keys, nor a section they are in, is reported already."""
        return not any(key[:length] in self.bad for key in keys for length in range(1, len(key) + 1))

    def report(self, key: Path, wrong: str, *, value: object = None, example: str | None = None) -> None:
        """Add a contradiction at a key."""
        text = None if value is None else shown(value)
        self.problems.append(Problem(show(key), wrong, text, example, self.origins.get(key)))

    def value(self, key: Path) -> str | None:
        """Return the value of a key as text; None where it has none."""
        node: object = self.config
        for piece in key:
            node = node[piece] if isinstance(node, tuple) and isinstance(piece, int) else getattr(node, str(piece))
        return None if node is None else str(node)

    def streams_sound(self) -> bool:
        """Return whether the slots of all sources are known."""
        several = range(len(self.config.sources))
        return self.sound(
            ("sources",), *(("sources", i, key) for i in several for key in ("data_parallel_size", "slot"))
        )
