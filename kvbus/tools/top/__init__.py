"""``kvbus top``: show a running bus on a terminal.

In: ``/sources``, ``/routers``, ``/findings`` and ``/metrics`` of one bus. Out: a screen, or plain lines.
It may read only the HTTP port, and imports nothing of the daemon.
"""
