"""The interface between a bus and the store on disk that keeps the bus's state.

A store holds three things:

* The checkpoint: the complete state of the relay at one moment, in slices.
* The log (write-ahead log): the records of the relay since that moment, in one frame for each burst of batches.
* The reservations: the sequence numbers that the bus may have used.

A store keeps this promise: a SIGKILL loses nothing that :meth:`Store.append` or :meth:`Store.reserve` has written
before it returned. With ``state_sync: batch`` a power cut loses nothing either. :mod:`kvbus.state.sqlite` implements
the interface.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Protocol

import msgspec

MARGIN: Final = 1 << 32
"""Number of seqs that a stream skips if kvbus may have sent batches with seqs above the reservation on disk."""

MAX_SEQ: Final = 1 << 62
"""Upper limit of sequence numbers. Every sequence number is lower than this limit."""


class StoreError(Exception):
    """The store of the state cannot be read or written. The text names the directory and the reason."""


class Stream(msgspec.Struct):
    """The reservation of one output stream.

    Attributes:
        number: the lowest seq that is not reserved. The stream has used neither this seq nor a higher one.
        slots: for a merged stream, the number of slots that it has ever had. Routers may hold blocks of a source in any
            of these slots.
    """

    number: int = 0
    slots: int = 0


class Reserved(msgspec.Struct):
    """The data that the next process needs even if it cannot use the checkpoint and the write-ahead log.

    Attributes:
        floor: the first seq of a stream that has no reservation.
        streams: the reservation of each stream, by the stream's name.
        kept: small data of other modules, by name, such as the slots of the workers and the engines found by
            discovery.
    """

    floor: int = 0
    streams: dict[str, Stream] = {}
    kept: dict[str, bytes] = {}

    @property
    def highest(self) -> int:
        """The lowest seq that is above the reserved seqs of all streams. No stream has used it or a higher seq."""
        return max([self.floor, *(stream.number for stream in self.streams.values())])

    def raise_to(self, number: int) -> None:
        """Make every stream begin at ``number`` or later, including streams that are added later."""
        self.floor = max(self.floor, number)
        for stream in self.streams.values():
            stream.number = max(stream.number, number)

    def add_margin(self) -> None:
        """Skip :data:`MARGIN` seqs on every stream, because the newest reservations may have been lost."""
        self.floor = self.highest + MARGIN
        for stream in self.streams.values():
            stream.number += MARGIN


class Store(Protocol):
    """The store of one bus's state. Each method may raise :class:`StoreError`.

    After a failed write, the store has no valid state any more. Its next :meth:`checkpoint` begins a new state.

    Attributes:
        reserved: the reservations of earlier processes. The bus changes them, and passes them to :meth:`reserve`.
        older: whether the state may be older than the batches that kvbus has sent. This is possible if commits did not
            wait for the disk and the machine was restarted.
        refused: number of files that could not be used, and that the store moved aside.
        keeps_state: whether the bus keeps its state in the store. If it is False, the store has only the reservations.
        checkpoint_after: size of the write-ahead log in bytes after which a new checkpoint may begin.
        reserve_ahead: number of seqs that are reserved together.
        location: the directory of the store, as a text for log lines.
    """

    reserved: Reserved
    older: bool
    refused: int
    keeps_state: bool
    checkpoint_after: int
    reserve_ahead: int
    location: str

    def load(self, names: Sequence[str], feed: Callable[[bytes], None], apply: Callable[[bytes, bytes], None]) -> bool:
        """Read the saved state: first the checkpoint, then the write-ahead log. Return False if there is no state.

        Args:
            names: the names of the present sources and outputs. A state with other names is not used.
            feed: called with each slice of the checkpoint. It may raise ``StateError``.
            apply: called with the records and the payloads of each frame of the write-ahead log. It may raise
                ``StateError``.

        Raises:
            StoreError: the state cannot be used. The store is now empty, and :attr:`reserved` is above every seq that
                the bus may have sent.
        """

    def append(self, body: bytes, payloads: bytes) -> None:
        """Add a frame to the write-ahead log: the encoded records of a burst of batches, and the batches' payloads."""

    def reserve(self, reserved: Reserved) -> None:
        """Write the reservations to the disk. They replace the reservations that are there."""

    def checkpoint(self, names: Sequence[str], slices: Iterable[bytes], pause: Callable[[], bool]) -> Iterator[None]:
        """Write a new checkpoint. It replaces the earlier checkpoint and the write-ahead log up to now.

        The caller must advance the returned iterator, because the store writes only then. The iterator yields whenever
        ``pause`` returns True. Between two steps, the caller may append frames to the write-ahead log.

        Until the iterator ends, the earlier checkpoint and its write-ahead log remain valid if they have the same
        ``names`` (of sources and outputs). If they have other names, there is no valid state until the iterator ends.
        """

    def close(self) -> None:
        """Close the store, so that another process can use it."""
