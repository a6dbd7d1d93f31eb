"""Everything that kvbus reports as wrong, and how to fix it.

The log, ``/sources``, ``/routers``, the status page, ``kvbus top``, ``kvbus doctor`` and the events take their texts
from the catalogue: ``engine`` has its rows about engines, ``bus`` those about kvbus. docs/RUNBOOK.md has a section for
each row. ``source`` finds the current problems of a source. Elsewhere, the module that knows the facts evaluates a
condition, and calls the catalogue's row with these facts. ``finding`` has the types.

A finding holds as long as its condition holds. A condition about refused messages holds for ten minutes after the last
one (``Source.recent``). The daemon compares the findings of the moment with the earlier ones about once a second.
"""
