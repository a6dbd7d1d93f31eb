"""Captures: recorded streams as files to read, share and play again.

In: a live stream, or a file. Out: a file, or a publisher that sends as the engine did, with faults on request.
It may use ``transport`` and ``core``.
"""
