"""Pydantic's errors about the keys of a configuration, as problems with an origin and an example."""

from __future__ import annotations

import json
import reprlib
from typing import TYPE_CHECKING, Any, Final

from kvbus.common.errors import Problem
from kvbus.config.paths import Path, field_at, show, suggest, unknown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic import BaseModel
    from pydantic_core import ErrorDetails


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


def example_at(root: type[BaseModel], path: Path) -> str | None:
    """Return a line of YAML with an example for a key, such as ``layout: per_source``; None without an example.

    ``root`` is the model in which the key path begins.
    """
    field = field_at(root, path)
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


def from_pydantic(root: type[BaseModel], error: ErrorDetails, origins: Mapping[Path, str]) -> Problem:
    """Convert one of pydantic's errors about a model to a problem, with the origin of the value and an example."""
    path: Path = tuple(error["loc"])
    origin = _origin(path, origins)
    value = None if error["type"] == "missing" else shown(error["input"])
    if error["type"] in {"extra_forbidden", "invalid_key"}:
        near = suggest(root, path)
        example = None if near is None else example_at(root, (*path[:-1], near.rpartition(".")[2]))
        return Problem(show(path), unknown(root, path), value=value, example=example, origin=origin)
    key = show(path) or "the configuration"
    return Problem(key, _wrong(error), value=value, example=example_at(root, path), origin=origin)


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
