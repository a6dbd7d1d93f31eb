"""Telemetry: Prometheus metrics and log lines.

In: the core's counters, read at a scrape; log records. Out: ``/metrics`` and JSON lines on stderr.
The only package that knows prometheus_client. No label and no line holds a token, a hash or a topic.
"""
