"""The live side of an output, which sends numbered batches to every router, and the state to newly subscribed routers.

The state of a stream is a snapshot of its live blocks, as events.

In: batches of one stream, and subscriptions of peers. Out: bytes to each peer, requests for the state, and counters.
The ``ring`` of a stream keeps each of its recent batches once for all routers. For a router that reads slowly, kvbus
remembers the position of its next batch in the ring. The package may use the core's commands, types and stats, and
``transport.zmtp``.
"""
