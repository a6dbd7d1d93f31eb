"""The types of the keys' values, with their checks and error messages, and the base class of all sections."""

from __future__ import annotations

import re
import string
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError

from kvbus.config import parts
from kvbus.config.endpoints import host_name, parse_address, parse_endpoint
from kvbus.config.paths import show
from kvbus.config.problems import from_pydantic
from kvbus.core.types import MEDIA, Tier
from kvbus.core.wire.profiles import PROFILES


def key(
    default: Any,
    about: str,
    *,
    example: Any,
    unit: str = "",
    default_text: str | None = None,
    **bounds: float,
) -> Any:
    """Return a pydantic field with a description, an example and a unit.

    Args:
        default: the default value, or a function that returns it.
        about: the meaning of the key, in Markdown.
        example: a valid value.
        unit: the unit of the value; empty if it has none.
        default_text: a text about the default, if it depends on other keys or on the machine.
        bounds: pydantic's bounds of the value, such as ``ge``.
    """
    extra = {"unit": unit, "default_text": default_text}
    given = {"default_factory": default} if callable(default) else {"default": default}
    return Field(**given, **bounds, description=about, examples=[example], json_schema_extra=extra)  # type: ignore[call-overload]


class Section(BaseModel):
    """Base class of the sections of the configuration. A section is immutable and rejects unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=False, protected_namespaces=()
    )


PLACEHOLDERS: Final = ("model", "worker", "source", "rank")


def placeholders(template: str) -> set[str]:
    """Return the names of the placeholders in a topic template.

    Raises:
        ValueError: the template is malformed, or has an unknown placeholder.
    """
    allowed = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
    used: set[str] = set()
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"unbalanced braces ({error}); write {{{{ and }}}} for literal ones") from None
    for _, name, spec, conversion in pieces:
        if name is None:
            continue
        if name not in PLACEHOLDERS or spec or conversion:
            shown = name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
            raise ValueError(f"{{{shown}}} is not a placeholder; allowed are {allowed}")
        used.add(name)
    return used


def _template(value: str) -> str:
    placeholders(value)
    return value


def render_template(template: str, *, model: str, worker: str, source: str, rank: int) -> bytes:
    """Return a topic template with its placeholders filled in, encoded as UTF-8."""
    return template.format(model=model, worker=worker, source=source, rank=rank).encode()


_NAME_CHARS: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
_MAX_NAME: Final = 63


def _not_bool(value: object) -> object:
    if isinstance(value, bool):  # pydantic would convert true to 1
        raise ValueError("must be a number, not true or false")  # noqa: TRY004 - pydantic collects ValueErrors
    return value


_SIZE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(?:([kmgt])(i?))?b?", re.IGNORECASE)


def _size(value: object) -> object:
    """Return the number of bytes of a size such as ``64MiB``."""
    if not isinstance(value, str):
        return _not_bool(value)
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise ValueError("must be a whole number of bytes, or a size such as 64MiB")
    number, prefix, binary = match.groups()
    power = "kmgt".index(prefix.lower()) + 1 if prefix else 0
    return round(float(number) * (1024 if binary else 1000) ** power) if power else int(float(number))


def _port_alone(value: object) -> object:
    """Convert a number to text, so that a port without a host gets the error message about malformed addresses."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _endpoint(value: str) -> str:
    parse_endpoint(value)
    return value


def _address(value: str) -> str:
    parse_address(value)
    return value


def _api(value: str) -> str:
    try:
        url = urlsplit(value)
        sound = url.scheme in {"http", "https"} and url.hostname and url.port != 0
    except ValueError:
        sound = False
    if not sound or url.username is not None or url.query or url.fragment or any(c.isspace() for c in value):
        raise ValueError("must be http://host:port, with the API's path if it has one, and without a query")
    return value.rstrip("/")


def _hosts(value: object) -> object:
    if not isinstance(value, list | tuple) or not all(isinstance(host, str) for host in value):
        raise ValueError("must be a list of host names or addresses")
    for host in value:
        if host_name(host) is None or ":" in host.rpartition("]")[2]:
            raise ValueError(f"{host!r} is not a host name or address (no scheme, port or wildcard; IPv6 in brackets)")
    return value


