"""Parse the text after a public key in an allow-list: the name of the key's owner, and the owner's rights.

Example: ``team-a sources=engine-1,"engine 2" loras=sql-* salts=…``. An owner without rights in the list may read
everything. Each right limits the events that the owner may read. kvbus refuses text that does not follow the syntax
exactly, so that a typing error never gives the owner more access.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase, translate
from typing import Final

RIGHTS: Final = ("sources", "models", "topics", "loras", "salts")
"""The names of the rights in an allow-list. The values of ``salts`` are exact; the values of all other rights are
patterns.
"""

_NAME: Final = re.compile(r"[\w.@/ -]{1,63}", re.ASCII)
_ITEM: Final = re.compile(r'"((?:[^"\\]|\\["\\])*)"|([^\s",=\\#]+)')
_WORD: Final = re.compile(r"([a-z]+)=")
_ESCAPED: Final = re.compile(r'\\(["\\])')


class GrantError(ValueError):
    """The text after a key in an allow-list is malformed.

    The error's message never quotes the text, which may contain secret salts.
    """


@dataclass(frozen=True, slots=True)
class Grant:
    """The events that the owner of a key may read. An attribute that is None restricts nothing.

    Attributes:
        sources: patterns of source names, with or without the rank.
        models: patterns of the model that this kvbus serves.
        topics: patterns of the topics that batches have on the output.
        loras: patterns of the names of LoRA adapters.
        salts: exact cache salts.
    """

    sources: tuple[str, ...] | None = None
    models: tuple[str, ...] | None = None
    topics: tuple[str, ...] | None = None
    loras: tuple[str, ...] | None = None
    salts: frozenset[str] | None = field(default=None, repr=False)

    def reads_source(self, name: str, label: str, model: str | None, topic: str | None) -> bool:
        """Return whether the owner of the key may read at least some events of a source.

        Args:
            name: the source's name.
            label: the source's name with its data-parallel rank, if the worker has several ranks.
            model: the model that kvbus serves; None if it is unknown.
            topic: the topic of the source's batches on the output; None if it is not fixed.
        """
        return (
            (_matches(name, self.sources) or _matches(label, self.sources))
            and _matches(model, self.models)
            and _matches(topic, self.topics)
        )

    @property
    def limits_sources(self) -> bool:
        """Whether the rights can hide all events of a source."""
        return (self.sources, self.models, self.topics) != (None, None, None)

    @property
    def loras_expression(self) -> str | None:
        """A regular expression that matches the allowed names of LoRA adapters; None if all adapters are allowed."""
        return None if self.loras is None else "|".join(map(translate, self.loras))

    @property
    def sentence(self) -> str:
        """The rights as text for the operator. Of the salts it has only the number, because salts are secret."""
        parts = [
            f"{name} {', '.join(patterns)}" for name in RIGHTS[:-1] if (patterns := getattr(self, name)) is not None
        ]
        if self.salts is not None:
            parts.append("one salt" if len(self.salts) == 1 else f"{len(self.salts)} salts")
        return "; ".join(parts) or "everything"


EVERYTHING: Final = Grant()


@dataclass(frozen=True, slots=True)
class Client:
    """The owner of a key on an allow-list: its name, which may be empty, and its rights."""

    name: str = ""
    grant: Grant = EVERYTHING


Clients = Mapping[bytes, Client]
"""The owners of the keys on an allow-list, by public key (32 raw bytes)."""


def parse(text: str) -> Client:
    """Parse the text after a key in an allow-list; return the name and rights of the key's owner.

    Raises:
        GrantError: the text is malformed.
    """
    name: str | None = None
    rights: dict[str, tuple[str, ...]] = {}
    at = _blank(text, 0)
    while at < len(text) and text[at] != "#":
        word = _WORD.match(text, at)
        items, at = _items(text, at if word is None else word.end(), several=word is not None)
        if word is None or word[1] == "name":
            if name is not None or len(items) > 1:
                raise GrantError("a key has one name; rights are written like sources=engine-1")
            if _NAME.fullmatch(items[0]) is None or items[0] in RIGHTS:
                raise GrantError("a name has 1 to 63 letters, digits, blanks and . _ - @ /, and is not a right's name")
            name = items[0]
        elif word[1] not in RIGHTS:
            raise GrantError(f"an unknown right; the rights are {', '.join(RIGHTS)}")
        elif word[1] in rights:
            raise GrantError(f"{word[1]}= appears twice")
        else:
            rights[word[1]] = items
        if at < len(text) and not text[at].isspace():
            raise GrantError("put a blank between words, and quotes around a value that contains a blank")
        at = _blank(text, at)
    salts = rights.pop("salts", None)
    return Client(name or "", Grant(**rights, salts=None if salts is None else frozenset(salts)))


def _blank(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _items(text: str, at: int, *, several: bool) -> tuple[tuple[str, ...], int]:
    """Parse one item, or with ``several`` a comma-separated list of items.

    Returns:
        The items, and the position in the text after the last item.
    """
    items = []
    while True:
        item = _ITEM.match(text, at)
        if item is None or not item[0].strip('"'):
            raise GrantError("an empty item, or a character that needs quotes")
        found = item[2] if item[1] is None else _ESCAPED.sub(r"\1", item[1])
        if not found.isprintable() or "\ufffd" in found:
            raise GrantError("a character that cannot be printed")
        items.append(found)
        at = item.end()
        if not several or text[at : at + 1] != ",":
            return tuple(items), at
        at += 1


def _matches(text: str | None, patterns: tuple[str, ...] | None) -> bool:
    """Return whether at least one pattern matches the text, or whether there is no restriction (``patterns`` is None).

    If the text is unknown (None), no pattern matches it.
    """
    return patterns is None or (text is not None and any(fnmatchcase(text, pattern) for pattern in patterns))
