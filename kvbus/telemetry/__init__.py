"""Telemetry: Prometheus metrics and log lines.

In: the core's counters at each scrape; log records. Out: ``/metrics`` and JSON lines on stderr.
Only this package uses prometheus_client. No label and no log line contains a token, a hash or a topic.
"""
