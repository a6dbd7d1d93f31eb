"""Key paths such as ``outputs[0].layout``: parse them, format them, and look them up in the models."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final

from kvbus.config.front import Front, FrontGrpc
from kvbus.config.models import Config, Interpose, Limits
from kvbus.config.outputs import OutputConfig
from kvbus.config.sources import SourceConfig

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

Path = tuple[str | int, ...]

LISTS: Final[dict[str, type[BaseModel]]] = {"sources": SourceConfig, "outputs": OutputConfig}
PLAIN_LISTS: Final = frozenset({"http_allowed_hosts", "without_media", "expiring_media"})
"""Keys whose value is a list of single values."""
PARTS: Final = frozenset({"discover"})
"""Keys whose value is a mapping that an optional part validates."""
SECTIONS: Final[dict[str, type[BaseModel]]] = {
    "front": Front,
    "front_grpc": FrontGrpc,
    "interpose": Interpose,
    "limits": Limits,
}

_PIECE: Final = re.compile(r"\.?([^.\[\]]+)|\[(\d{1,6})\]")
_MAX_INDEX_DIGITS: Final = 6


def index(text: str) -> str | int:
    """Return one element of a key path: an int if the text is a list index, otherwise the text itself."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_INDEX_DIGITS else text


def parse(text: str) -> Path:
    """Parse a key path such as ``outputs[0].layout`` or ``outputs.0.layout``.

    Raises:
        ValueError: the text is not a key path.
    """
    pieces: list[str | int] = []
    at = 0
    while at < len(text):
        match = _PIECE.match(text, at)
        if match is None:
            break
        pieces.append(int(match[2]) if match[2] is not None else index(match[1]))
        at = match.end()
    if not pieces or at != len(text):
        raise ValueError(f"{text!r} is not a key such as http or outputs[0].layout")
    return tuple(pieces)


def show(path: Iterable[str | int]) -> str:
    """Format a key path as text, such as ``outputs[0].layout``."""
    text = ""
    for piece in path:
        text += f"[{piece}]" if isinstance(piece, int) else f".{piece}" if text else piece
    return text


def model_at(path: Path) -> type[BaseModel] | None:
    """Return the pydantic model of the section at a key path; None if there is no section at this path.

    The empty path is that of the complete configuration.
    """
    match path:
        case ():
            return Config
        case (str(name),):
            return SECTIONS.get(name)
        case (str(name), int()):
            return LISTS.get(name)
    return None


def field_at(path: Path) -> FieldInfo | None:
    """Return the model field of a key, even if its value is a list or a section; None for an unknown key."""
    if not path or not isinstance(path[-1], str):
        return None
    model = model_at(path[:-1])
    return None if model is None else model.model_fields.get(path[-1])


def is_structure(path: Path) -> bool:
    """Return whether the value at a key path is a list or a mapping, and not a single value."""
    if len(path) == 3 and path[-1] in PARTS:
        return True
    return model_at(path) is not None or (len(path) == 1 and path[0] in {*LISTS, *PLAIN_LISTS})


def is_known(path: Path) -> bool:
    """Return whether a key path names a configuration key, or an element of a list."""
    match path:
        case (str(name), int()) if name in PLAIN_LISTS:
            return True
    return field_at(path) is not None or is_structure(path)


def suggest(path: Path) -> str | None:
    """Return the known key that is most similar to an unknown key; None if no key is similar."""
    name = path[-1]
    if not isinstance(name, str):
        return None
    # The same name in another section is a better suggestion than a similar name in this section: a user may have
    # written a source's key at the top level.
    homes: list[tuple[Path, type[BaseModel]]] = [((), Config)]
    homes += [((name_, 0), cls) for name_, cls in LISTS.items()]
    homes += [((section,), cls) for section, cls in SECTIONS.items()]
    for home, cls in homes:
        if home != path[:-1] and name in cls.model_fields:
            return show((*home, name))
    model = model_at(path[:-1])
    near = get_close_matches(name, model.model_fields, n=1, cutoff=0.6) if model is not None else []
    return show((*path[:-1], near[0])) if near else None


def unknown(path: Path) -> str:
    """Return the message about an unknown key. It suggests a similar known key if there is one."""
    near = suggest(path)
    return "unknown key" if near is None else f"unknown key, did you mean {near}?"
