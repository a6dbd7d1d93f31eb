"""The feed: it applies the updates of one stream to an index of prefixes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from msgspec import UNSET

from kvbus.client.prefix_index import Names, medium_of, names_of
from kvbus.client.updates import (
    Conflict,
    Gap,
    Lost,
    Reachable,
    Received,
    Rejected,
    Restarted,
    Snapshot,
    Synced,
    Unreachable,
)
from kvbus.core.normalizing.admission import check_removed, check_stored
from kvbus.core.types import PREFIX_KINDS, Hash, Reason
from kvbus.core.wire.carried import set_aside
from kvbus.core.wire.codec import clears_all
from kvbus.core.wire.schema import AllBlocksCleared, Batch, BlockStored

if TYPE_CHECKING:
    from kvbus.client.prefix_index import PrefixIndex
    from kvbus.client.updates import Update
    from kvbus.core.wire.schema import BlockRemoved

_NO_GROUP: Final = -1


class Worker(NamedTuple):
    """A worker that holds blocks, identified by the name of its stream and its data-parallel rank.

    The rank is None if the stream has no ranks. On a merged output of kvbus the rank is the source's slot.
    """

    name: str
    rank: int | None


State = Literal["connecting", "live", "gap", "conflict"]


@dataclass(slots=True)
class Status:
    """The condition of one stream.

    Attributes:
        state: ``connecting`` until the state has arrived, or until the first live batch if the publisher sends no
            state. ``live``: every known batch has been applied. ``gap``: batches are missing. ``conflict``: several
            publishers share the endpoint.
        partial: whether batches were lost for good. The workers then hold blocks that are not in the index. The
            attribute becomes false at the next epoch, rebuild or snapshot.
        unreachable: the reason why there is no connection; empty if there is one.
        seq: the seq of the last applied batch; -1 before the first.
        refused: number of events and batches that were not applied, by reason.
        tokenless: number of stores without token ids. Their blocks can be found by hash, but not by a prompt's tokens.
    """

    state: State = "connecting"
    partial: bool = False
    unreachable: str = ""
    seq: int = -1
    refused: Counter[Reason] = field(default_factory=Counter)
    tokenless: int = 0

    @property
    def settled(self) -> bool:
        """Whether the stream's state is complete, or known to be unavailable."""
        return self.state != "connecting" or self.partial or bool(self.unreachable)

    def note(self, update: Update) -> None:
        """Change the condition of the stream according to one of its updates."""
        match update:
            case Received(seq=seq):
                self.seq = seq
                if not update.replayed:
                    self.state = "live"
            case Snapshot(seq=seq):
                self.seq, self.partial = seq, False
            case Synced():
                self.state = "live"
            case Gap():
                self.state = "gap"
            case Lost():
                self.partial = True
            case Restarted():
                self.state, self.seq, self.partial = "connecting", -1, False
            case Conflict():
                self.state = "conflict"
            case Unreachable(why=why):
                self.unreachable = why
            case Reachable():
                self.unreachable = ""
            case Rejected(reason=reason):
                self.refused[reason] += 1


