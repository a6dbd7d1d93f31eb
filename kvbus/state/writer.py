"""Keep the relay's state in a store on disk, so that a restart of kvbus loses no block (setting ``state_dir``).

After the restart, routers connect again, and get AllBlocksCleared and the blocks of this state.

kvbus writes the records of a burst of batches before it sends any batch that depends on them. So the next process knows
everything that a killed process has sent. If the write-ahead log has grown too large, kvbus writes a new checkpoint in
slices, and handles batches between the slices. If the store cannot be written, kvbus continues without a saved state,
and tries again later.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from kvbus.core.checkpoint import Loader, dump
from kvbus.core.relay import Relay
from kvbus.core.write_ahead_log import StateError, decode_records
from kvbus.state.contract import Store, StoreError

log = logging.getLogger("kvbus.state")

SLICE_SECONDS: Final = 0.003
"""Maximum time in seconds for which kvbus writes a checkpoint before it handles batches again."""

RETRY_SECONDS: Final = 60.0
"""Seconds after a failed write of the state until kvbus tries again."""


class StoppedError(Exception):
    """The process was asked to end while it was loading its state."""


class StateWriter:
    """The reader and writer of one relay's saved state.

    Args:
        store: the store of the state.
        clock: function that returns seconds since an arbitrary time, to measure durations.
        stopped: function that returns whether the process was asked to end. It is called while the state is loaded.
    """

    def __init__(self, store: Store, clock: Callable[[], float], stopped: Callable[[], bool] = lambda: False) -> None:
        self._store = store
        self._clock = clock
        self._stopped = stopped
        self._names: list[str] = []
        self._relay: Relay | None = None
        self._steps: Iterator[None] | None = None
        self._until = 0.0
        self._renamed = False
        """Whether the checkpoint that is being written is the first since the sources changed.

        Until it is complete, the state on disk belongs to the former sources and cannot be used.
        """
        self._without_pause = False
        self._distrusted = False
        self._loaded = False
        self._log_bytes = self._checkpoint_bytes = self._written = 0
        self._again = 0.0
        self.failure = ""
        """The error of the last failed write; empty if kvbus has completed a checkpoint since then."""
        self.failed = False
        """Whether the last write to the store failed. kvbus then continues without a state until it tries again."""

    @property
    def refused(self) -> int:
        """Number of files of a saved state that could not be used, and that the store moved aside."""
        return self._store.refused

    @property
    def may_be_older(self) -> bool:
        """Whether the state on disk may be older than the batches that kvbus has sent."""
        return self._store.older

    def load(self, relay: Relay, names: Sequence[str], now: float) -> bool:
        """Load the state from the store into a new relay. Return False if there is no state.

        Raises:
            StoreError: the state cannot be used. The relay may contain a part of it, so the caller must create a new
                relay.
            StoppedError: the process was asked to end.
        """
        self._names = list(names)
        loader, records = Loader(relay), 0
        begun = self._clock()
        log.info("reading the state in %s", self._store.location)

        def feed(body: bytes) -> None:
            self._look_whether_stopped()
            loader.feed(body)
            self._checkpoint_bytes += len(body)

        def apply(body: bytes, payloads: bytes) -> None:
            nonlocal records
            self._look_whether_stopped()
            if not loader.complete:
                raise StateError("the end of the checkpoint is missing")
            found = decode_records(body, payloads)
            if found is None:
                raise StateError("a payload is damaged")
            for record in found:
                relay.apply_record(record, now)
            records += len(found)
            self._log_bytes += len(body) + len(payloads)

        self._loaded = self._store.load(names, feed, apply)
        if not self._loaded:
            log.info("there is no state in %s", self._store.location)
            return False
        if relay.recovery_finished(now):
            self.distrust()
        blocks = sum(len(source.normalizer.index) for source in relay.sources)
        text = "state read: %d blocks, %d records of the log, in %.1f s"
        log.info(text, blocks, records, self._clock() - begun)
        return True

    def _look_whether_stopped(self) -> None:
        if self._stopped():
            raise StoppedError

    def distrust(self) -> None:
        """Make :meth:`begin` write a new checkpoint, because the relay was changed after it was loaded.

        No records describe these changes, so the state on disk lacks them.
        """
        self._distrusted = True

    def begin(self, relay: Relay) -> None:
        """Start to write the state of ``relay`` to the store."""
        self._relay = relay
        if self.failed:  # a reservation could not be written; work() tries later to write the state
            return
        relay.keep_records(keep=True)
        try:
            if self._loaded and not self._distrusted:
                # The reservations are unchanged. But writing them also writes the head of the database, which must
                # contain this boot's id and whether commits wait for the disk.
                self._store.reserve(self._store.reserved)
            else:
                self._begin_checkpoint(without_pause=True)
        except StoreError as error:
            self.fail(error)

    def flush(self) -> None:
        """Write the relay's new records to the store. Call this before anything is sent that depends on them."""
        records = None if self._relay is None else self._relay.records
        if records is None or not records.heads:
            return
        body, payloads = records.take()
        try:
            joined = b"".join(payloads)
            self._store.append(body, joined)
            self._log_bytes += len(body) + len(joined)
        except StoreError as error:
            self.fail(error)

    def work(self) -> None:
        """Continue the checkpoint that is being written. If there is none, begin one if it is due.

        Return after about :data:`SLICE_SECONDS`. A checkpoint is due if the write-ahead log is larger than
        ``checkpoint_after`` and larger than the last checkpoint. No checkpoint begins while batches wait to
        be handled, because the checkpoint would contain them as delivered.
        """
        relay = self._relay
        if relay is None or (relay.backlog and self._steps is None):
            return
        try:
            if self._steps is not None:
                self._go_on()
            elif self.failed:
                if self._clock() >= self._again:
                    self._try_again(relay)
            elif self._log_bytes > max(self._store.checkpoint_after, self._checkpoint_bytes):
                self._begin_checkpoint()
        except StoreError as error:
            self.fail(error)

    def _try_again(self, relay: Relay) -> None:
        self.failed = False
        relay.keep_records(keep=True)
        self._begin_checkpoint()

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written, so that :meth:`work` has to be called again.

        Large indexes stay frozen until the checkpoint is complete.
        """
        return self._steps is not None

    def _begin_checkpoint(self, *, without_pause: bool = False) -> None:
        """Begin to write a checkpoint of the relay's current state.

        Args:
            without_pause: whether to write the complete checkpoint without pauses, because there is no earlier state.
        """
        if self._relay is None:
            return
        self.flush()
        if self.failed:
            return
        self._log_bytes = self._written = 0
        self._without_pause = without_pause
        self._steps = self._store.checkpoint(self._names, self._counted(dump(self._relay)), self._pauses)
        self._go_on()

    def _counted(self, slices: Iterator[bytes]) -> Iterator[bytes]:
        for body in slices:
            self._written += len(body)
            yield body

    def _pauses(self) -> bool:
        return not self._without_pause and self._clock() >= self._until

    def _go_on(self) -> None:
        self._until = self._clock() + SLICE_SECONDS
        if self._steps is not None and next(self._steps, self) is self:
            self._steps = None
            self._renamed = self._without_pause = False
            self.failure = ""
            self._checkpoint_bytes = self._written

    def fail(self, error: StoreError) -> None:
        """Continue without a saved state after a failed write, and try again after :data:`RETRY_SECONDS`.

        The finding ``state_not_written`` shows the error to the operator.
        """
        self.failed = True
        self.failure = str(error)
        self._again = self._clock() + RETRY_SECONDS
        self._steps = None
        self._renamed = False
        if self._relay is not None:
            self._relay.keep_records(keep=False)

    def rename(self, names: Sequence[str]) -> None:
        """Begin a checkpoint with the names of the new sources, because the sources have changed.

        The relay must have no batches that wait to be handled. If kvbus is killed before the checkpoint is complete,
        the next process begins without a state.
        """
        self._names = list(names)
        if self.failed:
            return
        self._renamed = True
        try:
            self._begin_checkpoint()
        except StoreError as error:
            self.fail(error)

    def close(self) -> None:
        """Write the last records of the relay to the store.

        If a checkpoint is being written and there is no other valid state, complete it.
        """
        before = self.failure
        self.flush()
        while self._renamed and self.busy:
            self.work()
        self._steps = None
        if self.failure != before:
            log.error("kvbus cannot write its last state to %s: %s; see state_dir", self._store.location, self.failure)
        if self._relay is not None:
            self._relay.keep_records(keep=False)
