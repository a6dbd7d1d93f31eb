"""The configuration of an output, in the form that the relay needs."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvbus.core.wire.profiles import Profile


class Rights(msgspec.Struct, frozen=True):
    """Limits on the blocks that an output's routers may read.

    ``loras`` is a regular expression for the names of LoRA adapters, and ``salts`` is a set of cache salts. None means
    that there is no such limit. Routers that are limited to adapters read no block without an adapter. Routers that are
    limited to salts read no block without a salt.
    """

    loras: str | None = None
    salts: frozenset[str] | None = None


class OutputSpec(msgspec.Struct, frozen=True):
    """The configuration of one output, in the form that the relay needs.

    * ``topics``: the topic of each stream. There is a stream for each source, or a single stream if ``merged`` is True.
      None stands for the topic of the source itself.
    * ``first_seqs``: the first seq of each stream.
    * ``publisher_ids``: the publisher id of each stream, 16 bytes. With such ids, the output uses the snapshot
      protocol's 24-byte sequence frames.
    * ``known_slots``: number of slots, from 0 on, whose ranks routers may still know from an earlier process of this
      kvbus. Only for a merged output.
    * ``by_topic``: whether all streams share one endpoint. The stream of a source that has left then stays readable,
      with an empty state, for routers that have not noticed that the source has left.
    * ``rights``: limits on the blocks that routers may read.
    * ``hidden``: slots of the sources that routers may not see. None means that routers see every source.
    * ``view_of``: for a view, the number of the output whose endpoints the view uses. None means that it is not a view.
      A view is a separate stream for routers whose keys have the same limited rights.
    * ``closed``: whether routers cannot read the output.
    * ``numbered``: whether the seqs of the streams are the numbers of a log's records, see :mod:`kvbus.core.log_relay`.
    * ``max_batch_blocks``: maximum number of blocks in a batch of a state. None means as many as routers accept.
    """

    name: str
    profile: Profile
    topics: Sequence[bytes | None]
    merged: bool = False
    heartbeat: float = 1.0
    journal_batches: int = 10_000
    journal_bytes: int = 2 * 1024 * 1024
    first_seqs: Sequence[int] = ()
    publisher_ids: Sequence[bytes] = ()
    known_slots: int = 0
    by_topic: bool = False
    rights: Rights = Rights()
    hidden: frozenset[int] | None = None
    view_of: int | None = None
    closed: bool = False
    numbered: bool = False
    max_batch_blocks: int | None = None


class NewStream(msgspec.Struct, frozen=True):
    """The stream that an output adds for a new source. :class:`OutputSpec` explains the other fields.

    ``hidden`` is True if the output's routers may not see the source.
    """

    topic: bytes | None = None
    first_seq: int = 0
    publisher_id: bytes = b""
    hidden: bool = False
