"""Simulated engines: a prefix cache with eviction, ranks and tiers, and the dialect of each engine release.

Input: a workload, which is synthetic or comes from a trace. Output: payloads in the dialect of a release, and the set
of blocks that are really live. The package may use the core's codec. It shares no logic with the normalizer, because
tests compare their results.
"""
