"""Code that the packages around the core share: small modules without a dependency.

They have errors with exit codes, log lines, tasks that end, counters of the front, and keys and paths that were
removed. The package imports only the standard library. Every package but the core may import it.
"""
