"""Normalizing: from the events that an engine announces to events that routers may rely on.

In: the decoded batches of one source, in order. Out: events in which every store carries whole blocks of one size. Each
block is stored once and removed once, however many copies the engine keeps. Parents come before children, and leaves go
before their parents. Media have names that routers know. Each event that is left out or refused is counted with a
reason. Nobody else changes the index. The package may use ``blocks``, ``wire``, ``stats``, ``source_spec`` and
``types``.

A batch takes two passes (``normalizer``). The first checks every event and learns block sizes from it. The second
applies the events that passed, in order. Each rule has one place:

=====================================================================  ==============================================
rule                                                                   place
=====================================================================  ==============================================
hashes, tokens, sizes and media of one event are possible              ``validate``
groups without prefixes, media, the stream's kind of hash, limits      ``Admission._verdict``
fields of another form are set aside                                   ``Admission._extras_of``
long stores are split                                                  ``Admission._parts``
which size a group's blocks have                                       ``BlockSizeDetector``, ``BlockSizes.observe``
native, cut, coarse, tail or refused                                   ``BlockSizes.treatment``
a parent that comes later in a run of stores goes first                ``stores._parents_first``
unknown parents and parents of their own                               ``StoreApplier._parent_ok``
tokens of blocks that are named by their hashes alone                  ``stores.tokens_elsewhere``
blocks whose tokens become known                                       ``StoreApplier._take_without_tokens``
limits of the index                                                    ``EngineCache.has_room``
how many copies a block has, and other tokens under a known hash       ``Copies``
names of sub-blocks, who has them, and everything announced again      ``Reblocking``
which table a removal speaks of, and what it takes away                ``Removals._meant``, ``Removals._take``
removals leave as they came or leaf first, before the next store       ``Removals._end_run``
coarse blocks and tails are remembered                                 ``SuppressedBlocks``
which media a clear empties, and as which events that leaves           ``Clears.apply``
=====================================================================  ==============================================
"""
