"""Simulated engines: a prefix cache with eviction, ranks and tiers, and the dialect of each release.

In: a workload, synthetic or from a trace. Out: payloads in the form of a release, and the true set of blocks.
It may use the core's codec. It shares no logic with the normalizer, because tests compare the two.
"""