def _media(value: object) -> object:
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise ValueError("must be a list of media")
    names = tuple(name.upper() for name in value)
    for name in names:
        if MEDIA.get(name, Tier.DEVICE) is Tier.DEVICE:
            known = ", ".join(name for name, tier in MEDIA.items() if tier is not Tier.DEVICE)
            raise ValueError(f"{name!r} is a medium of the device, or unknown; possible are: {known}")
    return names


def _output_type(value: str) -> str:
    found = parts.installed(parts.OUTPUTS)
    if value not in found:
        raise ValueError(f"must be an installed type: {', '.join(found) or 'none is installed'}")
    return value


def _name(value: str) -> str:
    if not value or len(value) > _MAX_NAME or not _NAME_CHARS.issuperset(value):
        raise ValueError(
            f"must be 1 to {_MAX_NAME} letters, digits, dots, dashes or underscores (it is a metrics label)"
        )
    return value


_MAX_TEXT: Final = 1024


def _text(value: str) -> str:
    if not value.isprintable():  # neither a topic nor a file name can have control characters or lone surrogates
        raise ValueError("must be printable text")
    if len(value) > _MAX_TEXT:
        raise ValueError(f"must have at most {_MAX_TEXT:,} characters; it has {len(value):,}")
    return value


def _block_size(value: object) -> object:
    if value == "auto":
        return value
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError("must be auto or a whole number above 0")
    return value


def _framing(value: object) -> object:
    for allowed in ("auto", 3, 4):
        if not isinstance(value, bool) and str(value) == str(allowed):
            return allowed
    raise ValueError("must be one of auto, 3, 4")


def _state_dir(value: object) -> object:
    if value == "auto" or isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError("must be auto, a path or null")
    return Path(value)


def checked_discovery(value: object) -> dict[str, dict[str, Any]]:
    """Check the value of ``discover``, and return it with all settings of its kind, including defaults.

    Raises:
        ValueError: the value does not name exactly one installed kind, a package is missing, or a setting is invalid.
    """
    found = parts.installed(parts.DISCOVERY)
    if not isinstance(value, dict) or len(value) != 1 or next(iter(value)) not in found:
        kinds = ", ".join(found) or "none"
        raise ValueError(f"must be a mapping with one kind and its settings; installed kinds: {kinds}")
    ((kind, given),) = value.items()
    if lacking := parts.missing(parts.DISCOVERY, kind):
        raise ValueError(lacking)
    settings = parts.load(parts.DISCOVERY, kind).Settings
    try:
        return {kind: settings.model_validate({} if given is None else given).model_dump(mode="json")}
    except ValidationError as error:
        problems = [
            replace(from_pydantic(settings, item, {}), key=show((kind, *item["loc"])), example=None)
            for item in error.errors(include_url=False)
        ]
        raise ValueError("; ".join(map(str, problems))) from error


Int = Annotated[int, BeforeValidator(_not_bool)]
Size = Annotated[int, BeforeValidator(_size)]
"""A number of bytes, written as a number or as a text such as 64MiB."""
Seconds = Annotated[float, BeforeValidator(_not_bool)]
Endpoint = Annotated[str, AfterValidator(_endpoint)]
ApiUrl = Annotated[str, AfterValidator(_api)]
Text = Annotated[str, AfterValidator(_text)]
Name = Annotated[str, AfterValidator(_name)]
if TYPE_CHECKING:
    ProfileName = str
else:
    ProfileName = Literal[*PROFILES]
"""The name of a family of routers. The names come from the table of profiles in ``kvbus.core.wire.profiles``."""
Discover = Annotated[dict[str, dict[str, Any]], PlainValidator(checked_discovery)]
OutputType = Annotated[str, AfterValidator(_output_type)]
Template = Annotated[Text, AfterValidator(_template)]
HttpAddress = Annotated[str, BeforeValidator(_port_alone), AfterValidator(_address)]
HttpHosts = Annotated[tuple[str, ...], BeforeValidator(_hosts)]
Media = Annotated[tuple[str, ...], BeforeValidator(_media)]
BlockSize = Annotated[int | Literal["auto"], PlainValidator(_block_size)]
Framing = Annotated[Literal["auto", 3, 4], PlainValidator(_framing)]
StateDir = Annotated[Path | Literal["auto"], PlainValidator(_state_dir)]
LogLevel = Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_lower)]
