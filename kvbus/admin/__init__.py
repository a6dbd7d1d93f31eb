"""HTTP for people, probes and Prometheus: ``/metrics``, ``/livez``, ``/readyz``, ``/sources``, ``/blocks``, a page.

In: requests, bounded in number and time. Out: views of the relay as plain data; content only for who may read it.
It may use ``telemetry``, ``config`` and ``core``. Nothing here changes what the relay does.
"""
