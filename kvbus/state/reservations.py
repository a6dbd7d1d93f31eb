"""Seq reservations: no output stream's numbering ever goes back, even if the process is killed.

kvbus writes a number to the store *before* it uses the numbers below it, a few thousand at a time. After a kill the
numbering goes on at that number. After a graceful shutdown it goes on exactly where it stopped.

The reservation of a merged stream also says how many sources the stream ever carried. So a source that is taken away
while kvbus is down is cleared when kvbus is back.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from kvbus.state.contract import Reserved, Store, StoreError, Stream

log = logging.getLogger("kvbus.state")

StreamKey = tuple[int, int]
"""A stream: its output's number in the configuration, and its slot (0 on a merged output)."""


class SeqReservations:
    """The reservations of all outgoing streams, by output and slot.

    Args:
        store: where they are kept; None: they end with the process.
    """

    def __init__(self, store: Store | None) -> None:
        self._store = store
        self._alone = Reserved()
        self._names: dict[StreamKey, str] = {}
        self._used: dict[StreamKey, int] = {}
        """This process may use the numbers below these."""
        self._failed = False

    @property
    def _reserved(self) -> Reserved:
        return self._alone if self._store is None else self._store.reserved

    def _stream(self, output: int, slot: int) -> Stream:
        return self._reserved.streams[self._names[output, slot]]

    def add(self, output: int, slot: int, name: str, least: int = 0) -> None:
        """Add a stream, unless it is there. The same name finds the same reservation in every process.

        Args:
            output: the output's number in the configuration.
            slot: the stream's slot.
            name: what the reservation is found by.
            least: where a stream begins that has no reservation yet.
        """
        if (output, slot) not in self._names:
            self._names[output, slot] = name
            reserved = self._reserved
            reserved.streams.setdefault(name, Stream(max(least, reserved.floor)))

    def drop(self, output: int, next_seqs: Mapping[StreamKey, int]) -> None:
        """Take an output's streams away, and keep where they stopped: nobody is served there any more."""
        keys = [key for key in self._names if key[0] == output]
        for key in keys:
            if key in next_seqs:
                self._stream(*key).number = next_seqs[key]
        for key in keys:
            del self._names[key]
            self._used.pop(key, None)
        if keys:
            self._write()

    def forget(self, output: int, slot: int) -> None:
        """Take a stream away, with its reservation."""
        self._used.pop((output, slot), None)
        self._reserved.streams.pop(self._names.pop((output, slot)), None)
        self._write()

    def first(self, output: int, slot: int) -> int:
        """Return the number a stream begins with: 0, or past all numbers that an earlier process can have used."""
        return self._stream(output, slot).number if (output, slot) in self._names else 0

    def skip(self, to: int, output: int) -> None:
        """Let every stream of an output begin at ``to`` or later. Nothing is written until a number is used."""
        for key in self._names:
            if key[0] == output:
                stream = self._stream(*key)
                stream.number = max(stream.number, to)

    def level(self) -> None:
        """Let every stream begin where the furthest one does.

        A router that is given another stream than before drops numbers below those that it has seen.
        """
        self._reserved.raise_to(self._reserved.highest)

    def use(self, output: int, slot: int, seq: int) -> None:
        """Reserve ``seq`` and numbers after it, if it is not reserved. Called before ``seq`` is sent."""
        if seq >= self._used.get((output, slot), 0):
            ahead = 0 if self._store is None else self._store.reserve_ahead
            self._used[output, slot] = self._stream(output, slot).number = seq + max(1, ahead)
            self._write()

    def slots(self, output: int) -> int:
        """Return how many slots a merged output has ever had."""
        return self._stream(output, 0).slots if (output, 0) in self._names else 0

    def widen(self, output: int, slots: int) -> None:
        """Keep that a merged output has so many slots. Called before anything of them is sent."""
        stream = self._stream(output, 0)
        if slots > stream.slots:
            stream.slots = slots
            self._write()

    def kept(self, name: str) -> bytes | None:
        """Return what :meth:`keep` has kept under a name."""
        return self._reserved.kept.get(name)

    def keep(self, name: str, content: bytes) -> None:
        """Keep a small content for the next process."""
        if self._reserved.kept.get(name) != content:
            self._reserved.kept[name] = content
            self._write()

    def close(self, next_seqs: Mapping[StreamKey, int]) -> None:
        """Write where the streams stop: the next process begins them there.

        Args:
            next_seqs: numbers by stream. A stream that is not in it keeps its reservation, and one that was never
                added here is left alone.
        """
        keys = next_seqs.keys() & self._names.keys()
        for key in keys:
            self._stream(*key).number = next_seqs[key]
        if keys:
            self._write()

    def _write(self) -> None:
        if self._store is None:
            return
        try:
            self._store.reserve(self._reserved)
        except StoreError as error:
            if not self._failed:
                log.error("seqs cannot be reserved (%s): after a kill the numbering may go back", error)  # noqa: TRY400
            self._failed = True
        else:
            self._failed = False
