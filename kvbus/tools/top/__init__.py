"""``kvbus top``: show a running bus on a terminal.

Input: ``/sources``, ``/routers``, ``/findings`` and ``/metrics`` of one bus. Output: a screen, plain lines or JSON. The
package may read only the HTTP port of the bus, and imports nothing from the daemon.
"""
