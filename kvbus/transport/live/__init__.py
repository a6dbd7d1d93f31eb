"""The live side of an output: numbered batches to every router, the state to those that have just subscribed.

In: batches of one stream, subscriptions of peers. Out: bytes to each peer, requests for the state, counters.
Batches are kept once for all routers (``ring``); a router is a position in them. May use: core's commands, types and
stats, and ``transport.zmtp``.
"""
