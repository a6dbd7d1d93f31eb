"""Small modules that the packages around the core share.

They contain errors with exit codes, log lines, the ending of tasks, counters of the front, and keys and paths that were
removed. The package imports only the standard library. Every package but the core may import it.
"""
