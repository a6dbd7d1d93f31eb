"""The interface between a bus and the store of its state. :mod:`kvbus.state.sqlite` implements it.

A store holds three things. A checkpoint is the complete state of the relay at one moment, as slices. The log has the
records since that moment, one frame for each burst of batches. The reservations say which sequence numbers may have
been used.

A store keeps this promise: after :meth:`Store.append` or :meth:`Store.reserve` has returned, a SIGKILL loses nothing
that it wrote. With ``state_sync: batch`` a power cut loses nothing either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Protocol

import msgspec

MARGIN: Final = 1 << 32
"""Number of seqs that are skipped if the reservations may be older than the batches that were sent."""

MAX_SEQ: Final = 1 << 62
"""Every sequence number is lower than this."""


class StoreError(Exception):
    """The store cannot be read or written. The text says why and names the directory."""


class Stream(msgspec.Struct):
    """The reservation of one output stream.

    Attributes:
        number: this number and higher ones were never used.
        slots: for a merged stream, the highest slot that routers may know, plus 1.
    """

    number: int = 0
    slots: int = 0


class Reserved(msgspec.Struct):
    """The data that must survive a state which cannot be used.

    Attributes:
        floor: a stream without a reservation begins at this number.
        streams: the reservation of each stream, by the stream's name.
        kept: small contents of other modules, by name: the slots of the workers, the engines found.
    """

    floor: int = 0
    streams: dict[str, Stream] = {}
    kept: dict[str, bytes] = {}

    @property
    def highest(self) -> int:
        """The lowest number such that neither it nor a higher one was used on any stream."""
        return max([self.floor, *(stream.number for stream in self.streams.values())])

    def raise_to(self, number: int) -> None:
        """Make every stream begin at this number or later, including streams that are not known yet."""
        self.floor = max(self.floor, number)
        for stream in self.streams.values():
            stream.number = max(stream.number, number)

    def add_margin(self) -> None:
        """Skip :data:`MARGIN` numbers on every stream, because newer reservations may have been lost."""
        self.floor = self.highest + MARGIN
        for stream in self.streams.values():
            stream.number += MARGIN


class Store(Protocol):
    """The store of one bus. Every method may raise :class:`StoreError`.

    A store that could not be written has no state any more, and its next :meth:`checkpoint` begins a new one.

    Attributes:
        reserved: the reservations of earlier processes. The bus changes them and passes them to :meth:`reserve`.
        older: whether the store may be older than the batches that were sent: it was not synced, and the machine was
            started anew.
        refused: number of files that could not be used and were moved aside.
        keeps_state: whether the bus keeps its state in the store. False: only reservations.
        checkpoint_after: minimum bytes of log after which a new checkpoint is due.
        reserve_ahead: how many numbers are reserved at a time.
        place: the directory, for log lines.
    """

    reserved: Reserved
    older: bool
    refused: int
    keeps_state: bool
    checkpoint_after: int
    reserve_ahead: int
    place: str

    def load(self, names: Sequence[str], feed: Callable[[bytes], None], apply: Callable[[bytes, bytes], None]) -> bool:
        """Read the state: first the checkpoint, then the log. Return False if there is none.

        Args:
            names: the sources and outputs that the state must belong to.
            feed: called with each slice of the checkpoint; it may raise ``StateError``.
            apply: called with the records and payloads of each frame of the log; it may raise ``StateError``.

        Raises:
            StoreError: the state cannot be used. The store is now empty, and :attr:`reserved` is above every number
                that may have been sent.
        """

    def append(self, body: bytes, payloads: bytes) -> None:
        """Add a frame to the log."""

    def reserve(self, reserved: Reserved) -> None:
        """Write the reservations, and replace the earlier ones."""

    def checkpoint(self, names: Sequence[str], slices: Iterable[bytes], pause: Callable[[], bool]) -> Iterator[None]:
        """Write a new checkpoint, which replaces the earlier one and the log up to now.

        The store writes while the iterator is advanced. It yields whenever ``pause`` returns true, and frames may be
        appended before it is advanced again. Until it ends, the earlier checkpoint and its log stay valid if the
        ``names`` are the same. With other names there is no valid state until it ends.
        """

    def close(self) -> None:
        """Close the store and let another process use it."""
