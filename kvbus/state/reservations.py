"""Seq reservations, so that the numbering of an output stream never goes back, even if the process is killed.

Before kvbus uses a seq, the store has a higher number on disk. kvbus reserves a few thousand seqs together. After a
kill the numbering continues at the number on disk. After a graceful shutdown it continues exactly where it stopped.

The reservation of a merged stream also has the number of slots that the stream has ever had. So if a source is removed
while kvbus is not running, kvbus can clear the source's blocks at routers after the next start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from kvbus.state.contract import Reserved, Store, StoreError, Stream

log = logging.getLogger("kvbus.state")

StreamKey = tuple[int, int]
"""The key of a stream: the number of its output in the configuration, and its slot (0 on a merged output)."""


class SeqReservations:
    """The seq reservations of all output streams.

    Args:
        store: the store that keeps the reservations. If it is None, they are lost when the process ends.
        failed: called with each error of the store. After such an error, the store has no valid state any more.
    """

    def __init__(self, store: Store | None, failed: Callable[[StoreError], None] = lambda _: None) -> None:
        self._store = store
        self._on_failure = failed
        self._alone = Reserved()
        self._names: dict[StreamKey, str] = {}
        self._used: dict[StreamKey, int] = {}
        """For each stream, the lowest seq that this process has not reserved yet."""
        self._failed = False

    @property
    def _reserved(self) -> Reserved:
        return self._alone if self._store is None else self._store.reserved

    def _stream(self, output: int, slot: int) -> Stream:
        return self._reserved.streams[self._names[output, slot]]

    def add(self, output: int, slot: int, name: str, least: int = 0) -> None:
        """Add a stream, unless it was added before.

        A stream with the same name has the same reservation in every process.

        Args:
            output: the number of the output in the configuration.
            slot: the slot of the stream.
            name: the name of the stream in the store.
            least: the minimum first seq of a stream that has no reservation yet.
        """
        if (output, slot) not in self._names:
            self._names[output, slot] = name
            reserved = self._reserved
            reserved.streams.setdefault(name, Stream(max(least, reserved.floor)))

    def drop(self, output: int, next_seqs: Mapping[StreamKey, int]) -> None:
        """Remove the streams of a view that was closed or replaced, but keep their reservations.

        The reservation of a stream becomes its number in ``next_seqs``, so that the numbering continues exactly there
        later. ``output`` is the number of the view.
        """
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
        """Remove a stream together with its reservation."""
        self._used.pop((output, slot), None)
        self._reserved.streams.pop(self._names.pop((output, slot)), None)
        self._write()

    def first(self, output: int, slot: int) -> int:
        """Return the first seq of a stream in this process.

        It is above all seqs that an earlier process may have used. It is 0 if no process has used the stream.
        """
        return self._stream(output, slot).number if (output, slot) in self._names else 0

    def skip(self, to: int, output: int) -> None:
        """Make every stream of an output begin at the seq ``to`` or later.

        The store gets the new beginning of a stream only when the stream uses a seq.
        """
        for key in self._names:
            if key[0] == output:
                stream = self._stream(*key)
                stream.number = max(stream.number, to)

    def level(self) -> None:
        """Make every stream begin at the highest reserved number of all streams.

        This is needed if a router may get another stream than before: it drops batches whose seqs are below the highest
        seq that it has seen.
        """
        self._reserved.raise_to(self._reserved.highest)

    def use(self, output: int, slot: int, seq: int) -> None:
        """Reserve ``seq`` and the seqs that follow it, unless ``seq`` is reserved already.

        Call this before ``seq`` is sent.
        """
        if seq >= self._used.get((output, slot), 0):
            ahead = 0 if self._store is None else self._store.reserve_ahead
            self._used[output, slot] = self._stream(output, slot).number = seq + max(1, ahead)
            self._write()

    def slots(self, output: int) -> int:
        """Return the number of slots that the stream of a merged output has ever had."""
        return self._stream(output, 0).slots if (output, 0) in self._names else 0

    def widen(self, output: int, slots: int) -> None:
        """Record that the stream of a merged output has ``slots`` slots.

        Call this before a batch of a new slot is sent.
        """
        stream = self._stream(output, 0)
        if slots > stream.slots:
            stream.slots = slots
            self._write()

    def kept(self, name: str) -> bytes | None:
        """Return the data that :meth:`keep` has stored under the name ``name``; None if there is none."""
        return self._reserved.kept.get(name)

    def keep(self, name: str, content: bytes) -> None:
        """Store a module's small data under a name, so that the next process can read it with :meth:`kept`."""
        if self._reserved.kept.get(name) != content:
            self._reserved.kept[name] = content
            self._write()

    def close(self, next_seqs: Mapping[StreamKey, int]) -> None:
        """Write the next seq of each stream, so that the next process continues exactly there.

        Args:
            next_seqs: the next seq, by stream. A stream that is not in it keeps its reservation. A stream that was
                never added is ignored.
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
                log.error("seqs cannot be reserved: %s", error)  # noqa: TRY400
            self._failed = True
            self._on_failure(error)
        else:
            self._failed = False
