"""``state_dir``: the relay's state on disk, so that routers do not notice a restart of kvbus.

A directory holds generations. ``state-N.dump`` is a checkpoint, ``state-N.log`` the write-ahead log from that moment
on. kvbus writes a record before it sends anything that follows from it, so a killed process never sent anything that
the next process does not know. When a log has grown, the next generation begins: its log at once, its checkpoint in
slices beside the traffic. A checkpoint gets its name when it is complete; until then both logs count.

The commit record (:mod:`kvbus.daemon.commit_record`) names the current log, and says how long it has to be. Each log
names the one before it, back to the one that the checkpoint names. If any of them is missing or is not what it was,
kvbus refuses the state, moves it aside, counts it, and begins empty. Only what is behind the committed length may be
torn: nothing that follows from it was sent.

Without ``sync`` nothing is synced to disk: a state outlives the process, not a power cut. In another boot of the
machine it may be older than what was sent, so it is loaded as one that routers may be ahead of. With ``sync`` each
frame is on the disk before anything is sent, and each file and name before the commit record speaks of it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvbus.core.checkpoint import Loader, dump
from kvbus.core.relay import Relay
from kvbus.core.write_ahead_log import Frame, StateError, decode_records
from kvbus.daemon import commit_record
from kvbus.daemon.commit_record import NO_LOG, CommitRecord, Committed
from kvbus.daemon.disk import NO_ROOM, Disk
from kvbus.daemon.generations import SPARE, Generations, name_of
from kvbus.daemon.state_file import ID_BYTES, header, identity, write_frame
from kvbus.daemon.state_keys import NO_KEYS, StateKeys

if TYPE_CHECKING:
    from kvbus.daemon.state_seal import Seal

log = logging.getLogger("kvbus.state")

MIN_ROTATE: Final = 128 * 1024 * 1024
"""kvbus rotates a log that is larger than this and than four times its checkpoint. A checkpoint costs a few
microseconds for each store in it; reading a log costs as much as handling its batches did."""

SLICE_SECONDS: Final = 0.003
"""How long kvbus goes on with a checkpoint before it looks after the traffic again."""


class StateStore:
    """The generations of one configuration in one directory.

    Args:
        directory: made if it is not there.
        names: names of sources and outputs; the store loads only a state of the same ones.
        disk: the real one, or a test's.
        sync: wait for the disk before anything is sent.
        keys: what seals the files, and what opens those that are there.
    """

    def __init__(
        self,
        directory: Path,
        names: Sequence[str],
        disk: Disk | None = None,
        *,
        sync: bool = False,
        keys: StateKeys = NO_KEYS,
    ) -> None:
        self._sync = sync
        self._disk = disk or Disk()
        self._path = directory
        self._keys = keys
        self._files = Generations(self._disk, directory, identity(names), keys)
        self._generation = 0
        self._log: int | None = None
        self._log_id, self._log_end = NO_LOG, 0
        self._log_seal: Seal | None = None
        self._checkpoint: int | None = None
        self._checkpoint_seal: Seal | None = None
        self._checkpoint_id, self._checkpoint_end = NO_LOG, 0
        self._slices: Iterator[bytes] | None = None
        self._renamed = False
        """The checkpoint being written is the first one for these sources: the state before it is of others."""
        self._relay: Relay | None = None
        self._found: Committed | None = None
        """What the commit record of an earlier process said."""
        self._record: CommitRecord | None = None
        self._unusable: str | None = None
        """What is wrong with the state on disk."""
        self._said_sealed = False
        self.reserved = 0
        """The highest seq that an earlier process may have used on any stream, as the commit record has it."""
        self.refused = 0
        """Files that could not be used and were moved aside."""
        self.failed = False
        """Writing failed (disk full, directory gone), so kvbus goes on without state until it is started again."""

    def load(self, relay: Relay, now: float) -> bool:
        """Load the newest state into a fresh relay; False if there is none. It changes nothing on disk.

        Raises:
            StateError: the state cannot be used, and the relay holds a part of it: begin with a new relay.
            StateKeyError: the state is sealed and there is no key for it, or it should be and is not.
            OSError: the directory cannot be made.
        """
        self._files.enter()
        self._generation = self._files.newest()
        try:
            found = self._found = commit_record.read(self._disk, self._files.directory)
            if found is not None:
                self.reserved = found.highest
            if found is None or found.log_id == NO_LOG:
                self._check_empty(found)
                return False
            self._load(relay, found, now)
        except (StateError, OSError) as error:
            self._files.check_keys()
            self._unusable = self._files.other_version() or str(error)
            raise StateError(self._unusable) from error
        self._log_id, self._generation = found.log_id, found.generation
        return True

    @property
    def may_be_older(self) -> bool:
        """What is on the disk may be older than what was sent: it was not synced, and the machine was started anew."""
        if self._found is None:
            return self._unusable is not None
        return self._found.boot != self._disk.boot_id() and not self._found.synced

    def distrust(self) -> None:
        """Write what was loaded as a new state, because the relay has changed it."""
        self._log_id = NO_LOG

    def begin(self, relay: Relay) -> None:
        """Begin a new generation, and move aside a state that could not be loaded.

        Raises:
            OSError: nothing can be written, and the disk is not full.
        """
        found = self._found or Committed()
        goes_on = self._log_id != NO_LOG and (found.synced or not self._sync)
        try:
            if goes_on:
                self._files.drop(lambda generation: generation > self._generation)
            else:
                if found.log_id == NO_LOG and self._unusable is None:
                    self._files.drop(lambda _: True)  # of a process that was killed while it began
                # a kill before this generation is committed leaves what nothing was sent from: no state, and no damage
                found = self._committed(self._generation + 1, NO_LOG, 0)
                self._log_id, self._log_end = NO_LOG, 0
            self._relay = relay
            relay.keep_records(keep=True)
            first = found._replace(highest=self.reserved)
            self._record = CommitRecord(self._disk, self._files.directory, first, sync=self._sync)
            if self._unusable is not None:
                self.refused = 1  # all of its files may be gone
                self.refused = max(1, self._files.move_aside(self._unusable))
            self._files.drop_foreign()
            self._begin_generation(whole=not goes_on)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            self.fail(error)

    def reserve(self, seq: int) -> None:
        """Keep a seq reservation a second time."""
        if self._record is not None:
            try:
                self._record.reserve(seq)
            except OSError as error:
                self.fail(error)

    # -- reading -----------------------------------------------------------------------------------------------------

    def _check_empty(self, found: Committed | None) -> None:
        if found is None and self._generation:
            raise StateError("there is no commit record")
        begun = 0 if found is None else found.generation
        if any(number != begun for number in self._files.numbers("dump")):
            raise StateError("it was given up by a process that was killed then")

    def _load(self, relay: Relay, found: Committed, now: float) -> None:
        generation = max((n for n in self._files.numbers("dump") if n <= found.generation), default=None)
        if generation is None:
            raise StateError("the checkpoint is missing")
        loader = Loader(relay)
        checkpoint = self._files.open(name_of(generation, "dump"))
        try:
            for blob in checkpoint.frames(_blob, checkpoint.size):
                loader.feed(blob)
        finally:
            checkpoint.close()
        if not loader.complete:
            raise StateError("the checkpoint has no end")
        records = 0
        for name, length in self._files.chain(checkpoint.before, found):
            read = self._files.open(name)
            try:
                for written in read.frames(decode_records, length, open_end=read.id == found.log_id):
                    for record in written:
                        relay.apply_record(record, now)
                    records += len(written)
            finally:
                read.close()
            self._log_end = read.end
        relay.recovery_finished(now)
        blocks = sum(len(source.normalizer.index) for source in relay.sources)
        log.info("state loaded: %d blocks, %d records of the write-ahead log", blocks, records)

    # -- writing -----------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write the relay's records. Called before anything that follows from them is sent."""
        records = None if self._relay is None else self._relay.records
        if records is None or not records.heads:
            return
        frame = records.take()
        if self._log is None or self._record is None:
            return
        try:
            self._log_end += write_frame(self._disk, self._log, self._log_id, self._log_end, frame, self._log_seal)
            if self._sync:
                self._disk.sync(self._log)
            self._record.commit(self._log_end)
        except OSError as error:
            self.fail(error)

    def work(self) -> None:
        """Do a slice of work, some milliseconds at most: go on with a checkpoint, or begin one if the log has grown.

        None begins while batches wait to be handled: the checkpoint would count them as delivered.
        """
        if self.failed or self._relay is None:
            return
        try:
            if self._slices is not None:
                self._go_on()
            elif self._log_end > max(MIN_ROTATE, 4 * self._checkpoint_end) and not self._relay.backlog:
                self._begin_generation()
        except OSError as error:
            self.fail(error)

    @property
    def busy(self) -> bool:
        """A checkpoint is being written, and :meth:`work` has more to do. Until its end large indexes stay frozen."""
        return self._slices is not None

    def _begin_generation(self, *, whole: bool = False) -> None:
        """Begin the next generation.

        Args:
            whole: write the whole checkpoint before its log is committed, because there is no state before it.
        """
        if self._relay is None or self._record is None:
            return
        self.flush()
        self._generation += 1
        self._close_files()
        name = name_of(self._generation, "log")
        before = self._log_id, self._log_end
        self._log, self._log_id, self._log_end, self._log_seal = self._create(name, *before, over=SPARE)
        if not whole:
            self._commit_generation()
        name = name_of(self._generation, "part")
        created = self._create(name, self._log_id, 0)
        self._checkpoint, self._checkpoint_id, self._checkpoint_end, self._checkpoint_seal = created
        self._slices = dump(self._relay)
        self._go_on(whole=whole)

    def _commit_generation(self) -> None:
        if self._sync:
            self._disk.sync_directory(self._files.directory)
        if self._record is not None:
            self._record.switch(self._committed(self._generation, self._log_id, self._log_end))

    def _committed(self, generation: int, log_id: bytes, length: int) -> Committed:
        return Committed(generation, log_id, length, boot=self._disk.boot_id(), synced=self._sync)

    def _create(
        self, name: str, before: bytes, length: int, over: str | None = None
    ) -> tuple[int, bytes, int, Seal | None]:
        """Make a file, ``over`` an old one that is no longer needed if there is one.

        It returns the file, its id, its length and its seal.

        The file gets its new header before its new name, so its old frames are never read under the new name.
        """
        disk = self._disk
        file_id = disk.random_bytes(ID_BYTES)
        begin, seal = header(disk, self._keys, self._files.identity, file_id, before, length)
        old = None if over is None else disk.reuse(self._files.directory, over)
        fd = disk.create(self._files.directory, name) if old is None else old
        disk.writev(fd, [begin])
        if self._sync:
            disk.sync(fd)
        if over is not None and old is not None:
            disk.rename(self._files.directory, over, name)
        return fd, file_id, len(begin), seal

    def _go_on(self, *, whole: bool = False) -> None:
        if self._slices is None or self._checkpoint is None:
            return
        until = time.perf_counter() + SLICE_SECONDS
        while whole or time.perf_counter() < until:
            body = next(self._slices, None)
            if body is None:
                if self._sync:
                    self._disk.sync(self._checkpoint)
                self._disk.close(self._checkpoint)
                self._checkpoint = self._slices = None
                name = name_of(self._generation, "part")
                self._disk.rename(self._files.directory, name, name_of(self._generation, "dump"))
                if self._sync:
                    self._disk.sync_directory(self._files.directory)
                if whole:
                    self._commit_generation()
                self._renamed = False
                self._files.drop(lambda generation: generation < self._generation)
                self._say_sealed()
                return
            at, seal = self._checkpoint_end, self._checkpoint_seal
            frame = Frame(body, [])
            self._checkpoint_end += write_frame(self._disk, self._checkpoint, self._checkpoint_id, at, frame, seal)
        if self._sync:
            self._disk.sync(self._checkpoint)

    def _say_sealed(self) -> None:
        """Say once that other keys are not needed any more."""
        if self._keys.all and not self._said_sealed:
            self._said_sealed = True
            how = "in clear" if self._keys.first is None else "sealed with the first key"
            log.info("all of the state is %s: no other line of state_key_file is needed any more", how)

    def fail(self, error: OSError) -> None:
        """Go on without state."""
        self.failed = True
        log.error("the state cannot be written (%s): going on without state", error.strerror or error)
        if self._relay is not None:
            self._relay.keep_records(keep=False)
        self._close_files()
        self._give_up()

    def _give_up(self) -> None:
        """Delete what the next process would take for the newest state, and what keeps a full disk full."""
        needless = {SPARE, commit_record.NAME, commit_record.NEW}
        if self._record is not None:
            with contextlib.suppress(OSError):
                self._record.switch(self._committed(0, NO_LOG, 0))
                needless.remove(commit_record.NAME)  # it has the seq reservations
        for name in self._disk.names(self._files.directory):
            ours = name in needless
            if ours or (name.startswith("state-") and name.endswith((".dump", ".log", ".part"))):
                try:
                    self._disk.unlink(self._files.directory, name)
                except OSError as error:
                    path = self._path / name
                    log.error("%s is out of date, delete it: %s", path, error.strerror or error)  # noqa: TRY400

    def _close_files(self) -> None:
        """Write no more to this generation."""
        for fd in (self._log, self._checkpoint):
            if fd is not None:
                self._disk.close(fd)
        self._log = self._checkpoint = self._slices = None

    def rename(self, names: Sequence[str]) -> None:
        """Begin a new generation for changed sources. No batches may wait.

        If kvbus is killed before the new checkpoint is complete, the next process refuses the state.
        """
        self._files.identity = identity(names)
        self._renamed = True
        if not self.failed:
            try:
                self._begin_generation()
            except OSError as error:
                self.fail(error)

    def close(self) -> None:
        """Write the last records, and the rest of a checkpoint without which there is no state; close the files."""
        self.flush()
        while self._renamed and self.busy and not self.failed:
            self.work()
        self._close_files()
        if self._record is not None:
            self._record.close()
            self._record = None
        self._files.leave()
        if self._relay is not None:
            self._relay.keep_records(keep=False)


def _blob(body: bytes, payloads: bytes) -> bytes | None:
    return None if payloads else body
