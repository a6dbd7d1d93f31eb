"""Simulated engines: a prefix cache with eviction, ranks and tiers, and the dialect of each release.

In: a workload, synthetic or from a trace. Out: payloads as that release writes them, and the true set of blocks.
It may use the core's codec; it shares no logic with the normalizer that it is held against.
"""
