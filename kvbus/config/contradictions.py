"""The contradictions between the keys of a configuration, as the rules of the cross-check report them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbus.common.errors import Problem
from kvbus.config.paths import Path, show
from kvbus.config.problems import shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvbus.config.models import Config


class Contradictions:
    """The configuration that is being checked, and the contradictions that the checks have found.

    Args:
        config: the configuration.
        origins: the origin of each key's value, by key path: a line of the file, a variable, or ``command line``.
        bad: the keys whose values are invalid. ``config`` has their defaults instead, and the checks skip these keys.
    """

    def __init__(self, config: Config, origins: Mapping[Path, str], bad: frozenset[Path]) -> None:
        self.config = config
        self.origins = origins
        self.bad = bad
        self.problems: list[Problem] = []

    def sound(self, *keys: Path) -> bool:
        """Return whether all of these keys, and the sections that contain them, have valid values."""
        return not any(key[:length] in self.bad for key in keys for length in range(1, len(key) + 1))

    def report(self, key: Path, wrong: str, *, value: object = None, example: str | None = None) -> None:
        """Add a contradiction about a key to the problems.

        Add nothing if the value of the key is invalid, because this is already a problem.

        Args:
            key: the path of the key.
            wrong: a sentence about the contradiction.
            value: the value of the key.
            example: a valid line of YAML.
        """
        if not self.sound(key):
            return
        text = None if value is None else shown(value)
        self.problems.append(Problem(show(key), wrong, text, example, self.origins.get(key)))

    def value(self, key: Path) -> str | None:
        """Return the value of a key as text; None if the value is null."""
        node: object = self.config
        for piece in key:
            node = node[piece] if isinstance(node, tuple) and isinstance(piece, int) else getattr(node, str(piece))
        return None if node is None else str(node)

    def streams_sound(self) -> bool:
        """Return whether all keys that determine the slots of the sources have valid values."""
        several = range(len(self.config.sources))
        return self.sound(
            ("sources",), *(("sources", i, key) for i in several for key in ("data_parallel_size", "slot"))
        )
