"""What follows a key in an allow-list: the owner's name, and what it may read.

``team-a sources=engine-1,"engine 2" loras=sql-* salts=…`` Without a right the owner reads everything. Each right that
is there leaves less. What is not written exactly so is refused: nobody gets more by a slip of the pen than was meant.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase, translate
from typing import Final

RIGHTS: Final = ("sources", "models", "topics", "loras", "salts")
"""What a line may limit: all but salts by patterns."""

_NAME: Final = re.compile(r"[\w.@/ -]{1,63}", re.ASCII)
_ITEM: Final = re.compile(r'"((?:[^"\\]|\\["\\])*)"|([^\s",=\\#]+)')
_WORD: Final = re.compile(r"([a-z]+)=")
_ESCAPED: Final = re.compile(r'\\(["\\])')


class GrantError(ValueError):
    """What follows a key cannot be read. The text never quotes it: it may hold salts."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What the owner of a key may read; None: all of it.

    Attributes:
        sources: patterns of sources' names, or of names with ranks.
        models: patterns of the model that this kvbus serves.
        topics: patterns of the topics that batches have on the output.
        loras: patterns of LoRA adapters.
        salts: cache salts as they are.
    """

    sources: tuple[str, ...] | None = None
    models: tuple[str, ...] | None = None
    topics: tuple[str, ...] | None = None
    loras: tuple[str, ...] | None = None
    salts: frozenset[str] | None = field(default=None, repr=False)

    def reads_source(self, name: str, label: str, model: str | None, topic: str | None) -> bool:
        """Return whether anything of a source may be read.

        Args:
            name: the source's.
            label: its name with the rank, where it has several.
            model: the model that kvbus serves, where it is known.
            topic: what its batches have on the output, where that is fixed.
        """
        return (
            (_matches(name, self.sources) or _matches(label, self.sources))
            and _matches(model, self.models)
            and _matches(topic, self.topics)
        )

    @property
    def limits_sources(self) -> bool:
        """Whether there may be sources of which nothing may be read."""
        return (self.sources, self.models, self.topics) != (None, None, None)

    @property
    def loras_expression(self) -> str | None:
        """A regular expression that the adapters match; None: all of them."""
        return None if self.loras is None else "|".join(map(translate, self.loras))

    @property
    def sentence(self) -> str:
        """What may be read, in words; of salts their number alone."""
        parts = [
            f"{name} {', '.join(patterns)}" for name in RIGHTS[:-1] if (patterns := getattr(self, name)) is not None
        ]
        if self.salts is not None:
            parts.append("one salt" if len(self.salts) == 1 else f"{len(self.salts)} salts")
        return "; ".join(parts) or "everything"


EVERYTHING: Final = Grant()


@dataclass(frozen=True, slots=True)
class Client:
    """The owner of a key: its name, empty if it has none, and what it may read."""

    name: str = ""
    grant: Grant = EVERYTHING


Clients = Mapping[bytes, Client]
"""By public key, 32 raw bytes."""


def parse(text: str) -> Client:
    """Read what follows a key.

    Raises:
        GrantError: it is not written as it must be.
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
                raise GrantError("a name is 1 to 63 letters, digits, blanks and . _ - @ /, and not that of a right")
            name = items[0]
        elif word[1] not in RIGHTS:
            raise GrantError(f"an unknown right; there are {', '.join(RIGHTS)}")
        elif word[1] in rights:
            raise GrantError(f"{word[1]}= is there twice")
        else:
            rights[word[1]] = items
        if at < len(text) and not text[at].isspace():
            raise GrantError("a blank is needed between words, and quotes around what has one in it")
        at = _blank(text, at)
    salts = rights.pop("salts", None)
    return Client(name or "", Grant(**rights, salts=None if salts is None else frozenset(salts)))


def _blank(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _items(text: str, at: int, *, several: bool) -> tuple[tuple[str, ...], int]:
    """Read items with commas between them, and say where they end."""
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
    """Return whether one of the patterns is the text's. What is not known matches none."""
    return patterns is None or (text is not None and any(fnmatchcase(text, pattern) for pattern in patterns))
