"""The engine's side of the protocol, for simulated engines, captures and tests: a PUB and a replay ROUTER.

In: payloads. Out: numbered batches, and answers from a bounded buffer. It is no part of the daemon.
"""
