"""The live side of an output: it sends numbered batches to every router, and the state to newly subscribed routers.

In: batches of one stream, subscriptions of peers. Out: bytes to each peer, requests for the state, counters.
The ``ring`` keeps each batch once for all routers, and each router has a position in the ring. The package may use
core's commands, types and stats, and ``transport.zmtp``.
"""
