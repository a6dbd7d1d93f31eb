"""``kvbus top``: a live bus on a terminal, from its own HTTP port.

In: ``/sources``, ``/routers`` and ``/metrics`` of one bus, local or remote. Out: a screen, or plain lines.
It may use the HTTP port alone, and nothing of the bus's inside.
"""
