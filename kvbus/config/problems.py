"""Problems of a configuration: pydantic's errors about single keys, and contradictions between keys."""

from __future__ import annotations

import json
import reprlib
from typing import TYPE_CHECKING, Any, Final

from kvbus.common.errors import Problem
from kvbus.common.removed import removed_key
from kvbus.config.paths import Path, field_at, show, suggest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic_core import ErrorDetails

    from kvbus.config.models import Config


_WORDS: Final = {
    "bool": "must be true or false",
    "int": "must be a whole number",
    "float": "must be a number",
    "finite": "must be a finite number",
    "string": "must be text",
    "path": "must be a path",
    "tuple": "must be a list",
    "model": "must be a mapping of keys",
    "missing": "must be given",
}
_BOUNDS: Final = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}
_MAX_SHOWN: Final = 120


def example_at(path: Path) -> str | None:
    """Return a line of YAML with an example for a key, such as ``layout: per_source``; None without an example."""
    field = field_at(path)
    if field is None or not field.examples:
        return None
    return f"{path[-1]}: {plain(field.examples[0])}"


def plain(value: Any) -> str:
    """Format a value as YAML on one line."""
    if isinstance(value, str):
        return value if value and value[0].isalnum() and ": " not in value and " #" not in value else json.dumps(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {plain(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(plain(item) for item in value) + "]"
    return json.dumps(value, default=str)


def shown(value: Any) -> str:
    """Format an invalid value for an error message: on one line, shortened, and in quotes if it is a string."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    limited = reprlib.Repr()
    limited.maxstring = limited.maxother = _MAX_SHOWN
    text = limited.repr(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def from_pydantic(error: ErrorDetails, origins: Mapping[Path, str]) -> Problem:
    """Convert one of pydantic's errors to a problem, with the origin of the value and an example."""
    path: Path = tuple(error["loc"])
    origin = _origin(path, origins)
    value = None if error["type"] == "missing" else shown(error["input"])
    if error["type"] in {"extra_forbidden", "invalid_key"}:
        if (gone := removed_key(path)) is not None:
            return Problem(show(path), gone, value=value, origin=origin)
        near = suggest(path)
        wrong = "unknown key" if near is None else f"unknown key, did you mean {near}?"
        example = None if near is None else example_at((*path[:-1], near.rpartition(".")[2]))
        return Problem(show(path), wrong, value=value, example=example, origin=origin)
    return Problem(
        show(path) or "the configuration", _wrong(error), value=value, example=example_at(path), origin=origin
    )


def _wrong(error: ErrorDetails) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        allowed = context["expected"].replace("'", "").replace(" or ", ", ")
        return f"must be one of {allowed}"
    if kind in _BOUNDS:
        key, word = _BOUNDS[kind]
        return f"must be {word} {context[key]:g}"
    return _WORDS.get(kind.partition("_")[0], error["msg"])


def _origin(path: Path, origins: Mapping[Path, str]) -> str | None:
    for length in range(len(path), 0, -1):
        if path[:length] in origins:
            return origins[path[:length]]
    return None


class Findings:
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
