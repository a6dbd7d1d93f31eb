"""What an HTTP port of ours needs below aiohttp: limits of connections, and TLS whose certificates change.

In: a listening socket's connections, limits, a TLS context. Out: bytes to aiohttp, and counters.
It may use the standard library alone.
"""
