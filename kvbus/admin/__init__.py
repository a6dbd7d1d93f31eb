"""HTTP for people, probes and Prometheus: probes, metrics, sources, routers, blocks, and a page.

In: requests, limited in number and time. Out: views of the relay as plain data; token ids only for local clients.
It may use ``telemetry``, ``config`` and ``core``. It never changes the relay's state.
"""
