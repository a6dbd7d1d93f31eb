"""What an HTTP port of ours stands on: limits of connections, TLS whose certificates change, and a server.

In: a listening socket's connections, limits, a TLS context, what answers requests. Out: answers, and counters.
Limits and TLS use the standard library alone, below any server; the server is uvicorn's protocol.
"""
