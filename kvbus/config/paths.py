"""Key paths such as ``outputs[0].layout``: parse them, format them, and look them up in the model of a configuration.

``root`` is that model in every function: a pydantic model whose fields are values, sections, or lists.
"""

from __future__ import annotations

import re
import types
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any, Final, Union, get_args, get_origin

from pydantic import BaseModel

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pydantic.fields import FieldInfo

Path = tuple[str | int, ...]

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


def _types(annotation: Any) -> Iterator[Any]:
    """Yield the types of an annotation, without ``Annotated`` and unions around them."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _types(get_args(annotation)[0])
    elif origin in {Union, types.UnionType}:
        for each in get_args(annotation):
            yield from _types(each)
    else:
        yield annotation


def _section(found: Iterable[Any]) -> type[BaseModel] | None:
    """Return the model among the types of a key; None if the key's value is not a section."""
    return next((each for each in found if isinstance(each, type) and issubclass(each, BaseModel)), None)


def _at(root: type[BaseModel], path: Path) -> list[Any]:
    """Return the types of the value at a key path; none for an unknown path.

    Only the lists at the top level have key paths for their elements.
    """
    found: list[Any] = [root]
    for depth, piece in enumerate(path):
        if isinstance(piece, int):
            lists = [each for each in found if get_origin(each) is tuple] if depth == 1 else []
            found = [inner for each in lists for inner in _types(get_args(each)[0])]
        else:
            model = _section(found)
            field = None if model is None else model.model_fields.get(piece)
            found = [] if field is None else list(_types(field.annotation))
    return found


def model_at(root: type[BaseModel], path: Path) -> type[BaseModel] | None:
    """Return the model of the section at a key path; None if there is no section. The empty path is the root's."""
    return _section(_at(root, path))


def field_at(root: type[BaseModel], path: Path) -> FieldInfo | None:
    """Return the model field of a key, even if its value is a list or a section; None for an unknown key."""
    if not path or not isinstance(path[-1], str):
        return None
    model = model_at(root, path[:-1])
    return None if model is None else model.model_fields.get(path[-1])


def lists(root: type[BaseModel]) -> list[str]:
    """Return the names of the keys at the top level whose value is a list."""
    return [name for name in root.model_fields if any(get_origin(each) is tuple for each in _at(root, (name,)))]


def is_structure(root: type[BaseModel], path: Path) -> bool:
    """Return whether the value at a key path is a list or a mapping, and not a single value."""
    found = _at(root, path)
    return _section(found) is not None or any(get_origin(each) in {tuple, dict} for each in found)


def is_known(root: type[BaseModel], path: Path) -> bool:
    """Return whether a key path names a configuration key, or an element of a list."""
    return bool(path) and bool(_at(root, path))


def suggest(root: type[BaseModel], path: Path) -> str | None:
    """Return the known key that is most similar to an unknown key; None if no key is similar."""
    name = path[-1]
    if not isinstance(name, str):
        return None
    # The same name in another section is a better suggestion than a similar name in this section: a user may have
    # written a source's key at the top level.
    homes: list[Path] = [(), *((each, 0) for each in lists(root)), *((each,) for each in root.model_fields)]
    for home in homes:
        model = model_at(root, home)
        if home != path[:-1] and model is not None and name in model.model_fields:
            return show((*home, name))
    here = model_at(root, path[:-1])
    near = get_close_matches(name, here.model_fields, n=1, cutoff=0.6) if here is not None else []
    return show((*path[:-1], near[0])) if near else None


def unknown(root: type[BaseModel], path: Path) -> str:
    """Return the message about an unknown key. It suggests a similar known key if there is one."""
    near = suggest(root, path)
    return "unknown key" if near is None else f"unknown key, did you mean {near}?"
