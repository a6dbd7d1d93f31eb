"""Telemetry: the Prometheus metrics of a bus, and the readings of its sources and outputs that the HTTP port shows.

In: the core's counters at each scrape. Out: ``/metrics``. Only this package and :mod:`kvbus.index` export metrics with
prometheus_client. No label contains a token, a hash or a topic.
"""
