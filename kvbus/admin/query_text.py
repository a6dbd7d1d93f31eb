"""Long lists of token ids in JSON, read in pieces beside the stream; and those that were read lately, which come again.

A conversation's next prompt begins with the text of the one before. To make 32,768 integers of their digits takes
0.75 ms, to find them again 0.07.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Generator, Iterator
from typing import Final

import msgspec

from kvbus.core.blocks.prefix_labels import packed
from kvbus.core.stats import ProcessStats

PIECE: Final = 16 * 1024
"""Bytes of a list of token ids that are read, and found again, together. A body that is no longer is read whole."""

TURN: Final = 4
"""Pieces that are read in one go: 0.25 ms, less than the walk down the tree."""

KEPT: Final = 16 * 1024 * 1024
"""Bytes of pieces, as text and packed: of fifty prompts of 2,048 blocks."""

END: Final = 64
"""Bytes of each end of a text by which, and by its length, it is found. Then all of it is compared, which takes a third
of what a hash of all of it takes."""

ENTRY: Final = 400
"""Bytes that an entry takes besides, about."""

_ids: Final = msgspec.json.Decoder(list[int]).decode
"""Ids beyond 32 bits are found as they are packed, which is cheaper."""

_TOKENS: Final = b'"tokens"'
_NOTHING: Final = (b"", b"")
_list: Final = re.compile(_TOKENS + rb"[ \t\r\n]*:[ \t\r\n]*\[").match

Whole = tuple[bytes, list[bytes]]
"""A body in which ``[n]`` stands for the n-th list of token ids, and these lists, packed."""


class Texts:
    """Reads lists of token ids, and keeps them if it is to: of too many those go first that have not come for longest.

    Args:
        stats: where it is counted how much that is.
    """

    def __init__(self, stats: ProcessStats) -> None:
        self._stats = stats
        self._keeps = False
        self._known: OrderedDict[bytes, tuple[bytes, bytes]] = OrderedDict()
        """Texts and what was read of them."""

    def keep(self) -> None:
        """Keep what is read from now on."""
        self._keeps = True

    def forget(self) -> None:
        """Keep nothing, until told to."""
        self._keeps = False
        self._known.clear()
        self._stats.query_text_bytes = 0

    def in_pieces(self, body: bytes, most: int) -> Generator[None, None, Whole]:
        """Take up to so many lists of token ids out of a JSON body, some pieces at a time.

        What looks like a list of token ids is one: ``"`` is escaped inside a JSON string. A list is its pieces with
        commas between them, each with an id at least. Any other body, and one with more lists, comes back as it is.
        """
        rest: list[bytes] = []
        lists: list[bytes] = []
        done, at, anew = 0, body.find(_TOKENS), 0
        while at >= 0:
            found = _list(body, at)
            at += len(_TOKENS)
            if found is not None:
                at = found.end()
                rest.append(b"%b%d" % (body[done:at], len(lists)))
                end = body.find(b"]", at)
                if end < 0 or len(lists) == most:
                    return body, []
                pieces: list[bytes] = []
                for first, last in _cut(body, at, end):
                    ids = self._read_before(body, first, last)
                    if ids is None:
                        ids = self._read(body[first:last])
                        anew += 1
                        if anew % TURN == 0:
                            yield
                    if ids is None:
                        return body, []
                    pieces.append(ids)
                if len(pieces) > 1 and b"" in pieces:  # nothing is a list, but no piece of one
                    return body, []
                lists.append(b"".join(pieces))
                done = at = end
            at = body.find(_TOKENS, at)
        rest.append(body[done:])
        short = b"".join(rest)
        # an escape may hide a list's name
        return (body, []) if b"\\" in short else (short, lists)

    def _read_before(self, body: bytes, first: int, last: int) -> bytes | None:
        key = _key(body, first, last)
        text, ids = self._known.get(key, _NOTHING)
        if not text or not body.startswith(text, first):  # nothing of it is copied
            return None
        self._known.move_to_end(key)
        return ids

    def _read(self, text: bytes) -> bytes | None:
        """The ids of a text, packed; None if it is something else."""
        try:
            ids = packed(_ids(b"[%b]" % text))
        except (ValueError, UnicodeDecodeError):  # msgspec's errors are among them
            return None
        if self._keeps and ids:  # to keep nothing would save nothing
            self._add(text, ids)
        return ids

    def _add(self, text: bytes, ids: bytes) -> None:
        """Keep a text, instead of one of the same length with the same ends."""
        key = _key(text, 0, len(text))
        size = self._stats.query_text_bytes + _size((text, ids)) - _size(self._known.pop(key, _NOTHING))
        self._known[key] = text, ids
        while size > KEPT:
            size -= _size(self._known.popitem(last=False)[1])
        self._stats.query_text_bytes = size


def _key(body: bytes, first: int, last: int) -> bytes:
    """The length and both ends of a piece."""
    return b"%d:%b%b" % (last - first, body[first : min(first + END, last)], body[max(first, last - END) : last])


def _size(entry: tuple[bytes, bytes]) -> int:
    text, ids = entry
    return len(text) + len(ids) + ENTRY if text else 0


def _cut(body: bytes, first: int, end: int) -> Iterator[tuple[int, int]]:
    """Where the pieces of a list are: they end at commas."""
    while (last := body.find(b",", first + PIECE, end)) >= 0:
        yield first, last
        first = last + 1
    yield first, end
