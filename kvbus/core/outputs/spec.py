"""An output as configured."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvbus.core.wire.profiles import Profile


class Rights(msgspec.Struct, frozen=True):
    """What routers may read of the sources that they may read at all; None: all of it.

    ``loras`` is a regular expression that the names of LoRA adapters match. Who is limited to adapters, or to salts,
    reads no block without one.
    """

    loras: str | None = None
    salts: frozenset[str] | None = None


class OutputSpec(msgspec.Struct, frozen=True):
    """One output. ``topics`` has one entry per stream: as many as sources, or one where the layout is merged.

    A topic of None is the source's own. ``first_seqs`` says where each numbering begins. ``publisher_ids`` (16
    bytes each) puts the snapshot protocol's 24-byte sequence frames on this output. ``known_slots`` of a merged output
    is one past the highest slot whose rank its routers may know from a former process. With ``by_topic`` all streams
    have one endpoint: that of a source which is gone stays, with an empty state, for routers that have not heard of it.
    ``rights`` is what its routers
    may read, and ``hidden`` has the slots of sources of which they see nothing; None: they see every source.
    ``view_of`` is the number of the output that has the endpoints; None: it is this one. One that is ``closed`` is not
    served. The streams of one that is ``numbered`` have the numbers of a log, see :mod:`kvbus.core.numbered`.
    ``max_batch_blocks`` limits the blocks in a batch of a state; None: as many as routers take.
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
    """How one output's stream of a source that is added shall be; fields as in :class:`OutputSpec`."""

    topic: bytes | None = None
    first_seq: int = 0
    publisher_id: bytes = b""
    hidden: bool = False
