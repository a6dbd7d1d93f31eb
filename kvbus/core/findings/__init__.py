"""All findings of kvbus: the problems that it reports to the operator, each with its cause and its remedy.

The catalogue has one row for each kind of finding. The module ``engine`` has the rows about engines, and ``bus`` the
rows about kvbus. The log, ``/sources``, ``/routers``, the status page, ``kvbus top``, ``kvbus doctor`` and the events
take their texts from these rows. docs/RUNBOOK.md has a section for each row. The module ``source`` finds the current
problems of a source. For any other subject, the module that knows the facts checks the condition, and calls the row
with these facts. The module ``finding`` has the types.

A finding exists while its condition holds. A condition about refused messages holds for ten minutes after the last
refused message (``Source.recent``). The daemon compares the current findings with the previous ones about once a
second.
"""
