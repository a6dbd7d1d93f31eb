"""``kvbus top``: show a running bus on a terminal.

In: ``/sources``, ``/routers``, ``/findings`` and ``/metrics`` of one bus. Out: a screen, plain lines or JSON. The
package may read only the HTTP port of the bus, and imports nothing from the daemon.
"""
