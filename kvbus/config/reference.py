"""The reference of all keys, from the models: ``python -m kvbus.config.reference`` prints it.

With ``discover`` behind it, it prints the settings of the kinds of ``sources[].discover``.
"""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any, Final, Literal, Union, get_args, get_origin

from kvbus.config import parts
from kvbus.config.dynamo import DynamoPlane
from kvbus.config.front import Front, FrontGrpc
from kvbus.config.logs import KafkaTopic, NatsStream, RedisKeys
from kvbus.config.models import Config, Interpose, Limits
from kvbus.config.outputs import OutputConfig
from kvbus.config.sources import SourceConfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

HEADER: Final = "| key | type | default | unit | meaning |\n|---|---|---|---|---|"
_SECTIONS: Final[tuple[tuple[str, type[BaseModel]], ...]] = (
    ("", Config),
    ("interpose.", Interpose),
    ("sources[].", SourceConfig),
    ("outputs[].", OutputConfig),
    ("outputs[].dynamo.", DynamoPlane),
    ("outputs[].kafka.", KafkaTopic),
    ("outputs[].nats.", NatsStream),
    ("outputs[].redis.", RedisKeys),
    ("front.", Front),
    ("front_grpc.", FrontGrpc),
    ("limits.", Limits),
)
_NAMES: Final = {"str": "text", "int": "integer", "float": "number", "bool": "true or false", "Path": "path"}


def rows() -> Iterator[tuple[str, str, str, str, str]]:
    """Yield key, type, default, unit and meaning of every key, in the order of the models."""
    for prefix, model in _SECTIONS:
        yield from _rows(prefix, model)


def _rows(prefix: str, model: type[BaseModel]) -> Iterator[tuple[str, str, str, str, str]]:
    for name, field in model.model_fields.items():
        extra = field.json_schema_extra
        unit, default = (str(extra["unit"]), extra["default_text"]) if isinstance(extra, dict) else ("", None)
        shown = str(default) if default is not None else "none" if field.is_required() else f"`{_default(field)}`"
        yield f"{prefix}{name}", type_text(field), shown, unit, field.description or ""


def kinds() -> Iterator[tuple[str, str, str, str, str]]:
    """Yield the same of every setting of the kinds of ``sources[].discover`` that are installed."""
    for kind in parts.installed(parts.DISCOVERY):
        yield from _rows(f"discover.{kind}.", parts.load(parts.DISCOVERY, kind).Settings)


def table(of: Iterable[tuple[str, str, str, str, str]] | None = None) -> str:
    """Return rows as a Markdown table; those of all keys unless others are given."""
    lines = [f"| `{key}` | " + " | ".join(rest) + " |" for key, *rest in (rows() if of is None else of)]
    return "\n".join([HEADER, *lines]) + "\n"


def type_text(field: FieldInfo) -> str:
    """Describe the values of a key, in words."""
    text = " or ".join(dict.fromkeys(_words(field.annotation)))
    bounds = []
    for item in field.metadata:
        for attribute, sign in (("gt", "> "), ("ge", "≥ "), ("le", "≤ ")):
            if (bound := getattr(item, attribute, None)) is not None:
                bounds.append(f"{sign}{bound:g}" if isinstance(bound, float) else f"{sign}{bound}")
    return f"{text}, {', '.join(bounds)}" if bounds else text


def _words(annotation: Any) -> Iterator[str]:
    origin = get_origin(annotation)
    if origin in {Union, types.UnionType}:
        for arm in get_args(annotation):
            yield from _words(arm)
    elif origin is Literal:
        yield from (f"`{value}`" for value in get_args(annotation))
    elif origin is tuple:
        yield "list"
    elif origin is dict:
        yield "mapping"
    elif origin is not None:  # Annotated
        yield from _words(get_args(annotation)[0])
    elif annotation is type(None):
        yield "null"
    else:
        name = getattr(annotation, "__name__", str(annotation))
        yield _NAMES.get(name, "mapping")


def _default(field: FieldInfo) -> str:
    value = field.default
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if value == ():
        return "[]"
    if isinstance(value, Limits) or value == {}:
        return "{}"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if value != "" else '""'


if __name__ == "__main__":
    sys.stdout.write(table(kinds() if sys.argv[1:] == ["discover"] else None))
