"""Simulated engines: a prefix cache with eviction, ranks and tiers, and the dialect of each engine release.

In: a workload, synthetic or from a trace. Out: payloads in the dialect of a release, and the true set of live blocks.
The package may use the core's codec. It shares no logic with the normalizer, because tests compare their results.
"""
