"""Long lists of token ids and hashes in JSON, read in pieces beside the stream; what was read lately comes again.

A conversation's next prompt begins with the text of the one before. To make 32,768 integers of their digits takes
0.75 ms, to find them again 0.07; 2,048 hashes 0.3 and 0.02.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Generator, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from kvbus.admin.query_hashes import Names, readings, some_names
from kvbus.core.blocks.prefix_labels import packed
from kvbus.core.stats import ProcessStats

PIECE: Final = 32 * 1024
"""Bytes of a list of token ids that are read, and found again, together; of hashes a quarter. A body that is no longer
is read whole."""

TURN: Final = 2
"""Pieces that are read in one go: 0.25 ms, less than the walk down the tree."""

KEPT: Final = 16 * 1024 * 1024
"""Bytes of pieces, as text and as what was read of it: of fifty prompts of 2,048 blocks by tokens."""

END: Final = 64
"""Bytes of each end of a text by which, and by its length, it is found. Then all of it is compared, which takes a third
of what a hash of all of it takes."""

ENTRY: Final = 400
"""Bytes that an entry takes besides, about."""

HASH: Final = 130
"""Bytes that a hash takes, and where its block is, about."""

Piece = bytes | Names
"""Of a list: token ids, packed, or hashes."""

List = bytes | list[Names]
"""Token ids, packed, or hashes in pieces, which are the same objects each time."""

Whole = tuple[bytes, list[List]]
"""A body in which ``[n]`` stands for the n-th list, and these lists."""

_ids: Final = msgspec.json.Decoder(list[int]).decode
"""Ids beyond 32 bits are found as they are packed, which is cheaper."""

_hashes: Final = msgspec.json.Decoder(list[int | str]).decode

_TOKENS: Final = b'"tokens"'
_HASHES: Final = b'"hashes"'
_list: Final = re.compile(rb'"(?:tokens|hashes)"[ \t\r\n]*:[ \t\r\n]*\[').match


class Entry(NamedTuple):
    """A text, what was read of it, and the bytes that both take."""

    text: bytes
    read: Piece
    size: int


class Texts:
    """Reads lists, and keeps them if it is to: of too many those go first that have not come for longest.

    Args:
        stats: where it is counted how much that is.
    """

    def __init__(self, stats: ProcessStats) -> None:
        self._stats = stats
        self._keeps = False
        self._known: OrderedDict[bytes, Entry] = OrderedDict()

    def keep(self) -> None:
        """Keep what is read from now on."""
        self._keeps = True

    def forget(self) -> None:
        """Keep nothing, until told to."""
        self._keeps = False
        self._known.clear()
        self._stats.query_text_bytes = 0

    def in_pieces(self, body: bytes, most: int) -> Generator[None, None, Whole]:
        """Take up to so many lists of token ids and hashes out of a JSON body, some pieces at a time.

        What looks like such a list is one: ``"`` is escaped inside a JSON string. A list is its pieces with commas
        between them, each with an id at least. Any other body, and one with more lists, comes back as it is.
        """
        rest: list[bytes] = []
        lists: list[List] = []
        done = anew = 0
        for kind, first in _lists(body):
            rest.append(b"%b%d" % (body[done:first], len(lists)))
            done = body.find(b"]", first)
            if done < 0 or len(lists) == most:
                return body, []
            pieces: list[Piece] = []
            for begin, end in _cut(body, first, done, PIECE if kind is _TOKENS else PIECE // 4):
                read = self._read_before(kind, body, begin, end)
                if read is None:
                    read = self._read(kind, body[begin:end])
                    anew += 1
                    if anew % TURN == 0:
                        yield
                if read is None:
                    return body, []
                pieces.append(read)
            whole = _joined(pieces)
            if whole is None:
                return body, []
            lists.append(whole)
        rest.append(body[done:])
        short = b"".join(rest)
        # an escape may hide a list's name
        return (body, []) if b"\\" in short else (short, lists)

    def _read_before(self, kind: bytes, body: bytes, first: int, last: int) -> Piece | None:
        key = _key(kind, body, first, last)
        known = self._known.get(key)
        if known is None or not body.startswith(known.text, first):  # nothing of it is copied
            return None
        self._known.move_to_end(key)
        return known.read

    def _read(self, kind: bytes, text: bytes) -> Piece | None:
        """The ids of a text, packed, or its hashes; None if it is something else."""
        try:
            listed = b"[%b]" % text
            read = packed(_ids(listed)) if kind is _TOKENS else some_names(_hashes(listed))
        except (ValueError, UnicodeDecodeError):  # msgspec's errors are among them
            return None
        if self._keeps and read:  # to keep nothing would save nothing
            self._add(_key(kind, text, 0, len(text)), Entry(text, read, len(text) + _size(read) + ENTRY))
        return read

    def _add(self, key: bytes, entry: Entry) -> None:
        """Keep a text, instead of one of the same length with the same ends."""
        before = self._known.pop(key, None)
        size = self._stats.query_text_bytes + entry.size - (0 if before is None else before.size)
        self._known[key] = entry
        while size > KEPT:
            size -= self._known.popitem(last=False)[1].size
        self._stats.query_text_bytes = size


def _lists(body: bytes) -> Iterator[tuple[bytes, int]]:
    """Where lists begin, behind their brackets, each with its kind. What is not there is looked for once."""
    ahead = {kind: body.find(kind) for kind in (_TOKENS, _HASHES)}
    while ahead := {kind: where for kind, where in ahead.items() if where >= 0}:
        kind = min(ahead, key=ahead.__getitem__)
        found = _list(body, ahead[kind])
        at = ahead[kind] + len(kind)
        if found is not None:
            at = found.end()
            yield kind, at
            at = body.find(b"]", at)  # without it nothing more is asked for
        ahead = {each: where if where >= at else body.find(each, at) for each, where in ahead.items()}


def _joined(pieces: Sequence[Piece]) -> List | None:
    """What pieces are behind each other; None if that is no list. Nothing is a list, but no piece of one."""
    if len(pieces) > 1 and b"" in pieces:
        return None
    ids = [each for each in pieces if isinstance(each, bytes)]
    if ids:
        return b"".join(ids)
    names = [each for each in pieces if isinstance(each, Names)]
    return names if readings(names) else None


def _key(kind: bytes, body: bytes, first: int, last: int) -> bytes:
    """The kind, the length and both ends of a piece."""
    ends = body[first : min(first + END, last)], body[max(first, last - END) : last]
    return b"%b%d:%b%b" % (kind, last - first, *ends)


def _size(read: Piece) -> int:
    return len(read) if isinstance(read, bytes) else HASH * sum(len(each.names) for each in read if each is not None)


def _cut(body: bytes, first: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """Where the pieces of a list are: they end at commas."""
    while (last := body.find(b",", first + size, end)) >= 0:
        yield first, last
        first = last + 1
    yield first, end
