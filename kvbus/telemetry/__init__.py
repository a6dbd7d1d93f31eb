"""Telemetry: the Prometheus metrics of a bus, and the readings of its sources and outputs that the HTTP port shows.

In: the core's counters at each scrape. Out: ``/metrics``. Besides the index, only this package uses prometheus_client.
No label contains a token, a hash or a topic.
"""
