"""The engine's side of the protocol, for simulated engines, captures and tests: a PUB and a replay ROUTER.

In: payloads. Out: numbered batches, and replay answers from a bounded buffer. The daemon does not use this package.
"""
