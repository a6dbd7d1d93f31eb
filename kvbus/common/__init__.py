"""Small modules that all packages except the core may import.

They contain errors with exit codes, logging, functions that end tasks, counters of the proxies in front of an engine's
API, and the configuration keys, commands and HTTP paths that kvbus has removed. The package itself imports only the
standard library.
"""
