"""The sockets of an engine, for simulated engines, recordings and tests: a PUB and a ROUTER that answers replays.

In: encoded batches. Out: numbered batches on the live stream, and replay answers from a buffer of the newest batches.
The daemon does not use this package.
"""
