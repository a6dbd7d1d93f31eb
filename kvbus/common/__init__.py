"""Small modules that all packages except the core may import.

They contain errors with exit codes, logging, functions that end tasks, and counters of the proxies in front of an
engine's API. The package itself imports only the standard library.
"""
