"""Captures: recorded streams as files that can be read, sent to others and played again.

In: a live stream, or a file. Out: a file, or a publisher that sends as the engine did, with faults if asked for.
It may use ``transport`` and ``core``.
"""
