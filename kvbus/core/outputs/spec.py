"""The configuration of an output."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvbus.core.wire.profiles import Profile


class Rights(msgspec.Struct, frozen=True):
    """What routers may read of the sources that they see; None: everything.

    ``loras`` is a regular expression for the names of LoRA adapters. Routers that are limited to adapters, or to salts,
    read no block without one.
    """

    loras: str | None = None
    salts: frozenset[str] | None = None


class OutputSpec(msgspec.Struct, frozen=True):
    """The configuration of one output.

    * ``topics``: one entry per stream: one for each source, or a single one if the layout is merged. None: the source's
      own topic.
    * ``first_seqs``: the first seq of each stream.
    * ``publisher_ids``: 16 bytes for each stream. They put the snapshot protocol's 24-byte sequence frames on this
      output.
    * ``known_slots``: on a merged output, one past the highest slot whose rank its routers may know from a previous
      process.
    * ``by_topic``: whether all streams share one endpoint. The stream of a source that is gone then stays, with an
      empty state, for routers that have not noticed.
    * ``rights``: what its routers may read.
    * ``hidden``: slots of sources that its routers may not see. None: they see every source.
    * ``view_of``: the number of the output that has the endpoints. None: this output has them.
    * ``closed``: whether the output is not served.
    * ``numbered``: whether its streams have the numbers of a log, see :mod:`kvbus.core.numbered`.
    * ``max_batch_blocks``: maximum number of blocks in a batch of a state. None: as many as routers accept.
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
    """An output's stream of a new source. The fields are as in :class:`OutputSpec`."""

    topic: bytes | None = None
    first_seq: int = 0
    publisher_id: bytes = b""
    hidden: bool = False
