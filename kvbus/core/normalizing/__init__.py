"""Normalize the events that an engine announces, so that routers can rely on them.

The input is the decoded batches of one source, in order. The output is events with these properties:

* Every store has only complete blocks, and all blocks of a group have one size.
* Each block is stored once and removed once, even if the engine keeps several copies of it.
* Parents are stored before their children, and children are removed before their parents.
* Media have names that routers know.

Each event that kvbus leaves out or refuses is counted with a reason. No other package changes the index. This package
may import ``blocks``, ``wire``, ``stats``, ``source_spec`` and ``types``.

The normalizer handles a batch in two passes (``normalizer``). The first pass checks every event and learns block sizes
from it. The second pass applies the accepted events, in order. Both passes handle usual events themselves, and leave
each unusual event to the function of its rule. A store is usual if it has the block size and the kind of hash of its
*lane*, which is one group on one medium as the engine spells it. Each rule is implemented in one place:

=====================================================================  ==============================================
rule                                                                   place
=====================================================================  ==============================================
hashes, tokens, sizes and media of one event are possible              ``check_stored``, ``check_removed``
groups without prefixes, media that are left out, number of groups     ``Lanes._open``
which stores of a lane are usual, because they teach nothing new       ``Lanes.learn``, ``GroupSizes.usual``
the stream's kind of hash                                              ``Stream.takes``
field values of an unexpected type are replaced                        ``Admission._extras_of``
long stores are split                                                  ``Admission._parts``
the block size of a group                                              ``BlockSizeDetector``, ``BlockSizes.observe``
whether blocks are sent, cut, left out or refused                      ``BlockSizes.treatment``
consecutive stores are applied with parents before children            ``stores.take_ancestors``
unknown parents, and blocks that name themselves as their parent       ``StoreApplier.parent_ok``
tokens of blocks that a store names only by their hashes               ``stores.tokens_elsewhere``
blocks whose tokens become known                                       ``StoreApplier._take_without_tokens``
limits of the index                                                    ``EngineCache.fits``
number of copies of a block, and different tokens under a known hash   ``Copies``
hashes of sub-blocks, their number, and a new division of all blocks   ``Reblocking``
the table that a removal refers to, and the blocks that it removes     ``Removals._meant``, ``Removals._take``
removals are sent unchanged or leaf first, before the next store       ``Removals._end_run``
blocks that routers do not get are remembered                          ``SuppressedBlocks``
the media that a clear empties, and the events that routers get        ``Clears.apply``
=====================================================================  ==============================================
"""
