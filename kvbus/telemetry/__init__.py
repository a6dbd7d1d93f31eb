"""Telemetry: Prometheus metrics.

In: the core's counters at each scrape. Out: ``/metrics``. Only this package uses prometheus_client. No label contains a
token, a hash or a topic.
"""