class Feed:
    """The part of a `PrefixRouter` that applies the updates of one stream to the index. Each rank is a separate worker.

    A worker of a hybrid model has several KV-cache groups. The feed applies the events of only one of them: the group
    of the worker's first store that has tokens, unless the store names a kind of attention whose blocks do not form
    prefixes (:data:`~kvbus.core.types.PREFIX_KINDS`). After the worker is cleared, the group is chosen again.

    Args:
        name: the name of the workers, which is the stream's name.
        index: the index that gets the blocks.
        copies: whether to count the copies of a block. See `BlockView`.
        status: the condition of the stream, which the feed updates; None to create one.
    """

    def __init__(self, name: str, index: PrefixIndex[Worker], *, copies: bool, status: Status | None = None) -> None:
        self.status: Final = status or Status()
        self.discarded = False
        """Whether the router no longer follows the stream. An update that is already being applied is then ignored."""
        self._name: Final = name
        self._index: Final = index
        self._copies: Final = copies
        self._topics: dict[bytes, Feed] = {}
        self._workers: dict[int | None, Worker] = {}
        self._groups: dict[Worker, int | None] = {}
        self._more: dict[Worker, Counter[tuple[str, Names, Hash]]] = {}
        """Number of further copies of each block, by worker, and then by medium and hash.

        The first copy is not counted.
        """

    def of(self, topic: bytes) -> Feed:
        """Return the feed for one topic of this feed's subscription; make it if there is none.

        It is needed if each topic is a separate stream (``by_topic``). The workers of the returned feed have the name
        ``NAME/TOPIC``, where ``NAME`` is the name of this feed.
        """
        found = self._topics.get(topic)
        if found is None:
            name = f"{self._name}/{topic.decode('utf-8', 'backslashreplace')}"
            found = self._topics[topic] = Feed(name, self._index, copies=self._copies, status=self.status)
        return found

    @property
    def names(self) -> list[str]:
        """The name that all workers of this feed share, and the names of the feeds of its topics (see :meth:`of`)."""
        return [self._name, *(name for each in self._topics.values() for name in each.names)]

    def clear(self) -> None:
        """Remove all blocks of the stream's workers from the index."""
        for each in self._topics.values():
            each.clear()
        for worker in self._workers.values():
            self._clear(worker)
        self._workers.clear()

    def apply(self, batch: Batch) -> None:
        """Apply the events of a batch to the index, and count the events that the index refuses."""
        worker = self._workers.get(batch.rank)
        if worker is None:
            worker = self._workers[batch.rank] = Worker(self._name, batch.rank)
        self.status.refused.update(batch.rejects)
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self._clear(worker, event)
                continue
            if isinstance(event, BlockStored):
                refused: object = self._store(worker, event)
            else:
                refused = self._remove(worker, event)
            if isinstance(refused, Reason):
                self.status.refused[refused] += 1

    def _clear(self, worker: Worker, event: AllBlocksCleared | None = None) -> None:
        if event is not None and not clears_all(event):
            self._index.apply(worker, event)
            more = self._more.get(worker, Counter[tuple[str, Names, Hash]]())
            self._more[worker] = Counter({key: count for key, count in more.items() if key[0] != medium_of(event)})
            return
        self._index.clear(worker)
        self._groups.pop(worker, None)
        self._more.pop(worker, None)

    def _store(self, worker: Worker, event: BlockStored) -> Reason | None:
        tokens = check_stored(event)
        if isinstance(tokens, Reason):
            return tokens
        kind = event.kv_cache_spec_kind
        if not event.block_hashes or (isinstance(kind, str) and kind not in PREFIX_KINDS):
            return None
        # The index keeps one group of each worker, the group of the first store. A store without tokens does not count,
        # because an offloaded block may be announced without tokens and without a group.
        if tokens:
            self._groups.setdefault(worker, _group(event))
        else:
            self.status.tokenless += 1
        if _group(event) != self._groups.get(worker, _NO_GROUP):
            return None
        set_aside(event)
        if self._copies:
            place = medium_of(event), names_of(event)
            repeated = [(*place, block) for block in event.block_hashes if self._index.holds(worker, block, *place)]
            self._more.setdefault(worker, Counter()).update(repeated)
        self._index.apply(worker, event)
        return None

    def _remove(self, worker: Worker, event: BlockRemoved) -> Reason | None:
        medium = check_removed(event)
        if isinstance(medium, Reason):
            return medium
        if _group(event) != self._groups.get(worker, _NO_GROUP):
            return None
        more, names = self._more.get(worker), names_of(event)
        for block in event.block_hashes:
            if more and (left := more[medium, names, block]):
                if left == 1:
                    del more[medium, names, block]
                else:
                    more[medium, names, block] = left - 1
            else:
                self._index.remove(worker, block, medium, names)
        return None


def _group(event: BlockStored | BlockRemoved) -> int | None:
    return None if event.group_idx is UNSET else event.group_idx
