"""Print a reference of all configuration keys: ``python -m kvbus.config.reference``.

Without an argument it is a table. With the argument ``discover`` it is a table of the settings of all kinds of
``sources[].discover``. With ``example`` it is a configuration file with every key, its meaning and its default; that
file is deploy/kvbus.yaml.
"""

from __future__ import annotations

import sys
import textwrap
import types
from typing import TYPE_CHECKING, Any, Final, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from kvbus.config import parts
from kvbus.config.dynamo import DynamoPlane
from kvbus.config.front import Front, FrontGrpc
from kvbus.config.limits import Limits
from kvbus.config.logs import TYPES, KafkaTopic, NatsStream, RedisKeys
from kvbus.config.models import Config, Interpose
from kvbus.config.outputs import OutputConfig
from kvbus.config.sources import SourceConfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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
    """Yield the key, type, default, unit and meaning of every configuration key, in the order of the models."""
    for prefix, model in _SECTIONS:
        yield from _rows(prefix, model)


def _rows(prefix: str, model: type[BaseModel]) -> Iterator[tuple[str, str, str, str, str]]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}", type_text(field), _shown(field), _extra(field, "unit"), field.description or ""


def _extra(field: FieldInfo, name: str) -> str:
    """Return the ``unit`` or the ``default_text`` of a key; empty if the key has none."""
    return str(field.json_schema_extra[name] or "") if isinstance(field.json_schema_extra, dict) else ""


def _shown(field: FieldInfo) -> str:
    """Return the default of a key in Markdown."""
    return _extra(field, "default_text") or ("none" if field.is_required() else f"`{_yaml(field.default)}`")


def kinds() -> Iterator[tuple[str, str, str, str, str]]:
    """Yield key, type, default, unit and meaning of each setting of all installed kinds of ``sources[].discover``."""
    for kind in parts.installed(parts.DISCOVERY):
        yield from _rows(f"discover.{kind}.", parts.load(parts.DISCOVERY, kind).Settings)


def table(of: Iterable[tuple[str, str, str, str, str]] | None = None) -> str:
    """Format rows as a Markdown table. Without an argument, the rows are those of all configuration keys.

    A key that several types of logs have with the same meaning is one row.
    """
    names: dict[tuple[str, ...], list[str]] = {}
    for key, *rest in rows() if of is None else of:
        section, _, name = key.rpartition(".")
        parent, _, log = section.rpartition(".")
        if log in TYPES:
            names.setdefault((parent, name, *rest), [key]).append(log)
        else:
            names[key, "", *rest] = [key]
    lines = []
    for (_, _, *rest), (key, *logs) in names.items():
        also = f" (also under {', '.join(f'`{log}`' for log in logs[1:])})" if logs[1:] else ""
        lines.append(f"| `{key}`{also} | " + " | ".join(rest) + " |")
    return "\n".join([HEADER, *lines]) + "\n"


_BEGINNING: Final = """\
# Every key of kvbus, with its meaning and its default. Only sources and outputs have to be set.
# The settings of each kind of discover are in docs/CONFIGURATION.md, under "Every kind of discovery".
# Check a copy with `kvbus check kvbus.yaml`. The same reference as a table is docs/CONFIGURATION.md.
# KVBUS_OUTPUTS__0__LAYOUT=merged in the environment overrides this file, --set outputs[0].layout=merged overrides both.
"""


def example() -> str:
    """Return a configuration file with every key. deploy/kvbus.yaml is its copy."""
    config = Config.model_validate({"sources": [{}], "outputs": [{}]})
    blocks = ("\n".join(_lines(name, field, getattr(config, name), "")) for name, field in Config.model_fields.items())
    return "\n\n".join([_BEGINNING.rstrip(), *blocks]) + "\n"


def _lines(name: str, field: FieldInfo, value: Any, indent: str) -> Iterator[str]:
    """Yield the lines of one key: its comment, followed by its value or the keys of its section."""
    section, example = _section(field.annotation), (field.examples or [None])[0]
    yield from textwrap.wrap(_comment(field), 118, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
    if section is None:
        yield f"{indent}# {name}: {example}" if field.default_factory else f"{indent}{name}: {_yaml(value)}"
    elif value is None:
        yield from (f"{indent}{name}: null", f"{indent}# {name}:")
        for key, inner in section.model_fields.items():
            shown = (inner.examples or [None])[0] if inner.is_required() else inner.default
            yield from _lines(key, inner, shown, f"{indent}#   ")
    else:
        yield f"{indent}{name}:"
        if isinstance(value, tuple):
            yield f"{indent}  -"
            value, indent = value[0], f"{indent}  "
        for key, inner in section.model_fields.items():
            yield from _lines(key, inner, getattr(value, key), f"{indent}  ")


def _comment(field: FieldInfo) -> str:
    """Return the meaning, the choices and the default of a key as plain text, for a comment in YAML."""
    text = field.description or ""
    choices = [word for word in dict.fromkeys(_words(field.annotation)) if word.startswith("`")]
    if any(word.strip("`") not in text for word in choices):
        text += f" One of {', '.join(choices)}."
    default = _shown(field)
    if default not in {"none", "`{}`"}:
        unit = _extra(field, "unit") if default.strip("`").replace(".", "").isdigit() else ""
        text += f" Default: {default} {unit}".rstrip()
    return text.replace("`", "")


def _section(annotation: Any) -> type[BaseModel] | None:
    """Return the model of a section or of a list's elements; None if the annotation is of a single value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for arm in get_args(annotation) if (found := _section(arm)) is not None), None)


def type_text(field: FieldInfo) -> str:
    """Return a text about the type and the bounds of a key's value."""
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
    elif origin is not None:  # such as Annotated[int, ...]
        yield from _words(get_args(annotation)[0])
    elif annotation is type(None):
        yield "null"
    else:
        name = getattr(annotation, "__name__", str(annotation))
        yield _NAMES.get(name, "mapping")


def _yaml(value: Any) -> str:
    """Format the value of a key as YAML."""
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
    printed = {(): table, ("discover",): lambda: table(kinds()), ("example",): example}
    sys.stdout.write(printed[tuple(sys.argv[1:])]())
